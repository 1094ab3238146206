"""Whole blocks: against another library, the error they may have, and what is in no block at all."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quack_blockscaled import elements, scales
from quack_blockscaled.formats import (
    E2M1,
    E4M3,
    E8M0,
    FLOAT32,
    FORMATS,
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    NVFP4,
    UE4M3,
    BlockFormat,
)
from quack_blockscaled.reference import Quantized, dequantize, quantize
from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError

NAN, INF = float("nan"), float("inf")
MX = [each for each in FORMATS.values() if each.scale == E8M0]
ROWS = [each for each in FORMATS.values() if each.rows == 1]
OWN = [
    BlockFormat("own_float32", E4M3, FLOAT32, (1, 32)),
    BlockFormat("own_float32_tensor", E4M3, FLOAT32, (1, 8), per_tensor=True),
    BlockFormat("own_e8m0_tensor", E2M1, E8M0, (1, 16), per_tensor=True),
    BlockFormat("own_ue4m3", E2M1, UE4M3, (2, 8)),
]
ORACLE = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
}
every = pytest.mark.parametrize("format", FORMATS.values(), ids=lambda each: each.name)
with_rows_of_blocks = pytest.mark.parametrize("format", ROWS, ids=lambda each: each.name)


def back(parts: Quantized, format: BlockFormat, **given: Any) -> Tensor:
    scale = parts.per_tensor_scale
    return dequantize(parts.values, parts.scales, format, per_tensor_scale=scale, **given)


def codes(parts: Quantized, format: BlockFormat) -> Tensor:
    """One code in each byte; the last dimension is the quantised one."""
    return elements.unpack(parts.values.view(torch.uint8), format.element)


def same(a: Quantized, b: Quantized) -> bool:
    """The same bits."""
    return all(
        x.shape == y.shape and torch.equal(raw(x), raw(y))
        for x, y in zip(a[:2], b[:2], strict=True)
    )


def raw(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, rows of them times powers of two from 2**-140 to 2**110."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-140, 111, (*shape[:-1], 1), generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator).double(), powers).float()


# --- against another library


def e8m0_by_search(amax: np.ndarray, format: BlockFormat, rule: str) -> np.ndarray:
    """Codes by counting, among what each scale reaches, what lies below."""
    largest = format.element.max
    reach = 2.0 ** np.arange(-127, 128) * 2.0 ** math.floor(math.log2(largest))
    if rule == "rceil":
        found = np.searchsorted(2.0 ** np.arange(-127, 128) * largest, amax, side="left")
    elif rule == "ceil":
        found = np.searchsorted(reach, amax, side="left")
    elif rule == "even":
        rounded = reach * (1 - 2.0 ** -(format.element.mantissa_bits + 2))
        found = np.searchsorted(rounded, amax, side="right") - 1
    else:
        found = np.searchsorted(reach, amax, side="right") - 1
    return np.clip(found, 0, 254)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", scales.RULES)
@pytest.mark.parametrize("format", MX, ids=lambda each: each.name)
def test_blocks_are_as_ml_dtypes_converts(
    format: BlockFormat, rule: str, dtype: torch.dtype
) -> None:
    library = pytest.importorskip("ml_dtypes")
    x = spread(500, 64).to(dtype)
    x = torch.where(x.isfinite(), x, 0)
    parts = quantize(x, format, scale_rounding=rule)
    blocks = x.double().numpy().reshape(500, 2, 32)
    scale = e8m0_by_search(np.abs(blocks).max(-1), format, rule)
    np.testing.assert_array_equal(parts.scales.view(torch.uint8).numpy(), scale)
    largest = format.element.max
    ratio = np.clip(blocks / 2.0 ** (scale[..., None] - 127.0), -largest, largest)
    kind = getattr(library, ORACLE[format.element.name])
    right = ratio.astype(np.float32).astype(kind)
    mask = 2**format.element.bits - 1
    found = codes(parts, format).numpy()
    np.testing.assert_array_equal(found, right.view(np.uint8).reshape(500, 64) & mask)
    number = (right.astype(np.float64) * 2.0 ** (scale[..., None] - 127.0)).reshape(500, 64)
    np.testing.assert_array_equal(back(parts, format).numpy(), number.astype(np.float32))


@pytest.mark.parametrize("format", [NVFP4, FP8_BLOCK_1X128], ids=lambda each: each.name)
@pytest.mark.parametrize("per_tensor", [1.0, 0.00123, 77.7])
def test_blocks_with_other_scales_are_as_ml_dtypes_converts(
    format: BlockFormat, per_tensor: float
) -> None:
    library = pytest.importorskip("ml_dtypes")
    one, largest = np.float32(1), np.float32(format.element.max)
    whole = np.float32(per_tensor if format.per_tensor else 1)
    x = torch.randn(500, 256, generator=torch.manual_seed(0)).numpy() * 30
    blocks = x.reshape(500, -1, format.cols)
    given = per_tensor if format.per_tensor else None
    parts = quantize(torch.from_numpy(x), format, per_tensor_scale=given)
    scale = np.abs(blocks).max(-1) / whole / largest
    if format.scale == UE4M3:
        scale = np.minimum(scale, np.float32(448)).astype(library.float8_e4m3fn)
    found = parts.scales.float().numpy()
    scale = scale.astype(np.float32)
    np.testing.assert_array_equal(found, scale)
    step = (scale * whole)[..., None]
    inverse = np.divide(one, step, out=np.zeros_like(step), where=step > 0)
    right = np.clip(blocks * inverse, -largest, largest)
    right = right.astype(getattr(library, ORACLE[format.element.name]))
    found = codes(parts, format).numpy()
    mask = 2**format.element.bits - 1
    np.testing.assert_array_equal(found, right.view(np.uint8).reshape(x.shape) & mask)
    number = (right.astype(np.float32) * step).reshape(x.shape)
    np.testing.assert_array_equal(back(parts, format).numpy(), number)


# --- the error


def allowed(x: Tensor, parts: Quantized, format: BlockFormat) -> Tensor:
    """Half a step of the element that is nearest, or what is clipped; float64."""
    element = format.element
    step = scales.decode(parts.scales, format)
    if parts.per_tensor_scale is not None:
        step = step * parts.per_tensor_scale
    step = step.double().repeat_interleave(format.cols, -1)
    step = step.repeat_interleave(format.rows, -2)
    magnitude = x.double().abs()
    ratio = torch.where(step > 0, magnitude / step, 0)
    power = torch.frexp(ratio).exponent - 1
    half = torch.ldexp(step, power.clamp(min=element.min_exponent) - element.mantissa_bits) / 2
    clipped = magnitude - element.max * step
    bound = torch.maximum(half, clipped)
    # The reciprocal, two products and step are rounded where scales are no powers of two.
    return (
        bound if format.scale == E8M0 and not format.per_tensor else bound + 4 * 2.0**-24 * x.abs()
    )


numbers = st.one_of(
    st.floats(-(2.0**120), 2.0**120, width=32),
    st.floats(-500, 500, width=32),
    st.floats(-1, 1, width=16),
)


@given(
    format=st.sampled_from([*MX, NVFP4, *OWN]),
    rule=st.sampled_from(("rceil", "ceil", "floor", "even")),
    numbers=st.lists(numbers, min_size=64, max_size=64),
)
@settings(max_examples=150, deadline=None)
def test_the_error_is_at_most_half_a_step_KQ_02(
    format: BlockFormat, rule: str, numbers: list[float]
) -> None:
    x = torch.tensor(numbers).view(2, 32)
    rule = rule if format.scale == E8M0 else "rceil"
    parts = quantize(x, format, scale_rounding=rule)
    error = (back(parts, format).double() - x.double()).abs()
    assert (error <= allowed(x, parts, format)).all()
    if rule in ("rceil", "ceil") and format.scale == E8M0 and not format.per_tensor:
        step = scales.decode(parts.scales, format).double()
        assert (x.double().abs().amax() <= format.element.max * step.amax()).all()


# --- one block does not know another


@given(
    format=st.sampled_from([*ROWS, *OWN[:3]]),
    seed=st.integers(0, 2**32 - 1),
    others=st.sampled_from([NAN, INF, -INF, 0.0, 1e30]),
    row=st.integers(0, 4),
)
@settings(max_examples=50, deadline=None)
def test_other_rows_do_not_change_a_block_KQ_06(
    format: BlockFormat, seed: int, others: float, row: int
) -> None:
    x = torch.full((5, 128), others)
    x[row] = spread(1, 128, seed=seed)
    parts, alone = quantize(x, format), quantize(x[row : row + 1], format)
    whole = parts.per_tensor_scale
    assert same(Quantized(parts.values[row : row + 1], parts.scales[row : row + 1], whole), alone)


@every
def test_zero_blocks_KQ_01(format: BlockFormat) -> None:
    x = spread(3 * format.rows, 3 * format.cols).clamp(-1e30, 1e30)
    zero = (slice(format.rows, 2 * format.rows), slice(format.cols, 2 * format.cols))
    x[zero] = 0
    x[zero][..., ::2] = -0.0
    parts = quantize(x, format)
    found = back(parts, format)
    assert parts.scales.view(torch.uint8).view(3, 3, -1)[1, 1].eq(0).all()
    assert scales.decode(parts.scales, format)[1, 1] == format.scale.min
    assert found[zero].eq(0).all()
    assert torch.equal(found[zero].signbit(), x[zero].signbit())
    assert found.isfinite().all()
    x[zero] = 1.0
    filled = quantize(x, format)
    same_ = parts.scales.view(torch.uint8) == filled.scales.view(torch.uint8)
    same_ = same_.view(3, 3, -1).all(-1)
    assert same_.tolist() == [[True] * 3, [True, False, True], [True] * 3]


@every
def test_a_row_of_zeros_and_a_tensor_of_zeros_KQ_01(format: BlockFormat) -> None:
    for number in (0.0, -0.0):
        x = torch.full((format.rows, 2 * format.cols), number)
        parts = quantize(x, format)
        found = back(parts, format)
        assert found.eq(0).all() and torch.equal(found.signbit(), x.signbit())


def test_what_rounds_to_zero_keeps_its_sign() -> None:
    x = torch.full((32,), -1e-12)
    x[0] = 1.0
    for format in (*MX, NVFP4):
        parts = quantize(x, format)
        assert codes(parts, format)[1:].eq(1 << format.element.bits - 1).all()


def test_a_block_too_small_for_its_scale_is_zeros_KQ_04() -> None:
    x = torch.full((16,), -6 * 2.0**-10)  # amax / 6 lies half-way between 0 and the smallest scale
    parts = quantize(x, NVFP4)
    assert parts.scales.float().item() == 0 and parts.values.tolist() == [0x88] * 8
    parts = quantize(x * (1 + 2.0**-20), NVFP4)
    assert parts.scales.float().item() == 2.0**-9
    assert back(parts, NVFP4).eq(-3 * 2.0**-9).all()


LOST = {"NaN": [NAN], "Inf": [INF], "-Inf": [-INF], "both": [NAN, -INF], "all -Inf": []}


@pytest.mark.parametrize("name", LOST)
@every
def test_nan_and_inf_are_seen_in_their_block_only_KQ_06(format: BlockFormat, name: str) -> None:
    x = spread(2 * format.rows, 3 * format.cols).clamp(-1e30, 1e30)
    clean = quantize(x, format)
    block = (slice(format.rows), slice(format.cols, 2 * format.cols))
    bad = LOST[name]
    if name == "all -Inf":
        x[block] = -INF
    else:
        x[0, format.cols + 3 : format.cols + 3 + len(bad)] = torch.tensor(bad)
    parts = quantize(x, format)
    lost = torch.zeros_like(x, dtype=torch.bool)
    lost[block] = True
    found = back(parts, format)
    assert torch.equal(found.isnan(), lost)
    assert torch.equal(found[~lost], back(clean, format)[~lost])
    assert scales.decode(parts.scales, format)[0, 1].isnan()
    assert codes(parts, format)[block].eq(format.element.nan_code).all()
    assert torch.equal(codes(parts, format)[~lost], codes(clean, format)[~lost])


# --- shapes


@pytest.mark.parametrize("k", [16, 48, 40])
@every
def test_sizes_that_are_no_multiple_KQ_10(format: BlockFormat, k: int) -> None:
    x = torch.zeros(format.rows, k)
    if k % format.cols == 0:
        assert quantize(x, format).scales.shape == (1, k // format.cols)
        return
    above = -(-k // format.cols) * format.cols
    message = (
        rf"quantize: x.shape\[-1\] is {k}: with {format.name} it must be a multiple of "
        rf"{format.cols}; pad it with zeros to {above}"
    )
    with pytest.raises(ShapeError, match=message):
        quantize(x, format)


@every
def test_33_rows_along_dim_0_KQ_10(format: BlockFormat) -> None:
    with pytest.raises(ShapeError, match=r"x.shape\[-2\] is 33: .* a multiple of"):
        quantize(torch.zeros(33, 128), format, dim=0)


def test_rows_of_a_block_KQ_10() -> None:
    with pytest.raises(ShapeError, match=r"x.shape\[-2\] is 100: .* a multiple of 128; .* to 128"):
        quantize(torch.zeros(100, 256), FP8_BLOCK_128X128)
    with pytest.raises(ShapeError, match="blocks of 128x128 lie along the last two dimensions"):
        quantize(torch.zeros(128, 128, 128), FP8_BLOCK_128X128, dim=0)


@pytest.mark.parametrize(
    ("dim", "shape"),
    [
        (-1, (2, 128, 256)),
        (2, (2, 128, 256)),
        (-2, (2, 256, 128)),
        (1, (2, 256, 128)),
        (0, (256, 3, 4)),
    ],
)
@every
def test_along_any_dim(format: BlockFormat, dim: int, shape: tuple[int, ...]) -> None:
    if format.rows > 1 and dim == 0:
        return  # refused, as above
    x = spread(*shape)
    parts = quantize(x, format, dim=dim)
    turned = quantize(x.transpose(dim, -1), format)
    expected = Quantized(
        turned.values.transpose(dim, -1), turned.scales.transpose(dim, -1), turned.per_tensor_scale
    )
    assert same(parts, expected)
    for part in (parts.values, parts.scales):
        assert part.transpose(dim, -1).is_contiguous()
    assert parts.values.shape[dim] == format.packed(x.shape[dim])
    assert torch.equal(
        back(parts, format, dim=dim), back(turned, format).transpose(dim, -1).contiguous()
    )


def test_a_block_of_rows_is_one_block() -> None:
    format = BlockFormat("tile", E4M3, E8M0, (4, 32))
    flat = BlockFormat("flat", E4M3, E8M0, (1, 128))
    x = spread(3, 8, 96)
    tiles = x.view(3, 2, 4, 3, 32).transpose(2, 3).reshape(3, 2, 3, 128)
    parts, right = quantize(x, format), quantize(tiles, flat)
    assert parts.scales.shape == (3, 2, 3)
    assert torch.equal(parts.scales.view(torch.uint8), right.scales.view(torch.uint8)[..., 0])
    assert torch.equal(
        back(parts, format), back(right, flat).view(3, 2, 3, 4, 32).transpose(2, 3).reshape(x.shape)
    )


def test_strides_and_offsets_do_not_matter() -> None:
    wide = spread(6, 300)
    view = wide[1::2, 17:273]
    for format in ROWS:
        assert same(quantize(view, format), quantize(view.clone(), format))
        assert same(
            quantize(wide[:3, :256].mT, format, dim=0),
            quantize(wide[:3, :256].mT.clone(), format, dim=0),
        )


@every
def test_halves_are_as_their_floats(format: BlockFormat) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(128, 256, generator=torch.manual_seed(0)).to(dtype)
        assert same(quantize(x, format), quantize(x.float(), format))
        parts = quantize(x, format)
        assert torch.equal(back(parts, format, dtype=dtype), back(parts, format).to(dtype))


@every
def test_dtypes_and_meta_tensors(format: BlockFormat) -> None:
    x = spread(128, 256)
    given, meta = quantize(x, format), quantize(x.to("meta"), format)
    for real, fake in zip(given, meta, strict=True):
        if real is None:
            assert fake is None
            continue
        assert fake.is_meta and (fake.shape, fake.dtype) == (real.shape, real.dtype)
    assert given.values.dtype == getattr(torch, format.element.dtype)
    assert given.scales.dtype == getattr(torch, format.scale.dtype)
    assert back(meta, format).shape == x.shape
    assert not quantize(x.requires_grad_(), format).scales.requires_grad


# --- the scale of a tensor


def test_absent_is_exactly_1_KQ_11() -> None:
    x = torch.randn(4, 64, generator=torch.manual_seed(0))
    parts = quantize(x, NVFP4)
    whole = parts.per_tensor_scale
    assert whole is not None and whole.dtype == torch.float32 and whole.shape == ()
    assert whole.item() == 1.0
    assert same(parts, quantize(x, NVFP4, per_tensor_scale=1.0))
    assert torch.equal(back(parts, NVFP4), dequantize(parts.values, parts.scales, NVFP4))
    assert quantize(x, MXFP4).per_tensor_scale is None


@pytest.mark.parametrize("number", [2.0**-20, 0.0123, 1.0, 300.0, 1e30])
def test_given_it_is_stored_as_it_is_KQ_11(number: float) -> None:
    x = torch.randn(4, 64, generator=torch.manual_seed(0)) * number
    as_tensor = torch.tensor(number)
    parts = quantize(x, NVFP4, per_tensor_scale=as_tensor)
    assert torch.equal(parts.per_tensor_scale, as_tensor)
    assert same(parts, quantize(x, NVFP4, per_tensor_scale=number))
    assert same(parts, quantize(x, NVFP4, per_tensor_scale=torch.full((1,), number)))
    error = (back(parts, NVFP4).double() - x.double()).abs()
    assert (error <= allowed(x, parts, NVFP4)).all()
    assert parts.scales.float().max() < 1  # amax / 6 of normal numbers: relative to the tensor's


@pytest.mark.parametrize("format", [NVFP4, *OWN[1:3]], ids=lambda each: each.name)
def test_zero_and_nan_of_it_KQ_11(format: BlockFormat) -> None:
    x = torch.zeros(2, 32)
    assert back(quantize(x, format, per_tensor_scale=0.0), format).eq(0).all()
    x = torch.randn(2, 32, generator=torch.manual_seed(0))
    assert back(quantize(x, format, per_tensor_scale=torch.tensor(NAN)), format).isnan().all()


def test_it_is_far_too_small_or_too_large_KQ_11() -> None:
    x = torch.full((16,), -(2.0**40))
    for number in (0.0, 2.0**-120, 2.0**-100):
        parts = quantize(x, NVFP4, per_tensor_scale=number)
        assert parts.scales.float().item() == 448.0  # it stops there; it is no NaN
        assert back(parts, NVFP4).eq(-448 * 6 * number).all()
    parts = quantize(x, NVFP4, per_tensor_scale=2.0**60)
    assert parts.scales.float().item() == 0 and parts.values.tolist() == [0x88] * 8


def test_what_is_no_scale_of_a_tensor_KQ_11() -> None:
    x = torch.zeros(2, 32)
    for number in (-1.0, INF, NAN):
        with pytest.raises(UnsupportedError, match=f"per_tensor_scale is {number}; it must be a"):
            quantize(x, NVFP4, per_tensor_scale=number)
    with pytest.raises(DTypeError, match="per_tensor_scale is bfloat16: it must be float32"):
        quantize(x, NVFP4, per_tensor_scale=torch.ones((), dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match=r"has the shape \(2,\): it must have one element"):
        quantize(x, NVFP4, per_tensor_scale=torch.ones(2))
    with pytest.raises(DeviceError, match="per_tensor_scale is on meta, the rest on cpu"):
        quantize(x, NVFP4, per_tensor_scale=torch.ones((), device="meta"))
    with pytest.raises(UnsupportedError, match="mxfp4 has none; leave it out"):
        quantize(x, MXFP4, per_tensor_scale=1.0)


# --- what is refused


def test_operands_that_are_refused() -> None:
    with pytest.raises(DTypeError, match="quantize: x is float64"):
        quantize(torch.zeros(32, dtype=torch.float64), MXFP4)
    for dim in (2, -3):
        with pytest.raises(ShapeError, match=f"x has 2 dimensions, dim is {dim}"):
            quantize(torch.zeros(2, 32), MXFP4, dim=dim)
    with pytest.raises(ShapeError, match="x has 0 dimensions"):
        quantize(torch.zeros(()), MXFP4)
    with pytest.raises(UnsupportedError, match="element_rounding is 'up'"):
        quantize(torch.zeros(32), MXFP4, element_rounding="up")


def test_parts_that_do_not_belong_together() -> None:
    values, found, _ = quantize(torch.zeros(2, 64), MXFP8_E4M3)
    with pytest.raises(
        ShapeError, match=r"scales has the shape \(1, 2\): values of \(2, 64\) need"
    ):
        dequantize(values, found[:1], MXFP8_E4M3)
    with pytest.raises(DTypeError, match="values is float8_e4m3fn: mxfp6_e2m3 needs uint8"):
        dequantize(values, found, MXFP6_E2M3)
    with pytest.raises(DTypeError, match="scales is uint8: mxfp8_e4m3 needs float8_e8m0fnu"):
        dequantize(values, found.view(torch.uint8), MXFP8_E4M3)
    with pytest.raises(DTypeError, match="dequantize: dtype is float64"):
        dequantize(values, found, MXFP8_E4M3, dtype=torch.float64)
