"""The number formats of checkpoints: decoding FP8 and MXFP4, encoding them, and the int8 quantiser of W8A8.

Raw bytes in, float32 out, exactly: powers of two times at most four significant bits lose nothing, subnormal scales
included. Everything works on any block of rows, so callers choose how much memory a decode may take.

    E4M3    sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN, there is no infinity
    E2M1    sign, index into 0 .5 1 1.5 2 3 4 6; two per byte, low nibble = even column
    E8M0    2^(byte - 127); 0x00 is an fp32 subnormal, 0xFF is NaN and always refused
"""

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from dsv4.checkpoint.manifest import GROUP, TILE
from dsv4.errors import CheckpointError

E4M3_MAX, E2M1_MAX = 448.0, 6.0
AMAX_FLOOR = 1e-4  # W8A8: a row smaller than this keeps the scale 1e-4 / 127
_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _e8m0_table() -> Float[Tensor, " 256"]:
    bits = torch.arange(256, dtype=torch.int32) << 23
    bits[0] = 1 << 22  # 2^-127 has no normal float32
    bits[255] = 0x7FC00000
    return bits.view(torch.float32)


def _e2m1_pairs() -> Float[Tensor, "256 2"]:
    codes = torch.arange(256)
    signed = torch.cat([_MAGNITUDES, -_MAGNITUDES])
    return torch.stack([signed[codes & 15], signed[codes >> 4]], dim=1)


_E8M0 = _e8m0_table()
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# One look-up moves both columns of a byte: a pair of float32 travels as one int64.
_E2M1_PAIRS = _e2m1_pairs().view(torch.int64).flatten()


def decode_e8m0(scale: UInt8[Tensor, "*S"], name: str) -> Float[Tensor, "*S"]:
    """Powers of two. Raises CheckpointError, naming the tensor, if a byte is 0xFF."""
    nans = int((scale == 255).sum())
    if nans:
        raise CheckpointError(f"{name}: {nans} of {scale.numel()} E8M0 scales are 0xFF (NaN); the file is damaged")
    return torch.index_select(_E8M0, 0, scale.flatten().int()).view(scale.shape)


class Scratch:
    """Memory for decoding blocks of at most `values` values; each decode into it overwrites the one before.

    Allocating a megabyte per block costs more in page faults than all the arithmetic on it.
    """

    def __init__(self, values: int) -> None:
        self._codes = torch.empty(values, dtype=torch.int32)
        self._values = torch.empty(values)

    def lookup(self, table: Tensor, codes: UInt8[Tensor, "R C"]) -> Tensor:
        """table[codes], in this memory. int32 indices: half the traffic of the int64 that plain indexing makes."""
        index = self._codes[: codes.numel()].copy_(codes.flatten())
        out = self._values.view(table.dtype)[: codes.numel()]
        return torch.index_select(table, 0, index, out=out).view(codes.shape)


def decode_fp8(
    weight: UInt8[Tensor, "R C"], scale: Float[Tensor, "TR TC"], *, first_row: int = 0, scratch: Scratch | None = None
) -> Float[Tensor, "R C"]:
    """Rows `first_row`.. of an FP8 matrix; `scale` is the decoded grid of the whole matrix."""
    rows, cols = weight.shape
    out = (scratch or Scratch(weight.numel())).lookup(_E4M3, weight)
    tile_of_row = torch.arange(first_row, first_row + rows) // TILE
    for tile in range(scale.shape[1]):
        columns = slice(tile * TILE, min((tile + 1) * TILE, cols))
        out[:, columns].mul_(scale[tile_of_row, tile, None])
    return out


def decode_mxfp4(
    weight: UInt8[Tensor, "R C2"], scale: Float[Tensor, "R G"], *, scratch: Scratch | None = None
) -> Float[Tensor, "R 2*C2"]:
    """Rows of an MXFP4 matrix and their decoded group scales."""
    rows, half = weight.shape
    out = (scratch or Scratch(2 * weight.numel())).lookup(_E2M1_PAIRS, weight).view(torch.float32)
    return out.view(rows, -1, GROUP).mul_(scale.unsqueeze(-1)).view(rows, 2 * half)


def decode_int8(values: Int8[Tensor, "R C"], scale: Float[Tensor, " R"]) -> Float[Tensor, "R C"]:
    """Rows of a W8A8 matrix in float32."""
    return values.float().mul_(scale.unsqueeze(-1))


def int8_scale(amax: Float[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Per-row scale from the row's largest magnitude: amax / 127, amax floored at 1e-4 (checkpoint.md 2.2)."""
    return amax.clamp_min(AMAX_FLOOR).div_(127)


def quantize_int8(weight: Float[Tensor, "R C"]) -> tuple[Int8[Tensor, "R C"], Float[Tensor, " R"]]:
    """Symmetric int8 per row: round half to even, within [-127, 127]; -128 never occurs."""
    scale = int8_scale(weight.abs().amax(1))
    return (weight / scale.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8), scale


def _exponent_for(amax: Float[Tensor, "*S"], largest: float) -> UInt8[Tensor, "*S"]:
    """Smallest E8M0 byte whose scale keeps amax within `largest`; an all-zero block gets 2^0."""
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = exponent - (mantissa == 0.5).int()  # an exact power of two needs no rounding up
    return torch.where(amax > 0, (exponent + 127).clamp(0, 254), 127).to(torch.uint8)


def encode_fp8(weight: Float[Tensor, "R C"]) -> tuple[UInt8[Tensor, "R C"], UInt8[Tensor, "TR TC"]]:
    """E4M3 bytes and E8M0 tile bytes, round to nearest even."""
    rows, cols = weight.shape
    grid_rows, grid_cols = -(-rows // TILE), -(-cols // TILE)
    padded = torch.nn.functional.pad(weight, (0, grid_cols * TILE - cols, 0, grid_rows * TILE - rows))
    tiles = padded.view(grid_rows, TILE, grid_cols, TILE)
    scale = _exponent_for(tiles.abs().amax((1, 3)), E4M3_MAX)
    codes = (tiles / decode_e8m0(scale, "tile")[:, None, :, None]).view(grid_rows * TILE, -1)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale


def encode_mxfp4(weight: Float[Tensor, "R C"]) -> tuple[UInt8[Tensor, "R C/2"], UInt8[Tensor, "R C/32"]]:
    """Packed E2M1 bytes and E8M0 group bytes, round to nearest, ties to the even code."""
    rows, cols = weight.shape
    groups = weight.view(rows, cols // GROUP, GROUP)
    scale = _exponent_for(groups.abs().amax(-1), E2M1_MAX)
    scaled = (groups / decode_e8m0(scale, "group").unsqueeze(-1)).view(rows, cols)
    edges = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    magnitude = scaled.abs()
    below, above = torch.bucketize(magnitude, edges), torch.bucketize(magnitude, edges, right=True)
    codes = torch.where(below % 2 == 0, below, above) | (scaled < 0).long() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scale
