"""Weights to disk in the released source format, byte-compatible with checkpoint.md section 1.

FP8 tiles, MXFP4 experts, one shard per layer, the index, and config.json in the release's layout.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint.files import ShardWriter, write_atomic
from dsv4.checkpoint.folder import INDEX
from dsv4.checkpoint.formats import encode_fp8, encode_mxfp4
from dsv4.checkpoint.manifest import TensorSpec, Totals, Weight, manifest, shard_name, stored, totals, weights
from dsv4.config import ModelConfig, config_from_dict
from dsv4.errors import CheckpointError, ConfigError

PLAIN = {"bf16": torch.bfloat16, "f32": torch.float32, "i64": torch.int64}


def dump_config(raw: dict[str, Any]) -> str:
    """JSON laid out as the released config.json: two spaces, the long integer lists on one line each."""
    text = json.dumps(raw, indent=2, ensure_ascii=False)
    for name in ("compress_ratios", "dspark_target_layer_ids"):
        text = re.sub(
            rf'("{name}": )\[([^\]]*)\]', lambda m: f"{m[1]}[{', '.join(m[2].replace(',', ' ').split())}]", text
        )
    return text + "\n"


def encode(weight: Weight, values: Tensor) -> tuple[Tensor, ...]:
    """The tensors that store `values` in source format, in the order of `stored`."""
    if weight.encoding == "fp8":
        return encode_fp8(values.float())
    if weight.encoding == "mxfp4":
        return encode_mxfp4(values.float())
    return (values.to(PLAIN[weight.encoding]),)


def write_source(out: Path, raw: dict[str, Any], values: Iterable[tuple[str, Tensor]]) -> Totals:
    """Writes config, index and shards from (name, values) pairs in any order; every weight of the config must come once.

    Raises: CheckpointError if `out` exists and is not empty, or a name is missing, unknown or of another shape.
    """
    cfg = config_from_dict(raw, out / "config.json")
    if cfg.quant_format != "source":
        raise ConfigError(f"quant_method gives format {cfg.quant_format}; expected the released one (fp8, fp4 experts)")
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: already exists and is not empty; choose a new folder or remove it")
    specs = manifest(cfg, "source")
    weight_map = {name: shard_name(cfg, name) for name in specs}
    out.mkdir(parents=True, exist_ok=True)
    _write_shards(out, cfg, values, weight_map)
    size = totals(specs.values())
    index = {"metadata": {"total_size": size.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomic(out / INDEX, json.dumps(index, indent=2))
    write_atomic(out / "config.json", dump_config(raw))
    return size


def _write_shards(
    out: Path, cfg: ModelConfig, values: Iterable[tuple[str, Tensor]], weight_map: dict[str, str]
) -> None:
    shard_specs: dict[str, list[TensorSpec]] = {}
    for spec in manifest(cfg, "source").values():
        shard_specs.setdefault(weight_map[spec.name], []).append(spec)
    writers: dict[str, ShardWriter] = {}
    remaining = {weight.name: weight for weight in weights(cfg)}
    try:
        for file, specs in shard_specs.items():
            writers[file] = ShardWriter(out / file, specs)
        for name, tensor in values:
            weight = remaining.pop(name, None)
            if weight is None or tuple(tensor.shape) != weight.shape:
                expected = "another name (unknown, or given twice)" if weight is None else list(weight.shape)
                raise CheckpointError(f"{name} {list(tensor.shape)}: expected {expected}")
            for spec, stored_tensor in zip(stored(weight, "source"), encode(weight, tensor), strict=True):
                writers[weight_map[name]].write(spec.name, stored_tensor)
        if remaining:
            raise CheckpointError(f"{next(iter(remaining))} and {len(remaining) - 1} other weights were not given")
        for writer in writers.values():
            writer.commit()
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
