"""Scales of blocks: each rule around every power of two, and the scales that are no powers of two."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from quack_blockscaled import scales
from quack_blockscaled.formats import (
    FP8_BLOCK_1X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    ElementFormat,
)
from quack_blockscaled.reference import dequantize, quantize
from quack_core.errors import UnsupportedError

MX = [MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4]
INF, NAN = float("inf"), float("nan")


def codes(amax: list[float], format: BlockFormat, rule: str = "rceil") -> list[int]:
    found = scales.encode(torch.tensor(amax, dtype=torch.float32), format, rule)
    return found.view(torch.uint8).tolist()


def floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def by_definition(amax: float, element: ElementFormat, rule: str) -> int:
    """The biased exponent, in rational numbers."""
    exact, largest = Fraction(amax), Fraction(element.max)
    if not exact:
        return 0
    power, top = floor_log2(exact), floor_log2(largest)
    if rule == "rceil":
        k = power - top
        k += exact > largest * Fraction(2) ** k
    elif rule == "ceil":
        k = power - top + (exact > Fraction(2) ** power)
    elif rule == "even":
        step = Fraction(2) ** (power - element.mantissa_bits)
        k = floor_log2((exact / step + Fraction(1, 2)).__floor__() * step) - top
    else:
        k = power - top
    return min(max(k, -127), 127) + 127


@pytest.mark.parametrize("rule", scales.RULES)
@pytest.mark.parametrize("format", MX, ids=lambda each: each.name)
def test_each_rule_around_every_power_of_two(format: BlockFormat, rule: str) -> None:
    element = format.element
    top = 2.0 ** floor_log2(Fraction(element.max))
    even = 2 - 2.0 ** -(element.mantissa_bits + 1)
    near = np.array([1.0, 1.5, element.max / top, even], np.float32)
    bits = near.view(np.int32)
    factors = np.concatenate([bits - 1, bits, bits + 1]).view(np.float32).astype(np.float64)
    all_ = np.outer(2.0 ** np.arange(-149, 129), factors).flatten()
    with np.errstate(over="ignore"):  # those above the largest float32 are no numbers of ours
        amax = [float(each) for each in all_.astype(np.float32) if np.isfinite(each)]
    assert codes(amax, format, rule) == [by_definition(each, element, rule) for each in amax]


def test_values_by_block_maximum_KQ_02_KQ_03() -> None:
    amax = [0, 1, 448, 450, 500, 510, 512, 3e38, NAN]
    assert codes(amax, MXFP8_E4M3) == [0, 119, 127, 128, 128, 128, 128, 247, 255]
    assert codes(amax, MXFP8_E4M3, "floor") == [0, 119, 127, 127, 127, 127, 128, 246, 255]
    amax = [6, 6.25, 7, 7.5, 448]
    assert codes(amax, MXFP4) == [127, 128, 128, 128, 134]
    assert codes(amax, MXFP4, "floor") == [127, 127, 127, 127, 133]
    assert codes([4, 4.5, 6, 7, 7.5, 8], MXFP4, "ceil") == [127, 128, 128, 128, 128, 128]
    # Rounded to one mantissa bit, 7 and more become 8; 6.99 becomes 6.
    assert codes([6, 6.99, 7, 7.5, 8], MXFP4, "even") == [127, 127, 128, 128, 128]


@pytest.mark.parametrize("format", MX, ids=lambda each: each.name)
@pytest.mark.parametrize("rule", scales.RULES)
def test_what_has_no_scale_and_the_ends(format: BlockFormat, rule: str) -> None:
    assert codes([INF, NAN], format, rule) == [255, 255]
    assert codes([0.0, 1e-45, 2.0**-127], format, rule) == [0, 0, 0]


def test_a_scale_stops_at_the_largest() -> None:
    narrow = BlockFormat("narrow", ElementFormat("e2m1b3", 2, 1, 3), MXFP4.scale, (1, 32))
    assert narrow.element.max == 1.5
    assert codes([2.0**127, 1.6 * 2.0**127], narrow) == [254, 254]


@pytest.mark.parametrize("maximum", [450.0, 500.0, 510.0])
def test_rceil_clips_nothing_KQ_02(maximum: float) -> None:
    x = torch.zeros(32)
    x[7] = maximum
    for rule in ("rceil", "ceil"):
        parts = quantize(x, MXFP8_E4M3, scale_rounding=rule)
        error = (dequantize(parts.values, parts.scales, MXFP8_E4M3) - x).abs().max().item()
        assert error <= 32.0 / 2  # a step between 256 and 512, with a scale of 2
    parts = quantize(x, MXFP8_E4M3, scale_rounding="floor")
    assert dequantize(parts.values, parts.scales, MXFP8_E4M3)[7] == 448.0


def test_numbers_of_e8m0() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e8m0fnu)
    found = scales.decode(every, MXFP4)
    assert found[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert found[255].isnan()


def test_numbers_of_e8m0_are_those_of_ml_dtypes() -> None:
    library = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8)
    found = scales.decode(torch.from_numpy(every).view(torch.float8_e8m0fnu), MXFP4)
    expected = every.view(library.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(found.numpy(), expected)


# --- ue4m3


def ue4m3(amax: list[float]) -> Tensor:
    return scales.decode(scales.encode(torch.tensor(amax), NVFP4), NVFP4)


def test_ue4m3_is_rounded_to_the_nearest_even_and_stops_at_448_KQ_04() -> None:
    # amax / 6 on a tie: 1.0625 lies between 1 and 1.125, 1.1875 between 1.125 and 1.25
    assert ue4m3([6 * 1.0625, 6 * 1.1875]).tolist() == [1.0, 1.25]
    # ties of subnormal scales, in steps of 2**-9
    assert ue4m3([6 * 2.0**-10, 6 * 1.5 * 2.0**-9, 6 * 2.5 * 2.0**-9]).tolist() == [
        0.0,
        2 * 2.0**-9,
        2 * 2.0**-9,
    ]
    assert ue4m3([6 * 448.0, 6 * 449.0, 6 * 464.0, 6 * 480.0, 3e38]).tolist() == [448.0] * 5
    assert ue4m3([INF, NAN]).isnan().all()
    assert scales.encode(torch.tensor([NAN]), NVFP4).view(torch.uint8).item() == 0x7F


def test_ue4m3_is_that_of_ml_dtypes_KQ_04() -> None:
    library = pytest.importorskip("ml_dtypes")
    amax = np.random.default_rng(0).integers(0, 0x7F800000, 10**6, dtype=np.int32)
    amax = amax.view(np.float32)
    near = np.arange(0, 6 * 500, 2**-5, dtype=np.float32)
    for given in (amax, near):
        found = scales.encode(torch.from_numpy(given), NVFP4).view(torch.uint8).numpy()
        quotient = np.minimum(given / np.float32(6), np.float32(448))
        np.testing.assert_array_equal(found, quotient.astype(library.float8_e4m3fn).view(np.uint8))


def test_empty_inputs_KQ_04() -> None:
    for format in (*MX, NVFP4, FP8_BLOCK_1X128):
        for shape in ((0, 128), (3, 0), (0,)):
            parts = quantize(torch.empty(shape), format)
            assert parts.values.numel() == parts.scales.numel() == 0
            found = dequantize(parts.values, parts.scales, format)
            assert found.shape == shape


# --- float32


def test_float32_is_the_quotient() -> None:
    amax = torch.tensor([448.0, 1.0, 3.4e38, 1e-30, 0.0])
    found = scales.encode(amax, FP8_BLOCK_1X128)
    right = (amax.numpy() / np.float32(448)).astype(np.float32)
    np.testing.assert_array_equal(found.numpy(), right)
    assert scales.encode(torch.tensor([INF, NAN]), FP8_BLOCK_1X128).isnan().all()


def test_the_smallest_float32_scale_has_a_finite_reciprocal() -> None:
    tiny = torch.tensor([1e-45, 1e-40, 448 * 2.0**-126, 448 * 2.0**-125])
    expected = [2.0**-126, 2.0**-126, 2.0**-126, 2.0**-125]
    assert scales.encode(tiny, FP8_BLOCK_1X128).tolist() == expected
    assert math.isfinite(1 / 2.0**-126)


# --- what is refused


def test_rules_that_there_are_not() -> None:
    with pytest.raises(UnsupportedError, match="scale_rounding is 'up'; it must be one of rceil"):
        quantize(torch.zeros(32), MXFP4, scale_rounding="up")
    for format in (NVFP4, FP8_BLOCK_1X128):
        with pytest.raises(UnsupportedError, match=f"is 'floor', scales of {format.name} are"):
            quantize(torch.zeros(128), format, scale_rounding="floor")
