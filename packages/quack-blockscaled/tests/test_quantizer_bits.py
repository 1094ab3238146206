"""The arithmetic of kernels, against the reference; and which formats have a kernel."""

import math

import pytest
import torch
from torch import Tensor

from quack_blockscaled import elements, formats, scales
from quack_blockscaled.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    BlockFormat,
    ElementFormat,
)
from quack_blockscaled.quantizer import bits
from quack_blockscaled.quantizer.spec import DequantizeSpec, QuantizeSpec, is_built
from quack_core.errors import UnsupportedError
from quack_core.testing.compare import assert_bitwise

MAGNITUDES = 1 << 31
ELEMENTS = [E4M3, E5M2, E3M2, E2M3, E2M1]
NARROW = [E3M2, E2M3, E2M1]
NAME = {"ids": lambda element: element.name}


def add_down(a: Tensor, b: Tensor) -> Tensor:
    """In float64, which has the bits that matter, then rounded towards zero."""
    exact = a.abs().double() + b.double()
    found = exact.float()
    return torch.where(found.double() > exact, torch.nextafter(found, found * 0), found)


CPU = bits.Arithmetic(
    torch.where,
    lambda word: word.view(torch.float32),
    lambda x: x.view(torch.int32),
    lambda x, bound: torch.fmin(x, torch.tensor(bound)),
    add_down,
)


def around_powers() -> Tensor:
    """Magnitudes, as float32 bits: all exponents, with the mantissas where a rule may change its mind."""
    exponents = torch.arange(256, dtype=torch.int32) << 23
    tops = torch.arange(1 << 7, dtype=torch.int32) << 16
    near = torch.tensor([-2, -1, 0, 1, 2], dtype=torch.int32)
    found = (exponents[:, None, None] + tops[None, :, None] + near).flatten()
    return found[found >= 0]


def boundaries(element: ElementFormat) -> Tensor:
    """Numbers of an element and the ties between them, an ulp below and above, as float32 bits."""
    values = [element.value(code) for code in range(element.max_code + 1)]
    top = values[-1] + (values[-1] - values[-2])
    ties = [(a + b) / 2 for a, b in zip(values, [*values[1:], top], strict=True)]
    found = torch.tensor([*values, *ties, top]).view(torch.int32)
    return (found[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)).flatten().clamp(min=0)


def words(element: ElementFormat) -> Tensor:
    """All bfloat16 numbers, boundaries of both signs, numbers at random."""
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    drawn = torch.randint(MAGNITUDES, (100_000,), generator=torch.Generator().manual_seed(1))
    close = torch.randn(100_000, generator=torch.Generator().manual_seed(2)) * element.max / 2
    edges = boundaries(element)
    found = torch.cat((halves, edges, drawn.to(torch.int32), close.view(torch.int32)))
    return torch.cat((found, found ^ bits.SIGN))


@pytest.mark.parametrize("rule", scales.RULES)
@pytest.mark.parametrize("element", ELEMENTS, **NAME)
def test_codes_are_those_of_the_reference(element: ElementFormat, rule: str) -> None:
    drawn = torch.randint(MAGNITUDES, (100_000,), generator=torch.Generator().manual_seed(1))
    magnitudes = torch.cat((around_powers(), drawn.to(torch.int32)))
    format = BlockFormat("any", element, E8M0, (1, 32))
    expected = scales.encode(magnitudes.view(torch.float32), format, rule).view(torch.uint8)
    found = bits.e8m0(magnitudes, element, rule, CPU)
    assert torch.equal(found, expected.to(torch.int32))


def test_inverses_are_those_of_the_reference() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    steps = scales.decode(codes.to(torch.uint8).view(torch.float8_e8m0fnu), formats.MXFP8_E4M3)
    found = bits.inverse(codes, CPU).view(torch.float32)
    expected = torch.ones(256) / steps
    assert expected[:-1].isfinite().all()
    assert torch.equal(found[:-1], expected[:-1]) and found[-1].isnan()


