"""What goes into the scheduler and what comes out: configuration, requests, step plans, results, events. Integers only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsv4.errors import ConfigError, RequestError
from serving.pages import BLOCK_TOKENS, PageGroup, PageTable, page_groups
from serving.request import FinishReason, Speculation


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and geometry of one server.

    pages: per group name, physical pages per partition, the null page included.
    max_num_batched_tokens: per step over all partitions; a decode row is charged the 1 + K rows its program runs.
    long_prefill_token_threshold: longest prefill chunk of one request; 0 for no limit of its own.
    max_tokens_per_partition: packed prefill of one partition and step, each chunk rounded up to `tile_tokens`.
    max_rows_per_partition: requests seated in one partition, and so its slots.
    pipeline_depth: steps that may be planned before the oldest of them is committed.
    prefix_replay: known tokens always computed again after a prefix hit; 128 gives the first hit at 256 tokens, 1 at 129.
    """

    pages: Mapping[str, int]
    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 4096
    long_prefill_token_threshold: int = 2048
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    partitions: int = 1
    max_rows_per_partition: int = 64
    max_tokens_per_partition: int = 8192
    max_waiting: int = 1024
    pipeline_depth: int = 2
    prefix_replay: int = 1
    tile_tokens: int = 128
    groups: tuple[PageGroup, ...] = page_groups(128)

    def __post_init__(self) -> None:
        positive = (
            "max_model_len max_num_seqs max_num_batched_tokens partitions max_rows_per_partition max_tokens_per_partition "
            "max_waiting pipeline_depth prefix_replay tile_tokens"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("long_prefill_token_threshold", "num_speculative_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.decode_rows:
            raise ConfigError(
                f"max_num_batched_tokens: expected at least {self.decode_rows}, the rows of one decode step with "
                f"{self.num_speculative_tokens} speculative tokens, got {self.max_num_batched_tokens}"
            )
        if self.max_tokens_per_partition % self.tile_tokens:
            raise ConfigError(
                f"max_tokens_per_partition: expected a multiple of {self.tile_tokens}, got {self.max_tokens_per_partition}"
            )
        names = {group.name for group in self.groups}
        if set(self.pages) != names:
            raise ConfigError(f"pages: expected a count for each of {sorted(names)}, got {sorted(self.pages)}")

    @property
    def decode_rows(self) -> int:
        """Query rows of one decode row: the anchor and its drafts."""
        return self.num_speculative_tokens + 1

    @property
    def max_chunk(self) -> int:
        """Longest prefill chunk of one request."""
        bounds = [self.max_num_batched_tokens, self.max_tokens_per_partition, self.max_model_len]
        if self.enable_chunked_prefill and self.long_prefill_token_threshold:
            bounds.append(self.long_prefill_token_threshold)
        return min(bounds)

    def table_width(self, group: PageGroup) -> int:
        """Columns of a request's page table: no two live logical pages share one."""
        unconfirmed = self.pipeline_depth * max(self.max_chunk, self.decode_rows)
        return group.live_pages(self.max_model_len, unconfirmed)

    def lone_pages(self, group: PageGroup, limit: int) -> int:
        """Pages that let one request of `limit` positions run to its end by itself, one step at a time."""
        return group.live_pages(limit, max(min(self.max_chunk, limit), self.decode_rows))

    def limit_of(self, request: "ScheduledRequest") -> int:
        """Positions the request may use, prompt included. Raises RequestError for one that could never be served."""
        prompt = request.prompt_tokens
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens: expected at least 1, got {request.max_tokens}", param="max_tokens")
        if prompt >= self.max_model_len:
            raise RequestError(
                f"the prompt has {prompt} tokens and must leave room for one more within the model length of "
                f"{self.max_model_len}: shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        if not self.enable_chunked_prefill and prompt > self.max_chunk:
            raise RequestError(
                f"the prompt has {prompt} tokens, but one step takes at most {self.max_chunk} and chunked prefill is off: "
                "shorten it or enable chunked prefill",
                param="prompt",
                code="context_length_exceeded",
            )
        limit = min(prompt + request.max_tokens, self.max_model_len)
        for group in self.groups:
            needed, pages = self.lone_pages(group, limit), self.pages[group.name] - 1
            if needed > pages:
                raise RequestError(
                    f"prompt and max_tokens make {limit} tokens, which need {needed} {group.name} pages; the cache has "
                    f"{pages}: ask for fewer tokens",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
        return limit


@dataclass(eq=False, slots=True, kw_only=True)
class ScheduledRequest:
    """A request as the scheduler sees it, from `add` to its finish event.

    tokens: the prompt; generated tokens are appended as they are confirmed.
    eos_token_id: the token that ends it, or None to run to the limit (`ignore_eos`).
    synchronous: its next step needs its last result (grammar): never two steps in flight, never preempted.
    salt: separates prefix caches that must not see each other.

    Set by the scheduler: `limit` (positions it may ever have, prompt included), `arrival` (order of admission),
    `cached_tokens` and `prefix_report` of its first seating, `preemptions`, `speculation`.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    eos_token_id: int | None = None
    ignore_eos: bool = False
    synchronous: bool = False
    salt: bytes = b""

    prompt_tokens: int = field(init=False)
    limit: int = field(init=False, default=0)
    arrival: int = field(init=False, default=-1)
    seat: "Seat | None" = field(init=False, default=None)
    digests: list[bytes] = field(init=False, default_factory=list)
    cached_tokens: int = field(init=False, default=0)
    prefix_report: str = field(init=False, default="not looked up yet")
    preemptions: int = field(init=False, default=0)
    speculation: Speculation = field(init=False, default_factory=Speculation)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        if self.ignore_eos:
            self.eos_token_id = None

    @property
    def output_tokens(self) -> list[int]:
        """Tokens generated and confirmed so far."""
        return self.tokens[self.prompt_tokens :]


class Seat:
    """A request's stay in a partition, from admission to finish or preemption. A plan names seats, so that results of a
    stay that is over are recognised (`live` is False) and dropped.

    Positions, all counted as "rows computed so far":

        confirmed   by steps whose results are in
        lower, upper   by all planned steps, at least and at most (they differ by unknown acceptance only)
        target      known tokens at admission: prefill until lower == target, decode afterwards
        capacity    rows that hold pages in every group; FULL once it covers the request's limit
        boundary    the `confirmed` at which pages are next published and released
    """

    FULL = 1 << 62

    __slots__ = (
        "boundary",
        "capacity",
        "confirmed",
        "in_flight",
        "last",
        "live",
        "lower",
        "partition",
        "published",
        "request",
        "slot",
        "tables",
        "target",
        "upper",
    )

    def __init__(
        self, request: ScheduledRequest, partition: int, slot: int, tables: list[PageTable], start: int
    ) -> None:
        self.request = request
        self.partition = partition
        self.slot = slot
        self.tables = tables
        self.live = True
        self.in_flight = 0
        self.confirmed = self.lower = self.upper = self.boundary = start
        self.published = start // BLOCK_TOKENS  # blocks
        self.target = len(request.tokens)
        self.last = request.limit - 1  # the last token is never run: with so many rows computed nothing is left to do
        self.capacity = 0


class PrefillChunk(NamedTuple):
    """Known tokens at positions start .. start + length - 1; `final` ends them and yields one token (and a seed at K > 0)."""

    seat: Seat
    start: int
    length: int
    final: bool

    @property
    def slot(self) -> int:
        return self.seat.slot

    @property
    def tokens(self) -> list[int]:
        return self.seat.request.tokens[self.start : self.start + self.length]


@dataclass(slots=True)
class TableUpdates:
    """Page table entries to write before the step's launches: table[slots[i], columns[i]] = pages[i], no pair twice."""

    slots: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PartitionPlan:
    """One partition's share of a step: prefill chunks (one packed launch), then decode rows (one launch)."""

    table_updates: dict[str, TableUpdates]
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Seat] = field(default_factory=list)

    @property
    def slots(self) -> list[int]:
        """Slots of the decode rows, in plan order."""
        return [seat.slot for seat in self.decode]

    @property
    def finals(self) -> list[PrefillChunk]:
        """Chunks that yield a token, in plan order."""
        return [chunk for chunk in self.prefill if chunk.final]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of every partition; partitions without work are present and empty."""

    step_id: int
    partitions: tuple[PartitionPlan, ...]


class PartitionResult(NamedTuple):
    """What one partition's step returned, in plan order.

    first_tokens: one per final chunk.   rows: per decode row its 1 .. K + 1 new tokens.
    proposed: per decode row, drafts it verified (fewer than K near the limit); empty for a step that verifies none.
    """

    first_tokens: Sequence[int] = ()
    rows: Sequence[Sequence[int]] = ()
    proposed: Sequence[int] = ()


class RequestEvent(NamedTuple):
    """News about one request: tokens that one step added, and whether it is over.

    drafted: how many of `tokens`, from the first, were proposed by the drafter.
    Cached tokens and speculation statistics are on `request`.
    """

    request: ScheduledRequest
    tokens: Sequence[int]
    drafted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """Gauges and lifetime counters. `pages_used` counts lent pages over partitions, `pages_total` all that can be lent."""

    running: int
    waiting: int
    in_flight_steps: int
    pages_used: dict[str, int]
    pages_total: dict[str, int]
    pages_cached: dict[str, int]
    seats_per_partition: tuple[int, ...]
    prefix_queries: int  # tokens looked up
    prefix_hits: int  # tokens found
    preemptions: int
    evictions: int

    @property
    def cache_usage(self) -> float:
        """Share of the fullest group's pages that is lent, 0 to 1."""
        return max(self.pages_used[name] / total for name, total in self.pages_total.items())
