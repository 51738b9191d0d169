"""Engine flags for Typer, declared once and spliced into every command that runs an engine."""

import dataclasses
import difflib
import functools
import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from serving.args import EngineArgs

# field -> (extra flag names, help, panel)
_HELP: dict[str, tuple[tuple[str, ...], str, str]] = {
    "model": ((), "Checkpoint folder (W8A8; see `dsv4 convert`), or `demo`.", "Model"),
    "served_model_name": ((), "Name in the API; default: the folder's name.", "Model"),
    "dtype": ((), "auto: as stored. float32 runs a source or W8A8 checkpoint dequantised.", "Model"),
    "kv_cache_dtype": ((), "auto follows --dtype.", "Model"),
    "platform": ((), "a2a3, cpu or auto (an NPU if one is usable, else the CPU).", "Device"),
    "target": ((), "How graphs are compiled: auto, cpu, plain, inductor, torchair, npugraph_ex.", "Device"),
    "device": ((), "One device id.", "Device"),
    "devices": ((), "Device ids, one per rank: 0,1,2,...", "Device"),
    "dp": (("--data-parallel-size",), "Data-parallel groups.", "Device"),
    "ep": (("--expert-parallel-size",), "Expert-parallel ranks: all of them.", "Device"),
    "tp": (("--tensor-parallel-size",), "Tensor-parallel ranks per group.", "Device"),
    "threads": ((), "CPU threads per rank; default: cores / ranks.", "Device"),
    "step_timeout": ((), "Seconds after which a step counts as hung: requests end, /health says so.", "Device"),
    "npu_memory_utilization": ((), "Share of device memory (of free host memory on the CPU) to use.", "Device"),
    "block_size": ((), "Tokens per kv page: 32.", "Cache"),
    "max_model_len": ((), "Prompt + output tokens of a request at most.", "Cache"),
    "enable_prefix_caching": ((), "Reuse the cache of shared prefixes.", "Cache"),
    "prefix_replay": ((), "1: hits from 129 tokens on; 128: the original's rule, from 256.", "Cache"),
    "max_num_seqs": ((), "Requests running at once, whole server.", "Scheduling"),
    "max_num_batched_tokens": ((), "Tokens per step, whole server.", "Scheduling"),
    "long_prefill_token_threshold": ((), "Prefill chunk of one request at most.", "Scheduling"),
    "max_waiting": ((), "Requests queued before new ones get 503.", "Scheduling"),
    "enable_chunked_prefill": ((), "Split long prompts over steps.", "Scheduling"),
    "data_parallel_routing": ((), "Accepted for compatibility: groups are chosen by prefix, then load.", "Scheduling"),
    "speculative_config": ((), """'{"method":"dspark","num_speculative_tokens":7}' drafts seven tokens a step; "adaptive" (default: true on a CPU): not where a step without drafts is faster.""", "Speculation"),
    "num_speculative_tokens": ((), "Old alias of --speculative-config.", "Speculation"),
    "ring_heap": ((), "Accepted and ignored (with a warning).", "Compatibility"),
    "ring_task_window": ((), "Accepted and ignored (with a warning).", "Compatibility"),
    "ring_dep_pool": ((), "Accepted and ignored (with a warning).", "Compatibility"),
    "use_compile_cache": ((), "Accepted: compiled graphs are always cached.", "Compatibility"),
}  # fmt: skip


def _read_flags(ctx: typer.Context, path: Path | None) -> Path | None:
    """Makes a TOML file's values the defaults of the command's flags. Raises ConfigError naming an unknown or odd one."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"{path}: not TOML ({error})") from None
    known = {parameter.name for parameter in ctx.command.params}
    flags: dict[str, Any] = {}
    for name, value in values.items():
        field = name.replace("-", "_")
        if field not in known:
            near = difflib.get_close_matches(field, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{path}: {name} is no flag of this command{hint}")
        flags[field] = json.dumps(value) if isinstance(value, dict) else value
    ctx.default_map = {**(ctx.default_map or {}), **flags}
    return path


FLAGS_FILE = inspect.Parameter(
    "flags",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--flags",
            is_eager=True,
            callback=_read_flags,
            help="TOML file of flags, such as configs/serve/*.toml; flags on the command line win.",
        ),
    ],
)


def engine_parameters(aliases: Mapping[str, tuple[str, ...]]) -> list[inspect.Parameter]:
    """One keyword parameter per field of EngineArgs, annotated for Typer; `aliases` are further flags of fields."""
    hints = get_type_hints(EngineArgs)
    parameters = []
    for field in dataclasses.fields(EngineArgs):
        extra, text, panel = _HELP[field.name]
        flag = "--" + field.name.replace("_", "-")
        if hints[field.name] is bool and flag.startswith("--enable-"):
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        option = typer.Option(flag, *extra, *aliases.get(field.name, ()), help=text, rich_help_panel=panel)
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[hints[field.name], option],
            )
        )
    return parameters


def takes_engine_args(**aliases: tuple[str, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives `command(args: EngineArgs, ...)` all engine flags in front of its own options."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        names = {field.name for field in dataclasses.fields(EngineArgs)}

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            values.pop("flags")
            engine = EngineArgs(**{name: values.pop(name) for name in names})
            return command(engine, **values)

        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        parameters = [FLAGS_FILE, *engine_parameters(aliases), *keyword]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate
