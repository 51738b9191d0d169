"""An engine whose tokens a person can compute: token n+1 is token n plus one, or the next of a given script.

A step emits as many tokens as `steps` says in turn; all but its last count as drafted and accepted, and drafts up to
a width of 7 that are missing count as refused. `delay_s` is the time of a step. Faults: `fail_after` steps a request
raises, `stalled` stops time, more than `max_live` requests are turned away.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from dsv4.errors import EngineError, OverloadedError
from serving.protocol import EngineStats
from serving.request import EngineOutput, FinishReason, SamplingParams, Speculation, TokenLogprobs


@dataclass
class ToyEngine:
    vocab_size: int = 129_280
    model_name: str = "toy"
    max_model_len: int = 4096
    bos_token_id: int = 0
    eos_token_id: int = 1
    num_speculative_tokens: int = 7
    max_logprobs: int | None = 20
    script: Sequence[int] | None = None
    steps: Sequence[int] = (1,)
    delay_s: float = 0.0
    fail_after: int | None = None
    stalled: bool = False
    max_live: int = 10_000
    cached_tokens: int = 0
    live: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    submitted: list[tuple[str, list[int], SamplingParams]] = field(default_factory=list)
    totals: EngineStats = field(default_factory=EngineStats)

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[EngineOutput]:
        if len(self.live) >= self.max_live:
            raise OverloadedError(f"{len(self.live)} requests are waiting already", retry_after_s=2.0)
        assert request_id not in self.live
        self.live.add(request_id)
        self.submitted.append((request_id, list(prompt_ids), params))
        self.totals = replace(self.totals, prompt_tokens=self.totals.prompt_tokens + len(prompt_ids))
        return self._run(request_id, prompt_ids, params)

    def _tokens(self, prompt_ids: Sequence[int]):
        if self.script is not None:
            yield from self.script
            yield from itertools.repeat(self.eos_token_id)
        yield from (i % self.vocab_size for i in itertools.count(prompt_ids[-1] + 1))

    async def _run(self, request_id, prompt_ids, params):
        tokens, sizes, emitted, speculation = self._tokens(prompt_ids), itertools.cycle(self.steps), 0, Speculation()
        for step in itertools.count():
            await asyncio.sleep(self.delay_s)
            while self.stalled:
                await asyncio.sleep(0.01)
            if self.fail_after is not None and step >= self.fail_after:
                self.live.discard(request_id)
                raise EngineError("the worker of rank 0 died")
            if request_id not in self.live:
                return
            size, ids, reason = next(sizes), [], None
            while len(ids) < size and reason is None:
                ids.append(next(tokens))
                if ids[-1] == self.eos_token_id and not params.ignore_eos:
                    reason = FinishReason.STOP
                elif emitted + len(ids) == params.max_tokens:
                    reason = FinishReason.LENGTH
            emitted += len(ids)
            speculation.record(7, size - 1, 7)
            self.totals = replace(
                self.totals, generation_tokens=self.totals.generation_tokens + len(ids), speculation=speculation
            )
            if reason is not None:
                self.live.discard(request_id)
            yield EngineOutput(
                token_ids=ids,
                draft_mask=[True] * min(size - 1, len(ids)) + [False] * max(0, len(ids) - size + 1),
                logprobs=self._logprobs(ids, params),
                finish_reason=reason,
                cached_tokens=self.cached_tokens,
                speculation=speculation,
            )
            if reason is not None:
                return

    def _logprobs(self, ids, params):
        if params.logprobs is None:
            return []
        return [TokenLogprobs(i, -0.5, tuple((i + k, -0.5 - k) for k in range(params.logprobs))) for i in ids]

    def abort(self, request_id: str) -> None:
        if request_id in self.live:
            self.live.discard(request_id)
            self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return replace(self.totals, running=len(self.live), kv_cache_usage=0.25)

    async def check_health(self) -> None:
        if self.stalled:
            raise EngineError("step 3 has been running for 9 s, its deadline is 5 s")

    def why_missed(self, request_id: str) -> str | None:
        return None
