"""The manners around every route, as plain ASGI: request ids and access log, API keys, body limit."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4.errors import RequestError
from serving.http.errors import (
    ClientGoneError,
    ErrorResponse,
    PayloadTooLargeError,
    SlowBodyError,
    describe,
    error_body,
    unexpected,
)

access_logger = logging.getLogger("dsv4.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET = {"/health", "/metrics", "/metrics/json"}
_OPEN = {"/", "/health"}
_PATIENCE = 8  # times the allowed size that is read of a body that is too large


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


class ApiKeys:
    """Wants `Authorization: Bearer KEY` everywhere but at `/health` (load balancers have no keys) and at the page `/`.

    `/metrics` wants a key too: Prometheus can send one, and traffic numbers are not everybody's. Every key is compared,
    in constant time, so that an answer's delay tells nothing.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or scope["method"] == "OPTIONS" or self._knows(scope):
            return await self._app(scope, receive, send)
        body = error_body(
            "a valid API key is needed: send the header Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
        )
        await ErrorResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses bodies above a size, and bodies that dawdle.

    What is too much is still read, up to a bound, and thrown away: a client that is cut off while it sends never sees
    the answer. One that asked first (`Expect: 100-continue`) is answered at once.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        try:
            if "expect" in headers and declared.isdecimal() and int(declared) > self._max_bytes:
                raise self._too_large()
            body = await self._read(receive)
        except RequestError as error:
            status, content, extra = describe(error)
            # Some of the body may be unread, so the connection cannot be used again.
            return await ErrorResponse(content, status, {**extra, "Connection": "close"})(scope, receive, send)
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
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while size <= _PATIENCE * self._max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    size += len(message.get("body", b""))
                    if size <= self._max_bytes:
                        body += message.get("body", b"")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise SlowBodyError(f"the body did not arrive within {self._timeout_s:g} s") from None
        if size > self._max_bytes:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than the {self._max_bytes} bytes this server accepts")
