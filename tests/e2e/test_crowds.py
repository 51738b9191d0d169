"""Many requests: K = 7 gives the tokens of K = 0, and nothing grows."""

import gc
import random
import resource

import pytest

from tests.e2e.test_engine import CFG, k_params, prompt
from tests.support.engines import generate, running


def crowd(count: int, seed: int) -> tuple[list[tuple[int, ...]], list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, 3, 7, 31, 64, 100, 126, 127, 128, 129, 130, 200, 255, 256, 257, 300]
    return [prompt(rng.choice(lengths), i) for i in range(count)], [rng.randrange(1, 25) for _ in range(count)]


@pytest.mark.parametrize("form", ["f32", "w8a8"])
@pytest.mark.parametrize(
    ("batch", "count"), [(8, 40), *[pytest.param(b, 210, marks=pytest.mark.slow) for b in (1, 3, 8)]]
)
def test_natural_drafts_change_no_token(batch: int, count: int, form: str) -> None:
    prompts, counts = crowd(count, batch)
    results = []
    for k in (0, 7):
        with running(CFG, k_params(form, k), k, max_num_seqs=batch) as started:
            results.append(generate(started.engine, prompts, counts))
            started.scheduler.check()
    assert results[0] == results[1]
    assert [len(tokens) for tokens in results[0]] == counts


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind() -> None:
    """faults.md 28: identical prompts give identical tokens to the end; pages and memory do not grow."""
    prompts, counts = crowd(50, 7)
    with running(CFG, k_params("w8a8", 7), 7, max_num_seqs=8) as started:
        expected = generate(started.engine, prompts, counts)
        peak = 0
        for round_ in range(40):
            assert generate(started.engine, prompts, counts) == expected, round_
            if round_ == 9:
                gc.collect()
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started.scheduler.check()
        assert not started.engine.stats().running and not any(started.scheduler.stats().seats_per_partition)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8 * 1024  # KiB
