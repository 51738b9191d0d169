"""One line of a benchmark: a load, and what the requests made of it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from serving.bench.records import Record
from serving.request import Speculation

Mode = Literal["offline", "online"]
Prefix = Literal["cold", "warm"]


@dataclass(frozen=True)
class Spread:
    """Percentiles in milliseconds, by nearest rank; NaN where nothing was measured."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        values = sorted(seconds)
        if not values:
            return cls(math.nan, math.nan, math.nan)
        return cls(*(1e3 * values[max(0, math.ceil(p * len(values)) - 1)] for p in (0.50, 0.95, 0.99)))


@dataclass(frozen=True, kw_only=True)
class Load:
    """What was asked for. level: requests at once (offline), or requests per second (online). k None: a server we do not know."""

    mode: Mode
    k: int | None
    level: float
    prefix: Prefix


@dataclass(frozen=True, kw_only=True)
class Point:
    """A load and its figures.

    tokens_per_s: generated tokens of all requests over the time from the first one due to the last token.
    first: time to first token; per_token: of each request, time per output token; gap: of each token, its time.
    accepted_length: tokens per verify step; acceptance[i]: verify steps whose draft i was confirmed. None at K=0 or if not told.
    """

    load: Load
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_s: float
    first: Spread
    per_token: Spread
    gap: Spread
    accepted_length: float | None
    acceptance: tuple[float, ...] | None
    errors: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: load and figures side by side, NaN as null, milliseconds in the names."""
        found = asdict(self)
        spreads = {f"{name}_ms": found.pop(name) for name in ("first", "per_token", "gap")}
        clean = {n: {p: None if math.isnan(v) else round(v, 3) for p, v in s.items()} for n, s in spreads.items()}
        return found.pop("load") | found | clean


def summarise(load: Load, records: Sequence[Record], speculation: Speculation | None) -> Point:
    """The figures of one load; failed requests count as failed and nowhere else."""
    good = [record for record in records if record.error is None]
    seconds = max((r.done for r in good), default=0.0) - min((r.due for r in good), default=0.0)
    tokens = sum(record.tokens for record in good)
    steps = speculation.verify_steps if speculation else 0
    return Point(
        load=load,
        requests=len(records),
        failed=len(records) - len(good),
        seconds=seconds,
        prompt_tokens=sum(record.prompt_tokens for record in good),
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=tokens,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        first=Spread.of(record.first_s for record in good),
        per_token=Spread.of(t for record in good if (t := record.per_token_s) is not None),
        gap=Spread.of(gap for record in good for gap in record.gaps_s()),
        accepted_length=speculation.mean_accepted_length if steps else None,
        acceptance=tuple(count / steps for count in speculation.accepted_per_position) if steps else None,
        errors=tuple(sorted({record.error for record in records if record.error})),
    )
