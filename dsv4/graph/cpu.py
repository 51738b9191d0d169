"""The `cpu` target: the captured graph as a tape of fused kernels, replayed by one native call."""

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from dsv4.errors import CaptureError
from dsv4.graph.arena import Arena, round_up
from dsv4.graph.cost import Cost, node_cost, total
from dsv4.graph.nodes import op_name
from dsv4.graph.record import source
from dsv4.graph.stages import Lowered, Traced
from dsv4.graph.tape import ARENA, FIRST_INPUT, EagerCall, Entry, Machine, Place, Tape, build_tape
from dsv4.graph.text import bytes_text, table_text


def native_machine() -> Machine:
    """The fused kernels of this host. Raises PlatformError where they cannot be built."""
    from dsv4.ops import cpu

    library = cpu.library()
    return Machine(
        kernels=cpu.KERNELS, call=cpu.CALL_DTYPE, run=library.dsv4_run_sections, parts=torch.get_num_threads()
    )


class CpuLowered(Lowered):
    """A step as a tape. `python_segments` counts the runs of operators that have no kernel; zero is the goal."""

    target = "cpu"

    def __init__(self, traced: Traced, machine: Machine | None = None) -> None:
        super().__init__(traced)
        self.machine = machine or native_machine()
        self.tape: Tape = build_tape(traced, self.machine)

    @property
    def python_segments(self) -> int:
        return self.tape.python_segments

    @property
    def node_count(self) -> int:
        return len(self.tape.entries)

    def histogram(self) -> Counter[str]:
        """Calls by operator, address arithmetic left out."""
        return self.tape.histogram()

    def cost(self) -> dict[str, tuple[int, Cost]]:
        """Calls and estimated cost by operator, the most expensive in bytes first."""
        sums: dict[str, tuple[int, Cost]] = {}
        for entry in self.tape.entries:
            calls, cost = sums.get(op_name(entry.node), (0, Cost()))
            sums[op_name(entry.node)] = (calls + 1, cost + node_cost(entry.node))
        return dict(sorted(sums.items(), key=lambda item: -(item[1][1].read_bytes + item[1][1].written_bytes)))

    def as_text(self) -> str:
        """The tape: where each tensor lies, and what each operator costs."""
        tape = self.tape
        head = [
            f"# {self.label}: {self.node_count} calls, {self.python_segments} python segments, {tape.folded} views folded",
            f"# arena {bytes_text(tape.arena_bytes)}, without reuse {bytes_text(tape.unshared_bytes)}",
        ]
        body = [self._line(i, entry) for i, entry in enumerate(tape.entries)]
        returned = "return " + ", ".join(self._place(place) for place in tape.results)
        rows = [
            (name, calls, f"{cost.flops / 1e6:.2f}", bytes_text(cost.read_bytes), bytes_text(cost.written_bytes))
            for name, (calls, cost) in self.cost().items()
        ]
        everything = total(cost for _, cost in self.cost().values())
        rows.append(("total", self.node_count, f"{everything.flops / 1e6:.2f}", bytes_text(everything.read_bytes),
                     bytes_text(everything.written_bytes)))  # fmt: skip
        return "\n".join(
            [*head, *body, returned, "", *table_text(("operator", "calls", "MFLOP", "read", "written"), rows)]
        )

    def _line(self, index: int, entry: Entry) -> str:
        out = ", ".join(self._place(place) for place in entry.writes)
        reads = ", ".join(self._place(place) for place in entry.reads)
        how = "" if entry.native else "  [python]"
        return f"{index:4} {op_name(entry.node)}({reads}) -> {out}{how}  # {source(entry.node)}"

    def _place(self, place: Place) -> str:
        """`params_target_embed f32[100, 8]`, `arena+0x40 f32[2, 8]`."""
        inputs, offset = self.args_info, f"+{place.offset:#x}"
        if place.home == ARENA:
            return f"arena{offset} {place}"
        index = place.home - FIRST_INPUT
        name = inputs[index].name if index < len(inputs) else f"constant_{index - len(inputs)}"
        return f"{name}{offset if place.offset else ''} {place}"

    def build(
        self, bound: Mapping[int, Tensor], *, arena: Arena | None = None, counter: np.ndarray | None = None
    ) -> "TapeRunner":
        """Links the tape to memory. Every donated argument must be bound. `arena` may be shared; default is one of its own.

        counter: [1] integer, one more with each segment that is over: where a rank is, for whoever waits for it.
        """
        loose = sorted({leaf.path for i, leaf in enumerate(self.args_info) if leaf.donated and i not in bound})
        if loose:
            raise CaptureError(
                f"{self.label}: {loose[0]} is donated but not bound; name its argument in compile(bind=...)"
            )
        counter = np.zeros(1, np.int64) if counter is None else counter
        return TapeRunner(self.traced, self.tape, self.machine, bound, arena or Arena(), counter)


