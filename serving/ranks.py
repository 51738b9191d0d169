"""The executor over worker processes: a step goes to every rank, its tokens come back from each group's leader.

engine thread   submit: one frame per partition, sent to the partition's ranks     recover: a new generation of workers
group threads   outputs complete a step's future; a lost worker fails all of them
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path

from dsv4.errors import EngineError, RequestError
from serving.batches import Array, StepWork
from serving.rank_group import Progress, RankGroup
from serving.rank_messages import Channel, Outputs, Profile, Profiled, Ready, Setup, Step

log = logging.getLogger("dsv4.ranks")

RESTARTS = 3  # in a row
CALM_S = 60.0  # a generation that served this long ends a row of restarts
PAUSE_S = 0.5  # before the first restart of a row, doubled with each

Launches = list[dict[str, Array]]


class _Pending:
    """A step on its way: what has come back, by partition."""

    def __init__(self, partitions: int) -> None:
        self.future: Future[list[Launches]] = Future()
        self.parts: list[Launches | None] = [None] * partitions


class RankExecutor:
    """Implements `serving.engine.Executor`. `ready` is what each rank said when it was warm.

    step_deadline_s: what the oldest step may take before the group counts as hung.
    """

    def __init__(self, setup: Setup, *, step_deadline_s: float = 120.0, report: Progress | None = None) -> None:
        self._setup = setup
        self._deadline_s = step_deadline_s
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}  # by step number, oldest first
        self._oldest_since = 0.0
        self._steps = 0
        self._broken: str | None = None
        self._closing = threading.Event()
        self._notify: Callable[[], None] = lambda: None
        self._profile: Future[Path] | None = None
        self._restarts = 0
        self.ready: list[Ready] = []
        self._start(report)

    def _start(self, report: Progress | None = None) -> None:
        group = RankGroup(self._setup, self._receive, lambda: self._lose(group))
        self._group = group
        self.ready = group.start(report)
        self._since = time.monotonic()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers, by rank."""
        return dict(self._group.pids)

    def watch(self, notify: Callable[[], None]) -> None:
        """Calls `notify` from any thread when workers are lost, also between steps."""
        self._notify = notify

    def submit(self, work: Sequence[StepWork]) -> "Future[list[Launches]]":
        """Sends a step behind those before it. Raises EngineError while workers are lost, or if one does not listen."""
        self.check()
        tp = self._setup.parallel.tp
        pending = _Pending(len(work))
        with self._lock:
            self._steps += 1
            number = self._steps
            if not self._pending:
                self._oldest_since = time.monotonic()
            self._pending[number] = pending
        for part, one in enumerate(work):
            frame = Channel.encode(Step(number, one))
            for rank in range(part * tp, (part + 1) * tp):
                self._group.send(rank, frame)
        return pending.future

    def check(self) -> None:
        """Raises EngineError naming the rank that was lost, or those that keep a step from ending."""
        if self._broken:
            raise EngineError(self._broken)
        if self._closing.is_set():
            raise EngineError("the workers have been shut down")
        if self._overdue():
            raise EngineError(
                f"step {next(iter(self._pending), self._steps)} has been running for more than {self._deadline_s:g} s: "
                f"{self._group.stragglers()}"
            )

    def recover(self) -> None:
        """After a failed step: workers that can take steps again, all caches empty. Nothing to do for healthy, idle ones.

        Raises EngineError, and goes on raising it from `check`, when too many restarts in a row have not helped.
        """
        try:
            self.check()
            if not self._pending:
                return
            cause = "steps in flight were given up"
        except EngineError as error:
            cause = str(error)
        self._broken = cause
        self._end_pending(cause)
        if time.monotonic() - self._since > CALM_S:
            self._restarts = 0
        while self._restarts < RESTARTS:
            self._broken = f"{cause}; restarting all ranks, attempt {self._restarts + 1} of {RESTARTS}"
            log.error(self._broken)
            self._group.kill()
            closing = self._closing.wait(PAUSE_S * 2**self._restarts)
            self._restarts += 1
            try:
                if not closing:
                    self._start()
            except (EngineError, OSError) as error:
                cause = str(error)
            if self._closing.is_set():
                self._group.kill()  # one that was started while `close` ended the last
                raise EngineError("the workers have been shut down")
            self._broken = None  # before the look, so that a loss after it is not overwritten
            if self._group.is_ready:
                log.info("all ranks are back")
                return
        self._group.kill()
        self._broken = f"{cause}; given up after {self._restarts} restarts in a row: restart the server"
        raise EngineError(self._broken)

    def start_profile(self, folder: Path) -> None:
        """Begins a trace of rank 0. Raises RequestError, or EngineError where there is no rank 0."""
        self._ask_profile(Profile(folder))

    def stop_profile(self) -> Path:
        """Ends the trace; its file. Raises as `start_profile`."""
        return self._ask_profile(Profile(None))

    def close(self) -> None:
        """Lets the workers finish and ends them. At any time, also during a recovery, and again."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._broken:
            self._group.kill()
        else:
            self._group.close()
        self._end_pending("the engine is shutting down")

    def _overdue(self) -> bool:
        with self._lock:
            return bool(self._pending) and time.monotonic() - self._oldest_since > self._deadline_s

    def _end_pending(self, cause: str) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            profile, self._profile = self._profile, None
        for future in [*(step.future for step in pending.values()), *([profile] if profile else [])]:
            with suppress(InvalidStateError):  # whoever waited has left
                future.set_exception(EngineError(cause))

    def _ask_profile(self, message: Profile) -> Path:
        self.check()
        with self._lock:
            if self._profile is not None:
                raise RequestError("another profile request is being answered; try again", code="profile_running")
            self._profile = asked = Future()
        self._group.send(0, Channel.encode(message))
        return asked.result(timeout=self._deadline_s)

    # Group threads

    def _receive(self, rank: int, message: object) -> None:
        match message:
            case Outputs(number, launches):
                with self._lock:
                    step = self._pending.get(number)
                    if step is None:
                        return
                    step.parts[rank // self._setup.parallel.tp] = launches
                    if any(part is None for part in step.parts):
                        return
                    del self._pending[number]
                    self._oldest_since = time.monotonic()
                with suppress(InvalidStateError):
                    step.future.set_result(step.parts)
            case Profiled(path, refusal):
                with self._lock:
                    asked, self._profile = self._profile, None
                if asked is None:
                    return
                if refusal is None:
                    asked.set_result(path)
                else:
                    asked.set_exception(RequestError(refusal))

    def _lose(self, group: RankGroup) -> None:
        cause = group.why()
        if group is not self._group or self._closing.is_set():
            return
        self._broken = cause
        self._end_pending(cause)
        self._notify()
