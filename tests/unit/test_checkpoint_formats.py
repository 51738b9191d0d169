"""Number formats against an independent float64 decode, bit by bit from their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.checkpoint.formats import (
    AMAX_FLOOR,
    decode_e8m0,
    decode_fp8,
    decode_int8,
    decode_mxfp4,
    encode_fp8,
    encode_mxfp4,
    quantize_int8,
)
from dsv4.errors import CheckpointError


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if sign else value


def e2m1(code: int) -> float:
    value = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7]
    return -value if code & 8 else value


def e8m0(byte: np.ndarray | float) -> np.ndarray | float:
    return 2.0 ** (byte - 127)


E4M3 = np.array([e4m3(b) for b in range(256)])
E2M1 = np.array([e2m1(c) for c in range(16)])
FINITE_E4M3 = torch.tensor([b for b in range(256) if np.isfinite(E4M3[b])], dtype=torch.uint8)


def reference_fp8(weight: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    rows, cols = np.indices(weight.shape)
    return E4M3[weight.numpy()] * e8m0(scale.numpy().astype(float)[rows // 128, cols // 128])


def reference_mxfp4(weight: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    rows, cols = np.indices((weight.shape[0], 2 * weight.shape[1]))
    codes = weight.numpy()[rows, cols // 2] >> (4 * (cols % 2)) & 15
    return E2M1[codes] * e8m0(scale.numpy().astype(float)[rows, cols // 32])


def test_e8m0_is_exact_down_to_the_subnormal() -> None:
    got = decode_e8m0(torch.arange(255, dtype=torch.uint8), "s").double()
    assert got.tolist() == [e8m0(b) for b in range(255)]
    assert got[0] == 2.0**-127


def test_e8m0_nan_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_a\.scale: 2 of 4 E8M0 scales are 0xFF"):
        decode_e8m0(torch.tensor([1, 255, 255, 0], dtype=torch.uint8), "layers.0.attn.wq_a.scale")


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (300, 64)])
def test_fp8_decode_is_exact_on_whole_and_ragged_tiles(shape: tuple[int, int]) -> None:
    rows, cols = shape
    generator = torch.Generator().manual_seed(rows)
    weight = FINITE_E4M3[torch.randint(len(FINITE_E4M3), shape, generator=generator)]
    scale = torch.randint(0, 200, (-(-rows // 128), -(-cols // 128)), generator=generator).to(torch.uint8)
    want = reference_fp8(weight, scale)
    assert np.array_equal(decode_fp8(weight, decode_e8m0(scale, "s")).double().numpy(), want)
    first = rows // 2
    part = decode_fp8(weight[first:], decode_e8m0(scale, "s"), first_row=first)
    assert np.array_equal(part.double().numpy(), want[first:])


@pytest.mark.parametrize("byte", [0, 1, 110, 127, 200, 246])
def test_every_e4m3_code_times_every_range_of_scale_is_exact(byte: int) -> None:
    weight = FINITE_E4M3.view(2, -1)
    got = decode_fp8(weight, decode_e8m0(torch.full((1, 1), byte, dtype=torch.uint8), "s"))
    assert np.array_equal(got.double().numpy(), E4M3[weight.numpy()] * e8m0(byte))


def test_mxfp4_decode_is_exact_for_every_byte() -> None:
    weight = torch.arange(256, dtype=torch.uint8).repeat(2).view(4, 128)
    scale = torch.tensor([[0, 1, 110, 127, 128, 140, 250, 252]] * 4, dtype=torch.uint8)
    got = decode_mxfp4(weight, decode_e8m0(scale, "s"))
    assert np.array_equal(got.double().numpy(), reference_mxfp4(weight, scale))


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 150), groups=st.integers(1, 5), seed=st.integers(0, 99), exponent=st.integers(-20, 20))
def test_encoders_stay_within_half_a_step(rows: int, groups: int, seed: int, exponent: int) -> None:
    weight = torch.randn(rows, 32 * groups, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = encode_mxfp4(weight)
    steps = decode_e8m0(scale, "s").repeat_interleave(32, 1)
    error = (decode_mxfp4(codes, decode_e8m0(scale, "s")) - weight).abs()
    assert bool((error <= torch.maximum(weight.abs() / 4, steps / 4)).all())
    codes, scale = encode_fp8(weight)
    decoded = decode_fp8(codes, decode_e8m0(scale, "s"))
    tile = decode_e8m0(scale, "s").repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, : weight.shape[1]]
    assert bool(((decoded - weight).abs() <= torch.maximum(weight.abs() / 16, tile * 2.0**-10)).all())


def test_encoding_what_was_decoded_changes_nothing() -> None:
    weight = torch.randn(200, 96, generator=torch.Generator().manual_seed(3))
    for encode, decode in ((encode_fp8, decode_fp8), (encode_mxfp4, decode_mxfp4)):
        codes, scale = encode(weight)
        once = decode(codes, decode_e8m0(scale, "s"))
        again_codes, again_scale = encode(once)
        assert torch.equal(decode(again_codes, decode_e8m0(again_scale, "s")), once)


def test_mxfp4_rounds_ties_to_the_even_code() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :9] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    codes, scale = encode_mxfp4(weight)
    got = decode_mxfp4(codes, decode_e8m0(scale, "s"))[0, :9]
    assert scale.item() == 127
    assert got.tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -2]


def test_int8_rows_follow_the_published_arithmetic() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight[5] = 0
    weight[6] = 1e-6
    q, scale = quantize_int8(weight)
    amax = np.maximum(np.abs(weight.numpy()).max(1), np.float32(AMAX_FLOOR))
    assert np.array_equal(scale.numpy(), amax / np.float32(127))
    assert np.array_equal(q.numpy(), np.clip(np.rint(weight.numpy() / scale.numpy()[:, None]), -127, 127))
    assert q.min() == -127 and q[5].abs().sum() == 0
    assert bool(((decode_int8(q, scale) - weight).abs() <= scale[:, None] * 0.50001).all())
