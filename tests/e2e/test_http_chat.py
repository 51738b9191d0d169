"""/v1/chat/completions over a socket: what a client sees of reasoning, content and calls."""

import asyncio
import json

import openai
import pytest

from serving.http.protocol_texts import ProtocolTexts
from serving.request import FinishReason
from tests.e2e.conftest import wait_until
from tests.e2e.test_http_completions import events
from tests.support.toy_engine import ToyEngine

D = "｜DSML｜"
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
TEXTS = ProtocolTexts(tools=("## Tools\n", "\nend\n"))
CALLS = (
    f"\n\n<{D}tool_calls>\n"
    f'<{D}invoke name="weather">\n'
    f'<{D}parameter name="city" string="true">Sao Paulo 👍</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">[1, 2]</{D}parameter>\n'
    f'</{D}invoke>\n<{D}invoke name="time">\n\n</{D}invoke>\n</{D}tool_calls>'
)
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def chat(client, **body):
    return client.post("/v1/chat/completions", json=ASK | body)


def assemble(chunks):
    """The message a client builds from a stream, and the last finish reason."""
    message = {"role": None, "content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            message["content"] += delta.get("content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            message["reasoning"] += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["type"] == "function" and piece["index"] == len(message["tool_calls"])
                    message["tool_calls"].append([piece["function"]["name"], ""])
                message["tool_calls"][piece["index"]][1] += piece["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return message, finish


@pytest.mark.parametrize("steps", [(1,), (8,), (2, 7, 3)])
@pytest.mark.parametrize("thinking", [True, False])
def test_reasoning_content_and_calls(toy_server, v4_tokenizer, thinking, steps):
    answer = ("I think.</think>" if thinking else "") + "Let me see." + CALLS
    engine = ToyEngine(script=v4_tokenizer.encode(answer), steps=steps)
    client = toy_server(engine, texts=TEXTS)
    fields = {"tools": TOOLS, "chat_template_kwargs": {"thinking": thinking}}
    whole = chat(client, **fields).json()
    message = whole["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert message.get("reasoning") == message.get("reasoning_content") == ("I think." if thinking else None)
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == [("weather", {"city": "Sao Paulo 👍", "days": [1, 2]}), ("time", {})]
    assert all(len(call["id"]) == 37 and call["id"].startswith("call_") for call in message["tool_calls"])
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert (whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) == thinking

    chunks = events(chat(client, **fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"] == whole["usage"]
    streamed, finish = assemble(chunks)
    assert finish == "tool_calls"
    assert streamed["role"] == "assistant"
    assert (streamed["content"], streamed["reasoning"]) == ("Let me see.", message.get("reasoning") or "")
    assert [(name, json.loads(arguments)) for name, arguments in streamed["tool_calls"]] == calls


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("stream", [True, False])
def test_end_of_reasoning_at_each_row_of_a_step(toy_server, v4_tokenizer, row, stream):
    script = [v4_tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    script[row] = v4_tokenizer.control("</think>")
    client = toy_server(ToyEngine(script=script, steps=(8,)))
    response = chat(client, reasoning_effort="high", stream=stream)
    message = assemble(events(response))[0] if stream else response.json()["choices"][0]["message"]
    assert (message.get("reasoning") or "", message["content"]) == ("abcdefgh"[:row], "abcdefgh"[row + 1 :])


def test_include_reasoning_and_default_thinking(toy_server, v4_tokenizer):
    client = toy_server(ToyEngine(script=v4_tokenizer.encode("why</think>yes")), thinking=True)
    assert chat(client).json()["choices"][0]["message"]["reasoning"] == "why"
    hidden = chat(client, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning" not in hidden and hidden["content"] == "yes"
    assert assemble(events(chat(client, include_reasoning=False, stream=True)))[0]["reasoning"] == ""


def test_stop_strings_cut_the_content(toy_server, v4_tokenizer):
    engine = ToyEngine(script=v4_tokenizer.encode("one two three" * 9), steps=(8,))
    client = toy_server(engine)
    body = chat(client, stop=" t", logprobs=True, top_logprobs=2, return_token_ids=True).json()
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"] == 1
    assert choice["logprobs"]["content"][0]["token"] == "one"
    assert bytes(choice["logprobs"]["content"][0]["bytes"]) == b"one"
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert engine.aborted


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"tools": TOOLS}, 2),
        ({"tools": TOOLS, "parallel_tool_calls": False}, 1),
        ({"tools": TOOLS, "tool_choice": "none"}, 0),
        ({}, 0),
    ],
)
def test_how_many_calls_are_shown(toy_server, v4_tokenizer, fields, count):
    client = toy_server(ToyEngine(script=v4_tokenizer.encode("x" + CALLS)), texts=TEXTS)
    choice = chat(client, **fields).json()["choices"][0]
    assert len(choice["message"].get("tool_calls", [])) == count
    assert choice["message"]["content"] == "x"
    assert choice["finish_reason"] == ("tool_calls" if count else "stop")


def test_a_broken_call_is_an_error_of_its_request(toy_server, v4_tokenizer):
    client = toy_server(ToyEngine(script=v4_tokenizer.encode(f"<{D}tool_calls>\nrubbish")), texts=TEXTS)
    response = chat(client, tools=TOOLS)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_model_output"
    assert events(chat(client, tools=TOOLS, stream=True))[-1]["error"]["code"] == "invalid_model_output"


def test_a_length_cut_keeps_what_there_is(toy_server, v4_tokenizer):
    client = toy_server(ToyEngine(script=v4_tokenizer.encode(CALLS)), texts=TEXTS)
    choice = chat(client, tools=TOOLS, max_tokens=36).json()["choices"][0]
    assert choice["finish_reason"] == FinishReason.LENGTH
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city":"')


def test_constrained_output_is_refused_where_it_cannot_be_had(toy_server):
    client = toy_server(ToyEngine(), texts=TEXTS)
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for fields in [
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"tools": strict},
        {"response_format": {"type": "json_object"}},
    ]:
        error = chat(client, **fields).json()["error"]
        assert error["code"] == "unsupported_value" and "cannot constrain the output" in error["message"]
    assert chat(client, response_format={"type": "text"}, max_tokens=2).status_code == 200
    no_texts = toy_server(ToyEngine())
    assert "tool declaration is not at hand" in chat(no_texts, tools=TOOLS).json()["error"]["message"]


def test_constraints_are_compiled_before_the_answer_begins(toy_server, v4_tokenizer):
    grammar = pytest.importorskip("serving.grammar", reason="needs the extra dsv4[grammar]")
    engine = ToyEngine(script=v4_tokenizer.encode(CALLS))
    compiler = grammar.Compiler(v4_tokenizer, engine.vocab_size, engine.eos_token_id)
    client = toy_server(engine, texts=TEXTS, grammars=compiler)
    assert chat(client, tools=TOOLS, tool_choice="required").status_code == 200
    constraint = engine.submitted[-1][2].grammar
    assert constraint.matcher().masks(engine.script)[0] == len(engine.script)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
    refused = chat(client, response_format=schema, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    assert chat(client).status_code == 200
    assert engine.submitted[-1][2].grammar is None


def test_a_conversation_too_long_names_messages(toy_server):
    client = toy_server(ToyEngine(max_model_len=4))
    error = chat(client, messages=[{"role": "user", "content": "a b c d e f"}]).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_tokenize_shows_the_prompt(toy_server, v4_tokenizer):
    client = toy_server(ToyEngine())
    body = client.post("/tokenize", json=ASK | {"return_token_strs": True}).json()
    assert body["token_strs"] == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "Hi", "<｜Assistant｜>", "</think>"]
    back = client.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert back["prompt"] == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    raw = client.post("/tokenize", json={"prompt": "Hi"}).json()
    assert raw == {"count": 1, "max_model_len": 4096, "tokens": v4_tokenizer.encode("Hi")}
    assert client.post("/tokenize", json={"prompt": "Hi"} | ASK).status_code == 400
    assert client.post("/detokenize", json={"tokens": [10**7]}).json()["error"]["param"] == "tokens"


def test_openai_clients_hold_a_conversation_with_tools(toy_server, v4_tokenizer):
    engine = ToyEngine(script=v4_tokenizer.encode("Let me see." + CALLS), steps=(3, 8))
    url = f"{toy_server(engine, texts=TEXTS).base_url}/v1"
    history = [{"role": "user", "content": "Weather?"}]
    with openai.OpenAI(base_url=url, api_key="none") as api:
        first = api.chat.completions.create(model="toy", messages=history, tools=TOOLS)
        message = first.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
        history.append(message)
        history += [{"role": "tool", "tool_call_id": c.id, "content": "result"} for c in reversed(message.tool_calls)]
        engine.script = v4_tokenizer.encode("Sunny.")
        second = api.chat.completions.create(model="toy", messages=history, tools=TOOLS)
        assert second.choices[0].message.content == "Sunny."
        assert second.choices[0].finish_reason == "stop"
        prompt = v4_tokenizer.decode(engine.submitted[-1][1])
        assert prompt.endswith(
            f"{CALLS}<｜User｜>{'<tool_result>result</tool_result>' * 2}<｜Assistant｜></think>".replace(
                "</tool_result><tool_result>", "</tool_result>\n\n<tool_result>"
            )
        )

    async def talk():
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as api:
            stream = await api.chat.completions.create(model="toy", messages=ASK["messages"], stream=True)
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            assert text == "Sunny."
            engine.script, engine.delay_s = None, 0.01
            stream = await api.chat.completions.create(
                model="toy", messages=ASK["messages"], stream=True, max_tokens=1000
            )
            await anext(aiter(stream))
            await stream.close()

    asyncio.run(talk())
    assert wait_until(lambda: not engine.live)
