"""Which thread owns which element of a row: the laws, checked on every element."""

import dataclasses
from collections import Counter

import pytest

from quack_core.reduction.tiling import WARP, RowTiling

TILINGS = [
    RowTiling(1, 1, 1, 32),  # a thread per row
    RowTiling(96, 4, 8, 16),  # rows share a warp
    RowTiling(257, 1, 32, 4),  # a prime, one row per warp
    RowTiling(1000, 8, 128, 1),  # some threads own nothing
    RowTiling(4096, 8, 256, 1),  # whole passes
    RowTiling(4095, 1, 1024, 1),  # the last vector is missing
    RowTiling(6000, 4, 128, 1),  # a ragged last pass
    RowTiling(8192, 8, 128, 1, cluster=2),
    RowTiling(5000, 8, 64, 1, cluster=4),  # a ragged cluster
    RowTiling(5120, 8, 320, 1),  # ten warps
    RowTiling(3000, 8, 96, 2),  # three warps, two rows
    RowTiling(100, 4, 32, 1, cluster=16),  # CTAs that own nothing
]


@pytest.fixture(params=TILINGS, ids=lambda t: f"n{t.n}-{t.threads_per_row}x{t.rows_per_cta}")
def tiling(request):
    return request.param


def by_definition(t):
    """Column: owner, from where the docstring says that the vectors of each thread begin."""
    owners = {}
    for rank in range(t.cluster):
        for thread in range(t.threads_per_row):
            for p in range(t.passes):
                warp, lane = divmod(thread, 32)
                lanes = min(32, t.threads_per_row)
                first = rank * t.cols + ((warp * t.passes + p) * lanes + lane) * t.vec
                assert first == rank * t.cols + t.start(thread) + p * t.step
                for v in range(t.vec):
                    if first + v < t.n:
                        assert first + v not in owners
                        owners[first + v] = (rank, thread, p * t.vec + v)
    return owners


def test_every_element_has_one_owner(tiling):
    owners = [tiling.owner(column) for column in range(tiling.n)]
    assert len(set(owners)) == tiling.n
    assert {rank for rank, _, _ in owners} <= set(range(tiling.cluster))
    assert {thread for _, thread, _ in owners} <= set(range(tiling.threads_per_row))
    assert {value for _, _, value in owners} <= set(range(tiling.values))


def test_owner_is_where_the_vectors_lie(tiling):
    expected = by_definition(tiling)
    assert [tiling.owner(column) for column in range(tiling.n)] == [
        expected[column] for column in range(tiling.n)
    ]


def test_vectors_are_inside_or_outside_as_a_whole(tiling):
    """What a predicate per vector relies on."""
    per_vector = Counter(
        (rank, thread, value // tiling.vec)
        for rank, thread, value in map(tiling.owner, range(tiling.n))
    )
    assert set(per_vector.values()) == {tiling.vec}


def test_neighbouring_threads_own_neighbouring_vectors(tiling):
    """So that a warp's access is contiguous."""
    for column in range(tiling.vec, tiling.n, tiling.vec):
        rank, thread, value = tiling.owner(column)
        before = tiling.owner(column - tiling.vec)
        if thread % WARP > 0:
            assert before == (rank, thread - 1, value)


def test_no_pass_is_empty(tiling):
    """One pass fewer could not hold the row."""
    held = tiling.vec * tiling.threads_per_row * tiling.cluster
    assert held * (tiling.passes - 1) < tiling.n <= held * tiling.passes


def test_sizes_follow_from_the_numbers(tiling):
    assert tiling.num_threads == tiling.threads_per_row * tiling.rows_per_cta
    assert tiling.values == tiling.vec * tiling.passes
    assert tiling.cols == tiling.values * tiling.threads_per_row
    assert tiling.cols * tiling.cluster >= tiling.n
    assert tiling.ragged == (len(by_definition(tiling)) < tiling.cols * tiling.cluster)
    assert tiling.warps_per_row == len({t // WARP for t in range(tiling.threads_per_row)})


def test_owner_does_not_depend_on_the_rows_beside_it():
    alone = RowTiling(96, 4, 32, 1)
    beside = RowTiling(96, 4, 32, 8)
    assert [alone.owner(c) for c in range(96)] == [beside.owner(c) for c in range(96)]


@pytest.mark.parametrize(
    ("n", "owner"),
    [(0, (0, 0, 0)), (8, (0, 1, 0)), (257, (0, 0, 9)), (1025, (0, 32, 1)), (4096, (1, 0, 0))],
)
def test_owner_of_known_elements(n, owner):
    """vec 8, 128 threads: 256 columns per warp and pass, 1024 per warp, 4096 per CTA."""
    assert RowTiling(8192, 8, 128, 1, cluster=2).owner(n) == owner


GOOD = RowTiling(4096, 8, 128, 1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"vec": 3}, "vec=3"),
        ({"vec": 0}, "vec=0"),
        ({"n": 0}, "n=0"),
        ({"n": 4095}, "n=4095"),
        ({"threads_per_row": 48}, "threads_per_row=48"),
        ({"threads_per_row": 0}, "threads_per_row=0"),
        ({"threads_per_row": 16}, "16 threads"),
        ({"threads_per_row": 2048}, "2048 threads"),
        ({"threads_per_row": 8, "rows_per_cta": 3}, "24 threads"),
        ({"rows_per_cta": 0}, "0 threads"),
        ({"rows_per_cta": 16}, "2048 threads"),
        ({"cluster": 3}, "cluster=3"),
        ({"cluster": 0}, "cluster=0"),
        ({"cluster": 32}, "cluster=32"),
        ({"cluster": 2, "rows_per_cta": 2}, "cluster=2"),
        ({"cluster": 2, "threads_per_row": 16, "rows_per_cta": 2}, "cluster=2"),
    ],
    ids=str,
)
def test_impossible_tilings_are_refused(change, found):
    with pytest.raises(ValueError, match=found):
        dataclasses.replace(GOOD, **change)


def test_shared_memory_holds_what_the_reduction_allocates():
    """(width, warps, rows) and (width, cluster) float32 values and an mbarrier, per buffer."""
    for tiling in TILINGS:
        for width in (1, 2):
            for buffers in (1, 2):
                partials = tiling.warps_per_row * tiling.rows_per_cta * width * buffers * 4
                exchange = tiling.cluster * width * buffers * 4
                padding = 16 + 16 + 8  # each array may begin at the next multiple of its alignment
                needed = partials + exchange + 8 * buffers
                assert needed <= tiling.shared_bytes(width, buffers) <= needed + padding + 8
