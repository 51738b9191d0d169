"""Ranks as processes: the tokens of one process, whatever the layout and the traffic; death and stalls are survived."""

import asyncio
import contextlib
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4.checkpoint.load import abstract_params
from dsv4.config import StepShape
from dsv4.errors import EngineError, UnavailableError
from dsv4.mesh import Mesh
from dsv4.tree import tree_bytes
from serving.batches import Launch, StepWork
from serving.build import Started
from serving.request import SamplingParams
from tests.support.engines import collect, generate, tokens_of
from tests.support.ranks import Alone, make_checkpoint, prompt, running_ranks

pytestmark = pytest.mark.multirank

SIZES = (5, 17, 64, 127, 129, 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny")


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


def check_traffic(started: Started, alone: Alone, count: int, seed: int = 0) -> None:
    """Mixed prompts at once give the tokens of one process each."""
    rng = random.Random(seed)
    prompts = [prompt(rng.choice(SIZES), i) for i in range(count)]
    counts = [rng.randrange(1, 16) for _ in prompts]
    got = generate(started.engine, prompts, counts)
    assert got == [alone(ids, n) for ids, n in zip(prompts, counts, strict=True)]
    started.scheduler.check()


def own_workers() -> list[int]:
    """Our worker processes."""
    workers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command, parent = (
                    (entry / "cmdline").read_bytes(),
                    (entry / "stat").read_text().rsplit(")", 1)[1].split(),
                )
            except OSError:  # gone in the meantime
                continue
            if b"serving.rank_worker" in command and int(parent[1]) == os.getpid():
                workers.append(int(entry.name))
    return workers


@pytest.fixture(scope="module")
def tidy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of these tests have a folder of their own, which is empty in the end; no worker lives on."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield
    assert not list(folder.iterdir()) and not own_workers()


@pytest.fixture(scope="module")
def pair(model: Path, tidy: None) -> Iterator[Started]:
    """Two tensor-parallel ranks at K = 7."""
    with running_ranks(model, 1, 2, 7, step_timeout=8.0) as started:
        yield started


def test_traffic_at_k7(pair: Started, alone: Alone) -> None:
    check_traffic(pair, alone, 6)


def test_logprobs_are_those_of_one_process(pair: Started, alone: Alone) -> None:
    ids = prompt(40, 3)
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2)
    outputs = asyncio.run(collect(pair.engine, "scored", ids, params))
    assert tokens_of(outputs) == alone(ids, 4)
    entries = [entry for output in outputs for entry in output.logprobs]
    assert [entry.top[0][0] for entry in entries] == alone(ids, 4)


def test_memory_of_a_rank(pair: Started, alone: Alone, capsys: pytest.CaptureFixture[str]) -> None:
    """Each holds its slices: half of what is split, and the embedding and other small things twice."""
    whole = tree_bytes(abstract_params(alone.cfg, drafter=True, dtype=torch.float32, max_positions=520))
    for rank, ready in enumerate(pair.ranks):
        mesh = Mesh(tp=2, ep=2, rank=rank)
        assert ready.weight_bytes == tree_bytes(
            abstract_params(alone.cfg, mesh, True, dtype=torch.float32, max_positions=520)
        )
        assert ready.weight_bytes < 0.65 * whole
    with capsys.disabled():
        print(f"\n{pair.rank_lines()[0][1]}; one process has {whole / 2**20:.1f} MiB of weights")


def test_nothing_listens_beyond_this_machine(pair: Started) -> None:
    """Neither the engine nor its workers."""
    sockets = set()
    for pid in (os.getpid(), *pair.engine._executor.pids.values()):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                sockets.add(os.readlink(handle).removeprefix("socket:[").removesuffix("]"))
    listening, loopback = "0A", ("0100007F", "0" * 24 + "01000000")
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            assert state != listening or inode not in sockets or local.split(":")[0] in loopback, line


def wait_for_health(engine, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            asyncio.run(engine.check_health())
            return
        except EngineError:
            assert time.monotonic() < deadline, "the workers did not come back"
            time.sleep(0.1)


def break_under_load(started: Started, act, names: str) -> str:
    """Requests in flight end with an error that names the rank, so does health; new ones are refused until all is well."""
    engine = started.engine

    async def run() -> list[str]:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        streams = [engine.submit(f"load{i}", prompt(30, i), params) for i in range(3)]
        await anext(streams[0])
        act()
        ends = [[output async for output in stream][-1] for stream in streams]
        assert all(end.finish_reason == "error" for end in ends)
        with pytest.raises(EngineError, match=re.escape(names)):
            await engine.check_health()
        with pytest.raises(UnavailableError):
            engine.submit("too early", prompt(9), params)
        return [end.error for end in ends]

    errors = asyncio.run(run())
    assert all(names in error for error in errors), errors
    wait_for_health(engine, 120)
    return errors[0]


def test_a_killed_worker(pair: Started, alone: Alone) -> None:
    pids = pair.engine._executor.pids
    error = break_under_load(pair, lambda: os.kill(pids[1], signal.SIGKILL), "rank 1 (cpu device 1)")
    assert "SIGKILL" in error
    assert not set(pids.values()) & set(pair.engine._executor.pids.values())
    check_traffic(pair, alone, 3, seed=1)


def test_a_stalled_worker(pair: Started, alone: Alone) -> None:
    """faults.md 12: a stopped process trips the deadline."""
    pids = pair.engine._executor.pids
    error = break_under_load(pair, lambda: os.kill(pids[1], signal.SIGSTOP), "rank 1 (cpu device 1)")
    assert "more than 8 s" in error
    check_traffic(pair, alone, 3, seed=2)


@pytest.mark.slow
def test_a_failing_worker(pair: Started, alone: Alone) -> None:
    """A step that no program was captured for: an exception in every worker, told with its cause."""
    executor = pair.engine._executor
    shape = StepShape("speculate", 3, 8, 4)
    work = StepWork({}, (Launch(shape, {"slots": np.full(3, 2, np.int32)}, 0),))
    error = break_under_load(pair, lambda: executor.submit([work]), "(cpu device ")
    assert "no program for speculate[3x8, 4 pages]" in error
    check_traffic(pair, alone, 3, seed=3)


@pytest.mark.slow
def test_a_rank_never_holds_the_checkpoint(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With twenty times the expert weights, a process grows by its share of them."""
    large = make_checkpoint(tmp_path / "large", moe_intermediate_size=2048)
    found = []
    for checkpoint in (model, large):
        with running_ranks(checkpoint, 1, 4) as started:
            found.append((started.weight_bytes, started.ranks))
    whole = (found[1][0] - found[0][0]) / 2**20
    for before, after in zip(found[0][1], found[1][1], strict=True):
        share = (after.weight_bytes - before.weight_bytes) / 2**20
        grown = (after.peak_bytes - before.peak_bytes) / 2**20
        with capsys.disabled():
            print(f"\nexperts {whole:.0f} MiB more, of which a rank has {share:.0f}: it grows by {grown:.0f} MiB")
        assert grown < 1.2 * share + 40 < 0.5 * whole
