"""Greedy continuations through the serving engine: what a user of the checkpoint would get, with its speculation figures."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.args import EngineArgs
from serving.build import build_engine
from serving.engine import Engine
from serving.request import SamplingParams, Speculation
from tools.training.settings import DRAFTS


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Generated ids, and what drafting did for them (zeros at K=0)."""

    tokens: list[int]
    speculation: Speculation


async def _one(engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams) -> Continuation:
    tokens: list[int] = []
    speculation = Speculation()
    async for output in engine.submit(name, prompt, params):
        tokens += output.token_ids
        speculation = output.speculation
        if output.error:
            raise RuntimeError(f"{name}: {output.error}")
    return Continuation(tokens=tokens, speculation=speculation)


def continuations(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, *, drafts: int, rows: int, threads: int
) -> list[Continuation]:
    """Greedy continuations of W8A8 `model`, up to `max_tokens` or EOS; `drafts` is K, 0 or 7."""
    length = max(len(p) for p in prompts) + max_tokens + DRAFTS + 1
    args = EngineArgs(
        model=str(model), platform="cpu", max_num_seqs=rows, max_model_len=-(-length // 128) * 128,
        max_waiting=len(prompts), num_speculative_tokens=drafts, threads=threads, enable_prefix_caching=False,
    )  # fmt: skip
    built = build_engine(args)
    params = SamplingParams(max_tokens=max_tokens)

    async def everything() -> list[Continuation]:
        return await asyncio.gather(*(_one(built.engine, f"{i}", p, params) for i, p in enumerate(prompts)))

    try:
        return asyncio.run(everything())
    finally:
        built.engine.close()
