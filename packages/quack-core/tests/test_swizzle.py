import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quack_core.errors import LayoutError, ShapeError
from quack_core.layout.layout import Layout
from quack_core.layout.swizzle import ComposedLayout, Swizzle, bank_conflicts, wavefronts

BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 3))
    shift = draw(st.integers(bits, 4)) * draw(st.sampled_from((1, -1)))
    return Swizzle(bits, draw(st.integers(0, 4)), shift)


@pytest.mark.exhaustive
@BOUNDED
@given(swizzles())
def test_a_swizzle_permutes_each_period_and_undoes_itself(swizzle):
    offsets = range(2 * swizzle.period)
    swizzled = [swizzle.apply(offset) for offset in offsets]
    assert sorted(swizzled[: swizzle.period]) == list(range(swizzle.period))
    assert swizzled[swizzle.period :] == [swizzle.period + s for s in swizzled[: swizzle.period]]
    assert [swizzle.inverse().apply(s) for s in swizzled] == list(offsets)


@pytest.mark.exhaustive
@BOUNDED
@given(swizzles())
def test_runs_of_two_to_the_base_stay_together(swizzle):
    run = 1 << swizzle.base
    for start in range(0, 2 * swizzle.period, run):
        first = swizzle.apply(start)
        assert first % run == 0
        assert [swizzle.apply(start + i) for i in range(run)] == [first + i for i in range(run)]


@pytest.mark.parametrize(
    ("swizzle", "pairs"),
    [
        (Swizzle(3, 4, 3), {0: 0, 16: 16, 128: 144, 256: 288, 896: 1008, 1024: 1024, 1040: 1040}),
        (Swizzle(2, 0, 2), {0: 0, 1: 1, 4: 5, 5: 4, 12: 15, 15: 12, 16: 16}),
        (Swizzle(1, 0, -2), {0: 0, 1: 5, 2: 2, 3: 7, 5: 1, 8: 8}),
        (Swizzle(0, 4, 3), {0: 0, 128: 128, 255: 255}),
    ],
)
def test_values(swizzle, pairs):
    assert {offset: swizzle.apply(offset) for offset in pairs} == pairs


@pytest.mark.parametrize("values", [(-1, 0, 3), (3, -1, 3), (3, 4, 2), (2, 0, -1)])
def test_swizzles_that_are_no_permutation_are_refused(values):
    with pytest.raises(LayoutError, match=rf"bits={values[0]}, base={values[1]}"):
        Swizzle(*values)


def test_a_composed_layout_swizzles_what_the_layout_gives():
    layout = Layout((8, 64), (64, 1))
    composed = ComposedLayout(Swizzle(3, 3, 3), layout)
    assert composed.shape == (8, 64)
    assert sorted(composed.image()) == list(range(512))
    assert composed(1, 0) == composed((1, 0)) == 64 + 8
    assert composed.image()[1] == composed(1)
    shifted = ComposedLayout(Swizzle(3, 3, 3), layout, 64)
    assert shifted(0, 0) == 64 + 8
    assert str(shifted) == "S<3,3,3> o 64 o (8,64):(64,1)"


# Rows of 64 two-byte elements: 128 bytes, as many as there are bytes in all banks.
ROWS = Layout((8, 64), (64, 1))


@pytest.mark.parametrize(
    ("access", "access_bytes", "element_bytes", "conflicts"),
    [
        (Layout(32), 4, 4, 0),
        (Layout(32, 0), 4, 4, 0),  # one word for all threads
        (Layout(32, 2), 4, 4, 1),
        (Layout(32, 32), 4, 4, 31),
        (Layout(32, 33), 4, 4, 0),  # a padded column
        (Layout(32), 2, 2, 0),  # two threads share a word
        (Layout(32), 1, 1, 0),
        (Layout(32), 8, 8, 0),  # two halves of 128 bytes each
        (Layout(32, 2), 8, 8, 2),
        (Layout(32), 16, 16, 0),
        (Layout(8, 64), 16, 2, 7),  # a column of 16-byte pieces without a swizzle
        (Layout(64), 4, 4, 0),  # two warps
        (Layout(64, 2), 4, 4, 2),
        ([0, 128, 256], 4, 1, 2),
        ([], 4, 1, 0),
    ],
)
def test_bank_conflicts(access, access_bytes, element_bytes, conflicts):
    assert bank_conflicts(access, access_bytes, element_bytes) == conflicts


def test_a_swizzle_removes_the_conflicts_of_a_column():
    swizzle = Swizzle(3, 3, 3)  # in 2-byte elements: pieces of 16 bytes, rows of 128
    for column in range(0, 64, 8):
        offsets = [ROWS(row, column) for row in range(8)]
        assert bank_conflicts(offsets, 16, 2) == 7
        assert bank_conflicts([swizzle.apply(offset) for offset in offsets], 16, 2) == 0
    along_a_row = [swizzle.apply(ROWS(3, column)) for column in range(0, 64, 8)]
    assert bank_conflicts(along_a_row, 16, 2) == 0


def test_a_composed_layout_counts_like_its_offsets():
    plain = Layout((8, 4), (64, 8))
    composed = ComposedLayout(Swizzle(3, 3, 3), plain)
    assert wavefronts(plain, 16, 2) == 4 * 8
    assert wavefronts(composed, 16, 2) == wavefronts(composed.image(), 16, 2) == 4
    assert bank_conflicts(composed, 16, 2) == 0


def test_errors_name_the_values():
    with pytest.raises(ShapeError, match="access_bytes=12"):
        wavefronts(Layout(32), 12)
    with pytest.raises(ShapeError, match="access_bytes=32"):
        bank_conflicts(Layout(32), 32)
    with pytest.raises(LayoutError, match="thread 1 accesses 16 bytes at address 8"):
        wavefronts([0, 8], 16)


def test_cute_swizzles_alike():
    from cutlass import cute

    cases = [(3, 4, 3), (2, 4, 3), (1, 4, 3), (3, 3, 3), (2, 1, 2), (1, 0, -2), (0, 4, 3)]
    found = {}

    def evaluate():
        for case in cases:
            layout = cute.make_layout((32, 64), stride=(64, 1))
            composed = cute.make_composed_layout(cute.make_swizzle(*case), 0, layout)
            found[case] = [composed((i, j)) for i in range(0, 32, 3) for j in range(0, 64, 5)]

    @cute.jit
    def trace():
        evaluate()

    cute.compile(trace)
    for case in cases:
        ours = ComposedLayout(Swizzle(*case), Layout((32, 64), (64, 1)))
        assert found[case] == [ours(i, j) for i in range(0, 32, 3) for j in range(0, 64, 5)]
