"""A device with the scheduler's contract and no model: what it writes is arithmetic, what it emits depends on every page.

Each row at position p with token t writes u = mix(p, t) into the window, tail and open pages; then every row reads its own
windows back through the page tables, and writes h = mix(u, sums over the three windows) into the history page. The next
token is a function of all history rows 0 .. p. So one wrong, stale, early released or doubly used page anywhere changes
tokens. `reference` computes the same tokens from a plain list.

A step first writes all its rows and reads afterwards, as the real one does. Steps are queued and run in order, and only
when their results are asked for: everything the host did in between has happened "too early" by then.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from serving.plan import PartitionPlan, PartitionResult, ScheduledRequest, SchedulerConfig, StepPlan
from serving.scheduler import Scheduler

VOCABULARY = 61
WINDOWS = {"window": 128, "tail": 8, "open": 128}


def _mix(values):
    values = np.asarray(values, dtype=np.uint64)
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(32))


def _row_values(start: int, tokens) -> np.ndarray:
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return _mix(positions * np.uint64(1_000_003) + np.asarray(tokens, dtype=np.uint64) + np.uint64(1))


def _windowed(values: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Sums of values[first[i] .. last[i]], wrapping."""
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    return total[last + 1] - total[first]


def _hidden(rows, positions, gathered) -> np.ndarray:
    """h of the rows at `positions`; gathered[name] = (first position, values) holds what their windows need."""
    state = rows
    for name, (base, values) in gathered.items():
        first = positions // 128 * 128 if name == "open" else np.maximum(positions - WINDOWS[name] + 1, 0)
        state = _mix(state + _windowed(values, first - base, positions - base))
    return state


