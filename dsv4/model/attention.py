"""Attention of the three layer kinds (model.md sections 2, 4, 5, 6). Pure: (params, cache, x) -> (output, cache)."""

from dataclasses import replace

from torch import Tensor

from dsv4.cache import CsaCache, HcaCache, LayerCache, WindowCache
from dsv4.model.context import Env, StepContext
from dsv4.ops.collectives import all_columns, all_reduce
from dsv4.params import CsaAttention, HcaAttention, WindowAttention


def queries(env: Env, p: WindowAttention, qr: Tensor, rope: Tensor, dtype) -> tuple[Tensor, Tensor]:
    """q [T, H, d], normed per head and rotated; and what else wq_b gives (the indexer's queries, or nothing)."""
    cfg, ops = env.cfg, env.ops
    heads = p.sink.shape[0]
    q, rest = _split(ops.linear(qr, p.wq_b), heads * cfg.head_dim, p.wq_b.shape[0] - heads * cfg.head_dim)
    return ops.rope(q.unflatten(1, (heads, cfg.head_dim)), rope, None, cfg.rms_norm_eps, dtype), rest


def keys(env: Env, p: WindowAttention, kv: Tensor, rope: Tensor, dtype) -> Tensor:
    """The shared key = value row [T, d]: normed, rotated, in the cache's dtype."""
    return env.ops.rope(kv.unsqueeze(1), rope, p.kv_norm, env.cfg.rms_norm_eps, dtype).squeeze(1)


def output(env: Env, p: WindowAttention, o: Tensor) -> Tensor:
    """[T, H, d] heads -> [T, D]: grouped low-rank projection, int8 per (token, group), summed over TP."""
    groups, mesh = p.wo_a.shape[0], env.mesh
    z = env.ops.grouped_linear(o.reshape(o.shape[0], groups, -1), p.wo_a).flatten(1)
    if mesh.exact:
        return all_columns(env.ops.linear(all_columns(z, mesh), p.wo_b, env.cfg.o_groups), mesh)
    return all_reduce(env.ops.linear(z, p.wo_b, groups), mesh.tp_group)


def swa(env: Env, p: WindowAttention, cache: WindowCache, x: Tensor, at: StepContext) -> tuple[Tensor, WindowCache]:
    """Sliding window only."""
    cfg, ops = env.cfg, env.ops
    qr, kv = _split(ops.linear(x, p.w_in), cfg.q_lora_rank, cfg.head_dim)
    q, _ = queries(env, p, ops.rms_norm(qr, p.q_norm, cfg.rms_norm_eps), at.rope, cache.kv.dtype)
    pool = ops.scatter(cache.kv, at.window_slots, keys(env, p, kv, at.rope, cache.kv.dtype))
    o = ops.attention(q, pool, at.window_rows, None, None, None, p.sink, at.rope, cfg.head_dim**-0.5)
    return output(env, p, o), replace(cache, kv=pool)


def hca(env: Env, p: HcaAttention, cache: HcaCache, x: Tensor, at: StepContext) -> tuple[Tensor, HcaCache]:
    """Window plus every visible entry of ratio 128."""
    cfg, ops = env.cfg, env.ops
    d, dtype = cfg.head_dim, cache.kv.dtype
    qr, kv, state = _split(ops.linear(x, p.w_in), cfg.q_lora_rank, d, 2 * d)
    q, _ = queries(env, p, ops.rms_norm(qr, p.q_norm, cfg.rms_norm_eps), at.rope_yarn, dtype)
    pool = ops.scatter(cache.kv, at.window_slots, keys(env, p, kv, at.rope_yarn, dtype))
    rows = ops.write_state(cache.state, at.open_slots, state, p.compressor.ape, at.positions)
    closed = ops.compress(rows, at.hca_rows, p.compressor.norm, at.hca_rope, cfg.rms_norm_eps, dtype)
    entries = ops.scatter(cache.entries, at.hca_slots, closed)
    # A history page holds one HCA entry, so the page table itself lists the entries' pool rows.
    o = ops.attention(
        q, pool, at.window_rows, entries, at.history, at.hca_visible, p.sink, at.rope_yarn, d**-0.5
    )  # fmt: skip
    return output(env, p, o), replace(cache, kv=pool, state=rows, entries=entries)


def csa(env: Env, p: CsaAttention, cache: CsaCache, x: Tensor, at: StepContext) -> tuple[Tensor, CsaCache]:
    """Window plus the indexer's choice among entries of ratio 4."""
    cfg, ops = env.cfg, env.ops
    d, di, dtype = cfg.head_dim, cfg.index_head_dim, cache.kv.dtype
    qr, kv, state, index_state, weights = _split(
        ops.linear(x, p.w_in), cfg.q_lora_rank, d, 4 * d, 4 * di, cfg.index_n_heads
    )
    q, iq = queries(env, p, ops.rms_norm(qr, p.q_norm, cfg.rms_norm_eps), at.rope_yarn, dtype)
    pool = ops.scatter(cache.kv, at.window_slots, keys(env, p, kv, at.rope_yarn, dtype))

    rows = ops.write_state(cache.state, at.tail_slots, state, p.compressor.ape, at.positions)
    closed = ops.compress(rows, at.csa_rows, p.compressor.norm, at.csa_rope, cfg.rms_norm_eps, dtype)
    entries = ops.scatter(cache.entries, at.csa_slots, closed)

    inner = p.index_compressor
    index_rows = ops.write_state(cache.index_state, at.tail_slots, index_state, inner.ape, at.positions)
    key = ops.compress(index_rows, at.csa_rows, inner.norm, at.csa_rope, cfg.rms_norm_eps, dtype).unsqueeze(1)
    iq = ops.rope(iq.unflatten(1, (cfg.index_n_heads, di)), at.rope_yarn, None, None, dtype)
    iq_scale = index_scale = None
    if cache.index_scale is not None:  # W8A8: both sides rotated and int8; in float the rotation cancels in the product
        iq, iq_scale = ops.hadamard_quantise(iq)
        key, key_scale = ops.hadamard_quantise(key)
        index_scale = ops.scatter(cache.index_scale, at.csa_slots, key_scale.squeeze(1))
    index_keys = ops.scatter(cache.index_keys, at.csa_slots, key.squeeze(1))
    chosen = ops.index_topk(
        iq, iq_scale, weights, index_keys, index_scale, at.history, at.csa_visible, cfg.index_topk,
        (di * cfg.index_n_heads) ** -0.5,
    )  # fmt: skip
    o = ops.attention(
        q, pool, at.window_rows, entries, chosen, at.csa_visible, p.sink, at.rope_yarn, d**-0.5
    )  # fmt: skip
    return output(env, p, o), CsaCache(
        kv=pool, state=rows, entries=entries, index_state=index_rows, index_keys=index_keys, index_scale=index_scale
    )


ATTENTION = {WindowAttention: swa, HcaAttention: hca, CsaAttention: csa}


def attention(env: Env, p: WindowAttention, cache: LayerCache, x: Tensor, at: StepContext) -> tuple[Tensor, LayerCache]:
    """Dispatches on the layer's type."""
    return ATTENTION[type(p)](env, p, cache, x, at)


def _split(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return x.split(list(sizes), 1)
