"""POST /v1/chat/completions: messages in; reasoning, content and tool calls out."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from dsv4.errors import RequestError
from serving.generation import Delta, Generation
from serving.http.chat import encode, encode_chat
from serving.http.chat_schema import ChatBody, Prompted
from serving.http.completions import tokens_json
from serving.http.context import Server, close_all, new_id, off_loop, usage_json
from serving.http.dsml import ChatDelta, ChatParser, ToolDelta
from serving.http.lifetime import JsonResponse
from serving.http.logprobs import chat_logprobs
from serving.request import FinishReason


def router(server: Server) -> APIRouter:
    """The routes over one server."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answers a conversation; with `stream` as server-sent events."""
        settings = server.settings
        model = server.check_model(body.model)
        body.check_output()
        thinking = body.thinking(settings.thinking)
        params = body.sampling(
            settings.defaults,
            logprobs=server.check_logprobs((body.top_logprobs or 0) if body.logprobs else None, "logprobs"),
            max_tokens=body.max_completion_tokens or body.max_tokens,
        )
        prompt_ids = await chat_ids(server, body)
        params = replace(params, grammar=await _grammar(server, body, thinking=thinking))
        name = new_id("chatcmpl")
        (generation,) = server.generate(name, [prompt_ids], params, param="messages")
        answer = _Answer(server, body, name, model, generation, thinking)

        def close() -> None:
            close_all([generation])
            server.log(request, [generation])

        if body.wants_stream(settings.defaults):
            return server.stream(answer.events(), on_close=close)
        try:
            whole = await server.lifetime.run(request.receive, answer.collect())
        finally:
            close()
        return JsonResponse(whole)

    return routes


async def chat_ids(server: Server, body: Prompted) -> list[int]:
    """The prompt of a conversation. Raises RequestError."""
    if server.no_chat:
        raise RequestError(server.no_chat, code="unsupported_value")
    body.check_tools()
    segments = encode_chat(body, server.texts, thinking=body.thinking(server.settings.thinking))
    return await off_loop(sum(map(len, segments)), encode, server.tokenizer, segments)


async def _grammar(server: Server, body: ChatBody, *, thinking: bool) -> object | None:
    """The constraint a request asks for: a format, a call it must make, or strict tools it may call."""
    wanted = body.response_format.type if body.response_format else "text"
    functions = [tool.function.model_dump() for tool in body.tools or ()]
    free = body.choice == "none" or (body.choice == "auto" and not any(f["strict"] for f in functions))
    if free and wanted == "text":
        return None
    grammars, param = server.grammars, "response_format" if free else "tool_choice"
    if grammars is None:
        raise RequestError(
            f"{param}: this server cannot constrain the output; install the extra dsv4[grammar], or use tool_choice "
            "auto without strict tools",
            param=param,
            code="unsupported_value",
        )
    # Compiling takes up to a second: in a thread, so that other clients' streams go on.
    if not free:
        parallel = body.parallel_tool_calls is not False
        return await asyncio.to_thread(
            grammars.tools, functions, choice=body.choice, parallel=parallel, thinking=thinking
        )
    if wanted == "json_object":
        return await asyncio.to_thread(grammars.json_object, thinking=thinking)
    schema = body.response_format.json_schema.schema_ or {}
    return await asyncio.to_thread(grammars.json_schema, schema, thinking=thinking)


def _max_calls(body: ChatBody) -> int | None:
    """How many calls are shown: none without tools to call, one where the client takes them one at a time."""
    if not body.tools or body.choice == "none":
        return 0
    return 1 if body.parallel_tool_calls is False else None


class _Answer:
    """Builds one request's response objects."""

    def __init__(
        self, server: Server, body: ChatBody, name: str, model: str, generation: Generation, thinking: bool
    ) -> None:
        self._server = server
        self._body = body
        self._generation = generation
        self._parser = ChatParser(server.tokenizer, thinking=thinking, max_calls=_max_calls(body))
        self._frame = {"id": name, "created": int(time.time()), "model": model}

    async def collect(self) -> dict[str, Any]:
        """The non-streaming response."""
        whole, tokens, calls = ChatDelta(), [], []
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for delta, parsed in deltas:
                tokens += delta.tokens
                whole.reasoning += parsed.reasoning
                whole.content += parsed.content
                for piece in parsed.tool_calls:
                    if piece.id is not None:
                        calls.append(ToolDelta(piece.index, piece.id, piece.name))
                    calls[piece.index].arguments += piece.arguments
        message: dict[str, Any] = {
            "role": "assistant",
            "content": whole.content or (None if calls else ""),
            "refusal": None,
        }
        if whole.reasoning and self._body.include_reasoning is not False:
            message |= {"reasoning_content": whole.reasoning, "reasoning": whole.reasoning}
        if calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        choice = self._extras(Delta(tokens), with_prompt=True) | {
            "index": 0,
            "message": message,
            "finish_reason": self._finish_reason(),
        }
        return self._frame | {"object": "chat.completion", "choices": [choice], "usage": self._usage()}

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a stream: the role, one per step that has news, the finish reason, then usage if asked for."""
        yield self._chunk({"role": "assistant", "content": ""}, self._extras(Delta(), with_prompt=True))
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for delta, parsed in deltas:
                news = self._news(parsed)
                extras = self._extras(delta)
                if news or extras.get("logprobs") or (delta.tokens and len(extras) > 1):
                    yield self._chunk(news, extras)
        yield self._chunk({}, {}, self._finish_reason())
        if self._body.include_usage():
            yield self._frame | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    async def _deltas(self) -> AsyncGenerator[tuple[Delta, ChatDelta]]:
        async for delta in self._generation:
            yield delta, self._parser.feed(delta.tokens)
        yield Delta(), self._parser.finish(self._generation.finish_reason)

    def _news(self, parsed: ChatDelta) -> dict[str, Any]:
        news: dict[str, Any] = {}
        if parsed.reasoning and self._body.include_reasoning is not False:
            news |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
        if parsed.content:
            news["content"] = parsed.content
        if parsed.tool_calls:
            news["tool_calls"] = [_tool_json(piece) for piece in parsed.tool_calls]
        return news

    def _chunk(self, delta: dict[str, Any], extras: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason} | extras
        chunk = self._frame | {"object": "chat.completion.chunk", "choices": [choice]}
        return chunk | {"usage": None} if self._body.include_usage() else chunk

    def _extras(self, delta: Delta, *, with_prompt: bool = False) -> dict[str, Any]:
        """Fields about tokens: logprobs, and what this server's extensions ask for."""
        extras: dict[str, Any] = {"logprobs": None}
        if self._body.logprobs and delta.tokens:
            extras["logprobs"] = chat_logprobs(self._server.tokenizer, delta.tokens)
        if self._body.return_token_ids:
            extras["token_ids"] = [token.token_id for token in delta.tokens]
            extras["draft_mask"] = [token.drafted for token in delta.tokens]
            if with_prompt:
                extras["prompt_token_ids"] = list(self._generation.prompt_ids)
        if self._body.return_tokens:
            extras["tokens"] = tokens_json(delta.tokens)
        return extras

    def _finish_reason(self) -> str:
        reason = self._generation.finish_reason
        if reason is FinishReason.STOP and self._parser.called:
            return "tool_calls"
        return reason.value

    def _usage(self) -> dict[str, Any]:
        return usage_json(self._generation.usage, reasoning_tokens=self._parser.reasoning_tokens)


def _tool_json(piece: ToolDelta) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
