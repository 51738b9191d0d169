"""CPU kernels for the torch_npu operators of the NPU table, as their documents describe them.

Sources: the operator texts in the torch_npu 2.13.0 wheel. Where a text is silent the choice is written down here:
rounding is half to even; integer products are exact; sums are float32; rows past the counted ones hold NaN or -128, so that
whatever reads them is seen. `torch.mm` and `torch.bmm` with an `out_dtype` exist on NPUs and not on CPUs.
"""

import torch
from torch import Tensor

from dsv4.graph.npu_load import load_or_declare
from dsv4.ops import npu_schemas

_DTYPES = {3: torch.int32, 15: torch.bfloat16}
_kept: list[torch.library.Library] = []


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == x.dtype, "the text wants gamma in the type of the input"
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    assert x.ndim == 4 and rotary_mode == "interleave" and x.shape[-1] < 896
    turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    return r1 * x + r2 * turned


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = max|x| / 127, y = round(x / scale). A row of zeros divides 0 by 0 in the text; here: zeros and scale 0."""
    scale = x.abs().amax(-1) / 127
    return torch.round(x / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)).to(torch.int8), scale


def _dynamic_quant(x: Tensor, *, smooth_scales=None, group_index=None, dst_type=None, quant_mode="pertoken",
                   dst_type_max=0.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert x.dtype in (torch.bfloat16, torch.float16) and smooth_scales is None
    return _quantise(x.float())


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).float()


def _quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, *, offset=None, pertoken_scale=None, bias=None,
                  output_dtype=None, **_) -> Tensor:  # fmt: skip
    """The text does not say whether `scale` acts on an int32 result; deployed code dequantises afterwards, so: it does not."""
    assert scale.ndim == 1 and x1.dtype == x2.dtype == torch.int8
    product = _dot(x1, x2)
    if _DTYPES[output_dtype] == torch.int32:
        assert pertoken_scale is None
        return product.to(torch.int32)
    assert x1.ndim == 2 and pertoken_scale.shape == x1.shape[:1]
    return (product * pertoken_scale.unsqueeze(1) * scale).to(_DTYPES[output_dtype])


def _transpose_batchmatmul(x: Tensor, weight: Tensor, *, bias=None, scale=None, perm_x1=None, perm_x2=None, perm_y=None,
                           batch_split_factor=1) -> Tensor:  # fmt: skip
    assert perm_x1 == [1, 0, 2] and x.dtype == weight.dtype
    return (x.float().transpose(0, 1) @ weight.float()).to(x.dtype).transpose(0, 1).contiguous()


def _scatter_nd_update_(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Rows named twice: the text is silent; all our duplicates carry equal rows or land in the null page."""
    allowed = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)
    assert x.dtype == updates.dtype and x.dtype in allowed and indices.shape[-1] == 1
    return x.index_put_((indices.squeeze(-1).long(),), updates)


