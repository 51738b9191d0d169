"""Which calls of a tape run side by side: between two barriers, every thread takes a share of the step's tokens through all of them.

Operators are row independent: what a call computes for some rows needs only those rows of its inputs by row. So consecutive
calls can be split by rows once, not one by one, until a call reads something as a whole (a pool, say) that the section wrote.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.fx import Node

from dsv4.graph.nodes import nodes_in, storage, tensors_in, written_nodes
from dsv4.ops.row_split import Split

MOST_ROWS = 64  # a call with more is worth splitting by itself, by rows and columns
MOST_WEIGHTS = 2_000_000  # bytes of a matrix that every thread may read: a barrier costs more than that


class Splits(Protocol):
    """A kernel that knows how it is split; None if it is not."""

    split: Split | None


Arguments = Sequence[Any]


def _each(value: Any, cut: slice) -> Any:
    return [x[cut] for x in value] if isinstance(value, (list, tuple)) else value[cut]


@dataclass(frozen=True)
class SplitCall:
    """A call of `rows` rows and where it is cut."""

    split: Split
    rows: int
    cuts: tuple[int, ...]

    def by_row(self, args: Arguments) -> list[Tensor]:
        """The arguments that are cut by rows, lines that are rows included."""
        lines = [args[i] for i in self.split.lines if args[i] is not None and args[i].shape[0] == self.rows]
        return [*tensors_in([args[i] for i in self.split.rows]), *lines]

    def parts(self, args: Arguments, outs: Sequence[Tensor]) -> Iterator[tuple[list[Any], tuple[Tensor, ...]] | None]:
        """Arguments and results of each part; None for one without rows."""
        for begin, end in zip(self.cuts, self.cuts[1:], strict=False):
            if begin == end:
                yield None
                continue
            part = list(args)
            for i in self.split.rows:
                part[i] = None if args[i] is None else _each(args[i], slice(begin, end))
            for i in self.split.lines:
                if args[i] is not None and args[i].shape[0] > 1:
                    per_line = self.rows // args[i].shape[0]
                    part[i] = args[i][begin // per_line : end // per_line]
            yield part, tuple(out[begin:end] for out in outs)


def cut(split: Split | None, args: Arguments, outs: Sequence[Tensor], requests: int, parts: int) -> SplitCall | None:
    """How a call is cut into `parts`, at whole requests if there are several; None if it is not."""
    if split is None or parts < 2:
        return None
    given = [x for i in split.rows for x in tensors_in([args[i]])]
    counts = {x.shape[0] if x.dim() else 0 for x in [*given, *outs]}
    if len(counts) != 1 or not 0 < (rows := counts.pop()) <= MOST_ROWS:
        return None
    if sum(args[i].nbytes for i in split.weights if args[i] is not None) > MOST_WEIGHTS:
        return None
    units = rows if requests == 1 else requests
    if rows % units:
        return None
    cuts = tuple(-(-units * part // parts) * (rows // units) for part in range(parts + 1))
    for i in split.lines:
        lines = 1 if args[i] is None else args[i].shape[0]
        if lines > 1 and (rows % lines or any(at % (rows // lines) for at in cuts)):
            return None
    return SplitCall(split, rows, cuts)


@dataclass(frozen=True)
class _Written:
    """Memory that a section wrote by row: where it is cut, and bytes from a row to the next."""

    cuts: tuple[int, ...]
    pitch: int

    def holds(self, x: Tensor, cuts: tuple[int, ...]) -> bool:
        """Whether each row of `x` lies in the same row of what was written: views may have other rows, or transposed ones."""
        low = x.storage_offset() * x.itemsize
        row = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1
        pitch = x.stride(0) * x.itemsize if x.shape[0] > 1 else self.pitch
        return cuts == self.cuts and pitch == self.pitch and low + row * x.itemsize <= pitch


@dataclass
class Section:
    """Calls in order: split ones run side by side, part by part; others one after the other, on all threads."""

    split: bool
    nodes: list[Node] = field(default_factory=list)
    calls: list[SplitCall | None] = field(default_factory=list)
    by_row: dict[int, _Written] = field(default_factory=dict)  # written
    read_by_row: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)  # as a whole
    pools: set[int] = field(default_factory=set)  # written in place

    def conflicts(self, node: Node, call: SplitCall, args: Arguments) -> bool:
        """Whether a split call must wait until every part of the section is done."""
        by_row, whole, written = _uses(node, call, args)
        touched = self.by_row.keys() | self.read_by_row | self.read | self.pools
        strays = any(
            storage(x) in self.by_row and not self.by_row[storage(x)].holds(x, call.cuts) for x in call.by_row(args)
        )
        return (
            strays
            or not by_row.isdisjoint(self.pools)
            or not whole.isdisjoint(self.by_row.keys() | self.pools)
            or not written.isdisjoint(touched)
        )

    def add(self, node: Node, call: SplitCall | None, args: Arguments) -> None:
        self.nodes.append(node)
        self.calls.append(call)
        if call is None:
            return
        by_row, whole, written = _uses(node, call, args)
        self.by_row |= {
            storage(x): _Written(call.cuts, x.stride(0) * x.itemsize)
            for x in tensors_in([node.meta["val"]])
            if storage(x) not in written
        }
        self.read_by_row |= by_row
        self.read |= whole
        self.pools |= written


def _uses(node: Node, call: SplitCall, args: Arguments) -> tuple[set[int], set[int], set[int]]:
    """Memory that a call reads by row, reads as a whole, and writes in place."""
    written = {storage(x) for arg in written_nodes(node) for x in tensors_in([arg.meta["val"]])}
    by_row = {storage(x) for x in call.by_row(args)}
    everything = {storage(x) for arg in nodes_in((node.args, node.kwargs)) for x in tensors_in([arg.meta["val"]])}
    return by_row, everything - by_row - written, written


def sections(
    steps: Sequence[tuple[Node, Arguments, Sequence[Tensor]]],
    kernels: Mapping[Any, Splits],
    requests: int,
    parts: int,
) -> list[Section]:
    """The steps in order, grouped: a new section wherever a barrier is needed, or the way of running changes."""
    made: list[Section] = []
    for node, args, outs in steps:
        kernel = kernels.get(node.target)
        call = cut(kernel.split, args, outs, requests, parts) if kernel else None
        last = made[-1] if made else None
        if last is None or last.split != (call is not None) or (call and last.conflicts(node, call, args)):
            made.append(last := Section(call is not None))
        last.add(node, call, args)
    return made