def test_steps_are_those_of_the_reference() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    steps = scales.decode(codes.to(torch.uint8).view(torch.float8_e8m0fnu), formats.MXFP8_E4M3)
    found = bits.step(codes, CPU).view(torch.float32)
    assert torch.equal(found[:-1], steps[:-1]) and found[-1].isnan()


@pytest.mark.parametrize("element", NARROW, **NAME)
def test_codes_of_the_carrier_are_the_same_numbers(element: ElementFormat) -> None:
    codes = torch.arange(1 << element.bits, dtype=torch.int32)
    wide = bits.widened(codes, element) & 0xFF
    numbers = elements.decode(wide.to(torch.uint8), bits.carrier(element)) / bits.shrink(element)
    assert_bitwise(numbers, elements.decode(codes.to(torch.uint8), element))
    assert torch.equal(bits.narrowed(wide, element), codes)


@pytest.mark.parametrize("element", NARROW, **NAME)
def test_bytes_of_codes_to_be_widened_do_not_meet(element: ElementFormat) -> None:
    codes = torch.randint(
        1 << element.bits, (1000, 4), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    each = bits.widened(codes, element) & 0xFF
    assert torch.equal(bits.widened(word_of(codes), element), word_of(each))


def shrunk(numbers: Tensor, element: ElementFormat) -> Tensor:
    """As the kernel has them, which multiplies by the scale's inverse and this at once."""
    return (numbers.view(torch.float32) * bits.shrink(element)).view(torch.int32)


def converted(word: Tensor, element: ElementFormat) -> Tensor:
    """What the conversion to the carrier gives, one code in the low byte of a word; as codes."""
    found = elements.encode(word.view(torch.float32), bits.carrier(element)).to(torch.int32)
    return found if element.bits == 8 else bits.narrowed(found, element)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("element", NARROW, **NAME)
def test_narrow_elements_are_those_of_the_reference(element: ElementFormat, clipped: bool) -> None:
    given = words(element)
    if not clipped:  # what the scale leaves: a NaN, or no more than the largest
        numbers = given.view(torch.float32)
        given = given[numbers.isnan() | (numbers.abs() <= element.max)]
    word = shrunk(given, element)
    # The product with a scale's inverse gives a NaN without a sign.
    word = torch.where(given & bits.MAGNITUDE > bits.INF, bits.MAGNITUDE, word)
    size = bits.clipped(word, element, CPU) if clipped else word
    if element == E2M1:
        size = bits.nearest(size, element, CPU)
    word = bits.signed(size, word)
    expected = elements.encode(given.view(torch.float32), element)
    assert torch.equal(converted(word, element), expected.to(torch.int32))


@pytest.mark.parametrize("element", ELEMENTS, **NAME)
def test_stochastic_elements_are_those_of_the_reference(element: ElementFormat) -> None:
    given = words(element)
    given = given[given.view(torch.float32).isfinite()]
    if element.bits == 8:  # the conversion saturates: one step above the largest number is enough
        given = given[given.view(torch.float32).abs() < 2 * element.max]
    drawn = torch.randint(1 << 16, given.shape, generator=torch.Generator().manual_seed(3))
    for noise in (drawn.to(torch.int32), *(torch.full_like(given, n) for n in (0, 1, 65535))):
        word = shrunk(given, element)
        size = bits.clipped(word, element, CPU) if element.bits < 8 else word
        word = bits.signed(bits.stochastic(size, noise, element, CPU), word)
        expected = elements.encode(given.view(torch.float32), element, noise)
        assert torch.equal(converted(word, element), expected.to(torch.int32))


@pytest.mark.parametrize("element", ELEMENTS, **NAME)
def test_a_nan_without_noise_stays_one(element: ElementFormat) -> None:
    word = torch.tensor([bits.MAGNITUDE], dtype=torch.int32)
    found = bits.stochastic(word, word * 0, element, CPU)
    assert int(converted(found, element)) == element.nan_code


@pytest.mark.parametrize("element", [E2M1, E2M3], **NAME)
def test_words_are_packed_as_the_reference_packs(element: ElementFormat) -> None:
    codes = torch.randint(1 << element.bits, (100, 16), generator=torch.Generator().manual_seed(1))
    expected = elements.pack(codes.to(torch.uint8), element).view(torch.int32)
    if element.bits == 4:
        even, odd = ([word_of(codes[:, at + i :: 2][:, :4]) for at in (0, 8)] for i in (0, 1))
        found = [bits.pairs(a, b) for a, b in zip(even, odd, strict=True)]
    else:
        found = bits.joined([bits.quads(word_of(codes[:, i : i + 4])) for i in range(0, 16, 4)])
    assert torch.equal(torch.stack(found, -1), expected)


def test_words_are_unpacked_as_the_reference_packs() -> None:
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(16, (100, 8), generator=draw)
    (word,) = elements.pack(codes.to(torch.uint8), E2M1).view(torch.int32).unbind(-1)
    for found, i in zip(bits.unpaired(word), (0, 1), strict=True):
        assert torch.equal(found, word_of(codes[:, i::2]))
    codes = torch.randint(64, (100, 4), generator=draw)
    packed = torch.nn.functional.pad(elements.pack(codes.to(torch.uint8), E2M3), (0, 1), value=0xA5)
    assert torch.equal(bits.unquads(packed.view(torch.int32).squeeze(-1)), word_of(codes))


@pytest.mark.parametrize("element", NARROW, **NAME)
def test_bytes_of_a_word_do_not_meet(element: ElementFormat) -> None:
    codes = torch.randint(256, (1000, 4), generator=torch.Generator().manual_seed(1))
    each = bits.narrowed(codes.to(torch.int32), element)
    assert torch.equal(bits.narrowed(word_of(codes), element), word_of(each))


def word_of(codes: Tensor) -> Tensor:
    """Four codes in the bytes of a word."""
    return codes.to(torch.uint8).contiguous().view(torch.int32).squeeze(-1)


def test_a_scale_leaves_no_more_than_the_largest() -> None:
    """The formats that are not clipped: a NaN apart, no element exceeds the largest number."""
    for rule in ("rceil", "ceil"):
        for element in ELEMENTS:
            amax = around_powers()
            amax = amax[amax < bits.INF]
            inverse = bits.inverse(bits.e8m0(amax, element, rule, CPU), CPU)
            largest = amax.view(torch.float32) * inverse.view(torch.float32)
            assert float(largest.max()) <= element.max and not math.isnan(float(largest.sum()))


def test_which_formats_have_a_kernel() -> None:
    assert all(is_built(format) for format in FORMATS.values())
    odd = BlockFormat("odd", E4M3, E8M0, (1, 48))
    wide = BlockFormat("wide", E4M3, E8M0, (1, 1024))
    tall = BlockFormat("tall", E4M3, E8M0, (64, 128))
    eights = BlockFormat("eights", E2M3, E8M0, (1, 8))
    scaled = BlockFormat("scaled", E4M3, E8M0, (1, 32), per_tensor=True)
    for format in (odd, wide, tall, eights, scaled):
        with pytest.raises(UnsupportedError, match=rf"no kernel for {format.name}.*call \.cpu"):
            QuantizeSpec("bfloat16", format)
        message = rf"dequantize: .*no kernel for {format.name}.*call \.cpu"
        with pytest.raises(UnsupportedError, match=message):
            DequantizeSpec("bfloat16", format)


def test_names_tell_kernels_apart() -> None:
    names = {
        QuantizeSpec(x, format, rule, stochastic).name
        for x in ("bfloat16", "float32")
        for format in (formats.MXFP8_E4M3, formats.FP8_BLOCK_128X128)
        for rule in ("rceil", "floor")
        for stochastic in (False, True)
    }
    assert len(names) == 16
