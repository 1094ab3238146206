"""The algebra's laws on every coordinate, fixed results, and errors."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quack_core.errors import LayoutError, ShapeError
from quack_core.layout import algebra, int_tuple
from quack_core.layout.algebra import Layout

BOUNDED = settings(max_examples=150, deadline=None, derandomize=True)


def coordinates(shape):
    """All natural coordinates, leftmost fastest, without the code under test."""
    if not isinstance(shape, tuple):
        return list(range(shape))
    parts = [coordinates(part) for part in reversed(shape)]
    return [tuple(reversed(combined)) for combined in itertools.product(*parts)]


@st.composite
def nested(draw, values):
    """A list of pairs as a shape and a stride, grouped into tuples at random."""
    shape = tuple(extent for extent, _ in values)
    stride = tuple(step for _, step in values)
    if len(values) > 2 and draw(st.booleans()):
        cut = draw(st.integers(1, len(values) - 1))
        shape = (shape[:cut], *shape[cut:])
        stride = (stride[:cut], *stride[cut:])
    if len(values) == 1 and draw(st.booleans()):
        return Layout(shape[0], stride[0])
    return Layout(shape, stride)


@st.composite
def injective(draw, max_gap=3):
    """Layouts without repeated offsets: a permuted compact layout, with gaps that divide."""
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(extents))))
    strides = [0] * len(extents)
    current = 1
    for mode in order:
        current *= draw(st.integers(1, max_gap))
        strides[mode] = current
        current *= extents[mode]
    return draw(nested(list(zip(extents, strides, strict=True))))


@st.composite
def arbitrary(draw, max_stride=12):
    """Any layout: overlaps, repetitions and odd strides included."""
    modes = st.tuples(st.integers(1, 5), st.integers(0, max_stride))
    return draw(nested(draw(st.lists(modes, min_size=1, max_size=4))))


def compacts():
    return injective(max_gap=1)


# The layout itself.


@pytest.mark.exhaustive
@BOUNDED
@given(arbitrary())
def test_integer_and_natural_coordinates_agree(layout):
    natural = coordinates(layout.shape)
    strides = list(int_tuple.leaves(layout.stride))
    expected = [
        sum(c * d for c, d in zip(int_tuple.leaves(crd), strides, strict=True)) for crd in natural
    ]
    assert [layout(crd) for crd in natural] == expected
    assert [layout(i) for i in range(algebra.size(layout))] == expected
    assert layout.image() == expected
    assert algebra.cosize(layout) == max(expected) + 1


@pytest.mark.exhaustive
@BOUNDED
@given(arbitrary())
def test_idx2crd_inverts_crd2idx(layout):
    natural = coordinates(layout.shape)
    assert [int_tuple.idx2crd(i, layout.shape) for i in range(len(natural))] == natural
    assert [int_tuple.crd2idx(crd, layout.shape) for crd in natural] == list(range(len(natural)))


def test_a_partial_coordinate_counts_the_modes_it_stands_for():
    layout = Layout((2, (3, 4)), (100, (1, 10)))
    assert layout(1, 5) == layout((1, (2, 1))) == 100 + 2 + 10
    assert layout(11) == layout(1, 5)


def test_past_the_end_a_layout_goes_on_along_its_last_mode():
    layout = Layout((4, 2), (1, 10))
    assert [layout(i) for i in (7, 8, 11, 12)] == [13, 20, 23, 30]


def test_compact_layouts():
    assert algebra.column_major((2, (3, 4))) == Layout((2, (3, 4)), (1, (2, 6)))
    assert algebra.row_major((2, (3, 4))) == Layout((2, (3, 4)), (12, (4, 1)))
    assert algebra.ordered((4, 8, 2), (1, 2, 0)) == Layout((4, 8, 2), (2, 8, 1))
    assert algebra.column_major((2, 3)).image() == list(range(6))
    assert [algebra.row_major((2, 3))(i, j) for i in range(2) for j in range(3)] == list(range(6))


def test_modes_rank_depth_and_spelling():
    layout = Layout((8, (4, 2)), (1, (16, 8)))
    assert str(layout) == "(8,(4,2)):(1,(16,8))"
    assert list(layout) == [Layout(8, 1), Layout((4, 2), (16, 8))] == [layout[0], layout[1]]
    assert (algebra.rank(layout), algebra.depth(layout)) == (2, 2)
    assert (algebra.rank(Layout(8)), algebra.depth(Layout(8))) == (1, 0)
    assert list(Layout(8, 2)) == [Layout(8, 2)]
    assert Layout([2, [3]], [1, [2]]) == Layout((2, (3,)), (1, (2,)))


# The operations.


@pytest.mark.exhaustive
@BOUNDED
@given(arbitrary())
def test_coalesce_and_flatten_keep_the_function_of_integers(layout):
    flat = algebra.coalesce(layout)
    assert flat.image() == layout.image() == algebra.flatten(layout).image()
    assert algebra.depth(flat) <= 1
    modes = flat.leaves()
    assert all(extent > 1 for extent, _ in modes) or modes == [(1, 0)]
    assert all(a * d != e for (a, d), (_, e) in itertools.pairwise(modes))


@pytest.mark.exhaustive
@BOUNDED
@given(st.one_of(injective(), arbitrary()), arbitrary(max_stride=8))
def test_composition(a, b):
    try:
        result = algebra.composition(a, b)
    except LayoutError:
        assume(False)
    for crd in coordinates(b.shape):
        index = b(crd)
        assume(index < algebra.size(a))
        assert result(crd) == a(index)


@pytest.mark.exhaustive
@BOUNDED
@given(compacts(), arbitrary(max_stride=8))
def test_composition_with_the_identity_is_neutral_and_always_exists(a, b):
    identity = Layout(algebra.cosize(b))
    assert algebra.composition(identity, b).image() == b.image()
    assert algebra.composition(a, Layout(algebra.size(a))).image() == a.image()


def test_composition_refines_the_shape_of_the_inner_layout():
    a, b = Layout((6, 2), (8, 2)), Layout((4, 3), (3, 1))
    assert algebra.composition(a, b) == Layout(((2, 2), 3), ((24, 2), 8))


def test_composition_stops_within_a_mode_that_the_stride_does_not_divide():
    # 0 and 4 both lie in the mode of size 6, so that 4 does not divide 6 does not matter.
    assert algebra.composition(Layout((6, 2), (1, 100)), Layout(2, 4)) == Layout(2, 4)


def test_composition_by_mode_leaves_the_other_modes():
    a = Layout((12, (4, 8), 5), (59, (13, 1), 1000))
    found = algebra.composition(a, (Layout(3, 4), Layout(8, 2)))
    assert found[0] == Layout(3, 4 * 59)
    assert found[1].image() == [a[1](2 * i) for i in range(8)]
    assert found[2] == a[2]


@pytest.mark.exhaustive
@BOUNDED
@given(injective(), st.integers(1, 200))
def test_complement_reaches_every_offset_below_the_target(layout, target):
    rest = algebra.complement(layout, target)
    both = [a + b for a in layout.image() for b in rest.image()]
    assert len(set(both)) == len(both)
    assert set(range(target)) <= set(both)
    assert rest.image() == sorted(rest.image())


@pytest.mark.exhaustive
@BOUNDED
@given(injective())
def test_complement_covers_exactly_the_cosize_or_more(layout):
    target = 6 * algebra.cosize(layout)
    rest = algebra.complement(layout, target)
    both = {a + b for a in layout.image() for b in rest.image()}
    assert both == set(range(len(both)))
    assert len(both) >= target


@pytest.mark.exhaustive
@BOUNDED
@given(arbitrary())
def test_right_inverse(layout):
    inverse = algebra.right_inverse(layout)
    count = algebra.size(inverse)
    assert [layout(inverse(i)) for i in range(count)] == list(range(count))


@pytest.mark.exhaustive
@BOUNDED
@given(compacts())
def test_inverses_of_a_compact_layout_are_total(layout):
    count = algebra.size(layout)
    right, left = algebra.right_inverse(layout), algebra.left_inverse(layout)
    assert algebra.size(right) == count
    assert [right(layout(i)) for i in range(count)] == list(range(count))
    assert left.image() == right.image()


@pytest.mark.exhaustive
@BOUNDED
@given(injective())
def test_left_inverse(layout):
    inverse = algebra.left_inverse(layout)
    count = algebra.size(layout)
    assert [inverse(layout(i)) for i in range(count)] == list(range(count))
    assert all(0 <= value < count for value in inverse.image())


@pytest.mark.exhaustive
@BOUNDED
@given(compacts(), st.integers(1, 6), st.integers(1, 3))
def test_logical_divide_covers_each_offset_once(layout, extent, stride):
    tiler = Layout(extent, stride)
    try:
        divided = algebra.logical_divide(layout, tiler)
    except LayoutError:
        assume(False)
    tile, rest = divided
    assume(algebra.size(layout) % (extent * stride) == 0)
    assert tile.image() == [layout(tiler(i)) for i in range(extent)]
    assert Counter(divided.image()) == Counter(layout.image())
    assert algebra.size(rest) == algebra.size(layout) // extent


@pytest.mark.parametrize("stride", [(1, 16), (8, 1)])
@pytest.mark.parametrize(
    "tiler", [(4, 2), (Layout(4, 2), 8), (Layout((2, 2), (1, 8)), Layout(2, 4))]
)
def test_the_four_divides_hold_the_same_elements(stride, tiler):
    layout = Layout((16, 8), stride)
    logical = algebra.logical_divide(layout, tiler)
    (tile0, rest0), (tile1, rest1) = logical
    zipped = algebra.zipped_divide(layout, tiler)
    tiled = algebra.tiled_divide(layout, tiler)
    flat = algebra.flat_divide(layout, tiler)
    sizes = [algebra.size(mode) for mode in (tile0, tile1, rest0, rest1)]
    assert [algebra.size(mode) for mode in flat] == sizes
    seen = []
    for a, b, i, j in itertools.product(*map(range, sizes)):
        offset = logical(((a, i), (b, j)))
        assert zipped(((a, b), (i, j))) == offset
        assert tiled((a, b), i, j) == flat(a, b, i, j) == offset
        seen.append(offset)
    assert sorted(seen) == sorted(layout.image())


def test_a_tiler_that_does_not_divide_covers_more():
    found = algebra.zipped_divide(Layout((10, 8)), (4, 2))
    assert found == Layout(((4, 2), (3, 4)), ((1, 10), (4, 20)))


def test_a_tiler_of_fewer_modes_leaves_the_rest():
    found = algebra.zipped_divide(Layout((16, 8, 3)), (Layout(4, 2), 2))
    assert found == Layout(((4, 2), ((2, 2), 4, 3)), ((2, 16), ((1, 8), 32, 128)))


@pytest.mark.exhaustive
@BOUNDED
@given(injective(max_gap=2), injective(max_gap=2))
def test_logical_product_repeats_without_overlap(block, tiler):
    try:
        found = algebra.logical_product(block, tiler)
    except LayoutError:
        assume(False)
    assert found[0] == block
    assert algebra.is_injective(found)
    rest = algebra.complement(block, algebra.size(block) * algebra.cosize(tiler))
    assert found[1].image() == [rest(tiler(i)) for i in range(algebra.size(tiler))]


def test_blocked_and_raked_products():
    block, tiler = Layout((2, 5), (5, 1)), Layout((3, 4))
    blocked = algebra.blocked_product(block, tiler)
    raked = algebra.raked_product(block, tiler)
    assert blocked == Layout(((2, 3), (5, 4)), ((5, 10), (1, 30)))
    assert raked == Layout(((3, 2), (4, 5)), ((10, 5), (30, 1)))
    product = algebra.logical_product(block, tiler)
    for a0, a1, b0, b1 in itertools.product(range(2), range(5), range(3), range(4)):
        offset = product(((a0, a1), (b0, b1)))
        assert blocked(((a0, b0), (a1, b1))) == raked(((b0, a0), (b1, a1))) == offset


def test_products_of_different_ranks():
    found = algebra.blocked_product(Layout(4), Layout((2, 3)))
    assert found == Layout(((4, 2), (1, 3)), ((1, 4), (0, 8)))
    zipped = algebra.zipped_product(Layout((2, 2), (1, 8)), (3, 4))
    assert zipped == Layout(((2, 2), (3, 4)), ((1, 8), (2, 1)))


@pytest.mark.parametrize(
    ("a", "b", "vector"),
    [
        (Layout((8, 4)), Layout((8, 4), (1, 16)), 8),
        (Layout((8, 4)), Layout((8, 4)), 32),
        (Layout((8, 4)), Layout((8, 4), (4, 1)), 1),
        (Layout((8, 4), (2, 16)), Layout((8, 4)), 1),
        (Layout((4, 8), (8, 1)), Layout((4, 8), (16, 1)), 8),
        (Layout(((2, 4), 4)), Layout(((2, 4), 4), ((1, 8), 2)), 2),
        (Layout((4, 6)), Layout(((2, 2), 6), ((1, 2), 5)), 4),
    ],
)
def test_max_common_vector(a, b, vector):
    common = algebra.max_common_layout(a, b)
    assert algebra.max_common_vector(a, b) == algebra.max_common_vector(b, a) == vector
    assert algebra.size(common) == vector
    for i in range(vector):
        assert a(common(i)) == b(common(i)) == i


# What does not work says so.


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Layout((2, 0)), ShapeError, r"shape \(2,0\)"),
        (lambda: Layout((2, 3), (1, (2,))), LayoutError, r"\(2,3\).*\(1,\(2\)\).*nested alike"),
        (lambda: Layout(2.0), LayoutError, "2.0 is no integer"),
        (lambda: Layout(True), LayoutError, "True is no integer"),
        (lambda: Layout((2, 3))(1, 2, 3), ShapeError, r"\(1, 2, 3\) has rank 3"),
        (lambda: Layout(6)((1, 2)), ShapeError, r"\(1, 2\) does not fit"),
        (lambda: algebra.cosize(Layout(4, -1)), LayoutError, "4:-1.*negative"),
        (lambda: algebra.ordered((2, 3), (0, 2)), LayoutError, r"\(0, 2\).*permutation"),
        (
            lambda: algebra.composition(Layout((6, 2), (1, 100)), Layout(3, 4)),
            LayoutError,
            r"\(6,2\):\(1,100\) with 3:4.*3:4 crosses a mode of size 6",
        ),
        (
            lambda: algebra.composition(Layout((4, 6), (1, 100)), Layout(6)),
            LayoutError,
            "6:1 crosses a mode of size 4",
        ),
        (
            lambda: algebra.composition(Layout(8), Layout(4, -1)),
            LayoutError,
            "stride -1 must not be negative",
        ),
        (
            lambda: algebra.composition(Layout(8), (2, 2)),
            ShapeError,
            "tiler of 2 modes for 8:1, which has 1",
        ),
        (
            lambda: algebra.complement(Layout((4, 4), (1, 6)), 24),
            LayoutError,
            "stride 6 must be a multiple of 4",
        ),
        (
            lambda: algebra.left_inverse(Layout((4, 2), (1, 0))),
            LayoutError,
            "left inverse.*stride 0",
        ),
        (
            lambda: algebra.left_inverse(Layout((4, 4), (1, 2))),
            LayoutError,
            "stride 2 must be a positive multiple of 4",
        ),
        (
            lambda: algebra.max_common_vector(Layout(8), Layout(4)),
            ShapeError,
            "8:1 has 8.*4:1 has 4",
        ),
    ],
)
def test_errors_name_the_values(call, error, words):
    with pytest.raises(error, match=words):
        call()
