"""What we make smaller before the graph engine sees it: equal nodes, equal constants, transposes a product can absorb."""

from collections import Counter
from typing import Any

from torch.fx import GraphModule

_TRANSPOSABLE = {"MatMul": "transpose_x2", "MatMulV2": "transpose_x2", "BatchMatMul": "adj_x2", "BatchMatMulV2": "adj_x2"}
_ABSORBED_LEFT = {"MatMul": "transpose_x1", "MatMulV2": "transpose_x1", "BatchMatMul": "adj_x1", "BatchMatMulV2": "adj_x1"}


def merge_equal_nodes(gm: GraphModule) -> None:
    """Common subexpressions of a functional FX graph: masks, rope tables and addresses are made once, not per layer."""
    from torch._functorch.compile_utils import fx_graph_cse

    gm.graph = fx_graph_cse(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def optimise(graph: Any) -> None:
    """All passes over a GraphDef, in place."""
    absorb_transposes(graph)
    share_constants(graph)
    drop_dead(graph)


def share_constants(graph: Any) -> None:
    """One Const per value: a scalar operand otherwise makes a node wherever it is used."""
    first: dict[bytes, str] = {}
    renamed: dict[str, str] = {}
    for op in graph.op:
        if op.type == "Const":
            key = op.attr["value"].SerializeToString(deterministic=True)
            renamed[op.name] = first.setdefault(key, op.name)
    for op in graph.op:
        for i, name in enumerate(op.input):
            stem, _, port = name.rpartition(":")
            if stem in renamed and port != "-1":
                op.input[i] = f"{renamed[stem]}:{port}"


def absorb_transposes(graph: Any) -> None:
    """A swap of the last two axes in front of a matrix product becomes an attribute of the product."""
    by_name = {op.name: op for op in graph.op}
    for op in graph.op:
        for port, names in enumerate((_ABSORBED_LEFT, _TRANSPOSABLE)):
            if op.type not in names:
                continue
            swap = by_name.get(op.input[port].rpartition(":")[0])
            if swap is None or swap.type != "Transpose" or not _swaps_last(by_name, swap):
                continue
            attribute = op.attr[names[op.type]]
            attribute.b = not attribute.b
            op.input[port] = swap.input[0]


def _swaps_last(by_name: dict[str, Any], swap: Any) -> bool:
    import struct

    const = by_name.get(swap.input[1].rpartition(":")[0])
    if const is None or const.type != "Const":
        return False
    data = const.attr["value"].t.data
    order = list(struct.unpack(f"<{len(data) // 8}q", data))
    rank = len(order)
    return rank >= 2 and order == [*range(rank - 2), rank - 1, rank - 2]


def drop_dead(graph: Any) -> None:
    """Removes nodes that nothing reads: what the passes above left behind. Inputs and effects stay."""
    keep_types = {"Data", "RefData", "NetOutput"}
    uses = Counter(name.rpartition(":")[0] for op in graph.op for name in op.input)
    dead = [op for op in graph.op if op.type in ("Const", "Transpose") and not uses[op.name] and op.type not in keep_types]
    while dead:
        op = dead.pop()
        graph.op.remove(op)
        for name in op.input:
            stem = name.rpartition(":")[0]
            uses[stem] -= 1
            if not uses[stem]:
                dead += [other for other in graph.op if other.name == stem and other.type in ("Const", "Transpose")]
