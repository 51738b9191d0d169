"""Progress in bytes with rate and time left: a bar on a terminal, a line now and then anywhere else."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds bytes done; it may be called from any thread. Writes to stderr."""
    if sys.stderr.isatty():
        columns = (TextColumn(label), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
                   TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda nbytes: bar.advance(task, nbytes)
    else:
        yield _Lines(label, total).advance


class _Lines:
    """Rate and time left come from the time since the line before: a resumed run must not count what it skipped."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._last_done, self._last = 0, time.monotonic()
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            elapsed_s = time.monotonic() - self._last
            if elapsed_s >= SECONDS_BETWEEN_LINES or self._done == self._total:
                self._print((self._done - self._last_done) / max(elapsed_s, 1e-9))
                self._last_done, self._last = self._done, self._last + elapsed_s

    def _print(self, bytes_per_s: float) -> None:
        left_s = (self._total - self._done) / max(bytes_per_s, 1e-9)
        print(
            f"{self._label} {self._done / 2**30:.3f} of {self._total / 2**30:.3f} GiB, "
            f"{100 * self._done // self._total} %, {bytes_per_s / 1e6:.0f} MB/s, {left_s:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
