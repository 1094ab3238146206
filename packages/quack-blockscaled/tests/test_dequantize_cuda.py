"""Back to numbers on a GPU: the bits of the reference, NaN included."""

import math

import pytest
import torch
from torch import Tensor

from quack_blockscaled import BlockScaledTensor, dequantize, elements, quantize
from quack_blockscaled.formats import (
    E2M1,
    E2M3,
    E4M3,
    E5M2,
    E8M0,
    FLOAT32,
    FORMATS,
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    UE4M3,
    BlockFormat,
)
from quack_core.testing.compare import assert_bitwise

ALL = tuple(FORMATS.values())
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16, F32 = torch.bfloat16, torch.float32
NAME = {"ids": lambda format: format.name}
NANS = (0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF, -1)
"""Float32 words that are NaN, of both signs."""
FLOATS = (0.0, -0.0, 1.0, -3.0, 0.1, math.inf, -math.inf, 2.0**-149, 1e-40, 2.0**-126, 3e38)

pytestmark = pytest.mark.usefixtures("cuda")


def check(x: BlockScaledTensor, moved: BlockScaledTensor | None = None) -> None:
    """x is on the CPU; its GPU copy gives the same numbers, in the same order in memory."""
    moved = x.to("cuda") if moved is None else moved
    for dtype in DTYPES:
        found, expected = dequantize(moved, dtype), dequantize(x, dtype)
        assert_bitwise(found.cpu(), expected, f"{x.format.name} {dtype}")
        strides = zip(found.shape, found.stride(), expected.stride(), strict=True)
        assert found.numel() == 0 or all(n == 1 or a == b for n, a, b in strides)


def all_scales(format: BlockFormat) -> Tensor:
    """Every one of a byte; of float32 the special ones and some of all sizes: (number,)."""
    dtype = getattr(torch, format.scale.dtype)
    if format.scale != FLOAT32:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(1))
    spread = drawn * 2.0 ** torch.linspace(-149, 127, 500)
    nans = torch.tensor(NANS, dtype=torch.int32).view(torch.float32)
    return torch.cat((torch.tensor(FLOATS), spread, nans))


def all_pairs(format: BlockFormat, whole: float | None) -> BlockScaledTensor:
    """Every code with every scale of `all_scales`."""
    element, (rows, cols) = format.element, format.block
    found = all_scales(format)
    codes = torch.arange(max(2**element.bits, cols)) % 2**element.bits
    blocks = len(codes) // cols  # for each scale
    codes = codes.to(torch.uint8).view(1, blocks, 1, cols).expand(len(found), -1, rows, -1)
    codes = codes.transpose(1, 2).reshape(len(found) * rows, blocks * cols)
    values = elements.pack(codes.contiguous(), element)
    values = values.view(getattr(torch, element.dtype))
    scales = found.view(-1, 1).expand(-1, blocks).contiguous()
    tensor_scale = None if whole is None else torch.tensor(whole)
    return BlockScaledTensor(values, scales, format, -1, tensor_scale, F32)


@pytest.mark.parametrize("format", ALL, **NAME)
def test_all_codes_with_all_scales(format: BlockFormat) -> None:
    wholes = (1.0, 0.7, 2.0**-149, 3e38, math.inf, math.nan, -1e-30, 0.0)
    for whole in wholes if format.per_tensor else (None,):
        x = all_pairs(format, whole)
        check(x)
        check(x.mT)


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda each: each.name)
@pytest.mark.parametrize("scale", [E8M0, FLOAT32], ids=lambda each: each.name)
@pytest.mark.parametrize("block", [(1, 8), (1, 16), (1, 256), (1, 512), (128, 128)], ids=str)
def test_blocks_of_your_own_of_8_bits(block: tuple[int, int], scale: str, element: str) -> None:
    check(all_pairs(BlockFormat("mine", element, scale, block), None))


