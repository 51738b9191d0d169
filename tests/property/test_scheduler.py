"""The scheduler against a toy device whose tokens depend on every page it reads: any page mistake changes tokens.

`ToyServer` compares each token with the request's lone, cold, unspeculated run and checks all invariants after every call.
"""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.pages import page_groups
from tests.support.toy_device import make_request, make_server, prompt_of

HEADS = [prompt_of(400, seed) for seed in range(3)]
TIGHT = {"history": 9, "window": 40, "tail": 90, "open": 40}


@pytest.mark.parametrize("drafts", range(8))
def test_one_request_equals_its_lone_run(drafts):
    server = make_server(num_speculative_tokens=drafts)
    server.add(make_request("a", prompt_of(200), 60))
    server.drain()
    assert len(server.streams["a"]) == 60


def crowd(seed: int, requests: int, drafts: int, **settings):
    """Random arrivals, shared heads, aborts; returns the drained server."""
    random = Random(seed)
    server = make_server(num_speculative_tokens=drafts, seed=seed, **settings)
    for number in range(requests):
        head = random.choice(HEADS)[: random.randrange(1, 300)]
        server.add(
            make_request(
                f"r{number}",
                head + prompt_of(random.randrange(1, 60), number),
                random.randrange(1, 200),
                eos_token_id=random.choice([None, 3]),
                ignore_eos=random.random() < 0.2,
                synchronous=random.random() < 0.1,
            )
        )
        for _ in range(random.randrange(6)):
            server.step()
        if random.random() < 0.15:
            server.abort(f"r{random.randrange(number + 1)}")
    server.drain()
    return server


def random_crowd(seed: int, requests: int, drafts: int) -> None:
    """A crowd on a random server; nobody is seated before an earlier arrival."""
    random = Random(seed)
    server = crowd(
        seed,
        requests,
        drafts,
        pages=random.choice([TIGHT, 150]),
        long_prefill_token_threshold=random.choice([0, 7, 32, 100]),
        max_num_batched_tokens=random.choice([16, 64, 256]),
        partitions=random.choice([1, 2, 4]),
        pipeline_depth=random.choice([1, 2, 3]),
        acceptance=random.choice([0.0, 0.5, 0.9, 1.0]),
        max_model_len=600,
        max_waiting=requests,
    )
    assert server.seated == sorted(server.seated)


@pytest.mark.parametrize("drafts", [0, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_crowd_equals_its_lone_runs(drafts, seed):
    random_crowd(seed, 40, drafts)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 7])
@pytest.mark.parametrize("seed", range(100, 110))
def test_larger_crowds(drafts, seed):
    random_crowd(seed, 200, drafts)


def test_whole_prompts_only():
    """With chunked prefill off a prompt is one chunk; only a resumed request too long for a step is cut."""
    server = make_server(
        pages={"history": 9, "window": 99, "tail": 300, "open": 99},
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        num_speculative_tokens=7,
    )
    for number in range(6):
        server.add(make_request(f"r{number}", prompt_of(90, number), 400))
    chunks = []
    while server.step():
        chunks += [chunk for plan in server.flight for part in plan.partitions for chunk in part.prefill]
    server.drain()
    assert server.scheduler.stats().preemptions
    assert {chunk.length for chunk in chunks if chunk.start == 0 and chunk.length <= 90} == {90}


@pytest.mark.parametrize("window", [128, 200, 300])
def test_a_wider_sliding_window(window):
    """Windows beyond one block publish and look up pages of several blocks."""
    server = make_server(groups=page_groups(window), num_speculative_tokens=7, acceptance=1.0)
    for name in "ab":
        server.add(make_request(name, prompt_of(400), 200))
        server.drain()
    assert server.finished["b"].request.cached_tokens == 384


def test_a_window_one_row_too_short_is_noticed():
    """The toy reads 128 rows back: with pages released for a window of 64 its tokens must change, or it proves nothing."""
    server = make_server(
        pages={"history": 20, "window": 9, "tail": 60, "open": 60},
        groups=page_groups(64),
        long_prefill_token_threshold=32,
    )
    server.add(make_request("a", prompt_of(400), 200))
    with pytest.raises(AssertionError, match="tokens differ"):
        server.drain()


