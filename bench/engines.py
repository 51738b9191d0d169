"""Engines for benchmarks: started in this process, driven request by request; and a drafter that is always right."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.models import Model
from serving.args import EngineArgs, resolve
from serving.build import Started, start_engine
from serving.request import SamplingParams
from serving.threads import give_way
from serving.worker import Worker

Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """Some requests: seconds until all had a first token and until all had their last, and the tokens."""

    first_s: float
    total_s: float
    tokens: list[list[int]]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token of each request."""
        return sum(len(t) - 1 for t in self.tokens) / (self.total_s - self.first_s)


class BenchEngine:
    """An engine over one form of a model. Prefix caching is off unless asked for: every prompt is computed.

    adaptive: whether steps that are faster without drafts verify none, if k > 0.
    """

    def __init__(
        self, model: Model, dtype: torch.dtype | None, k: int, threads: int, clock: Clock = time.perf_counter,
        adaptive: bool = True, **flags,
    ) -> None:  # fmt: skip
        flags = {"max_num_seqs": 8, "max_model_len": model.max_positions, "enable_prefix_caching": False} | flags
        asked = {"method": "dspark", "num_speculative_tokens": k, "adaptive": adaptive}
        args = EngineArgs(model="bench", threads=threads, speculative_config=json.dumps(asked), **flags)
        self.k, self._clock = k, clock
        give_way()  # as `build_engine` does
        self.started: Started = start_engine(
            model.cfg, model.params(dtype, k), resolve(args, model.cfg, "cpu"), "bench"
        )
        self._requests = 0

    def run(self, prompts: Sequence[Sequence[int]], count: int, at_once: int | None = None) -> Timing:
        """`count` tokens after each prompt, EOS ignored; all begin together, or a new one as soon as fewer than `at_once` run."""
        params = SamplingParams(max_tokens=count, ignore_eos=True)

        async def one(prompt: Sequence[int], firsts: list[float]) -> list[int]:
            self._requests += 1
            tokens: list[int] = []
            async for output in self.started.engine.submit(f"bench-{self._requests}", prompt, params):
                if not tokens:
                    firsts.append(self._clock())
                tokens += output.token_ids
                if output.error:
                    raise RuntimeError(output.error)
            return tokens

        async def everyone() -> Timing:
            firsts: list[float] = []
            seats = asyncio.Semaphore(at_once or len(prompts))

            async def seated(prompt: Sequence[int]) -> list[int]:
                async with seats:
                    return await one(prompt, firsts)

            began = self._clock()
            tokens = await asyncio.gather(*map(seated, prompts))
            return Timing(max(firsts) - began, self._clock() - began, tokens)

        return asyncio.run(everyone())

    def close(self) -> None:
        self.started.engine.close()


def always_right(worker: Worker, known: Mapping[tuple[int, ...], Sequence[int]]) -> None:
    """Makes every draft right: after the drafter has run, its drafts give way to the known continuation of the prompt.

    known: prompts of at most one prefill tile, with what K=0 answers. The drafter's cost stays in the figures.
    """
    sequences: dict[int, np.ndarray] = {}
    replay, drafts, position = worker._replay, worker.state.drafts.numpy(), worker.state.position.numpy()
    k = drafts.shape[1]

    def forced(launch):
        out = replay(launch)
        if launch.shape.kind == "prefill":
            for slot, ids, length in zip(*(launch.arrays[n] for n in ("final", "ids", "length")), strict=True):
                prompt = tuple(ids[:length].tolist())
                if prompt in known:
                    tail = [0] * (k + 1)
                    sequences[int(slot)] = np.array([*prompt, *known[prompt], *tail], np.int32)
        else:
            for slot in launch.arrays["slots"][: launch.live].tolist():
                after = int(position[slot]) + 1
                if slot in sequences and after + k <= len(sequences[slot]):
                    drafts[slot] = sequences[slot][after : after + k]
        return out

    worker._replay = forced
