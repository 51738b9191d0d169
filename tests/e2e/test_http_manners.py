"""Limits and manners: disconnects, stalls, slow clients, keys, sizes, drain, logs, metrics."""

import asyncio
import json
import logging
import resource
import socket
import time

import pytest

from dsv4.errors import ConfigError
from serving.http.settings import GenerationDefaults, HttpSettings
from tests.e2e.conftest import wait_until
from tests.support.toy_engine import ToyEngine


def raw_request(client, body):
    """A socket on which the request has been written and nothing read."""
    data = json.dumps(body).encode()
    url = client.base_url
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that a reader who stops is felt soon
    sock.connect((url.host, url.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + data)
    return sock


@pytest.mark.parametrize("stalled", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts_within_a_step(toy_server, stream, stalled):
    engine = ToyEngine(delay_s=0.01)
    client = toy_server(engine)
    sock = raw_request(client, {"prompt": [9], "max_tokens": 4000, "stream": stream})
    if stream:
        assert b"200 OK" in sock.recv(4096)
    assert wait_until(lambda: engine.live)
    engine.stalled = stalled
    sock.close()
    assert wait_until(lambda: not engine.live)
    assert len(engine.aborted) == 1


def test_disconnect_aborts_every_prompt(toy_server):
    engine = ToyEngine(delay_s=0.01)
    client = toy_server(engine)
    sock = raw_request(client, {"prompt": [[9], [8], [7]], "max_tokens": 4000, "stream": True})
    sock.recv(4096)
    sock.close()
    assert wait_until(lambda: not engine.live and len(engine.aborted) == 3)


def test_a_stuck_engine_turns_health_red(toy_server):
    engine = ToyEngine(delay_s=0.01)
    client = toy_server(engine)
    assert client.get("/health").json() == {"status": "ok"}
    engine.stalled = True
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "error", "message": "step 3 has been running for 9 s, its deadline is 5 s"}


@pytest.mark.parametrize("stream", [True, False])
def test_request_timeout(toy_server, stream):
    engine = ToyEngine(stalled=True)
    client = toy_server(engine, request_timeout_s=0.1)
    response = client.post("/v1/completions", json={"prompt": [9], "stream": stream})
    assert wait_until(lambda: not engine.live)
    if stream:
        assert '"code":"request_timeout"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")


@pytest.mark.slow
def test_slow_readers_harm_nobody(toy_server):
    engine = ToyEngine(steps=(8,), max_model_len=10**6)
    client = toy_server(engine, stall_timeout_s=0.5)
    body = {"prompt": [9], "max_tokens": 900_000, "stream": True, "return_tokens": True}
    stuck = [raw_request(client, body) for _ in range(8)]
    assert wait_until(lambda: len(engine.live) == 8)
    started = time.monotonic()
    for _ in range(5):
        response = client.post("/v1/completions", json={"prompt": [9], "max_tokens": 16})
        assert response.json()["usage"]["completion_tokens"] == 16
    assert time.monotonic() - started < 20
    assert wait_until(lambda: not engine.live)  # clients that never read are taken to be gone
    for sock in stuck:
        sock.close()


@pytest.mark.slow
def test_a_thousand_streams_at_once(toy_server):
    engine = ToyEngine(steps=(1, 3), delay_s=0.02, max_model_len=10**6)
    client = toy_server(engine)
    url = client.base_url

    async def one(first):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps({"prompt": [first], "max_tokens": 24, "stream": True, "return_token_ids": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        ids = []
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            assert line
            if line.startswith(b"data: "):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
        writer.close()
        await writer.wait_closed()
        return ids == list(range(first + 1, first + 25))

    async def everyone():
        return await asyncio.gather(*(one(100 * i + 7) for i in range(1000)))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert all(asyncio.run(everyone()))
    assert not engine.live and not engine.aborted
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 300 * 1024  # clients and server together


def test_api_keys(toy_server):
    client = toy_server(ToyEngine(), api_keys=("alpha", "beta"))
    assert client.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
        refused = client.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    for header in ("Bearer gamma", "Basic alpha", "alpha", "Bearer", "Bearer alpha2", "Bearer \u00e4".encode()):
        assert client.get("/v1/models", headers={"Authorization": header}).status_code == 401
    for key in ("alpha", "beta"):
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_cors_is_off_unless_asked_for(toy_server):
    origin = {"Origin": "http://page.example"}
    assert "access-control-allow-origin" not in toy_server(ToyEngine()).get("/health", headers=origin).headers
    allowed = toy_server(ToyEngine(), cors_origins=("http://page.example",), api_keys=("k",))
    assert allowed.get("/health", headers=origin).headers["access-control-allow-origin"] == "http://page.example"
    preflight = allowed.options("/v1/completions", headers=origin | {"Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 200


def test_request_ids_and_access_log(toy_server, caplog):
    caplog.set_level(logging.INFO, "dsv4.access")
    client = toy_server(ToyEngine())
    given = client.post(
        "/v1/completions", json={"prompt": "a secret", "max_tokens": 2}, headers={"X-Request-Id": "abc-1"}
    )
    assert given.headers["x-request-id"] == "abc-1"
    assert len(client.get("/version", headers={"X-Request-Id": "no good"}).headers["x-request-id"]) == 32
    client.get("/health")
    assert wait_until(lambda: len(caplog.records) >= 2)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "dsv4.access"]
    assert [line["path"] for line in lines] == ["/v1/completions", "/version"]
    assert lines[0]["id"] == "abc-1"
    assert lines[0]["completion_tokens"] == 2
    assert lines[0]["finish_reason"] == ["length"]
    assert "secret" not in caplog.text


def test_a_disconnect_is_logged_as_one(toy_server, caplog):
    caplog.set_level(logging.INFO, "dsv4.access")
    engine = ToyEngine(delay_s=0.01)
    client = toy_server(engine)
    for stream in (True, False):
        sock = raw_request(client, {"prompt": [9], "max_tokens": 4000, "stream": stream})
        assert wait_until(lambda: engine.live)
        sock.close()
        assert wait_until(lambda: not engine.live)
    assert wait_until(lambda: len(caplog.records) == 2)
    lines = [json.loads(record.message) for record in caplog.records]
    assert [line.get("client_gone", line["status"]) for line in lines] == [True, 499]
    assert [line["finish_reason"] for line in lines] == [["aborted"], ["aborted"]]


def test_metrics(toy_server):
    client = toy_server(ToyEngine(steps=(4,)))
    client.post("/v1/completions", json={"prompt": [9, 10], "max_tokens": 12})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    label = '{engine="0",model_name="toy"'
    both = '{model_name="toy",engine="0"'

    def value(name, more=""):
        found = [v for k, v in values.items() if k in (f"{name}{label}{more}}}", f"{name}{both}{more}}}")]
        return float(found[0])

    assert value("vllm:num_requests_running") == 0
    assert value("vllm:kv_cache_usage_perc") == 0.25
    assert value("vllm:prompt_tokens_total") == 2
    assert value("vllm:generation_tokens_total") == 12
    assert value("vllm:spec_decode_num_drafts_total") == 3
    assert value("vllm:spec_decode_num_draft_tokens_total") == 21
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 9
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", ',position="2"') == 3
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", ',position="6"') == 0
    assert value("vllm:time_to_first_token_seconds_count") == 1
    assert value("vllm:inter_token_latency_seconds_count") == 8  # per token, the first step is not between tokens
    assert value("vllm:request_time_per_output_token_seconds_count") == 1
    assert 'finished_reason="length"' in response.text
    stats = client.get("/metrics/json").json()
    assert stats["speculation"]["mean_accepted_length"] == 4.0
    assert stats["speculation"]["accepted_per_position"] == [3, 3, 3, 0, 0, 0, 0]


def test_latency_is_per_token_not_per_chunk(toy_server):
    client = toy_server(ToyEngine(steps=(6,), delay_s=0.06))
    client.post("/v1/completions", json={"prompt": [9], "max_tokens": 36})
    text = client.get("/metrics").text
    total = next(
        line for line in text.splitlines() if line.startswith("vllm:request_time_per_output_token_seconds_sum")
    )
    assert 0.009 < float(total.rsplit(" ", 1)[1]) < 0.05  # a chunk takes 0.06 s


def test_generate_config_names_the_wrong_field():
    for text, words in [
        ("[1]", "expected a JSON object, got list"),
        ("{", "could not read it"),
        ('{"max_tokens": 3}', "unknown field 'max_tokens'; known fields are max_new_tokens"),
        ('{"max_new_tokens": true}', "max_new_tokens must be a positive integer, got true"),
        ('{"temperature": 0.5}', "temperature must be 0"),
        ('{"stop": "x"}', "stop must be a list"),
        ('{"stream": 1}', "stream must be true or false"),
    ]:
        with pytest.raises(ConfigError, match=words):
            GenerationDefaults.from_json(text)
    with pytest.raises(ConfigError, match="a key must not be empty"):
        HttpSettings(api_keys=("",))
