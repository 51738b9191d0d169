"""Prefix hits on the toy device: lengths exactly by rule, tokens never changed by them."""

from itertools import count

import pytest

from tests.support.toy_device import make_request, make_server, prompt_of

LENGTHS = [1, 127, 128, 129, 255, 256, 257, 300, 384, 513]
_names = count()


def cached_tokens(server, prompt, max_tokens=12, **options) -> int:
    """Runs one request to its end (tokens are compared with its lone run) and returns how much of it was cached."""
    name = f"p{next(_names)}"
    request = make_request(name, prompt, max_tokens, **options)
    server.add(request)
    server.drain()
    return request.cached_tokens


@pytest.mark.parametrize("drafts", [0, 7])
@pytest.mark.parametrize("chunk", [7, 32, 128, 1000])
def test_cold_hot_reused_and_partly_evicted(chunk, drafts):
    server = make_server(
        pages={"history": 40, "window": 140, "tail": 350, "open": 140},
        long_prefill_token_threshold=chunk,
        max_num_batched_tokens=1000,
        num_speculative_tokens=drafts,
        check=False,
    )
    for length in LENGTHS:
        prompt, rule = prompt_of(length, seed=length), (length - 1) // 128 * 128
        assert cached_tokens(server, prompt) == 0
        assert cached_tokens(server, prompt) == rule
        for other in range(3):  # strangers in the same slots
            cached_tokens(server, prompt_of(40, seed=1000 + other))
        assert cached_tokens(server, prompt) == rule
        stranger = 0
        while cached_tokens(server, prompt_of(700, seed=2000 + stranger)) == 0 and stranger < 6:
            stranger += 1
        assert cached_tokens(server, prompt) in range(0, rule + 1, 128)
        assert cached_tokens(server, prompt) == rule
        server.scheduler.check()
    assert server.scheduler.stats().evictions


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("drafts", [0, 7])
def test_the_original_rule_by_replay(length, drafts):
    server = make_server(prefix_replay=128, num_speculative_tokens=drafts)
    prompt = prompt_of(length)
    assert cached_tokens(server, prompt) == 0
    assert cached_tokens(server, prompt) == max(0, length - 128) // 128 * 128


@pytest.mark.parametrize("drafts", [0, 7])
def test_every_length_around_the_boundaries(drafts):
    """Lengths 1 to 300: all answer, and at least one token is always computed, also where all 128-blocks are cached."""
    server = make_server(num_speculative_tokens=drafts, check=False)
    cached_tokens(server, prompt_of(300))
    for length in range(1, 301):
        assert cached_tokens(server, prompt_of(length), 2) == (length - 1) // 128 * 128
    server.scheduler.check()


@pytest.mark.parametrize("drafts", [0, 7])
def test_the_next_turn_of_a_chat_hits_generated_tokens(drafts):
    server = make_server(num_speculative_tokens=drafts)
    first = make_request("turn 1", prompt_of(100), 200)
    server.add(first)
    server.drain()
    # 300 tokens are known, but the last one was never run; 299 rows make two full blocks.
    turn = first.tokens + prompt_of(30, seed=5)
    assert cached_tokens(server, turn) == 256


def test_salt_separates_tenants():
    server = make_server()
    prompt = prompt_of(300)
    assert cached_tokens(server, prompt, salt=b"a") == 0
    assert cached_tokens(server, prompt, salt=b"b") == 0
    assert cached_tokens(server, prompt, salt=b"a") == 256


def test_no_caching():
    server = make_server(enable_prefix_caching=False)
    assert cached_tokens(server, prompt_of(300)) == cached_tokens(server, prompt_of(300)) == 0
    assert not any(server.scheduler.stats().pages_cached.values())


def test_the_report_says_why():
    server = make_server()
    reports = []
    for prompt in (prompt_of(128), prompt_of(300), prompt_of(300), prompt_of(300)[:200] + prompt_of(200, seed=3)):
        request = make_request(f"p{len(reports)}", prompt, 2)
        server.add(request)
        server.drain()
        reports.append(request.prefix_report)
    assert reports == [
        "miss: 128 tokens, a hit needs at least 129",
        "hit 128 of 300 tokens: tokens 128 to 255 are not in the history",
        "hit 256 of 300 tokens: all that 300 tokens allow",
        "hit 128 of 400 tokens: tokens 128 to 255 are not in the history",
    ]


def test_a_hit_follows_its_prefix_to_the_partition_that_has_it():
    server = make_server(partitions=4)
    for seed in range(4):
        cached_tokens(server, prompt_of(300, seed))
    for seed in (2, 0, 3, 1, 1):
        assert cached_tokens(server, prompt_of(300, seed)) == 256


def test_a_full_partition_sends_its_prefix_elsewhere_cold():
    """More requests share a prefix than its partition has seats: the rest start cold where there is room."""
    server = make_server(partitions=2, max_rows_per_partition=3, max_num_seqs=6, max_num_batched_tokens=2048)
    prompt = prompt_of(300)
    cached_tokens(server, prompt)
    requests = [make_request(f"r{i}", prompt, 30) for i in range(6)]
    for request in requests:
        server.add(request)
    server.step()
    assert server.scheduler.stats().seats_per_partition == (3, 3)
    server.drain()
    assert [request.cached_tokens for request in requests] == [256, 256, 256, 0, 0, 0]
