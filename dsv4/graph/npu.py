"""Lowering to Ascend NPUs: torchair's graph engine (`torchair`) and capture-and-replay (`npugraph_ex`).

Both start from a traced step and go through the entry that torch.compile would call, so a node without a converter fails here
as it would on a device. On a host without CANN the graph engine's side works under `cann_shim`, up to the graph itself.
"""

import contextlib
import functools
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from dsv4.errors import CaptureError
from dsv4.graph import cann_shim, ge_passes
from dsv4.graph.npu_load import graph_config, load
from dsv4.graph.npu_run import graph_engine, why_no_npu
from dsv4.graph.scopes import SCOPE, scopes
from dsv4.graph.stages import Lowered, Traced


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lowering without torchair's remarks about fake groups, and without its prints."""
    with warnings.catch_warnings(), open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class GeNode:
    """One node of a graph-engine graph. `scope`: the model functions it comes from, outermost first, and its layer."""

    name: str
    type: str
    inputs: tuple[str, ...]
    scope: tuple[str, ...]


class _Recording:
    """Remembers which FX node each graph-engine node was converted from."""

    def __init__(self) -> None:
        self.origin: dict[str, tuple[str, ...]] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

        original = GeConcreteGraph.converter_context
        origin = self.origin

        @contextlib.contextmanager
        def recording(graph: Any, *, node: Any) -> Iterator[None]:
            before = len(graph.graph.op)
            with original(graph, node=node):
                yield
            scope = (node.meta.get("custom") or {}).get(SCOPE, ())
            for op in graph.graph.op[before:]:
                origin[op.name] = scope

        GeConcreteGraph.converter_context = recording
        try:
            yield
        finally:
            GeConcreteGraph.converter_context = original


def _fake_inputs(traced: Traced) -> list[Tensor]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="npu:0") for leaf in traced.args_info
        ]


def _to_graph(traced: Traced, config: Any) -> tuple[Any, GraphModule, dict[str, tuple[str, ...]]]:
    """(torchair's concrete graph, the functional FX graph, scope by graph-engine node)."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torchair import npu_fx_compiler

    compiler, recording, caught = npu_fx_compiler._NpuFxCompiler(config), _Recording(), {}
    module = GraphModule(dict(traced.constants), traced.graph, traced.program.name)
    for node, scope in scopes(traced.graph).items():
        node.meta["custom"] = {SCOPE: scope}

    def backend(gm: GraphModule, example_inputs: Sequence[Tensor]) -> Any:
        for node, leaf in zip(gm.graph.find_nodes(op="placeholder"), traced.args_info, strict=True):
            node.target = leaf.name
        caught["ge"] = compiler(gm, example_inputs).runner
        caught["fx"] = caught["ge"].fx_graph
        return cann_shim.refuse(traced.label)

    backend._boxed_call = True
    inputs = _fake_inputs(traced)
    with _quiet(), recording(), ge_passes.applied(), torch.no_grad(), inputs[0].fake_mode:
        aot_module_simplified(
            module, inputs, fw_compiler=backend, bw_compiler=None, inference_compiler=backend,
            decompositions=npu_fx_compiler._get_merged_decompositions(config), keep_inference_input_mutations=True,
        )  # fmt: skip
    return caught["ge"], caught["fx"], recording.origin


class GeLowered(Lowered):
    """A step as a graph-engine graph. `graph` is torchair's GraphDef, `fx` the functional graph it was made from."""

    target = "torchair"

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced)
        load()
        if why_no_npu() is not None:
            self._made  # noqa: B018  (here the graph is all there is; on a device, compiling makes its own)

    @functools.cached_property
    def _made(self) -> tuple[Any, GraphModule, dict[str, tuple[str, ...]]]:
        try:
            return _to_graph(self.traced, graph_config())
        except Exception as error:
            line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise CaptureError(f"{self.label}: no graph-engine graph: {line}") from error

    @property
    def graph(self) -> Any:
        return self._made[0].graph

    @property
    def fx(self) -> GraphModule:
        return self._made[1]

    @property
    def _origin(self) -> dict[str, tuple[str, ...]]:
        return self._made[2]

    @property
    def nodes(self) -> list[GeNode]:
        return [GeNode(op.name, op.type, tuple(op.input), self._origin.get(op.name, ())) for op in self.graph.op]

    def histogram(self) -> Counter[str]:
        """Graph-engine nodes by type."""
        return Counter(op.type for op in self.graph.op)

    @property
    def node_count(self) -> int:
        return len(self.graph.op)

    @property
    def fx_node_count(self) -> int:
        return sum(node.op == "call_function" for node in self.fx.graph.nodes)

    @property
    def written_inputs(self) -> tuple[str, ...]:
        """Paths of the leaves that the graph writes in place."""
        concrete = self._made[0]
        indices = {*concrete._ref_data_idx, *concrete._graph_output_ref_input.values()}
        paths = self._input_paths()
        return tuple(paths[i] for i in sorted(indices))

    def _input_paths(self) -> Mapping[int, str]:
        """Graph-engine input number to leaf path: inputs that no node uses are dropped and the rest renumbered."""
        by_name = {leaf.name: leaf.path for leaf in self.traced.args_info}
        data = [op for op in self.graph.op if op.type in ("Data", "RefData")]
        return {op.attr["index"].i: by_name.get(_plain_name(op.name, by_name), op.name) for op in data}

    def copied_pools(self) -> list[str]:
        """TensorMove nodes: each copies a whole input because it is read before it is written in place, or written twice."""
        source = {op.name: op for op in self.graph.op}
        by_name = {leaf.name: leaf.path for leaf in self.traced.args_info}
        found = []
        for op in self.graph.op:
            if op.type == "TensorMove":
                producer = source.get(op.input[0].split(":")[0])
                found.append(by_name.get(_plain_name(producer.name, by_name), producer.name) if producer else op.name)
        return found

    def collectives(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(type, group, scope) of every collective in graph order: the order that all ranks must share."""
        return [
            (op.type, op.attr["group"].s.decode() or op.attr["group_ep"].s.decode(), self._origin.get(op.name, ()))
            for op in self.graph.op
            if op.type.startswith(("Hcom", "MoeDistribute"))
        ]

    def as_text(self) -> str:
        lines = [f"# {self.label}: {self.fx_node_count} fx nodes, {self.node_count} graph-engine nodes"]
        for op in self.graph.op:
            shape = ",".join(str(list(desc.shape.dim)) for desc in op.output_desc)
            scope = ".".join(self._origin.get(op.name, ()))
            lines.append(f"{op.name}: {op.type}({', '.join(op.input)}) {shape}" + (f"  # {scope}" if scope else ""))
        return "\n".join(lines)

    def build(self, bound: Mapping[int, Tensor], **options: Any) -> Any:
        return graph_engine(self.traced, bound, **options)


def _plain_name(name: str, known: Mapping[str, str]) -> str:
    """A Data node's leaf name, without what torchair adds to make it unique."""
    if name in known:
        return name
    return re.sub(r"_\d+$", "", name)
