"""An address that is ours from before the model is loaded until the server ends."""

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from dsv4.errors import ConfigError

# What an address family says where the machine does not have it, such as ::1 of "localhost" without IPv6.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextlib.contextmanager
def hold(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to every address of `host`, none of which listens yet: until then clients are refused.

    Nobody else can take the port in the meantime. Port 0 is any free one, the same for all addresses. The sockets are
    closed at the end. Raises ConfigError where the address is taken or not of this machine.
    """
    with contextlib.ExitStack() as stack:
        try:
            held = _bind_all(stack, host, port)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error.strerror or error})") from None
        yield held


def share(held: Sequence[socket.socket]) -> None:
    """Allows what `hold` forbids, for the moment before listening: old connections of the port may still linger."""
    for sock in held:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bind_all(stack: contextlib.ExitStack, host: str, port: int) -> list[socket.socket]:
    held: list[socket.socket] = []
    absent: OSError | None = None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, (name, _, *rest) in dict.fromkeys(found):
        if not port and held:
            port = held[0].getsockname()[1]
        try:
            held.append(stack.enter_context(_bound(family, (name, port, *rest))))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            absent = error
    if absent and not held:
        raise absent
    return held


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    """A socket that alone is bound to `address`, even if connections of an earlier server linger there.

    Only SO_REUSEADDR gets past those, and would let the next one in as well. So it is asked for second, and dropped.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # 0.0.0.0 is another address
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        sock.close()
        raise
    return sock
