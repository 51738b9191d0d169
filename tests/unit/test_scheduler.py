"""The scheduler by hand: plain-integer scenarios with made-up tokens. The toy device in tests/property covers the rest."""

import pytest

from dsv4.errors import ConfigError, EngineError, OverloadedError, RequestError
from serving.plan import PartitionResult, ScheduledRequest, SchedulerConfig
from serving.request import FinishReason
from serving.scheduler import Scheduler

GROUPS = ("history", "window", "tail", "open")


def scheduler(pages=500, **settings) -> Scheduler:
    settings = {"max_model_len": 1024, "max_num_seqs": 4} | settings
    return Scheduler(SchedulerConfig(pages=dict.fromkeys(GROUPS, pages), **settings))


def request(name="a", prompt=10, max_tokens=20, **options) -> ScheduledRequest:
    return ScheduledRequest(request_id=name, tokens=[1] * prompt, max_tokens=max_tokens, **options)


def land(s: Scheduler, *rows, plan=None, proposed=7):
    """Plans one step and answers every final chunk with token 50 and decode rows with `rows`."""
    plan = plan or s.plan()
    (part,) = plan.partitions
    events = s.commit(plan, [PartitionResult([50] * len(part.finals), rows, [proposed] * len(rows))])
    s.check()
    return events


def test_a_request_from_prompt_to_end():
    s = scheduler()
    s.add(request(max_tokens=3))
    plan = s.plan()
    (chunk,) = plan.partitions[0].prefill
    assert (chunk.slot, chunk.start, chunk.length, chunk.final, chunk.tokens) == (0, 0, 10, True, [1] * 10)
    (event,) = land(s, plan=plan)
    assert (event.tokens, event.drafted, event.finish_reason) == ((50,), 0, None)
    (event,) = land(s, [51])
    assert event.finish_reason is None
    (event,) = land(s, [52])
    assert event.finish_reason is FinishReason.LENGTH and event.request.output_tokens == [50, 51, 52]
    assert s.plan() is None and len(s) == 0


def test_table_updates_cover_the_prompt_and_a_quantum():
    s = scheduler()
    s.add(request(prompt=130))
    updates = s.plan().partitions[0].table_updates
    # 130 tokens round up to 150, the request's limit: two history pages, five of 32, nineteen of 8.
    assert [len(updates[name].pages) for name in GROUPS] == [2, 5, 19, 5]
    assert updates["window"].columns == [0, 1, 2, 3, 4] and updates["window"].slots == [0] * 5
    assert all(0 not in updates[name].pages for name in GROUPS)


def test_a_multi_token_step_is_cut_at_eos():
    s = scheduler(num_speculative_tokens=7)
    s.add(request(eos_token_id=2))
    land(s)
    (event,) = land(s, [5, 6, 2, 7])
    assert (list(event.tokens), event.drafted, event.finish_reason) == ([5, 6, 2], 3, FinishReason.STOP)
    assert event.request.output_tokens == [50, 5, 6, 2]
    # Statistics count what was accepted before the cut.
    speculation = event.request.speculation
    assert (speculation.verify_steps, speculation.proposed, speculation.accepted) == (1, 7, 3)
    assert speculation.accepted_per_position == [1, 1, 1, 0, 0, 0, 0]


def test_a_multi_token_step_is_cut_at_max_tokens():
    s = scheduler(num_speculative_tokens=7)
    s.add(request(max_tokens=3, eos_token_id=9))
    land(s)
    (event,) = land(s, [5, 6, 9])
    assert (list(event.tokens), event.finish_reason) == ([5, 6], FinishReason.LENGTH)


def test_eos_as_the_last_possible_token_is_a_stop():
    s = scheduler()
    s.add(request(max_tokens=1, eos_token_id=50))
    (event,) = land(s)
    assert event.finish_reason is FinishReason.STOP


def test_ignored_eos():
    s = scheduler()
    s.add(request(max_tokens=2, eos_token_id=50, ignore_eos=True))
    assert land(s)[0].finish_reason is None


@pytest.mark.parametrize(
    "options, param, words",
    [
        ({"prompt": 0}, "prompt", "the prompt is empty"),
        ({"max_tokens": 0}, "max_tokens", "expected at least 1, got 0"),
        ({"prompt": 1024}, "prompt", "must leave room for one more within the model length of 1024"),
        ({"prompt": 600, "max_tokens": 400}, "max_tokens", "1000 tokens, which need 8 history pages; the cache has 7"),
    ],
)
def test_requests_refused_at_the_door(options, param, words):
    s = Scheduler(
        SchedulerConfig(
            pages={"history": 8, "window": 200, "tail": 500, "open": 200}, max_model_len=1024, max_num_seqs=4
        )
    )
    with pytest.raises(RequestError, match=words) as caught:
        s.add(request(**options))
    assert caught.value.param == param
    assert len(s) == 0


def test_a_used_id_and_an_unchunkable_prompt_are_refused():
    s = scheduler(enable_chunked_prefill=False, max_num_batched_tokens=64)
    s.add(request())
    with pytest.raises(RequestError, match="'a' is already in use"):
        s.add(request())
    with pytest.raises(RequestError, match="at most 64 and chunked prefill is off"):
        s.add(request("b", prompt=65))


def test_max_tokens_is_cut_at_the_model_length():
    s = scheduler()
    r = request(prompt=1000, max_tokens=5000)
    s.add(r)
    assert r.limit == 1024


