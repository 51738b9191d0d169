"""Faults that users met in other servers, as far as they are questions to the scheduler; plus pressure and fairness."""

from collections import Counter
from random import Random

import pytest

from serving.plan import PartitionResult
from serving.request import FinishReason
from tests.support.toy_device import make_request, make_server, prompt_of


def test_concurrent_speculation_does_not_poison_the_cache():
    """Eight requests of unequal lengths come and go at K=7; then each is a prefix of another one."""
    server = make_server(num_speculative_tokens=7, acceptance=0.6)
    random = Random(4)
    prompts = [prompt_of(random.randrange(100, 400), seed) for seed in range(8)]
    for number, prompt in enumerate(prompts):
        server.add(make_request(f"a{number}", prompt, random.randrange(50, 200)))
        for _ in range(random.randrange(8)):
            server.step()
    server.drain()
    again = [make_request(f"b{i}", r.request.tokens, 40) for i, r in enumerate(list(server.finished.values()))]
    for request in again:
        server.add(request)
    server.drain()
    assert all(request.cached_tokens == (request.prompt_tokens - 1) // 128 * 128 for request in again)


@pytest.mark.parametrize("prompt", range(57, 64))
@pytest.mark.parametrize("drafts", [0, 7])
def test_no_position_past_the_limit(prompt, drafts):
    server = make_server(max_model_len=64, num_speculative_tokens=drafts, acceptance=1.0)
    server.add(make_request("a", prompt_of(prompt), 100))
    server.drain()
    assert server.finished["a"].finish_reason == "length"
    assert len(server.finished["a"].request.tokens) == 64
    assert server.device.highest_position < 63  # the last token is never run


def test_one_active_partition_is_a_step_of_the_same_form():
    """Idle partitions are present and empty, so every step has one form, whoever is active; also from 4 to 0 and back."""
    server = make_server(partitions=4, num_speculative_tokens=7)
    active = []
    for wave in (4, 3, 2, 1, 0, 1, 4):
        for number in range(wave):
            server.add(make_request(f"w{len(active)}-{wave}-{number}", prompt_of(50, number), 20))
        seen = set()
        while (plan := server.launch()) is not None or server.flight:
            if plan is not None:
                assert len(plan.partitions) == 4
                seen |= {i for i, part in enumerate(plan.partitions) if part.decode or part.prefill}
            if plan is None or len(server.flight) == server.config.pipeline_depth:
                server.land()
        active.append(len(seen))
    assert active == [4, 3, 2, 1, 0, 1, 4]


def test_preemption_computes_prompt_and_output_again():
    server = make_server(
        pages={"history": 5, "window": 40, "tail": 80, "open": 40}, num_speculative_tokens=7, acceptance=0.8
    )
    requests = [make_request(f"r{i}", prompt_of(120, i), 300) for i in range(2)]
    for request in requests:
        server.add(request)
    server.drain()
    assert [bool(request.preemptions) for request in requests] == [False, True]


def test_a_row_already_planned_can_still_be_preempted_in_the_same_step():
    """An older prompt takes the pages of a younger decode row that the same plan already held: the row leaves the plan."""
    server = make_server(
        pages={"history": 40, "window": 16, "tail": 100, "open": 60},
        long_prefill_token_threshold=256,
        max_num_batched_tokens=512,
        pipeline_depth=1,
    )
    old, young = make_request("old", prompt_of(700), 20), make_request("young", prompt_of(120, 1), 60)
    server.add(old)
    server.add(young)
    server.step()
    (part,) = server.launch().partitions
    assert young.preemptions == 1 and young.seat is None
    assert not part.decode and [chunk.seat.request for chunk in part.prefill] == [old]
    server.drain()


def test_a_preempted_request_is_not_seated_again_in_the_same_step():
    """What is left of the budget and of its pages would do for a first chunk, and start the next round of preemption."""
    server = make_server(
        pages={"history": 40, "window": 17, "tail": 100, "open": 60},
        long_prefill_token_threshold=256,
        max_num_batched_tokens=272,
        pipeline_depth=1,
        enable_prefix_caching=False,
    )
    young = make_request("young", prompt_of(129, 1), 60)
    server.add(make_request("old", prompt_of(700), 20))
    server.add(young)
    server.step()
    server.launch()
    assert young.preemptions == 1 and young.seat is None
    server.drain()


def test_running_ahead_is_no_reason_to_preempt():
    """Two chunks in flight do not fit beside a decode row, one does: the prompt waits for its own step instead."""
    server = make_server(
        pages={"history": 40, "window": 17, "tail": 100, "open": 60},
        long_prefill_token_threshold=256,
        max_num_batched_tokens=512,
    )
    young = make_request("young", prompt_of(10, 1), 60)
    server.add(make_request("old", prompt_of(900), 20))
    server.add(young)
    server.drain()
    assert young.preemptions == 0


def test_eviction_takes_the_end_of_a_prefix_first():
    """A prefix is of use only from its start, so a little pressure shortens the hit instead of ending it."""
    server = make_server(pages={"history": 9, "window": 400, "tail": 400, "open": 100})
    for name, prompt in (("a", prompt_of(513)), ("stranger", prompt_of(600, 1)), ("again", prompt_of(513))):
        server.add(make_request(name, prompt, 2))
        server.drain()
    # Of eight pages `a` left four cached; five of the stranger's took the free four and one more.
    assert server.finished["again"].request.cached_tokens == 384


def test_a_preempted_request_returns_to_its_place():
    """Younger requests of another partition may run on, but nobody behind it in the queue is seated first."""
    server = make_server(
        pages={"history": 6, "window": 60, "tail": 150, "open": 60},
        partitions=2,
        max_num_seqs=4,
        pipeline_depth=1,
        num_speculative_tokens=7,
        acceptance=0.8,
    )
    requests = [make_request(f"r{i}", prompt_of(100, i), 500) for i in range(7)]
    for request in requests:
        server.add(request)
    while not requests[2].preemptions or not requests[3].preemptions:
        server.step()
    waiting = [request.arrival for request in server.scheduler._waiting]
    assert waiting == sorted(waiting) and waiting[0] in (2, 3) and waiting[-1] == 6
    server.drain()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("drafts", [0, 7])
def test_room_for_one_and_a_half_serves_ten(drafts, caching):
    server = make_server(
        pages={"history": 7, "window": 37, "tail": 88, "open": 37},
        num_speculative_tokens=drafts,
        long_prefill_token_threshold=64,
        enable_prefix_caching=caching,
    )
    for number in range(10):
        server.add(make_request(f"r{number}", prompt_of(200, number), 300))
    server.drain()
    assert len(server.finished) == 10
    # Recomputation must stay a small part of the work: ten lone runs take 10 * (4 + 300 / tokens per step) steps.
    assert server.steps < 10 * (4 + 300)


def test_many_copies_are_one_completion():
    server = make_server(max_num_seqs=48, num_speculative_tokens=7, pages=900, check=False, max_num_batched_tokens=1024)
    for number in range(48):
        server.add(
            make_request(f"s{number}", prompt_of(90 if number % 3 else 50 + number, 0 if number % 3 else number), 40)
        )
    server.drain()
    copies = {tuple(server.streams[f"s{number}"]) for number in range(48) if number % 3}
    assert len(copies) == 1


def test_a_self_drafting_drafter_is_always_accepted():
    server = make_server(
        num_speculative_tokens=7, acceptance=1.0, pages={"history": 12, "window": 60, "tail": 150, "open": 60}
    )
    random = Random(1)
    for number in range(60):
        server.add(make_request(f"r{number}", prompt_of(random.randrange(1, 300), number), random.randrange(1, 120)))
        server.step()
    server.drain()
    for event in server.finished.values():
        speculation = event.request.speculation
        assert speculation.accepted == speculation.proposed
        if event.request.max_tokens > 1:
            assert speculation.verify_steps


def test_a_client_that_leaves_frees_everything_at_once():
    server = make_server(num_speculative_tokens=7)
    prompt = prompt_of(300)
    server.add(make_request("gone", prompt, 500))
    while "gone" not in server.streams or not server.streams["gone"]:
        server.step()
    server.launch()
    assert server.flight
    server.abort("gone")
    stats = server.scheduler.stats()
    assert stats.running == 0 and not any(stats.pages_used.values())
    again = make_request("again", prompt, 60)
    server.add(again)
    server.drain()
    assert again.cached_tokens == 256


def test_abort_at_every_moment():
    """Waiting, prefilling, between last chunk and seed, decoding with steps in flight, and after the end."""
    for moment in range(14):
        server = make_server(num_speculative_tokens=7, long_prefill_token_threshold=64, max_num_seqs=2)
        for name in ("a", "b", "c"):
            server.add(make_request(name, prompt_of(200), 30))
        for _ in range(moment):
            server.step() if moment % 2 else (server.launch(), server.flight and server.land())
        for name in ("a", "c"):
            server.abort(name, FinishReason.STOP)
            assert server.abort(name) is None
        server.drain()
        assert server.finished["b"].finish_reason == "length"


def test_a_short_prompt_answers_at_once_behind_long_ones():
    """The bound of the scheduler's docstring: with (place + 1) tiles within the budget, one tile of prompt takes one step."""
    server = make_server(
        max_num_batched_tokens=1024, pages=900, check=False, max_model_len=6000, long_prefill_token_threshold=0
    )
    for number in range(7):
        server.add(make_request(f"long{number}", prompt_of(5000, number), 4))
        server.launch()
        server.land()
    before = server.steps
    server.add(make_request("short", prompt_of(128, 99), 4))
    plan = server.launch()
    (chunk,) = [c for c in plan.partitions[0].prefill if c.seat.request.request_id == "short"]
    assert chunk.final and server.steps == before + 1
    assert all(c.length >= 128 for c in plan.partitions[0].prefill)
    server.drain()


def test_decode_rows_take_turns_under_long_prompts():
    """B = 32, T = 128 and K = 7: half the budget is kept for prefill, two rows fit, six rows take three steps."""
    server = make_server(
        max_num_batched_tokens=32,
        num_speculative_tokens=7,
        acceptance=0.0,
        check=False,
        pages=700,
        max_model_len=3000,
        pipeline_depth=1,
    )
    for number in range(6):
        server.add(make_request(f"row{number}", prompt_of(10, number), 400))
    while server.scheduler.stats().waiting or len(server.streams) < 6:
        server.step()
    server.add(make_request("long", prompt_of(2000, 9), 4))
    last: Counter = Counter()
    prefilled = 0
    for step in range(1, 100):
        (part,) = server.launch().partitions
        assert len(part.decode) == 2
        for seat in part.decode:
            name = seat.request.request_id
            assert step - last.get(name, step) <= 3, f"{name} waited longer than the bound"
            last[name] = step
        prefilled += sum(chunk.length for chunk in part.prefill)
        server.land()
    assert len(last) == 6 and prefilled == 99 * 16
    server.drain()


def test_constrained_requests_go_one_step_at_a_time_and_are_never_preempted():
    server = make_server(pages={"history": 6, "window": 60, "tail": 150, "open": 60}, num_speculative_tokens=7)
    constrained = [make_request(f"c{i}", prompt_of(100, i), 200, synchronous=True) for i in range(2)]
    free = make_request("free", prompt_of(100, 7), 300)
    for request in [*constrained, free]:
        server.add(request)
    server.drain()
    assert [request.preemptions for request in constrained] == [0, 0]
    assert free.preemptions and len(free.output_tokens) == 300


def test_constrained_requests_that_block_each_other_end_with_an_error():
    """Nobody may be preempted and no page is left: the youngest is told so, the others finish."""
    server = make_server(pages={"history": 6, "window": 60, "tail": 150, "open": 60}, num_speculative_tokens=7)
    for number in range(3):
        server.add(make_request(f"c{number}", prompt_of(100, number), 500, synchronous=True))
    server.drain()
    ends = {name: event.finish_reason for name, event in server.finished.items()}
    assert ends["c0"] == "length" and "error" in ends.values()
    (error,) = {event.error for event in server.finished.values() if event.error}
    assert "retry later" in error


def test_failure_ends_everything_and_trusts_nothing():
    server = make_server(num_speculative_tokens=7)
    for number in range(3):
        server.add(make_request(f"r{number}", prompt_of(300), 60))
    for _ in range(6):
        server.step()
    server.launch()
    server.fail("device lost")
    stats = server.scheduler.stats()
    assert not any(stats.pages_used.values()) and not any(stats.pages_cached.values()) and not stats.in_flight_steps
    again = make_request("again", prompt_of(300), 20)
    server.add(again)
    server.drain()
    assert again.cached_tokens == 0


def test_planning_never_outruns_the_end():
    """Steps that certainly find nothing to do are not planned: K=0 plans exactly one step per token."""
    server = make_server()
    server.add(make_request("a", prompt_of(10), 25))
    server.drain()
    assert server.steps == 25


def test_results_of_a_lost_seat_are_dropped():
    server = make_server()
    request = make_request("a", prompt_of(20), 25)
    server.add(request)
    plan = server.launch()
    server.abort("a")
    assert server.scheduler.commit(plan, [PartitionResult([5])]) == []
    assert request.output_tokens == []
