"""The prose that DeepSeek-V4 was trained to see: tool declaration and reasoning effort.

It belongs to the checkpoint, not to this program: it is found in the Python files of the checkpoint's `encoding/`
folder, which are parsed and never executed. A text is recognised by its digest, so a constant may have any name, and a
text that differs by one character is not used.
"""

import ast
import hashlib
import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from serving.tokenizer import DSML, END_THINK, THINK

_MAX_SOURCE_BYTES = 2**20
_VALUES = {
    "dsml_token": DSML,
    "thinking_start_token": THINK,
    "thinking_end_token": END_THINK,
    "tc_block_name": "tool_calls",
    "tool_calls_block_name": "tool_calls",
}
_SCHEMAS = "tool_schemas"


@dataclass(frozen=True)
class Digest:
    """A text's length in characters and the first 16 hex digits of its SHA-256."""

    length: int
    sha256: str

    def matches(self, text: str) -> bool:
        return len(text) == self.length and hashlib.sha256(text.encode()).hexdigest().startswith(self.sha256)


@dataclass(frozen=True)
class Digests:
    """The known texts. `tools` is of the block that declares the single line `{"name": "f"}`."""

    tools: Digest = Digest(966, "ea63e9b9ea75623d")
    effort: Digest = Digest(476, "f7a24f3b3050d4a8")
    effort_max: Digest = Digest(526, "53fb31b8392ec5b4")


@dataclass(frozen=True)
class ProtocolTexts:
    """What a checkpoint's encoding folder gave.

    tools: text before and after the list of schemas, or None. missing: why there are no tools, for error messages.
    effort, effort_max: paragraphs, or None. The first revision of the checkpoint has only `effort` and uses it for the
    highest efforts; the later one has both and uses `effort` already for high and as default.
    """

    tools: tuple[str, str] | None = None
    effort: str | None = None
    effort_max: str | None = None
    missing: str = "no checkpoint was given to read it from"

    @classmethod
    def load(cls, checkpoint: str | Path, digests: Digests | None = None) -> Self:
        """Reads `checkpoint/encoding/*.py`. A folder without them gives no texts; nothing is executed."""
        digests = digests or Digests()
        folder = Path(checkpoint) / "encoding"
        sources = sorted(folder.glob("*.py"))
        if not sources:
            return cls(missing=f"{folder} has no Python files; copy the folder from the released checkpoint")
        texts = {text for source in sources for text in _texts(source)}
        tools = next((parts for text in texts if (parts := _tools(text, digests.tools))), None)
        return cls(
            tools=tools,
            effort=_find(texts, digests.effort),
            effort_max=_find(texts, digests.effort_max),
            missing="" if tools else f"{folder} holds no tool declaration that this server knows (by its digest)",
        )

    def effort_text(self, effort: str | None) -> str | None:
        """The paragraph for a thinking request: "" where the model gets none, None where it is not at hand."""
        if self.effort_max is not None:
            table = {None: self.effort, "high": self.effort, "xhigh": self.effort, "max": self.effort_max}
        else:
            table = {"xhigh": self.effort, "max": self.effort}
        return table.get(effort, "")


def _find(texts: set[str], digest: Digest) -> str | None:
    return next((v for text in texts for v in (text, text.strip()) if digest.matches(v)), None)


def _tools(template: str, digest: Digest) -> tuple[str, str] | None:
    """The two halves of a tool declaration, if `template` is the known one up to white space around it."""
    before, found, after = template.partition(f"{{{_SCHEMAS}}}")
    head, tail = _fill(before), _fill(after)
    if not found or head is None or tail is None:
        return None
    for start, end in itertools.product((head, head.lstrip()), (tail, tail.rstrip(), tail.rstrip() + "\n")):
        if digest.matches(f'{start}{{"name": "f"}}{end}'):
            return start, end
    return None


def _fill(template: str) -> str | None:
    """`str.format` with the protocol's own names only; None where it asks for anything else."""
    filled = ""
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            filled += literal
            if name is None:
                continue
            if name not in _VALUES or spec or conversion:
                return None
            filled += _VALUES[name]
    except ValueError:
        return None
    return filled


def _texts(source: Path) -> Iterator[str]:
    """Every string a file spells: module constants, built up with `+` and f-strings, and literals anywhere."""
    if source.stat().st_size > _MAX_SOURCE_BYTES:
        return
    try:
        module = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError):
        return
    names: dict[str, str] = {}
    for statement in module.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                text = _evaluate(value, names)
                if text is not None:
                    names[name] = text
    yield from names.values()
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _evaluate(node: ast.expr, names: dict[str, str]) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return names.get(name)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return _evaluate(value, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_evaluate(left, names), _evaluate(right, names)]
        case ast.JoinedStr(values=values):
            parts = [_evaluate(value, names) for value in values]
        case _:
            return None
    return None if None in parts else "".join(parts)
