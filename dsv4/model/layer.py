"""One layer: two sublayers, each inside its own hyper-connection (model.md section 1)."""

from torch import Tensor

from dsv4.cache import LayerCache
from dsv4.model.attention import attention
from dsv4.model.context import Env, StepContext
from dsv4.model.moe import feed_forward
from dsv4.params import HyperConnection, HyperHead, Layer, Matrix


def enter(env: Env, streams: Tensor, hc: HyperConnection, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sublayer's normed input x [T, D], and post, comb for the way back. `pre` acts on this same sublayer."""
    cfg = env.cfg
    return env.ops.hc_pre(
        streams, hc.fn, hc.base, hc.scale, gamma, cfg.hc_sinkhorn_iters, cfg.rms_norm_eps, cfg.hc_eps
    )  # fmt: skip


def layer(env: Env, p: Layer, cache: LayerCache, streams: Tensor, at: StepContext) -> tuple[Tensor, LayerCache]:
    """X = mix(X, attention); X = mix(X, experts)."""
    x, post, comb = enter(env, streams, p.hc_attn, p.attn_norm)
    y, cache = attention(env, p.attn, cache, x, at)
    streams = env.ops.hc_post(streams, y, post, comb)
    x, post, comb = enter(env, streams, p.hc_ffn, p.ffn_norm)
    y = feed_forward(env, p.router, p.experts, x, at.ids, at.positions)
    return env.ops.hc_post(streams, y, post, comb), cache


def logits(env: Env, hc: HyperHead, gamma: Tensor, head: Matrix, streams: Tensor) -> tuple[Tensor, Tensor]:
    """(h [n, D] before the norm, logits f32 [n, V/tp]) of the given rows' streams."""
    h, normed = env.ops.hc_head(streams, hc.fn, hc.base, hc.scale, gamma, env.cfg.rms_norm_eps, env.cfg.hc_eps)
    return h, env.ops.linear(normed, head)
