"""Text the drafter must predict: the target's own greedy continuations of training text, in W8A8, by the serving engine."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from dsv4.config import ModelConfig
from tools.training.corpus import Corpus
from tools.training.export import write_checkpoint, write_w8a8
from tools.training.generate import continuations
from tools.training.settings import Recipe


def prompts_of(stream: Tensor, count: int, shortest: int, longest: int, seed: int) -> list[list[int]]:
    """`count` random stretches of the stream, of random lengths."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=rng)
    starts = torch.randint(0, len(stream) - longest, (count,), generator=rng)
    return [stream[s : s + n].tolist() for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


def make_rollouts(
    cfg: ModelConfig,
    named: dict[str, Tensor],
    corpus: Corpus,
    tokenizer: Tokenizer,
    recipe: Recipe,
    work: Path,
    threads: int,
    *,
    name: str,
    count: int,
    seed: int,
) -> dict[str, Tensor]:
    """{"ids": int32 [n, rollout_length], "begin": int32 [n], "end": int32 [n]}: generated tokens lie in begin .. end-1.

    Kept in `work` as `name`; made once.
    """  # fmt: skip
    saved = work / name
    if saved.exists():
        return torch.load(saved, weights_only=True)
    write_checkpoint(work / "target-source", named, tokenizer)
    write_w8a8(work / "target-source", work / "target-w8a8")
    length = recipe.rollout_length
    prompts = prompts_of(corpus.train, count, 16, length // 2, seed)
    answers = continuations(work / "target-w8a8", prompts, length // 2, drafts=0, rows=64, threads=threads)
    ids = torch.full((len(prompts), length), cfg.eos_token_id, dtype=torch.int32)
    for row, prompt, answer in zip(ids, prompts, answers, strict=True):
        whole = torch.tensor(prompt + answer.tokens, dtype=torch.int32)
        row[: len(whole)] = whole
    begin = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
    end = begin + torch.tensor([len(a.tokens) for a in answers], dtype=torch.int32)
    rollouts = {"ids": ids, "begin": begin, "end": end}
    torch.save(rollouts, saved)
    return rollouts
