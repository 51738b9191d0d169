"""What a captured NPU program computes, moves and exchanges: read off its operators, one by one.

FLOPs count matrix products, two per multiply-add, by operand dtype. Bytes are what an operator must read and write: rows it
names rather than the pool, counted experts rather than all, nothing for a view. Elementwise work is its bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from dsv4.graph.nodes import is_view, nodes_in, op_name, storage, tensors_in, written_nodes
from dsv4.graph.scopes import scopes
from dsv4.graph.stages import Traced

_DTYPES = {torch.int8: "int8", torch.bfloat16: "bf16", torch.float32: "f32"}
_GATHERS = {"aten.embedding", "aten.index_select", "aten.gather", "aten.index.Tensor"}
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.mm.dtype", "aten.bmm.dtype", "npu.npu_quant_matmul",
             "npu.npu_transpose_batchmatmul", "npu.npu_grouped_matmul", "npu.npu_quant_lightning_indexer"}  # fmt: skip
_FREE = (
    "getitem",
    "_c10d_functional.wait_tensor",
    "_c10d_functional._wrap_tensor_autograd",
    "aten.alias",
    "aten.detach",
)
UNEXPLAINED = 0.1  # of a program's bytes may be neither weights, nor cache, nor named in the report
_COLLECTIVES = ("_c10d_functional.", "npu.npu_moe_distribute")


@dataclass
class Cost:
    """Totals of some operators. Bytes by what they are of; exchanged: bytes this rank puts on its link."""

    nodes: int = 0
    flops: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)
    collectives: int = 0
    exchanged: int = 0

    def add(self, other: "Cost", times: int = 1) -> None:
        self.nodes += times * other.nodes
        self.collectives += times * other.collectives
        self.exchanged += times * other.exchanged
        for name, count in other.flops.items():
            self.flops[name] += times * count
        for name, count in other.bytes.items():
            self.bytes[name] += times * count

    @property
    def moved(self) -> int:
        return sum(self.bytes.values())


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _value(node: Any) -> Any:
    return node.meta["val"]


class _Origins:
    """What a tensor is of: weights, cache, state, or an intermediate."""

    def __init__(self, traced: Traced) -> None:
        self._family = {}
        for node, leaf in zip(traced.graph.find_nodes(op="placeholder"), traced.args_info, strict=True):
            self._family[storage(node.meta["val"])] = {"params": "weights"}.get(
                leaf.path.split(".")[0], leaf.path.split(".")[0]
            )

    def __call__(self, x: Tensor) -> str:
        family = self._family.get(storage(x), "activations")
        return family if family in ("weights", "cache") else "activations"


def _rows_read(name: str, node: Node) -> dict[int, int]:
    """Bytes really read of arguments that an operator looks rows up in, by id of the tensor."""
    out = tensors_in(_value(node))[0]
    if name in _GATHERS:
        table = _value(node.args[0])
        return {id(table): min(_nbytes(table), _nbytes(out))}
    if name == "npu.npu_scatter_nd_update_":
        return {id(_value(node.args[0])): 0}
    if name == "npu.npu_quant_lightning_indexer":
        keys, scale, tables = _value(node.args[1]), _value(node.args[4]), _value(node.kwargs["block_table"])
        # At worst every query reads its keys by itself; a pool is never read more than once through the cache.
        blocks = min(keys.shape[0], tables.numel())
        return {id(x): blocks * _nbytes(x) // x.shape[0] for x in (keys, scale)}
    if name == "npu.npu_grouped_matmul":
        rows, (weight,) = _value(node.args[0][0]).shape[0], map(_value, node.args[1])
        return {id(weight): _nbytes(weight) * min(weight.shape[0], rows) // weight.shape[0]}
    return {}


def _flops(name: str, node: Node, live_rows: int | None) -> Counter:
    out = tensors_in(_value(node))[0]
    if name == "npu.npu_quant_lightning_indexer":
        query, keys, tables = _value(node.args[0]), _value(node.args[1]), _value(node.kwargs["block_table"])
        return Counter({"int8": 2 * query.numel() * tables.shape[1] * keys.shape[1]})
    first = _value(node.args[0][0] if name == "npu.npu_grouped_matmul" else node.args[0])
    rows = out.numel()
    if name == "npu.npu_grouped_matmul" and live_rows is not None:
        rows = min(out.shape[0], live_rows) * out.shape[1]
    return Counter({_DTYPES[first.dtype]: 2 * rows * first.shape[-1]})


def node_cost(node: Node, origins: _Origins, live_rows: int | None) -> Cost:
    """One operator. live_rows: rows of a dispatch buffer that hold tokens on average, None without a dispatch."""
    name, cost = op_name(node), Cost(nodes=1)
    if name in _FREE or is_view(node):
        return Cost()
    ins = {id(x): x for arg in nodes_in((node.args, node.kwargs)) for x in tensors_in(_value(arg))}
    outs = tensors_in(_value(node))
    written = {id(x) for arg in written_nodes(node) for x in tensors_in(_value(arg))}
    if name.startswith(_COLLECTIVES):
        cost.collectives = 1
        cost.exchanged = _exchanged(name, node)
    share = 1.0
    if live_rows is not None and outs and name in ("npu.npu_grouped_matmul", "npu.npu_dequant_swiglu_quant"):
        share = min(1.0, live_rows / outs[0].shape[0])
    read = _rows_read(name, node)
    for key, x in ins.items():
        size = read.get(key, _nbytes(x))
        if key not in read and origins(x) == "activations":
            size = int(size * share)
        cost.bytes[origins(x)] += size
    for x in outs:
        if id(x) not in written:
            cost.bytes["activations"] += int(_nbytes(x) * share)
    if name == "npu.npu_scatter_nd_update_":
        cost.bytes["cache"] += _nbytes(_value(node.args[2]))
    if name in _PRODUCTS:
        cost.flops = _flops(name, node, live_rows)
    return cost


def _exchanged(name: str, node: Node) -> int:
    """Bytes a rank sends: ring algorithms for reductions and gathers, k int8 (bf16) rows a token for dispatch (combine)."""
    ins, outs = tensors_in([_value(a) for a in nodes_in(node.args)]), tensors_in(_value(node))
    if name.startswith("npu.npu_moe_distribute_dispatch"):
        x, ids = ins[:2]
        return ids.numel() * (x.shape[1] + 4)
    if name.startswith("npu.npu_moe_distribute_combine"):
        rows, ids = ins[:2]
        return ids.numel() * rows.shape[1] * rows.element_size()
    if "all_gather" in name:
        return _nbytes(outs[0]) - _nbytes(ins[0])
    if "reduce_scatter" in name:
        return _nbytes(ins[0]) - _nbytes(outs[0])
    return 2 * _nbytes(ins[0])


def live_rows(traced: Traced) -> int | None:
    """Rows a rank's experts receive from one dispatch with even routing: its own rows times k, since ranks are alike."""
    sizes = [
        _value(n.args[1]).numel() for n in traced.graph.nodes if n.op == "call_function" and "dispatch" in op_name(n)
    ]
    return max(sizes, default=0) or None


