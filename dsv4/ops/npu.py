"""The op table of Ascend NPUs: torch_npu's fused operators where one fits V4, convertible primitives elsewhere.

Every function has the signature and, up to the roundings named here, the values of its `plain` twin. What differs: matrices
come as `npu_params.prepare` leaves them; activations are rounded to bf16 before int8 quantisation (the dynamic quantiser
takes no float32), and int8 products come out in bf16. Nothing here imports torch_npu: the operators are looked up by name
when a step is captured, so that tests can stand in for them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.errors import ConfigError
from dsv4.mesh import SINGLE, Mesh
from dsv4.ops import npu_hyper, npu_moe, plain
from dsv4.ops.npu_attention import attend, index_topk, product, rows_of
from dsv4.ops.npu_moe import BF16, INT32
from dsv4.ops.npu_params import Packed
from dsv4.ops.npu_slots import Plugins, installed
from dsv4.ops.table import OpSet, op_names


def embed(ids: Tensor, table: Tensor, streams: int) -> Tensor:
    """See `plain.embed`."""
    return table.index_select(0, ids).float().unsqueeze(1).repeat(1, streams, 1)


take = rows_of


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """See `plain.rms_norm`."""
    return torch.ops.npu.npu_rms_norm(x, gamma, eps)[0]


def _turns(cos_sin: Tensor, width: int, back: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, 1, width] as the rotary kernel multiplies them: every value twice, and in front, where nothing
    turns, ones and zeros: one kernel over whole rows costs less than splitting them and joining them again."""

    def spread(half: Tensor, fill: float) -> Tensor:
        twice = half.float().unsqueeze(-1).expand(-1, -1, 2).flatten(1)
        still = torch.full((half.shape[0], width - twice.shape[1]), fill, device=half.device)
        return torch.cat([still, twice], 1).view(-1, 1, 1, width)

    cos, sin = cos_sin.chunk(2, -1)
    return spread(cos, 1.0), spread(-sin if back else sin, 0.0)


def _rotate(x: Tensor, cos_sin: Tensor, dtype: torch.dtype, back: bool = False) -> Tensor:
    """Turns x [T, 1, H, d] by interleaved pairs of its trailing channels; [T, H, d]."""
    cos, sin = _turns(cos_sin, x.shape[-1], back)
    return torch.ops.npu.npu_rotary_mul(x, cos, sin, "interleave").to(dtype).squeeze(1)


def rope(x: Tensor, cos_sin: Tensor, gamma: Tensor | None, eps: float | None, dtype: torch.dtype) -> Tensor:
    """See `plain.rope`."""
    x = x.float().unsqueeze(1)
    if eps is not None:
        weight = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if gamma is None else gamma
        x, _ = torch.ops.npu.npu_rms_norm(x, weight, eps)
    return _rotate(x, cos_sin, dtype)


def linear(x: Tensor, w: Packed, groups: int = 1) -> Tensor:
    """See `plain.linear`: float weights accumulate in float32; int8 ones quantise x per (token, group).

    A weight with a leading group axis keeps exact int32 products until its groups are summed.
    """
    npu = torch.ops.npu
    if w.scale is None:
        return product(x.to(w.dtype), w.values)
    if w.values.ndim == 2:
        q, scale = npu.npu_dynamic_quant(x.bfloat16())
        return npu.npu_quant_matmul(q, w.values, w.scale, pertoken_scale=scale, output_dtype=BF16).float()
    q, scale = npu.npu_dynamic_quant(x.bfloat16().unflatten(1, (groups, -1)).transpose(0, 1).contiguous())
    parts = npu.npu_quant_matmul(q, w.values, w.scale, output_dtype=INT32)
    return (parts.float() * scale.unsqueeze(-1)).sum(0) * w.scale


def grouped_linear(x: Tensor, w: Packed) -> Tensor:
    """See `plain.grouped_linear`; the result is rounded to w's dtype."""
    return torch.ops.npu.npu_transpose_batchmatmul(x.to(w.dtype), w.values, perm_x1=[1, 0, 2]).float()