def _indexer(query, key, weights, query_dequant_scale, key_dequant_scale, query_quant_mode, key_quant_mode, *,
             actual_seq_lengths_query=None, actual_seq_lengths_key=None, block_table=None, layout_query="BSND",
             layout_key="BSND", sparse_count=2048, sparse_mode=3, **_) -> Tensor:  # fmt: skip
    """Order among the chosen is undocumented: best first here. Equal scores: lowest entry first here."""
    assert weights.dtype == query_dequant_scale.dtype == key_dequant_scale.dtype == torch.float16
    assert layout_key == "PA_BSND" and sparse_mode == 0 and query.shape[1] == 1
    size = key.shape[1]
    out = torch.full((query.shape[0], 1, 1, sparse_count), -1, dtype=torch.int32)
    for b, length in enumerate(actual_seq_lengths_key.tolist()):
        if not length:
            continue
        blocks = block_table[b, : -(-length // size)].long()
        k = key[blocks].flatten(0, 1)[:length, 0].float()
        k_scale = key_dequant_scale[blocks].flatten()[:length].float()
        dots = torch.relu(query[b, 0].float() @ k.T) * (weights[b, 0] * query_dequant_scale[b, 0]).float().unsqueeze(1)
        order = (dots.sum(0) * k_scale).sort(descending=True, stable=True).indices[:sparse_count]
        out[b, 0, 0, : len(order)] = order.to(torch.int32)
    return out


def _grouped_matmul(x, weight, *, scale=None, per_token_scale=None, group_list=None, split_item=0, group_type=None,
                    group_list_type=0, output_dtype=None, **_) -> list[Tensor]:  # fmt: skip
    assert (split_item, group_type, group_list_type) == (2, 0, 1) and group_list.dtype == torch.int64
    (rows,), (w,), dtype = x, weight, _DTYPES[output_dtype]
    filler = -128 if dtype == torch.int32 else torch.nan
    out, first = torch.full((rows.shape[0], w.shape[2]), filler, dtype=dtype), 0
    for e, count in enumerate(group_list.tolist()):
        part = slice(first, first + count)
        product = _dot(rows[part], w[e])
        if scale is not None:
            assert scale[0].dtype == dtype == torch.bfloat16, "the scale comes in the type of the result"
            product = product * scale[0][e].float() * per_token_scale[0][part].unsqueeze(1)
        out[part], first = product.to(dtype), first + count
    return [out]


def _dequant_swiglu_quant(x, *, weight_scale=None, activation_scale=None, bias=None, quant_scale=None, quant_offset=None,
                          group_index=None, activate_left=False, quant_mode=0, swiglu_mode=0, clamp_limit=7.0,
                          glu_alpha=1.702, glu_bias=1.0, **_) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The variant's formula is the one of npu_clipped_swiglu, whose text gives it; quantisation as npu_dynamic_quant."""
    assert x.dtype == torch.int32 and weight_scale.ndim == 2 and activate_left and (quant_mode, swiglu_mode) == (1, 1)
    counts = [x.shape[0]] if group_index is None else group_index.tolist()
    y = torch.full((x.shape[0], x.shape[1] // 2), -128, dtype=torch.int8)
    scale, first = torch.full((x.shape[0],), torch.nan), 0
    for g, count in enumerate(counts):
        part = slice(first, first + count)
        gate, up = (x[part].float() * weight_scale[g] * activation_scale[part].unsqueeze(1)).chunk(2, -1)
        gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
        h = gate * torch.sigmoid(glu_alpha * gate) * (up + glu_bias)
        y[part], scale[part] = _quantise(h)
        first += count
    return y, scale


def _init_routing(x, expert_idx, *, active_num=-1, expert_num=-1, expert_tokens_num_type=0, expert_tokens_num_flag=False,
                  quant_mode=-1, active_expert_range=(), row_idx_type=0, **_):  # fmt: skip
    """Rows of one expert keep their order: the text does not say so."""
    assert expert_idx.min() >= 0 and expert_idx.max() < expert_num and row_idx_type == 0 and quant_mode == 1
    assert expert_tokens_num_type == 1 and expert_tokens_num_flag
    low, high = active_expert_range
    flat = expert_idx.flatten().long()
    order = torch.sort(torch.where((flat >= low) & (flat < high), flat, expert_num), stable=True).indices
    inside = int(((flat >= low) & (flat < high)).sum())
    rows, scale = _quantise(x[order // expert_idx.shape[1]].float())
    back = torch.full_like(flat, -1, dtype=torch.int32)
    back[order[:inside]] = torch.arange(inside, dtype=torch.int32)
    rows[inside:], scale[inside:] = -128, torch.nan
    return rows, back, torch.bincount(flat, minlength=expert_num)[low:high], scale


def _finalize_routing(rows, skip1, skip2, bias, scales, back, export_for_source_row, drop_pad_mode=0, k=1) -> Tensor:
    """drop_pad_mode 2 takes routes row by row (torchair's and vLLM's use of it; the text lists 0 only)."""
    assert drop_pad_mode == 2 and scales.dtype == rows.dtype
    picked = rows[back.long()].view(*scales.shape, -1).float()
    total = (picked * scales.float().unsqueeze(-1)).sum(1)
    return (total if skip1 is None else total + skip1.float()).to(rows.dtype)


def _dispatch(x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, *, quant_mode=0, **_):
    """A group of one rank: rows sorted by expert; `assist_info` is opaque, here it holds each route's row."""
    assert ep_world_size == 1 and quant_mode == 2 and x.dtype == torch.bfloat16
    rows, back, counts, scale = _init_routing(
        x, expert_ids, expert_num=moe_expert_num, expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=1,
        active_expert_range=(0, moe_expert_num),
    )  # fmt: skip
    info = torch.zeros(rows.shape[0] * 128, dtype=torch.int32)
    info[: len(back)] = back
    return rows, scale, info, counts, counts.to(torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros_like(scale)


def _combine(expand_x, expert_ids, assist_info, ep_send_counts, expert_scales, *_, **__) -> Tensor:
    picked = expand_x[assist_info[: expert_ids.numel()].long()].view(*expert_ids.shape, -1).float()
    return (picked * expert_scales.unsqueeze(-1)).sum(1).to(expand_x.dtype)


def _wide(product):
    return lambda a, b, out_dtype: product(a.to(out_dtype), b.to(out_dtype))


_KERNELS = {
    "npu_rms_norm": _rms_norm, "npu_rotary_mul": _rotary_mul, "npu_dynamic_quant": _dynamic_quant,
    "npu_quant_matmul": _quant_matmul, "npu_transpose_batchmatmul": _transpose_batchmatmul,
    "npu_scatter_nd_update_": _scatter_nd_update_, "npu_quant_lightning_indexer": _indexer,
    "npu_grouped_matmul": _grouped_matmul, "npu_dequant_swiglu_quant": _dequant_swiglu_quant,
    "npu_moe_init_routing_v2": _init_routing, "npu_moe_finalize_routing": _finalize_routing,
    "npu_moe_distribute_dispatch_v2": _dispatch, "npu_moe_distribute_combine_v2": _combine,
}  # fmt: skip


def install() -> None:
    """Registers the kernels for CPU tensors; once per process."""
    if _kept:
        return
    load_or_declare()
    assert set(_KERNELS) == set(npu_schemas.used())
    npu, aten = torch.library.Library("npu", "IMPL"), torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        npu.impl(name, kernel, "CPU")
    aten.impl("mm.dtype", _wide(torch.mm), "CPU")
    aten.impl("bmm.dtype", _wide(torch.bmm), "CPU")
    _kept.extend([npu, aten])
