"""The operators as fused CPU kernels. `plain` is the definition; every call is one opaque `torch.ops.dsv4.*` node when traced.

Importing this module registers the operators and builds nothing: fakes trace, cost and shape a step on any machine. The
kernels are built when one first runs, or its address is asked for.
"""

import logging
import os
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import PlatformError
from dsv4.ops import cpu_maths, cpu_state  # noqa: F401  (importing them registers the kernels)
from dsv4.ops.capturable import CAPTURABLE
from dsv4.ops.cpu_build import library
from dsv4.ops.cpu_call import CALL_DTYPE, KERNELS, Kernel, Launch
from dsv4.ops.cpu_params import Panels
from dsv4.ops.table import OpSet, op_names
from dsv4.tree import QuantWeight

__all__ = ["CALL_DTYPE", "CPU", "KERNELS", "Kernel", "Launch", "cpu_ops", "default_ops", "library"]

# ---- the table ------------------------------------------------------------------------------------------------------------


Weight = Tensor | QuantWeight | Panels


def _parts(w: Weight) -> tuple[Tensor, Tensor | None]:
    return (w, None) if isinstance(w, Tensor) else (w.values, w.scale)


def linear(x: Tensor, w: Weight, groups: int = 1) -> Tensor:
    """`plain.linear`."""
    values, scale = _parts(w)
    if scale is not None:
        return torch.ops.dsv4.linear_int8.default(x, values, scale, groups)
    return torch.ops.dsv4.linear.default(x, values)


def grouped_linear(x: Tensor, w: Weight) -> Tensor:
    """`plain.grouped_linear`."""
    return torch.ops.dsv4.grouped_linear.default(x, _parts(w)[0])


def route(x: Tensor, gate: Weight, *rest: Any) -> tuple[Tensor, Tensor]:
    """`plain.route`."""
    return torch.ops.dsv4.route.default(x, _parts(gate)[0], *rest)


def route_hash(x: Tensor, gate: Weight, *rest: Any) -> tuple[Tensor, Tensor]:
    """`plain.route_hash`."""
    return torch.ops.dsv4.route_hash.default(x, _parts(gate)[0], *rest)


def markov(base: Tensor, w1: Tensor, w2: Weight, anchor: Tensor) -> Tensor:
    """`plain.markov`."""
    return torch.ops.dsv4.markov.default(base, w1, _parts(w2)[0], anchor)


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    limit: float,
    first: int,
) -> Tensor:
    """`plain.moe`."""
    (up, s13), (down, s2) = _parts(w13), _parts(w2)
    if s13 is not None:
        return torch.ops.dsv4.moe_int8.default(x, ids, weights, up, s13, down, s2, limit, first)
    return torch.ops.dsv4.moe.default(x, ids, weights, up, down, limit, first)


def scatter(pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """`plain.scatter`. Writes: pool."""
    torch.ops.dsv4.scatter.default(pool, slots, rows)
    return pool


def write_state(pool: Tensor, slots: Tensor, rows: Tensor, ape: Tensor, positions: Tensor) -> Tensor:
    """`plain.write_state`. Writes: pool."""
    torch.ops.dsv4.write_state.default(pool, slots, rows, ape, positions)
    return pool


_WRAPPED = {fn.__name__: fn for fn in (linear, grouped_linear, route, route_hash, moe, markov, scatter, write_state)}
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
