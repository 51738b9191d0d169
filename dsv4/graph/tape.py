"""A captured graph as a flat list of kernel calls over addresses known before anything runs.

Every storage of the graph gets a home: an input leaf, a constant, or a block of the arena chosen by liveness. A tensor is then
a home, an offset and strides; views cost nothing. What has a kernel becomes a call record, what only computes addresses
vanishes, and anything else becomes an operator run by torch on the same memory: right, but slow, and counted.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from dsv4.errors import CaptureError
from dsv4.graph.arena import Block, place, round_up
from dsv4.graph.nodes import is_view, nodes_in, op_name, storage, tensors_in, written_nodes
from dsv4.graph.record import source
from dsv4.graph.sections import Arguments, Section, sections
from dsv4.graph.stages import Traced
from dsv4.graph.text import layout_text
from dsv4.ops.row_split import Split

NULL, ARENA, FIRST_INPUT = 0, 1, 2  # homes; inputs follow in order, then constants

_ALLOCATIONS = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty.default,
                torch.ops.aten.empty_like.default, torch.ops.aten.new_empty_strided.default}  # fmt: skip


class Launch(Protocol):
    """What a kernel is given: tensors by address, then numbers."""

    pointers: Sequence[Tensor | None]
    ints: Sequence[int]
    floats: Sequence[float]


class Kernel(Protocol):
    """A native function and how its call record is filled from an operator's arguments and results."""

    symbol: str
    fn_address: int
    pack: Callable[[Sequence[Any], Any], Launch]
    split: Split | None


@dataclass(frozen=True)
class Machine:
    """What runs a tape. `call`: layout of a record (fields fn, ptr, i, f; fn 0 does nothing).

    run(records, sections, count, threads): addresses of the first record and of `count` pairs (calls of a part, parts).
    parts: how many parts a section of split calls has.
    """

    kernels: Mapping[Any, Kernel]
    call: np.dtype
    run: Callable[[int, int, int, int], None]
    parts: int = 1


