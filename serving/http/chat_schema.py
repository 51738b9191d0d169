"""Bodies with messages, and every check that the V4 protocol needs before it can write them down."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, model_validator
from pydantic_core import PydanticCustomError

from dsv4.errors import RequestError
from serving.http.schema import MAX_LOGPROBS, Body, SamplingBody
from serving.tokenizer import DSML

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_PARAMETER_END = f"</{DSML}parameter>"
_RESULT_END = "</tool_result>"


def _joined(value: object) -> object:
    """Text parts as one text, separated as V4 separates the blocks of a turn."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        match part:
            case {"type": "text", "text": str(text)} if len(part) == 2:
                texts.append(text)
            case {"type": str(kind)} if kind != "text":
                raise PydanticCustomError("content", f"parts of type {kind[:40]!r} are not supported, only text")
            case _:
                raise PydanticCustomError("content", 'a part must be {"type": "text", "text": "..."}')
    return "\n\n".join(texts)


Content = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, str]])]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class CalledFunction(Body):
    name: FunctionName
    arguments: str


class ToolCall(Body):
    """A call the assistant made earlier. `parsed` is filled by the check: its arguments as an object."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    _parsed: dict[str, Any] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Raises RequestError unless they are a JSON object that DSML can carry."""
        if self._parsed is None:
            self._parsed = _arguments(self.function.arguments)
        return self._parsed


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text, parse_constant=_not_json)
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"arguments: expected a JSON object as text, could not read it ({error})") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"arguments: expected a JSON object, got {type(arguments).__name__}")
    for key, value in arguments.items():
        if set(key) & set('"<>'):
            raise RequestError(f'arguments: the key {key!r} has one of " < >, which the tool markup cannot carry')
        if _PARAMETER_END in (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):
            raise RequestError(f"arguments: the value of {key!r} has the text {_PARAMETER_END}, which would end it")
    return arguments


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


class Message(Body):
    """One message. Fields of an assistant message as a client library gives it back are taken, null ones ignored."""

    role: Literal["system", "user", "developer", "assistant", "tool", "latest_reminder"]
    content: Content | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @property
    def thoughts(self) -> str:
        return self.reasoning or self.reasoning_content or ""

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("message", "tool_calls belong to assistant messages only")
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.thoughts)):
            raise PydanticCustomError("message", "content may be null only in an assistant message with tool_calls")
        if self.role == "tool" and not self.tool_call_id:
            raise PydanticCustomError("message", "a tool message needs tool_call_id")
        if self.role == "tool" and _RESULT_END in (self.content or ""):
            raise PydanticCustomError("message", f"a tool result must not contain {_RESULT_END}")
        return self


class Function(Body):
    """A declared function. `declaration` is the line that the model sees: the client's object in the client's order."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    _declaration: str = ""

    @property
    def declaration(self) -> str:
        return self._declaration

    @model_validator(mode="wrap")
    @classmethod
    def _declare(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        function = handler(value)
        given = {key: item for key, item in value.items() if item is not None}
        try:
            function._declaration = json.dumps(given, ensure_ascii=False, allow_nan=False)
            function._declaration.encode()
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError(
                "function", "cannot be written as JSON: {error}", {"error": str(error)}
            ) from error
        return function


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Body):
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class TemplateOptions(Body):
    """chat_template_kwargs."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    drop_thinking: bool | None = None
    reasoning_effort: Effort | None = None


class Prompted(Body):
    """What decides the prompt: shared by chat and by /tokenize with messages."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def options(self) -> TemplateOptions:
        return self.chat_template_kwargs or TemplateOptions()

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or self.options.reasoning_effort

    def thinking(self, default: bool) -> bool:
        """Whether the model thinks before it answers: `none` says no, then the switches, then any other effort."""
        if self.effort == "none":
            return False
        switches = [s for s in (self.options.thinking, self.options.enable_thinking) if s is not None]
        if switches:
            return any(switches)
        return default if self.effort is None else True

    @property
    def choice(self) -> str:
        """none, auto, required, or the name of the one function to call. Call `check_tools` first."""
        if isinstance(self.tool_choice, NamedChoice):
            return self.tool_choice.function.name
        return self.tool_choice or ("auto" if self.tools else "none")

    def check_tools(self) -> None:
        """Raises RequestError where tools, choice and history do not fit together."""
        names = [tool.function.name for tool in self.tools or ()]
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"tools: the name {name!r} is declared twice", param="tools")
        if self.tool_choice not in (None, "none") and not names:
            raise RequestError("tool_choice: there are no tools to choose from; send tools too", param="tool_choice")
        if isinstance(self.tool_choice, NamedChoice) and self.choice not in names:
            raise RequestError(f"tool_choice: no tool is named {self.choice!r}", param="tool_choice")
        check_history(self.messages)


def check_history(messages: Sequence[Message]) -> None:
    """Every result answers one earlier call, once; the last message leaves the turn to the assistant."""
    calls: dict[str, bool] = {}  # id -> answered
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        for number, call in enumerate(message.tool_calls or ()):
            if call.id in calls:
                raise RequestError(f"{where}: the call id {call.id!r} was used before", param=f"{where}.tool_calls")
            calls[call.id] = False
            try:
                _ = call.arguments
            except RequestError as error:
                param = f"{where}.tool_calls[{number}].function.arguments"
                raise RequestError(f"{param}: {error}", param=param) from error
        if message.role == "tool":
            if message.tool_call_id not in calls:
                raise RequestError(
                    f"{where}: no earlier message made the call {message.tool_call_id!r}",
                    param=f"{where}.tool_call_id",
                )
            if calls[message.tool_call_id]:
                raise RequestError(
                    f"{where}: the call {message.tool_call_id!r} was answered before", param=f"{where}.tool_call_id"
                )
            calls[message.tool_call_id] = True
    if messages[-1].role in ("assistant", "latest_reminder"):
        raise RequestError(
            f"messages: the last one is from {messages[-1].role!r}, so there is nothing to answer; "
            "end with a user, developer, system or tool message",
            param="messages",
        )


class ChatBody(SamplingBody, Prompted):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: None = None
    verbosity: None = None

    _NEUTRAL: ClassVar[dict[str, Any]] = SamplingBody._NEUTRAL

    def check_output(self) -> None:
        """Raises RequestError where the fields about the answer contradict each other."""
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                "max_completion_tokens: max_tokens says otherwise; send only one of them", param="max_completion_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs: only meaningful with logprobs true", param="top_logprobs")
        wanted = self.response_format
        if wanted and (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise RequestError(
                "response_format: json_schema must be given exactly when the type is json_schema",
                param="response_format",
            )
        if wanted and wanted.type != "text" and self.choice != "none":
            raise RequestError(
                "response_format: cannot be combined with tools that may be called; send tool_choice none",
                param="response_format",
            )


class TokenizeBody(Prompted):
    """POST /tokenize: either a raw prompt or messages as of chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("tokenize", "send either prompt or messages")
        return self
