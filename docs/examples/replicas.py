"""One address for several servers: `python docs/examples/replicas.py http://a:8000 http://b:8000 --port 9000`.

A request goes where its prefix has been before, because that server has it cached, unless that one has noticeably more to do
than the idlest; a server that is down or answers 503 is passed over and the request is tried on the next. SIGTERM drains: no new
connections, running answers end first. Needs httpx besides dsv4 itself.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

PREFIX_CHARS = 1024  # of the prompt: what two requests must have in common to be sent to one server
SLACK = 4  # running requests that a prefix is worth
CHECK_S = 1.0
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length"}


@dataclass(eq=False)
class Replica:
    """A server, whether it is healthy, and how many requests of ours it runs."""

    base: str
    healthy: bool = True
    running: int = 0

    def affinity(self, prefix: bytes) -> bytes:
        """The greatest wins: each prefix has an order of servers, and one server's death moves only its own prefixes."""
        return hashlib.sha256(prefix + self.base.encode()).digest()


class Relay(StreamingResponse):
    """A server's answer as it comes. Ends with it, or when the client leaves: the server then aborts the request."""

    def __init__(self, answer: httpx.Response, replica: Replica) -> None:
        kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
        super().__init__(answer.aiter_raw(), answer.status_code, kept)
        self._answer, self._replica = answer, replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._replica.running -= 1
            await self._answer.aclose()


def prefix_of(body: bytes) -> bytes:
    """What decides about the cache: the beginning of the prompt or of the conversation."""
    try:
        request = json.loads(body)
        return json.dumps(request.get("messages") or request.get("prompt"), ensure_ascii=False)[:PREFIX_CHARS].encode()
    except (ValueError, AttributeError):
        return b""  # whoever gets it will say what is wrong with it


def order(replicas: Sequence[Replica], prefix: bytes) -> list[Replica]:
    """Healthy servers, the one to try first first."""
    healthy = [replica for replica in replicas if replica.healthy]
    least = min((replica.running for replica in healthy), default=0)
    return sorted(
        healthy,
        key=lambda r: (r.running <= least + SLACK, r.affinity(prefix) if r.running <= least + SLACK else -r.running),
        reverse=True,
    )


def create_proxy(bases: Sequence[str]) -> Starlette:
    """An ASGI app in front of servers with these base URLs."""
    replicas = [Replica(base.rstrip("/")) for base in bases]
    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None))

    async def check(replica: Replica) -> None:
        try:
            replica.healthy = (await client.get(replica.base + "/health", timeout=5.0)).status_code == 200
        except httpx.TransportError:
            replica.healthy = False

    async def keep_checking() -> None:
        while True:
            await asyncio.gather(*map(check, replicas))
            await asyncio.sleep(CHECK_S)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        checking = asyncio.create_task(keep_checking())
        yield
        checking.cancel()
        await client.aclose()

    async def forward(request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        refusal: Response = JSONResponse(
            {
                "error": {
                    "message": "no healthy replica",
                    "type": "overloaded_error",
                    "param": None,
                    "code": "overloaded",
                }
            },
            503,
            {"Retry-After": "5"},
        )
        for replica in order(replicas, prefix_of(body)):
            replica.running += 1
            try:
                asked = client.build_request(
                    request.method, replica.base + request.url.path, headers=headers, content=body,
                    params=request.query_params,
                )  # fmt: skip
                answer = await client.send(asked, stream=True)
            except httpx.TransportError:  # nothing has been generated, or nothing that anyone has seen
                replica.running -= 1
                replica.healthy = False
                continue
            except BaseException:
                replica.running -= 1
                raise
            if answer.status_code == 503:
                refusal = Response(await answer.aread(), 503, {"Retry-After": answer.headers.get("Retry-After", "5")})
                await answer.aclose()
                replica.running -= 1
                continue
            return Relay(answer, replica)
        return refusal

    async def health(request: Request) -> Response:
        healthy = [replica.base for replica in replicas if replica.healthy]
        return JSONResponse({"status": "ok" if healthy else "error", "replicas": healthy}, 200 if healthy else 503)

    routes = [Route("/health", health), Route("/{path:path}", forward, methods=["GET", "POST"])]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.replicas = replicas
    return app


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bases", nargs="+", metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--drain", type=int, default=60, help="seconds that running answers have at a shutdown")
    args = parser.parse_args()
    uvicorn.run(create_proxy(args.bases), host=args.host, port=args.port, timeout_graceful_shutdown=args.drain)


if __name__ == "__main__":
    main()
