"""Three operators with kernels written in NumPy, run from call records by address: what a tape needs, without a compiler.

A kernel sees nothing but the numbers in its record, like a native one, so wrong addresses, strides or lifetimes show as
wrong values.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.graph.tape import Machine
from dsv4.ops.row_split import Split
from dsv4.tree import tree

CALL = np.dtype([("fn", np.uint64), ("ptr", np.uint64, 4), ("i", np.int64, 24), ("f", np.float64, 2)])
DIMS = 3  # every operand is described as three sizes and three strides

LIBRARY = torch.library.Library("toy", "DEF")
LIBRARY.define("mix(Tensor x, Tensor y, float a=2.0) -> Tensor")
LIBRARY.define("both(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("put(Tensor(a!) pool, Tensor slots, Tensor rows) -> ()")
LIBRARY.define("shapeless(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "mix", "CPU")
def _mix(x: Tensor, y: Tensor, a: float = 2.0) -> Tensor:
    return (x * a + y).contiguous()


@torch.library.impl(LIBRARY, "both", "CPU")
def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x + 1).contiguous(), (x * 0.5).contiguous()


@torch.library.impl(LIBRARY, "put", "CPU")
def _put(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    pool[slots.long()] = rows


@torch.library.impl(LIBRARY, "shapeless", "CPU")
def _shapeless(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("toy::mix", lib=LIBRARY)
def _mix_shape(x: Tensor, y: Tensor, a: float = 2.0) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("toy::both", lib=LIBRARY)
def _both_shape(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("toy::put", lib=LIBRARY)
def _put_shape(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    return None


mix, both = torch.ops.toy.mix, torch.ops.toy.both


def put(pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """pool[slots] = rows. Writes: pool."""
    torch.ops.toy.put(pool, slots, rows)
    return pool


@dataclass(frozen=True)
class ToyLaunch:
    pointers: tuple[Tensor | None, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...] = ()


@dataclass(frozen=True)
class ToyKernel:
    symbol: str
    fn_address: int
    pack: Callable[[Sequence[Any], Any], ToyLaunch]
    split: Split | None = None


def _layout(x: Tensor) -> tuple[int, ...]:
    """Sizes, then strides, of a tensor seen as three axes."""
    assert x.ndim <= DIMS, f"expected at most {DIMS} axes, got {list(x.shape)}"
    missing = DIMS - x.ndim
    return (1,) * missing + tuple(x.shape) + (0,) * missing + tuple(x.stride())


def _pack(args: Sequence[Any], outs: Sequence[Tensor]) -> ToyLaunch:
    tensors = [x for x in (*args, *outs) if isinstance(x, Tensor)]
    floats = tuple(x for x in args if isinstance(x, float))
    return ToyLaunch(tuple(tensors), tuple(n for x in tensors for n in _layout(x)), floats)


def _operand(call: np.void, k: int, dtype: Any = np.float32) -> np.ndarray:
    ints = call["i"][2 * DIMS * k : 2 * DIMS * (k + 1)]
    sizes, strides = ints[:DIMS], ints[DIMS:] * np.dtype(dtype).itemsize
    span = int(((sizes - 1) * strides).sum()) + np.dtype(dtype).itemsize
    if 0 in sizes:
        return np.zeros(sizes, dtype)
    raw = (ctypes.c_uint8 * span).from_address(int(call["ptr"][k]))
    return np.lib.stride_tricks.as_strided(np.frombuffer(raw, dtype=dtype), sizes, strides)


def _run_mix(call: np.void) -> None:
    x, y, out = (_operand(call, k) for k in range(3))
    out[...] = x * np.float32(call["f"][0]) + y


def _run_both(call: np.void) -> None:
    x, a, b = (_operand(call, k) for k in range(3))
    a[...] = x + np.float32(1)
    b[...] = x * np.float32(0.5)


def _run_put(call: np.void) -> None:
    pool, slots, rows = _operand(call, 0), _operand(call, 1, np.int32), _operand(call, 2)
    pool[0, slots.ravel()] = rows[0]


_FUNCTIONS = {1: _run_mix, 2: _run_both, 3: _run_put}


def _run(address: int, sections: int, count: int, threads: int) -> None:
    """Parts of a section from the last to the first: any order must do."""
    pairs = np.frombuffer((ctypes.c_int64 * (2 * count)).from_address(sections), dtype=np.int64).reshape(-1, 2)
    for calls, parts in pairs.tolist():
        raw = (ctypes.c_uint8 * (calls * parts * CALL.itemsize)).from_address(address)
        records = np.frombuffer(raw, dtype=CALL)
        for part in reversed(range(parts)):
            for call in records[part * calls : (part + 1) * calls]:
                if call["fn"]:
                    _FUNCTIONS[int(call["fn"])](call)
        address += calls * parts * CALL.itemsize


MACHINE = Machine(
    kernels={
        torch.ops.toy.mix.default: ToyKernel("toy_mix", 1, _pack, Split(rows=(0, 1), lines=(), weights=())),
        torch.ops.toy.both.default: ToyKernel("toy_both", 2, _pack, Split(rows=(0,), lines=(), weights=())),
        torch.ops.toy.put.default: ToyKernel("toy_put", 3, _pack, Split(rows=(1, 2), lines=(), weights=())),
    },
    call=CALL,
    run=_run,
)
SPLIT = replace(MACHINE, parts=3)


@tree
class Weights:
    w: Tensor
    b: Tensor


@tree
class Pools:
    layers: tuple[Tensor, ...]


@tree
class Inputs:
    x: Tensor
    slots: Tensor


@tree
class Outputs:
    y: Tensor


def weights(rows: int = 4, width: int = 8) -> Weights:
    return Weights(w=torch.randn(rows, width), b=torch.randn(rows, width))


def pools(count: int = 2, width: int = 8) -> Pools:
    return Pools(layers=tuple(torch.zeros(16, width) for _ in range(count)))


def inputs(rows: int = 4, width: int = 8) -> Inputs:
    return Inputs(x=torch.randn(rows, width), slots=torch.randperm(16)[:rows].to(torch.int32))


def step(params: Weights, cache: Pools, batch: Inputs) -> tuple[Outputs, Pools]:
    """Two layers that write their pool and read it back."""
    x, written = batch.x, []
    for pool in cache.layers:
        x = mix(x, params.w)
        pool = put(pool, batch.slots, x)
        up, down = both(x)
        x = mix(up, mix(down, pool[: x.shape[0]], 0.5))
        written.append(pool)
    return Outputs(y=mix(x, params.b)), Pools(layers=tuple(written))
