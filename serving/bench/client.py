"""A small streaming client for `/v1/completions`: one socket per request, a time stamp at each event, no dependencies."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dsv4.errors import ConfigError, EngineError
from serving.bench.prompts import Prompt
from serving.bench.records import Record, apportion


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An OpenAI server. `base` ends in /v1 or stands before it; extended: it knows `ignore_eos` and `return_token_ids`."""

    base: str
    model: str | None = None
    api_key: str | None = None
    extended: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {self.base!r}, expected something like http://127.0.0.1:8000/v1")

    @property
    def root(self) -> str:
        return self.base.rstrip("/").removesuffix("/v1")

    async def request(self, method: str, path: str, body: Any = None) -> AsyncIterator[bytes]:
        """The response's body, piece by piece. Raises EngineError for any status but 200, OSError if nobody answers."""
        parts = urlsplit(self.root + path)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=1 << 20)
        try:
            writer.write(self._head(method, parts.path, f"{parts.hostname}:{port}", body))
            status = int((await reader.readline() or b"HTTP/1.1 0").split()[1])
            headers = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            pieces = _body(reader, headers)
            if status != 200:
                text = b"".join([piece async for piece in pieces])[:500].decode(errors="replace")
                raise EngineError(f"{method} {path}: HTTP {status} {text}")
            async for piece in pieces:
                yield piece
        finally:
            writer.close()

    def _head(self, method: str, path: str, host: str, body: Any) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Accept: */*",
                 "Content-Type: application/json", f"Content-Length: {len(data)}"]  # fmt: skip
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join([*lines, "", ""]).encode() + data

    async def get(self, path: str) -> bytes:
        """A whole response."""
        return b"".join([piece async for piece in self.request("GET", path)])

    async def complete(self, prompt: Prompt, max_tokens: int, due: float) -> Record:
        """Streams one greedy completion. Failures are told in the record: a benchmark goes on."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | ({"model": self.model} if self.model else {})
        body |= {"ignore_eos": True, "return_token_ids": True} if self.extended else {}
        record = Record(due)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._stream(body, record)
            if not record.arrivals:
                record.error = "the stream ended without a token"
        except (OSError, EngineError, ValueError, asyncio.IncompleteReadError) as error:
            record.error = f"{type(error).__name__}: {error}"
        return record

    async def _stream(self, body: dict[str, Any], record: Record) -> None:
        seen: list[tuple[float, int | None, int]] = []  # time, tokens if told, bytes of text
        total = None
        async for at, event in _events(self.request("POST", "/v1/completions", body)):
            if "error" in event:
                raise EngineError(json.dumps(event["error"]))
            for choice in event.get("choices") or ():
                text, ids = choice.get("text") or "", choice.get("token_ids")
                if text or ids:
                    seen.append((at, None if ids is None else len(ids), len(text.encode())))
            if usage := event.get("usage"):
                total = usage.get("completion_tokens")
                record.prompt_tokens = usage.get("prompt_tokens") or 0
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts = [count for _, count, _ in seen]
        if None in counts:
            if total is None:
                raise EngineError("the server told neither token ids nor usage: tokens cannot be counted")
            counts = apportion(total, [size for *_, size in seen])
        record.arrivals = [(at, count) for (at, *_), count in zip(seen, counts, strict=True) if count]


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Server-sent events as (time of arrival, JSON), up to [DONE]."""
    rest = b""
    async for piece in pieces:
        at = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield at, json.loads(data)
