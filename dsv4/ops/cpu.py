"""The operators as fused CPU kernels. `plain` is the definition; every call is one opaque `torch.ops.dsv4.*` node when traced.

Importing this module registers the operators and builds nothing: fakes trace, cost and shape a step on any machine. The
kernels are built when one first runs, or its address is asked for.
"""

import logging
import os

import torch
from torch import Tensor

from dsv4.errors import PlatformError
from dsv4.ops import cpu_maths, cpu_state  # noqa: F401  (importing them registers the kernels)
from dsv4.ops.capturable import CAPTURABLE
from dsv4.ops.cpu_build import library
from dsv4.ops.cpu_call import CALL_DTYPE, KERNELS, Kernel, Launch
from dsv4.ops.table import OpSet, op_names
from dsv4.tree import QuantWeight

__all__ = ["CALL_DTYPE", "CPU", "KERNELS", "Kernel", "Launch", "cpu_ops", "default_ops", "library"]

# ---- the table ------------------------------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor | QuantWeight, groups: int = 1) -> Tensor:
    """`plain.linear`."""
    if isinstance(w, QuantWeight):
        return torch.ops.dsv4.linear_int8.default(x, w.values, w.scale, groups)
    return torch.ops.dsv4.linear.default(x, w)


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | QuantWeight,
    w2: Tensor | QuantWeight,
    limit: float,
    first: int,
) -> Tensor:
    """`plain.moe`."""
    if isinstance(w13, QuantWeight):
        packed = (w13.values, w13.scale, w2.values, w2.scale)
        return torch.ops.dsv4.moe_int8.default(x, ids, weights, *packed, limit, first)
    return torch.ops.dsv4.moe.default(x, ids, weights, w13, w2, limit, first)


def scatter(pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """`plain.scatter`. Writes: pool."""
    torch.ops.dsv4.scatter.default(pool, slots, rows)
    return pool


def write_state(pool: Tensor, slots: Tensor, rows: Tensor, ape: Tensor, positions: Tensor) -> Tensor:
    """`plain.write_state`. Writes: pool."""
    torch.ops.dsv4.write_state.default(pool, slots, rows, ape, positions)
    return pool


_WRAPPED = {"linear": linear, "moe": moe, "scatter": scatter, "write_state": write_state}
CPU = OpSet(name="cpu", **{op: _WRAPPED.get(op) or getattr(torch.ops.dsv4, op).default for op in op_names()})


def cpu_ops() -> OpSet:
    """The fused operators, built and loaded. Raises PlatformError if this machine cannot build them."""
    library()
    return CPU


def default_ops() -> OpSet:
    """The fused operators, or the plain ones (with one line of notice) where they are switched off or cannot be built."""
    if os.environ.get("DSV4_CPU_KERNELS") == "0":
        logging.getLogger(__name__).warning(
            "CPU kernels are off (DSV4_CPU_KERNELS=0): plain PyTorch, several times slower"
        )
        return CAPTURABLE
    try:
        return cpu_ops()
    except PlatformError as error:
        logging.getLogger(__name__).warning("no CPU kernels (%s): plain PyTorch, several times slower", error)
        return CAPTURABLE
