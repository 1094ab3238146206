"""Vectors that an epilogue gives beside D: what rows and columns are reduced to, and values of them."""

import math

import pytest
import torch
from torch import Tensor

from quack_core.errors import DTypeError, ShapeError, UnsupportedError
from quack_core.gemm.epilogue import (
    AddVector,
    ColumnReduce,
    Gate,
    Kind,
    RowReduce,
    SelectColumn,
    SelectRow,
)
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_gemm import autograd, check, gemm, heuristic
from quack_gemm.api import compute
from quack_gemm.spec import GemmSpec

BF16, F32 = torch.bfloat16, torch.float32


def reduced(name: str, x: Tensor, size: Tensor, over: int) -> tuple[Tensor, Tensor]:
    """What a reduction of float64 values gives, and a bound of a float32 one's error.

    Args:
        size: of each value's terms, without their signs.
    """
    right, terms = {
        "sum": (x.sum(over), size.sum(over)),
        "sum_squares": (x.square().sum(over), 2 * size.square().sum(over)),
        "max": (x.amax(over), size.amax(over)),
        "lse": (x.logsumexp(over), size.amax(over) + 1),
    }[name]
    return right, 2.0**-18 * terms  # 64 products, each a rounding


@pytest.mark.parametrize("op", [RowReduce, ColumnReduce])
@pytest.mark.parametrize("size", [(150, 40), (150, 1001), (1, 136), (5, 8)])
@pytest.mark.parametrize("name", ["sum", "sum_squares", "max", "lse"])
def test_reductions(
    name: str, size: tuple[int, int], op: type[RowReduce | ColumnReduce], device: str
) -> None:
    """What lies beyond M and N does not count, however the tiles lie."""
    m, n = size
    a, b = random((m, 64), BF16, device, seed=1), random((n, 64), BF16, device, seed=2).mT
    bias = random((n,), F32, device, seed=3) + 3
    steps = [(AddVector("float32"), (bias,)), (op(name), ())]
    _, found = compute(a, b, steps, [BF16])
    x = a.double() @ b.double() + bias.double()
    size = a.double().abs() @ b.double().abs() + bias.double().abs()
    right, allowed = reduced(name, x, size, -1 if op is RowReduce else -2)
    assert found.dtype == F32 and found.shape == right.shape
    assert ((found - right).abs() <= allowed).all()


@pytest.mark.parametrize("batches", [(3, 3), (3, 0), (1, 1)])
def test_reductions_of_batches(batches: tuple[int, int], device: str) -> None:
    """Both at once, and D beside them."""
    shapes = [(150, 64), (136, 64)]
    a, b = (
        random((count, *shape) if count else shape, BF16, device, seed=i)
        for i, (count, shape) in enumerate(zip(batches, shapes, strict=True))
    )
    steps = [(RowReduce("sum"), ()), (ColumnReduce("lse"), ()), (ColumnReduce("max"), ())]
    d, *found = compute(a, b.mT, steps, [F32])
    x, size = a.double() @ b.mT.double(), a.double().abs() @ b.mT.double().abs()
    assert d.shape == x.shape
    for one, name, over in zip(found, ("sum", "lse", "max"), (-1, -2, -2), strict=True):
        right, allowed = reduced(name, x, size, over)
        assert one.shape == right.shape
        assert ((one - right).abs() <= allowed).all()


@pytest.mark.parametrize("op", [RowReduce, ColumnReduce])
def test_every_configuration_reduces(op: type[RowReduce | ColumnReduce], cuda: str) -> None:
    """Tiles of all shapes, swapped operands, ping-pong; the same bits again."""
    m, n = 300, 552
    a, b = random((m, 64), BF16, cuda, seed=1), random((n, 64), BF16, cuda, seed=2).mT
    x, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    for name in ("sum", "lse"):
        right, allowed = reduced(name, x, size, -1 if op is RowReduce else -2)
        steps = [(op(name), ())]
        spec = GemmSpec("bfloat16", "bfloat16", "bfloat16", epilogue=(op(name),))
        for config in heuristic.candidates(spec):
            _, found = compute(a, b, steps, [BF16], config=config)
            assert ((found - right).abs() <= allowed).all(), config
            assert_bitwise(compute(a, b, steps, [BF16], config=config)[1], found)


