"""The torch_npu operators that our table calls, declared where torch_npu is not installed: names, arguments and shapes.

With them a step can be captured and costed on any host; they have no kernel. Where torch_npu is installed, its own
declarations are used and these are not (a test holds the two equal).
"""

from collections.abc import Callable

import torch
from torch import Tensor

_ROUTES = "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0"
_SCHEMAS = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)",
    "npu_rotary_mul": '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor',
    "npu_dynamic_quant": '(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, '
    'str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)',
    "npu_quant_matmul": "(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
    "Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
    "int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
    "npu_transpose_batchmatmul": "(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, "
    "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor",
    "npu_scatter_nd_update_": "(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    "npu_quant_lightning_indexer": "(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    "Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode, *, Tensor? actual_seq_lengths_query=None, "
    'Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query="BSND", '
    'str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, '
    "int next_tokens=9223372036854775807, int? query_dtype=None, int? key_dtype=None) -> Tensor",
    "npu_grouped_matmul": "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_dequant_swiglu_quant": "(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
    "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
    "bool activate_left=False, int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, "
    "int swiglu_mode=0, float clamp_limit=7., float glu_alpha=1.702, float glu_bias=1.) -> (Tensor, Tensor)",
    "npu_moe_init_routing_v2": "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
    "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
    "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "npu_moe_finalize_routing": "(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
    "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, "
    "int? k=1) -> Tensor",
    "npu_moe_distribute_dispatch_v2": "(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, "
    "int moe_expert_num, *, Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, "
    'Tensor? elastic_info=None, Tensor? performance_info=None, str group_tp="", int tp_world_size=0, '
    f"int tp_rank_id=0, {_ROUTES}, int quant_mode=0, int expert_token_nums_type=1, str comm_alg=\"\", "
    "int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, int? x_dtype=None, "
    "int? scales_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_moe_distribute_combine_v2": "(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, "
    "Tensor ep_send_counts, Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, "
    "int moe_expert_num, *, Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
    "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, "
    "Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
    f'Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, {_ROUTES}, '
    'int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, '
    "int const_expert_num=0) -> Tensor",
}  # fmt: skip
# torch_npu lists quant_mode before global_bs in dispatch.
_SCHEMAS["npu_moe_distribute_dispatch_v2"] = _SCHEMAS["npu_moe_distribute_dispatch_v2"].replace(
    "int global_bs=0, int quant_mode=0", "int quant_mode=0, int global_bs=0"
)
_DTYPES = {3: torch.int32, 15: torch.bfloat16}


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6):
    ones = [1] * gamma.ndim
    return torch.empty_like(x), x.new_empty([*x.shape[: -gamma.ndim], *ones], dtype=torch.float32)


def _dynamic_quant(x: Tensor, **_):
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, *, output_dtype=None, **_):
    return x1.new_empty([*x1.shape[:-1], x2.shape[-1]], dtype=_DTYPES[output_dtype])


def _transpose_batchmatmul(x: Tensor, weight: Tensor, **_):
    return x.new_empty([x.shape[0], x.shape[1], weight.shape[2]])  # with perm_x1 = [1, 0, 2], as we call it


def _indexer(query: Tensor, *_, sparse_count: int, **__):
    batch, queries = query.shape[:2]
    return query.new_empty([batch, queries, 1, sparse_count], dtype=torch.int32)


def _grouped_matmul(x: list[Tensor], weight: list[Tensor], *, output_dtype=None, **_):
    return [x[0].new_empty([x[0].shape[0], weight[0].shape[2]], dtype=_DTYPES[output_dtype])]


def _dequant_swiglu_quant(x: Tensor, **_):
    return x.new_empty([x.shape[0], x.shape[1] // 2], dtype=torch.int8), x.new_empty([x.shape[0]], dtype=torch.float32)


def _init_routing(x: Tensor, expert_idx: Tensor, *, active_expert_range: list[int], **_):
    rows, experts = expert_idx.numel(), active_expert_range[1] - active_expert_range[0]
    return (
        x.new_empty([rows, x.shape[1]], dtype=torch.int8),
        x.new_empty([rows], dtype=torch.int32),
        x.new_empty([experts], dtype=torch.int64),
        x.new_empty([rows], dtype=torch.float32),
    )


def _finalize_routing(rows: Tensor, skip1, skip2, bias, scales: Tensor, *_):
    return rows.new_empty([scales.shape[0], rows.shape[1]])


def dispatched_rows(tokens: int, k: int, ranks: int, experts: int) -> int:
    """Rows that one rank may receive at worst: dispatch's output has room for them always, which keeps it static."""
    return tokens * ranks * min(experts // ranks, k)


def _dispatch(x: Tensor, ids: Tensor, group_ep, ep_world_size: int, ep_rank_id, moe_expert_num: int, **_):
    local = moe_expert_num // ep_world_size
    rows = dispatched_rows(*ids.shape, ep_world_size, moe_expert_num)
    return (
        x.new_empty([rows, x.shape[1]], dtype=torch.int8),
        x.new_empty([rows], dtype=torch.float32),
        x.new_empty([rows * 128], dtype=torch.int32),
        x.new_empty([local], dtype=torch.int64),
        x.new_empty([ep_world_size * local], dtype=torch.int32),
        x.new_empty([1], dtype=torch.int32),
        x.new_empty([rows], dtype=torch.float32),
    )


def _combine(rows: Tensor, ids: Tensor, *_, **__):
    return rows.new_empty([ids.shape[0], rows.shape[1]])


_SHAPES: dict[str, Callable] = {
    "npu_rms_norm": _rms_norm,
    "npu_rotary_mul": lambda x, *_: torch.empty_like(x),
    "npu_dynamic_quant": _dynamic_quant,
    "npu_quant_matmul": _quant_matmul,
    "npu_transpose_batchmatmul": _transpose_batchmatmul,
    "npu_scatter_nd_update_": lambda x, *_: x,
    "npu_quant_lightning_indexer": _indexer,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_dequant_swiglu_quant": _dequant_swiglu_quant,
    "npu_moe_init_routing_v2": _init_routing,
    "npu_moe_finalize_routing": _finalize_routing,
    "npu_moe_distribute_dispatch_v2": _dispatch,
    "npu_moe_distribute_combine_v2": _combine,
}


def used() -> dict[str, str]:
    """Schema of every torch_npu operator the table calls, by name."""
    return dict(_SCHEMAS)


def declare() -> None:
    """Declares what torch_npu would, unless it is loaded or this has been done. Idempotent."""
    if hasattr(torch.ops.npu, "npu_rms_norm"):
        return
    library = torch.library.Library("npu", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _SHAPES[name], "Meta")
    _kept.append(library)


_kept: list[torch.library.Library] = []  # a library's definitions go with the object
