"""The seam between the HTTP edge and the engine: token ids down, `EngineOutput`s up, nothing else.

The edge owns text (tokenising, stop strings, chat, tools), the engine owns steps (scheduling, EOS, `max_tokens`).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from serving.request import EngineOutput, SamplingParams, Speculation


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What the engine is doing now, and what it has done since it started (counters never fall).

    kv_cache_usage: share of pages in use, 0 to 1.
    prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache and found there.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    speculation: Speculation = field(default_factory=Speculation)


class EngineClient(Protocol):
    """An engine as its callers see it. Every method is called from one event loop.

    max_logprobs: alternatives that can be had with each token, at most; None where there are no log probabilities.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_id: int
    bos_token_id: int
    num_speculative_tokens: int
    max_logprobs: int | None

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[EngineOutput]:
        """Queues a request and returns its outputs; the last one carries a `finish_reason`.

        Raises, at the call and before any device work: RequestError, OverloadedError, EngineError.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Forgets a request at the next step boundary. Any moment, any number of times, unknown ids included."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; cheap enough for every scrape."""
        ...

    async def check_health(self) -> None:
        """Raises EngineError naming what is wrong: a worker died, a step exceeds its deadline."""
        ...

    def why_missed(self, request_id: str) -> str | None:
        """Why the prefix cache gave this request less than its whole prompt; None where there is nothing to say."""
        ...

    def start_profile(self, folder: Path) -> None:
        """Begins a trace of the steps in a folder. Raises RequestError if one is being taken."""
        ...

    def stop_profile(self) -> Path:
        """Ends the trace and returns its file. Raises RequestError if none is being taken."""
        ...


class GrammarCompiler(Protocol):
    """Compiles what an answer must look like into `SamplingParams.grammar` (`serving.grammar` is one).

    thinking: the answer begins inside `<think>`, and the constraint holds from `</think>` on.
    Every method raises RequestError for what cannot be compiled.
    """

    def tools(self, functions: Sequence[Mapping[str, Any]], *, choice: str, parallel: bool, thinking: bool) -> object:
        """Calls of `functions` ({"name", "parameters", "strict"}); choice: auto, required or the name of one."""
        ...

    def json_schema(self, schema: Mapping[str, Any], *, thinking: bool) -> object: ...

    def json_object(self, *, thinking: bool) -> object: ...
