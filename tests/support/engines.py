"""In-process engines over tiny models in memory, and simple ways to run prompts through them."""

import asyncio
from collections.abc import Sequence
from contextlib import contextmanager

from dsv4.config import ModelConfig
from dsv4.params import Params
from serving.args import EngineArgs, EngineSettings, resolve
from serving.build import Started, start_engine
from serving.capacity import PagePlan
from serving.request import EngineOutput, SamplingParams

# Unless told otherwise every step verifies drafts: what is faster here is not what tests are about.
ADAPTIVE = '{"method":"dspark","num_speculative_tokens":7}'
K7 = '{"method":"dspark","num_speculative_tokens":7,"adaptive":false}'


def settings_for(cfg: ModelConfig, k: int = 0, *, adaptive: bool = False, **flags) -> EngineSettings:
    flags = {"model": "tiny", "threads": 1, "max_num_seqs": 4} | flags
    asked = (ADAPTIVE if adaptive else K7) if k else None
    return resolve(EngineArgs(**flags, speculative_config=asked), cfg, "cpu")


@contextmanager
def running(cfg: ModelConfig, params: Params, k: int = 0, *, pages: dict[str, int] | None = None, **flags):
    """A started engine; `pages` replaces the planned pool sizes."""
    settings = settings_for(cfg, k, **flags)
    plan = pages and PagePlan(pages=pages, seats=1, cached_blocks=0, total_bytes=0, bound="test")
    started: Started = start_engine(cfg, params, settings, "tiny", plan=plan)
    try:
        yield started
    finally:
        started.engine.close()


async def collect(engine, request_id: str, ids: Sequence[int], params: SamplingParams) -> list[EngineOutput]:
    return [output async for output in engine.submit(request_id, ids, params)]


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def generate(
    engine, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int] = 16, **fields
) -> list[list[int]]:
    """Runs all prompts at once; their tokens."""
    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    fields = {"ignore_eos": True} | fields

    async def run() -> list[list[int]]:
        jobs = [
            collect(engine, f"r{engine.steps}-{i}", ids, SamplingParams(max_tokens=n, **fields))
            for i, (ids, n) in enumerate(zip(prompts, counts, strict=True))
        ]
        return [tokens_of(outputs) for outputs in await asyncio.gather(*jobs)]

    return asyncio.run(run())
