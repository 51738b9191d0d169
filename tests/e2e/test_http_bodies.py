"""Bodies that are too large, too slow or not looked at: refused, and the refusal arrives."""

import json
import socket

import pytest

from tests.support.toy_engine import ToyEngine


def write_then_read(client, *fields, body=b""):
    """The answer to a client that writes its whole request before it reads. Raises where the connection is reset."""
    url = client.base_url
    with socket.create_connection((url.host, url.port), timeout=60) as sock:
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *fields]
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = bytearray()
        while data := sock.recv(65536):
            answer += data
        return bytes(answer)


def test_a_body_that_never_ends_is_given_up(toy_server):
    client = toy_server(ToyEngine(), body_timeout_s=0.1)
    answer = write_then_read(client, "Content-Length: 100", body=b"x" * 50)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout")


def test_body_limit_by_header_and_by_count(toy_server):
    client = toy_server(ToyEngine(), max_body_bytes=1000)
    big = json.dumps({"prompt": "x" * 2000}).encode()
    headers = {"Content-Type": "application/json"}
    declared = client.post("/v1/completions", content=big, headers=headers)
    chunked = client.post("/v1/completions", content=iter([big[:900], big[900:]]), headers=headers)
    for response in (declared, chunked):
        assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert client.get("/health").status_code == 200


def test_ten_megabytes_too_much_are_answered(toy_server):
    client = toy_server(ToyEngine(), max_body_bytes=2**20)
    headers = {"Content-Type": "application/json"}
    response = client.post("/v1/completions", content=b"x" * (8 * 2**20), headers=headers)
    assert response.status_code == 413
    asked = client.post("/v1/completions", content=b"x" * 2**21, headers=headers | {"Expect": "100-continue"})
    assert asked.status_code == 413
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("expect", [["Expect: 100-continue"], []])
def test_a_refusal_is_not_lost_on_a_client_that_writes_first(toy_server, expect):
    """The connection ends in order: a reset would take the answer along."""
    client = toy_server(ToyEngine(), max_body_bytes=2**20)
    body = b"x" * 2**22
    declared = write_then_read(client, f"Content-Length: {len(body)}", *expect, body=body)
    assert declared.startswith(b"HTTP/1.1 413 ") and b'"payload_too_large"' in declared
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    counted = write_then_read(client, "Transfer-Encoding: chunked", *expect, body=chunks)
    assert counted.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    keyed = toy_server(ToyEngine(), api_keys=("k",))
    unknown = write_then_read(keyed, f"Content-Length: {len(body)}", "Connection: close", *expect, body=body)
    assert unknown.startswith(b"HTTP/1.1 401 ") and b'"invalid_api_key"' in unknown


def test_a_refused_client_is_answered_at_once_and_then_let_go(toy_server):
    """Whether it waits for a word that does not come, or never stops sending."""
    client = toy_server(ToyEngine(), max_body_bytes=1000, body_timeout_s=0.2)
    waits = write_then_read(client, "Content-Length: 5000", "Expect: 100-continue")
    assert waits.startswith(b"HTTP/1.1 413 ")
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(OSError, match=r"reset|pipe"):
            for _ in range(10**6):
                sock.sendall(b"400\r\n%s\r\n" % (b"x" * 1024))
