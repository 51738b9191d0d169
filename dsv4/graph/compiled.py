"""The last stage: a step that runs, checked at its door."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4.errors import CaptureError
from dsv4.graph.leaves import Leaf, Result, last_name, reader
from dsv4.graph.text import Readable

if TYPE_CHECKING:
    from dsv4.graph.stages import Lowered

Array = np.ndarray


class Compiled(Readable):
    """A runnable step. Call it with the arguments that were not bound, in order; it returns what the step returns.

    Leaves that are inputs coming back (donated caches and state) are the very tensors that went in; fresh results are new
    tensors. Every call compares structure, shapes, dtypes and devices with what was captured and raises TypeError naming the
    leaf that differs; bound leaves were compared once. Not reentrant: one call at a time.
    """

    def __init__(self, lowered: "Lowered", bind: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        self.lowered, self.replays = lowered, 0
        self._options = dict(options)
        traced = lowered.traced
        names = traced.program.parameters
        unknown = bind.keys() - set(names)
        if unknown:
            raise CaptureError(f"{self.label}: bind {', '.join(sorted(unknown))}: expected some of {list(names)}")
        places = [torch.empty(0)] * len(traced.args_info)
        examples = pytree.tree_unflatten(traced.statics.merge(places), traced.args_spec)
        self._readers = {name: reader(example) for name, example in zip(names, examples, strict=True)}
        self._free = [name for name in names if name not in bind]
        self._leaves: dict[str, list[tuple[int, Leaf]]] = {name: [] for name in names}
        for index, leaf in enumerate(traced.args_info):
            self._leaves[names[leaf.argument]].append((index, leaf))
        free = [leaf for name in self._free for _, leaf in self._leaves[name]]
        self._read_free = [self._readers[name] for name in self._free]
        self._expected = [(leaf.shape, leaf.dtype, traced.device) for leaf in free]
        self._host_leaves = [
            (last_name(leaf.path), tuple(leaf.shape), torch.empty(0, dtype=leaf.dtype).numpy().dtype) for leaf in free
        ]
        self._host_results = [last_name(result.path) for result in traced.out_info if result.fresh]
        self._bind(bind)
        self.seconds = time.perf_counter() - began

    # ---- reading ----

    @property
    def label(self) -> str:
        return self.lowered.label

    @property
    def args_info(self) -> tuple[Leaf, ...]:
        return self.lowered.args_info

    @property
    def out_info(self) -> tuple[Result, ...]:
        return self.lowered.out_info

    @property
    def node_count(self) -> int:
        return self.lowered.node_count

    @property
    def python_segments(self) -> int:
        """Runs of operators that Python executes one by one in a call; zero is the goal."""
        return self.lowered.python_segments

    def histogram(self) -> Counter[str]:
        """Calls by operator, as the target counts them."""
        return self.lowered.histogram()

    def as_text(self) -> str:
        return self.lowered.as_text()

    # ---- binding ----

    def rebind(self, **trees: Any) -> None:
        """Replaces bound arguments by others with the same leaves; cheap next to compiling. Raises CaptureError."""
        if not trees.keys() <= self._bound.keys():
            raise CaptureError(f"{self.label}: rebind {', '.join(trees)}: bound arguments are {list(self._bound)}")
        self._bind(self._bound | trees)

    def _bind(self, bind: Mapping[str, Any]) -> None:
        device = self.lowered.traced.device
        bound: dict[int, Tensor] = {}
        for name, value in bind.items():
            try:
                found = self._readers[name](value)
            except (TypeError, AttributeError) as error:
                raise CaptureError(f"{self.label}: bound {name}: {error}") from None
            for (index, leaf), x in zip(self._leaves[name], found, strict=True):
                wrong = _difference(leaf, x, device) or _layout(leaf, x)
                if wrong:
                    raise CaptureError(f"{self.label}: bound {leaf.path}: {wrong}")
                bound[index] = x
        _check_overlap(self.label, self.args_info, bound)
        self._bound = dict(bind)
        self._run = self.lowered.build(bound, **self._options)
        self._assemble = self._assembler(bound)

    # ---- calling ----

    def __call__(self, *args: Any) -> Any:
        leaves: list[Tensor] = []
        try:
            for read, arg in zip(self._read_free, args, strict=True):
                leaves += read(arg)
            fits = len(leaves) == len(self._expected)
            for x, (shape, dtype, device) in zip(leaves, self._expected, strict=False):
                fits = fits and x.shape == shape and x.dtype == dtype and x.device == device
        except (AttributeError, TypeError, ValueError):
            fits = False
        if not fits:
            self._refuse(args)
        self.replays += 1
        return self._assemble(self._run(leaves), leaves)

    def on_host(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The step on host arrays by the last name of each leaf: what a scheduler sends and reads, without a tree on the way.

        Takes every leaf that is not bound; returns the fresh results, the caller's to keep. Raises TypeError naming the leaf
        that is missing or differs.
        """
        try:
            leaves = [arrays[name] for name, _, _ in self._host_leaves]
        except KeyError as missing:
            names = [name for name, _, _ in self._host_leaves]
            raise TypeError(f"{self.label}: no array {missing}; expected {names}, got {list(arrays)}") from None
        for x, (name, shape, dtype) in zip(leaves, self._host_leaves, strict=True):
            if x.shape != shape or x.dtype != dtype:
                raise TypeError(f"{self.label}: {name}: expected {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}")
        self.replays += 1
        run_on_host = getattr(self._run, "on_host", None)
        if run_on_host is None:
            device = self.lowered.traced.device
            results = self._run([torch.from_numpy(x).to(device) for x in leaves])
            found = [x.cpu().numpy() for x in results]
        else:
            found = run_on_host(leaves)
        return dict(zip(self._host_results, found, strict=True))

    def _refuse(self, args: Sequence[Any]) -> NoReturn:
        """Raises TypeError for arguments that do not fit, naming the first leaf that differs."""
        if len(args) != len(self._free):
            raise TypeError(f"{self.label}: expected arguments ({', '.join(self._free)}), got {len(args)}")
        for name, value in zip(self._free, args, strict=True):
            try:
                found = self._readers[name](value)
            except (TypeError, AttributeError) as error:
                raise TypeError(f"{self.label}: {name}: {error}") from None
            for (_, leaf), x in zip(self._leaves[name], found, strict=True):
                wrong = _difference(leaf, x, self.lowered.traced.device)
                if wrong:
                    raise TypeError(f"{self.label}: {leaf.path}: {wrong}")
        raise AssertionError("arguments that fit were refused")

    def _assembler(self, bound: Mapping[int, Tensor]) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Any]:
        """A function from fresh results and call leaves to what the step returns.

        Parts of the result that hold bound leaves only (the cache) are put together once, here.
        """
        traced = self.lowered.traced
        spec = traced.out_spec
        order = {index: k for k, index in enumerate(i for name in self._free for i, _ in self._leaves[name])}
        tuple_like = spec.type is tuple and not spec.is_leaf()
        parts = spec.children() if tuple_like else [spec]
        makers: list[Callable[[Sequence[Tensor], Sequence[Tensor]], Any]] = []
        at = fresh = 0
        for part in parts:
            picks: list[Any] = []  # per leaf: ("fresh", k), ("call", k) or ("fixed", value)
            for result in traced.out_info[at : at + part.num_leaves]:
                if result.fresh:
                    picks.append(("fresh", fresh))
                    fresh += 1
                elif result.dtype is None:
                    picks.append(("fixed", result.static))
                elif result.source in bound:
                    picks.append(("fixed", bound[result.source]))
                else:
                    picks.append(("call", order[result.source]))
            at += part.num_leaves
            makers.append(_maker(part, picks))
        if not tuple_like:
            return makers[0]
        return lambda fresh, leaves: tuple([make(fresh, leaves) for make in makers])


