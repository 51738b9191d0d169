"""Runs an app under uvicorn, and stops it without cutting anybody off."""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from fastapi import FastAPI

from serving.http.address import share
from serving.http.context import Server

logger = logging.getLogger("dsv4.http")


_LAST_WORDS_S = 5.0  # for answers of requests that a shutdown ends


def serve(app: FastAPI, sockets: Sequence[socket.socket], *, drain_timeout_s: float = 30.0) -> None:
    """Serves on `sockets` (see `address.hold`) until SIGTERM or SIGINT, then lets running requests finish.

    While draining, `/health` says 503 and new requests are turned away with Retry-After. Requests that still run after
    `drain_timeout_s` are answered with an error. A second SIGINT ends at once.
    """
    server: Server = app.state.server
    exposed = [
        host for host, *_ in (sock.getsockname() for sock in sockets) if not ipaddress.ip_address(host).is_loopback
    ]
    if exposed and not server.settings.api_keys:
        logger.warning(
            "listening on %s without an API key: anyone who can reach this port can use it", ", ".join(exposed)
        )
    _raise_file_limit(2 * server.settings.max_connections)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=drain_timeout_s + _LAST_WORDS_S,
        timeout_keep_alive=30,
    )
    share(sockets)
    _DrainingServer(config, server, drain_timeout_s).run(list(sockets))


def _raise_file_limit(wanted: int) -> None:
    """Every connection is an open file, and shells often allow only 1,024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning("only %d open files are allowed; raise the limit (ulimit -n) to serve more clients", allowed)


class _DrainingServer(uvicorn.Server):
    """Uvicorn, saying how the shutdown goes, to the log and to requests it cannot wait for."""

    def __init__(self, config: uvicorn.Config, server: Server, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._server = server
        self._drain_timeout_s = drain_timeout_s
        server.connections = lambda: len(self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that led to an orderly end is not raised again: the exit code is 0."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._server.draining = True
        progress = asyncio.ensure_future(self._report())
        end = asyncio.get_running_loop().call_later(self._drain_timeout_s, self._end)
        try:
            await super().shutdown(sockets)
        finally:
            progress.cancel()
            end.cancel()

    def _end(self) -> None:
        count = len(self.server_state.tasks)
        logger.warning("%d requests did not finish within %g s and are ended", count, self._drain_timeout_s)
        self._server.lifetime.end()

    async def _report(self) -> None:
        while count := len(self.server_state.tasks):
            logger.info("draining: %d requests still running", count)
            await asyncio.sleep(1.0)
