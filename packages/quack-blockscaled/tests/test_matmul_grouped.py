"""Products of ragged groups: against each group's own, what is refused, what a GPU gives."""

import itertools
from typing import Any

import pytest
import torch
from product_oracle import check
from torch import Tensor

from quack_blockscaled import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    BlockScaledTensor,
    matmul,
    matmul_grouped,
    operators,
    quantize,
)
from quack_blockscaled.product import launch
from quack_blockscaled.product.spec import ROUND_COST, MatmulConfig, MatmulSpec, choose
from quack_core import arch
from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from quack_core.testing import fake_cuda
from quack_core.testing.inputs import random

BF16, F32 = torch.bfloat16, torch.float32
SIZES = [
    [5],
    [0, 3, 0, 130, 0],
    [128, 256, 64, 1],
    [1] * 40,  # more than a warp looks at
    [0] * 33 + [300] + [0] * 31 + [7],
]
by_sizes = pytest.mark.parametrize("sizes", SIZES, ids=lambda each: f"{len(each)}x{max(each)}")


def operands(
    sizes: list[int], n: int, k: int, device: str = "cpu"
) -> tuple[BlockScaledTensor, BlockScaledTensor, Tensor]:
    """Rows, matrices and offsets; groups whose scales differ by powers of ten."""
    groups, m = len(sizes), sum(sizes)
    weights = random((groups, n, k), F32, "cpu", seed=2)
    weights *= 10.0 ** (torch.arange(groups)[:, None, None] % 5 - 2)
    a = quantize(random((m, k), BF16, "cpu", seed=1), FP8_BLOCK_1X128)
    b = quantize(weights.to(BF16), FP8_BLOCK_128X128)
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    return a.to(device), b.to(device).mT, offsets.to(device)


def one_by_one(
    a: BlockScaledTensor, b: BlockScaledTensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    at = offsets.tolist()
    rows = itertools.pairwise(at)
    return torch.cat([matmul(a[i:j], b[g], out_dtype=dtype) for g, (i, j) in enumerate(rows)])


@by_sizes
def test_reference(sizes: list[int]) -> None:
    a, b, offsets = operands(sizes, 128, 256)
    for dtype in (BF16, F32):
        found = matmul_grouped(a, b, offsets, out_dtype=dtype)
        assert found.dtype == dtype
        assert torch.equal(found, one_by_one(a, b, offsets, dtype))


def test_empty_sizes() -> None:
    for sizes, n, k in (([0, 0], 128, 128), ([3], 0, 128), ([3], 128, 0), ([], 128, 128)):
        a = quantize(torch.zeros(sum(sizes), k), FP8_BLOCK_1X128)
        b = quantize(torch.zeros(len(sizes), n, k), FP8_BLOCK_128X128).mT
        offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        assert torch.equal(matmul_grouped(a, b, offsets), torch.zeros(sum(sizes), n))


def test_meta_compile_and_opcheck() -> None:
    a, b, offsets = operands([3, 0, 5], 128, 256)
    there = matmul_grouped(a.to("meta"), b.to("meta"), offsets.to("meta"), out_dtype=F32)
    assert (there.shape, there.dtype, there.device.type) == ((8, 128), F32, "meta")
    compiled = torch.compile(matmul_grouped, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, offsets), matmul_grouped(a, b, offsets))
    parts = (a.values, a.scales, b.values.mT, b.scales.mT, offsets, F32)
    torch.library.opcheck(
        operators.matmul_grouped_fwd,
        parts,
        test_utils=("test_autograd_registration", "test_faketensor"),
    )


def test_what_is_refused() -> None:
    a, b, offsets = operands([3, 5], 128, 256)
    with pytest.raises(DTypeError, match=r"offsets is torch\.int64: it must be a tensor of int32"):
        matmul_grouped(a, b, offsets.long())
    with pytest.raises(DTypeError, match="offsets is list"):
        matmul_grouped(a, b, [0, 3, 8])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"offsets has the shape \(2,\): it must be \(3,\)"):
        matmul_grouped(a, b, offsets[:2])
    with pytest.raises(DeviceError, match="offsets is on meta, a on cpu"):
        matmul_grouped(a, b, offsets.to("meta"))
    with pytest.raises(ShapeError, match="b has 2 dimensions: it must have 3"):
        matmul_grouped(a, b[0], offsets)
    with pytest.raises(ShapeError, match=r"a\.shape\[1\] is 128, b\.shape\[1\] 256"):
        matmul_grouped(a[:, :128], b, offsets)
    with pytest.raises(UnsupportedError, match="b is fp8_block_1x128; there are kernels for"):
        rows = quantize(torch.zeros(2, 128, 256), FP8_BLOCK_1X128)
        matmul_grouped(a, rows.mT, offsets)
    for wrong in ([0, 9, 8], [1, 3, 8], [0, 3, 7]):
        with pytest.raises(ShapeError, match="they must not descend, from 0 to a.shape"):
            matmul_grouped(a, b, torch.tensor(wrong, dtype=torch.int32))


