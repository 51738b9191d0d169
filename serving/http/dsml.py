"""The model's answer, token by token, as reasoning, content and tool calls.

State changes hang on token ids: a text that merely looks like `</think>` or a tag is text. Control tokens enter the
scanned text as lone surrogates, which no decoded text can contain.
"""

import enum
import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv4.errors import RequestError
from serving.detokenize import TextToken
from serving.request import FinishReason
from serving.tokenizer import DSML, END_THINK, THINK, Tokenizer

_MARK = "\ud800"  # stands for the ｜DSML｜ token
_BLOCK_OPEN = f"<{_MARK}tool_calls>"
_BLOCK_CLOSE = f"</{_MARK}tool_calls>"
_INVOKE_OPEN = re.compile(rf'<{_MARK}invoke name="([^"<>]+)"\s*>')
_INVOKE_CLOSE = f"</{_MARK}invoke>"
_PARAMETER_OPEN = re.compile(rf'<{_MARK}parameter name="([^"<>]+)" string="(true|false)"\s*>')
_PARAMETER_CLOSE = f"</{_MARK}parameter>"
_MAX_TAG_CHARS = 1024
# What may turn out to lead up to a tool block: at most the blank line before it and its first character.
_LEAD = re.compile(r"\n{0,2}<?\Z")


