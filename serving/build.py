"""From flags to a running engine: check, load, plan memory, capture, start. Used by every command that runs a model."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsv4.cache import page_bytes
from dsv4.checkpoint.demo import model_path
from dsv4.checkpoint.load import abstract_params, load_params
from dsv4.config import ModelConfig, load_config
from dsv4.errors import ConfigError
from dsv4.mesh import SINGLE, Mesh
from dsv4.params import Params, act_dtype
from dsv4.tree import tree_bytes
from serving.align import aligner
from serving.args import GROUP_ROWS, EngineArgs, EngineSettings, resolve
from serving.batches import BatchBuilder, Buckets, default_buckets
from serving.capacity import CACHED_BLOCKS, PagePlan, host_memory_bytes, plan_pages
from serving.engine import Engine
from serving.executor import Executor
from serving.pace import AdaptivePace
from serving.pages import PageGroup, page_groups
from serving.plan import SchedulerConfig
from serving.platform import choose_platform
from serving.rank_messages import Ready, Setup
from serving.ranks import RankExecutor
from serving.scheduler import Scheduler
from serving.threads import give_way
from serving.tokenizer import Tokenizer
from serving.worker import LocalExecutor, Worker

log = logging.getLogger("dsv4.engine")

TILE = 128
PIPELINE_DEPTH = 2  # steps planned before the oldest one's tokens are read
CPU_TILES = 4  # 512 tokens a launch keep a layer's temporaries in the last-level cache

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A started engine and what a banner should say about it."""

    tokenizer: Tokenizer
    cfg: ModelConfig
    settings: EngineSettings
    started: "Started"

    @property
    def engine(self) -> Engine:
        return self.started.engine

    def banner(self) -> list[tuple[str, str]]:
        """(what, value) lines for the start of a server."""
        args, s, started = self.settings.args, self.settings, self.started
        p, plan = s.parallel, started.plan
        drafting = f"K={s.k} (DSpark{', adaptive' * s.adaptive})" if s.k else "K=0"
        return [
            ("model", f"{self.engine.model_name} ({self.cfg.num_hidden_layers} layers, {started.weight_bytes / 2**20:,.1f} MiB)"),
            ("platform", f"{s.platform}, target {started.target}, devices {','.join(map(str, s.devices))}"),
            ("parallel", f"dp {p.dp} x tp {p.tp} = ep {p.ep}"),
            ("decoding", f"greedy, {drafting}"),
            ("limits", f"{args.max_num_seqs} requests, {args.max_model_len:,} tokens each, {args.max_num_batched_tokens:,} a step"),
            ("prefill", f"chunks of {s.chunk:,} tokens" + ("" if args.enable_chunked_prefill else ", not chunked")),
            ("cache", f"{plan.total_bytes / 2**20:,.1f} MiB: {plan.seats:g} full requests + "
                      f"{plan.cached_blocks} cached blocks (bound by {plan.bound})"),
            ("prefix cache", "on" if args.enable_prefix_caching else "off"),
            ("programs", f"{started.programs} captured"),
            *started.rank_lines(),
        ]  # fmt: skip


def load_dtype(args: EngineArgs) -> torch.dtype | None:
    """None keeps W8A8 as stored."""
    return torch.float32 if args.dtype == "float32" else None


def scheduler_config(settings: EngineSettings, groups: tuple[PageGroup, ...], pages: dict[str, int]) -> SchedulerConfig:
    """The scheduler's view of the flags."""
    args = settings.args
    return SchedulerConfig(
        pages=pages,
        groups=groups,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_chunked_prefill=args.enable_chunked_prefill,
        enable_prefix_caching=args.enable_prefix_caching,
        num_speculative_tokens=settings.k,
        partitions=settings.partitions,
        max_rows_per_partition=min(args.max_num_seqs, GROUP_ROWS),
        max_waiting=args.max_waiting,
        pipeline_depth=PIPELINE_DEPTH,
        prefix_replay=args.prefix_replay,
        tile_tokens=TILE,
    )


