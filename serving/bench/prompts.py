"""Prompts that are text: pieces of the Python standard library's source, which every machine has.

*cold*: no two prompts of a run share more than a few tokens. *warm*: they share their first three quarters.
"""

import random
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from dsv4.errors import ConfigError

Prompt = str | list[int]
Encode = Callable[[str], list[int]]

CHARACTERS_PER_TOKEN = 4  # of text without a tokenizer at hand
BLOCK = 128  # prefix caches share whole blocks


@cache
def _corpus() -> tuple[str, ...]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]
    texts = [text for text in texts if len(text) > 20_000]
    if not texts:
        raise ConfigError(f"no Python sources in {folder} to make prompts of")
    return tuple(texts)


class Prompts:
    """Endless different prompts of `length` tokens. Without `encode` they are strings of about that many tokens."""

    def __init__(self, length: int, encode: Encode | None = None, seed: int = 0) -> None:
        if length < 1:
            raise ConfigError(f"prompts: expected a length of at least 1 token, got {length}")
        self._length, self._encode = length, encode
        self._rng = random.Random(seed)

    def _piece(self, length: int) -> Prompt:
        """`length` tokens from a random place."""
        if not length:
            return "" if self._encode is None else []
        text, wanted = "", length * CHARACTERS_PER_TOKEN
        while True:
            source = self._rng.choice(_corpus())
            start = self._rng.randrange(len(source))
            text += source[start : start + wanted]
            if self._encode is None:
                if len(text) >= wanted:
                    return text[:wanted]
            elif len(ids := self._encode(text)) >= length:
                return ids[:length]

    def cold(self, count: int) -> list[Prompt]:
        return [self._piece(self._length) for _ in range(count)]

    def warm(self, count: int) -> tuple[Prompt, list[Prompt]]:
        """(the shared beginning, which is to be sent first; prompts that begin with it)."""
        shared = self._length * 3 // 4
        if shared > BLOCK:
            shared -= shared % BLOCK
        head = self._piece(shared)
        return head, [head + self._piece(self._length - shared) for _ in range(count)]


def lengths(prompts: Sequence[Prompt]) -> list[int]:
    """Lengths in tokens, 0 where only a server can tell."""
    return [0 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
