"""Products of blocks: against float64, what is refused, what a kernel is handed, what a GPU gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from product_oracle import check, check_like_cublas, lost
from torch import Tensor

from quack_blockscaled import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP8_E4M3,
    BlockFormat,
    BlockScaledTensor,
    matmul,
    operators,
    quantize,
)
from quack_blockscaled.product import launch
from quack_blockscaled.product.spec import ROUND_COST, MatmulConfig, MatmulSpec, choose
from quack_core import arch
from quack_core.errors import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedError
from quack_core.testing import fake_cuda
from quack_core.testing.inputs import random

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def operands(
    m: int, n: int, k: int, device: str = "cpu", format_b: BlockFormat = FP8_BLOCK_128X128
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Blocks whose scales differ by powers of ten."""
    x = random((m, k), F32, "cpu", seed=1) * 10.0 ** (torch.arange(k) // 128 % 5 - 3)
    weight = random((n, k), F32, "cpu", seed=2) * 10.0 ** (torch.arange(n)[:, None] // 128 % 3 - 2)
    a, b = quantize(x.to(BF16), FP8_BLOCK_1X128), quantize(weight.to(BF16), format_b)
    return a.to(device), b.mT.to(device)


FORMATS_B = [FP8_BLOCK_128X128, FP8_BLOCK_1X128]
by_format = pytest.mark.parametrize("format_b", FORMATS_B, ids=lambda each: each.name)


@by_format
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("shape", [(1, 128, 128), (100, 256, 640), (300, 384, 1280)])
def test_reference(shape: tuple[int, int, int], dtype: torch.dtype, format_b: BlockFormat) -> None:
    a, b = operands(*shape, format_b=format_b)
    found = matmul(a, b, out_dtype=dtype)
    assert found.dtype == dtype and found.shape == shape[:2]
    check(found, a, b)


def test_bound_of_what_tensor_cores_lose() -> None:
    """By a model of them: each of 33 terms is cut 13 bits below the largest one."""
    a, b = (
        random((8, 128), F32, "cpu", seed=3).double(),
        random((128, 8), F32, "cpu", seed=4).double(),
    )
    a[1] = a[1].abs() * 2.0 ** (torch.arange(128) % 32 - 16)  # all are cut the same way
    b[:, 1] = b[:, 1].abs()
    found = torch.zeros(8, 8, dtype=torch.float64)
    for k in range(0, 128, 32):
        terms = torch.cat([a[:, k : k + 32, None] * b[k : k + 32], found[:, None]], 1)
        largest = terms.abs().amax(1, keepdim=True)
        unit = 2.0 ** (largest.frexp().exponent.double() - 1 - 13)
        found = ((terms / unit).trunc() * unit).sum(1)
    error, bound = (found - a @ b).abs(), lost(a, b)
    assert (error <= bound).all()
    assert (bound <= 2.0**-13 * 33 * 5 * (a.abs() @ b.abs())).all()
    assert error.max() > 2.0**-13 * (a.abs() @ b.abs()).flatten()[error.argmax()] / 16


def test_each_column_may_have_its_scale() -> None:
    a = quantize(random((5, 256), F32, "cpu", seed=1), FP8_BLOCK_1X128)
    x = random((3, 256), F32, "cpu", seed=2) * torch.tensor([[1.0], [1e-20], [1e20]])
    b = quantize(x, FP8_BLOCK_1X128).mT
    check(matmul(a, b, out_dtype=F32), a, b)


def test_a_transposed_weight_multiplies() -> None:
    """Blocks of 128x128 lie along either dimension: those of dy @ weight along N."""
    dy, weight = random((40, 384), F32, "cpu", seed=1), random((384, 256), F32, "cpu", seed=2)
    a, b = quantize(dy, FP8_BLOCK_1X128), quantize(weight, FP8_BLOCK_128X128)
    found = matmul(a, b)
    check(found, a, b)
    assert torch.equal(found, matmul(a, b.mT.contiguous().mT))


def test_results_in_given_tensors() -> None:
    a, b = operands(12, 256, 384, format_b=FP8_BLOCK_1X128)
    before = random((12, 256), F32, "cpu", seed=5)
    out = before.clone()
    assert matmul(a, b, out=out, accumulate=True) is out
    check(out, a, b, before)
    assert torch.equal(out, before + matmul(a, b, out_dtype=F32))
    for dtype in (BF16, F32):
        given = torch.full((12, 256), torch.nan, dtype=dtype)
        assert matmul(a, b, out=given) is given
        assert torch.equal(given, matmul(a, b, out_dtype=dtype))
    compiled = torch.compile(matmul, fullgraph=True, backend="aot_eager")
    again = before.clone()
    compiled(a, b, out=again, accumulate=True)
    assert torch.equal(again, out)


def test_given_tensors_that_are_refused() -> None:
    a, b = operands(12, 256, 384)
    with pytest.raises(DTypeError, match="accumulate is True, out is missing: it must be float32"):
        matmul(a, b, accumulate=True)
    with pytest.raises(DTypeError, match="accumulate is True, out is bfloat16"):
        matmul(a, b, out=torch.zeros(12, 256, dtype=BF16), accumulate=True)
    with pytest.raises(ShapeError, match=r"out has the shape \(12, 255\): it must be \(12, 256\)"):
        matmul(a, b, out=torch.zeros(12, 255))
    with pytest.raises(DTypeError, match="out is float32, out_dtype bfloat16: must be equal"):
        matmul(a, b, out=torch.zeros(12, 256), out_dtype=BF16)
    with pytest.raises(DeviceError, match="out is on meta, a on cpu"):
        matmul(a, b, out=torch.zeros(12, 256, device="meta"))
    with pytest.raises(UnsupportedError, match="out requires a gradient"):
        matmul(a, b, out=torch.zeros(12, 256, requires_grad=True))
    with pytest.raises(DTypeError, match="out_dtype is int32"):
        matmul(a, b, out=torch.zeros(12, 256, dtype=torch.int32))


def test_default_dtype_is_that_of_what_was_quantised() -> None:
    a, b = operands(4, 128, 128)
    assert matmul(a, b).dtype == BF16


def test_empty_sizes() -> None:
    for m, n, k in ((0, 128, 128), (4, 0, 128), (4, 128, 0)):
        a = quantize(torch.zeros(m, k), FP8_BLOCK_1X128)
        b = quantize(torch.zeros(n, k), FP8_BLOCK_128X128).mT
        assert torch.equal(matmul(a, b), torch.zeros(m, n))


def test_a_lost_block_loses_its_row_only() -> None:
    x = random((4, 256), F32, "cpu", seed=1)
    x[2, 130] = torch.nan
    _, b = operands(4, 128, 256)
    found = matmul(quantize(x, FP8_BLOCK_1X128), b)
    assert found[2].isnan().all() and found[[0, 1, 3]].isfinite().all()


def test_meta_compile_and_opcheck() -> None:
    a, b = operands(8, 128, 256)
    there = matmul(a.to("meta"), b.to("meta"), out_dtype=F32)
    assert (there.shape, there.dtype, there.device.type) == ((8, 128), F32, "meta")
    compiled = torch.compile(matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), matmul(a, b))
    parts = (a.values, a.scales, b.values.mT, b.scales.mT, F32)
    torch.library.opcheck(
        operators.matmul_fwd, parts, test_utils=("test_autograd_registration", "test_faketensor")
    )


def test_what_is_refused() -> None:
    a, b = operands(8, 128, 256)
    with pytest.raises(DTypeError, match="b is Tensor: it must be a BlockScaledTensor"):
        matmul(a, b.values)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="a is mxfp8_e4m3, b is fp8_block_128x128"):
        matmul(quantize(torch.zeros(8, 256), MXFP8_E4M3), b)
    with pytest.raises(
        ShapeError, match=r"b along -1: it must be -1 and -2, which is K; take \.mT"
    ):
        matmul(a, quantize(torch.zeros(256, 128), FP8_BLOCK_1X128))
    with pytest.raises(ShapeError, match=r"a\.shape\[1\] is 128, b\.shape\[0\] 256"):
        matmul(quantize(torch.zeros(8, 128), FP8_BLOCK_1X128), b)
    with pytest.raises(ShapeError, match="a has 3 dimensions: it must have 2"):
        matmul(quantize(torch.zeros(2, 8, 256), FP8_BLOCK_1X128), b)
    with pytest.raises(DTypeError, match="out_dtype"):
        matmul(a, b, out_dtype=torch.float64)