class ModelOutputError(RequestError):
    """The model wrote a tool call that cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the model wrote a tool call that cannot be read: {message}", code="invalid_model_output")


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    BLOCK = enum.auto()
    INVOKE = enum.auto()
    TEXT_VALUE = enum.auto()
    JSON_VALUE = enum.auto()


@dataclass
class ToolDelta:
    """News of one call: `id` and `name` with the first, a piece of the arguments with any."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ChatDelta:
    """What some tokens added."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolDelta] = field(default_factory=list)

    def call(self, index: int) -> ToolDelta:
        if not self.tool_calls or self.tool_calls[-1].index != index:
            self.tool_calls.append(ToolDelta(index))
        return self.tool_calls[-1]


class ChatParser:
    """Reads one answer. Errors are raised as ModelOutputError and concern this request only.

    thinking: the prompt ended with `<think>`. Tool blocks are always understood; whether they are shown is for the
    caller to say (max_calls: None for all, 0 for none).
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, max_calls: int | None = None) -> None:
        self._marks = {
            tokenizer.find_control(THINK): THINK,
            tokenizer.find_control(END_THINK): END_THINK,
            tokenizer.find_control(DSML): DSML,
        }
        self._control_ids = tokenizer.control_ids
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._outer = self._state
        self._max_calls = max_calls
        self._buffer = ""
        self._parameters: set[str] = set()
        self._name = ""
        self._json: list[str] = []
        self.calls = 0  # opened so far
        self.reasoning_tokens = 0
        self._delta = ChatDelta()

    def feed(self, tokens: Iterable[TextToken]) -> ChatDelta:
        """What these tokens add, in order."""
        self._delta = ChatDelta()
        for token in tokens:
            self.reasoning_tokens += self._state is _State.REASONING
            if token.token_id not in self._control_ids:
                self._buffer += token.text
                continue
            match self._marks.get(token.token_id):
                case "｜DSML｜":
                    self._buffer += _MARK
                case "<think>":
                    self._switch(_State.REASONING)
                case "</think>":
                    self._switch(_State.CONTENT)
        self._scan()
        return self._delta

    def finish(self, reason: FinishReason) -> ChatDelta:
        """What is left when the answer is over. An unfinished block is an error unless the length cut it."""
        self._delta = ChatDelta()
        self._scan()
        if self._in_block:
            if reason is FinishReason.STOP:
                raise ModelOutputError("the answer ended inside a tool block")
        else:
            self._show(self._buffer)
            self._buffer = ""
        return self._delta

    @property
    def _in_block(self) -> bool:
        return self._state not in (_State.REASONING, _State.CONTENT)

    @property
    def called(self) -> bool:
        """Whether at least one call is shown and all are complete."""
        return self.calls > 0 and self._max_calls != 0 and not self._in_block

    def _switch(self, state: _State) -> None:
        """A thinking token: inside a block it means nothing, outside it settles all text before it."""
        self._scan()
        if not self._in_block and self._state is not state:
            self._show(self._buffer)
            self._buffer = ""
            self._state = state

    def _show(self, text: str) -> None:
        text = text.replace(_MARK, "")  # a mark that opened nothing is dropped like any other special token
        if self._state is _State.REASONING:
            self._delta.reasoning += text
        else:
            self._delta.content += text

    def _scan(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Consumes what is certain at the head of the buffer; False when more text is needed."""
        match self._state:
            case _State.REASONING | _State.CONTENT:
                return self._step_text()
            case _State.TEXT_VALUE | _State.JSON_VALUE:
                return self._step_value()
        return self._step_tag()

    def _step_text(self) -> bool:
        at = self._buffer.find(f"<{_MARK}")
        if at < 0:
            keep = _LEAD.search(self._buffer).start()
            self._show(self._buffer[:keep])
            self._buffer = self._buffer[keep:]
            return False
        rest = self._buffer[at:]
        if rest.startswith(_BLOCK_OPEN):
            self._show(self._buffer[:at].removesuffix("\n").removesuffix("\n"))
            self._buffer = rest[len(_BLOCK_OPEN) :]
            self._outer, self._state = self._state, _State.BLOCK
            return True
        if _BLOCK_OPEN.startswith(rest):
            return False
        self._show(self._buffer[: at + 2])  # some other markup: text
        self._buffer = self._buffer[at + 2 :]
        return True

    def _step_tag(self) -> bool:
        """Between tags only white space may stand."""
        self._buffer = self._buffer.lstrip()
        tag, close, rest = self._buffer.partition(">")
        if not close:
            if self._buffer and not self._buffer.startswith("<"):
                raise ModelOutputError(f"expected a tag, found {_readable(self._buffer)}")
            if len(self._buffer) > _MAX_TAG_CHARS:
                raise ModelOutputError("a tag that does not end")
            return False
        tag, self._buffer = tag + close, rest
        if tag == _BLOCK_CLOSE:
            if self._state is _State.INVOKE:  # the end of the block may stand for the end of its last call
                self._close_call()
            self._state = self._outer
        elif self._state is _State.BLOCK and (opened := _INVOKE_OPEN.fullmatch(tag)):
            self._open_call(opened[1])
        elif self._state is _State.INVOKE and tag == _INVOKE_CLOSE:
            self._close_call()
        elif self._state is _State.INVOKE and (opened := _PARAMETER_OPEN.fullmatch(tag)):
            self._open_parameter(opened[1], is_text=opened[2] == "true")
        else:
            raise ModelOutputError(f"unexpected {_readable(tag)}")
        return True

    def _step_value(self) -> bool:
        """Inside a parameter: text is shown as it comes, JSON when it is complete and valid."""
        value, end = self._value()
        if end is None:  # keep what may be the beginning of the end tag
            keep = len(value) - 2 if value.endswith("</") else len(value) - value.endswith("<")
            self._buffer = value[keep:] + self._buffer[len(value) :]
            value = value[:keep]
        if self._state is _State.JSON_VALUE:
            self._json.append(value)
        elif value:
            self._arguments(json.dumps(value, ensure_ascii=False)[1:-1])
        if end is None:
            return False
        self._arguments(self._whole_json() if self._state is _State.JSON_VALUE else '"')
        self._buffer = self._buffer[end:]
        self._state = _State.INVOKE
        return True

    def _whole_json(self) -> str:
        text = "".join(self._json)
        try:
            json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise ModelOutputError(f"the value of {self._name!r} is not JSON: {_readable(text)}") from None
        return text.strip()

    def _value(self) -> tuple[str, int | None]:
        """The value so far, and where the text after its end tag begins (None: the tag is not complete)."""
        mark = self._buffer.find(_MARK)
        if mark < 0:
            return self._buffer, None
        value, tag = self._buffer[: mark - 2], self._buffer[max(mark - 2, 0) :]
        if tag.startswith(_PARAMETER_CLOSE):
            return value, len(value) + len(_PARAMETER_CLOSE)
        if mark >= 2 and _PARAMETER_CLOSE.startswith(tag):
            return value, None
        raise ModelOutputError(f"a tag inside the value of {self._name!r}")

    def _open_call(self, name: str) -> None:
        self._state = _State.INVOKE
        self._parameters.clear()
        self.calls += 1
        if self._shown:
            call = self._delta.call(self.calls - 1)
            call.id, call.name = f"call_{uuid.uuid4().hex}", name

    def _close_call(self) -> None:
        self._arguments("}" if self._parameters else "{}")
        self._state = _State.BLOCK

    def _open_parameter(self, name: str, *, is_text: bool) -> None:
        if name in self._parameters:
            raise ModelOutputError(f"the parameter {name!r} is given twice")
        key = json.dumps(name, ensure_ascii=False)
        self._arguments(("," if self._parameters else "{") + key + (':"' if is_text else ":"))
        self._parameters.add(name)
        self._name = name
        self._json.clear()
        self._state = _State.TEXT_VALUE if is_text else _State.JSON_VALUE

    @property
    def _shown(self) -> bool:
        return self._max_calls is None or self.calls <= self._max_calls

    def _arguments(self, piece: str) -> None:
        if self._shown:
            self._delta.call(self.calls - 1).arguments += piece


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _readable(text: str) -> str:
    return repr(text[:60].replace(_MARK, DSML))
