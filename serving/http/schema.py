"""Bodies of requests without messages: what is accepted, what is refused and why.

Every optional field takes null. Fields that would change the result in a way this server cannot are accepted only with
the value that changes nothing, so that a client is never silently ignored.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from dsv4.errors import RequestError
from serving.http.settings import GenerationDefaults
from serving.request import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_LOGPROBS = 20


def _text(value: str) -> str:
    """JSON can spell half of a surrogate pair, which no UTF-8 text has."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("text", "it has half of a surrogate pair, which is not a character") from None
    return value


class Body(BaseModel):
    """A JSON object in which unknown fields and near-miss types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        return _text(value) if isinstance(value, str) else value


def _stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "expected a string or a list of strings")
    if not all(stops):
        raise PydanticCustomError("stop", "a stop string must not be empty; send null or [] for none")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError(
            "stop", f"expected at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters"
        )
    return [_text(stop) for stop in stops]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompt(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [_text(value)]
    if _is_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [_text(item) for item in value]
        if all(_is_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt", "expected a string, a list of strings, a non-empty list of token ids, or a list of such lists"
    )


_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}

Stop = Annotated[list[str], PlainValidator(_stop), WithJsonSchema(_STRINGS)]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [*_STRINGS["anyOf"], _IDS, {"type": "array", "minItems": 1, "items": _IDS}]}),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: OpenAI's padding against traffic analysis is not sent


class SamplingBody(Body):
    """Fields that completions and chat share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens: bool | None = None
    seed: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # The only values under which a field that this server does not implement changes nothing.
    _NEUTRAL: ClassVar[dict[str, Any]] = {
        "n": 1,
        "best_of": 1,
        "min_p": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "min_tokens": 0,
        "logit_bias": {},
        "skip_special_tokens": True,
        "stop_token_ids": [],
    }

    def check(self) -> None:
        """Refuses what cannot be honoured. Raises RequestError naming the field."""
        for name, neutral in self._NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value != neutral:
                raise RequestError(
                    f"{name}: this server supports only {neutral!r}, got {value!r}",
                    param=name,
                    code="unsupported_value",
                )
        if self.temperature == 0 or self.top_k == 1:
            return  # greedy whatever the rest says
        for name, neutral in (("temperature", (0,)), ("top_p", (1,)), ("top_k", (-1, 0))):
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name}: decoding is greedy, {name} {value} would sample; leave it out or send temperature 0",
                    param=name,
                    code="unsupported_value",
                )

    def wants_stream(self, defaults: GenerationDefaults) -> bool:
        return defaults.stream if self.stream is None else self.stream

    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, defaults: GenerationDefaults, *, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """The engine's parameters; a field that is present wins over the server's default, even when empty."""
        self.check()
        if self.stream_options is not None and not self.wants_stream(defaults):
            raise RequestError(
                "stream_options: only meaningful with stream true", param="stream_options", code="invalid_value"
            )
        return SamplingParams(
            max_tokens=max_tokens or defaults.max_tokens,
            stop=tuple(self.stop or ()) if "stop" in self.model_fields_set else defaults.stop,
            ignore_eos=defaults.ignore_eos if self.ignore_eos is None else self.ignore_eos,
            logprobs=logprobs,
        )


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    _NEUTRAL: ClassVar[dict[str, Any]] = {
        **SamplingBody._NEUTRAL,
        "echo": False,
        "suffix": "",
        "add_special_tokens": False,
    }


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
