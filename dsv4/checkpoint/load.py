"""Parameter trees from a checkpoint, from nothing but shapes, or from a seed: three sources behind one `Reader`.

A leaf is allocated once at its final size and filled name by name, so merged matrices and expert stacks cost no second
copy; a bf16 leaf that is one contiguous piece of a file stays memory-mapped. A rank reads only the slices it owns.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dsv4.checkpoint.folder import Checkpoint, checkpoint_form, open_checkpoint
from dsv4.checkpoint.formats import decode_e8m0, decode_fp8, decode_int8, decode_mxfp4, quantize_int8
from dsv4.checkpoint.manifest import Weight, weights
from dsv4.checkpoint.random import random_weight
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.mesh import SINGLE, Mesh
from dsv4.model.rope import rope_tables
from dsv4.params import Matrix, Params, RopeTables, build_drafter, build_target
from dsv4.tree import QuantWeight

ALL = slice(None)
BLOCK = 1 << 20  # values decoded at a time: 4 MiB of float32


class Source(Protocol):
    """Where values come from. Slices are of the stored [out, in] matrix, or of the vector."""

    device: str

    def fill(self, weight: Weight, rows: slice, cols: slice, out: Tensor) -> None:
        """Writes the decoded values in out's dtype."""

    def fill_int8(self, weight: Weight, rows: slice, cols: slice, out: QuantWeight) -> None:
        """Writes int8 values and their row scales."""

    def view(self, weight: Weight, rows: slice, cols: slice, dtype: torch.dtype) -> Tensor | None:
        """The values without a copy, if they lie ready in this dtype."""


