"""GEMM against float64: layouts, sizes, batches, dtypes, epilogues, and every configuration there is."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_oracle import compare, matrix
from torch import Tensor

from quack_core.errors import DTypeError, LayoutError, ShapeError, UnsupportedError
from quack_core.gemm.epilogue import (
    ACTIVATIONS,
    Activation,
    AddC,
    AddVector,
    Gate,
    GateGrad,
    Kind,
    Op,
    Operand,
    RowReduce,
    Scale,
)
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_gemm import autograd, heuristic
from quack_gemm.api import gemm
from quack_gemm.config import MOST_BUSY_SUMS, GemmConfig
from quack_gemm.spec import GemmSpec

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("b_major", ["row", "column"])
@pytest.mark.parametrize("a_major", ["row", "column"])
@pytest.mark.parametrize("size", [(136, 264, 72), (128, 256, 64), (8, 8, 8), (264, 520, 1032)])
def test_layouts(size: tuple[int, int, int], a_major: str, b_major: str, device: str) -> None:
    m, n, k = size
    a, b = matrix(m, k, a_major, device, 1), matrix(k, n, b_major, device, 2)
    compare(gemm(a, b), a, b)


@pytest.mark.parametrize("m", [1, 2, 7, 8, 16, 32, 63, 64, 65, 129, 257])
@pytest.mark.parametrize(("n", "k"), [(8, 64), (1001, 136), (105, 8)])
def test_odd_rows_and_columns_KG_01_KG_10(m: int, n: int, k: int, device: str) -> None:
    """Free along every axis that is not strided: M and N of row-major A and column-major B."""
    a, b = matrix(m, k, "row", device, m), matrix(k, n, "column", device, n)
    compare(gemm(a, b), a, b)


def test_what_strides_rows_says_its_rule_KG_01_KG_02(device: str) -> None:
    if device == "cpu":
        pytest.skip("the CPU reads every layout")
    b = matrix(107, 64, "column", device, 2)
    with pytest.raises(LayoutError, match=r"a.stride\(-2\) is 107: .* multiple of 8"):
        gemm(matrix(3, 107, "row", device, 1), b)
    wide = random((64, 65), F16, device, seed=1)
    with pytest.raises(LayoutError, match=r"a.stride\(-2\) is 65"):
        gemm(wide[:, :64], random((64, 64), F16, device, seed=2))
    padded = torch.nn.functional.pad(matrix(3, 107, "row", device, 1), (0, 5))[:, :107]
    also = torch.nn.functional.pad(b.mT, (0, 5)).mT[:107]
    compare(gemm(padded, also), padded, also)


@pytest.mark.parametrize("m,n,k", [(0, 16, 8), (16, 0, 8), (16, 8, 0), (0, 0, 0)])
def test_sizes_of_zero_KG_03(m: int, n: int, k: int, device: str) -> None:
    a, b = (torch.ones(s, dtype=BF16, device=device) for s in ((m, k), (k, n)))
    c, bias = random((m, n), BF16, device, seed=1), random((n,), BF16, device, seed=2)
    found = gemm(a, b, c=c, beta=2.0, bias=bias)
    assert_bitwise(found, (2 * c.float() + bias.float()).to(BF16))
    assert gemm(a, b).shape == (m, n)
    assert not gemm(a, b).any()


@pytest.mark.parametrize("batches", [(3, 3), (3, 0), (0, 3), (1, 3), (3, 1), (1, 1)])
def test_batches(batches: tuple[int, int], device: str) -> None:
    a = matrix(40, 72, "row", device, 1, batch=batches[0])
    b = matrix(72, 88, "column", device, 2, batch=batches[1])
    compare(gemm(a, b), a, b)


@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (1, 1), (0, 1)])
def test_batches_of_other_operands(batches: tuple[int, int], device: str) -> None:
    a = matrix(40, 72, "row", device, 1, batch=batches[0])
    b = matrix(72, 88, "column", device, 2, batch=batches[1])
    count = max(batches)
    c, bias = (
        random((count, 40, 88), BF16, device, seed=3),
        random((count, 88), F32, device, seed=4),
    )

    def finish(x: Tensor) -> Tensor:
        return x + c.to(x.dtype) + bias.to(x.dtype)[:, None]

    compare(gemm(a, b, c=c, bias=bias), a, b, finish)
    one = random((88,), F32, device, seed=5)
    compare(gemm(a, b, bias=one), a, b, lambda x: x + one.to(x.dtype))


@pytest.mark.parametrize("out_dtype", [BF16, F16, F32])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dtypes(dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    a = matrix(100, 200, "row", device, 1, dtype)
    b = matrix(200, 152, "column", device, 2, dtype)
    found = gemm(a, b, out_dtype=out_dtype)
    assert found.dtype == out_dtype
    compare(found, a, b)


@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
@pytest.mark.parametrize("scale", ["number", "tensor", "row", "mixed"])
def test_8_bits_KG_17(kinds: tuple[torch.dtype, torch.dtype], scale: str, device: str) -> None:
    """Scales by their shape; sums as precise as the tensor cores' parts of 128 along K allow."""
    m, n, k = 144, 160, 512
    a, b = (
        matrix(m, k, "row", device, 1).mul(0.5).to(kinds[0]),
        matrix(k, n, "column", device, 2).mul(0.5).to(kinds[1]),
    )
    by_row = random((m, 1), F32, device, seed=3).abs() + 0.5
    by_col = random((1, n), F32, device, seed=4).abs() + 0.5
    one = torch.tensor([0.75], device=device)
    scale_a, scale_b = {
        "number": (0.75, 1.5),
        "tensor": (one, one * 2),
        "row": (by_row, by_col),
        "mixed": (one.reshape(()), by_col),
    }[scale]
    found = gemm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=F32)
    right = (a.double() @ b.double()) * scale_a * scale_b
    terms = (a.double().abs() @ b.double().abs()) * scale_a * scale_b
    assert ((found.double() - right).abs() <= 2.0**-13 * terms).all()


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0, "device"])
@pytest.mark.parametrize("alpha", [1.0, -2.0, "device"])
def test_alpha_beta_and_c_KG_08(alpha: Any, beta: Any, device: str) -> None:
    """Numbers and device scalars alike; beta = 0 does not read C."""
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 136, "column", device, 2)
    c = random((72, 136), BF16, device, seed=3)
    if beta == 0.0:
        c = torch.full_like(c, torch.nan)
    x, y = (torch.tensor([0.75], device=device) if v == "device" else v for v in (alpha, beta))
    found = gemm(a, b, c=c, alpha=x, beta=y)
    factors = [0.75 if v == "device" else v for v in (alpha, beta)]

    def finish(product: Tensor) -> Tensor:
        product = product * factors[0]
        return product if beta == 0.0 else product + c.to(product.dtype) * factors[1]

    compare(found, a, b, finish)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, device: str) -> None:
    a, b = matrix(96, 64, "row", device, 1), matrix(64, 72, "column", device, 2).mul(0.25)
    bias = random((72,), F32, device, seed=3)

    def finish(x: Tensor) -> Tensor:
        return Activation(activation).reference(x + bias.to(x.dtype))

    compare(gemm(a, b, bias=bias, activation=activation), a, b, finish)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("size", [(136, 512, 72), (33, 48, 64), (1, 16, 8)])
