"""Engines over worker processes, the small checkpoint they load, and what to compare them with."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dsv4.checkpoint.load import load_params
from dsv4.checkpoint.tiny import make_tiny, tiny_config
from dsv4.config import load_config
from dsv4.ops.cpu import default_ops
from serving.args import EngineArgs, resolve
from serving.build import Started, start_ranks
from serving.capacity import PagePlan
from tests.support.engines import K7
from tests.support.runner import Runner


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids, the same for the same length and seed."""
    return tuple(random.Random(f"{length} {seed}").choices(range(2, 2000), k=length))


def make_checkpoint(folder: Path, **sizes) -> Path:
    """Four layers of all kinds that sixteen ranks can share: 8 heads, 4 groups, 16 experts."""
    sizes = {"num_hidden_layers": 4, "num_hash_layers": 1, "hidden_size": 128, "moe_intermediate_size": 64} | sizes
    make_tiny(folder, raw=tiny_config(**sizes))
    return folder


@contextmanager
def running_ranks(
    model: Path, dp: int, tp: int, k: int = 0, *, pages: dict[str, int] | None = None, **flags
) -> Iterator[Started]:
    """A started engine over dp * tp processes in float32; nothing of it is left afterwards."""
    flags = {"threads": 1, "max_num_seqs": 2 * dp, "max_model_len": 512, "dtype": "float32"} | flags
    cfg = load_config(model)
    args = EngineArgs(
        model=str(model), platform="cpu", dp=dp, tp=tp, ep=dp * tp, speculative_config=K7 if k else None, **flags
    )
    plan = pages and PagePlan(pages=pages, seats=1, cached_blocks=0, total_bytes=0, bound="test")
    started = start_ranks(cfg, resolve(args, cfg, "cpu"), "tiny", plan=plan)
    try:
        yield started
    finally:
        started.engine.close()


class Alone:
    """What one process answers to a request that has it for itself, at K = 0."""

    def __init__(self, model: Path) -> None:
        self.cfg = load_config(model)
        self._params = load_params(model, self.cfg, torch.float32, max_positions=520, drafter=False)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, ids: Sequence[int], count: int) -> list[int]:
        key = (tuple(ids), count)
        if key not in self._known:
            runner = Runner(self.cfg, self._params, ops=default_ops(), slots=1, max_len=512)
            self._known[key] = runner.generate(0, ids, count)
        return self._known[key]
