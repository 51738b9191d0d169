"""Messages to DeepSeek-V4's prompt.

A prompt is a list of segments: `Control` tokens, which only this module writes, and text, in which a control token
spelled out by a user stays text. `render` shows it as a string, `encode` gives the ids.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsv4.errors import RequestError
from serving.http.chat_schema import Message, Prompted, ToolCall
from serving.http.protocol_texts import ProtocolTexts
from serving.tokenizer import BOS, DSML, END_THINK, EOS, THINK, Tokenizer

USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
CONTROLS = (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML)

_TRUSTED = re.compile("|".join(map(re.escape, CONTROLS)))


class Control(str):
    """One control token by its content."""

    __slots__ = ()


Segments = list[str]


def render(segments: Sequence[str]) -> str:
    """The prompt as the model's documentation writes it."""
    return "".join(segments)


def encode(tokenizer: Tokenizer, segments: Sequence[str]) -> list[int]:
    """Token ids. Raises CheckpointError where the vocabulary lacks a control token."""
    ids: list[int] = []
    text: list[str] = []
    for segment in [*segments, Control("")]:
        if not isinstance(segment, Control):
            text.append(segment)
            continue
        if any(text):
            ids += tokenizer.encode_content("".join(text))
        text.clear()
        if segment:
            ids.append(tokenizer.control(segment))
    return ids


def trusted(text: str) -> Segments:
    """Text of the protocol itself, in which spelled control tokens are meant."""
    segments: Segments = []
    end = 0
    for match in _TRUSTED.finditer(text):
        segments += [text[end : match.start()], Control(match.group())]
        end = match.end()
    return [*segments, text[end:]]


@dataclass
class _Turn:
    """What one speaker says: consecutive user and tool messages are one turn."""

    role: str
    blocks: Segments = field(default_factory=list)
    message: Message | None = None
    is_real_user: bool = False


def encode_chat(request: Prompted, texts: ProtocolTexts, *, thinking: bool) -> Segments:
    """The prompt of a checked request (`check_tools`). Raises RequestError where a text it needs is not at hand.

    Source: the encoding of the released checkpoint, in the form of its first server: a turn of tool results alone does
    not count as the user's, and developer messages are never dropped.
    """
    tools = request.tools or []
    drop = not tools and request.options.drop_thinking is not False
    turns = _turns(request.messages)
    segments: Segments = [Control(BOS)]
    if thinking:
        segments += trusted(_effort(request.effort, texts))
    if tools:
        if not any(turn.role == "system" for turn in turns):
            turns.insert(0, _Turn("system", [""]))
        declaration = _declaration(request, texts)
        first = next(turn for turn in turns if turn.role == "system")
        first.blocks = [*first.blocks, "\n\n", *declaration]
    last_user = max((at for at, turn in enumerate(turns) if turn.is_real_user), default=-1)
    for at, turn in enumerate(turns):
        kept = thinking and (not drop or at >= last_user)
        segments += _speak(turn, kept)
        followed_by = turns[at + 1].role if at + 1 < len(turns) else "assistant"
        if turn.role in ("user", "developer", "system") and followed_by == "assistant":
            segments += [Control(ASSISTANT), Control(THINK if kept else END_THINK)]
    return segments


def _speak(turn: _Turn, kept: bool) -> Iterator[str]:
    match turn.role:
        case "user" | "developer":
            yield Control(USER)
        case "latest_reminder":
            yield Control(REMINDER)
        case "assistant" if kept:
            yield turn.message.thoughts
            yield Control(END_THINK)
    yield from turn.blocks
    if turn.role == "assistant":
        yield Control(EOS)


def _effort(effort: str | None, texts: ProtocolTexts) -> str:
    text = texts.effort_text(effort)
    if text is None:
        raise RequestError(
            f"reasoning_effort: {effort} needs a text that this server does not have ({texts.missing})",
            param="reasoning_effort",
            code="unsupported_value",
        )
    return text


def _declaration(request: Prompted, texts: ProtocolTexts) -> Segments:
    if texts.tools is None:
        raise RequestError(
            f"tools: the model's tool declaration is not at hand: {texts.missing}",
            param="tools",
            code="unsupported_value",
        )
    before, after = texts.tools
    lines = [tool.function.declaration for tool in request.tools or ()]
    return [*trusted(before), "\n".join(lines), *trusted(after)]


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    """Messages by speaker: results in the order of their calls, blocks of a turn separated by a blank line."""
    turns: list[_Turn] = []
    order: dict[str, int] = {}
    results: list[Message] = []

    def flush() -> None:
        for message in sorted(results, key=lambda message: order[message.tool_call_id]):
            _say(turns, f"<tool_result>{message.content}</tool_result>")
        results.clear()

    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        flush()
        for call in message.tool_calls or ():
            order[call.id] = len(order)
        if message.role == "user":
            _say(turns, message.content)
            turns[-1].is_real_user = True
        else:
            blocks = [message.content or "", *(render_calls(message.tool_calls) if message.tool_calls else [])]
            turns.append(_Turn(message.role, blocks, message, message.role == "developer"))
    flush()
    return turns


def _say(turns: list[_Turn], text: str) -> None:
    """Adds a block to the user's turn, which is opened if need be."""
    if turns and turns[-1].role == "user":
        turns[-1].blocks += ["\n\n", text]
    else:
        turns.append(_Turn("user", [text]))


def render_calls(calls: Sequence[ToolCall]) -> Segments:
    """The block that makes calls, after a blank line."""
    mark = Control(DSML)
    segments: Segments = ["\n\n<", mark, "tool_calls>\n"]
    for call in calls:
        segments += ["<", mark, f'invoke name="{call.function.name}">\n']
        parameters = []
        for key, value in call.arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            head = f'parameter name="{key}" string="{"true" if is_text else "false"}">{shown}</'
            parameters.append(["<", mark, head, mark, "parameter>"])
        for at, parameter in enumerate(parameters):
            segments += ["\n", *parameter] if at else parameter
        segments += ["\n</", mark, "invoke>\n"]
    return [*segments, "</", mark, "tool_calls>"]