class TapeRunner:
    """A tape with addresses. Call leaves are copied to fixed buffers, results out of the arena; nothing else happens in Python
    unless an operator has no kernel."""

    def __init__(
        self,
        traced: Traced,
        tape: Tape,
        machine: Machine,
        bound: Mapping[int, Tensor],
        arena: Arena,
        counter: np.ndarray,
    ) -> None:
        self.tape, self.machine, self.arena, self.counter = tape, machine, arena, counter
        arena.reserve(tape.arena_bytes)
        free = [i for i in range(len(traced.args_info)) if i not in bound]
        sizes = [round_up(traced.args_info[i].span_bytes) for i in free]
        self._inputs = torch.zeros(sum(sizes), dtype=torch.uint8)
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        self._bases: dict[int, Tensor] = {FIRST_INPUT + i: x for i, x in bound.items()}
        self._bases |= {FIRST_INPUT + i: self._inputs[start:] for i, start in zip(free, starts, strict=True)}
        after = FIRST_INPUT + len(traced.args_info)
        self._bases |= {after + k: traced.constants[name] for k, name in enumerate(sorted(traced.constants))}
        self._copies = []
        for i in free:
            leaf, home = traced.args_info[i], FIRST_INPUT + i
            fixed = Place(home, 0, leaf.shape, leaf.stride, leaf.dtype).tensor(self._bases[home])
            dense = fixed.nbytes if fixed.is_contiguous() else None
            self._copies.append((fixed, fixed.data_ptr(), dense))
        self._link()

    def _link(self) -> None:
        """Writes addresses into the call records, and tensors into the calls that torch makes."""
        tape, self._linked = self.tape, self.arena.buffer
        self._host: tuple[list[np.ndarray], list[np.ndarray]] | None = None
        bases = self._bases | {ARENA: self._linked}
        table = np.zeros(max(bases) + 1, dtype=np.int64)
        for home, base in bases.items():
            table[home] = base.data_ptr()
        self._records = tape.records.copy()
        self._records["ptr"] = (table[tape.homes] + tape.offsets).astype(np.uint64)
        self._results = [place.tensor(bases[place.home]) for place in tape.results]
        self._segments = [
            _eager(part, bases) if isinstance(part, EagerCall) else self._native(part) for part in tape.segments
        ]

    def _native(self, part: range) -> Callable[[], None]:
        some = self.tape.sections[part.start : part.stop]
        pairs = np.ascontiguousarray(some[:, :2])
        first = self._records.ctypes.data + int(some[0, 2]) * self._records.itemsize
        run, sections, count = self.machine.run, pairs.ctypes.data, len(pairs)
        return lambda keep=pairs: run(first, sections, count, torch.get_num_threads())

    def __call__(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        if self._linked is not self.arena.buffer:
            self._link()
        for x, (fixed, address, dense) in zip(leaves, self._copies, strict=True):
            if dense is not None and x.is_contiguous():
                ctypes.memmove(address, x.data_ptr(), dense)
            else:
                fixed.copy_(x)
        self._replay()
        return [x.clone() for x in self._results]

    def on_host(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The same on numpy arrays: after a step everything is out of the caches of this core, so every line of Python costs."""
        if self._linked is not self.arena.buffer:
            self._link()
        if self._host is None:
            self._host = [fixed.numpy() for fixed, *_ in self._copies], [x.numpy() for x in self._results]
        inputs, results = self._host
        for fixed, x in zip(inputs, arrays, strict=True):
            np.copyto(fixed, x)
        self._replay()
        return [x.copy() for x in results]

    def _replay(self) -> None:
        for segment in self._segments:
            segment()
            self.counter[0] += 1


def _eager(call: EagerCall, bases: Mapping[int, Tensor]) -> Callable[[], None]:
    def real(value: Any) -> Any:
        return value.tensor(bases[value.home]) if isinstance(value, Place) else value

    args, kwargs = map_aggregate(call.args, real), dict(map_aggregate(call.kwargs, real))
    outs = [(index, real(place)) for index, place in call.outs]

    in_flight = call.func.namespace == "_c10d_functional"

    @torch.no_grad()
    def run() -> None:
        found = call.func(*args, **kwargs)
        if in_flight:  # results are copied out now, so the graph's own wait comes too late
            found = tree_map(torch.ops._c10d_functional.wait_tensor, found)
        flat = found if isinstance(found, (tuple, list)) else (found,)
        for index, out in outs:
            out.copy_(flat[index])

    return run
