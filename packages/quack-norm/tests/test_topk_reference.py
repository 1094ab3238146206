"""Top-k on the CPU against a sort in plain Python, bit for bit; gradients; what is refused.

Names carry the ids of known faults of the field.
"""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_core.errors import DeviceError, DTypeError, ShapeError
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.ops.topk import check, reference

pytestmark = pytest.mark.exhaustive

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan


class TopK(torch.autograd.Function):
    """The reference as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
        values, indices = reference.forward(x, k, softmax)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices, values if softmax else None)
        ctx.n, ctx.dtype = x.shape[-1], x.dtype
        return values, indices

    @staticmethod
    def backward(ctx: Any, dvalues: Tensor, _: Any) -> Any:  # type: ignore[override]
        operands = (dvalues, *ctx.saved_tensors, ctx.n, ctx.dtype)
        if ctx.dtype != torch.float64:
            check.backward(*operands)
        return reference.backward(*operands), None, None


def ours(x: Tensor, k: int, softmax: bool = False) -> tuple[Tensor, Tensor]:
    check.forward(x, k, softmax)
    values, indices = TopK.apply(x, k, softmax)
    assert (values.dtype, indices.dtype) == (x.dtype, torch.int64)
    assert values.shape == indices.shape == (*x.shape[:-1], k)
    assert values.is_contiguous() and indices.is_contiguous()
    return values, indices


def order(row: list[float]) -> list[int]:
    """Indices of a row, largest first: NaN, then by value (-0.0 == 0.0), then by index."""
    return sorted(
        range(len(row)), key=lambda i: (row[i] == row[i], -row[i] if row[i] == row[i] else 0, i)
    )


def judge(x: Tensor, k: int) -> None:
    """Indices as the sort has them, and values that are those elements in every bit."""
    values, indices = ours(x, k)
    expected = [order(row)[:k] for row in x.flatten(0, -2).tolist()]
    assert indices.flatten(0, -2).tolist() == expected
    assert_bitwise(values, torch.gather(x, -1, indices))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_n_20_500_random_rows(dtype: torch.dtype) -> None:
    """The size at which packing an index into the value gave wrong ones in half of the rows."""
    judge(random((500, 256), dtype, seed=1), 128)


@pytest.mark.parametrize("k", [1, 2, 7, 64, 99, 100])
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_any_k_and_signs(shift: float, k: int) -> None:
    judge(random((20, 100), F32, seed=2, shift=shift), k)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 33, 1000, 4096, 5001])
def test_any_width(n: int) -> None:
    for k in {1, (n + 1) // 2, n}:
        judge(random((3, n), BF16, seed=3), k)


def test_ks_19_ties_go_to_the_smaller_index() -> None:
    judge(torch.full((4, 16), 2.5), 8)
    assert ours(torch.full((1, 16), 2.5), 8)[1].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    few = torch.randint(-2, 3, (50, 200), generator=torch.Generator().manual_seed(4))
    for k in (1, 8, 77, 200):
        judge(few.float(), k)


def test_ks_19_rows_of_nan() -> None:
    values, indices = ours(torch.full((2, 40), NAN), 8)
    assert indices.tolist() == [list(range(8))] * 2 and values.isnan().all()
    payloads = torch.tensor([[0x7FC00001, 0x3F800000, -0x400000, 0x7F800001, 0x7F800000]])
    x = payloads.to(torch.int32).view(F32)  # NaN of both signs, quiet and signalling, 1 and inf
    assert ours(x, 5)[1].tolist() == [[0, 2, 3, 4, 1]]
    assert torch.equal(ours(x, 5)[0].view(torch.int32), x.view(torch.int32)[:, [0, 2, 3, 4, 1]])


TINY = 2.0**-149
EXTREMES = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, TINY, -TINY, 3.4e38, -3.4e38, 2.0**-126]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("k", [1, 5, 12, 24])
def test_extremes_in_any_order(k: int, dtype: torch.dtype) -> None:
    """NaN, infinities, zeros of both signs and subnormals, each of them twice."""
    generator = torch.Generator().manual_seed(5)
    twice = torch.tensor(EXTREMES * 2).to(dtype)
    judge(torch.stack([twice[torch.randperm(24, generator=generator)] for _ in range(40)]), k)


def test_zeros_of_both_signs_are_equal_and_keep_their_sign() -> None:
    values, indices = ours(torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]]), 4)
    assert indices.tolist() == [[1, 2, 3, 4]]
    assert torch.signbit(values).tolist() == [[True, False, True, False]]


def test_masked_logits_give_distinct_indices() -> None:
    """More elements wanted than are finite: -inf is an element like others."""
    x = torch.full((3, 64), -INF)
    x[:, 40], x[1, 7], x[2, 63] = 1.0, INF, -1.0
    judge(x, 16)
    assert all(len(set(row)) == 16 for row in ours(x, 16)[1].tolist())


@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 33), (2, 1, 2, 33)], ids=str)
def test_any_rank_and_strides(shape: tuple[int, ...], layout: Layout) -> None:
    x = random(shape, F32, seed=6, layout=layout)
    before = x.clone()
    judge(x, 9)
    assert_bitwise(x, before)
    assert_bitwise(ours(x[0, ..., :], 9)[0], ours(x, 9)[0][0])


def test_one_row_and_none() -> None:
    assert ours(torch.tensor([1.0, 3.0, 2.0]), 2)[1].tolist() == [1, 2]
    for shape in ((0, 8), (3, 0, 8)):
        x = torch.zeros(shape, requires_grad=True)
        for softmax in (False, True):
            values = ours(x, 4, softmax)[0]
            assert torch.autograd.grad(values.sum(), x)[0].shape == shape


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_gradients_are_derivatives(k: int, softmax: bool) -> None:
    """Finite differences in float64; no two elements are close."""
    x = torch.randperm(24, generator=torch.Generator().manual_seed(7)).double().view(2, 2, 6)
    x = (x / 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: TopK.apply(x, k, softmax)[0], (x,))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
def test_the_gradient_goes_to_the_indices(layout: Layout) -> None:
    x = random((6, 40), BF16, seed=8).requires_grad_()
    dvalues = random((6, 7), BF16, seed=9, layout=layout)
    values, indices = ours(x, 7)
    (dx,) = torch.autograd.grad(values, x, dvalues)
    expected = [[0.0] * 40 for _ in range(6)]
    for row, (at, found) in enumerate(zip(indices.tolist(), dvalues.tolist(), strict=True)):
        for index, value in zip(at, found, strict=True):
            expected[row][index] = value
    assert_bitwise(dx, torch.tensor(expected, dtype=BF16))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(256, 128), (64, 8), (9, 9), (5, 1)])
def test_softmax_and_its_gradient(n: int, k: int, dtype: torch.dtype) -> None:
    """The forward as exact as float32 is; the backward as torch's, which has rounded values too."""
    x, dvalues = random((12, n), dtype, seed=10, scale=3.0), random((12, k), dtype, seed=11)
    leaf = x.clone().requires_grad_()
    values, indices = ours(leaf, k, True)
    assert_bitwise(indices, ours(x, k)[1])
    (dx,) = torch.autograd.grad(values, leaf, dvalues)
    right, base = {}, {}
    for kind, into in ((torch.float64, right), (dtype, base)):
        wide = x.to(kind).requires_grad_()
        into["values"] = wide.gather(-1, indices).softmax(-1)
        (into["dx"],) = torch.autograd.grad(into["values"], wide, dvalues.to(kind))
    baseline = x.float().gather(-1, indices).softmax(-1).to(dtype)
    assert_accurate(values, right["values"].detach(), baseline, name="values")
    spread = x.double().gather(-1, indices)  # p errs as much as the argument of exp does
    spread = 2 + spread.amax(-1, keepdim=True) - spread.amin(-1, keepdim=True)
    p, size = right["values"].detach(), dvalues.double().abs()
    terms = spread * p * (size + (p * size).sum(-1, keepdim=True))
    terms = torch.zeros_like(right["dx"]).scatter(-1, indices, terms)
    assert_accurate(dx, right["dx"], base["dx"], kind="columns", terms=terms, name="dx")
    if k == 1:
        assert_bitwise(values.detach(), torch.ones_like(values))
        assert_bitwise(dx.abs(), torch.zeros_like(dx))


