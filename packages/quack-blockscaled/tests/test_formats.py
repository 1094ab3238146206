"""Formats: values of the published ones, and what is refused."""

import dataclasses
import math
import pickle
from typing import Any

import pytest

from quack_blockscaled import formats
from quack_blockscaled.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FLOAT32,
    FORMATS,
    MXFP4,
    NVFP4,
    UE4M3,
    BlockFormat,
    ElementFormat,
)
from quack_core.errors import DTypeError, ShapeError

# name: bits, largest, smallest normal, smallest (OCP MX v1.0 5.3, OCP FP8 v1.0 table 1)
PUBLISHED = {
    E4M3: (8, 448.0, 2.0**-6, 2.0**-9),
    E5M2: (8, 57344.0, 2.0**-14, 2.0**-16),
    E3M2: (6, 28.0, 0.25, 0.0625),
    E2M3: (6, 7.5, 1.0, 0.125),
    E2M1: (4, 6.0, 1.0, 0.5),
}


@pytest.mark.parametrize("element", PUBLISHED, ids=lambda each: each.name)
def test_elements_are_those_of_the_specification(element: ElementFormat) -> None:
    bits, largest, normal, smallest = PUBLISHED[element]
    assert (element.bits, element.max, element.smallest) == (bits, largest, smallest)
    assert element.value(1 << element.mantissa_bits) == normal == 2.0**element.min_exponent
    assert math.copysign(1.0, element.value(1 << bits - 1)) == -1.0  # negative zero


def test_the_values_of_e2m1() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [E2M1.value(code) for code in range(16)] == positive + [-each for each in positive]


def test_nan_and_inf() -> None:
    assert math.isnan(E4M3.value(0x7F)) and math.isnan(E4M3.value(0xFF))
    assert E4M3.value(0x7E) == 448.0
    assert E5M2.value(0x7B) == 57344.0
    assert [E5M2.value(0x7C), E5M2.value(0xFC)] == [math.inf, -math.inf]
    assert all(math.isnan(E5M2.value(code)) for code in (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF))
    for element in (E3M2, E2M3, E2M1):
        assert all(math.isfinite(element.value(code)) for code in range(2**element.bits))
    assert [each.nan_code for each in PUBLISHED] == [0x7F, 0x7F, 0x1F, 0x1F, 0x7]


def test_a_code_with_too_many_bits() -> None:
    with pytest.raises(DTypeError, match="'e2m1': the code is 16: it must be 0 to 15"):
        E2M1.value(16)


def test_the_formats() -> None:
    found = {
        name: (each.element, each.scale, each.block, each.per_tensor)
        for name, each in FORMATS.items()
    }
    assert found == {
        "mxfp8_e4m3": (E4M3, E8M0, (1, 32), False),
        "mxfp8_e5m2": (E5M2, E8M0, (1, 32), False),
        "mxfp6_e3m2": (E3M2, E8M0, (1, 32), False),
        "mxfp6_e2m3": (E2M3, E8M0, (1, 32), False),
        "mxfp4": (E2M1, E8M0, (1, 32), False),
        "nvfp4": (E2M1, UE4M3, (1, 16), True),
        "fp8_block_1x128": (E4M3, FLOAT32, (1, 128), False),
        "fp8_block_128x128": (E4M3, FLOAT32, (128, 128), False),
    }
    assert [FORMATS[name].packed(96) for name in ("mxfp8_e5m2", "mxfp6_e3m2", "mxfp4")] == [
        96,
        72,
        48,
    ]


def test_records_are_frozen_values() -> None:
    own = BlockFormat("own", ElementFormat("e3m4", 3, 4, 3, has_nan=True), E8M0, (2, 64))
    assert own == dataclasses.replace(own) and hash(own) == hash(dataclasses.replace(own))
    assert pickle.loads(pickle.dumps(own)) == own
    assert own.element.max == 30.0  # 1.875 * 2**4; the code of all ones is NaN
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exponent_bits": 0}, "exponent_bits is 0, mantissa_bits is 3: each must be at least 1"),
        ({"mantissa_bits": 5}, "exponent_bits 4, mantissa_bits 5 and a sign are 10 bits"),
        ({"bias": 16}, "bias is 16, exponent_bits is 4: the bias must be 0 to 15"),
        ({"has_inf": True}, "has_inf is True, has_nan is False"),
        ({"mantissa_bits": 1, "dtype": "float8_e5m2"}, "dtype is float8_e5m2, an element has 6"),
    ],
)
def test_elements_that_are_refused(fields: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"exponent_bits": 4, "mantissa_bits": 3, "bias": 7} | fields
    with pytest.raises(DTypeError, match=f"element 'own': {message}"):
        ElementFormat("own", **given)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"element": "e2m1"}, DTypeError, "element is 'e2m1': it must be an ElementFormat"),
        ({"scale": E2M1}, DTypeError, "it must be one of e8m0, ue4m3, float32"),
        ({"block": (1, 0)}, ShapeError, r"block is \(1, 0\): it must be two positive sizes"),
        ({"block": (32,)}, ShapeError, r"block is \(32,\)"),
        ({"block": (1, 33)}, ShapeError, "33 columns, 2 elements e2m1 fill 1 bytes"),
        ({"element": E3M2, "block": (1, 6)}, ShapeError, "6 columns, 4 elements e3m2 fill 3"),
    ],
)
def test_formats_that_are_refused(fields: dict[str, Any], error: type, message: str) -> None:
    given: dict[str, Any] = {"element": E2M1, "scale": E8M0, "block": (1, 32)} | fields
    with pytest.raises(error, match=message):
        BlockFormat("own", **given)


def test_each_scale_and_format_is_listed() -> None:
    listed = [each for each in vars(formats).values() if isinstance(each, BlockFormat)]
    assert listed == list(FORMATS.values()) and MXFP4 in listed and NVFP4 in listed
