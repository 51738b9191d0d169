"""What the operator of a server decides: defaults of request fields, limits, keys."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dsv4.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Values of request fields that a client leaves out (`--generate-config`)."""

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stream: bool = False
    ignore_eos: bool = False

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parses `--generate-config`. Raises ConfigError naming the field.

        Fields: max_new_tokens, stop, stream, ignore_eos; and temperature, top_p, top_k, seed with greedy values only.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--generate-config: expected a JSON object, could not read it ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"--generate-config: expected a JSON object, got {type(values).__name__}")
        for name, value in values.items():
            if name not in _CHECKS:
                raise ConfigError(f"--generate-config: unknown field {name!r}; known fields are {', '.join(_CHECKS)}")
            expected, accepts = _CHECKS[name]
            if not accepts(value):
                raise ConfigError(f"--generate-config: {name} must be {expected}, got {json.dumps(value)}")
        return cls(
            max_tokens=values.get("max_new_tokens", cls.max_tokens),
            stop=tuple(values.get("stop", cls.stop)),
            stream=values.get("stream", cls.stream),
            ignore_eos=values.get("ignore_eos", cls.ignore_eos),
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


_CHECKS = {
    "max_new_tokens": ("a positive integer", lambda value: _is_int(value) and value > 0),
    "temperature": ("0, because decoding is greedy", lambda value: _is_number(value) and value == 0),
    "top_p": ("1, because decoding is greedy", lambda value: _is_number(value) and value == 1),
    "top_k": ("null or 1, because decoding is greedy", lambda value: value is None or (_is_int(value) and value == 1)),
    "seed": ("null or a non-negative integer", lambda value: value is None or (_is_int(value) and value >= 0)),
    "stop": (
        "a list of non-empty strings",
        lambda value: isinstance(value, list) and all(isinstance(stop, str) and stop for stop in value),
    ),
    "stream": ("true or false", lambda value: isinstance(value, bool)),
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
}


_TIMES = ("body_timeout_s", "request_timeout_s", "stall_timeout_s", "health_timeout_s")


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Limits and manners of one server.

    api_keys: when given, every path but `/health` and the page at `/` wants `Authorization: Bearer KEY`.
    cors_origins: browser origins that may call this server; none by default.
    max_connections: open connections; further ones get 503.
    max_body_bytes: larger requests get 413. max_prompts: prompts in one completion request.
    body_timeout_s: a body must have arrived by then (408).
    request_timeout_s: a request still running then is aborted (504, or an error event in a stream).
    stall_timeout_s: a client that reads nothing of its stream for so long is taken to be gone.
    thinking: whether chat thinks when the request does not say.
    profile_output: folder of step traces; where it is given, POST /start_profile and /stop_profile take them.
    """

    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_connections: int = 4096
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 64
    body_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    stall_timeout_s: float = 60.0
    health_timeout_s: float = 5.0
    thinking: bool = False
    profile_output: Path | None = None

    def __post_init__(self) -> None:
        if any(not key for key in self.api_keys):
            raise ConfigError("--api-key: a key must not be empty; leave the flag out to serve without keys")
        for name in ("max_connections", "max_body_bytes", "max_prompts", *_TIMES):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