@pytest.mark.parametrize("cols", [16, 64, 512])
def test_blocks_of_your_own_of_fewer_bits(cols: int) -> None:
    check(all_pairs(BlockFormat("mine", E2M1, E8M0, (1, cols)), None))
    check(all_pairs(BlockFormat("mine", E2M3, E8M0, (1, cols)), None))
    check(all_pairs(BlockFormat("mine", E2M1, UE4M3, (1, cols)), None))
    check(all_pairs(BlockFormat("mine", E2M1, UE4M3, (1, cols), per_tensor=True), 0.3))


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((128,), 0),
        ((3, 5, 256), -1),
        ((8191, 128), -1),
        ((0, 128), -1),
        ((2, 0), -1),
        ((128, 24), 0),
        ((3, 128, 136), 1),
        ((256, 3, 5), 0),
        ((128, 2, 1, 3), 0),
    ],
)
@pytest.mark.parametrize("format", [f for f in ALL if f.rows == 1], **NAME)
def test_shapes(format: BlockFormat, shape: tuple[int, ...], dim: int) -> None:
    check(quantize(torch.randn(shape), format, dim=dim))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (3, 128, 256), (2, 2, 384, 128)])
@pytest.mark.parametrize("dim", [-1, -2])
def test_shapes_of_tiles(dim: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 2.0 ** torch.randint(-40, 40, (shape[-1] // 128,)).repeat_interleave(
        128
    )
    check(quantize(x, FP8_BLOCK_128X128, dim=dim))


@pytest.mark.parametrize("format", ALL, **NAME)
def test_views(format: BlockFormat) -> None:
    """They are copied, wherever they begin: parts of rows, of columns, one matrix, turned ones."""
    scale = 2.5 if format.per_tensor else None
    x = quantize(torch.randn(3, 384, 640), format, per_tensor_scale=scale)
    moved = x.to("cuda")
    for index in ((...,), (slice(1, None),), (1,), (..., slice(128, None), slice(128, 512))):
        check(x[index], moved[index])
        check(x[index].mT, moved[index].mT)
    check(x.contiguous(), moved.contiguous())


def test_what_lies_anywhere() -> None:
    x = quantize(torch.randn(64, 256), MXFP8_E4M3)
    values = torch.empty(64 * 256 + 1, dtype=x.values.dtype, device="cuda")[1:].view(64, 256)
    moved = BlockScaledTensor(values.copy_(x.values), x.scales.cuda(), x.format, -1, None, BF16)
    assert_bitwise(moved.dequantize().cpu(), x.dequantize(BF16))


@pytest.mark.parametrize("format", [MXFP8_E5M2, FP8_BLOCK_1X128, FP8_BLOCK_128X128, MXFP4], **NAME)
def test_there_and_back_on_the_gpu(format: BlockFormat) -> None:
    x = torch.randn(256, 512, device="cuda")
    for dim in (-1, -2):
        q = quantize(x, format, dim=dim)
        assert_bitwise(q.dequantize().cpu(), q.to("cpu").dequantize())


def bytes_of(part: Tensor) -> Tensor:
    """What torch can pad, which are not its small floats."""
    return part.contiguous().view(torch.uint8)


@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP6_E3M2, NVFP4, FP8_BLOCK_1X128], **NAME)
def test_past_2_to_the_31_elements(format: BlockFormat) -> None:
    last = quantize(torch.randn(1, 4096), format)
    moved = last.to("cuda")
    rows = 2**31 // 4096 + 1
    parts = [
        torch.nn.functional.pad(bytes_of(x), (0, 0, rows - 1, 0))
        for x in (moved.values, moved.scales)
    ]
    values, scales = parts[0].view(moved.values.dtype), parts[1].view(moved.scales.dtype)
    x = BlockScaledTensor(values, scales, format, -1, moved.tensor_scale, BF16)
    found = x.dequantize()
    assert_bitwise(found[-1:].cpu(), last.dequantize(BF16))
    assert not found[:-1].any()


def test_tiles_past_2_to_the_31_elements() -> None:
    last = quantize(torch.randn(128, 128), FP8_BLOCK_128X128)
    values = torch.nn.functional.pad(bytes_of(last.values.cuda()), (2**24, 0))
    values = values.view(last.values.dtype)
    scales = torch.nn.functional.pad(last.scales.cuda(), (2**17, 0))
    found = BlockScaledTensor(values, scales, FP8_BLOCK_128X128, -1, None, BF16).dequantize()
    assert_bitwise(found[:, -128:].cpu(), last.dequantize(BF16))
    assert not found[:, :-128].any()


def test_in_a_graph_and_under_compile() -> None:
    x = quantize(torch.randn(256, 512, device="cuda", dtype=BF16), NVFP4)
    expected = x.dequantize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = x.dequantize()
    graph.replay()
    compiled = torch.compile(lambda q: q.dequantize(), fullgraph=True)
    for found in (captured, compiled(x)):
        assert_bitwise(found, expected)