@dataclass
class ProgramCost:
    """Costs by scope: (layer or "step", sublayer, operator)."""

    by_scope: dict[tuple[str, ...], Cost]

    @property
    def total(self) -> Cost:
        out = Cost()
        for cost in self.by_scope.values():
            out.add(cost)
        return out

    def of_layer(self, name: str) -> dict[tuple[str, ...], Cost]:
        return {scope: cost for scope, cost in self.by_scope.items() if scope[:1] == (name,)}


_PARTS = {"enter": "mHC", "hc_post": "mHC", "attention": "attention", "output": "attention", "queries": "attention",
          "index_topk": "indexer", "hadamard_quantise": "indexer", "compress": "compressor", "write_state": "compressor",
          "route": "router", "route_hash": "router", "feed_forward": "experts", "all_gather": "exchange",
          "all_reduce": "exchange", "own_rows": "exchange", "all_columns": "exchange", "write_context": "drafter context",
          "step_context": "addresses", "logits": "head", "choose": "head", "propose": "draft heads", "accept": "accept",
          "commit": "accept", "begin": "accept", "embed": "embed", "markov": "draft heads", "run_block": "drafter"}  # fmt: skip


def place(scope: tuple[str, ...]) -> tuple[str, str]:
    """(layer or "step", part) of a scope: the innermost function that has a name in the report."""
    layer = next((name for name in scope if name.startswith(("layer ", "stage "))), "step")
    return layer, next((_PARTS[name] for name in reversed(scope) if name in _PARTS), "other")


def repeated(graph: Graph) -> set[Node]:
    """Nodes that compute what an earlier one has computed: compilers make masks and rope tables once, not per layer."""
    first: dict[str, Node] = {}
    twin: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or written_nodes(node) or op_name(node).startswith(_COLLECTIVES):
            continue
        args = map_aggregate((node.args, node.kwargs), lambda a: twin.get(a, a) if isinstance(a, Node) else a)
        chosen = first.setdefault(f"{node.target}{args}", node)
        if chosen is not node:
            twin[node] = chosen
    return set(twin)


def program_cost(traced: Traced) -> ProgramCost:
    """Costs of a captured program by (layer, part, operator)."""
    origins, found, rows = _Origins(traced), defaultdict(Cost), live_rows(traced)
    again = repeated(traced.graph)
    for node, scope in scopes(traced.graph).items():
        if node in again:
            continue
        cost = node_cost(node, origins, rows)
        if cost.nodes:
            found[(*place(scope), op_name(node))].add(cost)
    return ProgramCost(dict(found))


def scaled(cost: ProgramCost, captured: tuple[str, ...], whole: tuple[str, ...]) -> ProgramCost:
    """Costs of all `whole` layer kinds from a capture of a prefix: the last captured layer of a kind stands for those
    beyond. Exact, because layers of a kind are the same program."""
    out = dict(cost.by_scope)
    for kind in dict.fromkeys(whole):
        missing = whole.count(kind) - captured.count(kind)
        if missing:
            last = f"layer {max(i for i, k in enumerate(captured) if k == kind)}"
            for (_, *rest), part in cost.of_layer(last).items():
                extra = out.setdefault((f"{missing} more {kind}", *rest), Cost())
                extra.add(part, missing)
    return ProgramCost(out)


def peak_workspace(traced: Traced) -> int:
    """Most bytes of intermediates alive at once, in program order: what a graph's workspace must at least hold."""
    inputs = {storage(node.meta["val"]) for node in traced.graph.find_nodes(op="placeholder")}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    for at, node in enumerate(traced.graph.nodes):
        for x in _storages(node, inputs):
            last[x[0]] = at
            if x[0] not in born:
                born[x[0]], size[x[0]] = at, x[1]
    events: Counter[int] = Counter()
    for key, first in born.items():
        events[first] += size[key]
        events[last[key] + 1] -= size[key]
    alive = peak = 0
    for at in sorted(events):
        alive += events[at]
        peak = max(peak, alive)
    return peak


def _storages(node: Node, inputs: set[int]) -> Iterable[tuple[int, int]]:
    values = tensors_in([n.meta["val"] for n in nodes_in((node.args, node.kwargs))])
    values += tensors_in(node.meta["val"]) if "val" in node.meta and node.op == "call_function" else []
    for x in values:
        if storage(x) not in inputs:
            yield storage(x), x.untyped_storage().size()