class Crowd(RuleBasedStateMachine):
    """Any order of arrivals, planning, landing, aborts and device failures, in a cache that holds about two requests."""

    @initialize(
        drafts=st.sampled_from([0, 1, 7]),
        chunk=st.sampled_from([0, 7, 32, 128]),
        budget=st.sampled_from([16, 64, 600]),
        partitions=st.sampled_from([1, 2]),
        depth=st.sampled_from([1, 2]),
        seats=st.sampled_from([2, 5]),
        replay=st.sampled_from([1, 128]),
        caching=st.booleans(),
        acceptance=st.sampled_from([0.0, 0.6, 1.0]),
    )
    def start(self, drafts, chunk, budget, partitions, depth, seats, replay, caching, acceptance):
        self.names = 0
        self.server = make_server(
            pages={"history": 8, "window": 64, "tail": 200, "open": 64},
            acceptance=acceptance,
            num_speculative_tokens=drafts,
            long_prefill_token_threshold=chunk,
            max_num_batched_tokens=budget,
            partitions=partitions,
            pipeline_depth=depth,
            max_num_seqs=seats,
            prefix_replay=replay,
            enable_prefix_caching=caching,
            max_model_len=600,
        )

    @rule(
        head=st.integers(0, 2),
        length=st.integers(0, 390),
        tail=st.integers(1, 9),
        output=st.integers(1, 150),
        eos=st.sampled_from([None, 5]),
        synchronous=st.booleans(),
        salt=st.sampled_from([b"", b"other"]),
    )
    def add(self, head, length, tail, output, eos, synchronous, salt):
        self.names += 1
        prompt = HEADS[head][:length] + prompt_of(tail, self.names)
        options = {"eos_token_id": eos, "synchronous": synchronous, "salt": salt}
        self.server.add(make_request(f"r{self.names}", prompt, output, **options))

    @rule()
    def launch(self):
        self.server.launch()

    @precondition(lambda self: self.server.flight)
    @rule()
    def land(self):
        self.server.land()

    @rule(steps=st.integers(1, 30))
    def run(self, steps):
        for _ in range(steps):
            self.server.step()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data):
        self.server.abort(f"r{data.draw(st.integers(1, self.names))}")

    @rule()
    def fail(self):
        self.server.fail("device lost")

    @invariant()
    def first_come_first_served(self):
        assert self.server.seated == sorted(self.server.seated)

    def teardown(self):
        if hasattr(self, "server"):
            self.server.drain()


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_two_thousand_mixed_requests_do_not_grow():
    """Pages, books and the cache stay bounded; identical prompts give identical tokens; drafts of the target's own are kept."""
    server = make_server(
        pages={"history": 60, "window": 120, "tail": 300, "open": 120},
        num_speculative_tokens=7,
        acceptance=1.0,
        partitions=2,
        check=False,
        max_waiting=64,
    )
    random = Random(0)
    outputs: dict[tuple, list] = {}
    for number in range(2000):
        prompt = random.choice(HEADS)[: random.choice([5, 100, 130, 200, 260, 300])]
        name = f"r{number}"
        server.add(make_request(name, prompt, random.choice([1, 5, 20, 40]), eos_token_id=random.choice([None, 3])))
        outputs.setdefault(tuple(prompt), []).append(name)
        while server.scheduler.stats().waiting > 8:
            server.step()
        if number % 100 == 0:
            server.scheduler.check()
    server.drain()
    server.scheduler.check()
    assert len(server.finished) == 2000
    for names in outputs.values():
        longest = max((server.streams[name] for name in names), key=len)
        assert all(server.streams[name] == longest[: len(server.streams[name])] for name in names)
    # Past an EOS the script has nothing to draft from; everywhere else every draft must have been kept.
    speculation = [e.request.speculation for e in server.finished.values() if e.finish_reason == "length"]
    steps = sum(s.verify_steps for s in speculation)
    assert sum(s.accepted for s in speculation) == sum(s.proposed for s in speculation) > 5 * steps
    assert not server.scheduler._requests and not server.scheduler._in_flight
