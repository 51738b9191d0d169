"""The manners around every route, as plain ASGI: request ids and access log, connections, API keys, body limit."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4.errors import OverloadedError, RequestError
from serving.http.errors import (
    ClientGoneError,
    ErrorResponse,
    PayloadTooLargeError,
    SlowBodyError,
    describe,
    error_body,
    unexpected,
)
from serving.http.farewell import Farewell

access_logger = logging.getLogger("dsv4.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET = {"/health", "/metrics", "/metrics/json"}
_OPEN = {"/", "/health"}


class AccessLog:
    """Gives each request an id (the client's `X-Request-Id`, if well formed) and writes one JSON line when it is over.

    The line never holds text of prompts or completions. Health checks and scrapes are logged at DEBUG. A mistake of our
    own ends here as a 500: further out, the server would cut the connection under the client's next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        start, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:
                raise
            await ErrorResponse(unexpected(error), 500)(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            if access_logger.isEnabledFor(level):
                entry = {
                    "id": request_id,
                    "client": (scope.get("client") or ("",))[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.monotonic() - start, 6),
                    **state.get("access", {}),
                }
                access_logger.log(level, "%s", json.dumps(entry))


class ConnectionLimit:
    """Turns requests away while more connections are open than the server is to have; who asks for its health still hears.

    connections: how many are open now, this one included.
    """

    def __init__(self, app: ASGIApp, most: int, connections: Callable[[], int], farewell: Farewell) -> None:
        self._app = app
        self._most = most
        self._connections = connections
        self._farewell = farewell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET or self._connections() <= self._most:
            return await self._app(scope, receive, send)
        error = OverloadedError(f"the server has its {self._most} connections: retry later")
        status, body, headers = describe(error)
        await self._farewell.answer(ErrorResponse(body, status, headers), scope, receive, send)


class ApiKeys:
    """Wants `Authorization: Bearer KEY` everywhere but at `/health` (load balancers have no keys) and at the page `/`.

    `/metrics` wants a key too: Prometheus can send one, and traffic numbers are not everybody's. Every key is compared,
    in constant time, so that an answer's delay tells nothing. A body is not looked at before its key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], farewell: Farewell) -> None:
        self._app = app
        self._farewell = farewell
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or scope["method"] == "OPTIONS" or self._knows(scope):
            return await self._app(scope, receive, send)
        body = error_body(
            "a valid API key is needed: send the header Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
        )
        refusal = ErrorResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        await self._farewell.answer(refusal, scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses bodies above a size, as soon as it is known, and bodies that dawdle."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, farewell: Farewell) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._farewell = farewell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        try:
            if declared.isdecimal() and int(declared) > self._max_bytes:
                raise self._too_large()
            body = await self._read(receive)
        except RequestError as error:
            status, content, extra = describe(error)
            return await self._farewell.answer(ErrorResponse(content, status, extra), scope, receive, send)
        except ClientGoneError:
            return
        whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise SlowBodyError(f"the body did not arrive within {self._timeout_s:g} s") from None

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than the {self._max_bytes} bytes this server accepts")
