"""The scheduler against a toy device whose tokens depend on every page it reads: any page mistake changes tokens."""

from random import Random

import pytest
from toy_device import VOCABULARY, ToyServer

from serving.plan import ScheduledRequest, SchedulerConfig
from serving.scheduler import Scheduler


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCABULARY) for _ in range(length)]


def make(pages: int | dict = 400, **overrides) -> ToyServer:
    counts = pages if isinstance(pages, dict) else dict.fromkeys(("history", "window", "tail", "open"), pages)
    server = {k: overrides.pop(k) for k in ("acceptance", "seed", "check") if k in overrides}
    settings = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256} | overrides
    return ToyServer(Scheduler(SchedulerConfig(pages=counts, **settings)), **server)


def request(name: str, prompt: list[int], max_tokens: int = 8, **options) -> ScheduledRequest:
    return ScheduledRequest(request_id=name, tokens=list(prompt), max_tokens=max_tokens, **options)


@pytest.mark.parametrize("drafts", range(8))
def test_one_request_equals_its_lone_run(drafts):
    server = make(num_speculative_tokens=drafts)
    server.add(request("a", prompt_of(200), 60))
    server.drain()
    assert len(server.streams["a"]) == 60


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafts", [0, 7])
def test_a_random_crowd_equals_its_lone_runs(drafts, seed):
    random = Random(seed)
    server = make(
        pages=random.choice([{"history": 14, "window": 60, "tail": 120, "open": 60}, 400]),
        num_speculative_tokens=drafts,
        long_prefill_token_threshold=random.choice([0, 7, 32, 100]),
        partitions=random.choice([1, 2]),
        pipeline_depth=random.choice([1, 2, 3]),
        seed=seed,
        acceptance=random.choice([0.0, 0.5, 0.9, 1.0]),
        max_model_len=600,
    )
    heads = [prompt_of(300, s) for s in range(3)]
    for number in range(40):
        head = random.choice(heads)[: random.randrange(1, 300)]
        body = head + prompt_of(random.randrange(1, 60), number)
        server.add(
            request(
                f"r{number}",
                body,
                random.randrange(1, 200),
                eos_token_id=random.choice([None, 3]),
                synchronous=random.random() < 0.1,
            )
        )
        for _ in range(random.randrange(6)):
            server.step()
        if random.random() < 0.15:
            server.abort(f"r{random.randrange(number + 1)}")
    server.drain()
