"""Which requests run in the next step, on which pages: continuous batching over integers, no tensors and no clocks.

A step is planned in this order, from one budget of `max_num_batched_tokens`:

1. decode rows of all seated requests, K + 1 tokens each. While prefill work exists one tile (at most half the budget) is
   kept for it; rows that do not fit take turns.
2. prefill chunks of seated requests, in order of arrival.
3. the waiting queue, in order of arrival; it stops at the first request that cannot be seated.

A chunk takes what is left but leaves one tile (128 tokens) to everyone behind it who could run in this step. With B the
budget, T the tile, R decode rows and "place" counted among prefilling and waiting requests from 0, this bounds every wait:

* a decode row runs at least once in ceil(R / max(1, floor((B - min(T, B / 2)) / (K + 1)))) steps, every step where all fit;
* a request with pages and a seat, or the chance of one since the last step, prefills at least min(T, its rest) tokens while
  (place + 1) T fits what decode left; so a prompt of one tile answers at once, however long the prompts before it are;
* the oldest prefilling request always advances (for B >= 2 (K + 1)), and nobody is seated before an earlier arrival.

Pages: who lacks one waits for its own steps in flight, then preempts the latest arrival behind it in its partition. A
preempted request returns to its place in the queue and computes prompt and output again, as far as they are not cached.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Sequence

from dsv4.errors import EngineError, OverloadedError, RequestError
from serving.partition import Partition, attempts
from serving.plan import (
    PartitionResult,
    PrefillChunk,
    RequestEvent,
    ScheduledRequest,
    SchedulerConfig,
    SchedulerStats,
    Seat,
    StepPlan,
)
from serving.request import FinishReason


def _arrival(seat: Seat) -> int:
    return seat.request.arrival


class Scheduler:
    """First come, first served over the partitions of one engine.

    `plan` may run up to `pipeline_depth` steps ahead of `commit`; steps execute and commit in the order of planning.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._partitions = [Partition(index, config) for index in range(config.partitions)]
        self._requests: dict[str, ScheduledRequest] = {}
        self._waiting: deque[ScheduledRequest] = deque()  # by arrival
        self._running: list[Seat] = []  # by arrival
        self._in_flight: deque[StepPlan] = deque()
        self._pending: list[RequestEvent] = []  # met while planning, told with the next commit
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._next_partition = 0  # where a tie between partitions goes
        self._last_turn = -1  # arrival of the last decode row served when rows take turns
        self._refused = False  # the head of the queue was tried in vain, and no seat was given up since
        self._prefix_queries = self._prefix_hits = self._preemptions = 0

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    def add(self, request: ScheduledRequest) -> None:
        """Queues a request.

        Raises: RequestError for one that could never be served, OverloadedError when the queue is full.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        limit = self._config.limit_of(request)
        if len(self._waiting) >= self._config.max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests are waiting, the limit of the queue: retry later")
        request.limit = limit
        request.arrival = next(self._arrivals)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORTED) -> RequestEvent | None:
        """Ends a request at once and frees its pages; what it has in flight is dropped. None if it is not known (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._leave(request)
            return RequestEvent(request, (), finish_reason=reason)
        return None

    def plan(self) -> StepPlan | None:
        """Plans one more step, or None when there is nothing to do before the next `add` or `commit`."""
        if len(self._in_flight) >= self._config.pipeline_depth:
            return None
        while self._requests:
            if self._compose():
                plan = StepPlan(next(self._step_ids), tuple(partition.plan for partition in self._partitions))
                self._in_flight.append(plan)
                return plan
            if self._in_flight or not self._break_deadlock():
                return None
        return None

    def commit(self, plan: StepPlan, results: Sequence[PartitionResult]) -> list[RequestEvent]:
        """Applies the results of the oldest planned step; returns what they mean for each request."""
        if not self._in_flight or plan is not self._in_flight[0]:
            raise EngineError(f"step {plan.step_id} is not the oldest in flight: commit in the order of planning")
        self._in_flight.popleft()
        events, self._pending = self._pending, []
        for part, result in zip(plan.partitions, results, strict=True):
            self._commit_prefill(part.prefill, result.first_tokens, events)
            self._commit_decode(part.decode, result, events)
        return events

    def fail(self, error: BaseException | str) -> list[RequestEvent]:
        """Ends every unfinished request with ERROR after a device failure; all pages come back and nothing stays cached."""
        events, self._pending = self._pending, []
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self._leave(request)
            events.append(RequestEvent(request, (), finish_reason=FinishReason.ERROR, error=str(error)))
        for partition in self._partitions:
            partition.forget()
        return events

    def stats(self) -> SchedulerStats:
        """Gauges and counters; costs nothing per request."""
        pools = {g.name: [p.pools[i] for p in self._partitions] for i, g in enumerate(self._config.groups)}
        total = {name: sum(pool.pages - 1 for pool in group) for name, group in pools.items()}
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            in_flight_steps=len(self._in_flight),
            pages_used={name: total[name] - sum(pool.available for pool in group) for name, group in pools.items()},
            pages_total=total,
            pages_cached={name: sum(len(pool.page_of) for pool in group) for name, group in pools.items()},
            seats_per_partition=tuple(partition.seated for partition in self._partitions),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            evictions=sum(pool.evictions for group in pools.values() for pool in group),
        )

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant. Linear in pages and requests: for tests and debugging."""
        for partition in self._partitions:
            partition.check(seat for seat in self._running if seat.partition == partition.index)
        running = [seat.request for seat in self._running]
        for name, requests in (("running", running), ("waiting", list(self._waiting))):
            arrivals = [request.arrival for request in requests]
            assert arrivals == sorted(arrivals), f"{name} requests are out of order: {arrivals}"
        everyone = sorted(request.request_id for request in [*running, *self._waiting])
        assert everyone == sorted(self._requests), "a request is lost or in two places"
        assert len(running) <= self._config.max_num_seqs, f"{len(running)} requests run"
        parts = [part for step in self._in_flight for part in step.partitions]
        flights = [seat for part in parts for seat in [*part.decode, *(chunk.seat for chunk in part.prefill)]]
        for seat in self._running:
            who = seat.request.request_id
            assert seat.live and seat.request.seat is seat, f"{who}: the seat is stale"
            assert seat.in_flight == sum(other is seat for other in flights), f"{who}: steps in flight are miscounted"
            assert seat.confirmed <= seat.lower <= seat.upper, f"{who}: positions are out of order"
            assert not (seat.request.synchronous and seat.in_flight > 1), f"{who}: synchronous, yet planned ahead"

    # Planning

    def _compose(self) -> bool:
        """Fills every partition's plan; False if no work came together."""
        for partition in self._partitions:
            partition.begin()
        preemptions = self._preemptions
        decoding: list[Seat] = []
        prefilling: list[Seat] = []
        for seat in self._running:
            if seat.in_flight and seat.request.synchronous:
                continue
            if seat.lower < seat.target:
                prefilling.append(seat)
            elif seat.lower < seat.last:
                decoding.append(seat)
        budget, tile = self._config.max_num_batched_tokens, self._config.tile_tokens
        seats = 0 if self._refused else self._config.max_num_seqs - len(self._running)
        queue = sum(min(tile, len(request.tokens)) for request in itertools.islice(self._waiting, seats))
        if decoding:
            kept = min(tile, budget // 2) if prefilling or queue else 0
            budget -= self._plan_decode(decoding, max(self._config.decode_rows, budget - kept))
        if prefilling:
            budget = self._plan_prefill(prefilling, budget, queue)
        # A newcomer must not get the pages that someone was just preempted for.
        if self._waiting and self._preemptions == preemptions:
            self._plan_admission(budget, queue)
        if self._preemptions != preemptions:
            for partition in self._partitions:
                plan = partition.plan
                plan.decode = [seat for seat in plan.decode if seat.live]
                plan.prefill = [chunk for chunk in plan.prefill if chunk.seat.live]
        return any(partition.plan.decode or partition.plan.prefill for partition in self._partitions)

    def _plan_decode(self, decoding: list[Seat], budget: int) -> int:
        """Plans decode rows within `budget`; returns the tokens charged. The fast path: one comparison per row."""
        rows = self._config.decode_rows
        if len(decoding) * rows > budget:
            turn = bisect.bisect_right(decoding, self._last_turn, key=_arrival)
            decoding = (decoding[turn:] + decoding[:turn])[: budget // rows]
            self._last_turn = _arrival(decoding[-1])
        plans = [partition.plan.decode for partition in self._partitions]
        for seat in decoding:
            end = seat.upper + rows
            if end > seat.capacity and not (seat.live and self._reserve(seat, end)):
                continue
            if seat.live:
                seat.in_flight += 1
                seat.lower += 1
                seat.upper = end
                plans[seat.partition].append(seat)
        return len(decoding) * rows

    def _plan_prefill(self, prefilling: list[Seat], budget: int, queue: int) -> int:
        """Plans chunks of seated requests, leaving `queue` tokens to waiting ones; returns the budget for those."""
        tile = self._config.tile_tokens
        shares = [min(tile, seat.target - seat.lower) for seat in prefilling]
        behind = sum(shares) + queue
        for seat, share in zip(prefilling, shares, strict=True):
            behind -= share
            if not seat.live:
                continue
            room = self._partitions[seat.partition].room
            if not room:
                continue
            length = self._chunk(seat.target - seat.lower, budget, behind, room)
            if not length:
                return 0  # a whole prompt that waits for more budget must not be overtaken by shorter ones
            if seat.lower + length <= seat.capacity or self._reserve(seat, seat.lower + length):
                self._add_chunk(seat, length)
                budget -= length
        return budget

    def _plan_admission(self, budget: int, queue: int) -> None:
        """Seats waiting requests in order of arrival and plans their first chunks."""
        while self._waiting and budget > 0 and len(self._running) < self._config.max_num_seqs:
            request = self._waiting[0]
            queue = max(0, queue - min(self._config.tile_tokens, len(request.tokens)))
            length = self._seat(request, budget, queue)
            self._refused = not length
            if self._refused:
                return
            self._waiting.popleft()
            budget -= length

    def _chunk(self, needed: int, budget: int, behind: int, room: int) -> int:
        """Length of the next chunk of a request with `needed` tokens to go, 0 if it must wait for a later step."""
        most = min(needed, self._config.max_chunk)
        if not self._config.enable_chunked_prefill:
            return most if most <= min(budget, room) else 0
        return min(most, room, max(min(self._config.tile_tokens, budget), budget - behind))

    def _add_chunk(self, seat: Seat, length: int) -> None:
        partition = self._partitions[seat.partition]
        start = seat.lower
        seat.lower = seat.upper = start + length
        seat.in_flight += 1
        partition.plan.prefill.append(PrefillChunk(seat, start, length, seat.lower == seat.target))
        tile = self._config.tile_tokens
        partition.room -= -(-length // tile) * tile

    def _seat(self, request: ScheduledRequest, budget: int, behind: int) -> int:
        """Seats the head of the queue and plans its first chunk; returns that one's length, 0 if no partition takes it."""
        known = len(request.tokens)
        for hit, reason, partition in attempts(self._partitions, request, self._next_partition):
            length = self._chunk(known - hit, budget, behind, partition.room)
            if not length:
                if hit:
                    return 0  # the packed prefill is full in this step only: not worth losing a prefix for
                continue
            seat = partition.admit(request, hit, hit + length)
            if seat is None:
                continue
            bisect.insort(self._running, seat, key=_arrival)
            self._next_partition = (partition.index + 1) % len(self._partitions)
            if not request.preemptions:  # a resumed request finding its own pages says nothing about prompts
                request.cached_tokens, request.prefix_report = hit, reason
                self._prefix_queries += known
                self._prefix_hits += hit
            self._add_chunk(seat, length)
            return length
        return 0

    # Pages

    def _reserve(self, seat: Seat, end: int) -> bool:
        """Pages for positions up to end - 1, at the cost of later arrivals once nothing of the seat's own is in flight."""
        partition = self._partitions[seat.partition]
        while not partition.reserve(seat, end):
            victim = None if seat.in_flight else self._victim(seat)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, seat: Seat) -> Seat | None:
        """The latest arrival behind `seat` in its partition that may be preempted."""
        for other in reversed(self._running):
            if other is seat:
                return None
            if other.partition == seat.partition and not other.request.synchronous:
                return other
        return None

    def _preempt(self, seat: Seat) -> None:
        """Takes a request's seat and pages; it waits in its place in the queue to compute everything it knows again."""
        request = seat.request
        self._vacate(seat)
        request.preemptions += 1
        self._preemptions += 1
        place = bisect.bisect(self._waiting, request.arrival, key=lambda other: other.arrival)
        self._waiting.insert(place, request)

    def _break_deadlock(self) -> bool:
        """Nothing is in flight and nobody can go on. Only seats that may not be preempted can be in the way of the oldest,
        so room is made from the youngest: by preemption where that is allowed, else by ending it with an error."""
        if not self._running:
            return False
        seats = [seat for seat in self._running if seat.partition == self._running[0].partition]
        victim = next((seat for seat in reversed(seats) if not seat.request.synchronous), None)
        if victim is not None:
            self._preempt(victim)
            return True
        request = seats[-1].request
        self._leave(request)
        error = "the cache has no page left and grammar-constrained requests cannot be preempted: retry later"
        self._pending.append(RequestEvent(request, (), finish_reason=FinishReason.ERROR, error=error))
        return True

    # Results

    def _commit_prefill(self, chunks: list[PrefillChunk], tokens: Sequence[int], events: list[RequestEvent]) -> None:
        first_tokens = iter(tokens)
        for chunk in chunks:
            seat = chunk.seat
            token = next(first_tokens) if chunk.final else None
            if seat.live:
                seat.in_flight -= 1
                if token is not None:
                    events.append(self._extend(seat, (token,)))
                else:
                    seat.confirmed = chunk.start + chunk.length
                    self._partitions[seat.partition].settle(seat)

    def _commit_decode(self, seats: list[Seat], result: PartitionResult, events: list[RequestEvent]) -> None:
        rows, drafts = self._config.decode_rows, self._config.num_speculative_tokens
        proposed = result.proposed or itertools.repeat(None, len(seats))
        for seat, tokens, offered in zip(seats, result.rows, proposed, strict=True):
            if not seat.live:
                continue
            count = len(tokens)
            if not 0 < count <= rows:
                raise EngineError(
                    f"{seat.request.request_id}: expected 1 to {rows} tokens from a decode row, got {count}"
                )
            seat.in_flight -= 1
            if drafts:
                seat.lower += count - 1
                seat.upper -= rows - count
                if offered is None:
                    seat.request.speculation.plain_steps += 1
                else:
                    seat.request.speculation.record(offered, count - 1, drafts)
            events.append(self._extend(seat, tokens))

    def _extend(self, seat: Seat, tokens: Sequence[int]) -> RequestEvent:
        """Appends what one step yielded, cut at EOS and at the limit; the last token is the target's own, not a draft."""
        request, known = seat.request, seat.request.tokens
        drafted, finish = len(tokens) - 1, None
        if len(known) + len(tokens) >= request.limit:
            tokens = tokens[: request.limit - len(known)]
            finish = FinishReason.LENGTH
        if request.eos_token_id in tokens:
            tokens = tokens[: tokens.index(request.eos_token_id) + 1]
            finish = FinishReason.STOP
        known += tokens
        seat.confirmed = confirmed = len(known) - 1  # the newest token is the anchor: no step has run it yet
        if confirmed >= seat.boundary:
            self._partitions[seat.partition].settle(seat)
        if finish:
            self._leave(request)
        return RequestEvent(request, tokens, min(drafted, len(tokens)), finish)

    def _leave(self, request: ScheduledRequest) -> None:
        """Removes a request from wherever it is."""
        del self._requests[request.request_id]
        if request.seat is None:
            self._waiting.remove(request)
        else:
            self._vacate(request.seat)

    def _vacate(self, seat: Seat) -> None:
        """Ends a stay; its pages and slot can be lent to the next step."""
        self._running.remove(seat)
        self._partitions[seat.partition].vacate(seat)
        self._refused = False
