"""What every route of one app shares, and the few steps they have in common."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from dsv4.errors import OverloadedError, RequestError, UnknownModelError
from serving.generation import Delta, Generation, Usage
from serving.http.chat import CONTROLS
from serving.http.lifetime import EventStream, Lifetime
from serving.http.protocol_texts import ProtocolTexts
from serving.http.settings import HttpSettings
from serving.metrics import Metrics
from serving.protocol import EngineClient, GrammarCompiler
from serving.request import SamplingParams
from serving.tokenizer import Tokenizer

T = TypeVar("T")

# Tokenising this many characters takes about 2 ms.
_THREAD_CHARS = 8192


@dataclass
class Server:
    """One app's engine, vocabulary, limits and numbers.

    draining: turns new work away before a shutdown. connections: how many are open; whoever runs the app knows.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    settings: HttpSettings
    metrics: Metrics
    texts: ProtocolTexts
    grammars: GrammarCompiler | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    connections: Callable[[], int] = lambda: 0
    lifetime: Lifetime = field(init=False)

    def __post_init__(self) -> None:
        self.lifetime = Lifetime(self.settings.request_timeout_s)

    def check_model(self, name: str | None) -> str:
        """The served name. Raises UnknownModelError for any other, null and "" mean the one there is."""
        if name and name != self.engine.model_name:
            raise UnknownModelError(
                f"model {name!r} is not served here; this server has {self.engine.model_name!r}", param="model"
            )
        return self.engine.model_name

    @property
    def no_chat(self) -> str | None:
        """Why this vocabulary cannot hold a conversation, or None."""
        lacking = ", ".join(name for name in CONTROLS if self.tokenizer.find_control(name) is None)
        return f"this tokenizer lacks {lacking}: chat is not possible, use /v1/completions" if lacking else None

    def check_logprobs(self, asked: int | None, param: str) -> int | None:
        """The number of alternatives asked for. Raises RequestError where the engine has fewer, or none at all."""
        most = self.engine.max_logprobs
        if asked is not None and (most is None or asked > most):
            offer = "none" if most is None else f"at most {most}"
            raise RequestError(f"{param}: this engine returns {offer}", param=param, code="unsupported_value")
        return asked

    async def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt."""
        return await off_loop(len(text), self.tokenizer.encode, text)

    def generate(
        self, name: str, prompts: Sequence[Sequence[int]], params: SamplingParams, *, param: str = "prompt"
    ) -> list[Generation]:
        """Submits all prompts or none. Refusals of a prompt name the request's field `param`."""
        if self.draining:
            raise OverloadedError("the server is shutting down; send this to another one", retry_after_s=5)
        started: list[Generation] = []
        try:
            for index, prompt_ids in enumerate(prompts):
                started.append(
                    Generation(
                        self.engine, self.tokenizer, f"{name}-{index}", prompt_ids, params, self.metrics.observe()
                    )
                )
        except BaseException as error:
            close_all(started)
            if isinstance(error, RequestError) and error.param == "prompt":
                error.param = param
            raise
        return started

    def stream(self, events: AsyncGenerator[dict[str, Any]], on_close: Callable[[], None]) -> EventStream:
        """The answer that sends `events` as they come."""
        return EventStream(
            events, lifetime=self.lifetime, stall_timeout_s=self.settings.stall_timeout_s, on_close=on_close
        )

    def log(self, request: Request, generations: Sequence[Generation]) -> None:
        """Leaves what the access log wants to know; called when the request is over."""
        total = total_usage([generation.usage for generation in generations])
        entry = {
            "request": generations[0].request_id.rsplit("-", 1)[0],
            "prompt_tokens": total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "completion_tokens": total.completion_tokens,
            "finish_reason": [str(generation.finish_reason) for generation in generations],
        }
        if missed := self.engine.why_missed(generations[0].request_id):
            entry["prefix_cache"] = missed
        request.state.access = getattr(request.state, "access", {}) | entry


async def off_loop(chars: int, work: Callable[..., T], *args: Any) -> T:
    """Calls `work` here, or in a thread where so much text would hold up other clients' streams."""
    return work(*args) if chars < _THREAD_CHARS else await asyncio.to_thread(work, *args)


def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()


def new_id(prefix: str) -> str:
    """An id no client can guess or repeat."""
    return f"{prefix}-{uuid.uuid4().hex[:24]}"


def total_usage(usages: Sequence[Usage]) -> Usage:
    total = Usage(prompt_tokens=0)
    for usage in usages:
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.cached_tokens += usage.cached_tokens
        total.accepted_drafts += usage.accepted_drafts
        total.rejected_drafts += usage.rejected_drafts
    return total


def usage_json(usage: Usage, *, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object."""
    details = {
        "accepted_prediction_tokens": usage.accepted_drafts,
        "rejected_prediction_tokens": usage.rejected_drafts,
    }
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta]]:
    """Deltas of several requests in the order they arrive, each with its request's index."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    # Bounded, so that a slow reader holds back the copying here and not only the socket.
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(maxsize=len(generations))

    async def forward(index: int) -> None:
        try:
            async for delta in generations[index]:
                await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(forward(index)) for index in range(len(generations))]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