def test_a_full_queue_refuses_and_recovers():
    s = scheduler(max_waiting=2)
    for name in "ab":
        s.add(request(name))
    with pytest.raises(OverloadedError, match="2 requests are waiting") as caught:
        s.add(request("c"))
    assert caught.value.retry_after_s > 0
    s.plan()
    s.add(request("c"))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"max_num_batched_tokens": 7, "num_speculative_tokens": 7}, "expected at least 8"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected at least 1"),
        ({"num_speculative_tokens": -1}, "expected 0 or more"),
        ({"max_tokens_per_partition": 100}, "multiple of 128"),
    ],
)
def test_configurations_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        scheduler(**settings)
    with pytest.raises(ConfigError, match="pages: expected a count for each of"):
        SchedulerConfig(pages={"history": 1}, max_model_len=10)


def test_the_pipeline_is_two_deep_and_first_in_first_out():
    s = scheduler()
    s.add(request())
    first, second = s.plan(), s.plan()
    assert second.partitions[0].decode and s.plan() is None
    with pytest.raises(EngineError, match="not the oldest in flight"):
        s.commit(second, [PartitionResult((), [[1]])])
    land(s, plan=first)
    land(s, [51], plan=second)


def test_a_decode_row_without_tokens_is_an_engine_error():
    s = scheduler()
    s.add(request())
    land(s)
    with pytest.raises(EngineError, match="expected 1 to 1 tokens from a decode row, got 0"):
        land(s, [])


def test_a_synchronous_request_waits_for_its_result():
    s = scheduler()
    s.add(request(synchronous=True))
    first = s.plan()
    assert s.plan() is None
    land(s, plan=first)
    second = s.plan()
    assert second.partitions[0].decode and s.plan() is None


def test_mixed_steps_keep_prefill_and_decode_within_one_budget():
    s = scheduler(max_num_batched_tokens=64, num_speculative_tokens=7)
    s.add(request("a"))
    land(s)
    s.add(request("long", prompt=500))
    (part,) = s.plan().partitions
    assert [seat.request.request_id for seat in part.decode] == ["a"]
    assert [chunk.length for chunk in part.prefill] == [64 - 8]


def test_packed_prefill_is_counted_in_tiles():
    s = scheduler(max_tokens_per_partition=384)
    for name in "abcd":
        s.add(request(name, prompt=130))
    # Each prompt of 130 would take two tiles: one is whole, the next gets the one tile left.
    assert [chunk.length for chunk in s.plan().partitions[0].prefill] == [130, 128]
    assert [chunk.length for chunk in s.plan().partitions[0].prefill] == [2, 130]


def test_partitions_fill_evenly():
    s = scheduler(partitions=3, max_num_seqs=8, max_rows_per_partition=3)
    for number in range(9):
        s.add(request(str(number)))
    plan = s.plan()
    assert [len(part.prefill) for part in plan.partitions] == [3, 3, 2]
    assert s.stats().waiting == 1
    assert [sorted(chunk.slot for chunk in part.prefill) for part in plan.partitions] == [[0, 1, 2], [0, 1, 2], [0, 1]]


def test_chunks_follow_the_threshold_and_only_the_last_yields():
    s = scheduler(long_prefill_token_threshold=100)
    s.add(request(prompt=250))
    chunks = []
    for _ in range(3):
        plan = s.plan()
        chunks += plan.partitions[0].prefill
        events = land(s, plan=plan)
        assert len(events) == sum(chunk.final for chunk in plan.partitions[0].prefill)
    assert [(c.start, c.length, c.final) for c in chunks] == [(0, 100, False), (100, 100, False), (200, 50, True)]


def test_stats_count_pages_and_requests():
    s = scheduler()
    s.add(request(prompt=300))
    plan = s.plan()
    stats = s.stats()
    assert (stats.running, stats.waiting, stats.in_flight_steps, stats.prefix_queries) == (1, 0, 1, 300)
    assert stats.pages_used["history"] == 3 and stats.pages_total["history"] == 499
    assert stats.cache_usage == stats.pages_used["tail"] / 499
    land(s, plan=plan)
    assert s.stats().pages_cached == {"history": 2, "window": 8, "tail": 2, "open": 0}


def test_history_is_taken_for_the_whole_prompt_at_once():
    """A prompt once begun is not stopped half way for want of history; rings follow chunk by chunk."""
    s = scheduler(long_prefill_token_threshold=100)
    s.add(request(prompt=900))
    updates = s.plan().partitions[0].table_updates
    assert [len(updates[name].pages) for name in GROUPS] == [8, 4, 16, 4]


def test_a_newcomer_leaves_every_seat_room_to_grow():
    s = Scheduler(
        SchedulerConfig(pages={"history": 3, "window": 99, "tail": 300, "open": 99}, max_model_len=256, max_num_seqs=4)
    )
    s.add(request("a", prompt=100, max_tokens=100))
    land(s)
    s.add(request("b"))
    assert not s.plan().partitions[0].prefill, "the last page is for the seated request, which will soon need it"


def test_nothing_is_kept_for_a_head_of_queue_that_cannot_be_seated():
    s = Scheduler(
        SchedulerConfig(
            pages={"history": 9, "window": 99, "tail": 300, "open": 99},
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=200,
        )
    )
    s.add(request("long", prompt=900, max_tokens=100))
    s.add(request("big", prompt=500))
    lengths = []
    for _ in range(4):
        plan = s.plan()
        lengths += [chunk.length for chunk in plan.partitions[0].prefill]
        land(s, plan=plan)
    # The first step finds that the newcomer does not fit; until someone leaves, that is not asked at a price again.
    assert lengths == [128, 200, 200, 200]
