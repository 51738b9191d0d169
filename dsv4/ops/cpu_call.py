"""How a kernel is called: the packed form of its arguments, and its registration as one opaque torch operator.

A kernel takes one `Call` (function, pointers, integers, floats; see the top of `cpu_kernels.cpp`). `Kernel.pack` says what
goes into it from shapes, strides and dtypes alone, so the same code launches one kernel on real tensors and lets
`graph/tape.py` lay out a whole step from fake ones.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4.ops import cpu_build
from dsv4.ops.row_split import Split

POINTERS, INTS, FLOATS = 20, 24, 8
CALL = struct.Struct(f"P{POINTERS}P{INTS}q{FLOATS}d")
CALL_DTYPE = np.dtype([("fn", "u8"), ("ptr", "u8", POINTERS), ("i", "i8", INTS), ("f", "f8", FLOATS)])
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.int32: 3}
F32, I32, I8 = torch.float32, torch.int32, torch.int8

Outputs = list[tuple[Sequence[int], torch.dtype]]


@dataclass(frozen=True)
class Launch:
    """The arguments of one call, in the order in which the kernel reads them."""

    pointers: tuple[Tensor | None, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One C function: `outputs(*args)` are the shapes and dtypes it makes, `fill(*args, *outs)` its packed arguments."""

    symbol: str
    outputs: Callable[..., Outputs]
    fill: Callable[..., Launch]
    split: Split | None = None

    @property
    def fn_address(self) -> int:
        """Where the function is. Builds and loads the library on first use; raises PlatformError."""
        return address_of(cpu_build.library(), self.symbol)

    def pack(self, args: Sequence[Any], outs: Sequence[Tensor]) -> Launch:
        """Packs a call on real or fake tensors. Raises TypeError where a tensor's layout or dtype does not fit."""
        return self.fill(*args, *outs)

    def allocate(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Empty outputs, on the device of the first tensor argument."""
        device = next(a.device for a in pytree.tree_leaves(args) if isinstance(a, Tensor))
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.outputs(*args))


KERNELS: dict[torch._ops.OpOverload, Kernel] = {}
_LIBRARY = torch.library.Library("dsv4", "DEF")


def address_of(library: ctypes.CDLL, symbol: str) -> int:
    """The address of a C function."""
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value


def encode(address: int, launch: Launch) -> bytes:
    """The bytes of a `Call`. The tensors of `launch` must outlive its execution."""
    pointers = [0 if t is None else t.data_ptr() for t in launch.pointers]
    pad = [0] * (POINTERS - len(pointers)), [0] * (INTS - len(launch.ints)), [0.0] * (FLOATS - len(launch.floats))
    return CALL.pack(address, *pointers, *pad[0], *launch.ints, *pad[1], *launch.floats, *pad[2])


def kernel(
    name: str,
    schema: str,
    *,
    outputs: Callable[..., Outputs],
    fill: Callable[..., Launch],
    rows: str = "",
    lines: str = "",
    weights: str = "",
) -> None:
    """Registers `dsv4::name`, one opaque operator with a fake form, run by the C function `dsv4_<name>`.

    rows, lines, weights: names of arguments as in `Split`; without `rows` a call is never split.
    """
    _LIBRARY.define(f"{name}{schema}")
    overload = getattr(torch.ops.dsv4, name).default
    names = [argument.name for argument in overload._schema.arguments]
    split = Split(*(tuple(names.index(n) for n in group.split()) for group in (rows, lines, weights))) if rows else None
    spec = Kernel(f"dsv4_{name}", outputs, fill, split)

    def result(outs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
        return outs if len(outs) > 1 else outs[0] if outs else None

    def run(*args: Any) -> Any:
        outs = spec.allocate(args)
        call = encode(spec.fn_address, spec.pack(args, outs))
        cpu_build.library().dsv4_run(call, 1, torch.get_num_threads())
        return result(outs)

    def fake(*args: Any) -> Any:
        return result(spec.allocate(args))

    _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"dsv4::{name}", fake, lib=_LIBRARY)
    KERNELS[overload] = spec


# ---- what `fill` asks of tensors ----------------------------------------------------------------------------------------


def code(x: Tensor | torch.dtype | None, *allowed: torch.dtype) -> int:
    """The number by which kernels know a dtype (float32 or bfloat16, unless `allowed` says otherwise)."""
    dtype = F32 if x is None else x if isinstance(x, torch.dtype) else x.dtype
    allowed = allowed or (F32, torch.bfloat16)
    if dtype not in allowed:
        raise TypeError(f"CPU kernel: expected {' or '.join(map(str, allowed))}, got {dtype}; convert it first")
    return CODES[dtype]


def shaped(x: Tensor, *shape: int) -> Tensor:
    """`x`, which must have this shape: kernels trust the sizes they are given."""
    if tuple(x.shape) != shape:
        raise TypeError(f"CPU kernel: expected a tensor of shape {list(shape)}, got {list(x.shape)}")
    return x


def whole(x: Tensor | None, dtype: torch.dtype, *shape: int) -> Tensor | None:
    """`x`, which must be contiguous, of `dtype` and, if given, of this shape; or None."""
    if x is None:
        return None
    if x.dtype != dtype or not x.is_contiguous():
        raise TypeError(
            f"CPU kernel: expected a contiguous {dtype} tensor, got {x.dtype} {list(x.shape)} with strides "
            f"{list(x.stride())}; use .contiguous() or .to({dtype})"
        )
    return shaped(x, *shape) if shape else x


def strides(x: Tensor, dims: int) -> tuple[int, ...]:
    """The leading `dims` strides of `x` in elements; the dimensions behind them must be contiguous."""
    expected = 1
    for size, stride in zip(reversed(x.shape[dims:]), reversed(x.stride()[dims:]), strict=True):
        if size != 1 and stride != expected:
            raise TypeError(
                f"CPU kernel: expected contiguous dimensions from {dims} on, got shape {list(x.shape)} with strides "
                f"{list(x.stride())}; use .contiguous()"
            )
        expected *= size
    return tuple(x.stride()[:dims])


def width(w: Tensor, lead: int = 0) -> int:
    """Rows of a matrix (of each, behind `lead` dimensions), plain or in the panels of `cpu_params`."""
    return w.shape[lead] if w.dim() == lead + 2 else w.shape[lead] * w.shape[-2]


def matrix(w: Tensor, *shape: int) -> tuple[Tensor, int, int]:
    """A matrix of this plain shape [..., out, in]: the tensor, from a row or panel to the next, and whether it has panels."""
    *lead, rows, channels = shape
    if w.dim() == len(shape):
        return shaped(w, *shape), strides(w, len(shape) - 1)[-1], 0
    together = 4 // w.itemsize
    return shaped(w, *lead, rows // 16, channels // together, 16, together), strides(w, len(lead) + 1)[-1], 1


def trailing(x: Tensor) -> int:
    """Elements of one row of `x`."""
    return math.prod(x.shape[1:])
