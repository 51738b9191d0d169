"""A checkpoint folder: config, index and shard headers, held against the manifest before a weight is read.

Both forms look alike: `config.json`, `model.safetensors.index.json`, shards beside them. Names, dtypes and shapes are
compared in both directions, so a stray scale is as loud as a missing one.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dsv4.checkpoint.files import Shard, open_shard
from dsv4.checkpoint.manifest import Form, TensorSpec, manifest
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError

INDEX = "model.safetensors.index.json"
MAX_LISTED = 5


@dataclass(frozen=True)
class Checkpoint:
    """A validated folder: every tensor of the manifest is where `shard_of` says, with the right dtype and shape."""

    path: Path
    form: Form
    specs: dict[str, TensorSpec]
    shard_of: dict[str, Shard]

    def view(self, name: str) -> Tensor:
        """A memory-mapped tensor."""
        return self.shard_of[name].view(name)

    def read(self, name: str) -> Tensor:
        """A tensor in memory of its own."""
        return self.shard_of[name].read(name)


def checkpoint_form(cfg: ModelConfig, path: Path) -> Form:
    """Which form the config declares. Raises CheckpointError if it declares none."""
    if cfg.quant_format == "none":
        raise CheckpointError(
            f"{path}: config.json has no quantization_config; expected the released source format (fp8 with fp4 experts) "
            "or W8A8 (compressed-tensors, int-quantized)"
        )
    return cfg.quant_format


def read_index(path: Path) -> dict[str, str]:
    """The weight map: tensor name to file name. Raises CheckpointError if it is missing, damaged or leaves the folder."""
    where = path / INDEX
    try:
        weight_map = json.loads(where.read_text())["weight_map"]
        files = set(weight_map.values())
    except FileNotFoundError:
        raise CheckpointError(f"{where}: no such file; a checkpoint folder needs its index") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: not a safetensors index ({error!r})") from None
    for file in files:
        if not isinstance(file, str) or file != Path(file).name or file.startswith("."):
            raise CheckpointError(f"{where}: names the shard {file!r}; expected a plain file name in the same folder")
    if any(name.endswith(".weight_scale") for name in weight_map):
        raise CheckpointError(
            f"{where}: names scales '.weight_scale', a W8A8 layout of another converter ([out, 1] scales, no floor); "
            'convert the released checkpoint with "dsv4 convert"'
        )
    return weight_map


def _compare_names(expected: Iterable[str], found: Iterable[str], where: str) -> Iterator[str]:
    expected, found = set(expected), set(found)
    yield from (f"{name}: missing from {where}" for name in sorted(expected - found))
    yield from (f"{name}: in {where} but not part of this model" for name in sorted(found - expected))


def find_problems(
    path: Path, specs: dict[str, TensorSpec], weight_map: dict[str, str]
) -> tuple[dict[str, Shard], list[str]]:
    """Opens the shards that hold `specs` and lists everything that differs from them, one line per problem."""
    problems = list(_compare_names(specs, weight_map, "the index"))
    shard_of: dict[str, Shard] = {}
    for file in sorted(set(weight_map.values())):
        try:
            shard = open_shard(path / file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        names = {name for name, owner in weight_map.items() if owner == file}
        problems += _compare_names(names, shard.specs, file)
        for name in names & specs.keys() & shard.specs.keys():
            shard_of[name] = shard
            if shard.specs[name] != specs[name]:
                problems.append(f"{name}: expected {specs[name]}, {file} has {shard.specs[name]}")
    return shard_of, problems


def open_checkpoint(path: Path, cfg: ModelConfig, *, draft: bool = True) -> Checkpoint:
    """Validates a folder by its headers alone; without `draft`, `mtp.*` is not looked at and need not be there.

    Raises: CheckpointError naming the first few tensors that are missing, extra, or of another dtype or shape.
    """
    form = checkpoint_form(cfg, path)
    wanted = (lambda name: True) if draft else (lambda name: not name.startswith("mtp."))
    specs = {name: spec for name, spec in manifest(cfg, form).items() if wanted(name)}
    weight_map = {name: file for name, file in read_index(path).items() if wanted(name)}
    shard_of, problems = find_problems(path, specs, weight_map)
    if problems:
        more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise CheckpointError(f'{path}: {"; ".join(problems[:MAX_LISTED])}{more}. "dsv4 check {path}" lists everything')
    return Checkpoint(path, form, specs, shard_of)
