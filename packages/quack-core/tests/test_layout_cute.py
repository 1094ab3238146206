"""The pure algebra agrees with CuTe, evaluated on the host in one trace."""

import ast
import random

import pytest
from cutlass import cute

from quack_core.errors import LayoutError
from quack_core.layout import algebra
from quack_core.layout.algebra import Layout


def random_compact(rng, modes):
    extents = [rng.choice((1, 2, 3, 4, 8)) for _ in range(modes)]
    return algebra.ordered(tuple(extents), tuple(rng.sample(range(modes), modes)))


def operands(count=40):
    """Pairs on which composition, product and divide exist, so that none aborts the trace."""
    rng = random.Random(0)
    found = []
    while len(found) < count:
        a = random_compact(rng, rng.choice((2, 3)))
        b = Layout(
            (rng.choice((2, 4)), rng.choice((2, 3, 4))), (rng.choice((1, 2)), rng.choice((4, 8)))
        )
        try:
            algebra.composition(a, b), algebra.logical_divide(a, b), algebra.logical_product(a, b)
        except LayoutError:
            continue
        if algebra.cosize(b) <= algebra.size(a):
            found.append((a, b))
    return found


BINARY = (
    "composition",
    "logical_divide",
    "zipped_divide",
    "tiled_divide",
    "flat_divide",
    "logical_product",
    "zipped_product",
    "blocked_product",
    "raked_product",
)
UNARY = ("coalesce", "right_inverse", "left_inverse")


def parse(text):
    shape, stride = (ast.literal_eval(part) for part in text.split(":"))
    return Layout(shape, stride)


@pytest.fixture(scope="module")
def in_the_dsl():
    """``{(operation, a, b): layout}`` computed by CuTe in one trace of an empty host function."""
    found = {}

    def evaluate():
        for a, b in operands():
            left = cute.make_layout(a.shape, stride=a.stride)
            right = cute.make_layout(b.shape, stride=b.stride)
            for name in BINARY:
                found[name, a, b] = parse(str(getattr(cute, name)(left, right)))
            for name in UNARY:
                found[name, a, None] = parse(str(getattr(cute, name)(left)))
            found["left_inverse", b, None] = parse(str(cute.left_inverse(right)))
            target = 2 * algebra.cosize(b)
            found["complement", b, target] = parse(str(cute.complement(right, target)))
            found["max_common_vector", a, a] = cute.max_common_vector(left, left)

    @cute.jit
    def trace():
        evaluate()

    cute.compile(trace)
    return found


@pytest.mark.parametrize("name", [*BINARY, *UNARY[:2], "complement"])
def test_cute_gives_the_same_layout(name, in_the_dsl):
    cases = [(key[1:], value) for key, value in in_the_dsl.items() if key[0] == name]
    assert len(cases) >= 15
    for (a, b), theirs in cases:
        ours = getattr(algebra, name)(*((a,) if b is None else (a, b)))
        assert ours.image() == theirs.image(), (name, str(a), str(b), str(ours), str(theirs))
        if name in BINARY:
            sizes = [algebra.size(mode) for mode in ours]
            assert [algebra.size(mode) for mode in theirs] == sizes


def test_cute_gives_the_same_left_inverse_on_the_image(in_the_dsl):
    cases = [(key[1], value) for key, value in in_the_dsl.items() if key[0] == "left_inverse"]
    assert len(cases) >= 30
    for layout, theirs in cases:
        ours = algebra.left_inverse(layout)
        assert [ours(offset) for offset in layout.image()] == [
            theirs(offset) for offset in layout.image()
        ]


def test_cute_gives_the_same_common_vector(in_the_dsl):
    cases = [(key[1], value) for key, value in in_the_dsl.items() if key[0] == "max_common_vector"]
    assert len(cases) >= 30
    for layout, theirs in cases:
        assert algebra.max_common_vector(layout, layout) == theirs
