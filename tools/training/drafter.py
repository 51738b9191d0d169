"""Trains the three DSpark stages against the frozen target (drafter.md section 9), on corpus text and on rollouts.

A step takes a batch of sequences, runs the target once for taps and logits, and trains blocks at many anchors at once.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.config import ModelConfig
from dsv4.params import Drafter, Params
from tools.training.corpus import Corpus, windows
from tools.training.forward import Sequences
from tools.training.functions import compiled
from tools.training.settings import DRAFTS, Recipe
from tools.training.target import balance, imbalance
from tools.training.training import Trainer
from tools.training.weights import make_params


def markov_logits(p: Drafter, h: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher forced: logits [R, k, V] and confidence logits [R, k] given the true token before each row, [R, k]."""
    embedded = p.markov_w1[before.flatten()]
    bias = (embedded.bfloat16() @ p.markov_w2.bfloat16().T).float()
    confidence = torch.cat([h, embedded], 1) @ p.confidence.T
    return base + bias.view_as(base), confidence.view(base.shape[:2])


@compiled
def _row_losses(logits: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: cross entropy, L1 distance of the two distributions, and whether their greedy tokens agree."""
    logp = logits - logits.logsumexp(-1, keepdim=True)
    hit = torch.arange(logits.shape[-1]) == labels.unsqueeze(-1)
    distance = (logp.exp() - target.softmax(-1)).abs().sum(-1)
    return -(logp * hit).sum(-1), distance, logits.argmax(-1) == target.argmax(-1)


def draft_losses(logits: Tensor, confidence: Tensor, target: Tensor, labels: Tensor, gamma: float) -> dict[str, Tensor]:
    """Weighted losses over rows [R, k] of draft logits [R, k, V] against the target's logits and the next tokens.

    `chain`: tokens per verify step if every draft saw the true token before it: one, and the leading rows whose greedy token
    is the target's.
    """
    weight = torch.exp(-torch.arange(logits.shape[1]) / gamma)
    weight = weight / (weight.sum() * logits.shape[0])
    ce, distance, agree = _row_losses(logits, target, labels)
    accept = 1 - 0.5 * distance.detach()
    bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    return {
        "ce": (weight * ce).sum(), "tv": (weight * distance).sum(), "confidence": (weight * bce).sum(),
        "chain": agree.float().cumprod(1).sum(1).mean() + 1,
    }  # fmt: skip


def batch_of(
    cfg: ModelConfig, corpus: Corpus, rollouts: dict[str, Tensor], recipe: Recipe, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sequences [B, S] and anchor positions [B, n]: the first rows are corpus text, the others rollouts."""
    rows, length = recipe.drafter_rows, rollouts["ids"].shape[1]
    plain = round(rows * recipe.corpus_fraction)
    chosen = torch.randint(0, len(rollouts["ids"]), (rows - plain,), generator=rng)
    ids = torch.cat([windows(corpus.train, plain, length, rng, cfg.bos_token_id), rollouts["ids"][chosen]])
    # Row k of a block predicts position anchor + 1 + k, which must be inside the text.
    first = torch.cat([torch.ones(plain, dtype=torch.int32), rollouts["begin"][chosen]])
    last = torch.cat([torch.full((plain,), length), rollouts["end"][chosen]]) - DRAFTS - 1
    span = (last - first + 1).clamp(min=1)
    anchors = first.unsqueeze(1) + (torch.rand(rows, recipe.anchors, generator=rng) * span.unsqueeze(1)).int()
    return ids, anchors.clamp(max=length - DRAFTS - 1)


def train_drafter(
    cfg: ModelConfig, named: dict[str, Tensor], corpus: Corpus, rollouts: dict[str, Tensor], recipe: Recipe, work: Path
) -> Trainer:
    """Trains the `mtp.*` weights of `named` in place, resuming from `work`."""
    drafter = {name: weight for name, weight in named.items() if name.startswith("mtp.")}
    trainer = Trainer(
        work / "drafter.pt", drafter, lambda name: True, recipe.drafter_steps, recipe.drafter_lr, recipe.warmup_steps, 0.0,
        recipe.seed + 2, recipe.drafter_level,
    )  # fmt: skip
    length = rollouts["ids"].shape[1]
    sequences = Sequences(cfg, recipe.drafter_rows, length, select=True)
    with torch.no_grad():
        frozen = make_params(cfg, named, length + DRAFTS, quantised=True, drafter=False).target
    prefixes = [f"mtp.{stage}" for stage in range(cfg.num_stages)]
    offsets = torch.arange(DRAFTS)

    def loss_of(step: int, rng: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        ids, anchors = batch_of(cfg, corpus, rollouts, recipe, rng)
        params: Params = make_params(cfg, drafter, length + DRAFTS, quantised=True, drafter=True, target=frozen)
        with torch.no_grad():
            scores, taps, at = sequences.target(params, ids)
        h, base = sequences.blocks(params, taps, at, anchors, DRAFTS)
        rows = torch.arange(len(ids)).repeat_interleave(anchors.shape[1]).unsqueeze(1)
        positions = anchors.flatten().unsqueeze(1) + offsets  # [R, k]: the target's row that predicts the same token
        logits, confidence = markov_logits(params.drafter, h, base, ids[rows, positions].long())
        losses = draft_losses(
            logits, confidence, scores.view(len(ids), length, -1)[rows, positions], ids[rows, positions + 1].long(), recipe.gamma
        )  # fmt: skip
        loss = 0.1 * losses["ce"] + 0.9 * losses["tv"] + losses["confidence"]
        return loss, {name: value.item() for name, value in losses.items()} | {
            "busiest": imbalance(sequences.ops.loads)
        }

    def after() -> None:
        with torch.no_grad():
            balance(cfg, drafter, prefixes, sequences.ops.loads, recipe.bias_speed)

    trainer.run(loss_of, after=after)
    return trainer
