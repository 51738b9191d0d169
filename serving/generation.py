"""One request from prompt ids to text: submit, decode, cut at stop strings, count, and always let go of the engine."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

from dsv4.errors import EngineError, RequestError
from serving.detokenize import TextStream, TextToken
from serving.protocol import EngineClient
from serving.request import EngineOutput, FinishReason, SamplingParams, Speculation
from serving.tokenizer import Tokenizer


class GenerationObserver(Protocol):
    """Hears what happens to a request, for metrics."""

    def tokens(self, count: int) -> None: ...

    def finished(self, reason: FinishReason, prompt_tokens: int, completion_tokens: int) -> None: ...


@dataclass
class Usage:
    """Token counts of one request, after the cut at a stop string.

    accepted_drafts: generated tokens that the drafter proposed and the target confirmed.
    rejected_drafts: proposals that the target refused.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0


@dataclass(frozen=True)
class Delta:
    """Tokens that have become final, in order; the last delta of a request carries its `finish_reason`."""

    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Generation:
    """An async iterator of `Delta`s over one engine request; also a context manager that aborts it if unfinished.

    Raises, when made: RequestError (does not fit), OverloadedError. While iterated: EngineError.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        observer: GenerationObserver | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.usage = Usage(prompt_tokens=len(prompt_ids))
        self.speculation = Speculation()
        self.finish_reason: FinishReason | None = None
        self.started = time.monotonic()
        self._engine = engine
        self._observer = observer
        self._stream = TextStream(tokenizer, params.stop)
        room = room_for_output(engine, prompt_ids)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        self._outputs = engine.submit(request_id, prompt_ids, params)
        self._deltas = self._run()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request unless it has ended."""
        if self.finish_reason is None:
            self._end(FinishReason.ABORTED, abort=True)

    async def _run(self) -> AsyncIterator[Delta]:
        try:
            async for output in self._outputs:
                delta = self._take(output)
                if delta.tokens or delta.finish_reason:
                    yield delta
                if delta.finish_reason:
                    return
            raise EngineError("the engine ended this request without saying why")
        except EngineError:
            self._end(FinishReason.ERROR, abort=True)
            raise

    def _take(self, output: EngineOutput) -> Delta:
        """Counts one output and turns it into text. Raises EngineError where it reports one."""
        self.usage.cached_tokens = max(self.usage.cached_tokens, output.cached_tokens)
        if output.speculation is not None:
            self.speculation = output.speculation
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError(output.error or "the engine failed while it worked on this request")
        if output.token_ids and self._observer:
            self._observer.tokens(len(output.token_ids))
        tokens = self._stream.push(output)
        if output.finish_reason and not self._stream.stopped:
            tokens += self._stream.finish()
        self._count(tokens)
        if self._stream.stopped:
            self._end(FinishReason.STOP, abort=output.finish_reason is None)
        elif output.finish_reason:
            self._end(output.finish_reason, abort=False)
        return Delta(tokens, self.finish_reason)

    def _count(self, tokens: list[TextToken]) -> None:
        self.usage.completion_tokens += len(tokens)
        self.usage.accepted_drafts += sum(token.drafted for token in tokens)

    def _end(self, reason: FinishReason, *, abort: bool) -> None:
        self.finish_reason = reason
        self.usage.rejected_drafts = self.speculation.proposed - self.speculation.accepted
        if abort:
            self._engine.abort(self.request_id)
        if self._observer:
            self._observer.finished(reason, self.usage.prompt_tokens, self.usage.completion_tokens)


def room_for_output(engine: EngineClient, prompt_ids: Sequence[int]) -> int:
    """Tokens that fit after the prompt. Raises RequestError where none does or an id is not in the vocabulary."""
    if not prompt_ids:
        raise RequestError("prompt: it has no tokens; send at least one", param="prompt", code="empty_prompt")
    if max(prompt_ids) >= engine.vocab_size or min(prompt_ids) < 0:
        wrong = next(i for i in prompt_ids if not 0 <= i < engine.vocab_size)
        raise RequestError(
            f"prompt: token id {wrong} is outside the vocabulary of {engine.vocab_size}",
            param="prompt",
            code="invalid_token_id",
        )
    room = engine.max_model_len - len(prompt_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens and this server reads at most {engine.max_model_len} tokens, "
            "one of them generated; shorten the prompt or start the server with a larger --max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )
    return room
