"""What a client sees of one request, and the figures that follow from it. Times are seconds on one monotonic clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Record:
    """One request. `due` is when it should have been sent (open loop: waiting to be sent is the server's fault too).

    arrivals: (time, tokens) of each chunk that brought tokens, in order.
    """

    due: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def done(self) -> float:
        """When the last token was there."""
        return self.arrivals[-1][0]

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] - self.due

    @property
    def per_token_s(self) -> float | None:
        """Time per output token: of the tokens after the first chunk, never of chunks. None if there are none."""
        first, begun = self.arrivals[0]
        after = self.tokens - begun
        return (self.done - first) / after if after else None

    def move(self, seconds: float) -> None:
        """Shifts the record in time."""
        self.due += seconds
        self.arrivals = [(at + seconds, count) for at, count in self.arrivals]

    def gaps_s(self) -> Iterator[float]:
        """The time each token after the first chunk took: a chunk of n tokens counts n times its share."""
        last = self.arrivals[0][0]
        for at, count in self.arrivals[1:]:
            yield from [(at - last) / count] * count
            last = at


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Splits `total` tokens over chunks in proportion to their weights (bytes of text, where a server does not count)."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1.0] * len(weights), float(len(weights))
    counts, seen, given = [], 0.0, 0
    for weight in weights:
        seen += weight
        counts.append(round(total * seen / whole) - given)
        given += counts[-1]
    return counts