# --- what a kernel is handed


def test_choices() -> None:
    assert choose(8 * 1024, 4096, 7168, 132, 8) == choose(8192, 4096, 7168, 132)
    # each group has a tile of rows, however few: as many rounds as of 256 x 128 rows
    assert choose(3, 4096, 7168, 132, 256) == choose(256 * 128, 4096, 7168, 132)
    with pytest.raises(ValueError, match="groups have blocks of 128x128 and a new D"):
        MatmulSpec("bfloat16", rows_b=True, grouped=True)


def test_operands_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    fake_cuda.stand_in(monkeypatch, lambda *_: lambda *given: launched.append(given))
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    a, b, offsets = operands([3, 0, 5], 256, 384)
    d = launch.grouped(a.values, a.scales, b.values.mT, b.scales.mT, offsets, BF16)
    ((given_a, given_b, scale_a, scale_b, out, given, sms),) = launched
    assert given_a.data_ptr() == a.values.data_ptr() and given_b.shape == (3, 256, 384)
    assert given_b.data_ptr() == b.values.data_ptr()
    assert torch.equal(scale_a, a.scales.mT) and scale_b.shape == (3, 2, 3)
    assert out is d and given is offsets and sms == 132


def test_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "detect", lambda *_: arch.SM100)
    a, b, offsets = operands([3, 5], 128, 256)
    with pytest.raises(UnsupportedError, match="matmul_grouped on sm100; there are kernels for"):
        launch.grouped(a.values, a.scales, b.values.mT, b.scales.mT, offsets, BF16)


# --- on a GPU

ON_GPU = [
    *SIZES,
    [1024] * 8,
    [4000, 1, 127, 0, 129, 255, 257, 3],
    [64] * 200,
    [63, 65, 64, 191, 193, 192] * 4,
]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32], ids=str)
@pytest.mark.parametrize("sizes", ON_GPU, ids=lambda each: f"{len(each)}x{max(each)}")
def test_kernel(sizes: list[int], dtype: torch.dtype, cuda: str) -> None:
    """Each group has the bits that it has alone, however tiles and rows of groups fall."""
    a, b, offsets = operands(sizes, 640, 768, cuda)
    found = matmul_grouped(a, b, offsets, out_dtype=dtype)
    assert torch.equal(found, one_by_one(a, b, offsets, dtype))
    for _ in range(3):
        assert torch.equal(matmul_grouped(a, b, offsets, out_dtype=dtype), found)


def test_groups_against_float64(cuda: str) -> None:
    a, b, offsets = operands([100, 0, 300], 256, 1024, cuda)
    found = matmul_grouped(a, b, offsets, out_dtype=F32)
    check(found[:100], a[:100], b[0])
    check(found[100:], a[100:], b[2])


@pytest.mark.parametrize(
    "config", [MatmulConfig(tile_n, band) for tile_n in ROUND_COST for band in (1, 3)], ids=str
)
def test_every_configuration(
    config: MatmulConfig, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, offsets = operands([700, 3, 0, 1300, 128, 130], 1152, 512, cuda)
    wanted = one_by_one(a, b, offsets, BF16)
    monkeypatch.setattr(launch, "choose", lambda *_: config)
    assert torch.equal(matmul_grouped(a, b, offsets), wanted)


def test_rows_of_no_group_are_left_alone(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, offsets = operands([100, 50, 150], 256, 512, cuda)
    wanted = one_by_one(a, b, offsets, BF16)
    given = torch.full((300, 256), 7.0, device=cuda, dtype=BF16)
    monkeypatch.setattr(launch, "empty", lambda *_: given)
    gap = torch.tensor([40, 100, 150, 170], dtype=torch.int32, device=cuda)
    found = matmul_grouped(a, b, gap)
    assert (found[:40] == 7).all() and (found[170:] == 7).all()
    assert torch.equal(found[40:100], wanted[40:100])
    nonsense = torch.tensor([-5, 2**31 - 1, 40, 900], dtype=torch.int32, device=cuda)
    matmul_grouped(a, b, nonsense)
    torch.cuda.synchronize()


def test_offsets_are_read_when_the_kernel_runs(cuda: str) -> None:
    a, b, offsets = operands([100, 50, 150], 256, 512, cuda)
    matmul_grouped(a, b, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = matmul_grouped(a, b, offsets)
    for sizes in ([0, 300, 0], [1, 2, 297]):
        offsets.copy_(torch.tensor([0, *sizes]).cumsum(0))
        graph.replay()
        assert torch.equal(found, one_by_one(a, b, offsets, BF16))
