"""`dsv4 bench`: throughput and latency at K=0 and K=7, offline through the engine and online over HTTP, as one table."""

import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cli.console import err, stage_progress
from cli.options import takes_engine_args
from dsv4.errors import ConfigError
from serving.args import EngineArgs
from serving.bench.client import Endpoint
from serving.bench.plot import draw
from serving.bench.point import Point, Spread
from serving.bench.sweep import Sweep

MODES = {"offline": ("offline",), "online": ("online",), "both": ("offline", "online")}


COLUMNS = ("K", "prefix", "cached", "tokens/s", "TTFT ms", "ms per token", "gap ms", "accepted length", "acceptance by position")  # fmt: skip


def _option(help: str, *flags: str, **fields: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel="Benchmark", **fields)


@takes_engine_args()
def bench(
    args: EngineArgs,
    mode: Annotated[str, _option("offline: engine in this process; online: over HTTP; both.")] = "both",
    k: Annotated[list[int] | None, _option("Draft widths to compare, repeatable. Default: 0 and 7.", metavar="0|7")] = None,
    batch: Annotated[list[int] | None, _option("Offline: requests at once, repeatable. Default: 1, 4, 8.", min=1)] = None,
    rounds: Annotated[int, _option("Offline: batches of each size.", min=1)] = 3,
    rate: Annotated[list[float] | None, _option("Online: requests per second, repeatable. Default: 1, 4.")] = None,
    requests: Annotated[int, _option("Online: requests at each rate.", min=1)] = 32,
    input_tokens: Annotated[int, _option("Prompt length.", min=1)] = 256,
    output_tokens: Annotated[int, _option("Tokens to generate.", min=2)] = 64,
    prefix: Annotated[list[str] | None, _option("cold: prompts share nothing; warm: three quarters. Default: both.")] = None,
    url: Annotated[str | None, _option("Online, at a server that runs already: --model is its name there, `auto` for its first.")] = None,
    api_key: Annotated[str | None, _option("Sent to --url as a bearer token.")] = None,
    standard_api: Annotated[bool, _option("Send --url only fields of the OpenAI API: no ignore_eos, no token ids.")] = False,
    seed: Annotated[int, _option("Of prompts and arrivals.")] = 0,
    as_json: Annotated[Path | None, _option("All figures to this file.", "--json", show_default=False)] = None,
    svg: Annotated[Path | None, _option("A drawing of them to this file.", show_default=False)] = None,
) -> None:  # fmt: skip
    """Measures tokens/s, time to first token and time per output token, counted per token and not per chunk."""
    (modes,) = _choice("--mode", [mode], MODES)
    sweep = Sweep(
        prefixes=tuple(_choice("--prefix", prefix or ["cold", "warm"], {"cold": "cold", "warm": "warm"})),
        batches=tuple(batch or (1, 4, 8)), rounds=rounds, rates=tuple(_rates(rate or [1.0, 4.0])), requests=requests,
        input_tokens=input_tokens, output_tokens=output_tokens, seed=seed,
    )  # fmt: skip
    args = replace(args, max_model_len=max(args.max_model_len, input_tokens + output_tokens))
    run = {"input_tokens": input_tokens, "output_tokens": output_tokens, "machine": platform.machine(),
           "cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}  # fmt: skip
    if url:
        name = None if args.model == "auto" else args.model
        points = _told(sweep.remote(Endpoint(base=url, model=name, api_key=api_key, extended=not standard_api)))
    else:
        points = []
        for where in modes:
            for width in sorted(set(k or [0, 7])):
                points += _told(_own(sweep, args, where, width))
    run["load_after"] = os.getloadavg()[0]
    Console(highlight=False, width=None if err.is_terminal else 160).print(table(points))
    typer.echo(
        f"milliseconds as p50/p95/p99; prompts of {input_tokens} tokens, {output_tokens} generated; "
        f"load {run['load_before']:.1f} to {run['load_after']:.1f} on {run['cpus']} CPUs"
    )
    if as_json:
        figures = {"run": run, "points": [point.to_dict() for point in points]}
        as_json.write_text(json.dumps(figures, indent=2, allow_nan=False))
    if svg:
        svg.write_text(draw(points, f"dsv4 bench: {input_tokens} tokens in, {output_tokens} out"))


def _choice(flag: str, given: Sequence[str], known: dict[str, Any]) -> list[Any]:
    for name in given:
        if name not in known:
            raise ConfigError(f"{flag} is {name!r}, expected {', '.join(known)}")
    return [value for name, value in known.items() if name in given]


def _rates(rates: Sequence[float]) -> Sequence[float]:
    for rate in rates:
        if not 0 < rate < math.inf:
            raise ConfigError(f"--rate is {rate:g}, expected requests per second above 0")
    return rates


def _own(sweep: Sweep, args: EngineArgs, mode: str, k: int) -> Iterator[Point]:
    if mode == "online":
        yield from sweep.online(args, k)
        return
    with stage_progress(f"start K={k}") as progress:
        yield from sweep.offline(args, k, progress)


def _told(points: Iterable[Point]) -> list[Point]:
    """All points, each told when it is there."""
    found = []
    for point in points:
        load = point.load
        typer.echo(
            f"{load.mode} K={'?' if load.k is None else load.k} {load.level:g} {load.prefix}: {point.tokens_per_s:,.1f} tokens/s",
            err=True,
        )
        for error in point.errors:
            typer.echo(f"  {point.failed} of {point.requests} requests failed: {error}", err=True)
        found.append(point)
    return found


def _spread(spread: Spread) -> str:
    return "/".join("-" if math.isnan(value) else f"{value:,.1f}" for value in (spread.p50, spread.p95, spread.p99))


def table(points: Sequence[Point]) -> Table:
    """Everything in one table."""
    made = Table(title="dsv4 bench", title_justify="left")
    made.add_column("load")
    for column in COLUMNS:
        made.add_column(column, justify="right")
    for point in points:
        load = point.load
        level = f"{load.level:g} at once" if load.mode == "offline" else f"{load.level:g}/s online"
        length, shares = point.accepted_length, point.acceptance
        made.add_row(
            level,
            "?" if load.k is None else str(load.k),
            load.prefix,
            f"{point.cached_tokens / point.prompt_tokens:.0%}" if point.prompt_tokens else "-",
            f"{point.tokens_per_s:,.1f}",
            _spread(point.first),
            _spread(point.per_token),
            _spread(point.gap),
            "-" if length is None else f"{length:.2f}",
            "-" if shares is None else " ".join(f"{share:.2f}".removeprefix("0") for share in shares),
        )  # fmt: skip
    return made
