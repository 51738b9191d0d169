"""Tool calls as a grammar: the DSML block in Lark, with every parameter's type held to its schema.

Lark here is llguidance's: `<[ID]>` is a token by id, which no text can spell, `%json` a JSON schema.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsv4.errors import RequestError

# DSML carries JSON as Python's json.dumps writes it; a fixed form also leaves the model fewer choices to get wrong.
_PYTHON_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# What a JSON schema may say about a string and raw text still satisfies.
_PLAIN_STRING = {"type", "title", "description", "default", "examples", "deprecated", "$comment"}

RULES = r"""
TEXT: /(?s:.*)/
LEAD: /(?s:.*)</
VALUE: /(?s:.*)<\//
NAME: /[^"<>\n]+/
"""


def block(functions: Sequence[Mapping[str, Any]], mark: int, *, parallel: bool, free: bool) -> tuple[str, list[str]]:
    """The start expression and the rules of an answer that calls `functions`.

    mark: the id of the ｜DSML｜ token. free: text without a call is also an answer, and may precede one.
    Raises RequestError where a strict schema is not an object's.
    """
    m = f"<[{mark}]>"
    call = "call+" if parallel else "call"
    inner = f'{m} "tool_calls>\\n" {call} "</" {m} "tool_calls>"'
    start = f"TEXT | LEAD {inner}" if free else f'"\\n\\n<" {inner}'
    rules = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        head = json.dumps(f'invoke name="{function["name"]}">\n')
        tail = f'"</" {m} "invoke>\\n"'
        if function.get("strict"):
            parameters = list(_parameters(function, at, m))
            rules += [rule for _, rule, _ in parameters]
            body = " ".join(name if required else f"{name}?" for name, _, required in parameters)
            if not any(required for _, _, required in parameters):
                body += ' | "\\n"' if body else '"\\n"'
        else:
            body = 'any_parameter+ | "\\n"'
        # A call without parameters has an empty line in their place.
        rules.append(f'call_{at}: "<" {m} {head} ({body}) {tail}')
    rules += [
        f'any_parameter: "<" {m} "parameter name=\\"" NAME any_value {m} "parameter>\\n"',
        'any_value: "\\" string=\\"true\\">" VALUE | "\\" string=\\"false\\">" any_json "</"',
        "any_json: %json " + json.dumps({"x-guidance": _PYTHON_JSON}),
    ]
    return start, rules


def _parameters(function: Mapping[str, Any], at: int, m: str) -> Iterator[tuple[str, str, bool]]:
    """Name of the rule, rule, and whether it is required, in the order of the schema."""
    schema = function.get("parameters") or {}
    kind = schema.get("type", "object")
    if kind != "object" or any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "not")):
        raise RequestError(
            f"tools: the parameters of the strict function {function['name']!r} must be a plain object schema",
            param="tools",
        )
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise RequestError(f"tools: the parameters of {function['name']!r} are not a JSON schema", param="tools")
    if missing := [name for name in required if name not in properties]:
        raise RequestError(
            f"tools: the strict function {function['name']!r} requires {missing[0]!r} without declaring it",
            param="tools",
        )
    for number, (name, value) in enumerate(properties.items()):
        if set(name) & set('"<>\n'):
            raise RequestError(f"tools: the parameter name {name!r} cannot be written in a tool call", param="tools")
        if value is False:
            continue
        rule = f"p_{at}_{number}"
        form = _value({} if value is True else value, definitions)
        open_tag = json.dumps(f'parameter name="{name}" string="', ensure_ascii=False)
        yield rule, f'{rule}: "<" {m} {open_tag} ({form}) {m} "parameter>\\n"', name in required


def _value(schema: Any, definitions: Mapping[str, Any]) -> str:
    """Raw text for strings that may be anything, the literal texts of an enum, JSON for all else."""
    if not isinstance(schema, Mapping):
        raise RequestError("tools: a parameter's schema must be an object", param="tools")
    if schema.get("type") == "string" and set(schema) <= _PLAIN_STRING:
        return '"true\\">" VALUE'
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if (
        _are_texts(choices)
        and schema.get("type", "string") == "string"
        and set(schema)
        <= _PLAIN_STRING
        | {
            "enum",
            "const",
        }
    ):
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return f'"true\\">" ({texts}) "</"'
    whole = {**schema, **definitions, "x-guidance": _PYTHON_JSON}
    return f'"false\\">" %json {json.dumps(whole, ensure_ascii=False)} "</"'


def _are_texts(choices: Any) -> bool:
    return isinstance(choices, list) and bool(choices) and all(isinstance(c, str) and c for c in choices)