def test_ks_02_softmax_far_from_zero() -> None:
    x = torch.tensor([[0.0, 1.0, 0.0, -9.0]]) - 1e7
    expected = [1 / (1 + 2 / math.e), 1 / (2 + math.e), 1 / (2 + math.e)]
    found = ours(x, 3, True)[0].double()
    assert abs(found - torch.tensor([expected]).double()).max() <= 4 * torch.finfo(F32).eps


def test_ks_04_softmax_of_infinite_and_nan_rows() -> None:
    """NaN across such a row, neighbours untouched; -inf among numbers is zero."""
    rows = [[-INF] * 4, [1, INF, 0, 2], [1, NAN, 0, 2], [-INF, 0, -INF, -INF], [1, 1, -INF, -9]]
    values, indices = ours(torch.tensor(rows), 2, True)
    assert values[:3].isnan().all()
    assert values[3:].tolist() == [[1, 0], [0.5, 0.5]]
    assert indices.tolist() == [[0, 1], [1, 3], [1, 3], [1, 0], [0, 1]]


@pytest.mark.parametrize(("n", "k"), [(100, 40), (50000, 50000)])
def test_kn_15_rows_do_not_depend_on_the_batch(n: int, k: int) -> None:
    x, dvalues = random((4, n), F32, seed=12), random((4, k), F32, seed=13)

    def run(at: slice) -> tuple[Tensor, ...]:
        leaf = x[at].clone().requires_grad_()
        values, indices = ours(leaf, k, True)
        return values.detach(), indices, torch.autograd.grad(values, leaf, dvalues[at])[0]

    together = run(slice(None))
    for row in range(4):
        for whole, alone in zip(together, run(slice(row, row + 1)), strict=True):
            assert_bitwise(whole[row : row + 1], alone)


