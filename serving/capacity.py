"""How many pages each group gets: enough for every seat if memory allows, then room for cached prefixes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4.errors import ConfigError
from serving.pages import BLOCK_TOKENS, PageGroup

CACHED_BLOCKS = 256  # prefix-cache blocks (of 128 tokens) wanted beyond what running requests hold


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """Pages per group and partition, the null page included, and what bounded them.

    seats: requests of full length that fit at once; cached_blocks: prefix blocks on top; total_bytes: one partition's pools.
    """

    pages: dict[str, int]
    seats: float
    cached_blocks: int
    total_bytes: int
    bound: str


def host_memory_bytes() -> int:
    """Memory that new allocations can have without swapping."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def plan_pages(
    groups: tuple[PageGroup, ...],
    page_bytes: Mapping[str, int],
    *,
    memory_bytes: int,
    seats: int,
    max_model_len: int,
    decode_tokens: int,
    prefill_tokens: int,
    cached_blocks: int = CACHED_BLOCKS,
) -> PagePlan:
    """Divides `memory_bytes` (one partition's share).

    decode_tokens: positions a decoding seat may have in flight; prefill_tokens: those that prefill steps may have, all seats
    together. Raises ConfigError if not even one full-length request fits.
    """

    def needed(requests: float, blocks: int) -> dict[str, int]:
        pages = {}
        for group in groups:
            each = group.live_pages(max_model_len, decode_tokens)
            once = 0 if group.window is None else group.pages_for(prefill_tokens)
            snapshot = 0
            if group.shared:
                snapshot = 1 if group.window is None else -(-min(group.window, BLOCK_TOKENS) // group.page_tokens)
            pages[group.name] = 1 + int(-(-requests * each // 1)) + once + blocks * snapshot
        return pages

    def cost(pages: Mapping[str, int]) -> int:
        return sum(page_bytes[name] * count for name, count in pages.items())

    wanted = needed(seats, cached_blocks)
    if cost(wanted) <= memory_bytes:
        return PagePlan(
            pages=wanted, seats=seats, cached_blocks=cached_blocks, total_bytes=cost(wanted), bound="--max-num-seqs"
        )
    if cost(needed(1, 0)) > memory_bytes:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the cache of one request needs {cost(needed(1, 0)) / 2**30:.2f} GiB and "
            f"{memory_bytes / 2**30:.2f} GiB are free; shorten it or raise --npu-memory-utilization"
        )
    fit = 1.0
    while fit < seats and cost(needed(fit + 0.25, 0)) <= memory_bytes:
        fit += 0.25
    blocks = 0
    while blocks < cached_blocks and cost(needed(fit, blocks + 1)) <= memory_bytes:
        blocks += 1
    pages = needed(fit, blocks)
    return PagePlan(pages=pages, seats=fit, cached_blocks=blocks, total_bytes=cost(pages), bound="memory")
