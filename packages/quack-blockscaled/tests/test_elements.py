"""Conversion of elements: against two independent libraries and against their own tables of values."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quack_blockscaled.elements import decode, encode, pack, unpack
from quack_blockscaled.formats import E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat

ELEMENTS = [E4M3, E5M2, E3M2, E2M3, E2M1]
OWN = ElementFormat("e3m4", 3, 4, 3, has_nan=True)
ORACLE = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
}
each_element = pytest.mark.parametrize("element", ELEMENTS, ids=lambda each: each.name)
with_own = pytest.mark.parametrize("element", [*ELEMENTS, OWN], ids=lambda each: each.name)


def floats(bits: Any) -> Tensor:
    """float32 of these bits."""
    return torch.from_numpy(np.asarray(bits, np.uint32).view(np.int32)).view(torch.float32)


def patterns(dtype: torch.dtype) -> Tensor:
    """All numbers of a dtype of 16 bits, in float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()


def boundaries(element: ElementFormat) -> Tensor:
    """Values and ties of an element, and their neighbours in float32, of both signs."""
    values = [element.value(code) for code in range(element.max_code + 1)]
    values.append(2 * values[-1] - values[-2])  # where the next one would be
    ties = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    bits = np.array(values + ties, np.float32).view(np.uint32)
    near = np.concatenate([bits[bits > 0] - 1, bits, bits + 1])
    return floats(np.concatenate([near, near | np.uint32(2**31)]))


def random() -> Tensor:
    return floats(np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32))


def samples(element: ElementFormat) -> Iterator[Tensor]:
    """All patterns of bf16 and fp16; of float32 those by boundaries, and a million."""
    yield patterns(torch.bfloat16)
    yield patterns(torch.float16)
    yield boundaries(element)
    yield random()


def from_table(x: Tensor, element: ElementFormat) -> Tensor:
    """Codes by counting the ties below each magnitude; exact in float64."""
    values = np.array([element.value(code) for code in range(element.max_code + 1)])
    ties = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x.double().numpy())
    below, reached = (np.searchsorted(ties, magnitude, side=side) for side in ("left", "right"))
    code = np.where(below % 2, reached, below)  # on a tie both differ: the even one
    code = code | np.signbit(x.numpy()) * 2 ** (element.bits - 1)
    return torch.from_numpy(np.where(np.isnan(magnitude), element.nan_code, code).astype(np.uint8))


def assert_codes(found: Tensor, x: Tensor, expected: Tensor) -> None:
    wrong = torch.nonzero(found != expected).flatten()[:5]
    assert wrong.numel() == 0, [(float(x[i]).hex(), int(found[i]), int(expected[i])) for i in wrong]


# --- to the nearest


@with_own
def test_the_nearest_ties_to_even(element: ElementFormat) -> None:
    for x in samples(element):
        assert_codes(encode(x, element), x, from_table(x, element))


def oracle(x: Tensor, element: ElementFormat, library: Any) -> Tensor:
    """ml_dtypes' codes; what is larger than the largest is clamped first, for it does not saturate."""
    clamped = np.clip(x.numpy(), -element.max, element.max)
    with np.errstate(invalid="ignore"):
        codes = clamped.astype(getattr(library, ORACLE[element.name])).view(np.uint8)
    codes = codes & np.uint8(2**element.bits - 1)
    return torch.from_numpy(np.where(np.isnan(clamped), np.uint8(element.nan_code), codes))


@each_element
def test_as_ml_dtypes_converts(element: ElementFormat) -> None:
    library = pytest.importorskip("ml_dtypes")
    for x in samples(element):
        assert_codes(encode(x, element), x, oracle(x, element, library))


@each_element
def test_as_gfloat_converts(element: ElementFormat) -> None:
    gfloat = pytest.importorskip("gfloat")
    kind = getattr(pytest.importorskip("gfloat.formats"), f"format_info_ocp_{element.name}")
    for x in samples(element):
        known = x[~x.isnan()]
        rounded = gfloat.round_ndarray(kind, known.double().numpy(), sat=True)
        expected = torch.from_numpy(gfloat.encode_ndarray(kind, rounded).astype(np.uint8))
        assert_codes(encode(known, element), known, expected)


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda each: each.name)
def test_as_torch_converts(element: ElementFormat) -> None:
    for x in samples(element):
        known = x[~x.isnan()].clamp(-element.max, element.max)
        expected = known.to(getattr(torch, element.dtype)).view(torch.uint8)
        assert_codes(encode(known, element), known, expected)


def test_ties_of_e2m1_KQ_05() -> None:
    # value: what it becomes; half-way cases first
    known = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 5.01: 6, 6: 6, 7: 6, 1e9: 6}
    x = torch.tensor(list(known), dtype=torch.float32)
    right = torch.tensor(list(known.values()), dtype=torch.float32)
    assert torch.equal(decode(encode(x, E2M1), E2M1), right)
    assert torch.equal(decode(encode(-x, E2M1), E2M1), -right)
    assert encode(-x, E2M1)[0] == 8  # -0.25 becomes -0