def _tokens(history: np.ndarray, positions: np.ndarray) -> list[int]:
    weights = np.arange(len(history), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sums = np.cumsum(history * weights, dtype=np.uint64)[positions]
    return [int(token) for token in _mix(sums) % np.uint64(VOCABULARY)]


def reference(prompt: list[int], limit: int, eos: int | None) -> list[int]:
    """Tokens of a lone, cold, unspeculated run: prompt and output, from plain lists."""
    known = list(prompt)
    history = np.zeros(0, np.uint64)
    while True:
        done = len(history)
        rows = _row_values(0, known)
        positions = np.arange(done, len(known))
        hidden = _hidden(rows[done:], positions, dict.fromkeys(WINDOWS, (0, rows)))
        history = np.concatenate([history, hidden])
        known += _tokens(history, np.array([len(known) - 1]))
        if len(known) >= limit or known[-1] == eos:
            return known


@dataclass
class _Slot:
    position: int
    anchor: int
    limit: int
    eos: int | None
    script: list[int]
    drafts: list[int] = field(default_factory=list)
    done: bool = False


class ToyDevice:
    """Runs step plans. `acceptance`: chance that a draft equals the token the target will choose."""

    def __init__(self, config: SchedulerConfig, scripts: dict[str, list[int]], acceptance: float = 0.7, seed: int = 0):
        self.config = config
        self.acceptance = acceptance
        self._scripts = scripts
        self._random = Random(seed)
        self._queue: deque = deque()
        slots = min(config.max_rows_per_partition, config.max_num_seqs)
        self._tokens = {g.name: g.page_tokens for g in config.groups}
        self._pools = [
            {g.name: np.zeros((config.pages[g.name], g.page_tokens), np.uint64) for g in config.groups}
            for _ in range(config.partitions)
        ]
        self._tables = [
            {g.name: np.zeros((slots, config.table_width(g)), np.int64) for g in config.groups}
            for _ in range(config.partitions)
        ]
        self._slots: list[dict[int, _Slot]] = [{} for _ in range(config.partitions)]
        self.highest_position = -1

    def submit(self, plan: StepPlan) -> None:
        """Queues a step with a snapshot of its tokens, as an engine's copy to the device would take it."""
        self._queue.append([(part, [c.tokens for c in part.prefill], part.slots) for part in plan.partitions])

    def lose(self) -> None:
        """Forgets queued steps and scrambles every page, as a crash would."""
        self._queue.clear()
        for pools in self._pools:
            for pool in pools.values():
                pool[:] = np.uint64(self._random.getrandbits(60))

    def run(self) -> list[PartitionResult]:
        """Runs the oldest queued step."""
        return [self._run(i, *work) for i, work in enumerate(self._queue.popleft())]

    def _run(self, index: int, part: PartitionPlan, chunks: list[list[int]], slots: list[int]) -> PartitionResult:
        for name, updates in part.table_updates.items():
            pairs = list(zip(updates.slots, updates.columns, strict=True))
            assert len(set(pairs)) == len(pairs), f"{name}: one table entry is written twice in a step"
            self._tables[index][name][updates.slots, updates.columns] = updates.pages
        # Writes of the whole launch come before its reads, so that rows sharing a page by mistake destroy each other.
        launch = [(c.slot, c.start, tokens) for c, tokens in zip(part.prefill, chunks, strict=True)]
        first_tokens = []
        for chunk, tokens in zip(part.prefill, self._launch(index, launch), strict=True):
            if chunk.final:
                first_tokens.append(tokens[-1])
                self._seed(index, chunk, tokens[-1])
        live = {}
        for slot in slots:
            state = self._slots[index][slot]
            if not state.done and state.position <= state.limit - 2:
                rows = [state.anchor, *state.drafts][: state.limit - 1 - state.position]
                live[slot] = (slot, state.position, rows)
        chosen = dict(zip(live, self._launch(index, list(live.values())), strict=True))
        results, proposed = [], []
        for slot in slots:
            results.append(self._accept(self._slots[index][slot], chosen[slot]) if slot in live else [])
            proposed.append(len(live[slot][2]) - 1 if slot in live else 0)
        return PartitionResult(first_tokens, results, proposed)

    def _launch(self, index: int, work: list[tuple[int, int, list[int]]]) -> list[list[int]]:
        """Runs rows of several slots; returns the target's choice after each row."""
        writers: dict = {}
        for slot, start, tokens in work:
            self.highest_position = max(self.highest_position, start + len(tokens) - 1)
            rows = _row_values(start, tokens)
            for name in WINDOWS:
                self._write(index, name, slot, start, rows, writers)
        ranges = [np.arange(start, start + len(tokens)) for _, start, tokens in work]
        for (slot, start, tokens), positions in zip(work, ranges, strict=True):
            gathered = {}
            for name, window in WINDOWS.items():
                base = start // 128 * 128 if name == "open" else max(0, start - window + 1)
                gathered[name] = (base, self._read(index, name, slot, base, start + len(tokens)))
            rows = _hidden(_row_values(start, tokens), positions, gathered)
            self._write(index, "history", slot, start, rows, writers)
        return [
            _tokens(self._read(index, "history", slot, 0, start + len(tokens)), positions)
            for (slot, start, tokens), positions in zip(work, ranges, strict=True)
        ]

    def _pages(self, index: int, name: str, slot: int, positions: np.ndarray) -> np.ndarray:
        table = self._tables[index][name]
        return table[slot, positions // self._tokens[name] % table.shape[1]]

    def _write(self, index: int, name: str, slot: int, start: int, rows: np.ndarray, writers: dict) -> None:
        positions = np.arange(start, start + len(rows))
        pages = self._pages(index, name, slot, positions)
        assert pages.all(), f"{name}: a live row of slot {slot} would be written to the null page"
        for page in set(pages.tolist()):
            assert writers.setdefault((name, page), slot) == slot, f"{name}: page {page} has two writers"
        self._pools[index][name][pages, positions % self._tokens[name]] = rows

    def _read(self, index: int, name: str, slot: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        return self._pools[index][name][self._pages(index, name, slot, positions), positions % self._tokens[name]]

    def _seed(self, index: int, chunk, anchor: int) -> None:
        request = chunk.seat.request
        state = _Slot(
            position=chunk.start + chunk.length,
            anchor=anchor,
            limit=request.limit,
            eos=request.eos_token_id,
            script=self._scripts[request.request_id],
            done=anchor == request.eos_token_id,
        )
        self._slots[index][chunk.slot] = state
        self._draft(state)

    def _accept(self, state: _Slot, chosen: list[int]) -> list[int]:
        accepted = 0
        while accepted < len(chosen) - 1 and state.drafts[accepted] == chosen[accepted]:
            accepted += 1
        emitted = chosen[: accepted + 1]
        state.position += len(emitted)
        state.anchor = emitted[-1]
        state.done = state.eos in emitted
        self._draft(state)
        return emitted

    def _draft(self, state: _Slot) -> None:
        right = state.script[state.position + 1 :] + [0] * self.config.num_speculative_tokens
        state.drafts = [
            right[i] if self._random.random() < self.acceptance else self._random.randrange(VOCABULARY)
            for i in range(self.config.num_speculative_tokens)
        ]


class ToyServer:
    """Scheduler and device in one loop; every finished request is compared with its lone run."""

    def __init__(self, config: SchedulerConfig, acceptance: float = 0.7, seed: int = 0, check: bool = True):
        self.config = config
        self.scheduler = Scheduler(config)
        self.scripts: dict[str, list[int]] = {}
        self.device = ToyDevice(self.config, self.scripts, acceptance, seed)
        self.flight: deque[StepPlan] = deque()
        self.finished: dict[str, object] = {}
        self.first_token_step: dict[str, int] = {}
        self.steps = 0
        self.check = check
        self.streams: dict[str, list[int]] = {}
        self.seated: list[int] = []  # arrivals in the order of their first seating
        self._references: dict = {}

    def add(self, request) -> None:
        """Adds a request together with the script its output must follow."""
        self.scheduler.add(request)
        key = (tuple(request.tokens), request.limit, request.eos_token_id)
        if key not in self._references:
            self._references[key] = reference(list(request.tokens), request.limit, request.eos_token_id)
        self.scripts[request.request_id] = self._references[key]

    def abort(self, request_id: str, reason=None):
        event = self.scheduler.abort(request_id) if reason is None else self.scheduler.abort(request_id, reason)
        if event is not None:
            self.finished[request_id] = event
        return event

    def launch(self) -> StepPlan | None:
        """Plans and submits one step."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.steps += 1
            self.flight.append(plan)
            self.device.submit(plan)
            chunks = [chunk for part in plan.partitions for chunk in part.prefill]
            new = [c.seat.request for c in chunks if c.start == c.seat.request.cached_tokens]
            self.seated += sorted(request.arrival for request in new if not request.preemptions)
        if self.check:
            self.scheduler.check()
        return plan

    def land(self) -> list:
        """Runs and commits the oldest step."""
        events = self.scheduler.commit(self.flight.popleft(), self.device.run())
        if self.check:
            self.scheduler.check()
        for event in events:
            request = event.request
            assert request.request_id not in self.finished, "news of a finished request"
            stream = self.streams.setdefault(request.request_id, [])
            stream += event.tokens
            if stream:
                self.first_token_step.setdefault(request.request_id, self.steps)
            script = self.scripts[request.request_id][request.prompt_tokens :]
            assert stream == script[: len(stream)], f"{request.request_id}: tokens differ from the lone run"
            assert request.output_tokens == stream
            if event.finish_reason is not None:
                self.finished[request.request_id] = event
                if event.error is None:
                    assert stream == script, f"{request.request_id}: ended after {len(stream)} of {len(script)} tokens"
                    ended_by_eos = request.eos_token_id is not None and stream[-1] == request.eos_token_id
                    assert event.finish_reason == ("stop" if ended_by_eos else "length")
        return events

    def step(self) -> bool:
        """Fills the pipeline, then lands one step; False when nothing is left to do."""
        while self.launch() is not None:
            pass
        if self.flight:
            self.land()
            return True
        return False

    def fail(self, error: str) -> None:
        """The device loses everything it had queued."""
        for event in self.scheduler.fail(error):
            assert (event.finish_reason, event.error) == ("error", error)
            self.finished[event.request.request_id] = event
        self.flight.clear()
        self.device.lose()
        self.scheduler.check()

    def drain(self, most: int = 100_000) -> None:
        """Runs to the end and asserts that everything came back."""
        for _ in range(most):
            if not self.step():
                break
        assert len(self.scheduler) == 0, f"{len(self.scheduler)} requests are stuck: {self.scheduler.stats()}"
        stats = self.scheduler.stats()
        assert not any(stats.pages_used.values()), f"pages leaked: {stats.pages_used}"
        assert stats.running == stats.waiting == stats.in_flight_steps == 0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens; a shorter prompt of a seed is a prefix of a longer one."""
    random = Random(seed)
    return [random.randrange(VOCABULARY) for _ in range(length)]


def make_server(pages: int | dict = 400, acceptance=0.7, seed=0, check=True, **settings) -> ToyServer:
    """A server of eight seats, 256 tokens a step and the same number of pages in every group, unless told otherwise."""
    counts = pages if isinstance(pages, dict) else dict.fromkeys(("history", "window", "tail", "open"), pages)
    settings = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256} | settings
    return ToyServer(SchedulerConfig(pages=counts, **settings), acceptance, seed, check)


def make_request(name: str, prompt: list[int], max_tokens: int = 8, **options) -> ScheduledRequest:
    return ScheduledRequest(request_id=name, tokens=list(prompt), max_tokens=max_tokens, **options)
