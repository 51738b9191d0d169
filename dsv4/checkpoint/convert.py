"""The released source format to W8A8: planned from headers, streamed a block of rows at a time, resumable, atomic.

int8 is decided by the manifest (checkpoint.md 2.1): attention wq_b and wo_b, the indexer's wq_b, all experts; other scaled
matrices become bf16 and the rest is copied bit for bit, `mtp.*` included. One output shard per input shard. No file of the
output has its final name before it is whole, and config.json comes last: a folder without one is not a checkpoint yet.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch

from dsv4.checkpoint.files import ShardWriter, open_shard, write_atomic
from dsv4.checkpoint.folder import INDEX
from dsv4.checkpoint.journal import JOURNAL, Journal
from dsv4.checkpoint.manifest import Weight, stored
from dsv4.checkpoint.plan import Plan, w8a8_config
from dsv4.checkpoint.quantise import RoundingError, convert_weight
from dsv4.checkpoint.source import dump_config
from dsv4.errors import CheckpointError

CARRIED_SUFFIXES = {".json", ".py", ".jinja", ".model", ".md", ".txt", ""}  # "": LICENSE
CARRIED_FOLDERS = ("encoding", "inference")

Progress = Callable[[int], None]


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Holds a lock on the output folder; the system drops it with the process, however that ends."""
    fd = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{out}: another conversion is writing here; wait for it or stop it") from None
        yield
    finally:
        os.close(fd)


def _open_output(plan: Plan, out: Path, resume: bool) -> Journal:
    """The journal to go on with. Raises CheckpointError if the folder is in use for anything else."""
    if (out / JOURNAL).exists():
        if not resume:
            raise CheckpointError(
                f"{out}: already holds a conversion; add --resume to finish it or choose a new folder"
            )
        return Journal.resume(plan.path, out)
    if any(out.iterdir()):
        raise CheckpointError(f"{out}: already exists and is not empty; choose a new folder")
    return Journal.start(plan.path, out)


def convert(
    plan: Plan, out: str | Path, *, resume: bool = False, jobs: int = 1, progress: Progress = lambda nbytes: None
) -> dict[str, RoundingError]:
    """Converts a planned source checkpoint and returns what rounding did, by kind of weight.

    jobs: threads that convert weights of one shard side by side; each holds a few MiB.
    progress: called from those threads with the source bytes just done; with resume, first with those done before.

    Raises: CheckpointError if the source is damaged, `out` is in use, or the disk is full; what was finished stays, and
    the same call with `resume` continues.
    """
    out = Path(out)
    if plan.checkpoint is None:
        raise CheckpointError(f"{plan.path / INDEX}: no such file; only --dry-run works from config.json alone")
    if out.resolve() == plan.path.resolve() or plan.path.resolve() in out.resolve().parents:
        raise CheckpointError(f"{out}: lies inside the source checkpoint; choose a folder elsewhere")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _claimed(out):
            journal = _open_output(plan, out, resume)
            _remove_leftovers(out)
            _require_space(plan, out, journal)
            journal.save()
            _convert_shards(plan, out, journal, jobs, progress)
            _finish(plan, out, journal)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{error.filename or out}: {error.strerror}") from error
        free = shutil.disk_usage(out).free
        raise CheckpointError(
            f"{out}: no space left ({free:,} bytes free; the whole conversion takes {plan.output_totals.nbytes:,}). "
            "Finished shards are kept: make room and run the same command with --resume"
        ) from error
    return journal.rounding()


def _remove_leftovers(out: Path) -> None:
    for temporary in out.rglob(".*.tmp"):
        temporary.unlink()


def _require_space(plan: Plan, out: Path, journal: Journal) -> None:
    done = sum(entry["output"]["bytes"] for entry in journal.finished.values())
    missing, free = plan.output_totals.nbytes - done, shutil.disk_usage(out).free
    if missing > free:
        raise CheckpointError(
            f"{out}: the conversion needs {missing:,} more bytes and the disk has {free:,}; make room first"
        )


def _source_bytes(weight: Weight) -> int:
    return sum(spec.nbytes for spec in stored(weight, "source"))


def _convert_shards(plan: Plan, out: Path, journal: Journal, jobs: int, progress: Progress) -> None:
    threads = torch.get_num_threads()
    # One thread per weight: splitting megabyte-sized blocks over cores costs more than it gives.
    with ThreadPoolExecutor(jobs, "convert", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for file in plan.shards:
                if journal.is_finished(file, plan.inputs(file)):
                    progress(sum(map(_source_bytes, plan.shards[file])))
                else:
                    _convert_shard(plan, out, journal, file, pool, progress)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


def _convert_shard(
    plan: Plan, out: Path, journal: Journal, file: str, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    assert plan.checkpoint
    writer = ShardWriter(out / file, [spec for weight in plan.shards[file] for spec in stored(weight, "w8a8")])
    rounding: dict[str, RoundingError] = {}

    def one(weight: Weight) -> tuple[str, RoundingError | None]:
        account = convert_weight(plan.checkpoint, weight, writer)
        progress(_source_bytes(weight))
        return weight.kind, account

    futures = [pool.submit(one, weight) for weight in plan.shards[file]]
    try:
        for future in futures:
            kind, account = future.result()
            if account is not None:
                rounding.setdefault(kind, RoundingError()).add(account)
        digest = writer.commit()
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)  # a thread may still be writing to the file that abort closes
        writer.abort()
        raise
    journal.record(file, plan.inputs(file), open_shard(out / file), digest, rounding)


def _carry(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, source.read_bytes())


def _finish(plan: Plan, out: Path, journal: Journal) -> None:
    """Everything beside the shards: tokenizer and code files, the index, and last of all config.json."""
    for entry in sorted(plan.path.iterdir()):
        is_ours = entry.name in (INDEX, "config.json") or entry.name.startswith(".")
        if entry.is_file() and entry.suffix in CARRIED_SUFFIXES and not is_ours:
            _carry(entry, out / entry.name)
    for folder in CARRIED_FOLDERS:
        for entry in sorted((plan.path / folder).rglob("*")):
            if entry.is_file() and "__pycache__" not in entry.parts:
                _carry(entry, out / entry.relative_to(plan.path))
    weight_map = {
        spec.name: file
        for file, members in plan.shards.items()
        for weight in members
        for spec in stored(weight, "w8a8")
    }
    index = {"metadata": {"total_size": plan.output_totals.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(out / INDEX, json.dumps(index, indent=2))
    write_atomic(out / "config.json", dump_config(w8a8_config(plan.raw, plan.cfg)))
    journal.complete = True
    journal.save()
