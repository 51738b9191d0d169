"""Online: requests arrive by a Poisson process, whether or not the server keeps up (open loop)."""

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence

from dsv4.errors import Dsv4Error, EngineError
from serving.bench.client import Endpoint
from serving.bench.point import Load, Point, Prefix, summarise
from serving.bench.prompts import Prompt, Prompts
from serving.bench.records import Record
from serving.request import Speculation

_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Seconds from the start at which `count` requests are due, `rate` per second on average."""
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(rate)
    return times


async def speculation_counters(endpoint: Endpoint) -> Speculation | None:
    """The server's totals from `/metrics` (vLLM's names), None where it has none."""
    try:
        text = (await endpoint.get("/metrics")).decode(errors="replace")
    except (OSError, EngineError, ValueError, asyncio.IncompleteReadError):
        return None
    values: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in _COUNTER.findall(text):
        if place := re.search(r'position="(\d+)"', labels):
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + float(value)
        else:
            values[name] = values.get(name, 0.0) + float(value)
    if "drafts" not in values:
        return None
    return Speculation(
        verify_steps=int(values["drafts"]),
        proposed=int(values.get("draft_tokens", 0)),
        accepted=int(values.get("accepted_tokens", 0)),
        accepted_per_position=[int(positions[i]) for i in sorted(positions)],
    )


def _since(before: Speculation | None, after: Speculation | None) -> Speculation | None:
    if before is None or after is None:
        return None
    earlier = before.accepted_per_position + [0] * len(after.accepted_per_position)
    return Speculation(
        verify_steps=after.verify_steps - before.verify_steps,
        proposed=after.proposed - before.proposed,
        accepted=after.accepted - before.accepted,
        accepted_per_position=[a - b for a, b in zip(after.accepted_per_position, earlier, strict=False)],
    )


async def served_model(endpoint: Endpoint) -> str:
    """The first model that the server lists. Raises EngineError."""
    try:
        models = json.loads(await endpoint.get("/v1/models"))["data"]
        return models[0]["id"]
    except (OSError, ValueError, LookupError, asyncio.IncompleteReadError) as error:
        raise EngineError(f"{endpoint.root}/v1/models: expected a list of models, got {error!r}") from None


async def _open_loop(
    endpoint: Endpoint, prompts: Sequence[Prompt], tokens: int, rate: float, seed: int
) -> list[Record]:
    start = time.perf_counter() + 0.05

    async def one(prompt: Prompt, after: float) -> Record:
        await asyncio.sleep(start + after - time.perf_counter())
        return await endpoint.complete(prompt, tokens, start + after)

    due = poisson_arrivals(len(prompts), rate, seed)
    return await asyncio.gather(*(one(prompt, after) for prompt, after in zip(prompts, due, strict=True)))


def run_arrivals(
    endpoint: Endpoint, prompts: Prompts, *, rate: float, requests: int, tokens: int, prefix: Prefix, k: int | None, seed: int
) -> Point:  # fmt: skip
    """`requests` requests at `rate` per second. Raises EngineError if the server cannot serve the first one."""

    async def everything() -> tuple[list[Record], Speculation | None]:
        if prefix == "warm":
            head, measured = prompts.warm(requests)
        else:
            (head,), measured = prompts.cold(1), prompts.cold(requests)
        first = await endpoint.complete(head, 1 if prefix == "warm" else tokens, time.perf_counter())
        if first.error:
            raise EngineError(f"{endpoint.base}: the first request failed: {first.error}")
        before = await speculation_counters(endpoint)
        records = await _open_loop(endpoint, measured, tokens, rate, seed)
        return records, _since(before, await speculation_counters(endpoint))

    records, speculation = asyncio.run(everything())
    if all(record.error for record in records):
        raise Dsv4Error(f"{endpoint.base}: every request failed, the first with {records[0].error}")
    return summarise(Load(mode="online", k=k, level=rate, prefix=prefix), records, speculation)