def scatter(pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """See `plain.scatter`. int32 (row state, a few hundred values) has no in-place row kernel and is rewritten whole."""
    rows = rows.to(pool.dtype)
    if pool.dtype == torch.int32:
        index = slots.long().view(-1, *[1] * (rows.ndim - 1)).expand(rows.shape)
        return pool.copy_(pool.scatter(0, index, rows))
    return torch.ops.npu.npu_scatter_nd_update_(pool, slots.unsqueeze(1), rows)


def write_state(pool: Tensor, slots: Tensor, rows: Tensor, ape: Tensor, positions: Tensor) -> Tensor:
    """See `plain.write_state`; `prepare` puts zeros for the values in front of ape's columns."""
    return scatter(pool, slots, rows + ape.index_select(0, positions.clamp(min=0) % ape.shape[0]))


def compress(state: Tensor, rows: Tensor, gamma: Tensor, cos_sin: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `plain.compress`. Reads only the halves it needs: the pool is seen as parts of d channels."""
    d, m = gamma.shape[0], rows.shape[1]
    parts = state.shape[1] // d  # values | gates, each a | b with overlap
    half = torch.arange(m, dtype=torch.int32, device=rows.device) // (m // 2) if parts == 4 else 0
    where = rows.clamp(min=0) * parts + half
    pool = state.view(-1, d)
    values, gates = rows_of(pool, where), rows_of(pool, where + parts // 2)
    weights = (gates + torch.where(rows >= 0, 0.0, -1e30).unsqueeze(-1)).softmax(1)
    entry = (weights * values).sum(1)
    return rope(entry.unsqueeze(1), cos_sin, gamma, eps, dtype).squeeze(1)


def hadamard(d: int, like: Tensor) -> Tensor:
    """The Sylvester-Hadamard matrix of signs, built from one element so that a graph holds no large constant."""
    signs = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while signs.shape[0] < d:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs


def hadamard_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `plain.hadamard_quantise`."""
    d = x.shape[-1]
    rows = x.bfloat16().view(-1, d)
    turned = product(rows, hadamard(d, rows)) * d**-0.5
    q, scale = torch.ops.npu.npu_dynamic_quant(turned.bfloat16())
    return q.view(x.shape), scale.view(x.shape[:-1])


def argmax(logits: Tensor) -> Tensor:
    """See `plain.argmax`; among equals the device's kernel decides, whose text promises no order."""
    return logits.max(-1)[1].to(torch.int32)


def markov(base: Tensor, w1: Tensor, w2: Packed, anchor: Tensor) -> Tensor:
    """See `plain.markov`."""
    tokens = []
    for step in base.unbind(1):
        anchor = argmax(step + linear(take(w1, anchor), w2))
        tokens.append(anchor)
    return torch.stack(tokens, 1)


def commit(
    slots: Tensor, tokens: Tensor, count: Tensor, ended: Tensor, anchor: Tensor, position: Tensor, limit: Tensor
) -> None:
    """See `plain.commit`."""
    last = torch.gather(tokens, 1, (count - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
    scatter(anchor, slots, torch.where(count > 0, last, take(anchor, slots)))
    scatter(position, slots, take(position, slots) + count)
    scatter(limit, slots, torch.where(ended > 0, 0, take(limit, slots)))


def _attention(query_len: int):
    def attention(q, kv, kv_rows, entries, entry_rows, entry_count, sink, cos_sin, scale) -> Tensor:
        """See `plain.attention`."""
        out = attend(q, kv, kv_rows, entries, entry_rows, entry_count, sink, scale, query_len)
        return _rotate(out.unsqueeze(1), cos_sin, q.dtype, back=True)

    return attention


def _communicator(group: str) -> str:
    """The dispatch kernels' name for a process group: HCCL's where HCCL carries it, else (capture) its own."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    resolved = _resolve_process_group(group)
    if "hccl" not in dist.get_backend(resolved):
        return group
    backend = resolved._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(dist.get_rank(resolved))


def npu_ops(query_len: int, mesh: Mesh = SINGLE, *, plugins: Plugins | None = None) -> OpSet:
    """The table for programs of `query_len` tokens a row, on one rank.

    With an EP group `moe` exchanges rows itself, and the mesh has to say so (`ops_exchange`). `plugins` fill slots with
    operators of an installed package (default: whatever is installed, see `npu_slots`). Raises ConfigError.
    """
    own = {name: globals().get(name) for name in op_names()}
    shared_forms = {name: getattr(plain, name) for name in ("taps", "addresses", "draft_addresses", "begin", "accept")}
    own |= shared_forms | {"attention": _attention(query_len), "index_topk": index_topk}
    own |= {name: getattr(npu_hyper, name) for name in ("hc_pre", "hc_post", "hc_head")}
    own |= {name: getattr(npu_moe, name) for name in ("route", "route_hash", "moe")}
    if mesh.ep_group is not None:
        if not mesh.ops_exchange:
            raise ConfigError("NPU operators exchange expert rows themselves: join the mesh with ops_exchange=True")
        own["moe"] = npu_moe.exchanging_moe(_communicator(mesh.ep_group), mesh.ep, mesh.rank)
    table = OpSet(name="npu", **own)
    return replace(table, **(installed() if plugins is None else plugins))