@pytest.mark.parametrize("m,n,k", [(0, 16, 8), (16, 0, 8), (16, 8, 0)])
def test_reductions_of_nothing(m: int, n: int, k: int, device: str) -> None:
    """A sum of nothing is 0, and its logarithm -inf, as is the largest of nothing."""
    a, b = (torch.ones(s, dtype=BF16, device=device) for s in ((m, k), (k, n)))
    ops = [kind(name) for kind in (RowReduce, ColumnReduce) for name in ("sum", "max", "lse")]
    _, *found = compute(a, b, [(op, ()) for op in ops], [BF16])
    x = torch.zeros(m, n, device=device)
    for one, op in zip(found, ops, strict=True):
        over = -1 if isinstance(op, RowReduce) else -2
        count = x.shape[over]
        value = {"sum": 0.0, "max": 0.0 if count else -math.inf, "lse": math.log(count or 1)}
        value |= {} if count else {"lse": -math.inf}
        assert torch.allclose(one, torch.full_like(x.sum(over), value[op.name])), op


def test_a_reduction_passes_opcheck(device: str) -> None:
    a, b = random((2, 72, 64), BF16, device, seed=1), random((64, 136), BF16, device, seed=2)
    steps = [(RowReduce("lse"), ()), (ColumnReduce("sum"), ())]
    torch.library.opcheck(autograd.gemm_fwd, autograd.arguments(a, b, steps, [BF16], False))
    found = compute(a.to("meta"), b.to("meta"), steps, [BF16])
    assert [tuple(x.shape) for x in found] == [(2, 72, 136), (2, 72), (2, 136)]


# --- values that an index names


def indices(count: int, size: int, dtype: torch.dtype, device: str, *more: int) -> Tensor:
    """Of which some are outside; beyond int32 as well where they can be."""
    generator = torch.Generator().manual_seed(count)
    found = torch.randint(0, size, (*more, count), generator=generator)
    outside = [-100, size, -1] + ([2**32, 2**32 + 1, -(2**40)] if dtype == torch.int64 else [])
    for i, value in enumerate(outside):
        found[..., 3 + 2 * i :: 17] = value
    return found.to(dtype).to(device)


