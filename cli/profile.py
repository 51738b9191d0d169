"""`dsv4 profile`: what a deployment would hold, compute and take, from shapes alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.console import stage_progress
from cli.options import takes_engine_args
from dsv4.checkpoint.demo import model_path
from dsv4.config import load_config
from dsv4.errors import ConfigError
from dsv4.profile.capture import Geometry
from dsv4.profile.devices import TABLE, load_devices
from dsv4.profile.report import page, summary, trace
from dsv4.profile.run import Request
from dsv4.profile.run import profile as run_profile
from serving.args import GROUP_ROWS, EngineArgs, EngineSettings, resolve
from serving.batches import default_buckets
from serving.build import PIPELINE_DEPTH, TILE, scheduler_config
from serving.pages import page_groups
from serving.plan import SchedulerConfig


def _config(settings: EngineSettings, context: int, pages: dict[str, int], window: int) -> SchedulerConfig:
    args = replace(settings.args, max_model_len=context)
    return scheduler_config(replace(settings, args=args), page_groups(window), pages)


def _request(args: EngineArgs, device: str, table: Path, each: int | None, every: bool, out: Path) -> Request:
    cfg = load_config(model_path(args.model))
    devices = load_devices(table)
    if device not in devices:
        raise ConfigError(f"--profile-device is {device!r}, expected one of {', '.join(devices)}")
    settings = resolve(args, cfg, "cpu" if args.platform == "cpu" else "a2a3")
    groups, k = page_groups(cfg.sliding_window), settings.k
    config = _config(settings, args.max_model_len, {group.name: 2 for group in groups}, cfg.sliding_window)
    requests = -(-args.max_num_seqs // settings.partitions)

    def plan(context: int, count: int) -> dict[str, int]:
        """Pages for so many requests of that length, one step's prefill on top."""
        decoding = PIPELINE_DEPTH * (k + 1)
        prefill = PIPELINE_DEPTH * min(args.max_num_batched_tokens, context)
        pages = {}
        for group in groups:
            once = 0 if group.window is None else group.pages_for(prefill)
            pages[group.name] = 1 + count * group.live_pages(context, decoding) + once
        return pages

    tiles = max(1, min(settings.chunk, args.max_num_batched_tokens // settings.partitions) // TILE)
    buckets = default_buckets(args.max_model_len, min(requests, GROUP_ROWS), tiles, TILE)
    shapes = [shape for shape in buckets.shapes(k) if not shape.full]
    if k:  # the baseline that drafting has to beat
        shapes += [shape for shape in buckets.shapes(0) if shape.kind == "decode" and not shape.full]
    biggest = {
        kind: max((s for s in shapes if s.kind == kind), key=lambda s: (s.tokens, s.pages))
        for kind in {s.kind for s in shapes}
    }
    return Request(
        cfg=cfg,
        parallel=settings.parallel,
        geometry=Geometry(
            k=k, slots=config.max_rows_per_partition, pages=plan(args.max_model_len, requests),
            widths={group.name: config.table_width(group) for group in groups}, positions=args.max_model_len + k + 1,
        ),
        shapes=tuple(shapes),
        lowered=frozenset(shapes if every else biggest.values()),
        device=devices[device],
        plan=plan,
        context=args.max_model_len,
        requests=requests,
        rows_limit=GROUP_ROWS,
        utilization=args.npu_memory_utilization,
        each=each,
        out=out,
    )  # fmt: skip


def _write(out: Path, data: dict[str, Any]) -> None:
    (out / "profile.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / "report.html").write_text(page(data))
    (out / "trace.json").write_text(trace(data))


@takes_engine_args(model=("--config",))
def profile(
    args: EngineArgs,
    out: Annotated[Path, typer.Option(help="Folder for profile.json, report.html, trace.json and the programs.")],
    layers: Annotated[
        int, typer.Option(min=1, help="Capture a prefix with N layers of each kind and scale (exact for costs).")
    ] = 2,
    full: Annotated[bool, typer.Option("--full", help="Capture every layer instead.")] = False,
    every_bucket: Annotated[
        bool, typer.Option("--every-bucket", help="Lower the program of every bucket, not only the largest of a kind.")
    ] = False,
    profile_device: Annotated[str, typer.Option(help="Device of the table to predict for: A2 or A3.")] = "A3",
    device_table: Annotated[Path, typer.Option(help="Device figures (TOML).")] = TABLE,
) -> None:
    """Profiles a deployment on any host: graphs, memory, costs and predicted times, without weights or NPUs.

    --model takes a checkpoint folder or a bare config.json.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "profile.json").touch()
    except OSError as error:
        raise ConfigError(f"--out {out}: not writable ({error.strerror})") from None
    request = _request(args, profile_device, device_table, None if full else layers, every_bucket, out)
    with stage_progress("profile") as progress:
        data = run_profile(request, progress)
    _write(out, data)
    for line in summary(data):
        typer.echo(line)
    typer.echo(
        f"written     {out / 'report.html'}, profile.json, trace.json, programs/"
        + ("" if "torchair" not in data["lowering"] else ", graphs/")
    )
