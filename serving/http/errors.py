"""Every refusal in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dsv4.errors import Dsv4Error, EngineError, OverloadedError, RequestError, UnavailableError, UnknownModelError

logger = logging.getLogger("dsv4.http")


class RequestTimeoutError(EngineError):
    """A request ran longer than the server allows."""


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


class PayloadTooLargeError(RequestError):
    """A body above the server's limit."""


class SlowBodyError(RequestError):
    """A body that takes too long to arrive."""


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ErrorResponse(JSONResponse):
    """An error object in ASCII: a message may quote a client's half surrogate, which UTF-8 cannot carry."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def describe(error: Dsv4Error) -> tuple[int, dict[str, Any], dict[str, str]]:
    """HTTP status, body and headers of an expected failure."""
    match error:
        case OverloadedError():
            body = error_body(str(error), kind="overloaded_error", code="overloaded")
            return 503, body, {"Retry-After": str(math.ceil(error.retry_after_s))}
        case UnknownModelError():
            code = error.code or "model_not_found"
            return 404, error_body(str(error), kind="invalid_request_error", param=error.param, code=code), {}
        case PayloadTooLargeError():
            return 413, error_body(str(error), kind="invalid_request_error", code="payload_too_large"), {}
        case SlowBodyError():
            return 408, error_body(str(error), kind="timeout_error", code="body_timeout"), {}
        case RequestError():
            body = error_body(str(error), kind="invalid_request_error", param=error.param, code=error.code)
            return 400, body, {}
        case RequestTimeoutError():
            return 504, error_body(str(error), kind="timeout_error", code="request_timeout"), {}
        case UnavailableError():
            return 503, error_body(str(error), kind="server_error", code="unavailable"), {"Retry-After": "5"}
        case EngineError():
            return 500, error_body(str(error), kind="server_error", code="engine_error"), {}
    return 500, error_body(str(error), kind="server_error"), {}


def unexpected(error: Exception) -> dict[str, Any]:
    """The body for a mistake of our own, which goes to the log and not to the client."""
    logger.error("a request failed", exc_info=error)
    return error_body("internal error; the server's log has the details", kind="server_error")


def install(app: FastAPI) -> None:
    """Makes every expected exception of `app` leave as an error object; `AccessLog` sees to the others."""

    @app.exception_handler(Dsv4Error)
    async def expected(request: Request, error: Dsv4Error) -> ErrorResponse:
        status, body, headers = describe(error)
        return ErrorResponse(body, status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> ErrorResponse:
        return await expected(request, explain(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> ErrorResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is nothing at {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed at {request.url.path}"
        body = error_body(message, kind="invalid_request_error")
        return ErrorResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # only ever seen in the access log


def explain(errors: Sequence[Any]) -> RequestError:
    """The first of pydantic's complaints as one sentence with the field's path."""
    first = errors[0]
    kind, path = first["type"], list(first["loc"])
    if path and path[0] == "body":
        path = path[1:]
    if kind == "json_invalid":
        reason = first["ctx"]["error"]
        return RequestError(f"the body is not JSON: {reason} at character {path[0]}", code="invalid_json")
    if kind == "model_attributes_type" and not path:
        return RequestError(
            "the body must be a JSON object sent with the header Content-Type: application/json", code="invalid_json"
        )
    if kind == "missing" and not path:
        return RequestError("the body is empty; send a JSON object", code="invalid_json")
    param = _path(path)
    if kind == "extra_forbidden":
        return RequestError(f"unknown field {param!r}", param=param, code="unknown_field")
    if kind == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_field")
    detail = first["msg"].removeprefix("Value error, ")
    detail = detail[:1].lower() + detail[1:]
    return RequestError(f"{param}: {detail}" if param else detail, param=param or None, code="invalid_value")


def _path(parts: Sequence[str | int]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
