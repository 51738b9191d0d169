"""The real engine over tiny models: whatever the traffic, a request's tokens are those of its lone cold run at K = 0."""

import asyncio
import functools
import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from dsv4.api import forward
from dsv4.errors import EngineError
from dsv4.ops.cpu import default_ops
from dsv4.params import Params
from serving.pace import EARLY
from serving.request import SamplingParams
from tests.e2e.conftest import wait_until
from tests.support.engines import collect, generate, running, tokens_of
from tests.support.models import memory_params, quantised, tiny_config, tiny_weights
from tests.support.runner import Runner

CFG = tiny_config()


@functools.cache
def params(form: str) -> Params:
    read = quantised if form == "w8a8" else memory_params
    return read(CFG, tiny_weights(CFG, 2), drafter=True)


def k_params(form: str, k: int) -> Params:
    return params(form) if k else replace(params(form), drafter=None)


@functools.cache
def lone(form: str, ids: tuple[int, ...], count: int) -> list[int]:
    return Runner(CFG, k_params(form, 0), ops=default_ops(), slots=1).generate(0, ids, count)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(f"{length} {seed}").choices(range(CFG.vocab_size), k=length))


@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize("form", ["f32", "w8a8"])
def test_mixed_traffic(form: str, k: int) -> None:
    rng = random.Random(1)
    prompts = [prompt(rng.choice([1, 2, 5, 17, 64, 127, 128, 129, 200, 300]), i) for i in range(24)]
    counts = [rng.randrange(1, 24) for _ in prompts]
    with running(CFG, k_params(form, k), k, max_num_seqs=6, max_num_batched_tokens=200) as started:
        got = generate(started.engine, prompts, counts)
        started.scheduler.check()
    assert got == [lone(form, ids, n) for ids, n in zip(prompts, counts, strict=True)]


class Whim:
    """A pace without reason: what it says of the next step is a coin's."""

    def __init__(self, seed: int) -> None:
        self.coin, self.told = random.Random(seed), {True: 0, False: 0}

    def drafts(self, rows: int) -> bool:
        return self.coin.random() < 0.5

    def record(self, rows: int, drafted: bool, seconds: float, tokens: float) -> None:
        assert rows > 0 and seconds > 0 and tokens <= (8 if drafted else 1)
        self.told[drafted] += 1


@pytest.mark.parametrize("form", ["f32", "w8a8"])
def test_steps_with_and_without_drafts_in_any_order(form: str) -> None:
    """Whichever steps verify drafts, tokens are those of K = 0; plain steps are counted as such, and seeds follow them."""
    rng = random.Random(7)
    prompts = [prompt(rng.choice([1, 2, 17, 127, 128, 129, 200, 300]), i % 9) for i in range(18)]
    counts = [rng.randrange(1, 40) for _ in prompts]
    flags = {"max_num_seqs": 5, "max_num_batched_tokens": 200}
    with running(CFG, k_params(form, 7), 7, adaptive=True, **flags) as started:
        pace = started.engine._pace = Whim(3)
        for _ in range(2):  # the second time from the prefix cache
            got = generate(started.engine, prompts, counts)
            assert got == [lone(form, ids, n) for ids, n in zip(prompts, counts, strict=True)]
        started.scheduler.check()
        done = started.engine.stats().speculation
        assert started.worker.programs.frozen
        assert all(s.traces == s.compiles == 1 for s in started.worker.programs.stats().values())
    assert done.plain_steps > 50 and done.verify_steps > 50 and min(pace.told.values()) > 10


def test_drafts_that_are_refused_are_no_longer_made() -> None:
    """Random weights accept nothing: after the first trial the engine decodes plainly, with the same tokens."""
    ids = prompt(40, 5)
    with running(CFG, k_params("f32", 7), 7, adaptive=True) as started:
        assert generate(started.engine, [ids], 400) == [lone("f32", ids, 400)]
        done = started.engine.stats().speculation
    assert done.plain_steps > done.verify_steps >= EARLY


@pytest.mark.parametrize("k", [0, 7])
def test_chunk_sizes_and_prefix_hits(k: int) -> None:
    """Cold = hot = hot after reuse, for every chunk size, around the 128-token boundaries; hits exactly by the rule."""
    for chunk in (7, 32, 128, 1000):
        with running(CFG, k_params("f32", k), k, long_prefill_token_threshold=chunk) as started:
            for length in (127, 128, 129, 255, 256, 257, 300, 384, 513):
                ids = prompt(length, 5)
                expected = lone("f32", ids, 10)
                before = started.engine.stats()
                for _ in range(3):
                    assert generate(started.engine, [ids], 10) == [expected], (chunk, length)
                after = started.engine.stats()
                hits = after.prefix_hits - before.prefix_hits
                known = (length - 1) // 128 * 128
                # The first of the three may already hit what shorter prompts of this loop published: they are not prefixes.
                assert hits == 2 * known, (chunk, length)
            started.scheduler.check()


