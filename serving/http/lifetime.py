"""How long a request may live: until it is done, its client leaves, or its time is up."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from dsv4.errors import Dsv4Error
from serving.http.errors import ClientGoneError, RequestTimeoutError, describe, unexpected
from serving.http.settings import HttpSettings

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Runs `work` to its end; cancels it as soon as the client leaves or the time is up.

    The request's body must have been read. Raises ClientGoneError, RequestTimeoutError, or what `work` raises.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        done, _ = await asyncio.wait({task, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if watcher in done:
            raise ClientGoneError
        raise RequestTimeoutError(f"the request did not finish within {timeout_s:g} s; ask for fewer tokens")
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encode_json(value: Any) -> bytes:
    """Compact UTF-8 JSON."""
    return _COMPACT.encode(value).encode()


class JsonResponse(Response):
    """A JSON answer without FastAPI's second pass over it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class EventStream(Response):
    """Server-sent events: one per item of `events`, an error event where it fails, then `[DONE]`.

    on_close runs in every case, also when the client leaves in the middle of a step.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[dict[str, Any]], *, settings: HttpSettings, on_close: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._settings = settings
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(data: bytes, *, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self._settings.stall_timeout_s):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                raise ClientGoneError from None

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await while_connected(receive, self._pump(emit), self._settings.request_timeout_s)
            except Dsv4Error as error:
                await emit(_event(describe(error)[1]))
            except (ClientGoneError, asyncio.CancelledError):
                raise
            except Exception as error:  # the headers are out: only an event can tell the client
                await emit(_event(unexpected(error)))
            await emit(b"data: [DONE]\n\n", more=False)
        except ClientGoneError:
            scope.get("state", {}).setdefault("access", {})["client_gone"] = True
        finally:
            self._on_close()

    async def _pump(self, emit: Callable[[bytes], Awaitable[None]]) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await emit(_event(event))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
