"""Whether the next step drafts. Verifying K drafts costs a multiple of a plain step, and what it brings depends on the text.

One row reads nearly the same weights for eight tokens as for one; many rows share them anyway, and K+1 rows each cost what they
compute. So for every row bucket the engine tries both kinds of step now and then, on the requests it has, and keeps to the one
that makes more tokens a second. The tokens are the same either way.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import Protocol

FIRST, LAST = 64, 1024  # steps between trials: twice as many after each that changed nothing
TRIAL = 10  # steps of a trial, and rows x steps enough to judge drafts by
TRIAL_ROWS = 64
KEPT = 64  # steps that a judgement looks back on
ENOUGH = 5  # measured steps of either kind without which there is none
MARGIN = 1.03  # how much faster the other kind must be


class Pace(Protocol):
    """What the engine asks before a step with decode rows, and tells after it."""

    def drafts(self, rows: int) -> bool:
        """Whether a step of `rows` decode rows per partition verifies drafts."""
        ...

    def record(self, rows: int, drafted: bool, seconds: float, tokens: float) -> None:
        """A step of decode rows alone has taken `seconds` and brought `tokens` per row."""
        ...


class _Bucket:
    """One row bucket: how its steps are taken now, when the other kind is tried next, and what both have shown."""

    def __init__(self) -> None:
        self.drafting = True
        self.trial = 0  # steps of it to go
        self.wait = self.due = FIRST
        self.seen: dict[bool, deque[tuple[float, float]]] = {kind: deque(maxlen=KEPT) for kind in (False, True)}

    def next(self, rows: int) -> bool:
        if self.trial:
            self.trial -= 1
            if self.trial:
                return not self.drafting
            self._judge()
        self.due -= 1
        if self.due <= 0:
            self.trial = TRIAL if self.drafting else max(TRIAL, TRIAL_ROWS // rows)
            self.seen[not self.drafting].clear()  # what the last trial saw was another time and another text
        return self.drafting

    def _judge(self) -> None:
        now, other = self.seen[self.drafting], self.seen[not self.drafting]
        if min(len(now), len(other)) < ENOUGH:
            self.due = self.wait
            return
        if _rate(other) > MARGIN * _rate(now):
            self.drafting = not self.drafting
            self.wait = FIRST
        else:
            self.wait = min(2 * self.wait, LAST)
        self.due = self.wait


def _rate(seen: Sequence[tuple[float, float]]) -> float:
    """Tokens per row and second; a step that was interrupted does not count for more than another."""
    return fmean(tokens for _, tokens in seen) / median(seconds for seconds, _ in seen)


class AdaptivePace:
    """A pace that measures. sizes: the row buckets, ascending."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._buckets = {size: _Bucket() for size in sizes}

    def _bucket(self, rows: int) -> _Bucket:
        return next(
            (bucket for size, bucket in self._buckets.items() if size >= rows), self._buckets[max(self._buckets)]
        )

    def drafts(self, rows: int) -> bool:
        """As `Pace`."""
        return self._bucket(rows).next(rows)

    def record(self, rows: int, drafted: bool, seconds: float, tokens: float) -> None:
        """As `Pace`."""
        self._bucket(rows).seen[drafted].append((seconds, tokens))
