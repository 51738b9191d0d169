"""Text to token ids and back, over a byte-level BPE `tokenizer.json`.

Every id of such a vocabulary stands for a fixed string of bytes, so decoding is concatenation: what `detokenize`
builds on. Special tokens are found by their content, never by a number.
"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from dsv4.errors import CheckpointError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters by which byte-level BPE writes bytes (Radford et al. 2019), and their bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
_TO_LATIN1 = {ord(char): byte for char, byte in _ALPHABET.items()}


def _token_bytes(token: str) -> bytes:
    if _ALPHABET.keys() >= set(token):
        return token.translate(_TO_LATIN1).encode("latin-1")
    return token.encode()  # an added token such as <｜User｜> is written as it reads


class Tokenizer:
    """A checkpoint's vocabulary.

    bytes_of[id] is what the id adds to a text: b"" for special tokens, which a reader never sees.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, origin: str = "tokenizer.json") -> None:
        spec = json.loads(backend.to_str())
        if not _is_byte_level(spec.get("decoder")):
            raise CheckpointError(
                f"{origin}: expected a byte-level decoder as DeepSeek-V4's, found {json.dumps(spec.get('decoder'))}; "
                "use the tokenizer.json that came with the checkpoint"
            )
        self._backend = backend
        self._origin = origin
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._controls = {token["content"]: token["id"] for token in spec["added_tokens"]}
        self.control_ids = frozenset(self._controls.values())
        self.special_ids = frozenset(token["id"] for token in spec["added_tokens"] if token["special"])
        self._raw_bytes = [b""] * self.vocab_size
        for token, token_id in vocabulary.items():
            self._raw_bytes[token_id] = _token_bytes(token)
        self.bytes_of = [b"" if i in self.special_ids else raw for i, raw in enumerate(self._raw_bytes)]

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json`, or the one in a checkpoint folder. Raises CheckpointError."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise CheckpointError(f"{file}: expected a tokenizer, found no such file; copy it from the checkpoint")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer that can be read ({error})") from error
        return cls(backend, origin=str(file))

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own object, for grammar compilers."""
        return self._backend

    def find_control(self, content: str) -> int | None:
        """The id of an added token by its exact content, or None."""
        return self._controls.get(content)

    def control(self, content: str) -> int:
        """The id of an added token by its exact content. Raises CheckpointError where the vocabulary lacks it."""
        token_id = self._controls.get(content)
        if token_id is None:
            raise CheckpointError(f"{self._origin}: the vocabulary has no token {content!r}")
        return token_id

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt. Control tokens written out in it are recognised; none is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_content(self, text: str) -> list[int]:
        """Ids of text that is only text: a control token spelled out by a user stays letters.

        Equal to `encode` wherever no control token is spelled.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        if len(text) == 1 or self.control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        # Cutting each look-alike after its first character leaves pieces in which it cannot match.
        cuts = [
            start + 1
            for token_id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self.control_ids
        ]
        bounds = [0, *cuts, len(text)]
        pieces = (text[start:end] for start, end in itertools.pairwise(bounds))
        return [token_id for piece in pieces for token_id in self.encode_content(piece)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence; special tokens and ids past the vocabulary are silent."""
        return b"".join(self.bytes_of[i] for i in ids if i < self.vocab_size).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones spelled out: for logprobs, where a lone part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special ones spelled out."""
        return self._raw_bytes[token_id] if token_id < self.vocab_size else b""


def _is_byte_level(decoder: dict | None) -> bool:
    match decoder:
        case {"type": "ByteLevel"}:
            return True
        case {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return True
    return False
