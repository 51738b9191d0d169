"""One rank's step programs at full size, captured on meta tensors under a process group that never communicates."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dsv4.batch import PrefillBatch, RowBatch, make_row_state
from dsv4.cache import Pages, make_cache
from dsv4.checkpoint.load import abstract_params
from dsv4.config import ModelConfig, ParallelConfig, StepShape
from dsv4.graph.cann_shim import fake_world
from dsv4.graph.npu_load import load_or_declare
from dsv4.graph.stages import StepProgram, Traced
from dsv4.mesh import Mesh, join
from dsv4.model.context import Env
from dsv4.ops.npu import npu_ops
from dsv4.ops.npu_params import prepare
from dsv4.steps import STEPS
from dsv4.tree import abstract


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What a server fixes besides the model: drafts, seats and pages of one TP group, table widths, positions."""

    k: int
    slots: int
    pages: Mapping[str, int]
    widths: Mapping[str, int]
    positions: int


def prefix(cfg: ModelConfig, each: int) -> ModelConfig:
    """The model cut after the first layers that hold `each` of every kind (or all there are): a smaller model whose layers
    are the real one's, hash routing included."""
    wanted = {kind: min(each, count) for kind, count in Counter(cfg.kinds).items()}
    seen: Counter[str] = Counter()
    for depth, kind in enumerate(cfg.kinds, 1):
        seen[kind] += 1
        if depth > cfg.num_hash_layers and all(seen[kind] >= count for kind, count in wanted.items()):
            break
    stages = cfg.compress_ratios[cfg.num_hidden_layers :]
    taps = tuple(range(depth - len(cfg.dspark_target_layer_ids), depth)) if cfg.dspark_target_layer_ids else ()
    return replace(
        cfg,
        num_hidden_layers=depth,
        compress_ratios=cfg.compress_ratios[:depth] + stages,
        dspark_target_layer_ids=taps,
    )


@contextlib.contextmanager
def world(parallel: ParallelConfig, rank: int = 0) -> Iterator[Mesh]:
    """This process as one rank of a deployment that is not there; the group is gone afterwards."""
    import torch.distributed as dist

    load_or_declare()
    if parallel.ep == 1:
        yield Mesh()
        return
    fake_world(rank, parallel.ep)
    try:
        yield join(parallel, ops_exchange=True)
    finally:
        dist.destroy_process_group()


def _batch(shape: StepShape) -> PrefillBatch | RowBatch:
    def ints(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device="meta")

    rows = ints(shape.rows)
    if shape.kind != "prefill":
        return RowBatch(slots=rows)
    return PrefillBatch(
        slots=rows, start=ints(shape.rows), length=ints(shape.rows), ids=ints(shape.rows, shape.query_len),
        last=ints(shape.rows), final=ints(shape.rows), limit=ints(shape.rows), eos=ints(shape.rows),
    )  # fmt: skip


def capture(cfg: ModelConfig, mesh: Mesh, shape: StepShape, geometry: Geometry, *, device: str = "cpu") -> Traced:
    """The program of one rank at one shape. Raises CaptureError where the step is no static graph."""
    drafter = geometry.k > 0
    params = prepare(abstract_params(cfg, mesh, drafter, max_positions=geometry.positions))
    cache = make_cache(cfg, Pages(**geometry.pages), torch.bfloat16, drafter=drafter, device="meta")
    state = abstract(make_row_state(geometry.slots, dict(geometry.widths), geometry.k, device="meta"))
    env = Env(cfg=cfg, ops=npu_ops(shape.query_len, mesh), mesh=mesh)
    program = StepProgram(shape.kind, STEPS[shape.kind](env, shape), shape, donated=("cache", "state"))
    return program.trace(params, cache, state, _batch(shape), device=device)
