"""One weight from source to W8A8, a block of rows at a time, with an account of what rounding did to it.

Blocks are small enough that a decoded block stays in the processor's cache through all passes over it, so memory does not
grow with the matrix and every pass runs at cache speed.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from dsv4.checkpoint.files import ShardWriter
from dsv4.checkpoint.folder import Checkpoint
from dsv4.checkpoint.formats import AMAX_FLOOR, Scratch, decode_e8m0, decode_fp8, decode_mxfp4, int8_scale
from dsv4.checkpoint.manifest import PLAIN_DTYPES, Weight
from dsv4.errors import CheckpointError

BLOCK = 1 << 18  # values per block: 1 MiB of float32
ROUNDING_LIMIT = 127.5  # |w / scale| past this would be cut by more than half a step


@dataclass
class RoundingError:
    """What rounding to int8 or bf16 did, summed over matrices. Errors are absolute, in units of the weights.

    saturated_rows: rows cut at 127 by more than half a step; zero_rows: nothing but zeros; floored_rows: below the 1e-4
    floor of the int8 scale, so that they keep fewer than 8 bits.
    """

    matrices: int = 0
    values: int = 0
    max_error: float = 0.0
    error_square_sum: float = 0.0
    value_square_sum: float = 0.0
    saturated_rows: int = 0
    zero_rows: int = 0
    floored_rows: int = 0

    def add(self, other: "RoundingError") -> None:
        """Adds another account to this one."""
        largest = max(self.max_error, other.max_error)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.max_error = largest

    @property
    def rms_error(self) -> float:
        return (self.error_square_sum / self.values) ** 0.5 if self.values else 0.0

    @property
    def relative_rms_error(self) -> float:
        return (self.error_square_sum / self.value_square_sum) ** 0.5 if self.value_square_sum else 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def decoded_blocks(source: Checkpoint, weight: Weight) -> Iterator[Tensor]:
    """The float32 values of a scaled weight in source format, by blocks of rows; each block overwrites the one before.

    Raises: CheckpointError naming the tensor on a NaN scale.
    """
    shard = source.shard_of[weight.name]
    rows = max(1, BLOCK // weight.shape[1])
    scale = decode_e8m0(source.read(weight.scale_name), weight.scale_name)
    scratch, first = Scratch(rows * weight.shape[1]), 0
    for block in shard.pieces(weight.name, rows):
        if weight.encoding == "fp8":
            yield decode_fp8(block, scale, first_row=first, scratch=scratch)
        else:
            yield decode_mxfp4(block.view(torch.uint8), scale[first : first + len(block)], scratch=scratch)
        first += len(block)


def convert_weight(source: Checkpoint, weight: Weight, writer: ShardWriter) -> RoundingError | None:
    """Writes the W8A8 form of one weight; None if it was copied bit for bit.

    Raises: CheckpointError naming the tensor if a value is NaN or too large for float32.
    """
    if weight.encoding in PLAIN_DTYPES:
        row_values = max(1, source.specs[weight.name].nbytes // weight.shape[0])
        writer.write_pieces(
            weight.name, source.shard_of[weight.name].pieces(weight.name, max(1, 4 * BLOCK // row_values))
        )
        return None
    account = RoundingError(matrices=1, values=weight.shape[0] * weight.shape[1])
    if weight.int8:
        scales: list[Tensor] = []
        writer.write_pieces(weight.name, _int8_blocks(source, weight, account, scales))
        writer.write(weight.scale_name, torch.cat(scales))
    else:
        writer.write_pieces(weight.name, _bf16_blocks(source, weight, account))
    return account


def _int8_blocks(source: Checkpoint, weight: Weight, account: RoundingError, scales: list[Tensor]) -> Iterator[Tensor]:
    spare = torch.empty(0)
    for block in decoded_blocks(source, weight):
        spare = spare if spare.shape == block.shape else torch.empty_like(block)
        amax = torch.abs(block, out=spare).amax(1)
        scale = int8_scale(amax)
        _require_finite(weight, scale)
        scales.append(scale)
        account.zero_rows += int((amax == 0).sum())
        account.floored_rows += int(((amax > 0) & (amax < AMAX_FLOOR)).sum())
        account.saturated_rows += int((amax / scale > ROUNDING_LIMIT).sum())
        account.value_square_sum += _square_sum(block)
        steps = block.div_(scale.unsqueeze(-1))
        codes = torch.round(steps, out=spare)
        error = steps.sub_(codes)
        account.error_square_sum += _square_sum(error, scale)
        account.max_error = max(account.max_error, float((error.abs_().amax(1) * scale).max()))
        yield codes.clamp_(-127, 127).to(torch.int8)


def _bf16_blocks(source: Checkpoint, weight: Weight, account: RoundingError) -> Iterator[Tensor]:
    for block in decoded_blocks(source, weight):
        rounded = block.to(torch.bfloat16)
        amax = rounded.abs().amax(1).float()
        _require_finite(weight, amax)
        account.zero_rows += int((amax == 0).sum())
        account.value_square_sum += _square_sum(block)
        error = block.sub_(rounded.float())
        account.error_square_sum += _square_sum(error)
        account.max_error = max(account.max_error, float(error.abs_().max()))
        yield rounded


def _square_sum(block: Tensor, row_factor: Tensor | None = None) -> float:
    norms = torch.linalg.vector_norm(block, dim=1).double()
    return float((norms if row_factor is None else norms * row_factor).square().sum())


def _require_finite(weight: Weight, row_values: Tensor) -> None:
    bad = int((~row_values.isfinite()).sum())
    if bad:
        raise CheckpointError(
            f"{weight.name}: {bad} rows hold NaN or values beyond {row_values.dtype}; the file is damaged "
            "or its scales are out of range"
        )
