"""Leaves of a step's arguments and results: flattening them once, reading and checking them at every call."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4.errors import CaptureError


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A tensor input: `path` from the argument's name on, `within` the argument, `name` as a graph input."""

    path: str
    within: str
    name: str
    argument: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    donated: bool

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to behind the last, gaps included."""
        if 0 in self.shape:
            return 0
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (reach + 1) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A leaf of what a step returns. `source`: index of the input leaf that it is, None for a fresh tensor.

    Leaves that are no tensors have their value in `static` and no dtype.
    """

    path: str
    source: int | None = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    static: Any = None

    @property
    def fresh(self) -> bool:
        return self.dtype is not None and self.source is None


def last_name(path: str) -> str:
    """`slots` of `batch.slots`."""
    return path.rpartition(".")[2]


@dataclass(frozen=True)
class Statics:
    """The leaves of the arguments that are no tensors: (position among all leaves, value)."""

    values: tuple[tuple[int, Any], ...]

    def merge(self, tensors: Iterable[Tensor]) -> list[Any]:
        """All leaves in order, given the tensors."""
        leaves: list[Any] = list(tensors)
        for position, value in self.values:
            leaves.insert(position, value)
        return leaves


def flatten_arguments(
    label: str, names: Sequence[str], args: Sequence[Any], donated: Iterable[str]
) -> tuple[tuple[Leaf, ...], Statics, pytree.TreeSpec]:
    """The tensor leaves of a call's arguments, its other leaves, and the structure of both."""
    if len(args) != len(names):
        raise CaptureError(f"{label}: expected arguments {', '.join(names)}, got {len(args)}")
    found, spec = pytree.tree_flatten_with_path(tuple(args))
    leaves, statics, seen = [], [], set()
    for position, (keys, value) in enumerate(found):
        if not isinstance(value, Tensor):
            statics.append((position, value))
            continue
        argument, within = keys[0].idx, pytree.keystr(keys[1:])
        path = names[argument] + within
        name = re.sub(r"\W+", "_", path).strip("_")
        while name in seen:
            name += "_"
        seen.add(name)
        leaves.append(
            Leaf(path=path, within=within, name=name, argument=argument, shape=value.shape, stride=value.stride(),
                 dtype=value.dtype, donated=names[argument] in donated)
        )  # fmt: skip
    return tuple(leaves), Statics(tuple(statics)), spec


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two meta tensors are the same view of the same memory."""
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def output_leaves(paths: Sequence[str], values: Sequence[Any], inputs: Sequence[Tensor]) -> tuple[Result, ...]:
    """Describes what a step returned, recognising inputs that come back."""
    by_storage = {x.untyped_storage()._cdata: i for i, x in enumerate(inputs)}
    results = []
    for path, value in zip(paths, values, strict=True):
        if not isinstance(value, Tensor):
            results.append(Result(path=path, static=value))
            continue
        source = by_storage.get(value.untyped_storage()._cdata)
        if source is not None and not same_tensor(value, inputs[source]):
            source = None
        results.append(Result(path=path, source=source, shape=value.shape, dtype=value.dtype))
    return tuple(results)


def reader(example: Any) -> Callable[[Any], Sequence[Tensor]]:
    """A function from a tree like `example` to its tensor leaves.

    It raises TypeError or AttributeError for a tree of another structure, or with other leaves that are no tensors. A
    dataclass of tensors is read by one `attrgetter`, at a fraction of the cost of flattening it.
    """
    found, spec = pytree.tree_flatten_with_path(example)
    kind = type(example)
    if isinstance(example, Tensor):
        return lambda value: (value,)
    if found and all(
        len(keys) == 1 and isinstance(keys[0], pytree.GetAttrKey) and isinstance(x, Tensor) for keys, x in found
    ):
        get = attrgetter(*(keys[0].name for keys, _ in found))
        single = len(found) == 1

        def read(value: Any) -> Sequence[Tensor]:
            if type(value) is not kind:
                raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
            return (get(value),) if single else get(value)

        return read

    def flatten(value: Any) -> Sequence[Tensor]:
        leaves, got = pytree.tree_flatten(value)
        if got != spec:
            raise TypeError(f"expected the structure {spec}, got {got}")
        for (keys, want), leaf in zip(found, leaves, strict=True):
            if not isinstance(want, Tensor) and leaf != want:
                raise TypeError(f"{pytree.keystr(keys)} was {want!r} when captured, got {leaf!r}")
        return [leaf for (_, want), leaf in zip(found, leaves, strict=True) if isinstance(want, Tensor)]

    return flatten
