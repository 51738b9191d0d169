"""Trains the target: next-token prediction, balanced routers, an indexer that follows attention, simulated rounding."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.config import ModelConfig
from tools.training.corpus import Corpus, stretches, windows
from tools.training.forward import Sequences
from tools.training.functions import CrossEntropy
from tools.training.settings import Recipe
from tools.training.training import Trainer
from tools.training.weights import make_params

EVALUATED = 64  # held-out sequences looked at during training


def balance(cfg: ModelConfig, named: dict[str, Tensor], prefixes: list[str], loads: list[Tensor], speed: float) -> None:
    """Moves each learned router's selection bias by `speed` towards equal load (no auxiliary loss)."""
    for prefix, load in zip(prefixes, loads, strict=True):
        named[f"{prefix}.ffn.gate.bias"].sub_(speed * torch.sign(load - load.float().mean()))


def imbalance(loads: list[Tensor]) -> float:
    """Load of the busiest expert over the mean, worst layer."""
    return max((load.max() / load.float().mean()).item() for load in loads)


@torch.no_grad()
def held_out_loss(cfg: ModelConfig, named: dict[str, Tensor], ids: Tensor, *, quantised: bool, batch: int = 8) -> float:
    """Mean next-token loss in nats over rows of held-out text, [n, S]."""
    params = make_params(cfg, named, ids.shape[1], quantised=quantised, drafter=False)
    sequences = Sequences(cfg, batch, ids.shape[1], select=True)
    losses = []
    for part in ids.split(batch):
        if len(part) == batch:
            logits, *_ = sequences.target(params, part)
            logits = logits.view(batch, -1, logits.shape[-1])[:, :-1].flatten(0, 1)
            losses.append(F.cross_entropy(logits, part[:, 1:].flatten().long()))
    return torch.stack(losses).mean().item()


def train_target(cfg: ModelConfig, named: dict[str, Tensor], corpus: Corpus, recipe: Recipe, work: Path) -> Trainer:
    """Trains `named` in place, resuming from `work`; returns the trainer with its history."""
    trainer = Trainer(
        work / "target.pt", named, lambda name: not name.startswith("mtp."), recipe.target_steps, recipe.target_lr,
        recipe.warmup_steps, recipe.weight_decay, recipe.seed, recipe.plain_fraction,
    )  # fmt: skip
    learned = [f"layers.{i}" for i in range(cfg.num_hash_layers, cfg.num_hidden_layers)]
    tokens = recipe.target_rows * recipe.target_length
    phases = {
        False: Sequences(cfg, recipe.target_rows, recipe.target_length),
        True: Sequences(cfg, tokens // recipe.long_length, recipe.long_length, select=True),
    }
    state: dict[str, list[Tensor]] = {}

    def loss_of(step: int, rng: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        final = step >= recipe.plain_fraction * recipe.target_steps
        sequences = phases[final]
        ids = windows(corpus.train, sequences.rows, sequences.length + 1, rng, cfg.bos_token_id)
        params = make_params(cfg, named, sequences.length, quantised=final, drafter=False)
        logits, *_ = sequences.target(params, ids[:, :-1])
        loss = CrossEntropy.apply(logits, ids[:, 1:].flatten().long())
        state["loads"] = list(sequences.ops.loads)
        figures = {"text": loss.item(), "busiest": imbalance(state["loads"])}
        if final:
            index = sum(sequences.ops.index_losses) / len(sequences.ops.index_losses)
            figures["index"] = index.item()
            loss = loss + recipe.index_weight * index
        return loss, figures

    def after() -> None:
        with torch.no_grad():
            balance(cfg, named, learned, state["loads"], recipe.bias_speed)

    held = stretches(corpus.held_out, recipe.target_length)[:EVALUATED]
    trainer.run(
        loss_of, after=after,
        evaluate=lambda: {"held_out": held_out_loss(cfg, named, held, quantised=trainer.step > recipe.plain_fraction * recipe.target_steps)},
    )  # fmt: skip
    return trainer
