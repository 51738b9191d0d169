"""Questions about one node of a captured graph: what it takes, what it writes, whether it computes anything."""

import functools
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_aggregate


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among nested arguments or results, in order."""
    found: list[Tensor] = []
    map_aggregate(values, lambda value: found.append(value) if isinstance(value, Tensor) else None)
    return found


def nodes_in(values: Any) -> list[Node]:
    """The nodes among nested arguments, in order, repeats kept."""
    found: list[Node] = []
    map_aggregate(values, lambda value: found.append(value) if isinstance(value, Node) else None)
    return found


def op_name(node: Node) -> str:
    """`dsv4.linear`, `aten.add.Tensor`, `getitem`."""
    target = node.target
    return str(target).removesuffix(".default") if isinstance(target, OpOverload) else target.__name__


def mutates(node: Node) -> bool:
    """Whether a node writes one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def storage(x: Tensor) -> int:
    """Identity of a tensor's memory, valid while the tensor lives."""
    return x.untyped_storage()._cdata


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """(index, name) of the arguments an operator writes, from its schema."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_nodes(node: Node) -> list[Node]:
    """The argument nodes that `node` writes."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return []
    values = [
        node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in written_arguments(node.target)
    ]
    return nodes_in(values)


def is_view(node: Node) -> bool:
    """Whether a node computes nothing: all it returns is memory it was given, and it writes none."""
    if node.op != "call_function" or written_nodes(node):
        return False
    outs = tensors_in(node.meta["val"])
    given = {storage(x) for arg in nodes_in((node.args, node.kwargs)) for x in tensors_in(arg.meta["val"])}
    return bool(outs) and all(storage(x) in given for x in outs)
