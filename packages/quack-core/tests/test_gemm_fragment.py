"""Which element of a tile a thread's sum is, as CuTe's layouts of wgmma say it; operands likewise."""

import ast

import cutlass
import cutlass.utils.hopper_helpers as sm90
import numpy as np
import pytest
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack
from cutlass.tensor_utils import LayoutEnum

from quack_core.gemm.sm90 import columns, fragment, store

WIDTHS = (*range(16, 257, 16),)
SHARED = [(groups, atoms) for groups in (1, 2, 3) for atoms in (1, 2)]
ROW, COLUMN = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
SINKS = [
    (Float16, ROW, 64),
    (BFloat16, ROW, 32),
    (BFloat16, ROW, 16),
    (BFloat16, COLUMN, 64),
    (BFloat16, COLUMN, 16),
    (Float32, ROW, 32),
    (Float32, ROW, 16),
    (Float32, COLUMN, 32),
]
SOME_THREADS = (0, 5, 38, 127)
"""Of which all sums are looked at; coordinates are the sum of the thread's and the sum's."""
MORE_THREADS = (*SOME_THREADS, 1, 2, 3, 4, 8, 16, 32, 64)


def mma(width, groups=1):
    k_major = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, k_major, k_major, Float32, (groups, 1, 1), tiler_mn=(64, width)
    )


def at(part, i):
    return tuple(int(x) for x in part[i][:2])


def partitioned(groups, atoms, width=32):
    """{(group, thread): coordinates of its sums} of a tile that warpgroups share."""
    tile = cute.make_identity_tensor((64 * groups * atoms, width))
    found = {}
    for group in range(groups):
        for thread in SOME_THREADS:
            part = mma(width, groups).get_slice(128 * group + thread).partition_C(tile)
            found[group, thread] = [at(part, i) for i in range(cute.size(part))]
    return found


def stored(dtype, major, cols):
    """{thread: coordinates of its registers}."""
    tile = cute.make_identity_tensor((64, cols, 2))
    found = {}
    sink = store.make_sink(mma(256), None, tile, major, dtype, 0)
    for thread in MORE_THREADS:
        part = sink.copy.get_slice(thread).partition_S(tile)[None, None, None, 1]
        count = cute.size(sink.piece) if thread in SOME_THREADS else 1
        found[thread] = [at(part, i) for i in range(count)]
    return found


@pytest.fixture(scope="module")
def in_the_dsl():
    found = {}

    def evaluate():
        for width in WIDTHS:
            found["layout", width] = str(mma(width).tv_layout_C)
        for shared in SHARED:
            found["tile", shared] = partitioned(*shared)
        for sink in SINKS:
            found["sink", sink] = stored(*sink)

    @cute.jit
    def trace():
        evaluate()

    cute.compile(trace, options="--gpu-arch sm_90a")
    return found


def expected(thread, i):
    below, beside = fragment.offset(i)
    return fragment.first_row(thread) + below, fragment.first_col(thread) + beside


