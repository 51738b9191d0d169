"""Ranks over gloo give the tokens of one process: TP x DP = EP, rows split over TP, experts over EP, vocabulary over TP."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dsv4.checkpoint.load import random_params
from dsv4.config import ParallelConfig
from dsv4.mesh import SINGLE, join
from dsv4.model.context import Env
from dsv4.ops.table import PLAIN
from tests.support.models import tiny_config
from tests.support.runner import Runner

PROMPT = [(7 * i * i + 3) % 150 for i in range(140)]
TOKENS = 9


def config(w8a8: bool):
    return tiny_config(quant_format="w8a8" if w8a8 else "none", num_hidden_layers=4, compress_ratios=(0, 4, 128, 4, 0, 0, 0),
                       dspark_target_layer_ids=(1, 2, 3))  # fmt: skip


def generate(mesh, k: int, w8a8: bool) -> list[int]:
    cfg = config(w8a8)
    params = random_params(cfg, 5, None if w8a8 else torch.float32, mesh=mesh, max_positions=512, drafter=k > 0)
    runner = Runner(cfg, params, k=k, slots=2)
    runner.env = Env(cfg=cfg, ops=PLAIN, mesh=mesh)
    return runner.generate(0, PROMPT, TOKENS)


def _rank(rank: int, store: str, parallel: ParallelConfig, k: int, w8a8: bool, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, parallel.ep), rank=rank, world_size=parallel.ep)
    tokens = generate(join(parallel), k, w8a8)
    Path(out, str(rank)).write_text(" ".join(map(str, tokens)))
    dist.destroy_process_group()


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "tp", "k", "w8a8"), [(1, 2, 0, True), (1, 2, 7, True), (2, 1, 7, True), (2, 2, 7, True)]
)
def test_ranks_give_the_tokens_of_one_process(dp: int, tp: int, k: int, w8a8: bool) -> None:
    """Every DP group runs the same request here, so every rank must emit the same tokens."""
    expected = generate(SINGLE, k, w8a8)
    parallel = ParallelConfig(dp=dp, tp=tp, ep=dp * tp)
    with tempfile.TemporaryDirectory() as folder:
        args = (os.path.join(folder, "store"), parallel, k, w8a8, folder)
        mp.start_processes(_rank, args, nprocs=parallel.ep, start_method="spawn")
        got = [[int(t) for t in Path(folder, str(r)).read_text().split()] for r in range(parallel.ep)]
    assert got == [expected] * parallel.ep
