"""POST /v1/completions: raw prompts in, raw text out."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from dsv4.errors import RequestError
from serving.detokenize import TextToken
from serving.generation import Delta, Generation
from serving.http.context import Server, close_all, merge, new_id, total_usage, usage_json
from serving.http.lifetime import JsonResponse
from serving.http.logprobs import completion_logprobs
from serving.http.schema import CompletionBody


def router(server: Server) -> APIRouter:
    """The route over one server."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Completes one or several prompts; with `stream` as server-sent events."""
        settings = server.settings
        model = server.check_model(body.model)
        logprobs = server.check_logprobs(body.logprobs, "logprobs")
        params = body.sampling(settings.defaults, logprobs=logprobs, max_tokens=body.max_tokens)
        if len(body.prompt) > settings.max_prompts:
            raise RequestError(
                f"prompt: at most {settings.max_prompts} prompts in one request, got {len(body.prompt)}", param="prompt"
            )
        prompts = [await _prompt_ids(server, prompt) for prompt in body.prompt]
        name = new_id("cmpl")
        generations = server.generate(name, prompts, params)
        answer = _Answer(server, body, name, model, generations)

        def close() -> None:
            close_all(generations)
            server.log(request, generations)

        if body.wants_stream(settings.defaults):
            return server.stream(answer.events(), on_close=close)
        try:
            whole = await server.lifetime.run(request.receive, answer.collect())
        finally:
            close()
        return JsonResponse(whole)

    return routes


async def _prompt_ids(server: Server, prompt: str | list[int]) -> list[int]:
    """Ids as they are; text as it is, with nothing added, except that an empty text is one begin-of-sentence."""
    if not isinstance(prompt, str):
        return prompt
    return await server.encode(prompt) or [server.engine.bos_token_id]


class _Answer:
    """Builds one request's response objects."""

    def __init__(
        self, server: Server, body: CompletionBody, name: str, model: str, generations: list[Generation]
    ) -> None:
        self._tokenizer = server.tokenizer
        self._body = body
        self._generations = generations
        self._frame = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}

    async def collect(self) -> dict[str, Any]:
        """The non-streaming response."""
        tokens: list[list[TextToken]] = [[] for _ in self._generations]
        async with contextlib.aclosing(merge(self._generations)) as deltas:
            async for index, delta in deltas:
                tokens[index] += delta.tokens
        choices = [
            self._choice(index, Delta(tokens[index], generation.finish_reason), with_prompt=True)
            for index, generation in enumerate(self._generations)
        ]
        return self._frame | {"choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a stream: one per step and prompt, then usage if asked for."""
        with_prompt = set(range(len(self._generations)))
        async with contextlib.aclosing(merge(self._generations)) as deltas:
            async for index, delta in deltas:
                choice = self._choice(index, delta, with_prompt=index in with_prompt)
                with_prompt.discard(index)
                yield self._frame | {"choices": [choice]} | ({"usage": None} if self._body.include_usage() else {})
        if self._body.include_usage():
            yield self._frame | {"choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage_json(total_usage([generation.usage for generation in self._generations]))

    def _choice(self, index: int, delta: Delta, *, with_prompt: bool) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason and delta.finish_reason.value,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(self._tokenizer, delta.tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
            choice["draft_mask"] = [token.drafted for token in delta.tokens]
            if with_prompt:
                choice["prompt_token_ids"] = list(self._generations[index].prompt_ids)
        if self._body.return_tokens:
            choice["tokens"] = tokens_json(delta.tokens)
        return choice


def tokens_json(tokens: Sequence[TextToken]) -> list[dict[str, Any]]:
    """Tokens one by one, for clients that show where drafting helped."""
    return [{"id": token.token_id, "text": token.text, "drafted": token.drafted} for token in tokens]
