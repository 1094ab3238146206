"""Quantising on a GPU: the bits of the reference."""

import pytest
import torch
from torch import Tensor

from quack_blockscaled import quantize
from quack_blockscaled.formats import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
)
from quack_blockscaled.scales import RULES
from quack_core.errors import UnsupportedError
from quack_core.testing.compare import assert_bitwise

ROWS = (MXFP8_E4M3, MXFP8_E5M2, FP8_BLOCK_1X128)
BUILT = (*ROWS, FP8_BLOCK_128X128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

pytestmark = pytest.mark.usefixtures("cuda")


def check(x: Tensor, format: BlockFormat, rule: str = "rceil") -> None:
    """x is on the CPU; its GPU copy gives the same bits."""
    expected = quantize(x, format, scale_rounding=rule)
    found = quantize(x.cuda(), format, scale_rounding=rule)
    for part in ("values", "scales"):
        assert_bitwise(getattr(found, part).cpu(), getattr(expected, part), format.name)


@pytest.mark.parametrize("format", BUILT, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_all_magnitudes(dtype: torch.dtype, format: BlockFormat) -> None:
    """Exponents from the smallest subnormals to Inf, NaN, zeros of both signs."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 1024, generator=draw) * 2.0 ** torch.randint(
        -150, 128, (1024, 1), generator=draw
    )
    x[128:256:17, ::97], x[5], x[6, ::2], x[6, 1::2] = torch.nan, 0.0, 0.0, -0.0
    x[256:512] *= 2.0**-100
    x[512:640] = 0.0
    x[700::19, 5], x[700::23, 700] = torch.inf, -torch.inf
    check(x.to(dtype), format)


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = words[:, None].expand(-1, 32).contiguous()
    for format in (MXFP8_E4M3, MXFP8_E5M2):
        check(x, format, rule)


@pytest.mark.parametrize("format", ROWS, ids=lambda f: f.name)
def test_all_numbers_of_16_bits_beside_each_maximum(format: BlockFormat) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = words[words.isfinite()].view(-1, format.cols // 2)
    for top in (1.0, 448.0, 3e-30, 2e30):
        x = torch.cat((finite, torch.full_like(finite, top)), -1)
        check(x, format)


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


@pytest.mark.parametrize("cols", [8, 16, 64, 256])
def test_blocks_of_your_own(cols: int) -> None:
    """Of one vector, which needs no other lane, up to a whole warp."""
    format = BlockFormat(f"mine_{cols}", MXFP8_E4M3.element, MXFP8_E4M3.scale, (1, cols))
    check(torch.randn(37, 768).bfloat16(), format)


def test_past_2_to_the_31_elements() -> None:
    x = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device="cuda").view(-1, 4096)
    x[-1] = torch.randn(4096)
    found, last = quantize(x, MXFP8_E4M3), quantize(x[-1].cpu(), MXFP8_E4M3)
    assert torch.equal(found.values[-1].cpu().view(torch.uint8), last.values.view(torch.uint8))
    assert torch.equal(found.scales[-1].cpu().view(torch.uint8), last.scales.view(torch.uint8))
    assert not found.values[:-1].view(torch.uint8).any()


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
    with pytest.raises(UnsupportedError, match=r"no kernel for mxfp4.*\.cpu\(\)"):
        quantize(x, MXFP4)
    with pytest.raises(UnsupportedError, match=r"dim is -2.*x\.mT\.contiguous"):
        quantize(x, MXFP8_E4M3, dim=0)
    with pytest.raises(UnsupportedError, match=r"'stochastic'.*\.cpu\(\)"):
        quantize(x, MXFP8_E4M3, element_rounding="stochastic", seed=1)
