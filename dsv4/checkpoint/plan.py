"""What a conversion will read and write: decided from config, index and headers, before a weight is read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.checkpoint.files import Shard
from dsv4.checkpoint.folder import INDEX, Checkpoint, open_checkpoint
from dsv4.checkpoint.manifest import TILE, Totals, Weight, manifest, shard_name, stored, totals, weights
from dsv4.config import ModelConfig, load_config
from dsv4.errors import CheckpointError


@dataclass(frozen=True)
class Plan:
    """What a conversion will read and write. `checkpoint` is None where only config.json is there."""

    path: Path
    cfg: ModelConfig
    raw: dict[str, Any]
    checkpoint: Checkpoint | None
    shards: dict[str, list[Weight]]

    @property
    def source_totals(self) -> Totals:
        return totals(manifest(self.cfg, "source").values())

    @property
    def output_totals(self) -> Totals:
        return totals(manifest(self.cfg, "w8a8").values())

    def inputs(self, file: str) -> list[Shard]:
        """The shards that `file` is made from: its namesake, and any other that holds one of its scales."""
        assert self.checkpoint
        specs = [spec for weight in self.shards[file] for spec in stored(weight, "source")]
        shards = {shard.path: shard for shard in (self.checkpoint.shard_of[spec.name] for spec in specs)}
        return [shards[path] for path in sorted(shards)]

    def describe(self) -> list[str]:
        """The plan in a few lines."""
        everything = weights(self.cfg)
        scaled = [weight for weight in everything if weight.encoding in ("fp8", "mxfp4")]
        int8 = sum(weight.int8 for weight in scaled)
        read = "headers checked" if self.checkpoint else "no index there: planned from config.json alone"
        return [
            f"source  {self.source_totals} in {len(self.shards)} shards ({read})",
            f"W8A8    {self.output_totals} in {len(self.shards)} shards",
            f"weights {int8:,} to int8, {len(scaled) - int8:,} to bf16, {len(everything) - len(scaled):,} copied",
        ]


def plan_conversion(path: str | Path) -> Plan:
    """Reads config, index and headers of a source checkpoint.

    Raises: CheckpointError if it is not in source format or differs from its manifest.
    """
    path = Path(path)
    cfg = load_config(path)
    config_path = path / "config.json" if path.is_dir() else path
    raw = json.loads(config_path.read_text())
    if cfg.quant_format != "source":
        what = "already W8A8" if cfg.quant_format == "w8a8" else "not quantised"
        raise CheckpointError(f"{path}: is {what}; convert takes the released source format (fp8 with fp4 experts)")
    tile = raw["quantization_config"].get("weight_block_size", [TILE, TILE])
    if tile != [TILE, TILE]:
        raise CheckpointError(f"{config_path}: weight_block_size is {tile}; V4-Flash has {[TILE, TILE]}")
    has_index = path.is_dir() and (path / INDEX).exists()
    checkpoint = open_checkpoint(path, cfg) if has_index else None
    shards: dict[str, list[Weight]] = {}
    for weight in weights(cfg):
        file = checkpoint.shard_of[weight.name].path.name if checkpoint else shard_name(cfg, weight.name)
        shards.setdefault(file, []).append(weight)
    return Plan(path, cfg, raw, checkpoint, dict(sorted(shards.items())))


def w8a8_config(raw: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """The source's config.json with `quantization_config` replaced (checkpoint.md 2.3), everything else kept."""
    ignore: list[str] = []
    for layer, kind in enumerate(cfg.kinds):
        names = ["attn.wq_a", "attn.wkv", "attn.wo_a"]
        if kind == "csa":
            inner = "attn.indexer."
            names += [f"{inner}weights_proj", f"{inner}compressor.wgate", f"{inner}compressor.wkv"]
        if kind != "swa":
            names += ["attn.compressor.wgate", "attn.compressor.wkv"]
        ignore += [f"layers.{layer}.{name}" for name in names]
    last = f"mtp.{cfg.num_stages - 1}."
    for stage in range(cfg.num_stages):
        ignore += [f"mtp.{stage}.{name}" for name in ("attn.wq_a", "attn.wkv", "attn.wo_a", "head")]
    if cfg.has_dspark:
        heads = ("markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj")
        ignore += ["mtp.0.main_proj", *(last + head for head in heads)]
    ignore.append("head")
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": int8 | {"strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": int8 | {"strategy": "token", "dynamic": True, "observer": "memoryless"},
        "activation_use_clip": False,
        "output_activations": None,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1,
        "kv_cache_scheme": None,
        "li_cache_scheme": {"type": "int", "num_bits": 8},
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
    return {name: quantization if name == "quantization_config" else value for name, value in raw.items()}
