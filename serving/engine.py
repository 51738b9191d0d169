"""The engine: one thread that plans steps, hands them to the worker, and applies their results one step behind.

    submit/abort (any thread) -> scheduler (under a lock) -> plan -> batches -> worker -> commit -> outputs to the callers

While the device runs step N, step N+1 is planned and queued behind it. The only thing the host waits for is the oldest
step's tokens, and it does so with the next step already launched.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4.errors import Dsv4Error, EngineError, UnavailableError
from dsv4.model.choose import TOP
from serving.batches import BatchBuilder, RowDetails, RowExtras, StepWork
from serving.executor import Executor, StepOutputs
from serving.pace import Pace
from serving.plan import PartitionResult, RequestEvent, ScheduledRequest, StepPlan
from serving.protocol import EngineStats
from serving.request import EngineOutput, FinishReason, SamplingParams, Speculation, TokenLogprobs
from serving.scheduler import Scheduler

log = logging.getLogger("dsv4.engine")

PROGRESS_STEPS = 500
_DECODING = ("decode", "speculate")


class _Stream:
    """One request's way back: an asyncio queue of the loop that submitted it, and what it wants beyond tokens.

    matcher: where it stands in its grammar, None for free text; drafts: the next ones, as far as the host was told.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, params: SamplingParams) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self.logprobs = params.logprobs
        self.matcher = params.grammar.matcher() if params.grammar is not None else None
        self.drafts: list[int] = []

    @property
    def is_special(self) -> bool:
        """Whether its rows need full steps."""
        return self.logprobs is not None or self.matcher is not None


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight: its plan, its work, and by partition and slot the special requests in it.

    drafts: whether its decode rows verify some, launched: when it was handed over.
    """

    plan: StepPlan
    work: Sequence[StepWork]
    future: "Future[StepOutputs]"
    special: Sequence[dict[int, str]]
    drafts: bool
    launched: float


class Engine:
    """Implements `serving.protocol.EngineClient` over a scheduler and an executor.

    step_deadline_s: a step that takes longer makes the engine unhealthy. align: gives partitions a common sequence of shapes.
    pace: decides which steps verify drafts; without one all do.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builders: Sequence[BatchBuilder],
        executor: Executor,
        *,
        model_name: str,
        max_model_len: int,
        vocab_size: int,
        bos_token_id: int,
        eos_token_id: int,
        num_speculative_tokens: int = 0,
        step_deadline_s: float = 120.0,
        align: Callable[[Sequence[StepWork]], Sequence[StepWork]] = list,
        pace: Pace | None = None,
    ) -> None:
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.num_speculative_tokens = num_speculative_tokens
        self.max_logprobs: int | None = min(TOP, vocab_size)
        self._scheduler = scheduler
        self._builders = builders
        self._align = align
        self._pace = pace
        self._done = 0.0  # when the last finished step's results were here
        self._executor = executor
        self._deadline_s = step_deadline_s
        self._streams: dict[str, _Stream] = {}
        self._special = 0  # streams that need full steps
        self._reports: deque[tuple[str, str]] = deque(maxlen=1024)
        self._wake = threading.Condition()
        self._closing = False
        self._failed = False  # a step failed, and the executor has not been seen working since
        self._lost = False  # workers are gone, and the scheduler does not know yet
        self._totals = Speculation()
        self._prompt_tokens = self._generation_tokens = 0
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="dsv4-engine", daemon=True)
        executor.watch(self._on_loss)
        self._thread.start()

    # Callers' side

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[EngineOutput]:
        """Queues a request. Raises RequestError, OverloadedError or UnavailableError before any device work."""
        request = ScheduledRequest(
            request_id=request_id,
            tokens=list(prompt_ids),
            max_tokens=params.max_tokens,
            eos_token_id=None if params.ignore_eos else self.eos_token_id,
            synchronous=params.grammar is not None,
        )
        stream = _Stream(asyncio.get_running_loop(), params)
        with self._wake:
            try:
                self._require_working()
            except EngineError as error:
                raise UnavailableError(str(error)) from None
            if self._closing:
                raise EngineError("the engine is shutting down")
            self._scheduler.add(request)
            self._streams[request_id] = stream
            self._special += stream.is_special
            self._prompt_tokens += len(request.tokens)
            self._wake.notify()
        return self._outputs(stream)

    @staticmethod
    async def _outputs(stream: _Stream) -> AsyncIterator[EngineOutput]:
        while True:
            output = await stream.queue.get()
            yield output
            if output.finish_reason is not None:
                return

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step boundary; unknown ids are ignored."""
        with self._wake:
            event = self._scheduler.abort(request_id)
            self._wake.notify()
        if event is not None:
            self._deliver([event])

    def stats(self) -> EngineStats:
        """A snapshot."""
        with self._wake:
            now = self._scheduler.stats()
            total = sum(now.pages_total.values())
            return EngineStats(
                running=now.running,
                waiting=now.waiting,
                kv_cache_usage=sum(now.pages_used.values()) / total if total else 0.0,
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generation_tokens,
                prefix_queries=now.prefix_queries,
                prefix_hits=now.prefix_hits,
                preemptions=now.preemptions,
                speculation=replace(self._totals, accepted_per_position=list(self._totals.accepted_per_position)),
            )

    async def check_health(self) -> None:
        """Raises EngineError if a worker died, or the current step exceeds its deadline."""
        self._require_working()
        if not self._thread.is_alive():
            raise EngineError("the engine thread has ended")
        self._executor.check()

    def _require_working(self) -> None:
        """Raises EngineError while the executor is as broken as the last failed step left it."""
        if self._failed:
            self._executor.check()
            self._failed = False

    def why_missed(self, request_id: str) -> str | None:
        """The prefix cache's account of a recent request."""
        return next((report for known, report in reversed(self._reports) if known == request_id), None)

    def start_profile(self, folder: Path) -> None:
        """Begins a trace of the steps. Raises RequestError."""
        self._executor.start_profile(folder)

    def stop_profile(self) -> Path:
        """Ends the trace; its file. Raises RequestError."""
        return self._executor.stop_profile()

    def close(self) -> None:
        """Stops; unfinished requests end as aborted, and nobody waits for the steps in flight."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._failed:
            self._executor.close()  # a recovery under way must not be waited for
        self._thread.join(timeout=30)
        self._executor.close()

    def _on_loss(self) -> None:
        with self._wake:
            self._lost = self._failed = True
            self._wake.notify()

    # Engine thread

    def _run(self) -> None:
        in_flight: deque[_Step] = deque()
        while True:
            with self._wake:
                while not (in_flight or len(self._scheduler) or self._closing or self._lost):
                    self._wake.wait()
                if self._closing:
                    break
                plan = None if self._lost else self._scheduler.plan()
            try:
                if self._lost:
                    self._executor.check()
                    self._lost = False
                elif plan is not None:
                    in_flight.append(self._launch(plan))
                elif in_flight:
                    self._finish(in_flight.popleft())
                else:  # requests wait for a seat that only an abort or a commit can free
                    with self._wake:
                        self._wake.wait(timeout=0.05)
            except Exception as error:
                in_flight.clear()
                self._fail(error)
        with self._wake:
            events = [self._scheduler.abort(request_id) for request_id in list(self._streams)]
        self._deliver([event for event in events if event is not None])

    def _launch(self, plan: StepPlan) -> _Step:
        special: list[dict[int, str]] = [{} for _ in plan.partitions]
        extras: list[dict[int, RowExtras]] = [{} for _ in plan.partitions]
        if self._special:
            for part, wants, found in zip(plan.partitions, extras, special, strict=True):
                seats = [*(chunk.seat for chunk in part.finals), *part.decode]
                for seat in seats:
                    stream = self._streams.get(seat.request.request_id)
                    if stream is not None and stream.is_special:
                        found[seat.slot] = seat.request.request_id
                        wants[seat.slot] = self._wanted(seat.request.request_id, stream)
        drafts, rows = True, _rows(plan)
        if self._pace is not None and rows and not any(extras):
            drafts = self._pace.drafts(rows)
        parts = zip(self._builders, plan.partitions, extras, strict=True)
        work = self._align([builder.build(part, wants, drafts=drafts) for builder, part, wants in parts])
        launched = time.perf_counter()
        return _Step(plan, work, self._executor.submit(work), special, drafts, launched)

    def _keep_pace(self, step: _Step, results: Sequence[PartitionResult]) -> None:
        """Tells the pace what a step of plain decode rows took: the time since it was the oldest in flight."""
        began, self._done = max(step.launched, self._done), time.perf_counter()
        rows = [row for result in results for row in result.rows]
        launches = [launch for work in step.work for launch in work.launches]
        if self._pace is not None and rows and all(la.shape.kind in _DECODING and not la.shape.full for la in launches):
            self._pace.record(_rows(step.plan), step.drafts, self._done - began, sum(map(len, rows)) / len(rows))

    def _wanted(self, request_id: str, stream: _Stream) -> RowExtras:
        """Masks of a constrained request's next rows, with the tokens that its grammar forces put into the drafts."""
        if stream.matcher is None:
            return RowExtras()
        try:
            forced = stream.matcher.forced()[: self.num_speculative_tokens] if stream.drafts else []
            drafts = [*forced, *stream.drafts[len(forced) :]]
            _, mask = stream.matcher.masks(drafts)
            return RowExtras(mask, drafts)
        except EngineError as error:
            self._end_with_error(request_id, str(error))
            return RowExtras()

    def _end_with_error(self, request_id: str, message: str) -> None:
        """Ends one request; its neighbours go on."""
        with self._wake:
            event = self._scheduler.abort(request_id, FinishReason.ERROR)
        if event is not None:
            self._deliver([event._replace(error=message)])

    def _finish(self, step: _Step) -> None:
        try:
            outputs = step.future.result(timeout=self._deadline_s)
        except TimeoutError:
            self._executor.check()  # it knows who keeps us waiting
            raise
        parts = list(zip(self._builders, step.plan.partitions, step.work, outputs, strict=True))
        results = [builder.result(part, work, out) for builder, part, work, out in parts]
        self._keep_pace(step, results)
        with self._wake:
            events = self._scheduler.commit(step.plan, results)
        if self._totals.verify_steps and self.steps % PROGRESS_STEPS == 0:
            self._log_progress()
        self.steps += 1
        details: dict[str, RowDetails] = {}
        for (builder, _, work, out), special in zip(parts, step.special, strict=True):
            if special:
                details |= {special[s]: d for s, d in builder.details(work, out).items() if s in special}
        self._deliver(events, details)

    def _fail(self, error: Exception) -> None:
        """A step failed: every unfinished request ends with an error; the engine goes on if its workers do."""
        message = str(error) if isinstance(error, Dsv4Error) else f"{type(error).__name__}: {error}"
        log.error("step failed: %s", message, exc_info=not isinstance(error, Dsv4Error))
        with self._wake:
            events = self._scheduler.fail(message)
            self._failed, self._lost = True, False
        self._deliver(events)
        try:
            self._executor.recover()
        except EngineError as broken:
            log.error("%s", broken)

    def _deliver(self, events: Sequence[RequestEvent], details: Mapping[str, RowDetails] | None = None) -> None:
        """One wake-up per event loop and step, whatever the number of requests."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, EngineOutput]]] = {}
        with self._wake:
            for stream, output in self._outputs_of(events, details or {}):
                batches.setdefault(stream.loop, []).append((stream, output))
        for loop, outputs in batches.items():
            try:
                loop.call_soon_threadsafe(_put, outputs)
            except RuntimeError:  # the caller's loop has closed: nobody is left to tell
                log.debug("%d outputs had no listener", len(outputs))

    def _outputs_of(
        self, events: Sequence[RequestEvent], details: Mapping[str, RowDetails]
    ) -> Iterator[tuple[_Stream, EngineOutput]]:
        """What events mean to their listeners; closes the books of finished requests. Under the lock."""
        for event in events:
            request = event.request
            stream = self._streams.get(request.request_id)
            if stream is None:
                continue
            self._generation_tokens += len(event.tokens)
            scores: Sequence[TokenLogprobs] = ()
            if stream.is_special and (detail := details.get(request.request_id)):
                scores = _token_logprobs(event.tokens, detail, stream.logprobs)
                stream.drafts = detail.drafts
                if stream.matcher is not None and event.finish_reason is None:
                    try:
                        stream.matcher.accept(event.tokens)
                    except EngineError as error:
                        self._end_with_error(request.request_id, str(error))
                        continue
            if event.finish_reason is not None:
                del self._streams[request.request_id]
                self._special -= stream.is_special
                self._reports.append((request.request_id, request.prefix_report))
                self._count(request.request_id, request.speculation)
            drafted = event.drafted
            output = EngineOutput(
                token_ids=event.tokens,
                draft_mask=[i < drafted for i in range(len(event.tokens))],
                logprobs=scores,
                finish_reason=event.finish_reason,
                cached_tokens=request.cached_tokens,
                speculation=request.speculation,
                error=event.error,
            )
            yield stream, output

    def _log_progress(self) -> None:
        """One line, after the first request that drafted and every PROGRESS_STEPS steps: sums over finished requests."""
        t = self._totals
        log.info(
            "DSpark speculation progress: requests=%d verifies=%d proposed=%d accepted=%d mean_len=%.2f fallbacks=%d "
            "plain=%d",
            len(self._streams), t.verify_steps, t.proposed, t.accepted, t.mean_accepted_length, t.fallback_steps,
            t.plain_steps,
        )  # fmt: skip

    def _count(self, request_id: str, one: Speculation) -> None:
        if one.verify_steps:
            log.info(
                "DSpark speculation finished: request=%s verifies=%d proposed=%d accepted=%d mean_len=%.2f fallbacks=%d "
                "plain=%d per_position=%s",
                request_id, one.verify_steps, one.proposed, one.accepted, one.mean_accepted_length, one.fallback_steps,
                one.plain_steps, one.accepted_per_position,
            )  # fmt: skip
        total = self._totals
        for position, count in enumerate(one.accepted_per_position):
            if position == len(total.accepted_per_position):
                total.accepted_per_position.append(0)
            total.accepted_per_position[position] += count
        total.verify_steps += one.verify_steps
        total.fallback_steps += one.fallback_steps
        total.plain_steps += one.plain_steps
        total.proposed += one.proposed
        total.accepted += one.accepted
        if total.verify_steps == one.verify_steps > 0:
            self._log_progress()


def _rows(plan: StepPlan) -> int:
    """Decode rows of the partition that has most."""
    return max(len(part.decode) for part in plan.partitions)


def _put(outputs: Sequence[tuple[_Stream, EngineOutput]]) -> None:
    for stream, output in outputs:
        stream.queue.put_nowait(output)


def _token_logprobs(tokens: Sequence[int], detail: RowDetails, top: int | None) -> list[TokenLogprobs]:
    """Log-probabilities of a row's tokens with `top` alternatives each; nothing if none were asked for."""
    if top is None:
        return []
    return [
        TokenLogprobs(
            token,
            float(detail.chosen[i]),
            tuple(zip(detail.top_ids[i, :top].tolist(), detail.top[i, :top].tolist(), strict=True)),
        )
        for i, token in enumerate(tokens)
    ]