class SourceReader:
    """The `Reader` of params.py over any source. `dtype` None gives the W8A8 tree, a float dtype a float tree."""

    def __init__(self, cfg: ModelConfig, source: Source, dtype: torch.dtype | None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(
                f"dtype is {dtype}; expected None (W8A8 as stored) or a float dtype such as torch.float32"
            )
        self._weights = {weight.name: weight for weight in weights(cfg)}
        self._source, self._dtype = source, dtype
        self.act_dtype = dtype or torch.bfloat16

    def __call__(
        self,
        names: str | Sequence[str],
        form: str,
        *,
        rows: slice | Sequence[slice] = ALL,
        cols: slice = ALL,
    ) -> Matrix:
        parts = [self._weights[name] for name in ([names] if isinstance(names, str) else names)]
        slices = [rows] * len(parts) if isinstance(rows, slice) else list(rows)
        counts = [len(range(*part.shape[:1])[r]) for part, r in zip(parts, slices, strict=True)]
        tail = [len(range(size)[cols]) for size in parts[0].shape[1:]]
        shape = [sum(counts), *tail]
        if form == "int8" and self._dtype is None:
            return self._int8(parts, slices, counts, cols, shape)
        dtype = {"f32": torch.float32, "i32": torch.int32}.get(form, self.act_dtype)
        if len(parts) == 1:
            ready = self._source.view(parts[0], slices[0], cols, dtype)
            if ready is not None:
                return ready
        out = torch.empty(shape, dtype=dtype, device=self._source.device)
        for part, r, piece in zip(parts, slices, out.split(counts), strict=True):
            self._source.fill(part, r, cols, piece)
        return out

    def stack(self, names: Sequence[Sequence[str]], form: str) -> Matrix:
        flat = self([name for group in names for name in group], form)
        if isinstance(flat, QuantWeight):
            count = len(names)
            return QuantWeight(values=flat.values.unflatten(0, (count, -1)), scale=flat.scale.view(count, -1))
        return flat.unflatten(0, (len(names), -1))

    def _int8(
        self, parts: list[Weight], slices: list[slice], counts: list[int], cols: slice, shape: list[int]
    ) -> QuantWeight:
        device = self._source.device
        out = QuantWeight(
            values=torch.empty(shape, dtype=torch.int8, device=device),
            scale=torch.empty(shape[0], dtype=torch.float32, device=device),
        )
        pieces = zip(out.values.split(counts), out.scale.split(counts), strict=True)
        for part, r, (values, scale) in zip(parts, slices, pieces, strict=True):
            self._source.fill_int8(part, r, cols, QuantWeight(values=values, scale=scale))
        return out


def _cut(tensor: Tensor, rows: slice, cols: slice) -> Tensor:
    return tensor[rows] if tensor.dim() == 1 else tensor[rows, cols]


class FileSource:
    """Values of a checkpoint on disk, decoded block by block."""

    device = "cpu"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def view(self, weight: Weight, rows: slice, cols: slice, dtype: torch.dtype) -> Tensor | None:
        if dtype not in (torch.bfloat16, torch.float32) or self._is_scaled(weight):
            return None
        ready = _cut(self._checkpoint.view(weight.name), rows, cols)
        aligned = ready.data_ptr() % ready.element_size() == 0
        return ready if ready.dtype == dtype and ready.is_contiguous() and aligned else None

    def fill(self, weight: Weight, rows: slice, cols: slice, out: Tensor) -> None:
        stored = self._checkpoint.view(weight.name)
        if not self._is_scaled(weight):
            out.copy_(_cut(stored, rows, cols))
            return
        scale = self._checkpoint.view(weight.scale_name)
        wanted = range(weight.shape[0])[rows]
        step = max(1, BLOCK // weight.shape[1])
        for first in range(wanted.start, wanted.stop, step):
            stop = min(first + step, wanted.stop)
            block = self._decode(weight, stored[first:stop], scale, first)
            out[first - wanted.start : stop - wanted.start] = block[:, cols]

    def fill_int8(self, weight: Weight, rows: slice, cols: slice, out: QuantWeight) -> None:
        out.values.copy_(self._checkpoint.view(weight.name)[rows, cols])
        out.scale.copy_(self._checkpoint.view(weight.scale_name)[rows])

    def _is_scaled(self, weight: Weight) -> bool:
        return weight.scale_name in self._checkpoint.specs

    def _decode(self, weight: Weight, block: Tensor, scale: Tensor, first: int) -> Tensor:
        if self._checkpoint.form == "w8a8":
            return decode_int8(block, scale[first : first + len(block)])
        if weight.encoding == "fp8":
            return decode_fp8(block, decode_e8m0(scale, weight.scale_name), first_row=first)
        return decode_mxfp4(block.view(torch.uint8), decode_e8m0(scale[first : first + len(block)], weight.scale_name))


class AbstractSource:
    """Shapes and dtypes on the meta device; there is nothing to fill."""

    device = "meta"

    def view(self, weight: Weight, rows: slice, cols: slice, dtype: torch.dtype) -> None:
        return None

    def fill(self, weight: Weight, rows: slice, cols: slice, out: Tensor) -> None:
        pass

    def fill_int8(self, weight: Weight, rows: slice, cols: slice, out: QuantWeight) -> None:
        pass


class RandomSource:
    """Random weights without files; slices of one seed fit together across ranks."""

    device = "cpu"

    def __init__(self, cfg: ModelConfig, seed: int) -> None:
        self._cfg, self._seed = cfg, seed

    def view(self, weight: Weight, rows: slice, cols: slice, dtype: torch.dtype) -> None:
        return None

    def fill(self, weight: Weight, rows: slice, cols: slice, out: Tensor) -> None:
        out.copy_(_cut(random_weight(self._cfg, weight, self._seed), rows, cols))

    def fill_int8(self, weight: Weight, rows: slice, cols: slice, out: QuantWeight) -> None:
        values, scale = quantize_int8(random_weight(self._cfg, weight, self._seed))
        out.values.copy_(values[rows, cols])
        out.scale.copy_(scale[rows])


def _build(cfg: ModelConfig, reader: SourceReader, mesh: Mesh, drafter: bool, rope: RopeTables) -> Params:
    return Params(
        target=build_target(cfg, reader, mesh),
        drafter=build_drafter(cfg, reader, mesh) if drafter else None,
        rope=rope,
    )


def _require_dspark(cfg: ModelConfig, drafter: bool) -> None:
    if drafter and not cfg.has_dspark:
        raise CheckpointError(
            "config.json has no dspark_target_layer_ids: this checkpoint carries no DSpark drafter; use K=0"
        )


def load_params(
    path: str | Path,
    cfg: ModelConfig,
    dtype: torch.dtype | None = None,
    *,
    mesh: Mesh = SINGLE,
    max_positions: int | None = None,
    drafter: bool | None = None,
) -> Params:
    """Loads one rank's parameters from a checkpoint folder.

    dtype: None keeps W8A8 as stored; a float dtype decodes W8A8 or the source format into it everywhere, except that
        leaves declared float32 or int32 stay so.
    max_positions: rows of the rope tables; by default the config's max_position_embeddings.
    drafter: whether to load `mtp.*`; by default, if the config has it. Without, no draft shard is opened.

    Raises: CheckpointError if the folder differs from the config's manifest, or is in source format and dtype is None.
    """
    path = Path(path)
    drafter = cfg.has_dspark if drafter is None else drafter
    _require_dspark(cfg, drafter)
    if dtype is None and checkpoint_form(cfg, path) == "source":
        raise CheckpointError(
            f'{path}: is in the released source format (FP8 + MXFP4); convert it first: "dsv4 convert {path} OUT"'
        )
    reader = SourceReader(cfg, FileSource(open_checkpoint(path, cfg, draft=drafter)), dtype)
    rope = rope_tables(cfg, max_positions or cfg.max_position_embeddings, reader.act_dtype)
    return _build(cfg, reader, mesh, drafter, rope)


def abstract_params(
    cfg: ModelConfig,
    mesh: Mesh = SINGLE,
    drafter: bool | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
) -> Params:
    """The tree `load_params` would give, on the meta device: no files, no memory, full size in a second."""
    drafter = cfg.has_dspark if drafter is None else drafter
    _require_dspark(cfg, drafter)
    reader = SourceReader(cfg, AbstractSource(), dtype)
    shape = (max_positions or cfg.max_position_embeddings, cfg.qk_rope_head_dim)
    plain, yarn = (torch.empty(shape, dtype=reader.act_dtype, device="meta") for _ in range(2))
    return _build(cfg, reader, mesh, drafter, RopeTables(plain=plain, yarn=yarn))


def random_params(
    cfg: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    *,
    mesh: Mesh = SINGLE,
    max_positions: int | None = None,
    drafter: bool | None = None,
) -> Params:
    """The tree of `random_weights(cfg, seed)`, never quantised on the way except for the int8 sites of dtype None."""
    drafter = cfg.has_dspark if drafter is None else drafter
    _require_dspark(cfg, drafter)
    reader = SourceReader(cfg, RandomSource(cfg, seed), dtype)
    rope = rope_tables(cfg, max_positions or cfg.max_position_embeddings, reader.act_dtype)
    return _build(cfg, reader, mesh, drafter, rope)