def test_pairs_KG_12(size: tuple[int, int, int], name: str, device: str) -> None:
    m, n, k = size
    a, b = matrix(m, k, "row", device, 1), matrix(k, n, "column", device, 2)
    bias = random((n,), BF16, device, seed=3)

    def finish(x: Tensor) -> Tensor:
        x = x + bias.to(x.dtype)
        return Activation(name).reference(x[:, ::2]) * x[:, 1::2]

    compare(gemm(a, b, bias=bias, epilogue=[Gate(name)]), a, b, finish)


@dataclasses.dataclass(frozen=True)
class Clamp(Op):
    """An op as a user writes it."""

    limit: float

    def apply(self, x: Any, *operands: Any) -> Any:
        import cutlass.cute as cute
        from cutlass import Float32

        return cute.arch.fmin(x, Float32(self.limit))

    def reference(self, x: Any, *operands: Any) -> Any:
        return x.clamp(max=self.limit)


def test_ops_of_users(device: str) -> None:
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 136, "column", device, 2)
    by_row = random((72,), F32, device, seed=3)
    found = gemm(a, b, epilogue=[(AddVector("float32", Kind.COLUMN), by_row), Clamp(1.5)])
    compare(found, a, b, lambda x: (x + by_row.to(x.dtype)[:, None]).clamp(max=1.5))
    half = gemm(a, b, epilogue=[(Scale(), 0.5), Clamp(0.25)])
    compare(half, a, b, lambda x: (x * 0.5).clamp(max=0.25))


