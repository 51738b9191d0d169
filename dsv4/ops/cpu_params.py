"""Parameters as the CPU kernels want them: matrices in panels, rearranged once at load.

A panel is 16 rows of a matrix side by side, so that one vector holds the same channel of 16 outputs: no sum has to be folded
across lanes, and a step reads every weight in one stream. Some channels of a row lie together: four int8 are one operand of a
dot product, and so are two bf16. float32 channels are stored in the order in which a dot product of `cpu_kernels.cpp` adds them up.
Results have the bits that the plain layout gives.
"""

from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

from dsv4.params import Experts, Matrix, Params, WindowAttention
from dsv4.tree import QuantWeight, tree

PANEL = 16  # rows
TOGETHER = {torch.int8: 4, torch.bfloat16: 2, torch.float32: 1}  # channels of a row


@tree
class Panels:
    """A matrix in panels of 16 rows and n channels together: values [..., out/16, in/n, 16, n]; int8 has scale f32 [..., out].

    `shape` and slices speak the plain [..., out, in].
    """

    values: Tensor
    scale: Tensor | None

    @property
    def shape(self) -> torch.Size:
        *lead, panels, channels, rows, together = self.values.shape
        return torch.Size((*lead, panels * rows, channels * together))

    def __getitem__(self, rows: slice) -> "Panels":
        """Rows `rows` of a single matrix, a view. Raises TypeError if they are not whole panels."""
        start, stop, step = rows.indices(self.shape[0])
        if len(self.shape) != 2 or step != 1 or start % PANEL or stop % PANEL:
            raise TypeError(
                f"rows {start}:{stop} of a matrix of shape {list(self.shape)} are not whole panels of {PANEL}"
            )
        scale = None if self.scale is None else self.scale[rows]
        return Panels(values=self.values[start // PANEL : stop // PANEL], scale=scale)


def pack(w: Matrix, groups: int = 1) -> Matrix | Panels:
    """`w` in panels; as it is if its sizes are not multiples of 16, or its `groups` of channels not multiples of 4."""
    *_, rows, channels = w.shape
    values, scale = (w.values, w.scale) if isinstance(w, QuantWeight) else (w, None)
    together = TOGETHER.get(values.dtype)
    if together is None or rows % PANEL or channels % 16 or channels // groups % 4:
        return w
    if together == 1:  # the residues mod 8 one after the other
        values = values.unflatten(-1, (-1, 8)).transpose(-2, -1).flatten(-2)
    panels = values.unflatten(-1, (-1, together)).unflatten(-3, (-1, PANEL))
    return Panels(values=panels.transpose(-3, -2).contiguous(), scale=scale)


def unpack(panels: Panels) -> Matrix:
    """The plain layout back."""
    values = panels.values.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    if panels.scale is not None:
        return QuantWeight(values=values, scale=panels.scale)
    return values if panels.values.shape[-1] > 1 else values.unflatten(-1, (8, -1)).transpose(-2, -1).flatten(-2)


_MATRICES = {"wq_b", "wo_a", "gate", "head", "main_proj", "markov_w2"}


def _groups(node, name: str) -> int | None:
    """Groups of channels of a node's matrix; None for what stays as it is."""
    if name in _MATRICES or isinstance(node, Experts):
        return 1
    if isinstance(node, WindowAttention) and name == "wo_b":
        return node.wo_a.shape[0]
    if isinstance(node, WindowAttention) and name == "w_in":  # stages use the rows in between alone
        return None if node.q_norm.shape[0] % PANEL or node.kv_norm.shape[0] % PANEL else 1
    return None


def _prepare(node, release: bool):
    if isinstance(node, tuple):
        return tuple(_prepare(part, release) for part in node)
    if not is_dataclass(node):
        return node
    changed = {}
    for name, groups in {field.name: _groups(node, field.name) for field in fields(node)}.items():
        value = getattr(node, name)
        if groups is None or value is None:
            changed[name] = _prepare(value, release)
            continue
        changed[name] = pack(value, groups)
        if release:
            object.__setattr__(node, name, None)
    return replace(node, **changed)


def prepare(params: Params, *, release: bool = False) -> Params:
    """Plain layouts to CPU layouts; what has no panels is shared with `params`.

    release: `params` is not used any more, and loses each matrix once that lies in panels: no two copies of all of them.
    """
    return _prepare(params, release)
