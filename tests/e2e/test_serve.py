"""`dsv4 serve` as a process: ready, answers the openai client and curl, profiles, drains, exits 0."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import wait_until

K7 = '{"method":"dspark","num_speculative_tokens":7}'


@pytest.fixture(scope="module")
def server(tiny_w8a8: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    traces = tmp_path_factory.mktemp("traces")
    log_file = tmp_path_factory.mktemp("log") / "stderr"
    command = [
        str(Path(sys.executable).parent / "dsv4"), "serve", "--model", str(tiny_w8a8), "--served-model-name", "tiny",
        "--speculative-config", K7, "--port", "0", "--threads", "1", "--max-num-seqs", "4",
        "--profile", "--profile-output", str(traces),
    ]  # fmt: skip
    with log_file.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)

    def address() -> str | None:
        """What the banner says, once the server answers there."""
        assert process.poll() is None, log_file.read_text()
        found = re.search(r"listening  (http://127\.0\.0\.1:\d+)/v1", log_file.read_text())
        with contextlib.suppress(httpx.TransportError):
            if found and httpx.get(f"{found[1]}/health", timeout=60).status_code == 200:
                return found[1]
        return None

    try:
        assert wait_until(address, 300)
        yield address()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    log = log_file.read_text()
    assert process.returncode == 0, log
    assert "DSpark speculation progress" in log and "programs" in log and "Traceback" not in log


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="def add(a, b):", max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens_details.cached_tokens == 0
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_stream_equals_whole_and_hits_the_prefix(client: openai.OpenAI) -> None:
    prompt = "import os\n" * 60
    ask = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**ask)
    stream = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 20
    tokens = whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (tokens - 1) // 128 * 128 > 0


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=8)
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "temperature": 0.7}, "temperature"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": ["x"] * 3, "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1 << 30]}, "prompt"),
        ({"prompt": "x " * 3000}, "prompt"),
        ({"prompt": "x", "model": "other"}, "model"),
    ],
)
def test_a_clients_mistakes(server: str, body: dict, param: str) -> None:
    answer = httpx.post(f"{server}/v1/completions", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_profile(server: str, client: openai.OpenAI) -> None:
    assert httpx.post(f"{server}/stop_profile").status_code == 400
    assert httpx.post(f"{server}/start_profile").status_code == 200
    assert httpx.post(f"{server}/start_profile").status_code == 400
    client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    trace = Path(httpx.post(f"{server}/stop_profile").json()["trace"])
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("prefill[") for name in names)
    assert any(name.startswith(("speculate[", "decode[")) for name in names)


def test_metrics_and_health(server: str) -> None:
    text = httpx.get(f"{server}/metrics").text
    assert "vllm:spec_decode_num_draft_tokens_total" in text and "vllm:num_requests_running" in text
    assert httpx.get(f"{server}/health").json() == {"status": "ok"}
