"""A worker process: one rank. Started by torch.distributed's elastic agent as `python -m serving.rank_worker FOLDER`.

It connects to the engine's socket in the folder, is told what to load, and from then on replays what it is sent. It ends
when it is told to, when it fails, or at once when the engine is gone.
"""

import logging
import mmap
import os
import queue
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from dsv4.checkpoint.load import load_params
from dsv4.errors import Dsv4Error, RequestError
from dsv4.mesh import join
from dsv4.tree import tree_bytes
from serving.batches import Array
from serving.platform import choose_platform
from serving.rank_messages import (
    Capturing,
    Channel,
    Failed,
    Hello,
    Outputs,
    Profile,
    Profiled,
    Ready,
    Setup,
    Step,
    Stop,
)
from serving.threads import compute
from serving.worker import Worker

log = logging.getLogger("dsv4.rank")

SOCKET, PROGRESS, STORE = "engine.sock", "progress", "store"
BEAT_S = 0.25
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def progress_table(folder: Path, ranks: int) -> Array:
    """[ranks, 3] int64 shared by all processes: the step each rank is at (from 1), segments of programs it has done, and when
    it last showed life (`time.monotonic_ns`)."""
    with open(folder / PROGRESS, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), ranks * 24), np.int64).reshape(ranks, 3)


def _build(
    setup: Setup, folder: Path, rank: int, done: Array, report: Callable[[str, int, int], None] | None
) -> Worker:
    """Joins the other ranks, loads this one's slices, captures and warms up every program."""
    platform = choose_platform(setup.platform, setup.target)
    if platform.backend == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, and nobody else listens
    # The engine watches the time: it can name the rank that hangs, a collective cannot.
    ranks = setup.parallel.ep
    store = dist.FileStore(str(folder / STORE), ranks)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(days=1))
    mesh = join(setup.parallel, ops_exchange=platform.name == "a2a3", exact=platform.name == "cpu")
    params = load_params(
        setup.model, setup.cfg, setup.dtype, mesh=mesh, max_positions=setup.max_positions, drafter=setup.k > 0
    )
    device = setup.devices[rank]
    worker = Worker(
        setup.cfg,
        platform.place(params, device, release=True),
        platform.ops(mesh),
        pages=setup.pages,
        widths=setup.widths,
        slots=setup.slots,
        k=setup.k,
        shapes=setup.shapes,
        target=platform.target,
        mesh=mesh,
        device=platform.device(device),
        counter=done[1:2],
    )
    worker.warm_up(report)
    return worker


@torch.no_grad()
def _serve(channel: Channel, inbox: "queue.SimpleQueue[object]", worker: Worker, done: Array, leads: bool) -> None:
    """Runs what arrives, in order, until told to stop."""
    while not isinstance(message := inbox.get(), Stop):
        match message:
            case Step(number, work):
                done[0] = number
                launches = worker.execute(work)
                if leads:
                    channel.send(Outputs(number, launches))
            case Profile(folder):
                channel.send(_profile(worker, folder))


def _profile(worker: Worker, folder: Path | None) -> Profiled:
    try:
        if folder is None:
            return Profiled(worker.profiler.stop())
        worker.profiler.start(folder)
        return Profiled(folder)
    except RequestError as refused:
        return Profiled(None, str(refused))


def _listen(channel: Channel, inbox: "queue.SimpleQueue[object]", folder: Path) -> NoReturn:
    """Hands on what arrives. An engine that is gone cannot tidy up: the last one to leave must not be needed for that."""
    with suppress(EOFError):
        while True:
            inbox.put(channel.receive())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the main thread may be inside a collective that will never end


def _beat(done: Array) -> NoReturn:
    """Shows life, from a thread: a process that is stopped, or holds the interpreter, does not."""
    while True:
        done[2] = time.monotonic_ns()
        time.sleep(BEAT_S)


def _lost_a_peer(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(folder / SOCKET))
    except OSError:  # the engine has ended in the meantime
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(1)
    channel = Channel(connection)
    channel.send(Hello(rank))
    setup = channel.receive()
    assert isinstance(setup, Setup), setup
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox, folder), daemon=True).start()
    compute()
    torch.set_num_threads(setup.threads)
    if setup.target != "inductor":  # torch makes the folder of a cache that nothing here uses
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    began = time.perf_counter()
    try:
        done = progress_table(folder, setup.parallel.ep)[rank]
        threading.Thread(target=_beat, args=(done,), daemon=True).start()
        report = (lambda *at: channel.send(Capturing(*at))) if rank == 0 else None
        worker = _build(setup, folder, rank, done, report)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT
        channel.send(
            Ready(
                weight_bytes=tree_bytes(worker.params),
                peak_bytes=peak,
                programs=len(worker.programs),
                seconds=time.perf_counter() - began,
            )
        )
        _serve(channel, inbox, worker, done, leads=rank % setup.parallel.tp == 0)
    except Exception as error:
        known = isinstance(error, Dsv4Error)
        cause = str(error) if known else f"{type(error).__name__}: {error}"
        peer = not known and _lost_a_peer(error)
        if not known and not peer:
            log.exception("%s failed", setup.where(rank))
        with suppress(OSError):
            channel.send(Failed(cause, peer))
        logging.shutdown()
        os._exit(1)  # a collective that other threads are in would hold up an orderly exit
    dist.destroy_process_group()
    logging.shutdown()
    os._exit(0)  # taking programs and caches apart one object at a time would take seconds


if __name__ == "__main__":
    main()
