"""How tensors, nodes and sizes look in the dumps of every stage."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dsv4.graph.nodes import op_name
from dsv4.graph.record import source

_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "int64": "i64",
          "int16": "i16", "int8": "i8", "uint8": "u8"}  # fmt: skip


def layout_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """`f32[8, 64]`."""
    name = str(dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}{list(shape)}"


def tensor_text(x: Any) -> str:
    """`f32[8, 64]`; strides follow if they are not those of a contiguous tensor."""
    if not isinstance(x, Tensor):
        return f"({', '.join(map(tensor_text, x))})" if isinstance(x, (tuple, list)) else str(x)
    text = layout_text(x.dtype, x.shape)
    return text if x.is_contiguous() else f"{text} strides {list(x.stride())}"


def table_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    return ["  ".join(f"{c:{'<' if k == 0 else '>'}{w}}" for k, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in cells]  # fmt: skip


def bytes_text(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def arguments_text(node: Node) -> str:
    """A node's arguments as they would be written."""

    def show(value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(show, value))}]"
        return str(value)

    parts = [show(value) for value in node.args]
    return ", ".join(parts + [f"{name}={show(value)}" for name, value in node.kwargs.items()])


def graph_lines(graph: Graph) -> Iterator[str]:
    """One line per node, in order."""
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {arguments_text(node)}"
        elif node.op == "call_function":
            where = source(node)
            yield f"{node.name}: {tensor_text(node.meta['val'])} = {op_name(node)}({arguments_text(node)})  # {where}"
        else:
            yield f"{node.name}: {tensor_text(node.meta['val'])}"


class Readable:
    """A stage of a program's life: it can print itself, and save what it prints."""

    def as_text(self) -> str:
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Writes `as_text()` to a file, making its folder; returns the path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.as_text() + "\n", encoding="utf-8")
        return target
