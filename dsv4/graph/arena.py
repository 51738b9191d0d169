"""Memory for intermediates: placed once by liveness, owned by an arena that programs can share."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64  # a cache line, and the widest vector


@dataclass(frozen=True)
class Block:
    """`size` bytes that hold something from step `first` to step `last`, both included."""

    size: int
    first: int
    last: int


def round_up(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Offsets such that blocks that live at the same time never overlap, and the bytes needed in all.

    Goes through time once: a block takes the smallest gap that holds it, the lowest of equals, or the end.
    """
    offsets = [0] * len(blocks)
    live: list[tuple[int, int, int]] = []  # (offset, end, block), by offset
    total = 0
    for i in sorted(range(len(blocks)), key=lambda i: (blocks[i].first, -blocks[i].size)):
        block = blocks[i]
        live = [entry for entry in live if blocks[entry[2]].last >= block.first]
        need, best, at = round_up(block.size), None, 0
        for offset, end, _ in live:
            gap = offset - at
            if need <= gap and (best is None or gap < best[0]):
                best = (gap, at)
            at = max(at, end)
        offsets[i] = best[1] if best else at
        insort(live, (offsets[i], offsets[i] + need, i))
        total = max(total, offsets[i] + need)
    return offsets, total


class Arena:
    """One buffer for the intermediates of programs that never run at the same time; it is as large as the largest needs.

    A program looks at `buffer` before each run, so reserving more for another one moves everybody.
    """

    def __init__(self) -> None:
        self.buffer: Tensor = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Makes sure that `nbytes` fit. Contents do not survive."""
        if nbytes > self.buffer.nbytes:
            self.buffer = torch.zeros(round_up(nbytes), dtype=torch.uint8)
