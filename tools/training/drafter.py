"""Trains the three DSpark stages against the frozen target (drafter.md section 9), on corpus text and on rollouts.

Two phases: first corpus text and rollouts, the target run for every batch; then other rollouts alone, whose taps and logits are
computed once, at a low temperature, because greedy text is what the drafter will have to predict.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.config import ModelConfig
from dsv4.model.context import StepContext
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


def corpus_batch(
    cfg: ModelConfig, corpus: Corpus, rollouts: dict[str, Tensor], recipe: Recipe, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sequences [B, S] and anchor positions [B, n]: the first rows are corpus text, the others rollouts."""
    length = rollouts["ids"].shape[1]
    plain = round(recipe.drafter_rows * recipe.corpus_fraction)
    chosen = torch.randint(0, len(rollouts["ids"]), (recipe.drafter_rows - plain,), generator=rng)
    ids = torch.cat([windows(corpus.train, plain, length, rng, cfg.bos_token_id), rollouts["ids"][chosen]])
    first = torch.cat([torch.ones(plain, dtype=torch.int32), rollouts["begin"][chosen]])
    end = torch.cat([torch.full((plain,), length), rollouts["end"][chosen]])
    return ids, draw_anchors(first, end, recipe.anchors, rng)


def draw_anchors(first: Tensor, end: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """`count` positions in each row, such that a block's last prediction, at anchor + DRAFTS, lies before `end`."""
    span = (end - DRAFTS - first).clamp(min=1)
    draws = torch.rand(len(first), count, generator=rng)
    return torch.minimum(first.unsqueeze(1) + (draws * span.unsqueeze(1)).int(), (end - DRAFTS - 1).unsqueeze(1))


class Outputs:
    """What the frozen target gives for every rollout, computed once: tap means bf16, and logits bf16 of generated rows."""

    @torch.no_grad()
    def __init__(self, sequences: Sequences, params: Params, rollouts: dict[str, Tensor]) -> None:
        self.ids, self.begin, self.end = rollouts["ids"], rollouts["begin"].long(), rollouts["end"].long()
        self.kept = self.begin - DRAFTS  # a block may begin in the prompt where an answer is shorter than a block
        self.taps: list[list[Tensor]] = []
        self.logits: list[Tensor] = []
        rows, length = sequences.rows, sequences.length
        for first in range(0, len(self.ids) - rows + 1, rows):
            scores, taps, self.at = sequences.target(params, self.ids[first : first + rows])
            means = [tap.mean(1).bfloat16().view(rows, length, -1) for tap in taps]
            for row, kept in enumerate(scores.view(rows, length, -1)):
                self.taps.append([mean[row] for mean in means])
                self.logits.append(kept[self.kept[first + row] : self.end[first + row]].bfloat16())

    def batch(self, chosen: list[int], anchors: Tensor) -> tuple[list[Tensor], StepContext, Tensor]:
        """Taps as streams of one, the step's context, and logits [B, n, k, V] of the blocks at `anchors` [B, n]."""
        taps = [torch.cat(parts).float().unsqueeze(1) for parts in zip(*(self.taps[c] for c in chosen), strict=True)]
        rows = anchors.unsqueeze(2) + torch.arange(DRAFTS)
        logits = [self.logits[c][r - self.kept[c]].float() for c, r in zip(chosen, rows, strict=True)]
        return taps, replace(self.at, ids=self.ids[chosen].flatten()), torch.stack(logits)


class DrafterTraining:
    """Both phases. Every step runs blocks at many anchors of a batch and compares them with the target's rows."""

    def __init__(
        self, cfg: ModelConfig, named: dict[str, Tensor], corpus: Corpus, rollouts: dict[str, Tensor], recipe: Recipe
    ) -> None:
        self.cfg, self.corpus, self.rollouts, self.recipe = cfg, corpus, rollouts, recipe
        self.drafter = {name: weight for name, weight in named.items() if name.startswith("mtp.")}
        self.length = rollouts["ids"].shape[1]
        self.sequences = Sequences(cfg, recipe.drafter_rows, self.length, select=True)
        with torch.no_grad():
            params = make_params(cfg, named, self.length + DRAFTS, quantised=True, drafter=False)
        self.frozen, self.rope = params.target, params.rope

    def params(self) -> Params:
        return make_params(
            self.cfg, self.drafter, self.length + DRAFTS, quantised=True, drafter=True, target=self.frozen
        )

    def losses(
        self, params: Params, ids: Tensor, anchors: Tensor, taps: list[Tensor], at: StepContext, target: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """The weighted sum, and its parts as numbers. `target` [B * n, k, V]: logits of the rows that predict the same tokens."""
        h, base = self.sequences.blocks(params, taps, at, anchors, DRAFTS)
        rows = torch.arange(len(ids)).repeat_interleave(anchors.shape[1]).unsqueeze(1)
        positions = anchors.flatten().unsqueeze(1) + torch.arange(DRAFTS)
        logits, confidence = markov_logits(params.drafter, h, base, ids[rows, positions].long())
        parts = draft_losses(logits, confidence, target, ids[rows, positions + 1].long(), self.recipe.gamma)
        loss = 0.1 * parts["ce"] + 0.9 * parts["tv"] + parts["confidence"]
        figures = {name: value.item() for name, value in parts.items()}
        return loss, figures | {"busiest": imbalance(self.sequences.ops.loads)}

    def first_step(self, step: int, rng: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Corpus and rollouts, the target's distribution as it is."""
        ids, anchors = corpus_batch(self.cfg, self.corpus, self.rollouts, self.recipe, rng)
        params = self.params()
        with torch.no_grad():
            scores, taps, at = self.sequences.target(params, ids)
        rows = torch.arange(len(ids)).repeat_interleave(anchors.shape[1]).unsqueeze(1)
        positions = anchors.flatten().unsqueeze(1) + torch.arange(DRAFTS)
        return self.losses(params, ids, anchors, taps, at, scores.view(len(ids), self.length, -1)[rows, positions])

    def tune_step(self, outputs: Outputs, rng: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Rollouts only, the target's distribution sharpened towards the greedy token."""
        chosen = torch.randint(0, len(outputs.logits), (self.recipe.drafter_rows,), generator=rng).tolist()
        anchors = draw_anchors(outputs.begin[chosen], outputs.end[chosen], self.recipe.anchors, rng)
        taps, at, target = outputs.batch(chosen, anchors)
        sharp = target.flatten(0, 1) / self.recipe.temperature
        return self.losses(self.params(), outputs.ids[chosen], anchors, taps, at, sharp)

    def after(self) -> None:
        prefixes = [f"mtp.{stage}" for stage in range(self.cfg.num_stages)]
        with torch.no_grad():
            balance(self.cfg, self.drafter, prefixes, self.sequences.ops.loads, self.recipe.bias_speed)

    def trainer(self, path: Path, steps: int, lr: float, seed: int, stop: int | None = None) -> Trainer:
        recipe = self.recipe
        return Trainer(
            path, self.drafter, lambda name: True, steps, lr, recipe.warmup_steps, 0.0, seed, recipe.drafter_level, stop
        )


def train_drafter(
    cfg: ModelConfig,
    named: dict[str, Tensor],
    corpus: Corpus,
    rollouts: dict[str, Tensor],
    tune_rollouts: dict[str, Tensor],
    recipe: Recipe,
    work: Path,
) -> None:
    """Trains the `mtp.*` weights of `named` in place, resuming from `work`."""
    training = DrafterTraining(cfg, named, corpus, rollouts, recipe)
    first = training.trainer(
        work / "drafter.pt", recipe.drafter_steps, recipe.drafter_lr, recipe.seed + 2, recipe.drafter_stop
    )
    first.run(training.first_step, after=training.after)
    tune = training.trainer(work / "tune.pt", recipe.tune_steps, recipe.tune_lr, recipe.seed + 4)
    outputs = Outputs(training.sequences, training.params(), tune_rollouts)
    tune.run(lambda step, rng: training.tune_step(outputs, rng), after=training.after)
