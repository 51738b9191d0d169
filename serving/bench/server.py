"""A server of our own for online benchmarks: `dsv4 serve` in a process of its own, on a free port of this machine."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4.errors import EngineError

READY_S = 300.0


@dataclass(frozen=True)
class OwnServer:
    """A server that is ready: its base URL, how long it took to be, and its process id."""

    base: str
    ready_s: float
    pid: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_ready(process: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"dsv4 serve ended with code {process.returncode} before it was ready")
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2),
        ):
            return
        time.sleep(0.1)
    raise EngineError(f"dsv4 serve was not ready after {READY_S:.0f} s")


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[OwnServer]:
    """Serves while the context lasts. Raises EngineError if the server ends or is not ready in time."""
    port = free_port()
    command = [sys.executable, "-c", "from cli.main import app; app()", "serve", *flags, "--port", str(port)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(process, port)
        yield OwnServer(f"http://127.0.0.1:{port}/v1", time.monotonic() - began, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