def page_plan(cfg: ModelConfig, settings: EngineSettings, dtype: torch.dtype, memory_bytes: int) -> PagePlan:
    """Pages of one partition within `memory_bytes`. Raises ConfigError if one full request does not fit."""
    args = settings.args
    return plan_pages(
        page_groups(cfg.sliding_window),
        page_bytes(cfg, dtype, drafter=settings.k > 0),
        memory_bytes=memory_bytes,
        seats=-(-args.max_num_seqs // settings.partitions),
        max_model_len=args.max_model_len,
        decode_tokens=PIPELINE_DEPTH * (settings.k + 1),
        prefill_tokens=PIPELINE_DEPTH * args.max_num_batched_tokens,
        cached_blocks=CACHED_BLOCKS if args.enable_prefix_caching else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running engine. `worker` is the one in this process; with several ranks it is None and `ranks` says how they started."""

    engine: Engine
    scheduler: Scheduler
    plan: PagePlan
    target: str
    programs: int
    weight_bytes: int
    worker: Worker | None = None
    ranks: tuple[Ready, ...] = ()

    def rank_lines(self) -> list[tuple[str, str]]:
        """What a banner says of several ranks."""
        if not self.ranks:
            return []

        def span(values: list[float]) -> str:
            low, high = min(values), max(values)
            return f"{low:,.1f}" if f"{low:,.1f}" == f"{high:,.1f}" else f"{low:,.1f} to {high:,.1f}"

        weights = span([ready.weight_bytes / 2**20 for ready in self.ranks])
        peak = span([ready.peak_bytes / 2**20 for ready in self.ranks])
        seconds = max(ready.seconds for ready in self.ranks)
        return [("ranks", f"{len(self.ranks)} processes, each {weights} MiB of weights, {peak} MiB resident at most, "
                          f"warm after {seconds:.1f} s")]  # fmt: skip


def start_engine(
    cfg: ModelConfig,
    params: Params,
    settings: EngineSettings,
    model_name: str,
    *,
    plan: PagePlan | None = None,
    progress: Progress | None = None,
) -> Started:
    """Plans memory, captures every program and starts the engine, all in this process (dp = tp = ep = 1)."""
    args = settings.args
    plan = plan or page_plan(cfg, settings, act_dtype(params), int(host_memory_bytes() * args.npu_memory_utilization))
    groups = page_groups(cfg.sliding_window)
    config = scheduler_config(settings, groups, plan.pages)
    rows = config.max_rows_per_partition
    buckets = default_buckets(args.max_model_len, rows, CPU_TILES, TILE, fine=settings.platform == "cpu")
    platform = choose_platform(settings.platform, args.target)
    threads = args.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    worker = Worker(
        cfg,
        platform.place(params, settings.devices[0]),
        platform.ops(SINGLE),
        pages=plan.pages,
        widths={group.name: config.table_width(group) for group in groups},
        slots=rows,
        k=settings.k,
        shapes=buckets.shapes(settings.k, adaptive=settings.adaptive),
        target=platform.target,
        device=platform.device(settings.devices[0]),
    )
    worker.warm_up(progress)
    scheduler = Scheduler(config)
    engine = make_engine(
        cfg, settings, scheduler, buckets, rows, LocalExecutor(worker, threads, args.step_timeout), model_name
    )
    return Started(
        engine=engine, worker=worker, scheduler=scheduler, plan=plan, target=platform.target,
        programs=len(worker.programs), weight_bytes=tree_bytes(params),
    )  # fmt: skip


def make_engine(
    cfg: ModelConfig,
    settings: EngineSettings,
    scheduler: Scheduler,
    buckets: Buckets,
    rows: int,
    executor: Executor,
    model_name: str,
) -> Engine:
    """The engine over an executor; `rows` are a partition's slots."""
    args = settings.args
    return Engine(
        scheduler,
        [BatchBuilder(buckets, rows, settings.k, cfg.vocab_size) for _ in range(settings.partitions)],
        executor,
        model_name=model_name,
        max_model_len=args.max_model_len,
        vocab_size=cfg.vocab_size,
        bos_token_id=cfg.bos_token_id,
        eos_token_id=cfg.eos_token_id,
        num_speculative_tokens=settings.k,
        step_deadline_s=args.step_timeout,
        align=aligner(buckets, rows, cfg.vocab_size) if settings.partitions > 1 else list,
        pace=AdaptivePace(buckets.rows) if settings.adaptive else None,
    )


def start_ranks(
    cfg: ModelConfig,
    settings: EngineSettings,
    model_name: str,
    *,
    plan: PagePlan | None = None,
    progress: Progress | None = None,
) -> Started:
    """Plans memory and starts the engine here over one worker process per rank, each of which loads its slices, captures every
    program and is warm when this returns. Raises EngineError naming rank, device and cause."""
    args, parallel = settings.args, settings.parallel
    dtype, positions = load_dtype(args), args.max_model_len + settings.k + 1
    meshes = [Mesh(dp=parallel.dp, tp=parallel.tp, ep=parallel.ep, rank=rank) for rank in range(parallel.ep)]
    shares = [abstract_params(cfg, mesh, settings.k > 0, dtype=dtype, max_positions=positions) for mesh in meshes]
    weights = [tree_bytes(params) for params in shares]
    free = int(host_memory_bytes() * args.npu_memory_utilization) - sum(weights)
    plan = plan or page_plan(cfg, settings, act_dtype(shares[0]), free // parallel.ep)
    groups = page_groups(cfg.sliding_window)
    config = scheduler_config(settings, groups, plan.pages)
    rows = config.max_rows_per_partition
    buckets = default_buckets(args.max_model_len, rows, CPU_TILES, TILE, fine=settings.platform == "cpu")
    platform = choose_platform(settings.platform, args.target)
    setup = Setup(
        model=Path(args.model).resolve(),
        cfg=cfg,
        dtype=dtype,
        parallel=parallel,
        platform=platform.name,
        target=platform.target,
        devices=settings.devices,
        threads=args.threads or max(1, len(os.sched_getaffinity(0)) // parallel.ep),
        pages=plan.pages,
        widths={group.name: config.table_width(group) for group in groups},
        slots=rows,
        k=settings.k,
        shapes=tuple(buckets.shapes(settings.k, adaptive=settings.adaptive)),
        max_positions=positions,
    )
    executor = RankExecutor(setup, step_deadline_s=args.step_timeout, report=progress)
    scheduler = Scheduler(config)
    engine = make_engine(cfg, settings, scheduler, buckets, rows, executor, model_name)
    return Started(
        engine=engine, scheduler=scheduler, plan=plan, target=platform.target, programs=executor.ready[0].programs,
        weight_bytes=sum(weights), ranks=tuple(executor.ready),
    )  # fmt: skip


def build_engine(args: EngineArgs, progress: Progress | None = None) -> Built:
    """Checks everything that flags and headers can tell, then loads, captures and starts. Raises Dsv4Error.

    On a CPU the calling thread, and those it starts from now on, give way to the kernels (`serving/threads.py`).
    """
    path = model_path(args.model)
    args = replace(args, model=str(path), served_model_name=args.served_model_name or Path(args.model).resolve().name)
    if path.is_file():
        raise ConfigError(f"--model {path}: is a file, expected the checkpoint folder it lies in")
    cfg = load_config(path)
    settings = resolve(args, cfg, choose_platform(args.platform, args.target).name)
    tokenizer = Tokenizer.load(path)
    if settings.platform == "cpu":
        give_way()
    if progress:
        progress("weights", 0, 1)
    name = args.served_model_name or path.name
    if settings.parallel.ep > 1:
        started = start_ranks(cfg, settings, name, progress=progress)
    else:
        # Draft rows reach K positions past the last token, so the rope tables do too.
        params = load_params(
            path, cfg, load_dtype(args), max_positions=args.max_model_len + settings.k + 1, drafter=settings.k > 0
        )
        started = start_engine(cfg, params, settings, name, progress=progress)
    return Built(tokenizer=tokenizer, cfg=cfg, settings=settings, started=started)