def configs(spec: GemmSpec) -> list[GemmConfig]:
    """Every configuration that the heuristic can return."""
    return [*heuristic.candidates(spec), *heuristic.tiles_apart(spec)]


PLAIN = GemmSpec("bfloat16", "bfloat16", "bfloat16")
GATED = dataclasses.replace(PLAIN, epilogue=(Gate("silu"),))


@pytest.mark.parametrize("config", configs(PLAIN), ids=lambda c: str(c)[10:])
def test_every_configuration(config: GemmConfig, cuda: str) -> None:
    """Whole tiles and parts of them, K of fewer and of more stages than there are."""
    for m, n, k in ((300, 552, 1000), (257, 264, 64), (1, 8, 8)):
        a, b = matrix(m, k, "row", cuda, m), matrix(k, n, "column", cuda, n)
        bias, c = random((n,), BF16, cuda, seed=3), random((m, n), BF16, cuda, seed=4)
        if config.accumulators > MOST_BUSY_SUMS:  # no room for elements of c
            c = torch.zeros_like(c)
            given: dict[str, Any] = {"bias": bias, "config": config}
        else:
            given = {"bias": bias, "c": c, "config": config}
        found = gemm(a, b, **given)
        compare(found, a, b, lambda x, c=c, bias=bias: x + c.to(x.dtype) + bias.to(x.dtype))  # type: ignore[misc]
        assert_bitwise(gemm(a, b, **given), found)


@pytest.mark.parametrize("config", configs(GATED), ids=lambda c: str(c)[10:])
def test_every_configuration_of_pairs(config: GemmConfig, cuda: str) -> None:
    a, b = matrix(300, 200, "row", cuda, 1), matrix(200, 1040, "column", cuda, 2)
    found = gemm(a, b, epilogue=[Gate("silu")], config=config)
    compare(found, a, b, lambda x: F.silu(x[:, ::2]) * x[:, 1::2])


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("tile", [(64, 64), (128, 128)])
def test_split_k_of_many_tiles(tile: tuple[int, int], splits: int, cuda: str) -> None:
    """Clusters that have several tiles use their memory for foreign sums again and again."""
    a, b = matrix(2000, 712, "row", cuda, 1), matrix(712, 4104, "column", cuda, 2)
    config = GemmConfig(*tile, 1, 1, split_k=splits)
    found = gemm(a, b, config=config)
    compare(found, a, b)
    for _ in range(20):
        assert_bitwise(gemm(a, b, config=config), found)


def test_out(device: str) -> None:
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 136, "column", device, 2)
    wide = torch.full((72, 200), torch.nan, dtype=BF16, device=device)
    out = wide[:, 8:144]
    assert gemm(a, b, out=out) is out
    compare(out, a, b)
    assert wide[:, :8].isnan().all() and wide[:, 144:].isnan().all()
    turned = torch.empty(136, 72, dtype=BF16, device=device).mT
    compare(gemm(a, b, out=turned), a, b)


def test_past_2_to_the_31_elements_KG_11(cuda: str) -> None:
    a, b = matrix(70000, 64, "row", cuda, 1), matrix(64, 32768, "column", cuda, 2)
    found = gemm(a, b)
    for rows in (slice(0, 64), slice(65500, 65600), slice(69936, 70000)):
        compare(found[rows], a[rows], b)


def test_long_K_KG_18(cuda: str) -> None:
    for m, n, k in ((512, 1024, 147456), (1538, 256, 2048)):
        a, b = matrix(m, k, "row", cuda, 1), matrix(k, n, "column", cuda, 2)
        compare(gemm(a, b), a, b)