@with_own
def test_what_lies_beyond(element: ElementFormat) -> None:
    nan = torch.tensor([float("nan"), -float("nan")])
    assert encode(nan, element).tolist() == [element.nan_code] * 2
    inf, sign = torch.tensor([float("inf"), 3.4e38]), 2 ** (element.bits - 1)
    assert encode(inf, element).tolist() == [element.max_code] * 2
    assert encode(-inf, element).tolist() == [element.max_code + sign] * 2
    tiny = torch.tensor([0.0, 1e-45, 1.1754944e-38])
    assert encode(tiny, element).tolist() == [0, 0, 0]
    assert encode(-tiny, element).tolist() == [sign] * 3


# --- and back


@with_own
def test_codes_survive_the_way_back(element: ElementFormat) -> None:
    codes = torch.arange(2**element.bits, dtype=torch.int32).to(torch.uint8)
    values = decode(codes, element)
    finite = values.isfinite()
    assert torch.equal(encode(values, element)[finite], codes[finite])
    assert finite.sum() == 2 * (element.max_code + 1)


@each_element
def test_values_are_those_of_ml_dtypes(element: ElementFormat) -> None:
    library = pytest.importorskip("ml_dtypes")
    codes = torch.arange(2**element.bits, dtype=torch.int32).to(torch.uint8)
    kind = getattr(library, ORACLE[element.name])
    expected = codes.numpy().view(kind).astype(np.float32)
    np.testing.assert_array_equal(decode(codes, element).numpy(), expected)


# --- stochastically


def carried(x: float, noise: int, element: ElementFormat) -> int:
    """The code by the definition, in rational numbers."""
    magnitude = min(abs(Fraction(x)), Fraction(element.max))
    step, lower = Fraction(element.smallest), 0
    for code in range(element.max_code + 1):
        if Fraction(element.value(code)) > magnitude:
            break
        lower = code
    if lower < element.max_code:
        step = Fraction(element.value(lower + 1)) - Fraction(element.value(lower))
    part = (magnitude - Fraction(element.value(lower))) / step
    up = int(part * 2**16) + noise >= 2**16
    return lower + up + (2 ** (element.bits - 1) if x < 0 else 0)


@given(
    element=st.sampled_from([*ELEMENTS, OWN]),
    x=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool),
        st.floats(-8, 8, width=32).filter(bool),
        st.floats(-(2.0**-8), 2.0**-8, width=32).filter(bool),
    ),
    noise=st.one_of(st.integers(0, 2**16 - 1), st.sampled_from([0, 1, 2**15, 2**16 - 1])),
)
@settings(max_examples=500)
def test_a_carry_decides(element: ElementFormat, x: float, noise: int) -> None:
    found = encode(torch.tensor([x]), element, torch.tensor([noise], dtype=torch.int32))
    assert found.item() == carried(x, noise, element)


def test_the_carry_is_exact() -> None:
    # Parts of a step, which is 1/2: a half, a half, 2**-16, 2**-16, and 2**-17, which is lost.
    x = torch.tensor([1.25, -1.25, 1 + 2.0**-17, 2.0**-17, 2.0**-18])
    noise = torch.tensor([2**15, 2**15, 2**16 - 1, 2**16 - 1, 2**16 - 1], dtype=torch.int32)
    assert decode(encode(x, E2M1, noise), E2M1).tolist() == [1.5, -1.5, 1.5, 0.5, 0.0]
    assert decode(encode(x, E2M1, noise - 1), E2M1).tolist() == [1.0, -1.0, 1.0, 0.0, 0.0]


@with_own
def test_noise_changes_neither_values_of_the_element_nor_what_lies_beyond(
    element: ElementFormat,
) -> None:
    values = decode(torch.arange(2**element.bits, dtype=torch.int32).to(torch.uint8), element)
    nan, large = float("nan"), 2 * element.max
    x = torch.cat([values, torch.tensor([nan, large, -large, float("inf"), -float("inf"), -0.0])])
    for noise in (0, 1, 2**16 - 1):
        found = encode(x, element, torch.full(x.shape, noise, dtype=torch.int32))
        assert torch.equal(found, encode(x, element))


# --- packing


def test_the_first_element_is_in_the_lowest_bits() -> None:
    fours = torch.tensor([0x1, 0x2, 0xF, 0x8], dtype=torch.uint8)
    assert pack(fours, E2M1).tolist() == [0x21, 0x8F]
    sixes = torch.tensor([0b000001, 0b100010, 0b111111, 0b010000], dtype=torch.uint8)
    assert pack(sixes, E3M2).tolist() == [0b10_000001, 0b1111_1000, 0b010000_11]
    assert pack(fours, E4M3) is fours


@with_own
def test_unpack_is_the_inverse(element: ElementFormat) -> None:
    drawn = torch.randint(0, 2**element.bits, (3, 5, 24), generator=torch.manual_seed(0))
    codes = drawn.to(torch.uint8)
    packed = pack(codes, element)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, 24 // element.group[0] * element.group[1])
    assert torch.equal(unpack(packed, element), codes)
    assert pack(codes[:0], element).shape[0] == 0