def test_gradients_raise() -> None:
    a, b = operands(8, 128, 256)
    parts = (a.values, a.scales.requires_grad_(), b.values.mT, b.scales.mT, F32)
    with pytest.raises(UnsupportedError, match="matmul: a gradient was asked for"):
        operators.matmul_fwd(*parts).sum().backward()


# --- what a kernel is handed


def test_configurations_fit() -> None:
    for tile_n in ROUND_COST:
        for spec in (MatmulSpec("bfloat16"), MatmulSpec("float32", True, True)):
            config = MatmulConfig(tile_n)
            assert config.depth(spec) >= 4
            assert config.smem_bytes(spec) <= arch.SM90.smem_bytes
            cols = 1 if spec.rows_b else config.scale_cols
            assert config.scales_b(spec) * cols == tile_n and 128 % cols == 0
    with pytest.raises(ValueError, match="d='bfloat16': it must be float32"):
        MatmulSpec("bfloat16", accumulate=True)
    for fields, message in (({"tile_n": 160}, "160"), ({"group": 0}, "0")):
        with pytest.raises(ValueError, match=f"={message}: must be"):
            MatmulConfig(**fields)


def test_choices() -> None:
    assert choose(8192, 8192, 8192, 132) == MatmulConfig(192)  # 21 rounds; 32 of 128 columns
    assert choose(4096, 4096, 7168, 132) == MatmulConfig(128)  # 8 rounds; 6 of 192
    # 32 x 17 tiles: five rounds; 32 x 12 of 192 columns: three
    assert choose(4096, 2176, 7168, 132).tile_n == 192
    assert choose(128, 7168, 2048, 132).tile_n == 64  # 112 tiles instead of 56
    assert choose(64, 7168, 16384, 132).tile_n == 128


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    fake_cuda.stand_in(monkeypatch, lambda *_: lambda *given: found.append(given))
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    return found


