"""The order of tiles, computed on the CPU by the code that kernels run."""

import cutlass
import numpy as np
import pytest
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from quack_core.gemm import order

SIZES = [
    (1, 1, 1),
    (1, 7, 2),
    (7, 1, 3),
    (8, 3, 1),  # rows are a multiple of the group, or fewer than it
    (9, 4, 2),
    (13, 5, 3),
    (16, 2, 1),
    (2, 11, 1),
    (33, 17, 2),
]
GROUPS = (1, 2, 3, 8, 40)


@cute.jit
def enumerate_clusters(sizes: cute.Tensor, out: cute.Tensor, group: cutlass.Constexpr[int]):
    for case in range(sizes.shape[0]):
        made = order.make(sizes[case, 0], sizes[case, 1], sizes[case, 2], group)
        for work in range(made.total):
            row, col, matrix = order.locate(made, Int32(work), group)
            out[case, work, 0], out[case, work, 1], out[case, work, 2] = row, col, matrix


def documented(rows, cols, batches, group):
    """Down ``group`` rows, then to the next column, then the next rows, then the next matrix."""
    return [
        [row, col, matrix]
        for matrix in range(batches)
        for first in range(0, rows, group)
        for col in range(cols)
        for row in range(first, min(first + group, rows))
    ]


@pytest.mark.parametrize("group", GROUPS)
def test_every_cluster_once_in_the_documented_order(group):
    sizes = np.array(SIZES, np.int32)
    out = np.full((len(sizes), int(sizes.prod(1).max()), 3), -1, np.int32)
    enumerate_clusters(*(from_dlpack(a).mark_layout_dynamic() for a in (sizes, out)), group)
    for (rows, cols, batches), found in zip(SIZES, out, strict=True):
        total = rows * cols * batches
        assert len({tuple(place) for place in found[:total]}) == total
        assert found[:total].tolist() == documented(rows, cols, batches, group)
        assert (found[total:] == -1).all()


@cute.jit
def enumerate_ends(sizes: cute.Tensor, out: cute.Tensor, group: cutlass.Constexpr[int]):
    made = order.make(sizes[0], sizes[1], sizes[2], group)
    for i in range(out.shape[0]):
        row, col, matrix = order.locate(made, made.total - 1 - i, group)
        out[i, 0], out[i, 1], out[i, 2] = row, col, matrix


def test_numbers_near_the_end_of_int32():
    rows, cols, batches, group = sizes = 46337, 46337, 1, 8
    assert rows * cols * batches < 2**31
    out = np.zeros((200_000, 3), np.int32)
    enumerate_ends(
        *(from_dlpack(a).mark_layout_dynamic() for a in (np.array(sizes[:3], np.int32), out)), group
    )
    rest = rows % group
    numbers = np.arange(len(out))
    assert (out[:, 0] == rows - 1 - numbers % rest)[: cols * rest].all()
    assert (out[:, 1] == cols - 1 - numbers // rest)[: cols * rest].all()
    assert (out[cols * rest :, 0] == rows - 1 - rest - numbers[: len(out) - cols * rest] % 8).all()


@pytest.mark.parametrize("group", [0, -1])
def test_a_group_has_a_row(group):
    with pytest.raises(ValueError, match=f"group={group}: must be at least 1"):
        order.make(1, 1, 1, group)


# --- the half of symmetric matrices


@cute.jit
def enumerate_lower(sizes: cute.Tensor, out: cute.Tensor, group: cutlass.Constexpr[int]):
    for case in range(sizes.shape[0]):
        made = order.make_lower(sizes[case, 0], sizes[case, 1], group)
        for work in range(made.total):
            row, col, matrix = order.locate_lower(made, Int32(work), group)
            out[case, work, 0], out[case, work, 1], out[case, work, 2] = row, col, matrix


@pytest.mark.parametrize("group", GROUPS)
def test_every_cluster_of_the_lower_half_once(group):
    sizes = np.array([(size, batches) for size in range(1, 34) for batches in (1, 3)], np.int32)
    counts = sizes[:, 0] * (sizes[:, 0] + 1) // 2 * sizes[:, 1]
    out = np.full((len(sizes), counts.max(), 3), -1, np.int32)
    enumerate_lower(*(from_dlpack(a).mark_layout_dynamic() for a in (sizes, out)), group)
    for (size, batches), count, found in zip(sizes, counts, out, strict=True):
        wanted = {
            (row, col, matrix)
            for matrix in range(batches)
            for row in range(size)
            for col in range(row + 1)
        }
        assert len(wanted) == count
        assert sorted(tuple(map(int, place)) for place in found[:count]) == sorted(wanted)
        assert (found[count:] == -1).all()


@pytest.mark.parametrize("size", [32, 33])
def test_neighbours_in_time_are_neighbours_in_the_lower_half(size):
    """A group's clusters, as many as run at once, need few rows and columns of operands."""
    group, at_once = 8, 66
    sizes, count = np.array([(size, 1)], np.int32), size * (size + 1) // 2
    out = np.zeros((1, count, 3), np.int32)
    enumerate_lower(*(from_dlpack(a).mark_layout_dynamic() for a in (sizes, out)), group)
    for first in range(0, count - at_once, at_once):
        some = out[0, first : first + at_once]
        needed = len(np.unique(some[:, 0])) + len(np.unique(some[:, 1]))
        assert needed <= 2 * group + 2 * (at_once // group + 1) + group
