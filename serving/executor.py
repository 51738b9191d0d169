"""The seam between the engine, which plans steps, and whatever runs them: one worker here, or one process per rank."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from serving.batches import Array, StepWork

StepOutputs = Sequence[Sequence[dict[str, Array]]]


class Executor(Protocol):
    """Runs steps in the order given; the future holds, per partition and launch, the output's leaves by name."""

    def submit(self, work: Sequence[StepWork]) -> "Future[StepOutputs]": ...

    def check(self) -> None:
        """Raises EngineError naming what is wrong with a worker."""
        ...

    def watch(self, notify: Callable[[], None]) -> None:
        """Has `notify` called, from any thread, when workers are lost and with them all caches."""
        ...

    def recover(self) -> None:
        """After a failed step, when its requests have ended: workers that can take steps again. Raises EngineError."""
        ...

    def start_profile(self, folder: Path) -> None: ...

    def stop_profile(self) -> Path: ...

    def close(self) -> None: ...
