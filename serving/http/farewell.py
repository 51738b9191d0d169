"""The last answer on a connection, given before the request's body was read."""

import asyncio
from dataclasses import dataclass

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

_SILENCE_S = 5.0  # a client that sends nothing for so long has read its answer


@dataclass(frozen=True, kw_only=True)
class Farewell:
    """Answers at once, then reads and throws away what the client still sends, and closes the connection.

    The kernel resets a connection that is closed over unread bytes, and a reset takes the answer along: a client that
    writes its whole request before it reads would never see why it was refused. Reading on is bounded in bytes and in
    seconds; it also ends when the client has sent everything, leaves, or falls silent.
    """

    max_bytes: int
    timeout_s: float

    async def answer(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends `response`, which is whole for the client (it has a length) while the server holds its end back."""

        async def hold_end(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        response.headers["Connection"] = "close"
        await response(scope, receive, hold_end)
        await self._discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        left = self.max_bytes
        try:
            async with asyncio.timeout(self.timeout_s):
                while left >= 0:
                    async with asyncio.timeout(_SILENCE_S):
                        message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body"):  # the end of the body, or a client that left
                        return
        except TimeoutError:
            return
