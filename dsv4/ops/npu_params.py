"""Parameters as NPU kernels want them: the one load-time step between the plain layouts and a device.

Matrix kernels read [in, out]; int8 weights are cast once to the fractal layout (NZ). `prepare` rewrites the tree once, so that
no step carries a Transpose of a weight or a slice of an expert stack: each would be a copy of the weight on every launch.
"""

from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

from dsv4.params import (
    Compressor,
    Experts,
    HashRouter,
    HyperConnection,
    HyperHead,
    LearnedRouter,
    Matrix,
    Params,
    WindowAttention,
)
from dsv4.tree import QuantWeight, tree

FRACTAL_NZ = 29  # torch_npu's number of the layout


@tree
class Packed:
    """A matrix stored [..., in, out]; `shape` and slices speak the plain [..., out, in]. scale f32 [..., out] with int8."""

    values: Tensor
    scale: Tensor | None

    @property
    def shape(self) -> torch.Size:
        *lead, rows, cols = self.values.shape
        return torch.Size((*lead, cols, rows))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __getitem__(self, rows: slice) -> "Packed":
        """Some of the plain rows; costs a copy of them in a graph."""
        return Packed(values=self.values[..., rows], scale=None if self.scale is None else self.scale[..., rows])


@tree
class ExpertStack:
    """Routed experts and the shared one apart: a slice of one stack would copy it. last_scale bf16 [E, out], for products
    that come out in bf16 (grouped matmul wants the scale in the dtype of its result)."""

    routed: Packed
    shared: Packed
    last_scale: Tensor


def pack(w: Matrix) -> Packed:
    """[..., out, in] to [..., in, out]."""
    if isinstance(w, QuantWeight):
        return Packed(values=w.values.transpose(-1, -2).contiguous(), scale=w.scale)
    return Packed(values=w.transpose(-1, -2).contiguous(), scale=None)


def pack_experts(w: Matrix) -> ExpertStack:
    """[E+1, out, in] with the shared expert last. Raises TypeError for float experts: NPU experts are int8."""
    if not isinstance(w, QuantWeight):
        raise TypeError(f"experts are {w.dtype}; the NPU op table serves W8A8, convert the checkpoint first")
    whole = pack(w)
    routed = Packed(values=whole.values[:-1].contiguous(), scale=whole.scale[:-1].contiguous())
    shared = Packed(values=whole.values[-1].contiguous(), scale=whole.scale[-1].contiguous())
    return ExpertStack(routed=routed, shared=shared, last_scale=routed.scale.bfloat16())


def _by_group(w: Matrix, groups: int) -> Packed:
    """[out, G K] to [G, K, out]: the output projection quantises each group of channels by itself."""
    packed = pack(w)
    return Packed(values=packed.values.unflatten(0, (groups, -1)), scale=packed.scale)


def _per_channel(scale: Tensor, streams: int) -> Tensor:
    """[3] to [(2 + M) M]: pre, post and comb channels."""
    counts = (streams, streams, streams * streams)
    return torch.cat([scale[i : i + 1].expand(n) for i, n in enumerate(counts)])


_MATRICES = {"w_in", "wq_b", "wo_a", "gate", "head", "main_proj", "markov_w2", "confidence"}


# Applied in float32. `attn_norm` is not: its result goes into a product of its own dtype.
_NORMS = {"ffn_norm", "q_norm", "kv_norm", "main_norm", "norm"}


def _prepare(node):
    if isinstance(node, tuple):
        return tuple(_prepare(part) for part in node)
    if not is_dataclass(node):
        return node
    if isinstance(node, HyperConnection):
        streams = round((node.fn.shape[0] + 1) ** 0.5) - 1  # channels = (2 + M) M
        return replace(node, fn=pack(node.fn * _per_channel(node.scale, streams).unsqueeze(1)))
    if isinstance(node, HyperHead):
        return replace(node, fn=pack(node.fn * node.scale))
    if isinstance(node, Experts):
        return Experts(w13=pack_experts(node.w13), w2=pack_experts(node.w2))
    if isinstance(node, LearnedRouter | HashRouter):
        return replace(node, gate=pack(node.gate))
    if isinstance(node, Compressor):
        return Compressor(ape=torch.cat([torch.zeros_like(node.ape), node.ape], 1), norm=node.norm.float())
    changed = {name: getattr(node, name).float() for name in _NORMS & {field.name for field in fields(node)}}
    if isinstance(node, WindowAttention):
        changed["wo_b"] = _by_group(node.wo_b, node.wo_a.shape[0])
        changed["sink"] = node.sink.unsqueeze(1)  # [H, 1], as attention repeats it per token
    for field in fields(node):
        if field.name in changed:
            continue
        value = getattr(node, field.name)
        changed[field.name] = pack(value) if field.name in _MATRICES and value is not None else _prepare(value)
    return type(node)(**changed)


def prepare(params: Params) -> Params:
    """Plain layouts to NPU layouts, on whatever device the parameters are (meta and fake tensors too)."""
    return _prepare(params)


def to_fractal(params: Params) -> Params:
    """Casts int8 matrices that live on an NPU to NZ. Needs torch_npu and a device; values do not change."""
    import torch_npu

    def cast(node):
        if isinstance(node, tuple):
            return tuple(cast(part) for part in node)
        if isinstance(node, Packed) and node.dtype == torch.int8:
            return replace(node, values=torch_npu.npu_format_cast(node.values, FRACTAL_NZ))
        if not is_dataclass(node):
            return node
        return replace(node, **{field.name: cast(getattr(node, field.name)) for field in fields(node)})

    return cast(params)
