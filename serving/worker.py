"""The worker: a rank's parameters, cache and row state, and the compiled programs that a step replays on them."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4.batch import Extras, PrefillBatch, RowBatch, RowState, make_row_state
from dsv4.cache import Cache, Pages, make_cache
from dsv4.config import ModelConfig, StepShape
from dsv4.errors import EngineError
from dsv4.graph import Arena, Programs, StepProgram
from dsv4.mesh import SINGLE, Mesh
from dsv4.model.context import Env
from dsv4.params import Params, act_dtype
from dsv4.steps import STEPS
from dsv4.tree import named_leaves
from serving.batches import Array, Launch, StepWork
from serving.platform import OpsFor
from serving.profiler import StepProfiler
from serving.threads import compute

Progress = Callable[[str, int, int], None]


def step_program(env: Env, shape: StepShape) -> StepProgram:
    """The program of a shape: its cache and row state are donated."""
    return StepProgram(shape.kind, STEPS[shape.kind](env, shape), shape, donated=("cache", "state"))


def example_batch(shape: StepShape, vocab_size: int) -> PrefillBatch | RowBatch:
    """A batch of the shape's leaves, all zero."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    prefill = shape.kind == "prefill"
    rows, queries = shape.rows, 1 if prefill else shape.query_len
    extras = (
        Extras(mask=zeros(rows * queries, -(-vocab_size // 32)), drafts=zeros(rows, queries - 1))
        if shape.full
        else None
    )
    if not prefill:
        return RowBatch(slots=zeros(rows), extras=extras)
    columns = {name: zeros(rows) for name in ("slots", "start", "length", "last", "final", "limit", "eos")}
    return PrefillBatch(**columns, ids=zeros(rows, shape.query_len), extras=extras)


class Worker:
    """One rank. Everything it allocates lives as long as the engine; a step allocates nothing that grows.

    counter: [1] integer that counts what the rank has done of its programs, where the target can tell.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        ops: OpsFor,
        *,
        pages: dict[str, int],
        widths: dict[str, int],
        slots: int,
        k: int,
        shapes: Iterable[StepShape],
        target: str,
        mesh: Mesh = SINGLE,
        device: str = "cpu",
        counter: Array | None = None,
    ) -> None:
        self.cfg, self.ops, self.mesh = cfg, ops, mesh
        self.params = params
        self.profiler = StepProfiler()
        self.cache: Cache = make_cache(cfg, Pages(**pages), act_dtype(params), drafter=k > 0, device=device)
        self.state: RowState = make_row_state(slots, widths, k, device=device)
        self.programs = Programs(
            self._recipe,
            shapes,
            target=target,
            device=device,
            bind={"params": params, "cache": self.cache, "state": self.state},
            options={"arena": Arena(), "counter": counter} if target == "cpu" else {},
        )

    def _recipe(self, shape: StepShape) -> tuple[StepProgram, tuple[Any, ...]]:
        env = Env(cfg=self.cfg, ops=self.ops(shape), mesh=self.mesh)
        return step_program(env, shape), (
            self.params, self.cache, self.state, example_batch(shape, self.cfg.vocab_size),
        )  # fmt: skip

    @torch.no_grad()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Captures, compiles and runs every program once, on padding rows only; from then on none is ever compiled."""
        total = len(self.programs.shapes)
        for done, (shape, _) in enumerate(self.programs.compile()):
            if progress:
                progress(str(shape), done, total)
            self._replay(Launch(shape, self._padding(shape), 0))
        self.programs.freeze()
        if progress:
            progress("programs", total, total)

    def _padding(self, shape: StepShape) -> dict[str, Array]:
        """Rows of the dummy slot: they run and change nothing."""
        batch = example_batch(shape, self.cfg.vocab_size)
        arrays = {name.rsplit(".", 1)[-1]: leaf.numpy() for name, leaf in named_leaves(batch)}
        for name in ("slots", "final"):
            if name in arrays:
                arrays[name][:] = self.state.limit.shape[0] - 1
        return arrays

    def _replay(self, launch: Launch) -> dict[str, Array]:
        with self.profiler.span(launch.shape):
            return self.programs[launch.shape].on_host(launch.arrays)

    def execute(self, work: StepWork) -> list[dict[str, Array]]:
        """Writes the step's page table entries, then replays its launches in order."""
        for group, (slots, columns, pages) in work.tables.items():
            table: np.ndarray = getattr(self.state.tables, group).numpy()
            table[slots, columns] = pages
        return [self._replay(launch) for launch in work.launches]


class LocalExecutor:
    """One worker in this process, on a thread of its own: kernels run without the interpreter lock."""

    def __init__(self, worker: Worker, threads: int | None = None, step_deadline_s: float = 120.0) -> None:
        self.worker = worker
        self._threads = threads
        self._deadline_s = step_deadline_s
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dsv4-worker", initializer=self._start)
        self._closed = False
        self._began: float | None = None

    def _start(self) -> None:
        compute()
        if self._threads:
            torch.set_num_threads(self._threads)

    def submit(self, work: Sequence[StepWork]) -> "Future[list[list[dict[str, Array]]]]":
        """Queues a step behind those before it."""
        return self._pool.submit(self._execute, work)

    def _execute(self, work: Sequence[StepWork]) -> list[list[dict[str, Array]]]:
        self._began = time.monotonic()
        try:
            with torch.no_grad():
                return [self.worker.execute(part) for part in work]
        finally:
            self._began = None

    def watch(self, notify: Callable[[], None]) -> None:
        """A worker in this process is not lost before the process is."""

    def recover(self) -> None:
        """Nothing to do: a step that failed is over, and one that hangs holds up those behind it."""

    def start_profile(self, folder: Path) -> None:
        """Begins a trace of the worker's thread. Raises RequestError."""
        self._pool.submit(self.worker.profiler.start, folder).result()

    def stop_profile(self) -> Path:
        """Ends the trace; its file. Raises RequestError."""
        return self._pool.submit(self.worker.profiler.stop).result()

    def check(self) -> None:
        """Raises EngineError while a step runs past its deadline, and once the thread takes no more work."""
        began = self._began
        if began is not None and time.monotonic() - began > self._deadline_s:
            raise EngineError(f"a step has been running for more than {self._deadline_s:g} s")
        if self._closed:
            raise EngineError("the worker has been shut down")

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
