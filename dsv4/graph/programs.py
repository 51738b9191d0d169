"""The programs of one server: one per `StepShape`, compiled ahead of traffic, then only replayed."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4.config import StepKind, StepShape
from dsv4.errors import CaptureError
from dsv4.graph.compiled import Compiled
from dsv4.graph.stages import StepProgram

Recipe = Callable[[StepShape], tuple[StepProgram, tuple[Any, ...]]]


def bucket(need: int, sizes: Iterable[int], what: str) -> int:
    """The smallest size that holds `need`. Raises CaptureError if none does."""
    fitting = [size for size in sizes if size >= need]
    if not fitting:
        raise CaptureError(f"{need} {what}: the largest program has {max(sizes, default=0)}")
    return min(fitting)


@dataclass(frozen=True, kw_only=True)
class ProgramStats:
    """What a program has cost and done. A second trace or compile of one shape would be a bug; it would show here."""

    traces: int = 0
    compiles: int = 0
    replays: int = 0
    seconds: float = 0.0


class Programs:
    """Compiled steps by shape.

    `recipe(shape)` gives the program and example arguments (trees of tensors of any device; values are not read). `shapes`
    are the buckets; `bind` and `options` go to every `Lowered.compile`, so programs can share caches and an arena.
    """

    def __init__(
        self,
        recipe: Recipe,
        shapes: Iterable[StepShape] = (),
        *,
        target: str = "cpu",
        device: str | torch.device = "cpu",
        bind: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.shapes = tuple(dict.fromkeys(shapes))
        self.target, self.device = target, device
        self.frozen = False
        self._recipe, self._bind, self._options = recipe, dict(bind or {}), dict(options or {})
        self._compiled: dict[StepShape, Compiled] = {}
        self._stats: dict[StepShape, ProgramStats] = {}

    # ---- buckets ----

    def bucket_rows(self, kind: StepKind, rows: int) -> int:
        """The fewest rows of a declared program of this kind that hold `rows`."""
        return bucket(rows, sorted({s.rows for s in self.shapes if s.kind == kind}), f"rows of {kind}")

    def bucket_pages(self, kind: StepKind, rows: int, pages: int) -> int:
        """The fewest pages of a declared program of this kind with exactly `rows` rows that hold `pages`."""
        sizes = sorted({s.pages for s in self.shapes if (s.kind, s.rows) == (kind, rows)})
        return bucket(pages, sizes, f"pages of {kind} with {rows} rows")

    def fit(self, kind: StepKind, rows: int, pages: int) -> StepShape:
        """The smallest declared shape for a step: fewest rows first, then fewest pages. Raises CaptureError if none is."""
        rows = self.bucket_rows(kind, rows)
        pages = self.bucket_pages(kind, rows, pages)
        return next(s for s in self.shapes if (s.kind, s.rows, s.pages) == (kind, rows, pages))

    # ---- programs ----

    def __getitem__(self, shape: StepShape) -> Compiled:
        """The program of a shape, compiled now if it is not yet. Raises CaptureError for a missing one after `freeze`."""
        found = self._compiled.get(shape)
        return found if found is not None else self._compile(shape)

    def _compile(self, shape: StepShape) -> Compiled:
        if self.frozen:
            have = ", ".join(map(str, self._compiled)) or "none"
            raise CaptureError(f"no program for {shape}: none is compiled while serving; compiled are {have}")
        began, stats = time.perf_counter(), self._stats.get(shape, ProgramStats())
        program, args = self._recipe(shape)
        traced = program.trace(*args, device=self.device)
        self._stats[shape] = stats = replace(stats, traces=stats.traces + 1)
        self._compiled[shape] = traced.lower(self.target).compile(bind=self._bind, **self._options)
        spent = time.perf_counter() - began
        self._stats[shape] = replace(stats, compiles=stats.compiles + 1, seconds=stats.seconds + spent)
        return self._compiled[shape]

    def compile(self) -> Iterator[tuple[StepShape, Compiled]]:
        """Compiles every declared shape, the largest first so that a shared arena is made once; yields each when ready."""
        for shape in sorted(self.shapes, key=lambda s: (s.tokens, s.pages), reverse=True):
            yield shape, self[shape]

    def freeze(self) -> None:
        """From here on a missing program is an error, never a pause."""
        self.frozen = True

    def rebind(self, **trees: Any) -> None:
        """Moves every compiled program to other bound trees with the same leaves."""
        self._bind |= trees
        for compiled in self._compiled.values():
            compiled.rebind(**trees)

    # ---- reading ----

    def __len__(self) -> int:
        return len(self._compiled)

    def __iter__(self) -> Iterator[StepShape]:
        return iter(self._compiled)

    def stats(self) -> dict[StepShape, ProgramStats]:
        """Traces, compiles, replays and build time of every program so far."""
        return {shape: replace(self._stats[shape], replays=run.replays) for shape, run in self._compiled.items()}
