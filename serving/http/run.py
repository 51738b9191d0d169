"""Runs an app under uvicorn, and stops it without cutting anybody off."""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from serving.http.context import Server

logger = logging.getLogger("dsv4.http")


def serve(app: FastAPI, host: str = "127.0.0.1", port: int = 8000, *, drain_timeout_s: float = 30.0) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish for at most `drain_timeout_s`.

    While draining, `/health` says 503 and new requests are turned away with Retry-After. A second SIGINT ends at once.
    """
    server: Server = app.state.server
    if not server.settings.api_keys and not _is_loopback(host):
        logger.warning("listening on %s without an API key: anyone who can reach this port can use it", host)
    _raise_file_limit(2 * server.settings.max_connections)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=drain_timeout_s,
        timeout_keep_alive=30,
        limit_concurrency=server.settings.max_connections,
    )
    _DrainingServer(config, server).run()


def _raise_file_limit(wanted: int) -> None:
    """Every connection is an open file, and shells often allow only 1,024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning("only %d open files are allowed; raise the limit (ulimit -n) to serve more clients", allowed)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _DrainingServer(uvicorn.Server):
    """Uvicorn, saying how the shutdown goes."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that led to an orderly end is not raised again: the exit code is 0."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._server.draining = True
        progress = asyncio.ensure_future(self._report())
        try:
            await super().shutdown(sockets)
        finally:
            progress.cancel()

    async def _report(self) -> None:
        while count := len(self.server_state.tasks):
            logger.info("draining: %d requests still running", count)
            await asyncio.sleep(1.0)
