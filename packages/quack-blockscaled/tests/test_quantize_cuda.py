"""Quantising on a GPU: the bits of the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quack_blockscaled import BlockScaledTensor, quantize, quantize_both
from quack_blockscaled.formats import (
    E4M3,
    E8M0,
    FORMATS,
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
)
from quack_blockscaled.scales import RULES
from quack_core.errors import UnsupportedError
from quack_core.testing.compare import assert_bitwise

ALL = tuple(FORMATS.values())
ROWS = tuple(format for format in ALL if format.rows == 1)
POWERS = (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4)
TURNED = (MXFP8_E4M3, MXFP8_E5M2, FP8_BLOCK_1X128, FP8_BLOCK_128X128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAME = {"ids": lambda format: format.name}

pytestmark = pytest.mark.usefixtures("cuda")


def same(found: BlockScaledTensor, expected: BlockScaledTensor) -> None:
    """The same bits, in the same order in memory."""
    for part in ("values", "scales"):
        a, b = getattr(found, part), getattr(expected, part)
        assert_bitwise(a.cpu(), b, f"{expected.format.name} {part}")
        sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
        assert a.numel() == 0 or all(n == 1 or x == y for n, x, y in sizes)


def check(x: Tensor, format: BlockFormat, rule: str = "rceil", **how: Any) -> None:
    """x is on the CPU; its GPU copy gives the same bits."""
    expected = quantize(x, format, scale_rounding=rule, **how)
    same(quantize(x.cuda(), format, scale_rounding=rule, **how), expected)


def spread(rows: int = 1024, cols: int = 1024) -> Tensor:
    """Exponents from the smallest subnormals to Inf, NaN, zeros of both signs."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, cols, generator=draw) * 2.0 ** torch.randint(
        -150, 128, (rows, 1), generator=draw
    )
    x[128:256:17, ::97], x[5], x[6, ::2], x[6, 1::2] = torch.nan, 0.0, 0.0, -0.0
    x[256:512] *= 2.0**-100
    x[512:640] = 0.0
    x[700::19, 5], x[700::23, 700] = torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("format", ALL, **NAME)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_all_magnitudes_KQ_01_KQ_06(
    dtype: torch.dtype, format: BlockFormat, dim: int
) -> None:
    check(spread().to(dtype), format, dim=dim)
    check(spread().mT.to(dtype), format, dim=dim)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", POWERS, **NAME)
def test_rules_KQ_02_KQ_03(format: BlockFormat, rule: str) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = words[:, None].expand(-1, 32).contiguous()
    check(x, format, rule)
    x = x.float() * torch.linspace(0.25, 1.0, 32)  # elements of all sizes below the largest
    check(x, format, rule)
    if format.element.bits == 8:
        check(x.mT.contiguous(), format, rule, dim=0)


@pytest.mark.parametrize("format", ROWS, **NAME)
def test_all_numbers_of_16_bits_beside_each_maximum(format: BlockFormat) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = words[words.isfinite()].view(-1, format.cols // 2)
    for top in (1.0, 6.0, 7.5, 28.0, 448.0, 3e-30, 2e30):
        x = torch.cat((finite, torch.full_like(finite, top)), -1)
        check(x, format)


@pytest.mark.parametrize("format", ROWS, **NAME)
def test_boundaries_an_ulp_around_KQ_05(format: BlockFormat) -> None:
    """Numbers, ties and their neighbours, in blocks whose scale is 1 and others."""
    element = format.element
    values = torch.tensor([element.value(code) for code in range(element.max_code + 1)])
    edges = torch.cat((values, (values[1:] + values[:-1]) / 2)).view(torch.int32)
    edges = (edges[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)).flatten().clamp(min=0)
    edges = edges.view(torch.float32).clamp(max=element.max)
    edges = torch.cat((edges, -edges))
    free = format.cols - 1
    edges = torch.nn.functional.pad(edges, (0, -len(edges) % free)).view(-1, free)
    x = torch.nn.functional.pad(edges, (1, 0), value=element.max)
    for factor in (1.0, 2.0**-140, 2.0**100, 0.7):
        check(x * factor, format)


@pytest.mark.parametrize("scale", [1.0, 0.75, 3e-5, 1e-38, 1e-44, 3e38, float("inf"), float("nan")])
def test_scales_of_the_whole_tensor_KQ_04_KQ_11(scale: float) -> None:
    x, whole = spread(), torch.tensor(scale)
    expected = quantize(x, NVFP4, per_tensor_scale=whole)
    same(quantize(x.cuda(), NVFP4, per_tensor_scale=whole.cuda()), expected)


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 7, 2**63 - 1])
@pytest.mark.parametrize("format", ALL, **NAME)
def test_stochastic_rounding_KQ_12(format: BlockFormat, seed: int) -> None:
    how: dict[str, Any] = {"element_rounding": "stochastic", "seed": seed}
    check(spread(), format, **how)
    check(torch.randn(256, 384).bfloat16(), format, **how)
    check(torch.randn(3, 128, 128).half(), format, **how)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", POWERS, **NAME)
def test_stochastic_rounding_with_rules(format: BlockFormat, rule: str) -> None:
    check(torch.randn(256, 384) * 5, format, rule, element_rounding="stochastic", seed=9)