X, AT = torch.zeros(4, 8), torch.zeros(4, 3, dtype=torch.int64)
MISTAKES: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
    (DTypeError, "x is list: it must be a tensor", ([1.0], 1, False)),
    (DTypeError, "x is float64: it must be one of float32, bfloat16", (X.double(), 1, False)),
    (DTypeError, "x is int64", (X.long(), 1, False)),
    (ShapeError, "x has no dimension", (X[0, 0], 1, False)),
    (DTypeError, "k is float: it must be an int", (X, 2.0, False)),
    (DTypeError, "k is bool", (X, True, False)),
    (ShapeError, r"k is 0, x.shape\[-1\] is 8: k must be from 1 to", (X, 0, False)),
    (ShapeError, r"k is 9, x.shape\[-1\] is 8", (X, 9, True)),
    (ShapeError, r"k is 1, x.shape\[-1\] is 0", (X[:, :0], 1, False)),
    (DTypeError, "softmax is int: it must be True or False", (X, 1, 0)),
    (DTypeError, "dvalues is int64: it must be one of", (AT, AT, None, 8, F32)),
    (ShapeError, r"dvalues has shape \(4, 2\).*\(4, 3\)", (X[:, :2], AT, None, 8, F32)),
    (ShapeError, r"softmax_values has shape \(4, 8\)", (X[:, :3], AT, X, 8, F32)),
    (DTypeError, "indices are int32: they must be int64", (X[:, :3], AT.int(), None, 8, F32)),
    (ShapeError, r"indices have shape \(4, 3\), n is 2", (X[:, :3], AT, None, 2, F32)),
    (DTypeError, "dtype of dx is int32", (X[:, :3], AT, None, 8, torch.int32)),
]


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(("error", "says", "wrong"), MISTAKES, ids=lambda each: str(each)[:30])
def test_mistakes_are_explained(
    error: type[Exception], says: str, wrong: tuple[Any, ...], place: str
) -> None:
    moved = [each.to(place) if isinstance(each, Tensor) else each for each in wrong]
    with pytest.raises(error, match=says):
        (check.forward if len(wrong) == 3 else check.backward)(*moved)


def test_kl_02_mixed_devices_raise() -> None:
    with pytest.raises(DeviceError, match="dvalues is on meta, indices on cpu.*on one device"):
        check.backward(X[:, :3].to("meta"), AT, None, 8, F32)


def test_kl_05_neither_the_dsl_nor_triton_is_loaded() -> None:
    modules = [f"quack_norm.ops.{name}" for name in ("cross_entropy", "topk")]
    code = "import sys, " + ", ".join(f"{m}.check, {m}.reference" for m in modules)
    code += "\nprint([m for m in ('cutlass', 'triton', 'torch._dynamo') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
