"""Every layout of ranks gives the tokens of one process; groups fall idle and busy again, and requests change groups."""

from pathlib import Path

import pytest

from serving.batches import StepWork
from serving.build import Started
from tests.support.engines import generate
from tests.support.ranks import Alone, make_checkpoint, prompt, running_ranks

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny")


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


def spy(started: Started) -> list[list[StepWork]]:
    """The works of every step from here on."""
    steps: list[list[StepWork]] = []
    submit = started.engine._executor.submit

    def recording(work):
        steps.append(list(work))
        return submit(work)

    started.engine._executor.submit = recording
    return steps


def busy_groups(work: list[StepWork]) -> int:
    return sum(any(launch.live for launch in part.launches) for part in work)


def check_layout(model: Path, alone: Alone, dp: int, tp: int, k: int, lengths: tuple[int, ...] = (3, 130, 60)) -> None:
    """One long answer and shorter ones, so that groups fall idle one by one, then all of them, then are busy again."""
    with running_ranks(model, dp, tp, k, max_num_seqs=2 * dp, step_timeout=300.0) as started:
        steps = spy(started)
        prompts = [prompt(lengths[i % len(lengths)], i) for i in range(dp + 1)]
        counts = [6 * (i + 1) for i in range(dp + 1)]
        expected = [alone(ids, n) for ids, n in zip(prompts, counts, strict=True)]
        assert generate(started.engine, prompts, counts) == expected
        assert generate(started.engine, prompts[:1], counts[:1]) == expected[:1]
        assert generate(started.engine, prompts, counts) == expected
        started.scheduler.check()
    assert {busy_groups(work) for work in steps} >= set(range(1, dp + 1))
    for work in steps:  # faults.md 11: an idle group replays what the busy ones do, out of the captured programs
        sequences = [[launch.shape for launch in part.launches] for part in work]
        assert all(sequence == sequences[0] for sequence in sequences)


def test_two_groups(model: Path, alone: Alone) -> None:
    check_layout(model, alone, 2, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (1, 4), (4, 1), (2, 4), (4, 4)])
def test_layouts(model: Path, alone: Alone, dp: int, tp: int, k: int) -> None:
    """faults.md 35: 4, 3, 2, 1, 0, 1, 4 busy groups within one run where there are four."""
    check_layout(model, alone, dp, tp, k)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 7])
def test_preempted_requests_change_groups(model: Path, alone: Alone, k: int) -> None:
    """Each group's pool holds one and a half requests. Long answers share the second: the later one loses its seat there and goes
    on in the first, where short ones have left."""
    prompts = [prompt(96 + 3 * i, i) for i in range(4)]
    counts = [12, 50, 12, 50]
    flags = {
        "max_model_len": 256,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 200,
        "enable_prefix_caching": False,
        "step_timeout": 300.0,
    }
    pages = {"history": 4, "window": 16, "tail": 48, "open": 16}
    homes: dict[str, set[int]] = {}
    with running_ranks(model, 2, 1, k, pages=pages, **flags) as started:
        plan = started.scheduler.plan

        def noting():
            found = plan()
            for index, part in enumerate(found.partitions if found else ()):
                for seat in [*part.decode, *(chunk.seat for chunk in part.prefill)]:
                    homes.setdefault(seat.request.request_id, set()).add(index)
            return found

        started.scheduler.plan = noting
        expected = [alone(ids, n) for ids, n in zip(prompts, counts, strict=True)]
        assert generate(started.engine, prompts, counts) == expected
        started.scheduler.check()
        assert started.engine.stats().preemptions > 0
    assert any(len(groups) == 2 for groups in homes.values())
