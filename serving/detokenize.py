"""Token ids to text as they arrive: UTF-8 safe, stop strings cut exactly where they begin.

Three small machines, each O(1) amortised per token or character and blind to how tokens are grouped into steps:
`Utf8Decoder` (bytes to characters), `StopMatcher` (characters to a cut), `TextStream` (both, per token).
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serving.request import EngineOutput, TokenLogprobs
from serving.tokenizer import Tokenizer


class StopMatcher:
    """Finds the first place where any stop string ends (Aho and Corasick 1975).

    The automaton's depth is the length of the longest tail that could still become a stop string: exactly what must
    be held back. Of stop strings ending at the same character the longest wins.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._matched = [0]  # length of the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()
        self._first = frozenset(self._next[0])
        self._state = 0
        self._position = 0

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._matched.append(0)
            state = self._next[state][char]
        self._matched[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._matched[state] = self._matched[state] or self._matched[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> int | None:
        """The position, from the start of all text, where the stop string that ended in `text` begins; else None."""
        if not self._state and self._first.isdisjoint(text):
            self._position += len(text)
            return None
        for char in text:
            self._state = self._step(self._state, char)
            self._position += 1
            if self._matched[self._state]:
                return self._position - self._matched[self._state]
        return None


class Utf8Decoder:
    """Bytes to characters, the same characters as one decode of all bytes (invalid ones become U+FFFD)."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes, *, final: bool = False) -> str:
        return self._decoder.decode(data, final)

    @property
    def pending(self) -> bool:
        """Whether the last character is still missing bytes."""
        return bool(self._decoder.getstate()[0])


class TextToken(NamedTuple):
    """A token and the characters it completed; `start` is where they begin in the whole text."""

    token_id: int
    text: str
    start: int
    drafted: bool
    logprobs: TokenLogprobs | None


class TextStream:
    """One request's outputs as tokens with text, each released once no stop string can take it back.

    A token is kept if it begins before the cut or adds nothing past it; the token in which a stop string begins
    keeps its text up to there. What is released in all never depends on how tokens were grouped into outputs.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decoder = Utf8Decoder()
        self._matcher = StopMatcher(stop) if stop else None
        self._held: deque[tuple[TextToken, int]] = deque()  # with the end of the last character each has a part in
        self._chars = 0
        self.stopped = False

    def push(self, output: EngineOutput) -> list[TextToken]:
        """The tokens that `output` settles. After a stop string was found: nothing more."""
        if self.stopped:
            return []
        drafted, logprobs = output.draft_mask, output.logprobs
        for i, token_id in enumerate(output.token_ids):
            data = self._bytes_of[token_id] if token_id < len(self._bytes_of) else b""
            text = self._decoder.push(data)
            token = TextToken(
                token_id, text, self._chars, bool(drafted) and drafted[i], logprobs[i] if logprobs else None
            )
            self._chars += len(text)
            self._held.append((token, self._chars + (bool(data) and self._decoder.pending)))
            if self._matcher and (cut := self._matcher.feed(text)) is not None:
                return self._cut(cut)
        return self._release(self._chars - (self._matcher.held if self._matcher else 0))

    def finish(self) -> list[TextToken]:
        """Everything still held: the request ended without a stop string."""
        tail = self._decoder.push(b"", final=True)
        if tail and self._held:
            last, _ = self._held.pop()
            self._chars += len(tail)
            self._held.append((last._replace(text=last.text + tail), self._chars))
            if self._matcher and (cut := self._matcher.feed(tail)) is not None:
                return self._cut(cut)
        return self._release(self._chars)

    def _release(self, settled: int) -> list[TextToken]:
        """Pops the tokens that lie wholly in the first `settled` characters."""
        released = []
        while self._held and self._held[0][1] <= settled:
            released.append(self._held.popleft()[0])
        return released

    def _cut(self, cut: int) -> list[TextToken]:
        self.stopped = True
        kept = [
            token if end <= cut else token._replace(text=token.text[: cut - token.start])
            for token, end in self._held
            if end <= cut or token.start < cut
        ]
        self._held.clear()
        return kept