def _maker(spec: pytree.TreeSpec, picks: Sequence[tuple[str, Any]]) -> Callable[..., Any]:
    if all(kind == "fixed" for kind, _ in picks):
        value = pytree.tree_unflatten([value for _, value in picks], spec)
        return lambda fresh, leaves: value
    if len(picks) == 1 and spec.is_leaf():
        (kind, k), *_ = picks
        return lambda fresh, leaves: (fresh if kind == "fresh" else leaves)[k]

    def make(fresh: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        values = [fresh[k] if kind == "fresh" else leaves[k] if kind == "call" else k for kind, k in picks]
        return spec.unflatten(values)

    return make


def _difference(leaf: Leaf, x: Any, device: torch.device) -> str | None:
    """How `x` differs from the leaf that was captured; None if it fits."""
    if not isinstance(x, Tensor):
        return f"expected {leaf}, got {type(x).__name__}"
    if (x.shape, x.dtype) != (leaf.shape, leaf.dtype):
        return f"expected {leaf}, got {x.dtype} {list(x.shape)}"
    if x.device != device:
        return f"expected a tensor on {device}, got one on {x.device}"
    return None


def _layout(leaf: Leaf, x: Tensor) -> str | None:
    if x.stride() != leaf.stride:
        return (
            f"expected strides {list(leaf.stride)}, got {list(x.stride())}; bind a tensor laid out as it was captured"
        )
    return None


def _check_overlap(label: str, leaves: Sequence[Leaf], bound: Mapping[int, Tensor]) -> None:
    """Raises CaptureError if a donated leaf shares memory with another bound leaf: a write would show in both."""
    any_end = donated_end = 0
    last, last_donated = -1, -1  # the leaf that reaches furthest so far, and the donated one that does
    for start, i in sorted((x.data_ptr(), i) for i, x in bound.items() if x.numel()):
        end = start + leaves[i].span_bytes
        clash = last_donated if start < donated_end else last if leaves[i].donated and start < any_end else None
        if clash is not None:
            raise CaptureError(
                f"{label}: {leaves[clash].path} and {leaves[i].path} share memory, and one of them is donated"
            )
        if end > any_end:
            any_end, last = end, i
        if leaves[i].donated and end > donated_end:
            donated_end, last_donated = end, i