@pytest.mark.parametrize("format", TURNED, **NAME)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (384, 128), (1024, 640)])
def test_both_copies(shape: tuple[int, int], format: BlockFormat) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape).mul(2.0 ** torch.randint(-20, 20, (1, shape[1]))).to(dtype)
        for found, expected in zip(
            quantize_both(x.cuda(), format), quantize_both(x, format), strict=True
        ):
            same(found, expected)
        for found, expected in zip(
            quantize_both(spread().to(dtype).cuda(), format),
            quantize_both(spread().to(dtype), format),
            strict=True,
        ):
            same(found, expected)


@pytest.mark.parametrize("shape", [(32, 32), (96, 160), (3, 160, 288), (2, 2, 32, 2080)])
@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP4, NVFP4, MXFP6_E2M3], **NAME)
def test_both_copies_of_tiles_that_are_not_whole(
    shape: tuple[int, ...], format: BlockFormat
) -> None:
    x = torch.randn(shape).bfloat16()
    for found, expected in zip(
        quantize_both(x.cuda(), format), quantize_both(x, format), strict=True
    ):
        same(found, expected)


@pytest.mark.parametrize("cols", [16, 64, 128])
def test_both_copies_of_blocks_of_your_own(cols: int) -> None:
    format = BlockFormat(f"mine_{cols}", E4M3, E8M0, (1, cols))
    x = torch.randn(3 * cols, 5 * cols).bfloat16()
    for found, expected in zip(
        quantize_both(x.cuda(), format), quantize_both(x, format), strict=True
    ):
        same(found, expected)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((128, 8), 0),
        ((128, 24), 0),
        ((128, 7), 0),
        ((256, 3, 5), 0),
        ((3, 128, 136), 1),
        ((128, 0), 0),
    ],
)
def test_columns_of_any_number(shape: tuple[int, ...], dim: int) -> None:
    for format in (FP8_BLOCK_1X128, MXFP8_E5M2, MXFP4):
        check(torch.randn(shape).bfloat16(), format, dim=dim)


@pytest.mark.parametrize("shape", [(128,), (1, 128), (3, 5, 256), (8191, 128), (0, 128), (2, 0)])
def test_shapes(shape: tuple[int, ...]) -> None:
    check(torch.randn(shape).bfloat16(), FP8_BLOCK_1X128)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (3, 128, 256), (2, 2, 128, 128)])
def test_shapes_of_tiles(shape: tuple[int, ...]) -> None:
    for rows in range(2):  # small numbers below large ones, and beside them
        x = torch.randn(shape)
        x[..., 64 * rows :, :] *= 1e-3
        x[..., :64] *= 1e4
        check(x.bfloat16(), FP8_BLOCK_128X128)


@pytest.mark.parametrize("cols", [8, 16, 64, 256, 512])
def test_blocks_of_your_own(cols: int) -> None:
    """Of one vector, which needs no other lane, up to a whole warp."""
    format = BlockFormat(f"mine_{cols}", MXFP8_E4M3.element, MXFP8_E4M3.scale, (1, cols))
    check(torch.randn(37, 1024).bfloat16(), format)


def test_past_2_to_the_31_elements() -> None:
    x = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device="cuda").view(-1, 4096)
    x[-1] = torch.randn(4096)
    found, last = quantize(x, MXFP8_E4M3), quantize(x[-1].cpu(), MXFP8_E4M3)
    assert torch.equal(found.values[-1].cpu().view(torch.uint8), last.values.view(torch.uint8))
    assert torch.equal(found.scales[-1].cpu().view(torch.uint8), last.scales.view(torch.uint8))
    assert not found.values[:-1].view(torch.uint8).any()


def test_both_copies_past_2_to_the_31_elements() -> None:
    x = torch.zeros(128, (2**31 + 2**20) // 128, dtype=torch.bfloat16, device="cuda")
    x[:, -128:] = torch.randn(128, 128)
    expected = quantize_both(x[:, -128:].cpu(), FP8_BLOCK_1X128)
    for found, wanted in zip(quantize_both(x, FP8_BLOCK_1X128), expected, strict=True):
        part = found[:, -128:]
        assert_bitwise(part.values.cpu(), wanted.values)
        assert_bitwise(part.scales.cpu(), wanted.scales)


def test_views_are_copied() -> None:
    x = torch.randn(64, 520).bfloat16().cuda()
    for part in (x[:, 4:132], x[:, ::4][:, :128], x.mT[:, :32].contiguous().mT[:, :512].mT):
        part = part[..., : part.shape[-1] // 32 * 32]
        found, expected = quantize(part, MXFP8_E4M3), quantize(part.cpu(), MXFP8_E4M3)
        assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))


def test_in_a_graph_and_under_compile() -> None:
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    expected = quantize(x, MXFP8_E4M3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize(x, MXFP8_E4M3)
    graph.replay()
    compiled = torch.compile(lambda t: quantize(t, MXFP8_E4M3).values, fullgraph=True)
    for values in (captured.values, compiled(x)):
        assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8))


def test_what_has_no_kernel_says_so() -> None:
    x = torch.randn(128, 128, device="cuda")
    tall = BlockFormat("tall", E4M3, E8M0, (64, 128))
    with pytest.raises(UnsupportedError, match=r"no kernel for tall.*\.cpu\(\)"):
        quantize(x, tall)
    with pytest.raises(UnsupportedError, match=r"'stochastic', dim is -2.*\.cpu\(\)"):
        quantize(x, MXFP8_E4M3, dim=0, element_rounding="stochastic", seed=1)
