"""The server's address: held before it listens, refused to everybody else, listening when asked to."""

import errno
import socket

import pytest

from dsv4.errors import ConfigError
from serving.http.address import hold, share


def taken(port: int, reuse: bool) -> bool:
    """Whether another program is refused the port."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            other.bind(("127.0.0.1", port))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return True
    return False


def port_with_a_lingering_connection() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            listener.accept()[0].close()  # who closes first keeps the connection in TIME_WAIT
            client.recv(1)
    assert taken(address[1], reuse=False) and not taken(address[1], reuse=True)
    return address[1]


@pytest.mark.parametrize("lingering", [False, True])
def test_nobody_else_gets_a_held_address(lingering: bool) -> None:
    port = port_with_a_lingering_connection() if lingering else 0
    with hold("127.0.0.1", port) as (sock,):
        port = sock.getsockname()[1]
        assert taken(port, reuse=False) and taken(port, reuse=True)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with (
            pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: cannot listen there"),
            hold("127.0.0.1", port),
        ):
            pass
        share([sock])
        sock.listen()
        socket.create_connection(("127.0.0.1", port)).close()


def test_every_address_of_a_name_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str, port: int, **_: object) -> list:
        kind = socket.SOCK_STREAM
        return [
            (socket.AF_INET6, kind, 6, "", ("2001:db8::1", port, 0, 0)),  # not of this machine: left out
            (socket.AF_INET, kind, 6, "", ("127.0.0.1", port)),
            (socket.AF_INET, kind, 6, "", ("127.0.0.2", port)),
            (socket.AF_INET, kind, 6, "", ("127.0.0.1", port)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with hold("name", 0) as sockets:
        names = [sock.getsockname() for sock in sockets]
    assert [host for host, _ in names] == ["127.0.0.1", "127.0.0.2"] and names[0][1] == names[1][1] > 0


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen there"), hold("192.0.2.1", 8000):
        pass
