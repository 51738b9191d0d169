"""The whole way from a socket to the tiny model and back: one answer whatever the draft width, streamed or not."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serving.args import EngineArgs
from serving.build import build_engine
from serving.http.app import create_app
from serving.http.protocol_texts import ProtocolTexts
from tests.e2e.conftest import running_server, wait_until
from tests.e2e.test_http_chat import assemble
from tests.e2e.test_http_completions import events
from tests.support.engines import K7

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["unit", "days"],
        },
    },
}
ASK = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 48, "return_token_ids": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
REQUESTS = {
    "text": ("/v1/completions", {"prompt": "import os", "max_tokens": 40, "return_token_ids": True}),
    "two": ("/v1/completions", {"prompt": ["a", "b = 1"], "max_tokens": 24, "return_token_ids": True}),
    "stop": (
        "/v1/completions",
        {"prompt": "import os", "max_tokens": 60, "stop": ["e", "i"], "return_token_ids": True},
    ),
    "logprobs": ("/v1/completions", {"prompt": "x", "max_tokens": 16, "logprobs": 3, "return_token_ids": True}),
    "long": ("/v1/completions", {"prompt": "word " * 150, "max_tokens": 16, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", ASK),
    "thinking": ("/v1/chat/completions", ASK | {"reasoning_effort": "low"}),
    "tool": ("/v1/chat/completions", ASK | {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 120}),
    "json": (
        "/v1/chat/completions",
        ASK | {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
}


@pytest.fixture(scope="module")
def clients(tiny_w8a8):
    """Draft width -> (client, engine)."""
    grammar = pytest.importorskip("serving.grammar", reason="needs the extra dsv4[grammar]")
    with contextlib.ExitStack() as stack:
        result = {}
        for k in (0, 7):
            args = EngineArgs(model=str(tiny_w8a8), threads=1, max_num_seqs=8, speculative_config=K7 if k else None)
            built = build_engine(args)
            stack.callback(built.engine.close)
            grammars = grammar.Compiler(built.tokenizer, built.cfg.vocab_size, built.cfg.eos_token_id)
            texts = ProtocolTexts(tools=("Tools:\n", "\n"))
            url = stack.enter_context(
                running_server(create_app(built.engine, built.tokenizer, texts=texts, grammars=grammars))
            )
            result[k] = stack.enter_context(httpx.Client(base_url=url, timeout=60)), built.engine
        yield result


def same(first, second):
    """Equal answers, but for ids, times, and what drafting did."""
    return [stripped(first), stripped(second)] == [stripped(first)] * 2


def stripped(value):
    if isinstance(value, dict):
        volatile = {"id", "created", "draft_mask", "cached_tokens"}
        volatile |= {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        return {key: stripped(item) for key, item in value.items() if key not in volatile}
    if isinstance(value, float):
        return round(value, 4)
    return [stripped(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", REQUESTS)
def test_drafting_changes_nothing_but_the_speed(clients, name):
    path, body = REQUESTS[name]
    plain, fast = (clients[k][0].post(path, json=body).json() for k in (0, 7))
    assert "error" not in plain, plain
    assert same(plain, fast)
    for choice in fast["choices"]:
        assert len(choice["token_ids"]) == len(choice["draft_mask"])
    assert sum(len(choice["token_ids"]) for choice in fast["choices"]) == fast["usage"]["completion_tokens"]


@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize("name", REQUESTS)
def test_stream_equals_non_stream(clients, k, name):
    path, body = REQUESTS[name]
    client = clients[k][0]
    whole = client.post(path, json=body).json()
    parts = events(client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert same(parts[-1]["usage"], whole["usage"])
    for at, choice in enumerate(whole["choices"]):
        mine = [c for part in parts for c in part["choices"] if c["index"] == at]
        assert [i for c in mine for i in c.get("token_ids", [])] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        if "text" in choice:
            assert "".join(c["text"] for c in mine) == choice["text"]
    if "message" in whole["choices"][0]:
        message, streamed = whole["choices"][0]["message"], assemble(parts)[0]
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning"] == message.get("reasoning", "")
        assert [call[1] for call in streamed["tool_calls"]] == [
            call["function"]["arguments"] for call in message.get("tool_calls", [])
        ]


@pytest.mark.parametrize("k", [0, 7])
def test_constraints_hold_on_a_model_that_knows_nothing(clients, k):
    path, body = REQUESTS["json"]
    choice = clients[k][0].post(path, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"])["a"], int)
    path, body = REQUESTS["tool"]
    choice = clients[k][0].post(path, json=body | {"parallel_tool_calls": False}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments["unit"] in ("celsius", "kelvin") and arguments["days"] <= 9


@pytest.mark.parametrize("k", [0, 7])
def test_one_prompt_has_one_answer_whatever_the_company(clients, k):
    client = clients[k][0]
    body = {"prompt": "class A:", "max_tokens": 24, "return_token_ids": True}
    strangers = [body | {"prompt": f"{n} " * (n * 7 + 1)} for n in range(8)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(
            pool.map(lambda b: client.post("/v1/completions", json=b).json(), [body, *strangers] * 2 + [body] * 6)
        )
    copies = [answers[0], answers[9], *answers[18:]]
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in copies}) == 1


@pytest.mark.parametrize("k", [0, 7])
def test_a_client_that_leaves_frees_everything(clients, k):
    client, engine = clients[k]
    body = {"prompt": "leave " * 40, "max_tokens": 600, "ignore_eos": True, "return_token_ids": True}
    data = json.dumps(body | {"stream": True}).encode()
    sock = socket.create_connection((client.base_url.host, client.base_url.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + data)
    assert b"200 OK" in sock.recv(2048)
    sock.close()
    assert wait_until(lambda: engine.stats().running == 0)
    assert wait_until(lambda: engine.stats().kv_cache_usage == 0)
    short = body | {"max_tokens": 12}
    again, other = (clients[width][0].post("/v1/completions", json=short).json() for width in (k, 7 - k))
    assert again["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