@dataclass(frozen=True)
class Place:
    """A tensor before there is memory: its home, bytes from the home's start, and layout."""

    home: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return layout_text(self.dtype, self.shape)

    def tensor(self, base: Tensor) -> Tensor:
        """The tensor itself, given one that begins where the home does."""
        start = base.storage_offset() * base.itemsize + self.offset
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        return view.set_(base.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


@dataclass(frozen=True)
class EagerCall:
    """An operator without a kernel. Arguments hold `Place`s for tensors; `outs` pairs a result's index with its place."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[tuple[int, Place], ...]


@dataclass(frozen=True)
class Entry:
    """One step of the tape, for people: the node, whether a kernel runs it, where its tensors are."""

    node: Node
    native: bool
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tape:
    """Calls over homes. `records` lack addresses: pointer p of call c is base[homes[c, p]] + offsets[c, p].

    sections [n, 3] int64: calls of a part, parts, first record. Records of a section lie part by part.
    segments: the order of execution, ranges of `sections` or an EagerCall. arena_bytes is what the arena needs, unshared_bytes
    what intermediates would need without reuse, folded the number of nodes that are pure address arithmetic.
    """

    records: np.ndarray
    homes: np.ndarray
    offsets: np.ndarray
    sections: np.ndarray
    segments: tuple[range | EagerCall, ...]
    results: tuple[Place, ...]
    entries: tuple[Entry, ...]
    arena_bytes: int
    unshared_bytes: int
    folded: int

    @property
    def eager_calls(self) -> int:
        return sum(isinstance(segment, EagerCall) for segment in self.segments)

    @property
    def python_segments(self) -> int:
        """Runs of consecutive operators that torch executes."""
        kinds = [isinstance(segment, EagerCall) for segment in self.segments]
        return sum(now and not before for before, now in zip([False, *kinds], kinds, strict=False))

    def histogram(self) -> Counter[str]:
        """Calls by operator, address arithmetic left out."""
        return Counter(op_name(entry.node) for entry in self.entries)


class _Homes:
    """Where every storage lives: inputs and constants first, then blocks placed by liveness.

    Calls of a split section happen at one time: no part knows how far the others are, so nothing is reused within it.
    """

    def __init__(self, traced: Traced, parts: Sequence[Section]) -> None:
        graph = traced.graph
        self.of: dict[int, tuple[int, int]] = {}
        fixed = [node for node in graph.nodes if node.op == "placeholder"]
        fixed += sorted((node for node in graph.nodes if node.op == "get_attr"), key=lambda node: node.target)
        constants = sorted(traced.constants)
        for index, node in enumerate(fixed):
            if node.op == "get_attr":
                index = len(traced.args_info) + constants.index(node.target)
            self.of[storage(node.meta["val"])] = (FIRST_INPUT + index, 0)
        spans: dict[int, list[int]] = {}  # storage -> size, first and last step
        times = _times(parts)
        for at, node in times:
            for x in tensors_in([arg.meta["val"] for arg in nodes_in((node.args, node.kwargs))] + [node.meta["val"]]):
                key = storage(x)
                if key not in self.of:
                    spans.setdefault(key, [x.untyped_storage().nbytes(), at, at])[2] = at
        for x in graph.output_node().meta["val"]:
            if storage(x) in spans:
                spans[storage(x)][2] = len(times)
        blocks = [Block(*span) for span in spans.values()]
        offsets, self.arena_bytes = place(blocks)
        self.unshared_bytes = sum(round_up(block.size) for block in blocks)
        self.of |= {key: (ARENA, offset) for key, offset in zip(spans, offsets, strict=True)}

    def place(self, x: Tensor) -> Place:
        home, offset = self.of[storage(x)]
        return Place(home, offset + x.storage_offset() * x.itemsize, x.shape, x.stride(), x.dtype)


def _times(parts: Sequence[Section]) -> list[tuple[int, Node]]:
    """When each node happens: calls one after the other, those of a split section at once."""
    times: list[tuple[int, Node]] = []
    now = 0
    for section in parts:
        for node in section.nodes:
            times.append((now, node))
            now += not section.split
        now += section.split
    return times


class _Launches:
    """Launches in the order of records, and the sections they make."""

    def __init__(self, label: str, kernels: Mapping[Any, Kernel]) -> None:
        self.label, self._kernels = label, kernels
        self.all: list[tuple[Kernel, Launch] | None] = []
        self.sections: list[tuple[int, int, int]] = []

    def one(self, node: Node, joins: bool) -> None:
        """A call on all threads; it may join the section before it if that is of such calls."""
        self.all.append(self._pack(node, _full_arguments(node), _results(node)))
        if joins and self.sections[-1][1] == 1:
            count, parts, first = self.sections[-1]
            self.sections[-1] = (count + 1, parts, first)
        else:
            self.sections.append((1, 1, len(self.all) - 1))

    def split(self, section: Section) -> None:
        """Calls part by part."""
        first = len(self.all)
        calls = [
            call.parts(_full_arguments(node), _results(node))
            for node, call in zip(section.nodes, section.calls, strict=True)
        ]
        parts = 0
        for part in zip(*calls, strict=True):
            parts += 1
            self.all += [
                None if given is None else self._pack(node, *given)
                for node, given in zip(section.nodes, part, strict=True)
            ]
        self.sections.append((len(section.nodes), parts, first))

    def _pack(self, node: Node, args: Arguments, outs: Sequence[Tensor]) -> tuple[Kernel, Launch]:
        kernel = self._kernels[node.target]
        try:
            return kernel, kernel.pack(args, outs)
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            raise CaptureError(f"{self.label}: {op_name(node)} cannot run here: {error} ({source(node)})") from error


def build_tape(traced: Traced, machine: Machine) -> Tape:
    """Compiles a captured graph for a machine. Raises CaptureError where a kernel cannot take an operator's arguments."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    steps = [node for node in nodes if not is_view(node) and node.target not in _ALLOCATIONS]
    known = [(node, _full_arguments(node) if node.target in machine.kernels else (), _results(node)) for node in steps]
    shape = traced.program.shape
    threads = min(machine.parts, shape.rows * shape.query_len)
    parts = sections(known, machine.kernels, shape.rows, threads)
    homes = _Homes(traced, parts)
    launches = _Launches(traced.label, machine.kernels)
    segments: list[range | EagerCall] = []
    entries: list[Entry] = []
    for section in parts:
        if section.split:
            launches.split(section)
        for node in section.nodes:
            native = node.target in machine.kernels
            goes_on = bool(segments) and isinstance(segments[-1], range)
            if native and not section.split:
                launches.one(node, goes_on)
            if not native:
                segments.append(_eager(node, homes))
            elif goes_on:
                segments[-1] = range(segments[-1].start, len(launches.sections))
            else:
                segments.append(range(len(launches.sections) - 1, len(launches.sections)))
            entries.append(_entry(node, native, homes))
    fresh = [result.fresh for result in traced.out_info if result.dtype is not None]
    results = [x for x, wanted in zip(traced.graph.output_node().meta["val"], fresh, strict=True) if wanted]
    records, where, offsets = _records(traced.label, launches.all, homes, machine.call)
    return Tape(
        records=records, homes=where, offsets=offsets, segments=tuple(segments),
        sections=np.array(launches.sections, dtype=np.int64).reshape(-1, 3),
        results=tuple(homes.place(x) for x in results), entries=tuple(entries), arena_bytes=homes.arena_bytes,
        unshared_bytes=homes.unshared_bytes, folded=len(nodes) - len(entries),
    )  # fmt: skip


def _full_arguments(node: Node) -> list[Any]:
    """A node's arguments with its schema's defaults filled in, tensors in place of nodes."""
    given, schema = list(node.args), node.target._schema.arguments
    for argument in schema[len(given) :]:
        given.append(node.kwargs.get(argument.name, argument.default_value))
    return list(map_aggregate(given, lambda value: value.meta["val"] if isinstance(value, Node) else value))


def _results(node: Node) -> tuple[Tensor, ...]:
    value = node.meta["val"]
    return tuple(value) if isinstance(value, (tuple, list)) else () if value is None else (value,)


def _records(
    label: str, launches: Sequence[tuple[Kernel, Launch] | None], homes: _Homes, call: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Call records without addresses, and the home and offset of each of their pointers."""
    records = np.zeros(len(launches), dtype=call)
    shape = records["ptr"].shape
    where, offsets = np.full(shape, NULL, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, made in enumerate(launches):
        if made is None:  # a part without rows
            continue
        kernel, launch = made
        for field, values in (("ptr", launch.pointers), ("i", launch.ints), ("f", launch.floats)):
            if len(values) > call[field].shape[0]:
                raise CaptureError(
                    f"{label}: {kernel.symbol} needs {len(values)} entries of '{field}', a record has {call[field].shape[0]}"
                )
        records["fn"][row] = kernel.fn_address
        records["i"][row, : len(launch.ints)] = launch.ints
        records["f"][row, : len(launch.floats)] = launch.floats
        for column, x in enumerate(launch.pointers):
            if x is not None:
                at = homes.place(x)
                where[row, column], offsets[row, column] = at.home, at.offset
    return records, where, offsets


def _eager(node: Node, homes: _Homes) -> EagerCall:
    def place_of(value: Any) -> Any:
        return homes.place(value.meta["val"]) if isinstance(value, Node) else value

    given = {storage(x) for arg in nodes_in((node.args, node.kwargs)) for x in tensors_in(arg.meta["val"])}
    outs = [
        (i, homes.place(x)) for i, x in enumerate(tensors_in(node.meta["val"])) if storage(x) not in given
    ]  # what lies in an argument's memory is there already
    return EagerCall(
        node.target, map_aggregate(node.args, place_of), dict(map_aggregate(node.kwargs, place_of)), tuple(outs)
    )  # fmt: skip


def _entry(node: Node, native: bool, homes: _Homes) -> Entry:
    args = nodes_in((node.args, node.kwargs))
    written = written_nodes(node)
    reads = [homes.place(x) for arg in args if arg not in written for x in tensors_in(arg.meta["val"])]
    writes = [homes.place(x) for x in tensors_in([arg.meta["val"] for arg in written])]
    fresh = [homes.place(x) for x in tensors_in(node.meta["val"])]
    return Entry(node, native, tuple(reads), tuple(dict.fromkeys(writes + fresh)))
