"""Converters that torchair lacks: matrix products of bf16 with a float32 result (`aten.mm` and `aten.bmm` with a dtype), softplus.

The eager kernels exist in torch_npu, and the cube unit accumulates in float32; torchair only has no rule for the overloads.
Unverified without a device: that the graph engine picks the float32-output form of the kernel from the result's type.
"""

import torch
from torchair._ge_concrete_graph import ge_apis as ge
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair.ge._ge_graph import torch_type_to_ge_proto_type


def _float32(tensor, dtype: torch.dtype):
    tensor.desc.dtype = torch_type_to_ge_proto_type(dtype)
    return tensor


@register_fx_node_ge_converter(torch.ops.aten.mm.dtype)
def mm(self, mat2, out_dtype, meta_outputs=None):
    """aten::mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"""
    return _float32(ge.MatMul(self, mat2, None), out_dtype)


@register_fx_node_ge_converter(torch.ops.aten.bmm.dtype)
def bmm(self, mat2, out_dtype, meta_outputs=None):
    """aten::bmm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor"""
    return _float32(ge.BatchMatMul(self, mat2), out_dtype)


@register_fx_node_ge_converter(torch.ops.aten.softplus.default)
def softplus(self, beta=1, threshold=20, meta_outputs=None):
    """aten::softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    return ge.SoftplusV2(self, beta=float(beta), threshold=float(threshold))