def offsets(shape, stride):
    """Of a layout, in the order of its coordinates."""
    if not isinstance(shape, tuple):
        return np.arange(shape) * stride
    found = np.zeros(1, int)
    for mode, step in zip(shape, stride, strict=True):
        found = (found[None, :] + offsets(mode, step)[:, None]).ravel()
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_place_of_every_accumulator(in_the_dsl, width):
    shape, stride = (ast.literal_eval(s) for s in in_the_dsl["layout", width].split(":"))
    threads, values = (offsets(*mode) for mode in zip(shape, stride, strict=True))
    assert len(threads) == 128 and len(values) == fragment.sums_of(width)
    for thread, first in enumerate(threads):
        found = [(int(x % 64), int(x // 64)) for x in first + values]
        assert found == [expected(thread, i) for i in range(len(values))]


@pytest.mark.parametrize("shared", SHARED, ids=lambda s: f"{s[0]} warpgroups, {s[1]} atoms")
def test_rows_of_warpgroups_that_share_a_tile(in_the_dsl, shared):
    groups, atoms = shared
    for (group, thread), found in in_the_dsl["tile", shared].items():
        per_atom = fragment.sums_of(32)
        assert len(found) == atoms * per_atom
        for i, place in enumerate(found):
            row, col = expected(thread, i % per_atom)
            assert place == ((i // per_atom * groups + group) * 64 + row, col)


@pytest.mark.parametrize("sink", SINKS, ids=lambda s: f"{s[0].__name__}-{s[1].name}-{s[2]}")
def test_registers_of_a_stored_part_are_in_the_order_of_the_sums(in_the_dsl, sink):
    found = in_the_dsl["sink", sink]
    assert len(found[SOME_THREADS[0]]) == fragment.sums_of(sink[2])
    for thread, places in found.items():
        assert places == [expected(thread, i) for i in range(len(places))]


@pytest.mark.parametrize("count", [4, 8, 16, 32])
def test_lanes_that_exchange_halves_end_with_neighbouring_columns(count):
    """All lanes of a column meet, and each column is kept by one of them, or by equal ones."""
    held = [range(count)] * 32
    seen = [{lane} for lane in range(32)]
    for offset in (16, 8, 4):
        half = len(held[0]) // 2
        if half:
            held = [x[half:] if i // offset % 2 else x[:half] for i, x in enumerate(held)]
        seen = [seen[i] | seen[i ^ offset] for i in range(32)]
    for lane in range(32):
        first, kept = columns.first_kept(lane, count), max(1, count // 8)
        assert list(held[lane]) == list(range(first, first + kept))
        assert seen[lane] == set(range(lane % 4, 32, 4))


# --- operands of an epilogue, read on the CPU as the threads of a warpgroup would


ROWS, COLS, BATCHES = 75, 44, 2
WIDTH = 32
FIRST_ROW, FIRST_COL = 64, 32
"""A tile that D does not fill."""


@cute.jit
def read_operands(
    column: cute.Tensor,
    row: cute.Tensor,
    tile: cute.Tensor,
    shared: cute.Tensor,
    of_column: cute.Tensor,
    of_row: cute.Tensor,
    of_tile: cute.Tensor,
    batch: Int32,
):
    for thread in range(128):
        held = fragment.fetch_row(
            row, Int32(FIRST_COL), row.shape[1], batch, thread, WIDTH, lambda col: col
        )
        fragment.share_row(held, shared, thread)
    for thread in range(128):
        first = fragment.first_row(thread) + FIRST_ROW
        values = fragment.read_column(column, first, column.shape[1], batch)
        for i in cutlass.range_constexpr(2):
            of_column[thread, i] = values[i]
        columns = fragment.read_row(shared, fragment.first_col(thread), WIDTH)
        for i in cutlass.range_constexpr(WIDTH // 4):
            of_row[thread, i] = columns[i]
        elements = fragment.read_tile(
            tile, (first, fragment.first_col(thread) + FIRST_COL), batch, WIDTH
        )
        for i in cutlass.range_constexpr(fragment.sums_of(WIDTH)):
            of_tile[thread, i] = elements[i]


def test_operands_of_a_thread_belong_to_its_sums():
    rng = np.random.default_rng(0)
    column, row, tile = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((BATCHES, ROWS), (BATCHES, COLS), (BATCHES, ROWS, COLS))
    )
    outs = [np.zeros((128, n), np.float32) for n in (2, WIDTH // 4, fragment.sums_of(WIDTH))]
    read_operands(
        *(from_dlpack(x) for x in (column, row, tile.transpose(1, 2, 0), np.zeros(WIDTH, "f"))),
        *(from_dlpack(out) for out in outs),
        Int32(1),
    )
    of_column, of_row, of_tile = outs
    for thread in range(128):
        for i in range(fragment.sums_of(WIDTH)):
            (r, c), (which_row, which_col) = expected(thread, i), fragment.place(i)
            r, c = r + FIRST_ROW, c + FIRST_COL
            assert of_column[thread, which_row] == column[1, min(r, ROWS - 1)]
            assert of_row[thread, which_col] == row[1, min(c, COLS - 1)]
            assert of_tile[thread, i] == (tile[1, r, c] if r < ROWS and c < COLS else 0)


@cute.jit
def write_sums(values: cute.Tensor, tile: cute.Tensor, rows: Int32):
    sums = cute.make_rmem_tensor(fragment.sums_of(WIDTH), Float32)
    for thread in range(128):
        for i in cutlass.range_constexpr(cute.size(sums)):
            sums[i] = values[thread, i]
        at = (
            fragment.first_row(thread) + FIRST_ROW,
            fragment.first_col(thread) + FIRST_COL,
        )
        fragment.write_tile(tile, sums, at, rows)


@pytest.mark.parametrize("rows", [FIRST_ROW, FIRST_ROW + 7, ROWS])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sums_are_written_up_to_a_row(dtype, rows):
    count = fragment.sums_of(WIDTH)
    values = np.arange(128 * count, dtype=np.float32).reshape(128, count)
    wanted = np.full((ROWS, COLS), -1, dtype)
    for thread in range(128):
        for i in range(count):
            r, c = expected(thread, i)
            if FIRST_ROW + r < rows and FIRST_COL + c < COLS:
                wanted[FIRST_ROW + r, FIRST_COL + c] = values[thread, i]
    tile = np.full((ROWS, COLS), -1, dtype)
    write_sums(from_dlpack(values), from_dlpack(tile), Int32(rows))
    assert (tile == wanted).all()
