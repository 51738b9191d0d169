"""safetensors files, read as raw bytes and written piece by piece, and small files written atomically.

We read the container ourselves because E8M0 must arrive as bytes (a numeric cast destroys it), because headers alone
must be readable in milliseconds, and because a shard must be writable without holding it in memory.

Layout: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the data, without holes.
"""

import errno
import hashlib
import io
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from dsv4.checkpoint.manifest import ITEMSIZE, TensorSpec
from dsv4.errors import CheckpointError

# FP8 and E8M0 come as bytes: `formats` decodes them.
TORCH_DTYPES = {"F8_E4M3": torch.uint8, "F8_E8M0": torch.uint8, "I8": torch.int8, "BF16": torch.bfloat16,
                "F32": torch.float32, "I64": torch.int64}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Shard:
    """One open-able file: what it holds and where. `begins` are absolute byte offsets."""

    path: Path
    nbytes: int
    mtime_ns: int
    header_sha256: str
    specs: dict[str, TensorSpec]
    begins: dict[str, int]

    @cached_property
    def _map(self) -> mmap.mmap:
        # Copy on write: torch wants writable memory, and nothing may ever reach the file.
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def view(self, name: str) -> Tensor:
        """The tensor, memory-mapped: nothing is read before it is used."""
        spec = self.specs[name]
        dtype, count = TORCH_DTYPES[spec.dtype], spec.nbytes // ITEMSIZE[spec.dtype]
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self.begins[name]).view(spec.shape)

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """The tensor as blocks of at most `rows` rows, each in memory of its own: nothing stays mapped or cached."""
        spec = self.specs[name]
        total, *tail = spec.shape
        row_bytes = spec.nbytes // total
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begins[name])
            for first in range(0, total, rows):
                count = min(rows, total - first)
                buffer = bytearray(count * row_bytes)
                self._fill(file, buffer, name)
                yield torch.frombuffer(buffer, dtype=TORCH_DTYPES[spec.dtype]).view(count, *tail)

    def read(self, name: str) -> Tensor:
        """The whole tensor in memory of its own."""
        return next(self.pieces(name, self.specs[name].shape[0]))

    def _fill(self, file: io.RawIOBase, buffer: bytearray, name: str) -> None:
        view = memoryview(buffer)
        while view:
            count = file.readinto(view)
            if not count:
                raise CheckpointError(f"{self.path}: ends inside {name}; the file shrank while it was read")
            view = view[count:]


def open_shard(path: Path) -> Shard:
    """Reads and checks the header. Raises CheckpointError if the file is missing, truncated or not safetensors."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
            if length is None or length > min(MAX_HEADER_BYTES, stat.st_size - 8):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut within its header ({stat.st_size} bytes)"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the index names this shard") from None
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        order = sorted(header, key=lambda name: header[name]["data_offsets"])
        specs = {name: TensorSpec(name, header[name]["dtype"], tuple(header[name]["shape"])) for name in order}
        offsets = [tuple(header[name]["data_offsets"]) for name in order]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged safetensors header ({error!r})") from None
    end = 0
    for spec, (start, stop) in zip(specs.values(), offsets, strict=True):
        if spec.dtype not in ITEMSIZE:
            raise CheckpointError(f"{path}: {spec.name} has dtype {spec.dtype}; expected one of {', '.join(ITEMSIZE)}")
        if start != end or stop - start != spec.nbytes:
            raise CheckpointError(f"{path}: {spec.name} ({spec}) does not fit its bytes {start}..{stop}")
        end = stop
    if stat.st_size != 8 + length + end:
        cut = "truncated" if stat.st_size < 8 + length + end else "too long"
        raise CheckpointError(f"{path}: {cut}: {stat.st_size:,} bytes, its header promises {8 + length + end:,}")
    return Shard(
        path=path,
        nbytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        header_sha256=hashlib.sha256(text).hexdigest(),
        specs=specs,
        begins={name: 8 + length + start for name, (start, _) in zip(order, offsets, strict=True)},
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """An error on an open file, such as a full disk, does not say which file: `path` is named then."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class ShardWriter:
    """Writes one shard in any order, from any threads; the final name appears in `commit`, whole or not at all.

    Widest dtypes come first in the file, as the safetensors library lays them out, so that every tensor is aligned.
    `digest` is the SHA-256 over the header and then each tensor's SHA-256, in file order.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self.path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._specs = sorted(specs, key=lambda spec: (-ITEMSIZE[spec.dtype], spec.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._begins: dict[str, int] = {}
        self._sizes = {spec.name: spec.nbytes for spec in self._specs}
        end = 0
        for spec in self._specs:
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [end, end + spec.nbytes]}
            self._begins[spec.name] = end
            end += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data, self.nbytes = 8 + len(text), 8 + len(text) + end
        self.header_sha256 = hashlib.sha256(text).hexdigest()
        self._digests: dict[str, bytes] = {}
        self._file = self._temporary.open("wb", buffering=0)
        try:
            self._write_at(0, memoryview(struct.pack("<Q", len(text)) + text))
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a whole tensor."""
        self.write_pieces(name, [tensor])

    def write_pieces(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Writes a tensor given as blocks of rows, whose bytes must add up to those the spec promised."""
        begin, digest, done = self._data + self._begins[name], hashlib.sha256(), 0
        for piece in pieces:
            data = _bytes_of(piece)
            self._write_at(begin + done, data)
            digest.update(data)
            done += len(data)
        assert done == self._sizes[name], f"{name}: {done} bytes, the header promises {self._sizes[name]}"
        self._digests[name] = digest.digest()

    def commit(self) -> str:
        """Flushes, gives the file its name, and returns the digest."""
        missing = [spec.name for spec in self._specs if spec.name not in self._digests]
        assert not missing, f"{self.path}: never written: {missing[:3]}"
        with _blaming(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
        os.replace(self._temporary, self.path)
        sync_directory(self.path.parent)
        combined = hashlib.sha256(self.header_sha256.encode())
        for spec in self._specs:
            combined.update(self._digests[spec.name])
        return combined.hexdigest()

    def abort(self) -> None:
        """Drops what was written so far. No thread may be writing any more."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_at(self, offset: int, data: memoryview) -> None:
        with _blaming(self.path):
            while data:
                written = os.pwrite(self._file.fileno(), data, offset)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                offset, data = offset + written, data[written:]


def sync_directory(path: Path) -> None:
    """Makes renames in `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with _blaming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes a small file: readers see the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with _blaming(path), temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
