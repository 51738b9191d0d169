"""DSpark's stages (drafter.md sections 2 and 3): context keys from the target's taps, and the block of query rows."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache import Cache
from dsv4.model.attention import keys, output, queries
from dsv4.model.context import Env, StepContext
from dsv4.model.layer import enter
from dsv4.model.moe import feed_forward
from dsv4.params import Drafter, Layer


def write_context(env: Env, p: Drafter, cache: Cache, taps: list[Tensor], at: StepContext) -> Cache:
    """Every stage's context row of every token in the step.

    Rejected rows are written too: they lie beyond the committed position, nothing sees them, and the next step rewrites them.
    """
    ops, eps = env.ops, env.cfg.rms_norm_eps
    ctx = ops.rms_norm(ops.linear(ops.taps(taps), p.main_proj), p.main_norm, eps)
    q = env.cfg.q_lora_rank
    context = []
    for stage, pool in zip(p.stages, cache.context, strict=True):
        kv = ops.linear(ctx, stage.attn.w_in[q : q + env.cfg.head_dim])
        context.append(ops.scatter(pool, at.window_slots, keys(env, stage.attn, kv, at.rope, pool.dtype)))
    return Cache(layers=cache.layers, context=tuple(context))


@dataclass(frozen=True, kw_only=True)
class Block:
    """Where the K query rows of each request sit: ids, positions [R*K], rope [R*K, r], context_rows [R, W], own [R, K]."""

    ids: Tensor
    positions: Tensor
    rope: Tensor
    context_rows: Tensor
    own: Tensor


def _attention(env: Env, p: Layer, context: Tensor, x: Tensor, at: Block) -> Tensor:
    """Every query row sees the context window and the whole block: no causal mask, no sliding with the row."""
    cfg, ops, attn = env.cfg, env.ops, p.attn
    qr, kv = ops.linear(x, attn.w_in).split([cfg.q_lora_rank, cfg.head_dim], 1)
    q, _ = queries(env, attn, ops.rms_norm(qr, attn.q_norm, cfg.rms_norm_eps), at.rope, context.dtype)
    block = keys(env, attn, kv, at.rope, context.dtype)
    o = ops.attention(
        q, context, at.context_rows, block, at.own, None, attn.sink, at.rope, cfg.head_dim**-0.5
    )  # fmt: skip
    return output(env, attn, o)


def run_block(env: Env, p: Drafter, embed: Tensor, cache: Cache, at: Block) -> Tensor:
    """Streams [R*K, M, D] of the query rows after the last stage."""
    streams = env.ops.embed(at.ids, embed, env.cfg.hc_mult)
    for stage, context in zip(p.stages, cache.context, strict=True):
        x, post, comb = enter(env, streams, stage.hc_attn, stage.attn_norm)
        streams = env.ops.hc_post(streams, _attention(env, stage, context, x, at), post, comb)
        x, post, comb = enter(env, streams, stage.hc_ffn, stage.ffn_norm)
        y = feed_forward(env, stage.router, stage.experts, x, None, at.positions)
        streams = env.ops.hc_post(streams, y, post, comb)
    return streams
