"""The walk over an epilogue: which sums and operands an op gets, and what is stored when."""

from dataclasses import dataclass

import pytest

from quack_core.gemm import epilogue as epi
from quack_core.gemm import visit
from quack_core.gemm.epilogue import Gate, Kind, Op, Operand, StoreAux
from quack_core.gemm.sm90 import fragment, store

SUMS = [float(i) for i in range(16)]
"""Of a thread in 32 columns."""


@dataclass(frozen=True)
class Plus(Op):
    """x + what operands say, weighted by their place among the op's arguments."""

    names: tuple[str, ...]

    @property
    def operands(self):
        return tuple(Operand(name, Kind.TILE) for name in self.names)

    def apply(self, x, *operands):
        assert len(operands) == len(self.names)
        return x + sum(value * (i + 1) for i, value in enumerate(operands))


@dataclass(frozen=True)
class Pair(Op):
    """100 * gate + up."""

    pairs = True

    def apply(self, x, *operands):
        gate, up = x
        return 100 * gate + up


@dataclass(frozen=True)
class Times(Op):
    factor: float

    def apply(self, x, *operands):
        return x * self.factor


def never(which, i):
    raise AssertionError(f"operand {which} of sum {i}: there is none")


def test_no_ops_give_the_sums():
    assert list(visit.outputs((), SUMS, never)) == [(0, SUMS)]


def test_operands_are_numbered_over_all_ops():
    asked = []

    def operand(which, i):
        asked.append((which, i))
        return 1000.0 * (which + 1) + i

    ops = (Plus(("a", "b")), Times(2.0), Plus(("c",)))
    ((number, found),) = visit.outputs(ops, SUMS, operand)
    assert number == 0
    assert found == [2 * (x + 1000 + i + 2 * (2000 + i)) + 3000 + i for i, x in enumerate(SUMS)]
    assert sorted(set(asked)) == [(which, i) for which in range(3) for i in range(len(SUMS))]
    assert [one.name for one in epi.operands(ops)] == ["a", "b", "c"]


def test_copies_come_as_soon_as_they_are_known():
    ops = (StoreAux("bfloat16"), Times(2.0), StoreAux("float32"), Times(3.0))
    found = list(visit.outputs(ops, SUMS, never))
    assert found == [(1, SUMS), (2, [2 * x for x in SUMS]), (0, [6 * x for x in SUMS])]


def test_pairs_are_sums_of_neighbouring_blocks_of_eight_columns():
    found = dict(visit.outputs((StoreAux("bfloat16"), Pair(), Times(2.0)), SUMS, never))
    assert found[1] == SUMS
    gates = [i for i in range(16) if fragment.place(i)[1] // fragment.PAIR % 2 == 0]
    assert found[0] == [2.0 * (100 * SUMS[i] + SUMS[i + 4]) for i in gates]
    for n, i in enumerate(gates):  # the pair's place in D: same row, same column of its block
        row, col = fragment.place(i)
        assert fragment.place(i + 4) == (row, col + fragment.PAIR)
        assert fragment.place(n) == (row, col // 4 * 2 + col % 2)


def test_operands_behind_pairs_are_those_of_columns_of_d():
    ops = (Plus(("before",)), Pair(), Plus(("behind",)))
    ((_, found),) = visit.outputs(ops, SUMS, lambda which, i: 0.0 if which == 0 else float(i))
    assert found == [
        100 * g + u + n
        for n, (g, u) in enumerate(
            zip(SUMS[0:4] + SUMS[8:12], SUMS[4:8] + SUMS[12:16], strict=True)
        )
    ]


def test_a_gate_takes_the_gate_first():
    ((_, found),) = visit.outputs((Gate("identity"), Times(1.0)), [1.0] * 4 + [5.0] * 4, never)
    assert found == [5.0] * 4
    with pytest.raises(ValueError, match="2 ops of an epilogue take or give pairs"):
        epi.halves((Pair(), Gate("silu")))


@pytest.mark.parametrize("cols", [32, 64, 128])
def test_pairs_find_their_places_in_d(cols: int) -> None:
    """Each value of a thread, tagged with its row and the column of D that it belongs to."""
    for lane in range(32):
        tags = []
        for i in range(fragment.sums_of(cols)):
            row, col = fragment.place(i)
            in_tile = col // 2 * 8 + lane % 4 * 2 + col % 2
            block, up, place = in_tile // 16, in_tile // 8 % 2, in_tile % 8
            tags.append((row, 16 * block + 2 * place + up))
        for row, block, four in store.natural(tags):
            first = block * 16 + lane % 4 * store.QUAD
            assert four == [(row, first + i) for i in range(store.QUAD)]
        gates, ups = (store.of_form(form, tags) for form in (store.Form.GATES, store.Form.UPS))
        assert [col for _, col in gates] == [col - 1 for _, col in ups]
        assert all(col % 2 == 0 for _, col in gates)
        assert sorted(gates + ups) == sorted(store.of_form(store.Form.PLAIN, tags))


def test_ops_that_split() -> None:
    class Both(Op):
        splits = True

        def apply(self, x: float, *operands: float) -> tuple[float, float]:
            return x, -x

    sums = [float(i) for i in range(1, 9)]
    ((number, values),) = visit.outputs((Both(),), sums, lambda i, j: 0.0)  # type: ignore[arg-type]
    first, second = sums[:4], sums[4:]
    assert number == 0
    assert values == [*first, *(-x for x in first), *second, *(-x for x in second)]