def test_vectors_at_the_end_of_an_allocation_KG_09(cuda: str) -> None:
    a, b = matrix(136, 64, "row", cuda, 1), matrix(64, 1528, "column", cuda, 2)
    bias = torch.cat((random((1528,), F32, cuda, seed=3), torch.full((8,), torch.nan, device=cuda)))
    compare(gemm(a, b, bias=bias[:1528]), a, b, lambda x: x + bias[:1528].to(x.dtype))


def test_replays_read_device_scalars_KG_08(cuda: str) -> None:
    a, b = matrix(72, 64, "row", cuda, 1), matrix(64, 136, "column", cuda, 2)
    alpha, out = torch.ones(1, device=cuda), torch.empty(72, 136, dtype=BF16, device=cuda)
    gemm(a, b, alpha=alpha, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, alpha=alpha, out=out)
    for value in (1.0, -0.5):
        alpha.fill_(value)
        graph.replay()
        compare(out, a, b, lambda x, value=value: x * value)  # type: ignore[misc]


def test_the_same_bits_every_time(cuda: str) -> None:
    a, b = matrix(1000, 2048, "row", cuda, 1), matrix(2048, 1000, "column", cuda, 2)
    first = gemm(a, b)
    for _ in range(50):
        assert_bitwise(gemm(a, b), first)


def test_bad_operands_are_named(device: str) -> None:
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 136, "column", device, 2)
    with pytest.raises(ShapeError, match=r"a.shape\[-1\] is 64, b.shape\[-2\] is 32"):
        gemm(a, b[:32])
    with pytest.raises(UnsupportedError, match=r"a is float32.*torch.matmul"):
        gemm(a.float(), b.float())
    with pytest.raises(DTypeError, match=r"a is bfloat16, b is float16"):
        gemm(a, b.half())
    with pytest.raises(ShapeError, match=r"bias of AddVector has the shape \(8,\): .* \(136,\)"):
        gemm(a, b, bias=random((8,), BF16, device, seed=1))
    with pytest.raises(ShapeError, match=r"c of AddC has the shape \(1, 136\)"):
        gemm(a, b, c=random((1, 136), BF16, device, seed=1))
    with pytest.raises(DTypeError, match=r"activation 'swish' must be one of"):
        gemm(a, b, activation="swish")
    with pytest.raises(ShapeError, match=r"out has the shape \(72, 128\)"):
        gemm(a, b, out=torch.empty(72, 128, dtype=BF16, device=device))
    with pytest.raises(DTypeError, match=r"out_dtype is int32"):
        gemm(a, b, out_dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"scale_a has the shape \(3,\)"):
        gemm(a, b, scale_a=torch.ones(3, device=device))
    with pytest.raises(ShapeError, match=r"b.shape\[-1\] is 136: .* multiple of 16"):
        gemm(a, b, epilogue=[Gate("silu")])


def test_shapes_on_meta() -> None:
    a, b = (
        torch.empty(3, 72, 64, dtype=BF16, device="meta"),
        torch.empty(64, 128, dtype=BF16, device="meta"),
    )
    assert gemm(a, b).shape == (3, 72, 128)
    found = gemm(a, b, out_dtype=F32, epilogue=[Gate("silu")])
    assert found.shape == (3, 72, 64) and found.dtype == F32 and found.is_meta
    out = torch.empty(3, 72, 128, dtype=BF16, device="meta")
    assert gemm(a, b, out=out) is out


def test_gradients_raise(device: str) -> None:
    a, b = matrix(72, 64, "row", device, 1).requires_grad_(), matrix(64, 136, "column", device, 2)
    found = gemm(a, b)
    with pytest.raises(UnsupportedError, match=r"gradient"):
        found.sum().backward()
    with torch.no_grad():
        compare(gemm(a, b), a.detach(), b)


def test_compile_whole_graph(device: str) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    def step(a: Tensor, b: Tensor) -> Tensor:
        return gemm(a, b, alpha=0.5, activation="silu", out_dtype=F32) * 2

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 136, "column", device, 2)
    assert_bitwise(compiled(a, b), step(a, b))


def test_opcheck(device: str) -> None:
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 136, "column", device, 2)
    c, bias = random((72, 136), BF16, device, seed=3), random((136,), F32, device, seed=4)
    steps = [
        (Scale(), (0.5,)),
        (AddC("bfloat16", Kind.SCALAR), (c, 2.0)),
        (AddVector("float32"), (bias,)),
    ]
    torch.library.opcheck(autograd.gemm_fwd, autograd.arguments(a, b, steps, [BF16], False))


