"""What the engine process and its workers say to each other, and how: length-prefixed pickles over a Unix socket.

The socket lies in a folder that only this user can enter, so whoever speaks on it is trusted.
"""

import pickle
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.config import ModelConfig, ParallelConfig, StepShape
from dsv4.errors import EngineError
from serving.batches import Array, StepWork

MAX_BYTES = 64 * 2**20  # eight times the largest step there is: 64 rows of 8 masks over 129,280 tokens
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that a worker needs to become one rank. `threads` per rank; `devices` by rank; the rest is `Worker`'s."""

    model: Path
    cfg: ModelConfig
    dtype: torch.dtype | None
    parallel: ParallelConfig
    platform: str
    target: str
    devices: tuple[int, ...]
    threads: int
    pages: dict[str, int]
    widths: dict[str, int]
    slots: int
    k: int
    shapes: tuple[StepShape, ...]
    max_positions: int

    def where(self, rank: int) -> str:
        """How messages name a rank."""
        return f"rank {rank} ({self.platform} device {self.devices[rank]})"


@dataclass(frozen=True)
class Hello:
    """A worker's first words."""

    rank: int


@dataclass(frozen=True)
class Capturing:
    """How far rank 0 has come with its programs."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rank is captured and warm. weight_bytes: its leaves; peak_bytes: the process's peak resident memory so far."""

    weight_bytes: int
    peak_bytes: int
    programs: int
    seconds: float


@dataclass(frozen=True)
class Step:
    """One step of the rank's partition."""

    number: int
    work: StepWork


@dataclass(frozen=True)
class Outputs:
    """What a group's leader got, by launch."""

    number: int
    launches: list[dict[str, Array]]


@dataclass(frozen=True)
class Profile:
    """Begin a trace in `folder`, or end it."""

    folder: Path | None


@dataclass(frozen=True)
class Profiled:
    """Where the trace is, or why there is none."""

    path: Path | None
    refusal: str | None = None


@dataclass(frozen=True)
class Failed:
    """A worker's last words. of_peer: it only lost contact with another rank, which is the one to blame."""

    cause: str
    of_peer: bool


@dataclass(frozen=True)
class Stop:
    """Leave after the steps that were sent before."""


class Channel:
    """One end of a connection. One thread receives; any may send."""

    def __init__(self, connection: socket.socket, send_timeout_s: float = 60.0) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        whole = int(send_timeout_s)
        timeout = struct.pack("@ll", whole, int((send_timeout_s - whole) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)  # receiving must wait for ever

    @staticmethod
    def encode(message: object) -> bytes:
        """The frame of a message. Raises EngineError if it is too long to be one."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(data) > MAX_BYTES:
            raise EngineError(f"a message of {len(data):,} bytes to a worker: at most {MAX_BYTES:,} are allowed")
        return _LENGTH.pack(len(data)) + data

    def send(self, message: object) -> None:
        """Raises OSError if the other end is gone or does not listen."""
        self.send_frame(self.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Sends what `encode` made; raises as `send`."""
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> object:
        """The next message. Raises EOFError once the other end is gone."""
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > MAX_BYTES:
                raise EOFError(f"a frame of {length:,} bytes: at most {MAX_BYTES:,} are allowed")
            return pickle.loads(self._read(length))
        except OSError as error:
            raise EOFError(str(error)) from error

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError("the other end closed the connection")
            view = view[got:]
        return bytes(data)

    def close(self) -> None:
        """Both ways; a thread that receives gets EOFError."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
