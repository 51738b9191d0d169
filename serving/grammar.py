"""Constrained decoding: which tokens may come next, for the rows of a verify step, over llguidance (extra `grammar`).

A `Compiler` turns what a request asks for into a `Grammar` (text, checked, cheap to carry); the engine makes one
`Matcher` per request from it. Each step: `masks(drafts)` before the verify, `accept(tokens)` after it, and `forced()`
for tokens that have no alternative and may go into the draft block. Masking the target's logits and never the drafter
makes the output equal to constrained greedy decoding without drafts.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4.errors import EngineError, PlatformError, RequestError
from serving import dsml_grammar
from serving.tokenizer import DSML, END_THINK, Tokenizer

if TYPE_CHECKING:
    import llguidance

# Free JSON may be on one line or laid out, but a model must not be able to fill its budget with blanks.
_JSON = {"whitespace_pattern": r"( |\n[ \t]{0,40})"}
_MAX_SCHEMA_CHARS = 65_536


class Compiler:
    """Compiles constraints over one vocabulary. Thread-safe; the vocabulary's tables are built at the first use (seconds).

    vocab_size: width of the logits, which may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise PlatformError("constrained output needs llguidance: pip install 'dsv4[grammar]'") from error
        self._library = llguidance
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self._tables: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()

    @property
    def tables(self) -> "llguidance.LLTokenizer":
        with self._lock:
            if self._tables is None:
                spec = json.loads(self._tokenizer.backend.to_str())
                for token in spec["added_tokens"]:
                    token["special"] = True  # so that free text can neither spell nor contain a control token
                self._tables = self._library.LLTokenizer(
                    json.dumps(spec), n_vocab=self.vocab_size, eos_token=self.eos_token_id
                )
            return self._tables

    def tools(
        self, functions: Sequence[Mapping[str, Any]], *, choice: str, parallel: bool, thinking: bool
    ) -> "Grammar":
        """Calls of `functions`: auto allows text too, required wants a call, a name wants one call of that function.

        Parameters of functions marked strict are held to their schema, others to the form of a call.
        """
        named = choice not in ("auto", "required")
        chosen = [function for function in functions if function["name"] == choice] if named else functions
        start, rules = dsml_grammar.block(
            chosen, self._tokenizer.control(DSML), parallel=parallel and not named, free=choice == "auto"
        )
        return self._compile(start, rules, thinking=thinking, param="tools")

    def json_schema(self, schema: Mapping[str, Any], *, thinking: bool) -> "Grammar":
        """One JSON value that satisfies `schema`."""
        try:
            text = json.dumps({**schema, "x-guidance": _JSON}, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, RecursionError) as error:
            raise RequestError(f"response_format: the schema is not JSON ({error})", param="response_format") from error
        return self._compile("value", [f"value: %json {text}"], thinking=thinking, param="response_format")

    def json_object(self, *, thinking: bool) -> "Grammar":
        """Any JSON object."""
        return self.json_schema({"type": "object"}, thinking=thinking)

    def _compile(self, start: str, rules: Sequence[str], *, thinking: bool, param: str) -> "Grammar":
        if sum(map(len, rules)) > _MAX_SCHEMA_CHARS:
            raise RequestError(f"{param}: the schema is larger than {_MAX_SCHEMA_CHARS} characters", param=param)
        thought = f"TEXT <[{self._tokenizer.control(END_THINK)}]> answer" if thinking else "answer"
        lark = "\n".join(["%llguidance {}", f"start: {thought}", f"answer: {start}", *rules, dsml_grammar.RULES])
        is_error, messages = self._library.LLMatcher.validate_grammar_with_warnings(lark, self.tables)
        if is_error:
            reason = messages[0].splitlines()[0]
            raise RequestError(
                f"{param}: the schema cannot be enforced: {reason}", param=param, code="unsupported_schema"
            )
        return Grammar(self, lark)


@dataclass(frozen=True)
class Grammar:
    """A checked constraint; goes into `SamplingParams.grammar`."""

    compiler: Compiler
    lark: str

    def matcher(self) -> "Matcher":
        """A fresh matcher at the beginning of the answer."""
        return Matcher(self)


class Matcher:
    """Where one request stands in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        compiler = grammar.compiler
        self._matcher = compiler._library.LLMatcher(compiler.tables, grammar.lark)
        self._words = (compiler.vocab_size + 31) // 32
        self._vocab_size = compiler.vocab_size
        self._eos = compiler.eos_token_id
        self._ended = False  # EOS was accepted: whatever follows is free

    def masks(self, drafts: Sequence[int]) -> tuple[int, np.ndarray]:
        """For the rows of a verify step: how many drafts are legal (v), and packed masks of rows 0 to v.

        Masks are int32 [v + 1, ceil(vocab / 32)], bit i % 32 of word i // 32 for token i. Row r holds the tokens legal
        after the first r drafts. The matcher stays where it is. Raises EngineError where nothing is legal.
        """
        rows = np.empty((len(drafts) + 1, self._words), np.int32)
        ended, taken, valid = self._ended, 0, 0
        try:
            for row in range(len(drafts) + 1):
                rows[row] = self._row()
                if row == len(drafts):
                    break
                step = self._take(drafts[row])
                if step is None:
                    break
                taken += step
                valid += 1
        finally:
            self._ended = ended
            if taken and not self._matcher.rollback(taken):
                raise EngineError(f"the grammar could not go back {taken} tokens: {self._matcher.get_error()}")
        return valid, rows[: valid + 1]

    def accept(self, tokens: Sequence[int]) -> None:
        """Moves on by what was emitted. Raises EngineError for a token that its mask forbade."""
        for token in tokens:
            if self._take(token) is None:
                raise EngineError(f"token {token} was emitted although the grammar forbids it")

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice."""
        if self._ended:
            return []
        if self._matcher.is_stopped():
            return [self._eos]
        return self._matcher.compute_ff_tokens()

    def _row(self) -> np.ndarray | int:
        if self._ended:
            return -1
        row = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        if self._matcher.is_error() or not row.any():
            raise EngineError(f"the grammar allows no token: {self._matcher.get_error() or 'empty mask'}")
        return row

    def _take(self, token: int) -> int | None:
        """Consumes a token; how many the matcher must roll back to undo it, or None where it is not legal."""
        if self._ended:
            return 0
        if self._matcher.is_stopped():  # complete: only EOS is left, which the matcher itself does not take
            self._ended = token == self._eos
            return 0 if self._ended else None
        if not self._matcher.try_consume_tokens([token]):
            return None
        self._ended = token == self._eos
        return 1
