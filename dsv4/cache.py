"""Caches: one tensor per layer and family, rows addressed by absolute position through page tables.

    group    page     window   families (a row each)                                          table column of position p
    history  128      all      CSA entries (32 rows a page), index keys (32), HCA entries (1)  p // 128
    window   32       W = 128  raw kv of every layer, drafter context                          (p // 32) % width
    tail     8        8        CSA compressor rows, index compressor rows                      (p // 8)  % width
    open     32       128      HCA compressor rows                                             (p // 32) % width

The seven families of the system we re-implement (and the drafter's context) have four windows between them, and families
with one window always move together, so they share page ids: four tables per request instead of eight. State pages are
coarser than there (8 tokens for CSA, not 2; 32 for HCA, not 8): the same rows in use, a quarter of the page work. HCA state
is a group of its own because prefix hits are aligned to 128 tokens, where an HCA window has just closed: it is never shared.

A row is final once its position is committed. Rows beyond are rewritten before anything can see them, so a rejected draft
needs no rollback. Page 0 of every group is the null page: padding writes there and nothing reads it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.ops.plain_state import PAGE_HISTORY, PAGE_OPEN, PAGE_TAIL, PAGE_WINDOW
from dsv4.tree import tree, tree_bytes

PAGE_TOKENS = {"history": PAGE_HISTORY, "window": PAGE_WINDOW, "tail": PAGE_TAIL, "open": PAGE_OPEN}


@tree
class WindowCache:
    """SWA layer. kv [window rows, d], in the activation dtype."""

    kv: Tensor


@tree
class HcaCache:
    """HCA layer. state f32 [open rows, 2d] = values | gates + ape; entries [history pages, d]."""

    kv: Tensor
    state: Tensor
    entries: Tensor


@tree
class CsaCache:
    """CSA layer. state f32 [tail rows, 4d]; entries [32 x history pages, d]; index_state f32 [tail rows, 4 Di];
    index_keys [32 x history pages, Di], int8 with index_scale f32 in W8A8, else the float dtype with None."""

    kv: Tensor
    state: Tensor
    entries: Tensor
    index_state: Tensor
    index_keys: Tensor
    index_scale: Tensor | None


LayerCache = WindowCache | HcaCache | CsaCache


@tree
class Cache:
    """`layers` follow the target's; `context` [window rows, d] per draft stage, empty at K=0."""

    layers: tuple[LayerCache, ...]
    context: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Pages per group, the null page included."""

    history: int
    window: int
    tail: int
    open: int


def make_cache(cfg: ModelConfig, pages: Pages, dtype: torch.dtype, *, drafter: bool, device: str = "cpu") -> Cache:
    """Zeroed pools. `dtype` is the activation dtype; bf16 means W8A8 and makes the index keys int8."""
    d, di = cfg.head_dim, cfg.index_head_dim

    def pool(rows: int, width: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(rows, width, dtype=kind, device=device)

    window, tail, open_ = pages.window * PAGE_WINDOW, pages.tail * PAGE_TAIL, pages.open * PAGE_OPEN
    fine, coarse, f32 = pages.history * (PAGE_HISTORY // 4), pages.history, torch.float32
    quantised = dtype == torch.bfloat16

    def layer(kind: str) -> LayerCache:
        if kind == "swa":
            return WindowCache(kv=pool(window, d))
        if kind == "hca":
            return HcaCache(kv=pool(window, d), state=pool(open_, 2 * d, f32), entries=pool(coarse, d))
        return CsaCache(
            kv=pool(window, d),
            state=pool(tail, 4 * d, f32),
            entries=pool(fine, d),
            index_state=pool(tail, 4 * di, f32),
            index_keys=pool(fine, di, torch.int8 if quantised else dtype),
            index_scale=torch.zeros(fine, dtype=f32, device=device) if quantised else None,
        )

    context = tuple(pool(window, d) for _ in range(cfg.num_stages)) if drafter else ()
    return Cache(layers=tuple(layer(kind) for kind in cfg.kinds), context=context)


def page_bytes(cfg: ModelConfig, dtype: torch.dtype, *, drafter: bool) -> dict[str, int]:
    """Bytes that one page of each group costs over all layers."""

    def total(**pages: int) -> int:
        sizes = dict.fromkeys(PAGE_TOKENS, 0) | pages
        return tree_bytes(make_cache(cfg, Pages(**sizes), dtype, drafter=drafter, device="meta"))

    return {group: total(**{group: 1}) for group in PAGE_TOKENS}
