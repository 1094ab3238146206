"""Parts of K on a GPU: against float64, the same bits where they are promised, nothing shared by launches."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_oracle import Finish, compare, matrix
from torch import Tensor

from quack_core.gemm.epilogue import AddVector, Gate, GateGrad, Kind, Op, Scale
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import random
from quack_gemm import api, fused, heuristic
from quack_gemm.api import gemm
from quack_gemm.config import GemmConfig, SplitK
from quack_gemm.spec import GemmSpec

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SERIAL, PARALLEL, SEPARATE = SplitK
TILES = [
    (64, 64, 1, 1, False),
    (128, 128, 1, 1, False),
    (128, 256, 2, 1, False),
    (256, 128, 1, 2, False),
    (128, 32, 1, 1, True),
]
SIZES = [
    (128, 128, 16384),
    (300, 552, 1000),
    (257, 264, 64),  # one step: most parts are empty
    (1, 8, 4104),
    (1003, 1001, 712),  # several tiles for each cluster
]


def configured(tile: tuple[int, int, int, int, bool], parts: int, mode: SplitK) -> GemmConfig:
    *sizes, swap = tile
    return GemmConfig(*sizes, swap=swap, split_k=parts, split_mode=mode)


def operands(m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    return matrix(m, k, "row", device, 1), matrix(k, n, "column", device, 2)


def repeated(times: int, **given: Any) -> Tensor:
    """The result, which comes out with the same bits each time."""
    found = gemm(**given)
    for _ in range(times):
        assert_bitwise(gemm(**given), found)
    return found


def compare32(actual: Tensor, a: Tensor, b: Tensor, finish: Finish = lambda x: x) -> None:
    """A float32 result, beside that of our kernel without parts: cuBLAS may have more of them than we,
    and the tensor cores lose a little with each step along K."""
    right = finish(a.double() @ b.double())
    base = finish(gemm(a, b, out_dtype=F32, split_k=1))
    flat = (-1, actual.shape[-1])
    assert_accurate(actual.reshape(flat), right.reshape(flat), base.reshape(flat))


@pytest.mark.parametrize("parts", [2, 7, 48])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_separate(
    size: tuple[int, int, int], tile: tuple[int, int, int, int, bool], parts: int, cuda: str
) -> None:
    a, b = operands(*size, cuda)
    config = configured(tile, parts, SEPARATE)
    compare(repeated(5, a=a, b=b, config=config), a, b)


@pytest.mark.parametrize("parts", [2, 7, 48])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_parallel(
    size: tuple[int, int, int], tile: tuple[int, int, int, int, bool], parts: int, cuda: str
) -> None:
    a, b = operands(*size, cuda)
    config = configured(tile, parts, PARALLEL)
    out = torch.full((size[0], -(-size[1] // 4) * 4), torch.nan, device=cuda)[:, : size[1]]
    compare32(gemm(a, b, out=out, config=config), a, b)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_serial(parts: int, cuda: str) -> None:
    for size in SIZES:
        a, b = operands(*size, cuda)
        config = configured(TILES[0], parts, SERIAL)
        compare(repeated(20, a=a, b=b, config=config), a, b)


@pytest.mark.parametrize("parts", [16, 128])
def test_the_same_bits_beside_other_work(parts: int, cuda: str) -> None:
    """While another stream keeps SMs and memory busy."""
    a, b = operands(128, 128, 65536, cuda)
    config = configured(TILES[1], parts, SEPARATE)
    first, other = gemm(a, b, config=config), torch.cuda.Stream()
    noise = random((4096, 4096), BF16, cuda, seed=3)
    with torch.cuda.stream(other):
        for _ in range(50):
            noise @ noise
    for _ in range(100):
        assert_bitwise(gemm(a, b, config=config), first)
    torch.cuda.synchronize()


@pytest.mark.parametrize("d_major", ["row", "column"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_layouts_of_d(d_major: str, dtype: torch.dtype, cuda: str) -> None:
    a, b = operands(203, 333, 2048, cuda)
    c = random((203, 333), BF16, cuda, seed=3)
    bias = random((333,), BF16, cuda, seed=4)
    wide = torch.full((208, 336) if d_major == "row" else (336, 208), torch.nan, device=cuda)
    wide = wide.to(dtype)
    out = (wide if d_major == "row" else wide.mT)[:203, :333]
    gemm(a, b, c=c, bias=bias, out=out, config=configured(TILES[1], 20, SEPARATE))
    check = compare32 if dtype == F32 else compare
    check(out, a, b, lambda x: x + c.to(x.dtype) + bias.to(x.dtype))
    out.fill_(torch.nan)
    assert wide.isnan().all()  # nothing beyond D was written
    if dtype == F32:
        gemm(a, b, c=c, out=out, config=configured(TILES[1], 20, PARALLEL))
        compare32(out, a, b, lambda x: x + c.to(x.dtype))
        out.fill_(torch.nan)
        assert wide.isnan().all()


def test_epilogues_behind_parts(cuda: str) -> None:
    a, b = operands(72, 264, 8192, cuda)
    rows, cols = random((72,), F32, cuda, seed=3), random((264,), F32, cuda, seed=4)
    c, alpha = random((72, 264), F32, cuda, seed=5), torch.full((1,), 0.25, device=cuda)
    config = configured(TILES[1], 32, SEPARATE)
    cases: list[tuple[list[tuple[Op, Tensor]], Finish]] = [
        ([(Scale(Kind.COLUMN, "x"), rows)], lambda x: x * rows.to(x.dtype)[:, None]),
        ([(Scale(Kind.ROW, "x"), cols)], lambda x: x * cols.to(x.dtype)),
        ([(AddVector("float32", Kind.COLUMN), rows)], lambda x: x + rows.to(x.dtype)[:, None]),
    ]
    for entries, finish in cases:
        compare(gemm(a, b, epilogue=entries, config=config), a, b, finish)
    found = gemm(a, b, c=c, alpha=alpha, beta=-2.0, activation="silu", config=config)
    compare(found, a, b, lambda x: F.silu(x * 0.25 - 2 * c.to(x.dtype)))


@pytest.mark.parametrize("concat", [False, True])
def test_pairs_behind_parts(concat: bool, cuda: str) -> None:
    a, b = operands(72, 272, 8192, cuda)
    bias = random((272,), BF16, cuda, seed=3)
    config = configured(TILES[1], 32, SEPARATE)

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.chunk(2, -1) if concat else (x[..., ::2], x[..., 1::2])  # type: ignore[return-value]

    def gated(x: Tensor) -> Tensor:
        gate, up = halves(x + bias.to(x.dtype))
        return F.silu(gate) * up

    preact = random((72, 544), BF16, cuda, seed=4)

    def gradient(x: Tensor) -> Tensor:
        gate, up = halves(preact.to(x.dtype))
        both = x * up * gate.sigmoid() * (1 + gate * (1 - gate.sigmoid())), x * F.silu(gate)
        return torch.cat(both, -1) if concat else torch.stack(both, -1).flatten(-2)

    steps = [(AddVector("bfloat16"), (bias,)), (Gate("silu"), ())]
    compare(api.compute(a, b, steps, [BF16], concat, config)[0], a, b, gated)
    steps = [(GateGrad("silu", "bfloat16"), (preact,))]  # type: ignore[list-item]
    compare(api.compute(a, b, steps, [BF16], concat, config)[0], a, b, gradient)


def test_batches_of_parts(cuda: str) -> None:
    a = matrix(72, 4096, "row", cuda, 1, batch=3)
    for b in (matrix(4096, 136, "column", cuda, 2, batch=3), matrix(4096, 136, "row", cuda, 2)):
        c = random((3, 72, 136), F32, cuda, seed=3)
        for mode in (SEPARATE, PARALLEL):
            config = configured(TILES[1], 9, mode)
            found = gemm(a, b, c=c, out_dtype=F32, config=config)
            compare32(found, a, b, lambda x, c=c: x + c.to(x.dtype))  # type: ignore[misc]


def test_8_bit_parts(cuda: str) -> None:
    a, b = (x.to(E4M3) for x in operands(128, 256, 16384, cuda))
    scale = random((128, 1), F32, cuda, seed=3).abs()
    whole = gemm(a, b, scale_a=scale, out_dtype=F32)
    bound = 2**-11 * (a.double().abs() @ b.double().abs()) * scale
    for mode in (SEPARATE, PARALLEL):
        found = gemm(a, b, scale_a=scale, out_dtype=F32, config=configured(TILES[1], 16, mode))
        right = a.double() @ b.double() * scale
        assert ((found - right).abs() <= bound).all()
        assert (found - right).norm() <= 1.5 * (whole - right).norm()


def test_gradients_add_up_in_place(cuda: str) -> None:
    """``out`` is ``c``: parts are added to what is there, and nothing is cleared."""
    a, b = operands(128, 256, 32768, cuda)
    total = random((128, 256), F32, cuda, seed=3)
    before = total.clone()
    gemm(a, b, c=total, out=total, config=configured(TILES[1], 60, PARALLEL))
    compare32(total, a, b, lambda x: x + before.to(x.dtype))
    total.copy_(before)
    gemm(a, b, c=total, out=total, config=configured(TILES[1], 60, SEPARATE))
    compare32(total, a, b, lambda x: x + before.to(x.dtype))


@pytest.mark.parametrize("mode", [SEPARATE, PARALLEL])
def test_graphs_whose_replays_overlap(mode: SplitK, cuda: str) -> None:
    """Each has memory of its own for parts, as have eager launches."""
    a, b = operands(128, 128, 65536, cuda)
    config = configured(TILES[1], 64, mode)
    outs = [torch.empty(128, 128, device=cuda) for _ in range(2)]
    first = gemm(a, b, out_dtype=F32, config=config)
    graphs = [torch.cuda.CUDAGraph() for _ in outs]
    streams = [torch.cuda.Stream() for _ in outs]
    for graph, out in zip(graphs, outs, strict=True):
        with torch.cuda.graph(graph):
            gemm(a, b, out=out, config=config)
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = gemm(a, b, out_dtype=F32, config=config)
        torch.cuda.synchronize()
        for found in (*outs, eager):
            if mode == SEPARATE:
                assert_bitwise(found, first)
            else:
                compare32(found, a, b)


def test_threads_and_streams_share_no_parts(cuda: str) -> None:
    config = configured(TILES[1], 64, SEPARATE)
    given = [operands(128, 128, 32768 - 64 * i, cuda) for i in range(4)]
    torch.cuda.synchronize()

    def work(pair: tuple[Tensor, Tensor]) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            compare(repeated(50, a=pair[0], b=pair[1], config=config), *pair)
        stream.synchronize()

    with ThreadPoolExecutor(len(given)) as pool:
        list(pool.map(work, given))


def test_memory_of_parts_is_given_back(cuda: str) -> None:
    a, b = operands(512, 512, 65536, cuda)
    gemm(a, b, config=configured(TILES[1], 16, SEPARATE))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        gemm(a, b, config=configured(TILES[1], 16, SEPARATE))
    assert torch.cuda.memory_allocated() == before


def test_chosen_by_the_rule(cuda: str) -> None:
    a, b = operands(128, 128, 131072, cuda)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    problem = heuristic.Problem(
        128, 128, 131072, 1, GemmSpec("bfloat16", "bfloat16", "bfloat16"), sms
    )
    assert heuristic.separate(problem)
    compare(repeated(20, a=a, b=b), a, b)
    gated = fused.gemm_gated(a, b, "swiglu", store_preact=True)
    compare(gated[0], a, b)
