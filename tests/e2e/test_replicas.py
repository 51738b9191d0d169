"""The example proxy as a process, in front of two servers: prefixes stay together, load spreads, death is passed over, SIGTERM drains."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serving.http.app import create_app
from tests.e2e.conftest import running_server, wait_until
from tests.support.toy_engine import ToyEngine

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "replicas.py"


@contextlib.contextmanager
def proxy(*bases: str) -> Iterator[tuple[str, subprocess.Popen]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(EXAMPLE), *bases, "--port", str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        assert wait_until(lambda: answers(url), 60)
        yield url, process
    finally:
        process.terminate()
        process.wait(timeout=60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def pair(v4_tokenizer) -> Iterator[tuple[list[ToyEngine], list[contextlib.ExitStack], str, subprocess.Popen]]:
    engines = [ToyEngine(delay_s=0.005) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(contextlib.ExitStack()) for _ in engines]
        apps = [create_app(engine, v4_tokenizer) for engine in engines]
        bases = [server.enter_context(running_server(app)) for server, app in zip(servers, apps, strict=True)]
        url, process = stack.enter_context(proxy(*bases))
        yield engines, servers, url, process


def complete(url: str, prompt: str, tokens: int = 3) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def served(engines: list[ToyEngine]) -> list[int]:
    return [len(engine.submitted) for engine in engines]


def test_prefixes_stay_together_and_load_spreads(pair) -> None:
    engines, _, url, _ = pair
    for _ in range(6):
        assert complete(url, "the same beginning").json()["usage"]["completion_tokens"] == 3
    assert sorted(served(engines)) == [0, 6]
    for i in range(20):
        complete(url, f"{i} is another beginning")
    assert min(served(engines)) > 3
    before = served(engines)
    with ThreadPoolExecutor(16) as pool:  # one prefix, sixteen at once: more than a prefix is worth
        found = list(pool.map(lambda _: complete(url, "the same beginning", 60).status_code, range(16)))
    assert found == [200] * 16
    assert min(now - then for now, then in zip(served(engines), before, strict=True)) >= 4


def test_a_dead_server_is_passed_over(pair) -> None:
    engines, servers, url, _ = pair
    complete(url, "x")
    home = served(engines).index(1)
    servers[home].close()
    assert complete(url, "x").status_code == 200
    assert served(engines)[1 - home] == 1
    servers[1 - home].close()
    assert complete(url, "x").status_code == 503


def test_a_client_that_leaves_takes_its_request_along(pair) -> None:
    engines, _, url, _ = pair
    body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    assert wait_until(lambda: sum(len(engine.aborted) for engine in engines) == 1)


def test_a_shutdown_drains(pair) -> None:
    _, _, url, process = pair
    body = {"prompt": "x", "max_tokens": 150, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert any(
        json.loads(line[6:])["choices"][0]["finish_reason"] == "length"
        for line in events[:-1]
        if '"choices":[{' in line
    )
    process.wait(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)
    assert not answers(url)
