"""Offline: batches through an engine in this process, all requests of a batch submitted at once."""

import asyncio
import itertools
import time
from collections.abc import Sequence

from serving.bench.point import Load, Point, Prefix, summarise
from serving.bench.prompts import Prompts
from serving.bench.records import Record
from serving.protocol import EngineClient
from serving.request import SamplingParams, Speculation

_names = itertools.count()


async def _request(
    engine: EngineClient, prompt: Sequence[int], params: SamplingParams
) -> tuple[Record, Speculation | None]:
    record, speculation = Record(time.perf_counter(), prompt_tokens=len(prompt)), None
    async for output in engine.submit(f"bench-{next(_names)}", prompt, params):
        if output.token_ids:
            record.arrivals.append((time.perf_counter(), len(output.token_ids)))
        record.cached_tokens, record.error, speculation = output.cached_tokens, output.error, output.speculation
    return record, speculation


def add(total: Speculation, one: Speculation) -> None:
    """Adds one request's counts to `total`."""
    width = max(len(total.accepted_per_position), len(one.accepted_per_position))
    for counts in (total, one):
        counts.accepted_per_position += [0] * (width - len(counts.accepted_per_position))
    for name in ("verify_steps", "fallback_steps", "plain_steps", "proposed", "accepted"):
        setattr(total, name, getattr(total, name) + getattr(one, name))
    total.accepted_per_position = [
        a + b for a, b in zip(total.accepted_per_position, one.accepted_per_position, strict=True)
    ]


def run_batches(engine: EngineClient, prompts: Prompts, batch: int, rounds: int, tokens: int, prefix: Prefix) -> Point:
    """`rounds` batches of `batch` requests with `tokens` output tokens each, one batch after the other, as one point."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    records: list[Record] = []
    total = Speculation()

    async def one_batch() -> list[tuple[Record, Speculation | None]]:
        if prefix == "warm":
            head, together = prompts.warm(batch)
            await _request(engine, head, SamplingParams(max_tokens=1, ignore_eos=True))
        else:
            together = prompts.cold(batch)
        return await asyncio.gather(*(_request(engine, prompt, params) for prompt in together))

    async def everything() -> None:
        await one_batch()  # finds memory cold, and is not counted
        busy = 0.0
        for _ in range(rounds):
            done = await one_batch()
            begun = min(record.due for record, _ in done)
            for record, speculation in done:
                record.move(busy - begun)  # as if batches followed each other without a pause
                records.append(record)
                if speculation is not None:
                    add(total, speculation)
            busy = max((record.done for record, _ in done if record.arrivals), default=busy)

    asyncio.run(everything())
    load = Load(mode="offline", k=engine.num_speculative_tokens, level=batch, prefix=prefix)
    return summarise(load, records, total)
