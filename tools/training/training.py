"""What both trainings share: parameters under AdamW, a schedule, a resumable file, progress lines."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dsv4.checkpoint.files import write_atomic


def learning_rate(step: int, steps: int, warmup: int, level: float) -> float:
    """Fraction of the peak: linear warm-up, level until `level` of all steps, then a straight line to zero.

    Until the decline starts nothing depends on `steps`, so a run can still be lengthened.
    """
    return min(1.0, (step + 1) / warmup, (steps - step) / ((1 - level) * steps))


def is_frozen(name: str) -> bool:
    """Not trained by gradients: integer tables, and router biases, which follow the load."""
    return name.endswith(("tid2eid", "gate.bias"))


@dataclass
class Trainer:
    """Named weights and all that is needed to go on after an interruption.

    A loss function maps (step, rng) to a loss and figures to record; `after` runs when the weights have moved. `stop` ends the
    training before its schedule of `steps` does.
    """

    path: Path
    named: dict[str, Tensor]
    trained: Callable[[str], bool]
    steps: int
    lr: float
    warmup: int
    weight_decay: float
    seed: int
    level: float
    stop: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        decayed, plain = [], []
        for name, weight in self.named.items():
            if self.trained(name) and not is_frozen(name):
                weight.requires_grad_()
                matrix = weight.ndim == 2 and "hc_" not in name and "embed" not in name and "markov_w1" not in name
                (decayed if matrix else plain).append(weight)
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=self.lr, betas=(0.9, 0.97), eps=1e-10, fused=True,
        )  # fmt: skip
        self.parameters = [*decayed, *plain]
        if self.path.exists():
            self._load()

    def _load(self) -> None:
        saved = torch.load(self.path, weights_only=True)
        for name, value in saved["named"].items():
            self.named[name].detach().copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.history = saved["step"], saved["history"]

    def save(self) -> None:
        part = self.path.with_suffix(".part")
        named = {n: w.detach() for n, w in self.named.items()}
        torch.save(
            {"named": named, "optimizer": self.optimizer.state_dict(), "step": self.step, "history": self.history}, part
        )
        part.replace(self.path)
        write_atomic(self.path.with_suffix(".json"), json.dumps(self.history))

    def run(self, loss_of: Callable[[int, torch.Generator], tuple[Tensor, dict[str, float]]], *,
            after: Callable[[], None] = lambda: None, evaluate: Callable[[], dict[str, float]] | None = None,
            every: int = 250) -> None:  # fmt: skip
        """Trains to `steps`, printing a line every 20 steps and saving (with `evaluate`'s figures) every `every`."""
        begun, cpu, first = time.perf_counter(), time.process_time(), self.step
        sums: dict[str, list[float]] = {}
        last = self.stop or self.steps
        while self.step < last:
            rng = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
            loss, figures = loss_of(self.step, rng)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * learning_rate(self.step, self.steps, self.warmup, self.level)
            self.optimizer.step()
            self.optimizer.zero_grad()
            after()
            self.step += 1
            for name, value in ({"loss": loss.item(), "norm": norm.item()} | figures).items():
                sums.setdefault(name, []).append(value)
            done = self.step == last
            if self.step % 20 == 0 or done:
                line = {"step": self.step} | {n: round(sum(v) / len(v), 4) for n, v in sums.items()}
                sums.clear()
                if evaluate and (self.step % every == 0 or done):
                    line |= {n: round(v, 4) for n, v in evaluate().items()}
                self.history.append(line)
                pace = (time.perf_counter() - begun) / (self.step - first)
                busy = (time.process_time() - cpu) / (self.step - first)
                left = f"{pace * 1e3:.0f} ({busy * 1e3:.0f} cpu) ms/step, {pace * (last - self.step) / 60:.1f} min left"
                print("  ".join(f"{n} {v}" for n, v in line.items()), f"  {left}", flush=True)
            if self.step % every == 0 or done:
                self.save()
