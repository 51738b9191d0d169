"""Routing and experts on an NPU.

Three fused kernels carry an expert: grouped matmul (int8, exact int32 out), dequant + clamped SwiGLU + requant, grouped
matmul (bf16 out). Rows reach their experts by `npu_moe_init_routing_v2` within a rank, and by dispatch and combine between
ranks. The second product's channel scale is bf16, because a grouped matmul wants it in the dtype of its result.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.ops.npu_params import ExpertStack, Packed

INT32, BF16 = 3, 15  # the numbers torch_npu operators take for dtypes
DISPATCH_ROWS = 256  # rows a rank may hand to one dispatch (A2's limit; A3 takes 512)
GROUPED = {"split_item": 2, "group_type": 0, "group_list_type": 1}  # one output tensor; groups over rows, as counts


def _affinity(x: Tensor, gate: Packed) -> Tensor:
    """sqrt(softplus(x gate^T))."""
    return torch.sqrt(F.softplus(x @ gate.values))


def _weigh(scores: Tensor, ids: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Ids and weights. Padding, which the routing kernels do not know, gets real experts in turn and weight 0."""
    weights = torch.gather(scores, 1, ids.long())
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    turn = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape) % scores.shape[1]
    live = positions.unsqueeze(1) >= 0
    return torch.where(live, ids.to(torch.int32), turn), torch.where(live, weights, 0.0)


def route(x: Tensor, gate: Packed, bias: Tensor, positions: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """See `plain.route`; padding as `_weigh` says. Among equal scores the order is the device's: topk documents none."""
    scores = _affinity(x, gate)
    return _weigh(scores, torch.topk(scores + bias, k, -1)[1], positions, scale)


def route_hash(
    x: Tensor, gate: Packed, tid2eid: Tensor, ids: Tensor, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See `plain.route_hash`; padding as `_weigh` says."""
    return _weigh(_affinity(x, gate), tid2eid.index_select(0, ids.clamp(min=0)), positions, scale)


def _swiglu_quant(x: Tensor, weight_scale: Tensor, scale: Tensor, limit: float, counts: Tensor | None):
    """int32 product to int8 and its row scale: silu(min(gate, limit)) * clamp(up), gate in the first half."""
    return torch.ops.npu.npu_dequant_swiglu_quant(
        x, weight_scale=weight_scale, activation_scale=scale, group_index=counts, activate_left=True, quant_mode=1,
        swiglu_mode=1, clamp_limit=limit, glu_alpha=1.0, glu_bias=0.0,
    )  # fmt: skip


def _routed(rows: Tensor, scale: Tensor, counts: Tensor, w13: ExpertStack, w2: ExpertStack, limit: float) -> Tensor:
    """bf16 [n, D] of int8 rows sorted by expert; rows past the sum of counts are undefined."""
    npu = torch.ops.npu
    up = npu.npu_grouped_matmul([rows], [w13.routed.values], group_list=counts, output_dtype=INT32, **GROUPED)[0]
    h, h_scale = _swiglu_quant(up, w13.routed.scale, scale, limit, counts)
    return npu.npu_grouped_matmul(
        [h], [w2.routed.values], scale=[w2.last_scale], per_token_scale=[h_scale], group_list=counts,
        output_dtype=BF16, **GROUPED,
    )[0]  # fmt: skip


def shared(x: Tensor, w13: ExpertStack, w2: ExpertStack, limit: float) -> Tensor:
    """The shared expert on bf16 x, bf16 [T, D]."""
    npu = torch.ops.npu
    q, scale = npu.npu_dynamic_quant(x)
    up = npu.npu_quant_matmul(q, w13.shared.values, w13.shared.scale, output_dtype=INT32)
    h, h_scale = _swiglu_quant(up, w13.shared.scale.unsqueeze(0), scale, limit, None)
    return npu.npu_quant_matmul(h, w2.shared.values, w2.shared.scale, pertoken_scale=h_scale, output_dtype=BF16)


def moe(x: Tensor, ids: Tensor, weights: Tensor, w13: ExpertStack, w2: ExpertStack, limit: float, first: int) -> Tensor:
    """See `plain.moe`, for a rank that holds every expert (`first` is 0): rows are sorted by expert and put back."""
    npu = torch.ops.npu
    experts = w13.routed.shape[0]
    rows, back, counts, scale = npu.npu_moe_init_routing_v2(
        x, ids, active_num=ids.numel(), expert_num=experts, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, quant_mode=1, active_expert_range=[0, experts],
    )  # fmt: skip
    y = _routed(rows, scale, counts, w13, w2, limit)
    y = npu.npu_moe_finalize_routing(  # 2: routes lie row by row
        y, shared(x.bfloat16(), w13, w2, limit), None, None, weights.bfloat16(), back, None, 2
    )
    return y.float()


def exchanging_moe(group: str, ranks: int, rank: int) -> Callable[..., Tensor]:
    """`moe` for one rank of an EP group: its own rows in and out, whoever holds their experts.

    `group` is the communicator's name (HCCL's on a device). Every rank calls it with the same number of rows. The result is
    bf16: it is rounded so anyway, and half as many bytes are gathered within TP.
    """

    def block(x: Tensor, ids: Tensor, weights: Tensor, w13: ExpertStack, w2: ExpertStack, limit: float) -> Tensor:
        npu = torch.ops.npu
        experts = w13.routed.shape[0] * ranks
        rows, scale, places, counts, received, *_ = npu.npu_moe_distribute_dispatch_v2(
            x, ids, group, ranks, rank, experts, quant_mode=2, shared_expert_num=0
        )
        y = _routed(rows, scale, counts, w13, w2, limit)
        return npu.npu_moe_distribute_combine_v2(
            y, ids, places, received, weights, group, ranks, rank, experts, shared_expert_num=0
        )

    def exchange(
        x: Tensor, ids: Tensor, weights: Tensor, w13: ExpertStack, w2: ExpertStack, limit: float, first: int
    ) -> Tensor:
        rounded = x.bfloat16()
        count = -(-x.shape[0] // DISPATCH_ROWS)
        parts = zip(*(t.chunk(count) if count > 1 else (t,) for t in (rounded, ids, weights)), strict=True)
        y = [block(*part, w13, w2, limit) for part in parts]
        routed = torch.cat(y) if count > 1 else y[0]
        return routed + shared(rounded, w13, w2, limit)

    return exchange
