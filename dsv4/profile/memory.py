"""Where a rank's device memory goes, the largest context and batch that fit, and what binds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dsv4.cache import page_bytes
from dsv4.checkpoint.load import abstract_params
from dsv4.config import ModelConfig
from dsv4.mesh import Mesh
from dsv4.tree import tree_bytes

Plan = Callable[[int, int], Mapping[str, int]]
"""(context tokens, requests of one TP group) -> pages by group, the null page included."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank by family, against what the device lends; limits as (value, what binds)."""

    families: Mapping[str, int]
    available: int
    largest_context: tuple[int, str]
    largest_batch: tuple[int, str]

    @property
    def total(self) -> int:
        return sum(self.families.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The greatest n in low..high that fits (low - 1 if none does); what fits, fits for smaller n too."""
    if not fits(low):
        return low - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def plan_memory(
    cfg: ModelConfig, mesh: Mesh, plan: Plan, *, context: int, requests: int, rows_limit: int, drafter: bool,
    workspace: int, available: int,
) -> MemoryPlan:  # fmt: skip
    """Memory of `requests` requests of `context` tokens per TP group (kv is replicated within the group)."""
    params = abstract_params(cfg, mesh, drafter, max_positions=context + 8)
    each = page_bytes(cfg, torch.bfloat16, drafter=drafter)

    def cache(tokens: int, count: int) -> dict[str, int]:
        return {group: pages * each[group] for group, pages in plan(tokens, count).items()}

    families = {
        "target weights": tree_bytes(params.target),
        "drafter weights": tree_bytes(params.drafter) if drafter else 0,
        "rope tables": tree_bytes(params.rope),
        "workspace": workspace,
    }
    fixed = sum(families.values())

    def fits(tokens: int, count: int) -> bool:
        return fixed + sum(cache(tokens, count).values()) <= available

    ceiling = cfg.max_position_embeddings
    blocks = _largest(1, ceiling // 128, lambda n: fits(n * 128, requests))
    batch = _largest(1, rows_limit, lambda n: fits(context, n))
    families |= {f"cache: {group}": size for group, size in cache(context, requests).items()}
    return MemoryPlan(
        families=families,
        available=available,
        largest_context=(blocks * 128, "max_position_embeddings" if blocks * 128 >= ceiling else "device memory"),
        largest_batch=(batch, f"{rows_limit} rows per TP group" if batch == rows_limit else "device memory"),
    )