@pytest.mark.parametrize("k", [0, 7])
def test_the_256_rule_by_flag(k: int) -> None:
    with running(CFG, k_params("f32", k), k, prefix_replay=128) as started:
        for length, hit in ((255, 0), (256, 128), (384, 256)):
            before = started.engine.stats().prefix_hits
            generate(started.engine, [prompt(length, 8)], 4)
            assert generate(started.engine, [prompt(length, 8)], 4) == [lone("f32", prompt(length, 8), 4)]
            assert started.engine.stats().prefix_hits - before == hit


@pytest.mark.parametrize("k", [0, 7])
def test_a_pool_of_one_and_a_half_requests_serves_ten(k: int) -> None:
    """Preemption recomputes prompt and output; tokens stay those of the lone run, and every page comes back."""
    prompts = [
        prompt(96 + 3 * i, i) for i in range(10)
    ]  # two pages of history each, three to be had; the later grow first
    flags = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 160, "enable_prefix_caching": False}
    pages = {"history": 4, "window": 14, "tail": 36, "open": 14}
    with running(CFG, k_params("f32", k), k, pages=pages, **flags) as started:
        got = generate(started.engine, prompts, 60)
        assert got == [lone("f32", ids, 60) for ids in prompts]
        started.scheduler.check()
        assert not any(started.scheduler.stats().pages_used.values())
        assert started.engine.stats().preemptions > 0


@pytest.mark.parametrize("k", [0, 7])
def test_generated_tokens_are_a_prefix_too(k: int) -> None:
    """The next turn of a chat hits what the last one generated."""
    with running(CFG, k_params("f32", k), k) as started:
        first = prompt(100, 3)
        answer = generate(started.engine, [first], 60)[0]
        turn = (*first, *answer, *prompt(20, 4))
        before = started.engine.stats().prefix_hits
        assert generate(started.engine, [turn], 8) == [lone("f32", turn, 8)]
        assert started.engine.stats().prefix_hits - before == 128


def test_thirty_two_copies_and_sixteen_strangers() -> None:
    """faults.md 27: one distinct completion, whatever the company."""
    ids = prompt(40, 1)
    prompts = [ids if i % 3 else prompt(3 + 7 * i, i) for i in range(48)]
    with running(CFG, k_params("w8a8", 7), 7, max_num_seqs=16) as started:
        got = generate(started.engine, prompts, 12)
    assert {tuple(tokens) for ids_, tokens in zip(prompts, got, strict=True) if ids_ is ids} == {
        tuple(lone("w8a8", ids, 12))
    }


def test_nothing_is_compiled_while_serving() -> None:
    """Programs are captured once each; traffic of other lengths, batches and data replays them, one launch per step."""
    with running(CFG, k_params("w8a8", 7), 7) as started:
        generate(started.engine, [prompt(n, n) for n in (1, 30, 129, 400)], 20)
        programs = started.worker.programs
        assert programs.frozen
        assert all(s.traces == s.compiles == 1 for s in programs.stats().values())
        assert all(compiled.python_segments == 0 for shape, compiled in programs.compile() if not shape.full)


@pytest.mark.parametrize("k", [0, 7])
def test_logprobs(k: int) -> None:
    """Of the chosen token and the likeliest ones, equal to those of a whole-sequence forward; the same at K = 0 and 7."""
    ids = prompt(50, 6)
    with running(CFG, k_params("f32", k), k) as started:

        async def run():
            params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3)
            return await asyncio.gather(
                collect(started.engine, "a", ids, params),
                collect(started.engine, "b", prompt(9), SamplingParams(max_tokens=12, ignore_eos=True)),
            )

        scored, other = asyncio.run(run())
    tokens = tokens_of(scored)
    assert tokens == lone("f32", ids, 12) and tokens_of(other) == lone("f32", prompt(9), 12)
    logits = forward(CFG, k_params("f32", 0), [*ids, *tokens[:-1]]).logits[len(ids) - 1 :]
    expected = logits.log_softmax(-1)
    got = [entry for output in scored for entry in output.logprobs]
    assert [entry.token_id for entry in got] == tokens
    for row, entry in zip(expected, got, strict=True):
        best = row.topk(3)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)


