"""Whether the next step drafts. Verifying K drafts costs a multiple of a plain step, and what it brings depends on the text.

One row reads nearly the same weights for eight tokens as for one; many rows share them anyway, and K+1 rows each cost what they
compute. So for every row bucket the engine times both kinds of step and keeps to the one that makes more tokens a second. A plain
step brings one token a row: while a bucket drafts, every few steps tell whether that still pays. While it does not, only a trial
can tell. The tokens are the same either way.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

EARLY = 8  # steps with drafts before plain ones are first timed, and between judgements
FIRST, LAST = 64, 1024  # steps between trials: twice as many after each that changed nothing
TRIAL, TRIAL_ROWS = 6, 48  # steps of a trial, and rows x steps of a trial of drafts, at least
KEPT = 32  # steps whose median says how long one takes
ENOUGH = 4  # measured steps of either kind without which there is no judgement
MEMORY = 64  # rows x steps that the tokens of drafting steps are averaged over
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
        self.wait, self.due = FIRST, EARLY
        # A median, so that a step that was interrupted does not count for more than another.
        self.seconds: dict[bool, deque[float]] = {kind: deque(maxlen=KEPT) for kind in (False, True)}
        self.tokens = 0.0  # per row of a step with drafts
        self.weight = 0  # rows x steps behind it

    def next(self, rows: int) -> bool:
        if self.trial:
            self.trial -= 1
            if self.trial:
                return not self.drafting
            self._judge(tried=True)
        elif self.drafting and self.due % EARLY == 0:
            self._judge(tried=False)
        self.due -= 1
        if self.due <= 0:
            self.trial = TRIAL if self.drafting else max(TRIAL, TRIAL_ROWS // rows)
            if not self.drafting:
                self.weight = 0  # what drafts brought before was another text
        return self.drafting

    def record(self, rows: int, drafted: bool, seconds: float, tokens: float) -> None:
        self.seconds[drafted].append(seconds)
        if drafted:
            self.weight = min(self.weight + rows, MEMORY)
            self.tokens += (tokens - self.tokens) * min(1.0, rows / self.weight)

    def _judge(self, tried: bool) -> None:
        """Turns to the other kind if that is faster; `tried`: at the end of a trial."""
        plain, drafts = self.seconds[False], self.seconds[True]
        if self.weight and min(len(plain), len(drafts)) >= ENOUGH:
            gain = self.tokens * median(plain) / median(drafts)
            if (1 / gain if self.drafting else gain) > MARGIN:
                self.drafting = not self.drafting
                self.due = self.wait = FIRST
                return
            if tried:
                self.wait = min(2 * self.wait, LAST)
        if tried:
            self.due = self.wait


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
        self._bucket(rows).record(rows, drafted, seconds, tokens)
