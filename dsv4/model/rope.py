"""Rotary tables (model.md section 3): one for window-only layers and draft stages, one with YaRN for compressed layers."""

import math

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.params import RopeTables


def inverse_frequencies(cfg: ModelConfig, *, yarn: bool) -> Tensor:
    """f_i = base^(-2i/r), float32 [r/2]; YaRN blends in f_i / factor below the ramp and never scales cos or sin."""
    r = cfg.qk_rope_head_dim
    base = cfg.compress_rope_theta if yarn else cfg.rope_theta
    frequencies = 1.0 / base ** (torch.arange(0, r, 2, dtype=torch.float32) / r)
    if not yarn:
        return frequencies
    s = cfg.rope_scaling

    def channel(rotations: float) -> float:
        return r * math.log(s.original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = max(math.floor(channel(s.beta_fast)), 0), min(math.ceil(channel(s.beta_slow)), r - 1)
    ramp = ((torch.arange(r // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / s.factor * ramp


def rope_tables(cfg: ModelConfig, positions: int, dtype: torch.dtype) -> RopeTables:
    """cos | sin of positions 0 .. positions-1, [positions, r] in `dtype` (bf16 in W8A8), from float32 angles as the source."""

    def table(yarn: bool) -> Tensor:
        out = torch.empty(positions, cfg.qk_rope_head_dim, dtype=dtype)
        half = cfg.qk_rope_head_dim // 2
        frequencies = inverse_frequencies(cfg, yarn=yarn)
        for first in range(0, positions, 65536):  # float32 angles of a million positions would triple the peak
            angles = torch.arange(first, min(first + 65536, positions)).float()[:, None] * frequencies
            out[first : first + len(angles), :half] = angles.cos()
            out[first : first + len(angles), half:] = angles.sin()
        return out

    return RopeTables(plain=table(False), yarn=table(True))
