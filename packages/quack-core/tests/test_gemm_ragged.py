"""Clusters of ragged groups, found on the CPU by the code that kernels run, for a warp of one lane."""

import itertools

import cutlass
import numpy as np
import pytest
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from quack_core.gemm import ragged

SIZES = [
    [0],
    [1],
    [128, 128],
    [0, 5, 0, 0, 300, 1, 0],
    [1000, 0, 129, 128, 127, 2],
    [3] * 70,
    [0] * 40 + [700] + [0] * 40,
]


@pytest.fixture(autouse=True)
def one_lane(monkeypatch):
    monkeypatch.setattr(ragged, "WARP", 1)
    monkeypatch.setattr(cute.arch, "vote_ballot_sync", Int32)
    monkeypatch.setattr(cute.arch, "popc", lambda x: x)
    monkeypatch.setattr(cute.arch, "shuffle_sync", lambda x, _: x)


@cute.jit
def walk(
    offsets: cute.Tensor,
    rows: Int32,
    across: Int32,
    first: Int32,
    step: Int32,
    out: cute.Tensor,
    height: cutlass.Constexpr[int],
    band: cutlass.Constexpr[int],
):
    groups = ragged.Groups(offsets, rows, across)
    span, work = ragged.begin(), first
    span = ragged.find(groups, span, work, Int32(0), height)
    while ragged.is_group(groups, span):
        row, col = ragged.place(groups, span, work, height, band)
        out[work, 0], out[work, 1], out[work, 2], out[work, 3] = span.group, row, col, span.end
        work += step
        span = ragged.find(groups, span, work, Int32(0), height)
    out[out.shape[0] - 1, 0] = ragged.most(groups, height)


def found(offsets, rows, across, height, band, step):
    """What all walkers find together."""
    count = (rows // height + len(offsets) - 1) * across
    out = np.full((count + 1, 4), -1, np.int32)
    arrays = [from_dlpack(a).mark_layout_dynamic() for a in (np.array(offsets, np.int32), out)]
    for first in range(step):
        numbers = (Int32(each) for each in (rows, across, first, step))
        walk(arrays[0], *numbers, arrays[1], height, band)
    assert out[-1, 0] == count
    cut = out[:-1].tolist()
    while cut and cut[-1][0] == -1:
        cut.pop()
    return cut


def documented(offsets, across, height, band):
    places = []
    for group, (start, stop) in enumerate(itertools.pairwise(offsets)):
        tops = list(range(start, stop, height))
        for i in range(0, len(tops), band):
            places += [[group, r, c, stop] for c in range(across) for r in tops[i : i + band]]
    return places


@pytest.mark.parametrize("sizes", SIZES, ids=lambda each: f"{len(each)}x{max(each)}")
def test_every_cluster_once_in_the_documented_order(sizes):
    offsets = np.cumsum([0, *sizes]).tolist()
    for across, height, band, step in ((1, 128, 8, 1), (3, 256, 2, 4), (5, 128, 1, 7)):
        places = found(offsets, offsets[-1], across, height, band, step)
        assert places == documented(offsets, across, height, band)


def test_offsets_that_make_no_sense_stay_inside():
    for offsets in ([-5, 100, 40, 900], [700, 200, 2**31 - 1, -(2**31)]):
        for _, row, _, end in found(offsets, 500, 2, 128, 8, 3):
            assert 0 <= row < end <= 500
