"""Functional collectives of a rank; identities where the group has one member (its name is None)."""

import torch.distributed._functional_collectives as funcol
from torch import Tensor

from dsv4.mesh import Mesh
from dsv4.ops.table import OpSet


def all_reduce(x: Tensor, group: str | None) -> Tensor:
    """Sum over the group."""
    if group is None:
        return x
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))


def global_argmax(ops: OpSet, logits: Tensor, mesh: Mesh) -> Tensor:
    """Lowest id of the greatest logit over the whole vocabulary, int32 [n]; `logits` [n, V/tp] is this rank's part."""
    if mesh.tp_group is None:
        return ops.argmax(logits)
    raise NotImplementedError
