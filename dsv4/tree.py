"""Pytrees: frozen dataclasses whose leaves are tensors, and the few things we do with them.

A `@tree` class goes in and out of captured graphs like a JAX pytree. There are no static fields: what does not
change between steps lives in a config that the step function closes over, or in the *type* of a node.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def tree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass and registers it as a pytree node."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    pytree.register_dataclass(cls, field_names=names)
    return cls


@tree
class QuantWeight:
    """A W8A8 weight: `values` int8 [..., out, in], `scale` f32 [..., out]; value = values * scale."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def is_int8(w: object) -> bool:
    """Whether a matrix, in any layout, has int8 values and scales."""
    return getattr(w, "scale", None) is not None


def map_leaves(fn: Callable[[Tensor], Tensor], *trees: T) -> T:
    """Applies `fn` to matching leaves; `None` fields stay `None`."""
    return pytree.tree_map(lambda *xs: None if xs[0] is None else fn(*xs), *trees)


def named_leaves(root: object) -> Iterator[tuple[str, Tensor]]:
    """Yields (path, tensor), e.g. `layers[3].attn.w_in`, in tree order."""
    for path, value in pytree.tree_flatten_with_path(root)[0]:
        if isinstance(value, Tensor):
            yield pytree.keystr(path).lstrip("."), value


def tree_bytes(root: object) -> int:
    """Payload bytes of all leaves (meta and fake tensors count as if they were real)."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in named_leaves(root))


def abstract(root: T) -> T:
    """The same tree on the meta device: shapes and dtypes, no memory."""
    return map_leaves(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), root)


def mismatches(expected: object, got: object) -> list[str]:
    """Lines naming each leaf of `got` whose shape or dtype differs from `expected`; empty if they fit."""
    want, have = dict(named_leaves(expected)), dict(named_leaves(got))
    lines = [f"{name}: missing" for name in want.keys() - have.keys()]
    lines += [f"{name}: not expected" for name in have.keys() - want.keys()]
    for name in want.keys() & have.keys():
        a, b = want[name], have[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            lines.append(f"{name}: expected {a.dtype} {list(a.shape)}, got {b.dtype} {list(b.shape)}")
    return sorted(lines)
