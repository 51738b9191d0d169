"""Functional collectives of a rank; identities where the group has one member (its name is None).

Every rank enters every collective of a step, in the order of the program, whether or not it has live rows: shapes are static
and nothing here looks at values. Gathered parts lie in rank order, so a sum or a choice over them is the same on all ranks.
"""

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from dsv4.mesh import Mesh
from dsv4.ops.table import OpSet


def all_reduce(x: Tensor, group: str | None) -> Tensor:
    """Sum over the group."""
    if group is None:
        return x
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))


def all_gather(x: Tensor, group: str | None) -> Tensor:
    """[n, ...] of every rank under each other, [ranks * n, ...]."""
    if group is None:
        return x
    return funcol.wait_tensor(funcol.all_gather_single(x.contiguous(), 0, group))


def reduce_scatter(x: Tensor, group: str | None) -> Tensor:
    """[ranks * n, ...] summed over the group; this rank's n rows."""
    if group is None:
        return x
    return funcol.wait_tensor(funcol.reduce_scatter_single(x.contiguous(), "sum", 0, group))


def all_columns(x: Tensor, mesh: Mesh) -> Tensor:
    """[n, V] from this rank's columns [n, V/tp], as of logits over the vocabulary. One exchange."""
    if mesh.tp_group is None:
        return x
    parts = all_gather(x, mesh.tp_group).view(mesh.tp, *x.shape)
    return parts.transpose(0, 1).flatten(1)


def global_argmax(ops: OpSet, logits: Tensor, mesh: Mesh) -> Tensor:
    """Lowest id of the greatest logit over the whole vocabulary, int32 [n]; `logits` [n, V/tp] is this rank's part.

    Ranks exchange two numbers a row, their best logit and its id (exact in float32 below 2^24). Parts of the vocabulary
    ascend with the rank, so the lowest rank among equals holds the lowest id.
    """
    best = ops.argmax(logits)
    if mesh.tp_group is None:
        return best
    value = torch.gather(logits, 1, best.long().unsqueeze(1)).squeeze(1)
    offset = mesh.tp_rank * logits.shape[1]
    mine = torch.stack([value, (best + offset).float()], 1)
    values, ids = all_gather(mine, mesh.tp_group).view(mesh.tp, -1, 2).permute(2, 1, 0).unbind(0)  # [n, tp] each
    winner = ops.argmax(values.contiguous()).long().unsqueeze(1)
    return torch.gather(ids, 1, winner).squeeze(1).to(torch.int32)
