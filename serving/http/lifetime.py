"""How long a request may live: until it is done, its client leaves, its time is up, or the server ends."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from dsv4.errors import Dsv4Error, UnavailableError
from serving.http.errors import ClientGoneError, RequestTimeoutError, describe, unexpected

T = TypeVar("T")


class Lifetime:
    """Runs the work of one server's requests, each for as long as it may live."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ended = False
        self._ends: set[asyncio.Future[None]] = set()

    def end(self) -> None:
        """Ends all work, running or still to come: a shutdown has waited long enough."""
        self._ended = True
        for end in self._ends:
            if not end.done():
                end.set_result(None)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end; cancels it as soon as the client leaves, the time is up or the server ends.

        The request's body must have been read.
        Raises: ClientGoneError, RequestTimeoutError, UnavailableError, or what `work` raises.
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(receive))
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        if self._ended:
            end.set_result(None)
        try:
            done, _ = await asyncio.wait(
                {task, watcher, end}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if task in done:
                return task.result()
            if watcher in done:
                raise ClientGoneError
            if end in done:
                raise UnavailableError("the server shut down before the request was finished; send it to another one")
            raise RequestTimeoutError(f"the request did not finish within {self._timeout_s:g} s; ask for fewer tokens")
        finally:
            self._ends.discard(end)
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
        self,
        events: AsyncGenerator[dict[str, Any]],
        *,
        lifetime: Lifetime,
        stall_timeout_s: float,
        on_close: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._lifetime = lifetime
        self._stall_timeout_s = stall_timeout_s
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(data: bytes, *, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                raise ClientGoneError from None

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._lifetime.run(receive, self._pump(emit))
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