def selected(x: Tensor, index: Tensor, over: int) -> Tensor:
    """By its definition, one at a time."""
    rows = x if over == -1 else x.mT
    lists = index.expand(rows.shape[:-1]).reshape(-1).tolist()
    flat = rows.reshape(-1, rows.shape[-1])
    found = [
        row[i] if 0 <= i < len(row) else row.new_zeros(())
        for row, i in zip(flat, lists, strict=True)
    ]
    return torch.stack(found).reshape(rows.shape[:-1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", [SelectColumn, SelectRow])
@pytest.mark.parametrize("size", [(150, 40), (150, 1000), (1, 136), (5, 8)])
def test_values_are_those_of_d(
    size: tuple[int, int], op: type[SelectColumn | SelectRow], dtype: torch.dtype, device: str
) -> None:
    m, n = size
    a, b = random((m, 64), BF16, device, seed=1), random((n, 64), BF16, device, seed=2).mT
    bias = random((n,), F32, device, seed=3)
    count, of, over = (m, n, -1) if op is SelectColumn else (n, m, -2)
    index = indices(count, of, dtype, device)
    name = str(dtype).removeprefix("torch.")
    steps = [(AddVector("float32"), (bias,)), (op(name), (index,))]
    d, found = compute(a, b, steps, [F32])
    assert found.dtype == F32
    assert_bitwise(found, selected(d, index, over) + 0.0)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_values_of_batches(batches: int, batched: bool, device: str) -> None:
    """As a linear layer with a cross-entropy behind it wants them."""
    a = random((batches, 72, 64), BF16, device, seed=1)
    b = random((136, 64), BF16, device, seed=2).mT
    more = (batches,) if batched else ()
    target = indices(72, 136, torch.int64, device, *more)
    rows = indices(136, 72, torch.int32, device, *more)
    steps = [
        (RowReduce("lse"), ()),
        (SelectColumn(batched=batched), (target,)),
        (SelectRow("int32", batched), (rows,)),
    ]
    d, lse, logits, values = compute(a, b, steps, [F32])
    assert_bitwise(logits, selected(d, target, -1) + 0.0)
    assert_bitwise(values, selected(d, rows, -2) + 0.0)
    assert torch.allclose(lse, d.logsumexp(-1), rtol=2.0**-18, atol=2.0**-18)


@pytest.mark.parametrize("op", [SelectColumn, SelectRow])
def test_every_configuration_selects(op: type[SelectColumn | SelectRow], cuda: str) -> None:
    a, b = random((300, 64), BF16, cuda, seed=1), random((552, 64), BF16, cuda, seed=2).mT
    count, of, over = (300, 552, -1) if op is SelectColumn else (552, 300, -2)
    index = indices(count, of, torch.int64, cuda)
    spec = GemmSpec("bfloat16", "bfloat16", "float32", epilogue=(op(),))
    for config in heuristic.candidates(spec):
        d, found = compute(a, b, [(op(), (index,))], [F32], config=config)
        assert_bitwise(found, selected(d, index, over) + 0.0)


def test_what_is_not_selected_does_not_matter(device: str) -> None:
    """NaN and Inf of other columns stay there."""
    a, b = random((24, 64), BF16, device, seed=1), random((40, 64), BF16, device, seed=2).mT
    bias = torch.zeros(40, device=device)
    bias[7], bias[9] = torch.nan, torch.inf
    index = torch.full((24,), 5, device=device)
    index[3], index[4] = 7, 9
    d, found = compute(a, b, [(AddVector("float32"), (bias,)), (SelectColumn(), (index,))], [F32])
    assert found[3].isnan() and found[4].isinf()
    keep = torch.arange(24, device=device) > 4
    assert_bitwise(found[keep], d[keep, 5])


def test_a_selection_passes_opcheck(device: str) -> None:
    a, b = random((72, 64), BF16, device, seed=1), random((64, 136), BF16, device, seed=2)
    steps = [
        (SelectColumn(), (indices(72, 136, torch.int64, device),)),
        (SelectRow("int32"), (indices(136, 72, torch.int32, device),)),
    ]
    torch.library.opcheck(autograd.gemm_fwd, autograd.arguments(a, b, steps, [BF16], False))
    empty = compute(a[:0], b, [(SelectRow(), (torch.zeros(136, device=device).long(),))], [BF16])
    assert_bitwise(empty[1], torch.zeros(136, device=device))


def test_selections_that_are_refused(device: str) -> None:
    a, b = (
        random((72, 64), BF16, device, seed=1),
        random((64, 128), BF16, device, seed=2).mT.contiguous().mT,
    )
    index = torch.zeros(72, dtype=torch.int64, device=device)
    with pytest.raises(DTypeError, match="index of SelectColumn is int64: it must be int32"):
        check.product(a, b, [(SelectColumn("int32"), (index,))], [BF16])
    with pytest.raises(ShapeError, match=r"index of SelectRow has the shape \(72,\): .* \(128,\)"):
        check.product(a, b, [(SelectRow(), (index,))], [BF16])
    with pytest.raises(UnsupportedError, match="SelectColumn beside an op with pairs"):
        check.product(a, b, [(SelectColumn(), (index,)), (Gate("silu"), ())], [BF16])
    with pytest.raises(UnsupportedError, match="stores a copy or reduces"):
        gemm(a, b, epilogue=[(SelectColumn(), index)])
    assert SelectColumn().operands[0].kind == Kind.COLUMN
