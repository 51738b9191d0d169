"""A checkpoint folder against its manifest, values included: one line per problem, nothing held in memory."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4.checkpoint.files import Shard
from dsv4.checkpoint.folder import INDEX, checkpoint_form, find_problems, read_index
from dsv4.checkpoint.formats import decode_e8m0, decode_fp8, decode_mxfp4
from dsv4.checkpoint.journal import JOURNAL
from dsv4.checkpoint.manifest import Form, Totals, Weight, manifest, stored, totals, weights
from dsv4.config import ModelConfig, load_config
from dsv4.errors import CheckpointError

BLOCK = 1 << 20
# From this scale byte on, 448 * 2^(byte - 127) leaves float32, so that only a decode can tell.
OVERFLOW_BYTE = 247


@dataclass(frozen=True)
class CheckResult:
    """What was expected and every difference found."""

    form: Form
    totals: Totals
    problems: list[str]


def check(path: str | Path, *, values: bool = True) -> CheckResult:
    """Compares names, dtypes, shapes and (unless `values` is False) every value with what the config calls for.

    Values: no NaN or infinity, no E8M0 byte 0xFF, no int8 -128, W8A8 scales above 0, expert ids below n_routed_experts.

    Raises: CheckpointError if the folder is no checkpoint at all: no config, no index, another model.
    """
    path = Path(path)
    if (path / JOURNAL).exists() and not (path / "config.json").exists():
        raise CheckpointError(f'{path}: an unfinished conversion; finish it with "dsv4 convert SRC {path} --resume"')
    cfg = load_config(path)
    form = checkpoint_form(cfg, path)
    specs, weight_map = manifest(cfg, form), read_index(path)
    size = totals(specs.values())
    shard_of, problems = find_problems(path, specs, weight_map)
    declared = (json.loads((path / INDEX).read_text()).get("metadata") or {}).get("total_size")
    if declared != size.nbytes:
        problems.append(f"{INDEX}: metadata.total_size is {declared}, expected {size.nbytes}")
    if values:
        for weight in weights(cfg):
            expected = stored(weight, form)
            sound = all(s.name in shard_of and shard_of[s.name].specs[s.name] == s for s in expected)
            if sound:  # anything else has its line already
                problems += _value_problems(cfg, form, weight, shard_of)
    return CheckResult(form, size, problems)


def _value_problems(cfg: ModelConfig, form: Form, weight: Weight, shard_of: dict[str, Shard]) -> Iterator[str]:
    shard = shard_of[weight.name]
    blocks = shard.pieces(weight.name, max(1, BLOCK // max(1, weight.shape[-1])))
    if weight.name.endswith("tid2eid"):
        count = sum(int(((block < 0) | (block >= cfg.n_routed_experts)).sum()) for block in blocks)
        yield from _line(weight.name, count, f"expert ids outside 0..{cfg.n_routed_experts - 1}")
    elif weight.scale_name not in shard_of or len(stored(weight, form)) == 1:
        yield from _line(weight.name, sum(_not_finite(block) for block in blocks), "values are NaN or infinite")
    elif form == "w8a8":
        yield from _line(weight.name, sum(int((block == -128).sum()) for block in blocks), "codes are -128")
        scale = shard_of[weight.scale_name].read(weight.scale_name)
        bad = int((~scale.isfinite() | (scale <= 0)).sum())
        yield from _line(weight.scale_name, bad, "scales are not finite and above 0")
    else:
        yield from _source_problems(weight, blocks, shard_of[weight.scale_name].read(weight.scale_name))


def _source_problems(weight: Weight, blocks: Iterator[Tensor], scale: Tensor) -> Iterator[str]:
    nans = int((scale == 255).sum())
    yield from _line(weight.scale_name, nans, "E8M0 scales are 0xFF (NaN)")
    may_overflow = not nans and int(scale.max()) >= OVERFLOW_BYTE
    if weight.encoding == "mxfp4" and not may_overflow:
        return  # every code is a number
    bad, first = 0, 0
    for block in blocks:
        if weight.encoding == "fp8" and not may_overflow:
            bad += int(((block & 0x7F) == 0x7F).sum())
        elif weight.encoding == "fp8":
            bad += _not_finite(decode_fp8(block, decode_e8m0(scale, weight.scale_name), first_row=first))
        else:
            groups = decode_e8m0(scale[first : first + len(block)], weight.scale_name)
            bad += _not_finite(decode_mxfp4(block.view(torch.uint8), groups))
        first += len(block)
    yield from _line(weight.name, bad, "values are NaN or leave float32")


def _not_finite(block: Tensor) -> int:
    return int((~block.isfinite()).sum())


def _line(name: str, count: int, what: str) -> Iterator[str]:
    if count:
        yield f"{name}: {count:,} {what}"