def test_operands_of_a_kernel(launched: list[tuple[Any, ...]]) -> None:
    a, b = operands(100, 256, 640)
    wide = torch.zeros(100, 648, dtype=torch.float8_e4m3fn)
    wide[:, :640] = a.values
    one = a.values[:1].expand(100, 640)
    for values, copied in ((a.values, False), (wide[:, :640], True), (one, True)):
        d = launch.forward(values, a.scales, b.values.mT, b.scales.mT, BF16)
        given_a, given_b, scale_a, scale_b, out, offsets, sms = launched[-1]
        assert (given_a.data_ptr() != values.data_ptr()) == copied
        assert torch.equal(given_a.float(), values.float())
        assert given_a.stride(0) % 16 == 0 and given_a.stride(0) > 0
        assert given_b.data_ptr() == b.values.data_ptr() and given_b.shape == (1, 256, 640)
        assert torch.equal(scale_a, a.scales.mT) and scale_b.shape == (1, 2, 5)
        assert out is d and d.shape == (100, 256) and (offsets, sms) == (None, 132)


@pytest.mark.parametrize("shape", [(100, 5), (101, 5), (3, 7, 2), (1, 5), (100, 1)])
def test_scales_by_columns(shape: tuple[int, ...]) -> None:
    """As TMA reads them: rows beside each other, columns at multiples of 16 bytes."""
    scales = torch.rand(shape)
    found = launch.by_columns(scales)
    assert torch.equal(found, scales.mT) and launch.is_readable(found)
    again = launch.by_columns(found.mT)
    assert again.data_ptr() == found.data_ptr() and again.stride() == found.stride()


def test_operands_of_a_weight_gradient(launched: list[tuple[Any, ...]]) -> None:
    a, b = operands(128, 300, 640, format_b=FP8_BLOCK_1X128)
    out = torch.zeros(128, 300)
    parts = (a.values, a.scales, b.values.mT, b.scales.mT)
    assert launch.forward(*parts, F32, out=out, accumulate=True) is out
    assert launched[-1][4] is out and torch.equal(launched[-1][3][0], b.scales)
    empty = (a.values[:, :0], a.scales[:, :0], b.values.mT[:, :0], b.scales.mT[:, :0])
    out.fill_(3.0)
    assert (
        torch.equal(launch.forward(*empty, F32, out=out, accumulate=True), out) and out[0, 0] == 3
    )
    assert torch.equal(launch.forward(*empty, F32, out=out), torch.zeros(128, 300))
    assert len(launched) == 1


def test_values_of_a_transposed_weight_are_copied(launched: list[tuple[Any, ...]]) -> None:
    a = quantize(torch.zeros(40, 384), FP8_BLOCK_1X128)
    b = quantize(random((384, 256), F32, "cpu", seed=2), FP8_BLOCK_128X128)
    launch.forward(a.values, a.scales, b.values.mT, b.scales.mT, BF16)
    given = launched[-1]
    assert given[1].is_contiguous() and torch.equal(given[1][0].float(), b.values.mT.float())
    assert given[3].is_contiguous() and given[3].shape == (1, 2, 3)


def test_rows_of_results_begin_where_they_can_be_stored() -> None:
    a, b = operands(8, 300, 256, "meta", FP8_BLOCK_1X128)
    assert matmul(a, b, out_dtype=BF16).stride() == (304, 1)
    assert matmul(a, b, out_dtype=F32).stride() == (300, 1)
    assert launch.is_readable(torch.zeros(8, 304, dtype=BF16)[:, :300])
    for x in (torch.zeros(8, 300, dtype=BF16), torch.zeros(8, 16).mT, torch.zeros(8, 17)[:, 1:]):
        assert not launch.is_readable(x)
    assert not launch.is_readable(torch.zeros(1, 16).expand(8, 16))


