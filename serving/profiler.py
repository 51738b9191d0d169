"""Runtime profiling of a worker: a torch profiler trace with program names on the timeline (Chrome and Perfetto read it)."""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from dsv4.errors import RequestError


class StepProfiler:
    """Off until started; must be used on the worker's own thread, which is what it records."""

    def __init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None
        self._out = Path()

    def start(self, folder: Path) -> None:
        """Begins a trace. Raises RequestError if one is being taken or the folder cannot be written."""
        if self._profiler is not None:
            raise RequestError("a profile is being taken already; stop it first", code="profile_running")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"--profile-output {folder}: cannot be made ({error.strerror})") from None
        self._out = folder / f"dsv4-{time.strftime('%Y%m%d-%H%M%S')}.json"
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def stop(self) -> Path:
        """Writes the trace and returns its path. Raises RequestError if none is being taken."""
        if self._profiler is None:
            raise RequestError("no profile is being taken; start one first", code="profile_not_running")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._out))
        return self._out

    def span(self, name: object) -> AbstractContextManager[object]:
        """A named stretch of the timeline; free while off."""
        return nullcontext() if self._profiler is None else torch.profiler.record_function(str(name))