class OnlyEven:
    """A grammar of even tokens in which a token divisible by 20 must be followed by 42."""

    def __init__(self) -> None:
        self.last = 1

    def matcher(self) -> "OnlyEven":
        return OnlyEven()

    def _row(self, last: int) -> np.ndarray:
        legal = [42] if last % 20 == 0 else range(0, CFG.vocab_size, 2)
        bits = np.zeros(CFG.vocab_size, np.uint8)
        bits[list(legal)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def masks(self, drafts):
        rows = [self._row(self.last)]
        last = self.last
        for draft in drafts:
            if not rows[-1].view(np.uint8)[draft // 8] >> (draft % 8) & 1:
                break
            last = draft
            rows.append(self._row(last))
        return len(rows) - 1, np.stack(rows)

    def forced(self) -> list[int]:
        return [42] if self.last % 20 == 0 else []

    def accept(self, tokens) -> None:
        for token in tokens:
            if token % 2 or (self.last % 20 == 0 and token != 42):
                raise EngineError(f"{token} is illegal after {self.last}")
            self.last = token


def test_constrained_output_is_the_same_at_both_widths() -> None:
    """Greedy over the legal tokens; forced ones are drafted; free neighbours are untouched."""
    ids = prompt(30, 2)
    results = []
    for k in (0, 7):
        with running(CFG, k_params("f32", k), k) as started:

            async def run(engine=started.engine):
                constrained = SamplingParams(max_tokens=40, ignore_eos=True, grammar=OnlyEven())
                return await asyncio.gather(
                    collect(engine, "a", ids, constrained),
                    collect(engine, "b", prompt(9), SamplingParams(max_tokens=40, ignore_eos=True)),
                )

            tight, free = asyncio.run(run())
            assert tokens_of(free) == lone("f32", prompt(9), 40)
            results.append(tight)
    slow, fast = map(tokens_of, results)
    assert slow == fast and all(t % 2 == 0 for t in slow)
    assert any(t % 20 == 0 for t in slow[:-1]) and results[1][-1].speculation.accepted > 0
    # Greedy among the legal, by full recomputation.
    known, last = list(ids), 1
    for token in slow[:10]:
        row = forward(CFG, k_params("f32", 0), known).logits[-1]
        legal = [42] if last % 20 == 0 else list(range(0, CFG.vocab_size, 2))
        assert token == max(legal, key=lambda t: row[t].item())
        known.append(token)
        last = token


class Hook:
    """Stands between engine and worker: what a test makes a step do."""

    def __init__(self, worker) -> None:
        self.execute, self.before = worker.execute, lambda: None
        worker.execute = self

    def __call__(self, work):
        self.before()
        return self.execute(work)


def test_a_failed_step_ends_its_requests_and_nothing_else() -> None:
    ids = prompt(20, 1)
    with running(CFG, k_params("f32", 7), 7) as started:
        hook = Hook(started.worker)

        def fail() -> None:
            raise RuntimeError("device fell over")

        hook.before = fail
        outputs = asyncio.run(collect(started.engine, "a", ids, SamplingParams(max_tokens=4)))
        assert outputs[-1].finish_reason == "error" and "device fell over" in outputs[-1].error
        hook.before = lambda: None
        assert generate(started.engine, [ids], 8) == [lone("f32", ids, 8)]
        asyncio.run(started.engine.check_health())
        started.scheduler.check()


def healthy(engine) -> bool:
    try:
        asyncio.run(engine.check_health())
    except EngineError:
        return False
    return True


def test_a_hung_step_is_told_and_healed() -> None:
    """faults.md 12: health names the step past its deadline, requests end with an error, and work goes on afterwards."""
    ids, release = prompt(20, 1), threading.Event()
    with running(CFG, k_params("f32", 0), 0, step_timeout=1.0) as started:
        hook = Hook(started.worker)
        hook.before = release.wait
        outputs = asyncio.run(collect(started.engine, "a", ids, SamplingParams(max_tokens=4)))
        assert outputs[-1].finish_reason == "error"
        with pytest.raises(EngineError, match=r"more than 1 s"):
            asyncio.run(started.engine.check_health())
        with pytest.raises(EngineError, match=r"more than 1 s"):
            asyncio.run(collect(started.engine, "b", ids, SamplingParams(max_tokens=4)))
        hook.before = lambda: None
        release.set()
        assert wait_until(lambda: healthy(started.engine))
        assert generate(started.engine, [ids], 8) == [lone("f32", ids, 8)]
        asyncio.run(started.engine.check_health())


@pytest.mark.parametrize("k", [0, 7])
def test_aborts_at_any_moment(k: int) -> None:
    """Whoever leaves takes nothing along: neighbours' tokens, pages and seats are as if it had never been there."""
    rng = random.Random(k)

    async def leave(engine, name: str, ids, after: int) -> None:
        stream = engine.submit(name, ids, SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(after):
            await anext(stream)
        engine.abort(name)
        engine.abort(name)

    async def run(engine):
        stay = [
            collect(engine, f"s{i}", prompt(90 + i, i), SamplingParams(max_tokens=30, ignore_eos=True))
            for i in range(4)
        ]
        go = [leave(engine, f"g{i}", prompt(60 + 9 * i, i), rng.randrange(6)) for i in range(12)]
        return (await asyncio.gather(*stay, *go))[:4]

    with running(CFG, k_params("f32", k), k, max_num_seqs=6) as started:
        for outputs, i in zip(asyncio.run(run(started.engine)), range(4), strict=True):
            assert tokens_of(outputs) == lone("f32", prompt(90 + i, i), 30)
        assert wait_until(lambda: started.engine.stats().running == 0)
        started.scheduler.check()
        assert not any(started.scheduler.stats().pages_used.values())
