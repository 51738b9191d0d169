"""The target's backbone (model.md): token ids to residual streams, through every layer's cache."""

from torch import Tensor

from dsv4.cache import Cache
from dsv4.model.context import Env, StepContext
from dsv4.model.layer import layer
from dsv4.params import Target


def backbone(env: Env, p: Target, cache: Cache, at: StepContext) -> tuple[Tensor, list[Tensor], Cache]:
    """Streams [T, M, D] after the last layer, the streams after each of the drafter's target layers, and the cache."""
    streams = env.ops.embed(at.ids, p.embed, env.cfg.hc_mult)
    layers, tapped = [], {}
    for i, (weights, kv) in enumerate(zip(p.layers, cache.layers, strict=True)):
        streams, kv = layer(env, weights, kv, streams, at)
        layers.append(kv)
        tapped[i] = streams
    taps = [tapped[i] for i in env.cfg.dspark_target_layer_ids]
    return streams, taps, Cache(layers=tuple(layers), context=cache.context)
