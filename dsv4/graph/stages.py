"""The life of a step: `StepProgram.trace() -> Traced.lower(target) -> Lowered.compile() -> Compiled`.

Each stage prints itself, counts its operators and knows its input and output leaves by path. A step that cannot become a
static graph fails in `trace` or `lower`, with the operator and the model's line; a call with other leaves than those that
were captured fails by the leaf's name. What runs is the target's business (`targets.py`).
"""

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from dsv4.config import StepShape
from dsv4.errors import CaptureError
from dsv4.graph.compiled import Compiled
from dsv4.graph.donation import Access, accesses, check_donation, early_reads, repeated_writes
from dsv4.graph.leaves import Leaf, Result, Statics, flatten_arguments, output_leaves
from dsv4.graph.nodes import op_name, storage
from dsv4.graph.record import record
from dsv4.graph.targets import find
from dsv4.graph.text import Readable, graph_lines


@dataclass(frozen=True)
class StepProgram:
    """A pure step function at one static shape. `donated`: names or indices of arguments it may write in place."""

    name: str
    fn: Callable[..., Any]
    shape: StepShape
    donated: tuple[str | int, ...] = ()

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the step's positional arguments."""
        return tuple(inspect.signature(self.fn).parameters)

    @functools.cached_property
    def donated_names(self) -> frozenset[str]:
        names = {self.parameters[d] if isinstance(d, int) else d for d in self.donated}
        unknown = names - set(self.parameters)
        if unknown:
            raise CaptureError(
                f"{self.name}: donated {', '.join(sorted(unknown))}: expected arguments among {list(self.parameters)}"
            )
        return frozenset(names)

    @property
    def label(self) -> str:
        return f"{self.name} {self.shape}"

    def trace(self, *abstract_args: Any, device: str | torch.device = "cpu") -> "Traced":
        """Captures the step at the shapes of `abstract_args`: trees of meta, fake or real tensors (values are not read).

        `device` is where the step will live, index included ("npu:0"), whatever device the examples are on. Raises
        CaptureError for whatever keeps the step from being a static graph, or breaks the rules of donation.
        """
        began = time.perf_counter()
        leaves, statics, spec = flatten_arguments(self.label, self.parameters, abstract_args, self.donated_names)
        inputs = [torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta") for x in leaves]
        place = torch.device(device)
        returned: dict[str, Any] = {}

        def flat(*tensors: Tensor) -> list[Any]:
            args = pytree.tree_unflatten(statics.merge(tensors), spec)
            found, returned["spec"] = pytree.tree_flatten_with_path(self.fn(*args))
            returned["paths"] = [pytree.keystr(path) for path, _ in found]
            return [value for _, value in found]

        graph, constants, values = record(self.label, flat, inputs, [leaf.name for leaf in leaves], place)
        owners = {storage(x): leaf.path for x, leaf in zip(inputs, leaves, strict=True)}
        results = output_leaves(returned["paths"], values, inputs)
        found = accesses(graph, owners)
        back: dict[str, list[str]] = {}
        for result in results:
            if result.source is not None:
                back.setdefault(leaves[result.source].path, []).append(result.path)
        donated = {leaf.path: leaf.within for leaf in leaves if leaf.donated}
        check_donation(self.label, found, donated, back, [result.path for result in results if result.fresh])
        return Traced(
            program=self,
            graph=graph,
            constants=constants,
            args_info=leaves,
            out_info=results,
            args_spec=spec,
            out_spec=returned["spec"],
            statics=statics,
            device=place,
            accesses=found,
            seconds=time.perf_counter() - began,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced(Readable):
    """A captured step. `graph` takes the tensor leaves of the arguments in order and returns those of the result, flat."""

    program: StepProgram
    graph: Graph
    constants: Mapping[str, Tensor]
    args_info: tuple[Leaf, ...]
    out_info: tuple[Result, ...]
    args_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    statics: Statics
    device: torch.device
    accesses: Mapping[str, Access] = field(repr=False)
    seconds: float

    @property
    def label(self) -> str:
        return self.program.label

    @functools.cached_property
    def graph_module(self) -> GraphModule:
        """The graph as a callable module, for backends that want one."""
        return GraphModule(dict(self.constants), self.graph, self.program.name)

    @property
    def node_count(self) -> int:
        return sum(node.op == "call_function" for node in self.graph.nodes)

    def histogram(self) -> Counter[str]:
        """Calls by operator."""
        return Counter(op_name(node) for node in self.graph.nodes if node.op == "call_function")

    def reads_before_write(self) -> tuple[str, ...]:
        """Reads of a donated leaf before the step writes it, one line each: empty means copy-free on every target."""
        return early_reads(self.accesses)

    def repeated_writes(self) -> tuple[str, ...]:
        """Donated leaves that the step writes more than once, one line each."""
        return repeated_writes(self.accesses)

    def as_text(self) -> str:
        return "\n".join(
            [f"# {self.label}, traced for {self.device}: {self.node_count} nodes", *graph_lines(self.graph)]
        )

    def lower(self, target: str = "cpu", **options: Any) -> "Lowered":
        """Prepares the graph for a target of `targets.py`. Raises CaptureError for an operator it cannot take."""
        return find(target)(self, **options)


class Lowered(Readable):
    """A traced step prepared for one target. Subclasses implement `as_text`, `histogram`, `node_count` and `build`."""

    target: str
    python_segments: int = 0  # runs of operators that Python executes one by one

    def __init__(self, traced: Traced) -> None:
        self.traced = traced

    @property
    def label(self) -> str:
        return f"{self.traced.label} on {self.target}"

    @property
    def args_info(self) -> tuple[Leaf, ...]:
        return self.traced.args_info

    @property
    def out_info(self) -> tuple[Result, ...]:
        return self.traced.out_info

    def histogram(self) -> Counter[str]:
        return self.traced.histogram()

    @property
    def node_count(self) -> int:
        return self.traced.node_count

    def as_text(self) -> str:
        return f"# {self.label}\n{self.traced.as_text()}"

    def build(self, bound: Mapping[int, Tensor], **options: Any) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """A function from the leaves that are not in `bound` (in order) to the results that are no input (in order)."""
        raise NotImplementedError

    def compile(self, bind: Mapping[str, Any] | None = None, **options: Any) -> Compiled:
        """Makes it runnable. Arguments named in `bind` are fixed now and not passed again; the others are call arguments.

        Raises CaptureError if a bound tree has another structure or other leaves than the traced ones.
        """
        return Compiled(self, bind or {}, options)