def test_nothing_is_launched_for_nothing(launched: list[tuple[Any, ...]]) -> None:
    a = quantize(torch.zeros(3, 0), FP8_BLOCK_1X128)
    b = quantize(torch.zeros(128, 0), FP8_BLOCK_128X128)
    d = launch.forward(a.values, a.scales, b.values, b.scales, F32)
    assert torch.equal(d, torch.zeros(3, 128)) and launched == []


def test_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "detect", lambda *_: arch.SM100)
    a, b = operands(8, 128, 128)
    with pytest.raises(UnsupportedError, match="matmul on sm100; there are kernels for sm90 only"):
        launch.forward(a.values, a.scales, b.values.mT, b.scales.mT, BF16)


# --- on a GPU


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 128, 128),
        (100, 256, 640),
        (129, 384, 128),
        (257, 7168, 2048),
        (4096, 2176, 1536),
        (8192, 8192, 128),  # more tiles than clusters, and fewer steps than stages
    ],
)
@by_format
def test_kernel(
    shape: tuple[int, int, int], dtype: torch.dtype, format_b: BlockFormat, cuda: str
) -> None:
    a, b = operands(*shape, cuda, format_b)
    found = matmul(a, b, out_dtype=dtype)
    check(found, a, b)
    for _ in range(3):
        assert torch.equal(matmul(a, b, out_dtype=dtype), found)


@pytest.mark.parametrize("config", [MatmulConfig(tile_n) for tile_n in ROUND_COST], ids=str)
@by_format
def test_every_configuration(
    config: MatmulConfig, format_b: BlockFormat, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "choose", lambda *_: config)
    a, b = operands(1000, 4224, 1152, cuda, format_b)
    check(matmul(a, b), a, b)


@pytest.mark.parametrize("n", [8, 100, 300, 1000])
def test_columns_that_fill_no_block(n: int, cuda: str) -> None:
    a, b = operands(256, n, 1024, cuda, FP8_BLOCK_1X128)
    for dtype in (BF16, F32):
        check(matmul(a, b, out_dtype=dtype), a, b)


@pytest.mark.parametrize("shape", [(128, 256, 384), (1000, 1160, 2048), (4096, 4096, 8192)])
@by_format
def test_products_are_added(shape: tuple[int, int, int], format_b: BlockFormat, cuda: str) -> None:
    n = shape[1] // 128 * 128 if format_b == FP8_BLOCK_128X128 else shape[1]
    a, b = operands(shape[0], n, shape[2], cuda, format_b)
    alone = matmul(a, b, out_dtype=F32)
    before = random((shape[0], n), F32, cuda, seed=5) * alone.std()
    out = before.clone()
    assert matmul(a, b, out=out, accumulate=True) is out
    assert torch.equal(out, before + alone)
    check(out, a, b, before)
    version = out._version
    assert torch.equal(matmul(a, b, out=out), alone) and out._version > version
    with pytest.raises(LayoutError, match="rows must begin at multiples of 16 bytes"):
        matmul(a, b, out=torch.zeros(shape[0], n + 1, device=cuda)[:, :n])


def test_a_transposed_weight_on_a_gpu(cuda: str) -> None:
    dy, weight = random((400, 384), F32, cuda, seed=1), random((384, 1152), F32, cuda, seed=2)
    a, b = quantize(dy, FP8_BLOCK_1X128), quantize(weight, FP8_BLOCK_128X128)
    check(matmul(a, b), a, b)
    assert torch.equal(matmul(a, b), matmul(a, b.mT.contiguous().mT))


@pytest.mark.parametrize("shape", [(128, 128, 512), (1024, 2304, 2048), (4096, 4096, 7168)])
@by_format
def test_no_less_accurate_than_cublas(
    shape: tuple[int, int, int], format_b: BlockFormat, cuda: str
) -> None:
    a, b = operands(*shape, cuda, format_b)
    check_like_cublas(matmul(a, b), a, b)


def peak(call: Callable[[], Tensor]) -> int:
    """Bytes that a call takes at most, on top of what there is."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@by_format
def test_nothing_of_full_size_is_made(format_b: BlockFormat, cuda: str) -> None:
    a, b = operands(512, 4096, 4096, cuda, format_b)
    out = torch.zeros(512, 4096, device=cuda)
    assert peak(lambda: matmul(a, b, out_dtype=BF16)) <= out.nbytes // 2 + 512
    assert peak(lambda: matmul(a, b, out=out, accumulate=True)) <= 512
