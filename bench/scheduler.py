"""Host cost of one steady step: plan and commit of 256 decoding requests, by context length and draft width.

    python -m bench.scheduler [--requests 256] [--steps 400]

Tokens are made up, accepted lengths follow the published profile of DSpark at K=7 (about 2.9 tokens a step). Requests sit at
random offsets, so page work spreads over steps as it does in service. The claim: p50 below 1 ms, whatever the context.
"""

import argparse
import gc
from random import Random
from statistics import quantiles
from time import perf_counter

from serving.pages import BLOCK_TOKENS
from serving.plan import PartitionResult, ScheduledRequest, SchedulerConfig, StepPlan
from serving.scheduler import Scheduler

ACCEPTANCE = (0.72, 0.63, 0.7, 0.58, 0.72, 0.62, 0.63)  # of draft i, given that those before it were accepted


def build(requests: int, context: int, drafts: int, partitions: int) -> Scheduler:
    """A scheduler with pools large enough for every request to decode without pressure."""
    seats = -(-requests // partitions)
    chunk = 8192
    pages = {
        "history": seats * (context // BLOCK_TOKENS + 64) + 1,
        "window": seats * (16 + 2 * chunk // 32) + 1,
        "tail": seats * (32 + 2 * chunk // 8) + 1,
        "open": seats * (16 + 2 * chunk // 32) + 1,
    }
    return Scheduler(
        SchedulerConfig(
            pages=pages,
            max_model_len=context + 16384,
            max_num_seqs=requests,
            max_num_batched_tokens=1 << 20,
            long_prefill_token_threshold=chunk,
            num_speculative_tokens=drafts,
            partitions=partitions,
            max_waiting=requests,
            max_tokens_per_partition=seats * chunk,
        )
    )


def answer(plan: StepPlan, drafts: int, random: Random) -> list[PartitionResult]:
    """Results a device could have returned."""
    results = []
    for part in plan.partitions:
        rows = []
        for _ in part.decode:
            accepted = 0
            while accepted < drafts and random.random() < ACCEPTANCE[accepted % len(ACCEPTANCE)]:
                accepted += 1
            rows.append([random.randrange(100_000) for _ in range(accepted + 1)])
        results.append(PartitionResult([7] * len(part.finals), rows, [drafts] * len(rows)))
    return results


def measure(requests: int, context: int, drafts: int, steps: int, partitions: int = 4) -> tuple[float, float, float]:
    """p50 and p99 of a step's host time in milliseconds, and the mean tokens per row."""
    random = Random(0)
    scheduler = build(requests, context, drafts, partitions)
    shared = [random.randrange(100_000) for _ in range(context)]
    for number in range(requests):
        tokens = shared[: context - 128] + [random.randrange(100_000) for _ in range(random.randrange(1, 128))]
        scheduler.add(ScheduledRequest(request_id=str(number), tokens=tokens, max_tokens=16384, eos_token_id=None))
    flight: list[StepPlan] = []
    while True:
        plan = scheduler.plan()
        flight.append(plan)
        if sum(len(part.decode) for part in plan.partitions) == requests:
            break
        while flight:
            plan = flight.pop(0)
            scheduler.commit(plan, answer(plan, drafts, random))
    times, tokens = [], 0
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        results = answer(flight[0], drafts, random)
        tokens += sum(len(row) for result in results for row in result.rows)
        start = perf_counter()
        flight.append(scheduler.plan())
        scheduler.commit(flight.pop(0), results)
        times.append(1e3 * (perf_counter() - start))
    gc.unfreeze()
    cuts = quantiles(times, n=100)
    return cuts[49], cuts[98], tokens / (steps * requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    options = parser.parse_args()
    print(f"{options.requests} decoding requests, {options.steps} steps: plan + commit, ms")
    print(f"{'K':>3} {'context':>8} {'tokens/row':>11} {'p50':>7} {'p99':>7}")
    for drafts in (0, 7):
        for context in options.contexts:
            p50, p99, mean = measure(options.requests, context, drafts, options.steps)
            print(f"{drafts:>3} {context:>8} {mean:>11.2f} {p50:>7.3f} {p99:>7.3f}")


if __name__ == "__main__":
    main()
