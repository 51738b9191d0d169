"""What we make smaller before an NPU compiler sees a step: equal nodes, chains of views, casts and copies that do nothing.

The graph engine folds some of these itself; doing it here makes node counts honest, compilation shorter, and holds for
capture-and-replay too, where nothing else would do it. Shapes are static and the FX graph is functional, so each pass is a
few lines.
"""

import contextlib
import functools
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
          aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}  # fmt: skip


def simplify_fx(gm: GraphModule) -> None:
    """Passes over a functional FX graph, in place. Masks, rope tables and addresses are made once, not per layer."""
    from torch._functorch.compile_utils import fx_graph_cse

    # It marks a collective's result for autograd; torchair has no rule for it.
    marker = torch.ops._c10d_functional._wrap_tensor_autograd.default
    for node in gm.graph.find_nodes(op="call_function", target=marker):
        node.replace_all_uses_with(node.args[0])
    drop_round_trips(gm)
    drop_whole_splits(gm)
    merge_views(gm)
    gm.graph = fx_graph_cse(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def fx_pass(gm: GraphModule, example_inputs: Any = None, config: Any = None) -> None:
    """`simplify_fx` as the hook that torchair's compilers call before their own passes."""
    simplify_fx(gm)


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Graphs that torchair makes inside are simplified before they are compiled: it has no hook for that."""
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    original = GeConcreteGraph.optimize_graph_without_runtime

    def optimise(graph: Any, *args: Any, **kwargs: Any) -> None:
        original(graph, *args, **kwargs)
        simplify_ge(graph.graph)

    GeConcreteGraph.optimize_graph_without_runtime = optimise
    try:
        yield
    finally:
        GeConcreteGraph.optimize_graph_without_runtime = original


def drop_round_trips(gm: GraphModule) -> None:
    """bf16 to float32 and back is nothing, with reshapes in between or without."""
    cast = aten._to_copy.default
    for node in list(gm.graph.nodes):
        if node.target is not cast or node.meta["val"].dtype != torch.bfloat16:
            continue
        wide = node.args[0]
        while isinstance(wide, Node) and wide.target in _VIEWS:
            wide = wide.args[0]
        if wide.target is not cast or wide.args[0].meta["val"].dtype != torch.bfloat16:
            continue
        with gm.graph.inserting_before(node):
            view = gm.graph.call_function(aten.view.default, (wide.args[0], list(node.meta["val"].shape)))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)
    gm.graph.eliminate_dead_code()


def drop_whole_splits(gm: GraphModule) -> None:
    """A part of a split that is all of it (the other parts are empty) is what was split."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
        for part in list(node.users):
            if part.meta["val"].shape == node.args[0].meta["val"].shape:
                part.replace_all_uses_with(node.args[0])
    gm.graph.eliminate_dead_code()


def _viewable(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether x can be seen in this shape without a copy."""
    try:
        x.view(shape)
    except RuntimeError:
        return False
    return True


def merge_views(gm: GraphModule) -> None:
    """A chain of reshapes becomes one view of its root, or nothing."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _VIEWS:
            continue
        root = node.args[0]
        while isinstance(root, Node) and root.target in _VIEWS:
            root = root.args[0]
        value: Tensor = node.meta["val"]
        if not _viewable(root.meta["val"], value.shape):
            continue
        if root.meta["val"].shape == value.shape:
            node.replace_all_uses_with(root)
            continue
        with gm.graph.inserting_before(node):
            view = gm.graph.call_function(aten.view.default, (root, list(value.shape)))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)
    gm.graph.eliminate_dead_code()


# ---- graph-engine graphs ---------------------------------------------------------------------------------------------------

_PRODUCTS = ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2")
_SAME_TYPE = {"Add", "Sub", "Mul", "RealDiv", "Reshape", "Unsqueeze", "Squeeze", "Neg", "Exp", "Sigmoid", "ConcatV2",
              "SoftmaxV2", "ReduceSum", "GatherV2", "SplitV", "StridedSliceV2", "SelectV2"}  # fmt: skip
_INT32, _INT64 = 7, 8  # in the graph's own numbering
_TAKES_INDICES = {"GatherElements", "ScatterElements"}
_UNIQUE = ("Data", "RefData", "NetOutput", "Scatter", "Assign", "TensorMove", "Hcom", "MoeDistribute", "Identity")


def simplify_ge(graph: Any) -> None:
    """Passes over a GraphDef, in place."""
    absorb_transposes(graph)
    bypass(graph, idle_casts(graph))
    narrow_indices(graph)
    bypass(graph, idle_identities(graph))
    merge_equal(graph)
    drop_unused(graph)


def _stem(name: str) -> str:
    return name.rpartition(":")[0]


def _redirect(graph: Any, names: dict[str, str]) -> None:
    """Replaces "node:port" inputs, following chains."""
    for op in graph.op:
        for i, name in enumerate(op.input):
            while name in names:
                name = names[name]
            op.input[i] = name


def bypass(graph: Any, nodes: Iterable[Any]) -> None:
    """Readers of a node's result read its first input instead."""
    _redirect(graph, {f"{op.name}:0": op.input[0] for op in nodes})


def _controlled(graph: Any) -> set[str]:
    """Nodes with an edge that orders without carrying data."""
    return {end for op in graph.op for name in op.input if name.endswith(":-1") for end in (op.name, _stem(name))}


def _types(graph: Any) -> Callable[[str], int | None]:
    """The type of a "node:port" result, None if it is not written down."""
    by_name = {op.name: op for op in graph.op}

    @functools.cache
    def dtype(name: str) -> int | None:
        op, port = by_name[_stem(name)], int(name.rpartition(":")[2])
        if op.type == "SelectV2":
            return dtype(op.input[1])
        if op.type in _SAME_TYPE:
            return dtype(op.input[0])
        if op.type == "TopKV2" and port == 1:
            return _INT32  # torchair leaves it unsaid
        return op.output_desc[port].dtype if port < len(op.output_desc) else None

    return dtype


def idle_casts(graph: Any) -> list[Any]:
    """Casts to the type their input already has."""
    dtype, kept = _types(graph), _controlled(graph)
    casts = (op for op in graph.op if op.type == "Cast" and op.name not in kept)
    return [op for op in casts if dtype(op.input[0]) == op.output_desc[0].dtype]


def narrow_indices(graph: Any) -> None:
    """Casts from int32 to int64 that only ATen asks for: before nodes that take indices of either type, and back."""
    dtype, kept = _types(graph), _controlled(graph)
    wide = {
        f"{op.name}:0": op.input[0]
        for op in graph.op
        if op.type == "Cast"
        and op.name not in kept
        and (dtype(op.input[0]), op.output_desc[0].dtype) == (_INT32, _INT64)
    }
    for op in graph.op:
        if op.type in _TAKES_INDICES and op.input[1] in wide:
            op.input[1] = wide[op.input[1]]
            op.input_desc[1].dtype = _INT32
    bypassed = [
        op for op in graph.op
        if op.type == "Cast" and op.name not in kept and op.output_desc[0].dtype == _INT32 and op.input[0] in wide
    ]  # fmt: skip
    _redirect(graph, {f"{op.name}:0": wide[op.input[0]] for op in bypassed})


def idle_identities(graph: Any) -> list[Any]:
    """Copies of values that nothing writes: everything but inputs and what in-place updates return. Waiting for a collective
    is one: its readers already come after it."""
    by_name = {op.name: op for op in graph.op}
    kept = _controlled(graph)
    results = {_stem(name) for op in graph.op if op.type == "NetOutput" for name in op.input}
    written = ("Data", "RefData", "Scatter", "Assign")
    return [
        op
        for op in graph.op
        if op.type == "Identity"
        and op.name not in kept | results
        and not by_name[_stem(op.input[0])].type.startswith(written)
    ]


def absorb_transposes(graph: Any) -> None:
    """A swap of the last two axes in front of a matrix product becomes an attribute of the product."""
    by_name = {op.name: op for op in graph.op}
    for op in graph.op:
        if op.type not in _PRODUCTS:
            continue
        attributes = ("adj_x1", "adj_x2") if op.type.startswith("Batch") else ("transpose_x1", "transpose_x2")
        for port, attribute in enumerate(attributes):
            swap = by_name.get(_stem(op.input[port]))
            if swap is not None and swap.type == "Transpose" and _swaps_last(by_name[_stem(swap.input[1])]):
                op.attr[attribute].b = not op.attr[attribute].b
                op.input[port] = swap.input[0]


def _swaps_last(const: Any) -> bool:
    if const.type != "Const":
        return False
    data = const.attr["value"].t.data
    order = list(struct.unpack(f"<{len(data) // 8}q", data))
    last = len(order) - 1
    return last >= 1 and order == [*range(last - 1), last, last - 1]


def merge_equal(graph: Any) -> None:
    """One node per distinct computation: constants first of all, then what reads only them."""
    first: dict[tuple, str] = {}
    names: dict[str, str] = {}
    kept = _controlled(graph)
    for op in graph.op:  # operands come before their readers
        for i, name in enumerate(op.input):
            stem, _, port = name.rpartition(":")
            if stem in names:
                op.input[i] = f"{names[stem]}:{port}"
        if op.type.startswith(_UNIQUE) or op.name in kept:
            continue
        attributes = tuple(
            (key, op.attr[key].SerializeToString(deterministic=True)) for key in sorted(op.attr) if key[0] != "_"
        )
        chosen = first.setdefault((op.type, tuple(op.input), attributes), op.name)
        if chosen != op.name:
            names[op.name] = chosen


def drop_unused(graph: Any) -> None:
    """Removes nodes that nothing reads, inputs and in-place updates excepted."""
    by_name = {op.name: op for op in graph.op}
    uses = Counter(_stem(name) for op in graph.op for name in op.input)
    kept = ("Data", "RefData", "NetOutput", "Scatter", "Assign", "Hcom", "MoeDistribute")
    dead = [op for op in graph.op if not uses[op.name] and not op.type.startswith(kept)]
    gone = set()
    while dead:
        op = dead.pop()
        gone.add(op.name)
        for name in op.input:
            uses[_stem(name)] -= 1
            producer = by_name.get(_stem(name))
            if producer is not None and not uses[producer.name] and not producer.type.startswith(kept):
                dead.append(producer)
    live = [op for op in graph.op if op.name not in gone]
    copies = [type(op)() for op in live]
    for copy, op in zip(copies, live, strict=True):
        copy.CopyFrom(op)
    del graph.op[:]
    graph.op.extend(copies)
