"""Bodies no sane client sends: a 200 or a refusal that names the field, never a 500, never a hang."""

import asyncio
import copy
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.http.app import create_app
from serving.http.chat_schema import ChatBody
from serving.http.protocol_texts import ProtocolTexts
from serving.http.schema import CompletionBody
from tests.support.toy_engine import ToyEngine

COMPLETION = {"prompt": [5, 6], "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def post(v4_tokenizer):
    """post(path, body) -> response, without a socket; server errors are raised, not answered."""
    app = create_app(
        ToyEngine(max_model_len=64), v4_tokenizer, texts=ProtocolTexts(tools=("[", "]"), effort="e", effort_max="m")
    )

    def send(path, body, content_type="application/json"):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def go():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                headers = {"Content-Type": content_type} if content_type else {}
                return await client.post(path, content=content, headers=headers)

        return asyncio.run(asyncio.wait_for(go(), 10))

    return send


def refused(response, param):
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    return param is None or param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_null_in_every_optional_field(post, path):
    body = CHAT if "chat" in path else COMPLETION
    model = ChatBody if "chat" in path else CompletionBody
    names = [field.alias or name for name, field in model.model_fields.items() if not field.is_required()]
    assert len(names) > 25
    assert post(path, body | dict.fromkeys(set(names) - {"max_tokens"})).status_code == 200
    for name in names:
        assert post(path, body | {name: None}).status_code == 200, name


SHARED = [
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"temperature": 0.7}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 40}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 513}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"stop_token_ids": [3]}, "stop_token_ids"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"user": "\ud800"}, "user"),
    ({"model": 3}, "model"),
    ({"seed": "x"}, "seed"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("fields", "param"), SHARED, ids=lambda value: str(value)[:40])
def test_refused_fields_are_named(post, path, fields, param):
    body = CHAT if "chat" in path else COMPLETION
    assert refused(post(path, body | fields), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [129_280]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [5] * 64}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_completions(post, fields, param):
    assert refused(post("/v1/completions", COMPLETION | fields), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"tools": [TOOL | {"x": 1}]}, "tools[0].x"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": ["\ud800"]}}}]},
            "tools[0].function",
        ),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_chats(post, fields, param):
    assert refused(post("/v1/chat/completions", CHAT | fields), param)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.0, "seed": 7, "user": "u", "metadata": {"a": "b"}},
        {"top_k": 1, "temperature": 1.0},
        {"top_p": 1.0, "top_k": -1, "presence_penalty": 0, "frequency_penalty": 0.0, "n": 1, "best_of": 1},
        {"stop": ["a"] * 5, "ignore_eos": True, "logit_bias": {}},
        {"max_tokens": 10**30},
        {"model": ""},
        {"model": "toy", "stream": True, "stream_options": {"include_usage": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_that_change_nothing_are_taken(post, path, fields):
    assert post(path, (CHAT if "chat" in path else COMPLETION) | fields).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b'{"prompt": "a"',
        b'{"\\ud800": 1, "prompt": "a"}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"tools": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=lambda content: repr(content[:16]),
)
def test_bodies_that_are_not_requests(post, path, content):
    response = post(path, content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_content_type_matters(post, content_type):
    response = post("/v1/completions", COMPLETION, content_type)
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_other_paths_and_methods(toy_server):
    client = toy_server(ToyEngine())
    for response, status in [
        (client.get("/nowhere"), 404),
        (client.get("/v1/completions"), 405),
        (client.delete("/health"), 405),
        (client.get("/v1/models/gpt-4"), 404),
        (client.post("/v1/completions", json=COMPLETION | {"model": "gpt-4"}), 404),
    ]:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 200_000),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["\ud800"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
BASES = [
    ("/v1/completions", COMPLETION | {"prompt": ["a", "b"], "stop": ["x"], "logprobs": 1}),
    ("/v1/completions", COMPLETION | {"stream": True, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": "u"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "r"},
                {"role": "user", "content": "v"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "chat_template_kwargs": {"thinking": True},
            "response_format": {"type": "text"},
            "logprobs": True,
            "top_logprobs": 1,
        },
    ),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [1, 2]}),
]


def places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_mutation_is_answered_or_refused(post, data):
    path, base = data.draw(st.sampled_from(BASES))
    body = copy.deepcopy(base)
    for _ in range(data.draw(st.integers(1, 2))):
        if not body:
            break
        *parents, last = data.draw(st.sampled_from([place for place in places(body) if place]))
        holder = body
        for key in parents:
            holder = holder[key]
        action = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            holder[last] = data.draw(JUNK)
        elif action == "remove":
            del holder[last]
        elif isinstance(holder, dict):
            holder[data.draw(st.text(max_size=6))] = data.draw(JUNK)
    response = post(path, body)
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_requests_made_from_the_openapi_description(v4_tokenizer, mode):
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    app = create_app(ToyEngine(max_model_len=64), v4_tokenizer, texts=ProtocolTexts(tools=("[", "]"), effort="e"))
    operations = [result.ok() for result in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/tokenize"}
    for operation in operations:
        if operation.method.upper() != "POST":
            continue

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
        def never_a_server_error(case):
            response = case.call()
            assert response.status_code in (200, 400, 404), response.text

        never_a_server_error()
