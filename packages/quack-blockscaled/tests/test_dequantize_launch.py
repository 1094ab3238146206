"""What a dequantizing kernel is handed, and where results lie. No kernel runs."""

from typing import Any

import pytest
import torch

from quack_blockscaled import BlockScaledTensor, quantize, reference
from quack_blockscaled.formats import (
    E5M2,
    FLOAT32,
    FORMATS,
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
)
from quack_blockscaled.quantizer import launch
from quack_blockscaled.quantizer.spec import DequantizeConfig, DequantizeSpec
from quack_core import arch
from quack_core.errors import UnsupportedError
from quack_core.testing import fake_cuda
from quack_core.testing.compare import assert_bitwise

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAME = {"ids": lambda format: format.name}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernels that were found, and what they were called with."""
    found: list[tuple[Any, ...]] = []

    def load(module: str, spec: DequantizeSpec, config: DequantizeConfig, target: arch.Arch) -> Any:
        assert target is arch.SM90 and config == DequantizeConfig()
        return lambda *operands: found.append((module, spec, *operands))

    fake_cuda.stand_in(monkeypatch, load)
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    return found


def numbers(x: BlockScaledTensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    return launch.numbers(x.values, x.scales, x.tensor_scale, x.format, x.dim, dtype)


@pytest.mark.parametrize(
    ("format", "packed", "scales", "stored"),
    [
        (MXFP8_E4M3, 3 * 128 * 256, (3 * 128 * 8,), torch.uint8),
        (MXFP6_E2M3, 3 * 128 * 192, (3 * 128 * 8,), torch.uint8),
        (NVFP4, 3 * 128 * 128, (3 * 128 * 16,), torch.uint8),
        (FP8_BLOCK_1X128, 3 * 128 * 256, (2, 384), F32),
        (FP8_BLOCK_128X128, 3 * 128 * 256, (3 * 2,), F32),
    ],
    ids=["mxfp8", "mxfp6", "nvfp4", "1x128", "128x128"],
)
def test_operands(
    format: BlockFormat,
    packed: int,
    scales: tuple[int, ...],
    stored: torch.dtype,
    launched: list[tuple[Any, ...]],
) -> None:
    x = quantize(torch.zeros(3, 128, 256), format)
    out = numbers(x)
    ((module, spec, codes, found, whole, flat, n),) = launched
    assert module == "quack_blockscaled.quantizer.numbers"
    assert spec == DequantizeSpec("bfloat16", format)
    assert (codes.shape, codes.dtype) == ((packed,), torch.uint8)
    assert (found.shape, found.dtype) == (scales, stored)
    assert codes.data_ptr() == x.values.data_ptr() and found.data_ptr() == x.scales.data_ptr()
    assert (whole is None) != format.per_tensor and (whole is None or whole.shape == (1,))
    assert (flat.shape, flat.dtype, n) == ((out.numel(),), BF16, 256)
    assert flat.data_ptr() == out.data_ptr() and out.shape == x.shape


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("format", [MXFP4, FP8_BLOCK_1X128], **NAME)
def test_other_dimensions_are_taken_as_they_lie(
    format: BlockFormat, dim: int, launched: list[tuple[Any, ...]]
) -> None:
    shape = [3, 5, 7]
    shape[dim] = 128
    x = quantize(torch.randn(shape), format, dim=dim)
    out = numbers(x, F32)
    ((_, _, codes, found, _, _, n),) = launched
    assert codes.data_ptr() == x.values.data_ptr() and found.data_ptr() == x.scales.data_ptr()
    assert out.transpose(dim, -1).is_contiguous() and n == 128


@pytest.mark.parametrize("format", [MXFP8_E4M3, FP8_BLOCK_1X128, FP8_BLOCK_128X128], **NAME)
def test_views_are_copied(format: BlockFormat, launched: list[tuple[Any, ...]]) -> None:
    x = quantize(torch.randn(256, 512), format)
    part = x[128:, 128:]
    numbers(part)
    ((_, _, codes, found, _, _, n),) = launched
    assert codes.data_ptr() % 16 == 0 and n == 384
    assert torch.equal(codes, part.values.contiguous().view(torch.uint8).view(-1))
    scales = part.scales.mT if format.by_column else part.scales.reshape(-1)
    assert found.stride(-1) == 1
    assert torch.equal(found.view(scales.dtype), scales)


def test_scales_in_logical_order_are_turned(launched: list[tuple[Any, ...]]) -> None:
    """Those of a file, which lie there contiguous."""
    x = quantize(torch.randn(8, 512), FP8_BLOCK_1X128).contiguous()
    numbers(x)
    ((_, _, _, found, *_),) = launched
    assert torch.equal(found, x.scales.mT) and found.stride() == (8, 1)


def test_nothing_is_launched_for_nothing(launched: list[tuple[Any, ...]]) -> None:
    out = numbers(quantize(torch.zeros(0, 64), MXFP8_E4M3))
    assert (out.shape, out.dtype, launched) == ((0, 64), BF16, [])


def test_dtypes_are_kernels_of_their_own(launched: list[tuple[Any, ...]]) -> None:
    x = quantize(torch.zeros(2, 32), MXFP8_E4M3)
    for dtype in (F32, BF16, F16):
        numbers(x, dtype)
    assert len({spec.name for _, spec, *_ in launched}) == 3


def test_what_has_no_kernel() -> None:
    x = quantize(torch.zeros(64, 128), BlockFormat("tall", E5M2, FLOAT32, (64, 128)))
    with pytest.raises(UnsupportedError, match=r"dequantize: .*no kernel for tall.*\.cpu\(\)"):
        numbers(x)


# --- the CPU, meta and fake tensors agree


@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("format", FORMATS.values(), **NAME)
def test_results_lie_as_values_do(format: BlockFormat, dim: int) -> None:
    if format.rows > 1 and dim == -3:
        pytest.skip("blocks lie along the last two dimensions")
    shape = [2, 128, 256] if format.rows > 1 else [2, 3, 5]
    shape[dim] = 128
    x = quantize(torch.randn(shape), format, dim=dim)
    for dtype in (F32, BF16):
        found = x.dequantize(dtype)
        assert found.transpose(dim, -1).is_contiguous() and found.dtype == dtype
        assert found.stride() == x.to("meta").dequantize(dtype).stride()
    turned = x.mT
    assert turned.dequantize().stride() == turned.to("meta").dequantize().stride()
    if dim > -3:
        assert turned.dequantize().stride() == x.dequantize().mT.stride()


@pytest.mark.parametrize(
    ("dtype", "integers", "nan"),
    [(F32, torch.int32, 0x7FC00000), (BF16, torch.int16, 0x7FC0), (F16, torch.int16, 0x7E00)],
    ids=str,
)
def test_each_nan_has_the_bits_of_torch(
    dtype: torch.dtype, integers: torch.dtype, nan: int
) -> None:
    """Codes that are NaN, of both signs; scales of any payload; infinity times zero."""
    format = BlockFormat("mine", E5M2, FLOAT32, (1, 32))
    codes = torch.tensor([0x7D, 0x7E, 0x7F, 0xFD, 0xFF, 0x7C, 0xFC, 0x3C], dtype=torch.uint8)
    values = codes.view(torch.float8_e5m2).repeat_interleave(32).view(8, 32)
    words = torch.full((8, 1), 0x3F800000, dtype=torch.int32)
    words[5:7] = 0  # beside the infinities
    words[7] = -1  # a NaN, beside a one
    found = reference.dequantize(values, words.view(F32), format, dtype=dtype)
    assert (found.view(integers) == nan).all()
    assert_bitwise(found, torch.full_like(found, torch.nan))