def test_tangents_raise(device: str) -> None:
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 136, "column", device, 2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            gemm(dual, b)


def test_out_shares_no_memory(device: str) -> None:
    a, b = matrix(64, 64, "row", device, 1), matrix(64, 64, "row", device, 2)
    for name, out in (("a", a), ("b", b.mT)):
        with pytest.raises(LayoutError, match=f"out shares memory with {name}"):
            gemm(a, b, out=out)
    with pytest.raises(LayoutError, match=r"out.stride\(0\) is 0"):
        gemm(a, b, out=a.new_empty(64).expand(64, 64))
    memory = random((65, 64), BF16, device, seed=3)
    with pytest.raises(LayoutError, match="out shares memory with c"):
        gemm(a, b, c=memory[:64], out=memory[1:])
    c = memory[:64]
    expected = gemm(a, b, c=c)
    assert gemm(a, b, c=c, out=c) is c
    assert_bitwise(c, expected)


@dataclass(frozen=True)
class Offset(Op):
    """Adds a vector of each matrix; not a field, but always with a batch."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("offset", Kind.ROW, "float32", batched=True),)

    def apply(self, x: Any, offset: Any) -> Any:
        return x + offset

    def reference(self, x: Tensor, offset: Tensor) -> Tensor:
        return x + offset


@pytest.mark.parametrize("batches", [1, 3])
def test_an_op_that_always_has_a_batch(device: str, batches: int) -> None:
    a, b = random((batches, 72, 64), BF16, device, seed=1), matrix(64, 136, "column", device, 2)
    offset = random((batches, 136), F32, device, seed=3)
    found = gemm(a, b, epilogue=[(Offset(), offset)])
    assert_bitwise(found, gemm(a, b, epilogue=[(AddVector("float32", batched=True), offset)]))


def test_epilogues_that_no_kernel_has(device: str) -> None:
    a, b = matrix(72, 64, "row", device, 1), matrix(64, 128, "column", device, 2)
    preact, wide = random((72, 256), BF16, device, seed=3), random((256,), F32, device, seed=4)
    with pytest.raises(UnsupportedError, match="operands of AddVector"):
        gemm(a, b, epilogue=[(GateGrad("silu", "bfloat16"), preact), (AddVector("float32"), wide)])
    with pytest.raises(UnsupportedError, match="stores a copy or reduces"):
        gemm(a, b, epilogue=[RowReduce("sum")])


def test_batches_of_one_and_of_more_are_told_apart(device: str) -> None:
    """The same strides, but one matrix for all, or one for each."""
    a, b = random((3, 72, 64), BF16, device, seed=1), random((3, 64, 136), BF16, device, seed=2)
    for first in (a[:1], a, a[:1]):
        expected = torch.cat([gemm(first[i % len(first)], b[i])[None] for i in range(3)])
        assert_bitwise(gemm(first, b), expected)


def test_default_dtype_changes_nothing(device: str) -> None:
    a, b = matrix(16, 4096, "row", device, 1), matrix(4096, 136, "column", device, 2)
    expected = gemm(a, b, split_k=4)
    torch.set_default_dtype(BF16)
    try:
        assert_bitwise(gemm(a, b, split_k=4), expected)
    finally:
        torch.set_default_dtype(F32)


@dataclass(frozen=True)
class AtMost(Op):
    """min(x, limit)."""

    limit: float

    def apply(self, x: Any) -> Any:
        import cutlass

        return cutlass.min(x, cutlass.Float32(self.limit))

    def reference(self, x: Tensor) -> Tensor:
        return x.clamp(max=self.limit)


@pytest.mark.parametrize("limit", [math.inf, 0.5, -math.inf])
def test_fields_of_an_op_reach_the_operator(limit: float) -> None:
    a, b = matrix(72, 64, "row", "cpu", 1), matrix(64, 136, "column", "cpu", 2)
    assert_bitwise(gemm(a, b, epilogue=[AtMost(limit)]), gemm(a, b).clamp(max=limit))
