"""Whether steps draft: settled by what both kinds brought, on invented costs."""

import random

import pytest

from serving.pace import EARLY, FIRST, LAST, MEMORY, TRIAL, AdaptivePace

SIZES = (1, 2, 4, 8)


def run(
    pace: AdaptivePace, rows: int, steps: int, draft_s: float, accepted: float, noise: float = 0.0, late: int = 1
) -> list[bool]:
    """`steps` steps of which a plain one takes 1 s, one with drafts `draft_s` and brings `accepted` tokens a row.

    late: how many steps are asked for before the first is told about, as in an engine with a step in flight.
    """
    rng, kinds = random.Random(steps), []
    for step in range(steps + late):
        if step < steps:
            kinds.append(pace.drafts(rows))
        if step >= late:
            drafted = kinds[step - late]
            seconds, tokens = (draft_s, accepted) if drafted else (1.0, 1.0)
            pace.record(rows, drafted, seconds * (1 + noise * rng.random()), tokens)
    return kinds


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(
    ("draft_s", "accepted", "drafts"), [(2.0, 4.0, True), (5.0, 4.0, False), (1.5, 1.0, False), (7.0, 8.0, True)]
)
def test_it_settles_on_what_is_faster_and_seldom_tries_the_rest(
    rows: int, draft_s: float, accepted: float, drafts: bool
) -> None:
    pace = AdaptivePace(SIZES)
    run(pace, rows, 8 * LAST, draft_s, accepted, noise=0.1)
    kinds = run(pace, rows, 8 * LAST, draft_s, accepted, noise=0.1)
    assert 0 < kinds.count(not drafts) < 0.08 * len(kinds)


def test_it_drafts_until_it_knows_better() -> None:
    kinds = run(AdaptivePace(SIZES), 8, FIRST, 5.0, 4.0)
    assert all(kinds[:EARLY]) and not any(kinds[EARLY + TRIAL + 1 :])


@pytest.mark.parametrize("rows", [1, 8])
def test_while_it_drafts_it_needs_no_trial_to_see_that_drafts_fail(rows: int) -> None:
    pace = AdaptivePace(SIZES)
    run(pace, rows, 8 * LAST, 2.0, 4.0)  # the next trial is far away
    kinds = run(pace, rows, 2 * FIRST, 2.0, 1.0)
    assert kinds.index(False) <= 2 * MEMORY // rows + EARLY and not any(kinds[-8:])


def test_it_follows_the_text() -> None:
    """Code after prose: drafts are refused, then accepted, then refused."""
    pace = AdaptivePace(SIZES)
    for accepted, drafts in ((1.2, False), (6.0, True), (1.2, False), (6.0, True)):
        run(pace, 1, 3 * LAST, 2.0, accepted)
        kinds = run(pace, 1, FIRST, 2.0, accepted)
        assert kinds.count(drafts) >= FIRST // 2, accepted


def test_every_row_bucket_is_judged_by_itself() -> None:
    pace = AdaptivePace(SIZES)
    for _ in range(200):
        run(pace, 1, 20, 2.0, 4.0)
        run(pace, 7, 20, 9.0, 4.0)  # of the bucket of 8
    assert run(pace, 1, 40, 2.0, 4.0).count(True) > 25
    assert run(pace, 8, 40, 9.0, 4.0).count(False) > 25


def test_steps_that_were_not_measured_decide_nothing() -> None:
    """Prefill runs beside every decode row: no step says what rows cost."""
    pace = AdaptivePace(SIZES)
    kinds = [pace.drafts(4) for _ in range(2000)]
    assert kinds.count(False) < 0.15 * len(kinds) and kinds[-1]


def test_one_slow_step_does_not_turn_it() -> None:
    pace = AdaptivePace(SIZES)
    run(pace, 1, FIRST - 1, 2.0, 4.0)
    pace.record(1, True, 1000.0, 4.0)
    assert all(run(pace, 1, 400, 2.0, 4.0)[200:][-50:])


def test_more_rows_than_any_bucket() -> None:
    pace = AdaptivePace(SIZES)
    assert pace.drafts(100)
    pace.record(100, True, 1.0, 2.0)
