"""Stochastic rounding: the generator, which of its bits an element has, and that it is unbiased."""

import math

import pytest
import torch
from torch import Tensor

from quack_blockscaled import elements
from quack_blockscaled.formats import (
    FORMATS,
    MXFP4,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
)
from quack_blockscaled.philox import philox
from quack_blockscaled.reference import Quantized, dequantize, quantize
from quack_core.errors import ShapeError, UnsupportedError

CPU = torch.device("cpu")
BIG = 2**33 + 5


def words(counter: list[int], key: tuple[int, int]) -> list[int]:
    found = philox([torch.tensor(each) for each in counter], key, elements.multiply)
    return [int(word) for word in found]


def stochastic(x: Tensor, format: BlockFormat, seed: int = 1, **given: int) -> Quantized:
    return quantize(x, format, element_rounding="stochastic", seed=seed, **given)  # type: ignore[arg-type]


def bits(parts: Quantized) -> list[list[int]]:
    return [each.view(torch.uint8).flatten().tolist() for each in parts[:2]]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],  # digits of pi
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: list[int], key: tuple[int, int], expected: list[int]
) -> None:
    assert words(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 1, BIG, 2**63 - 1])
def test_the_bits_of_an_element(seed: int) -> None:
    found = elements.noise(27, seed, CPU).tolist()
    key = (seed % 2**32, seed // 2**32)
    right = []
    for i in range(27):
        word = words([i // 8, 0, 0, 0], key)[i % 8 // 2]
        right.append(word % 2**16 if i % 2 == 0 else word // 2**16)
    assert found == right


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("dim", [-1, 0])
def test_elements_count_in_the_order_of_the_shape(format: BlockFormat, dim: int) -> None:
    x = torch.randn(128, 256, generator=torch.manual_seed(0))
    given = elements.noise(x.numel(), 7, CPU).view(x.shape)
    parts, nearest = stochastic(x, format, 7, dim=dim), quantize(x, format, dim=dim)
    assert torch.equal(parts.scales.view(torch.uint8), nearest.scales.view(torch.uint8))
    steps = nearest.scales.float()
    for at, block in ((dim, format.cols), (-1 if dim == 0 else -2, format.rows)):
        steps = steps.repeat_interleave(block, at)
    codes = elements.encode(x * (1 / steps), format.element, given)
    codes = elements.pack(codes.transpose(dim, -1), format.element).transpose(dim, -1)
    assert torch.equal(parts.values.view(torch.uint8), codes)
    assert not torch.equal(parts.values.view(torch.uint8), nearest.values.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda each: each.name)
def test_the_seed_decides_KQ_12(format: BlockFormat) -> None:
    x = torch.randn(128, 256, generator=torch.manual_seed(0))
    found = stochastic(x, format)
    assert bits(found) == bits(stochastic(x, format))
    strided = torch.stack((x, x), -1)[..., 1]
    assert bits(found) == bits(stochastic(strided, format))
    assert bits(found) == bits(stochastic(x.mT.contiguous().mT, format))
    for seed in (0, 2, BIG):
        assert bits(found)[0] != bits(stochastic(x, format, seed))[0]
        assert bits(found)[1] == bits(stochastic(x, format, seed))[1]


PARTS = (1, 2**-1, 2**-2, 2**-3, 1 - 2**-4, 3 * 2**-5, 2**-12)
"""Of a step, by which a number exceeds the one below; no bits are lost."""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "format", [MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP4, NVFP4], ids=lambda each: each.name
)
def test_it_is_unbiased_within_4_sigma_KQ_12(format: BlockFormat, part: float) -> None:
    element, draws = format.element, 2**18
    for code in (0, 1, element.max_code - 1):  # a subnormal step, and the widest
        lower, upper = element.value(code), element.value(code + 1)
        number = lower + part * (upper - lower)
        x = torch.full((draws // format.cols, format.cols), number)
        x[:, 0] = element.max  # so that the scale is 1
        x[::2] = -x[::2]
        parts = stochastic(x, format, seed=code)
        assert parts.scales.float().eq(1).all()
        found = dequantize(parts.values, parts.scales, format)[:, 1:].abs().double()
        assert ((found == lower) | (found == upper)).all()
        sigma = math.sqrt(part * (1 - part) / found.numel()) * (upper - lower)
        assert abs(found.mean().item() - number) <= 4 * sigma


def test_bits_beyond_16_are_lost() -> None:
    x = torch.full((64, 32), 1 + 2.0**-18)
    x[:, 0] = 6.0
    found = stochastic(x, MXFP4)
    assert dequantize(found.values, found.scales, MXFP4)[:, 1:].eq(1).all()


def test_zeros_nan_and_meta_tensors() -> None:
    x = torch.zeros(3, 32)
    x[1, 5] = float("nan")
    assert bits(stochastic(x, MXFP4)) == bits(quantize(x, MXFP4))
    assert bits(stochastic(x[:0], MXFP4)) == [[], []]
    meta = stochastic(x.to("meta"), MXFP4)
    assert meta.values.shape == (3, 16) and meta.scales.shape == (3, 1)


def test_seeds_that_are_refused() -> None:
    x = torch.zeros(32)
    with pytest.raises(UnsupportedError, match="is 'stochastic', seed is None; .*; pass a seed"):
        quantize(x, MXFP4, element_rounding="stochastic")
    for seed in (-1, 2**63):
        with pytest.raises(ShapeError, match=f"seed is {seed}: it must be 0 to"):
            stochastic(x, MXFP4, seed)
