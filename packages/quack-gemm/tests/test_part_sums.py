"""The kernel that adds parts of K, run on the CPU thread by thread: sums, epilogues, columns, stores."""

from typing import Any

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

from quack_core.gemm.epilogue import (
    AddC,
    AddVector,
    Gate,
    GateGrad,
    Kind,
    Op,
    Scale,
    StoreAux,
)
from quack_gemm import reference
from quack_gemm.config import SumConfig
from quack_gemm.part_sums import BLOCK_SUMS, PartSums
from quack_gemm.spec import GemmSpec, SumSpec

BF16, F32 = torch.bfloat16, torch.float32
B = "bfloat16"
COUNT = 11
"""Parts: more than a thread takes at a time."""


class Threads:
    """What all threads of a launch do, one after the other."""

    def __init__(self, spec: SumSpec):
        self.sums = PartSums(spec, SumConfig())

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        outputs: tuple,
        operands: tuple | None,
        sizes: cutlass.Constexpr[tuple[int, int, int]],  # L, rows and columns, as in memory
    ):
        batches, rows, cols = sizes
        outs = tuple(self.sums.matrices(out) for out in outputs)
        given, seen = self.sums.given(operands), self.sums.matrices(parts)
        across = -(-cols // self.sums.sums)
        for work in range(batches * rows * across):
            matrix, inside = work // (rows * across), work % (rows * across)
            row, unit = Int32(inside // across), Int32(inside % across)
            runs = self.sums.runs(unit, Int32(cols), self.sums.spec.gated)
            found = self.sums.add(seen, row, runs, matrix * COUNT, (matrix + 1) * COUNT)
            self.sums.finish(found, outs, given, row, unit, Int32(cols), matrix)


def view(x: Any) -> Any:
    return from_dlpack(x, assumed_align=16) if isinstance(x, Tensor) else x


def summed(spec: GemmSpec, parts: Tensor, given: list[Any], shape: tuple[int, ...]) -> list[Tensor]:
    """All outputs: the result of the threads.

    Args:
        parts: float32 (L * parts, M, N).
        shape: of the product.
    """
    *batch, m, n = shape
    turned = spec.d_major == "column"
    places, outputs = [], []
    for i, name in enumerate(spec.outputs):
        rows, cols = (spec.cols(i, n), m) if turned else (m, spec.cols(i, n))
        place = torch.full((*batch, rows, -(-cols // 8) * 8), torch.nan, dtype=getattr(torch, name))
        places.append((place, cols))
        outputs.append(place[..., :cols].mT if turned else place[..., :cols])
    rows, cols = (n, m) if turned else (m, n)
    sizes = (*(batch or [1]), rows, cols)
    operands = tuple(view(x) for x in given) or None
    Threads(SumSpec(spec))(view(parts), tuple(view(out) for out in outputs), operands, sizes)
    assert all(place[..., cols:].isnan().all() for place, cols in places)  # nothing beyond D
    return outputs


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Small integers: their sums and products have no roundings in float32."""
    found = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed))
    return found.to(dtype)


def split(shape: tuple[int, ...], major: str) -> tuple[Tensor, Tensor]:
    """Parts as the product's kernel leaves them, NaN beyond D in rows; and their sum."""
    *batch, m, n = shape
    count = COUNT * (batch[0] if batch else 1)
    rows, cols = (n, m) if major == "column" else (m, n)
    parts = torch.full((count, rows, -(-cols // 4) * 4), torch.nan)
    parts[..., :cols] = draw(count, rows, cols, seed=1)
    inside = parts[..., :cols]
    if major == "column":
        parts, inside = parts.mT, inside.mT
    return parts, inside.reshape(*batch, COUNT, m, n).sum(-3)


Case = tuple[tuple[Op, ...], list[Any], dict[str, Any]]
ROWS, COLS = 5, 22
"""Columns that are no whole number of vectors."""
CASES: dict[str, Case] = {
    "none": ((), [], {}),
    "float32": ((), [], {"d": "float32"}),
    "column-major": ((), [], {"d_major": "column"}),
    "numbers and vectors": (
        (Scale(), Scale(Kind.COLUMN, "a"), Scale(Kind.ROW, "b"), Scale(Kind.DEVICE_SCALAR, "c")),
        [0.5, draw(ROWS, seed=2), draw(COLS, seed=3), torch.tensor([2.0])],
        {"d": "float32"},
    ),
    "numbers and vectors, column-major": (
        (Scale(), Scale(Kind.COLUMN, "a"), Scale(Kind.ROW, "b")),
        [0.5, draw(ROWS, seed=2), draw(COLS, seed=3)],
        {"d_major": "column"},
    ),
    "a matrix and a bias": (
        (AddC(B, Kind.SCALAR), AddVector(B)),
        [draw(ROWS, COLS + 1, dtype=BF16, seed=2)[:, :COLS], 2.0, draw(COLS, dtype=BF16, seed=3)],
        {},
    ),
    "a matrix and a bias, column-major": (
        (AddC(B), AddVector(B)),
        [draw(ROWS, COLS, dtype=BF16, seed=2), draw(COLS, dtype=BF16, seed=3)],
        {"d_major": "column"},
    ),
    "copies": ((StoreAux("float32"), Scale(), StoreAux(B)), [3.0], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_epilogues(name: str) -> None:
    ops, given, fields = CASES[name]
    check((ROWS, COLS), ops, given, **fields)


PAIRS: dict[str, Case] = {
    "gates": ((Gate("relu"),), [], {}),
    "gates, a bias, a copy": (
        (AddVector(B), Scale(Kind.COLUMN, "a"), StoreAux(B), Gate("relu"), Scale()),
        [draw(48, dtype=BF16, seed=2), draw(ROWS, seed=3), 0.5],
        {},
    ),
    "gates, float32": ((StoreAux("float32"), Gate("identity")), [], {"d": "float32"}),
    "gradients": ((GateGrad("relu", B),), [draw(ROWS, 96, dtype=BF16, seed=2)], {}),
    "gradients, a copy": (
        (StoreAux("float32"), GateGrad("identity", B)),
        [draw(ROWS, 96, dtype=BF16, seed=2)],
        {"d": "float32"},
    ),
}


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str, concat: bool) -> None:
    ops, given, fields = PAIRS[name]
    check((ROWS, 48), ops, given, concat=concat, **fields)


def test_batches() -> None:
    ops = (AddC(B, None, batched=True), AddVector(B, Kind.ROW, batched=True), AddC(B))
    given = [draw(2, ROWS, COLS, dtype=BF16, seed=2), draw(2, COLS, dtype=BF16, seed=3)]
    given.append(draw(ROWS, COLS, dtype=BF16, seed=4))
    check((2, ROWS, COLS), ops, given, a_batched=True)


def check(shape: tuple[int, ...], ops: tuple[Op, ...], given: list[Any], **fields: Any) -> None:
    """Against the definition, on the sum of the parts."""
    spec = GemmSpec(B, B, **({"d": B} | fields), epilogue=ops)
    parts, product = split(shape, spec.d_major)
    steps, rest = [], list(given)
    for op in ops:
        count = len(op.operands)
        steps.append((op, tuple(rest[:count])))
        rest = rest[count:]
    dtypes = [getattr(torch, name) for name in spec.outputs]
    # A product with ones: a column of it is what was summed.
    eye = torch.eye(shape[-1], dtype=torch.float64)
    expected = reference.forward(product.double(), eye, steps, dtypes, spec.concat)
    for found, right in zip(summed(spec, parts, given, shape), expected, strict=True):
        assert torch.equal(found, right)  # zeros may differ in sign


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_each_column_belongs_to_one_thread(paired: bool, concat: bool) -> None:
    spec = GemmSpec(B, B, B, epilogue=(Gate("silu"),), concat=concat)
    sums = PartSums(SumSpec(spec), SumConfig())
    width, each = 96, BLOCK_SUMS * (1 + paired)
    owners: list[int] = []
    for unit in range(width // each):
        for start, places in sums.runs(unit, width, paired):  # type: ignore[arg-type]
            assert start % BLOCK_SUMS == 0
            owners += range(start, start + len(places))
    assert sorted(owners) == list(range(width))


def test_slices_have_parts_enough() -> None:
    assert [SumConfig.of(parts).slices for parts in (2, 8, 15, 16, 31, 32, 63, 64, 128, 1000)] == [
        1, 1, 1, 2, 2, 4, 4, 8, 8, 8,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="slices=3: must be 1, 2, 4 or 8"):
        SumConfig(3)
