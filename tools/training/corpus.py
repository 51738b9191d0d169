"""The text: source files of the running interpreter's standard library (PSF licence), split by file."""

import hashlib
import json
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.training import tokenizer as bpe

# Test suites, code page tables and generated text would teach little of what a reader expects to see.
SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__", "lib2to3"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token streams (EOS after every file) and the files behind them."""

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    train_bytes: int
    held_out_bytes: int


def _files() -> dict[str, str]:
    """Path relative to the library -> text, without exact duplicates, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) > 200 and digest not in seen:
            seen.add(digest)
            texts[relative.as_posix()] = text
    return texts


def split(fraction: float, seed: int) -> tuple[dict[str, str], dict[str, str]]:
    """(train, held-out) files; a file's side depends on its name and the seed only."""

    def draw(name: str) -> float:
        return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") / 2**32

    texts = _files()
    held = {name for name in texts if draw(name) < fraction}
    return {n: t for n, t in texts.items() if n not in held}, {n: t for n, t in texts.items() if n in held}


def stream(tokenizer: Tokenizer, texts: dict[str, str], eos: int) -> Tensor:
    """All texts as ids, EOS after each."""
    ids = [np.array([*e.ids, eos], np.int32) for e in tokenizer.encode_batch(list(texts.values()))]
    return torch.from_numpy(np.concatenate(ids))


def load_corpus(work: Path, vocab_size: int, eos: int, fraction: float, seed: int) -> tuple[Corpus, Tokenizer]:
    """The corpus and a tokenizer trained on its training side; the tokenizer is kept in `work`."""
    train, held = split(fraction, seed)
    saved = work / "tokenizer.json"
    if saved.exists():
        tokenizer = Tokenizer.from_file(str(saved))
    else:
        tokenizer = bpe.train(vocab_size, list(train.values()))
        saved.write_text(tokenizer.to_str())
    corpus = Corpus(
        train=stream(tokenizer, train, eos), held_out=stream(tokenizer, held, eos), train_files=tuple(train),
        held_out_files=tuple(held), train_bytes=sum(len(t.encode()) for t in train.values()),
        held_out_bytes=sum(len(t.encode()) for t in held.values()),
    )  # fmt: skip
    record = {"python": sys.version.split()[0], "train": corpus.train_files, "held_out": corpus.held_out_files}
    (work / "files.json").write_text(json.dumps(record, indent=0))
    return corpus, tokenizer


def windows(stream: Tensor, count: int, length: int, rng: torch.Generator, bos: int) -> Tensor:
    """`count` random stretches of the stream, int32 [count, length]; half of them open with BOS."""
    starts = torch.randint(0, len(stream) - length, (count,), generator=rng)
    ids = stream[starts[:, None] + torch.arange(length)]
    ids[: count // 2, 0] = bos
    return ids


def stretches(stream: Tensor, length: int) -> Tensor:
    """The whole stream in rows, int32 [n, length]: the fixed evaluation set."""
    return stream[: len(stream) // length * length].view(-1, length)
