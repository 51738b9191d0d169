"""The trained checkpoint in the repository: whole, small, and really trained."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

import dsv4
from dsv4.checkpoint.folder import open_checkpoint
from tools.training.export import write_w8a8
from tools.training.generate import continuations

DEMO = Path(dsv4.__file__).parent / "demo"
SNIPPET = '''class Stack:
    """A last-in, first-out queue of items."""

    def __init__(self, items=None):
        self.items = []
        if items is not None:
            for item in items:
                self.items.append(item)

    def __len__(self):
        return len(self.items)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items'''


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_it_is_whole_and_small():
    open_checkpoint(DEMO, dsv4.load_config(DEMO))
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 8_000_000


def test_its_tokenizer_gives_text_back(tokenizer):
    ids = tokenizer.encode(SNIPPET).ids
    assert tokenizer.decode(ids) == SNIPPET
    assert len(ids) < len(SNIPPET) / 2.5
    assert tokenizer.get_vocab_size() == dsv4.load_config(DEMO).vocab_size


def test_it_expects_python(tokenizer):
    cfg = dsv4.load_config(DEMO)
    ids = torch.tensor(tokenizer.encode(SNIPPET).ids, dtype=torch.int32)
    params = dsv4.load_params(DEMO, cfg, torch.float32, max_positions=len(ids), drafter=False)
    logits = dsv4.forward(cfg, params, ids).logits
    loss = F.cross_entropy(logits[:-1], ids[1:].long())
    assert loss < 3.2, f"{loss:.2f} nats per token; an untrained model gives 7.6"


@pytest.mark.slow
def test_its_drafter_is_believed_and_changes_nothing(tokenizer, tmp_path):
    write_w8a8(DEMO, tmp_path / "w8a8")
    lines = SNIPPET.splitlines(keepends=True)
    prompts = [tokenizer.encode("".join(lines[:n])).ids for n in range(2, len(lines), 2)]
    plain, drafted = (continuations(tmp_path / "w8a8", prompts, 96, drafts=k, rows=8, threads=1) for k in (0, 7))
    assert [a.tokens for a in plain] == [a.tokens for a in drafted]
    steps = sum(a.speculation.verify_steps for a in drafted)
    assert 1 + sum(a.speculation.accepted for a in drafted) / steps > 1.6  # an untrained drafter gives 1.0
