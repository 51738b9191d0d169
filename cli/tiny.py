"""`dsv4 make-tiny`: a small random checkpoint in the released source format."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cli.console import one_line_errors
from dsv4.checkpoint.tiny import make_tiny as write_tiny
from dsv4.checkpoint.tiny import tiny_config
from dsv4.errors import ConfigError


def _size(name: str, help: str) -> object:
    return typer.Option(f"--{name}", min=1, help=help, rich_help_panel="Sizes", show_default=False)


@one_line_errors
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    config: Annotated[
        Path | None, typer.Option(help="A config.json whose shape to use, instead of the built-in tiny one.")
    ] = None,
    layers: Annotated[int | None, _size("layers", "Target layers: two window-only, then CSA and HCA in turn.")] = None,
    hidden_size: Annotated[int | None, _size("hidden-size", "Width of the residual streams (multiple of 32).")] = None,
    vocab_size: Annotated[int | None, _size("vocab-size", "Tokens, at least 266.")] = None,
    heads: Annotated[int | None, _size("heads", "Attention heads.")] = None,
    head_dim: Annotated[int | None, _size("head-dim", "Channels per head.")] = None,
    q_rank: Annotated[int | None, _size("q-rank", "Rank of the query projection.")] = None,
    o_rank: Annotated[int | None, _size("o-rank", "Rank of each output group.")] = None,
    experts: Annotated[int | None, _size("experts", "Routed experts.")] = None,
    experts_per_token: Annotated[int | None, _size("experts-per-token", "Routed experts a token uses.")] = None,
    expert_width: Annotated[int | None, _size("expert-width", "Hidden width of an expert (multiple of 32).")] = None,
    max_positions: Annotated[int | None, _size("max-positions", "Longest context.")] = None,
) -> None:
    """Writes a small random checkpoint in the released format: FP8, MXFP4 experts, three draft stages, a tokenizer."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "q_lora_rank": q_rank,
        "o_lora_rank": o_rank,
        "n_routed_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": expert_width,
        "max_position_embeddings": max_positions,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    if config is not None and given:
        raise ConfigError(f"--config sets all sizes; drop it or drop {', '.join(sorted(given))}")
    raw = tiny_config(**given) if config is None else _read_config(config)
    size = write_tiny(out, seed=seed, raw=raw)
    typer.echo(f"{out}: {size}, source format (FP8 + MXFP4), seed {seed}")


def _read_config(path: Path) -> dict:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: expected a config.json, got {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"--config {path}: expected a JSON object")
    return raw
