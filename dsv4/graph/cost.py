"""What an operator costs: multiply-adds and bytes, estimated from shapes alone.

Two floating-point operations per multiply-add; everything that is no matrix product counts as free, since it is bound by
memory. Bytes are each operand once, except that an operator that looks rows up reads the rows it names, not the pool.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from dsv4.graph.nodes import op_name, tensors_in, written_nodes

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """flops, and bytes read and written. Costs add."""

    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops, self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes
        )  # fmt: skip


def total(costs: Iterable[Cost]) -> Cost:
    """The sum."""
    return sum(costs, Cost())


def _product(a: Arguments, outs: list[Tensor]) -> int:
    """Every result is a dot product over the last axis of the first operand."""
    first = next(value for value in a.values() if isinstance(value, Tensor))
    return 2 * outs[0].numel() * first.shape[-1]


def _hyper(a: Arguments, outs: list[Tensor]) -> int:
    return 2 * a["streams"].shape[0] * a["fn"].numel()


def _moe(a: Arguments, outs: list[Tensor]) -> int:
    w13, w2 = _experts(a)
    per_token = w13.shape[1:].numel() + w2.shape[1:].numel()
    return 2 * a["x"].shape[0] * (a["ids"].shape[1] + 1) * per_token


def _experts(a: Arguments) -> tuple[Tensor, Tensor]:
    """The two stacks of expert matrices, whatever the operator calls them."""
    w13, w2 = (value for value in a.values() if isinstance(value, Tensor) and value.ndim >= 3)  # panels have more
    return w13, w2


def _attention(a: Arguments, outs: list[Tensor]) -> int:
    rows = a["kv_rows"].shape[1] + (a["entry_rows"].shape[1] if a["entry_rows"] is not None else 0)
    return 4 * a["q"].numel() * rows


def _index(a: Arguments, outs: list[Tensor]) -> int:
    return 2 * a["q"].numel() * a["history"].shape[1] * 32


def _markov(a: Arguments, outs: list[Tensor]) -> int:
    return 2 * a["base"].numel() * a["w1"].shape[1]


def _gate(a: Arguments, outs: list[Tensor]) -> int:
    return 2 * a["x"].shape[0] * a["gate"].numel()


FLOPS: dict[str, Callable[[Arguments, list[Tensor]], int]] = {
    "aten.mm": _product, "aten.bmm": _product, "dsv4.linear": _product, "dsv4.linear_int8": _product,
    "dsv4.grouped_linear": _product, "dsv4.hc_pre": _hyper, "dsv4.hc_head": _hyper, "dsv4.moe": _moe,
    "dsv4.moe_int8": _moe, "dsv4.attention": _attention, "dsv4.index_topk": _index, "dsv4.markov": _markov,
    "dsv4.route": _gate, "dsv4.route_hash": _gate,
}  # fmt: skip

# Pools and tables by the argument that names the rows to read; see `_read_bytes`.
LOOKUPS: dict[str, dict[str, str]] = {
    "dsv4.embed": {"table": "ids"}, "dsv4.take": {"table": "rows"}, "dsv4.compress": {"state": "rows"},
    "dsv4.attention": {"kv": "kv_rows", "entries": "entry_rows"}, "dsv4.route_hash": {"tid2eid": "ids"},
}  # fmt: skip


def _arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by name, tensors in place of nodes."""
    named = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    named |= dict(zip(named, node.args, strict=False)) | dict(node.kwargs)
    return dict(map_aggregate(named, lambda value: value.meta["val"] if isinstance(value, Node) else value))


def _read_bytes(name: str, a: Arguments, written: set[int]) -> int:
    lookups, count = LOOKUPS.get(name, {}), 0
    experts = {id(w) for w in _experts(a)} if name in ("dsv4.moe", "dsv4.moe_int8") else set()
    for key, value in a.items():
        for x in tensors_in([value]):
            size = x.numel() * x.element_size()
            if id(x) in written:
                continue
            if key in lookups and isinstance(a.get(lookups[key]), Tensor):
                size = min(size, a[lookups[key]].numel() * size // max(x.shape[0], 1))
            elif id(x) in experts:
                size = size // x.shape[0] * min(x.shape[0], a["ids"].numel() + 1)
            elif name == "dsv4.index_topk" and key in ("keys", "key_scale"):
                size = min(size, a["history"].numel() * 32 * size // max(x.shape[0], 1))
            count += size
    return count


def node_cost(node: Node) -> Cost:
    """The estimate for one call."""
    name, a = op_name(node), _arguments(node)
    outs = tensors_in(node.meta["val"])
    written = {id(x) for arg in written_nodes(node) for x in tensors_in(arg.meta["val"])}
    flops = FLOPS[name](a, outs) if name in FLOPS else 0
    stored = sum(x.numel() * x.element_size() for x in outs if id(x) not in written)
    if written:  # the rows that come in are the rows that are written
        rows = a.get("rows", a.get("src"))
        stored += rows.numel() * rows.element_size() if isinstance(rows, Tensor) else 0
    return Cost(flops, _read_bytes(name, a, written), stored)
