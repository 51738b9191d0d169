"""One generation of worker processes: started, spoken to, blamed and ended together.

torch.distributed's elastic agent starts the processes (in sessions of their own), collects their exit codes and ends the
others as soon as one has failed. It runs on a thread and restarts nothing itself: its restarts know no pause and tell nobody,
while the engine must end its requests and forget its caches in between (`ranks.py`). What the agent cannot see, a process that
hangs, is the business of whoever waits for an answer; `kill` is for that.
"""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from dsv4.errors import EngineError, PlatformError
from serving.rank_messages import Capturing, Channel, Failed, Hello, Ready, Setup, Stop
from serving.rank_worker import PROGRESS, SOCKET, progress_table

log = logging.getLogger("dsv4.ranks")

Progress = Callable[[str, int, int], None]
MONITOR_S = 0.1
SILENT_S = 2.0  # without a heartbeat
GRACE_S = 10  # for workers to leave when asked, before they are killed

# They say of every exit what we say better, and warn that the agent's thread handles no signals: workers notice by themselves
# that an engine has ended.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
logging.getLogger("torchelastic-events-null").disabled = True


class RankGroup:
    """`on_message(rank, message)` gets what ready workers send, `on_loss()` is called once when one is lost; both on threads
    of the group."""

    def __init__(self, setup: Setup, on_message: Callable[[int, object], None], on_loss: Callable[[], None]) -> None:
        self._setup = setup
        self._ranks = setup.parallel.ep
        self._on_message, self._on_loss = on_message, on_loss
        self._channels: dict[int, Channel] = {}
        self._ready: dict[int, Ready] = {}
        self._failed: dict[int, Failed] = {}
        self._gone: list[int] = []  # ranks whose connection ended, first one first
        self._exit_codes: dict[int, int] = {}
        self._agent_error: str | None = None
        self._changed = threading.Condition()
        self._ending = False
        self._report: Progress | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="dsv4-"))
        (self._folder / PROGRESS).write_bytes(bytes(24 * self._ranks))
        self.progress = progress_table(self._folder, self._ranks)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self._folder / SOCKET))
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise PlatformError(
                f"{self._folder}: no socket can be made there ({error}); set TMPDIR to a short path"
            ) from None
        self._listener.listen(self._ranks)

    def start(self, report: Progress | None = None) -> list[Ready]:
        """Starts all workers and waits until the last one is warm. Raises EngineError naming rank, device and cause."""
        self._report = report
        self._agent = self._make_agent()
        self._agent_thread = threading.Thread(target=self._run_agent, name="dsv4-agent", daemon=True)
        self._agent_thread.start()
        threading.Thread(target=self._accept, name="dsv4-accept", daemon=True).start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) == self._ranks or self._gone or self._agent_error)
            if not self.is_ready:
                raise EngineError(f"{self.why()} while starting")
        except BaseException:
            self.kill()
            raise
        return [self._ready[rank] for rank in range(self._ranks)]

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank, as soon as there are processes."""
        return {w.local_rank: w.id for w in self._agent.get_worker_group().workers if w.id is not None}

    @property
    def is_ready(self) -> bool:
        """Whether all workers are warm and none is lost."""
        return len(self._ready) == self._ranks and not self._gone

    def send(self, rank: int, frame: bytes) -> None:
        """Sends what `Channel.encode` made. Raises EngineError if the rank is gone or does not listen."""
        try:
            self._channels[rank].send_frame(frame)
        except OSError as error:
            raise EngineError(f"{self._setup.where(rank)} cannot be reached ({error.strerror})") from None

    def why(self) -> str:
        """Who failed first and how. Waits for exit codes, which come within a second of a death."""
        if self._gone and not self._ending:
            self._agent_thread.join(timeout=3)
        where = self._setup.where
        for rank in sorted(self._failed, key=self._gone_order):
            if not self._failed[rank].of_peer:
                return f"{where(rank)}: {self._failed[rank].cause}"
        silent = [rank for rank in self._gone if rank not in self._failed]
        killed = [r for r in silent if self._exit_codes.get(r, 0) < 0 and -self._exit_codes[r] != signal.SIGTERM]
        for rank in killed or silent:
            code = self._exit_codes.get(rank, 0)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"{where(rank)} {how}"
        for rank, failed in self._failed.items():
            return f"{where(rank)} lost another rank: {failed.cause}"
        return f"the workers could not be started: {self._agent_error}"

    def stragglers(self) -> str:
        """The ranks that show no life; if all do, or none, those that have come least far."""
        now = time.monotonic_ns()
        steps, segments, beats = self.progress.T.tolist()
        silent = [rank for rank, beat in enumerate(beats) if now - beat > SILENT_S * 1e9]
        if 0 < len(silent) < self._ranks:
            return f"{self._names(silent)} show{'s' if len(silent) == 1 else ''} no life"
        order = list(zip(steps, segments, strict=True))
        behind = [rank for rank, at in enumerate(order) if at == min(order)]
        if len(behind) == self._ranks:
            return f"all ranks are at the same place of step {steps[0]}"
        return f"{self._names(behind)} {'is' if len(behind) == 1 else 'are'} behind the others"

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._setup.where(rank) for rank in ranks)

    def close(self) -> None:
        """Lets the workers finish and leave; whoever has not after a while is killed."""
        self._ending = True
        frame = Channel.encode(Stop())
        for channel in self._channels.values():
            with suppress(OSError):
                channel.send_frame(frame)
        self._agent_thread.join(timeout=GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Ends every worker at once and removes what the group has on disk."""
        self._ending = True
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts, which closing does not
        self._listener.close()
        if self._agent_thread.is_alive():  # it has not reaped them: their ids are theirs
            for pid in self.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for channel in list(self._channels.values()):
            channel.close()
        self._agent_thread.join(timeout=GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    # Threads

    def _make_agent(self) -> LocalElasticAgent:
        # Its stores over TCP listen on every interface and ask nobody who they are; ours are files in the group's folder.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        meeting = RendezvousParameters(
            "c10d", str(self._folder / "rendezvous"), "dsv4", 1, 1, local_addr="127.0.0.1", store_type="file"
        )
        spec = WorkerSpec(
            role="rank",
            local_world_size=self._ranks,
            rdzv_handler=get_rendezvous_handler(meeting),
            entrypoint=sys.executable,
            args=("-m", "serving.rank_worker", self._folder),
            max_restarts=0,
            monitor_interval=MONITOR_S,
            local_addr="127.0.0.1",
        )
        return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(self._folder)), shutdown_timeout=GRACE_S)

    def _run_agent(self) -> None:
        error = "they left"
        try:
            result = self._agent.run()
            if result is not None and result.is_failed():
                self._exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
                codes = (f"{self._setup.where(rank)} {code}" for rank, code in sorted(self._exit_codes.items()))
                error = f"exit codes {', '.join(codes)}"
        except Exception as unexpected:  # whatever goes wrong in the agent is one more way not to have workers
            error = f"{type(unexpected).__name__}: {unexpected}"
        finally:
            self._agent.get_worker_group().spec.rdzv_handler.shutdown()
        with self._changed:
            self._agent_error = error
            self._changed.notify_all()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            for _ in range(self._ranks):
                connection, _ = self._listener.accept()
                threading.Thread(target=self._receive, args=(Channel(connection),), daemon=True).start()

    def _receive(self, channel: Channel) -> None:
        """One worker's messages, from its first word to the end of the connection."""
        rank = None
        try:
            hello = channel.receive()
            assert isinstance(hello, Hello), hello
            rank = hello.rank
            with self._changed:
                self._channels[rank] = channel
            channel.send(self._setup)
            while True:
                self._handle(rank, channel.receive())
        except (EOFError, OSError):
            if rank is not None:
                self._lose(rank)

    def _handle(self, rank: int, message: object) -> None:
        match message:
            case Capturing(what, done, total):
                if self._report:
                    self._report(what, done, total)
            case Ready() | Failed():
                with self._changed:
                    (self._ready if isinstance(message, Ready) else self._failed)[rank] = message
                    self._changed.notify_all()
            case _:
                self._on_message(rank, message)

    def _lose(self, rank: int) -> None:
        with self._changed:
            first = not self._gone
            self._gone.append(rank)
            self._changed.notify_all()
            serving = len(self._ready) == self._ranks
        if first and serving and not self._ending:
            self._on_loss()

    def _gone_order(self, rank: int) -> int:
        return self._gone.index(rank) if rank in self._gone else self._ranks
