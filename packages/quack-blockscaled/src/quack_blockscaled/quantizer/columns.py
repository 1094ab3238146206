"""Quantise along the columns of matrices, and along their rows from the same read if that is asked for."""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, Int64, const_expr

from quack_core.device import copy

from . import convert
from .spec import TILE, VECTOR, WARP, QuantizeConfig, QuantizeSpec

ROWS, COLS = TILE
PADDED = COLS + 4
"""Blocks of one column (row) of the tile lie this far apart: neighbouring lanes, which have neighbouring
blocks, use different banks."""
LANES = COLS // VECTOR


class Tile(NamedTuple):
    """Where 128x128 elements lie in matrices (batch, m, n)."""

    matrix: Int64
    top: Int32
    left: Int32
    m: Int32
    n: Int32

    def has(self, row: Int32, col: Int32) -> Boolean:
        """Whether an element of the tile is one of the matrix."""
        return (self.top + row < self.m) & (self.left + col < self.n)

    def offset(self, row: Int32, col: Int32) -> Int64:
        """Of an element of the tile, in elements."""
        return ((self.matrix * self.m + self.top + row) * self.n) + self.left + col

    def turned(self) -> "Tile":
        """The same in the transposed matrices."""
        return Tile(self.matrix, self.left, self.top, self.n, self.m)


class QuantizeColumns:
    """Elements and scales of matrices (M, N) whose transpose is written, and of themselves.

    A CTA has a tile of 128x128. Threads: each has 8 rows of 8 columns, from one read; largest
    magnitudes of rows come from shuffles, of columns also through shared memory.
    Shared memory: largest magnitudes of blocks, in whose place the inverses of their scales then lie,
    each made by one thread; the transposed codes.
    Synchronises: three CTA barriers.
    Traffic: x, elements and scales of each copy, once each.
    """

    def __init__(self, spec: QuantizeSpec, config: QuantizeConfig):
        self.spec, self.threads, self.native = spec, config.threads, config.native
        self.square = spec.format.block == TILE  # one scale, of both copies
        self.block = spec.format.cols
        self.blocks = COLS // self.block  # of a row or column of the tile
        self.warps = self.block * config.threads // WARP // ROWS  # that have rows of a block

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (batch * M * N,)
        rows: tuple[cute.Tensor, cute.Tensor] | None,  # values and scales of (batch, M, N)
        columns: tuple[cute.Tensor, cute.Tensor],  # of (batch, N, M)
        batch: Int32,
        m: Int32,
        n: Int32,
        stream: cuda.CUstream,
    ):
        down, across = (m + ROWS - 1) // ROWS, (n + COLS - 1) // COLS
        self.kernel(x, rows, columns, m, n, down, across).launch(
            grid=[batch * down * across, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        rows: tuple[cute.Tensor, cute.Tensor] | None,
        columns: tuple[cute.Tensor, cute.Tensor],
        m: Int32,
        n: Int32,
        down: Int32,
        across: Int32,
    ):
        # --- coordinates: of the tile, and of the thread's 8x8 elements in it
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rest, right = block // across, block % across
        tile = Tile(Int64(rest // down), rest % down * ROWS, right * COLS, m, n)
        row, col = tid // LANES * VECTOR, tid % LANES * VECTOR
        in_rows, in_cols, turned = self._allocate()

        # --- load, largest magnitudes
        held = self._load(x, tile, row, col)
        if const_expr(self.square):
            self._post_tile(held, in_cols, tid)
        else:
            self._post_columns(held, in_cols, tid, col)
            if const_expr(rows is not None):
                self._post_rows(held, in_rows, row, tid)
        cute.arch.sync_threads()

        # --- scales, each by one thread
        if const_expr(self.square):
            self._tile_scale(in_cols, rows, columns, tile, tid)
        else:
            self._scales(in_cols, columns[1], tile.turned(), tid, self.warps)
            if const_expr(rows is not None):
                self._scales(in_rows, rows[1], tile, tid, 1)
        cute.arch.sync_threads()

        # --- quantise; rows are stored, columns turned in shared memory
        if const_expr(rows is not None):
            self._store_rows(held, in_rows, in_cols, rows[0], tile, row, col)
        self._turn_columns(held, in_cols, turned, row, col)
        cute.arch.sync_threads()
        self._store_columns(turned, columns[0], tile.turned(), tid)

    @cute.jit
    def _load(self, x: cute.Tensor, tile: Tile, row: Int32, col: Int32) -> cute.Tensor:
        """Eight rows of eight columns, (column, row); zeros outside, where they are as a whole."""
        held = cute.make_rmem_tensor(cute.make_layout((VECTOR, VECTOR)), x.element_type)
        held.fill(x.element_type(0.0))
        if tile.has(row, col):
            first = tile.offset(row, col) // VECTOR
            for i in cutlass.range_constexpr(VECTOR):
                at = first + i * (tile.n // VECTOR)
                cute.autovec_copy(convert.vector(x, at, VECTOR), held[None, i])
        return held

    def _allocate(self) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Words of blocks of rows (row, block) and of columns (column, warp), and the tile turned:
        (words of 16 bytes, columns)."""
        smem = cutlass.memory.SmemAllocator()
        warps = self.threads // WARP
        words = [
            smem.allocate_tensor(
                Int32, cute.make_layout((COLS, size), stride=(1, PADDED)), byte_alignment=16
            )
            for size in (self.blocks, warps)
        ]
        turned = smem.allocate_tensor(Int32, cute.make_layout((ROWS // 4, COLS)), byte_alignment=16)
        return words[0], words[1], turned

    @cute.jit
    def _post_columns(self, held: cute.Tensor, found: cute.Tensor, tid: Int32, col: Int32):
        """The largest magnitudes of 16 rows of a warp, to (column, warp)."""
        each = convert.largest_of_columns(held)
        for j in cutlass.range_constexpr(VECTOR):
            other = cute.arch.shuffle_sync_bfly(each[j], offset=LANES)
            each[j] = convert.largest_of([each[j], other])
        if tid % WARP < LANES:
            cute.autovec_copy(each, _vector(found, col, tid // WARP))

    @cute.jit
    def _post_rows(self, held: cute.Tensor, found: cute.Tensor, row: Int32, tid: Int32):
        """The largest magnitudes of blocks of rows, to (row, block)."""
        lanes = const_expr(self.block // VECTOR)
        for i in cutlass.range_constexpr(VECTOR):
            amax = convert.over_lanes(convert.largest(held[None, i]), lanes)
            if tid % lanes == 0:
                found[row + i, tid % LANES // lanes] = amax

    @cute.jit
    def _post_tile(self, held: cute.Tensor, found: cute.Tensor, tid: Int32):
        """The largest magnitude of each warp, to (0, warp)."""
        each = [convert.largest(held[None, i]) for i in range(VECTOR)]
        amax = convert.over_lanes(convert.largest_of(each), WARP)
        if tid % WARP == 0:
            found[0, tid // WARP] = amax

    @cute.jit
    def _scales(
        self,
        words: cute.Tensor,
        scales: cute.Tensor,
        tile: Tile,
        tid: Int32,
        each: cutlass.Constexpr[int],
    ):
        """Largest magnitudes of blocks to scales, stored, and to their inverses, in the same place.

        Args:
            words: (row, part of a block).
            tile: whose rows are quantised along.
            each: parts of a block.
        """
        for i in cutlass.range_constexpr(-(-COLS * self.blocks // self.threads)):
            pair = tid + i * self.threads
            row, block = pair // self.blocks, pair % self.blocks
            if pair < COLS * self.blocks:
                amax = convert.largest_of([words[row, block * each + w] for w in range(each)])
                scale, inverse = convert.scale(self.spec, amax)
                words[row, block * each] = inverse.bitcast(Int32)
                col = block * self.block
                if tile.has(row, col):
                    convert.store_scale(scales, tile.offset(row, col) // self.block, scale)

    @cute.jit
    def _tile_scale(
        self,
        words: cute.Tensor,
        rows: tuple[cute.Tensor, cute.Tensor] | None,
        columns: tuple[cute.Tensor, cute.Tensor],
        tile: Tile,
        tid: Int32,
    ):
        """The scale of the tile, stored, and its inverse to (0, 0)."""
        if tid == 0:
            amax = convert.largest_of([words[0, warp] for warp in range(self.threads // WARP)])
            scale, inverse = convert.scale(self.spec, amax)
            words[0, 0] = inverse.bitcast(Int32)
            below, right = tile.top // ROWS, tile.left // COLS
            down, across = tile.m // ROWS, tile.n // COLS
            columns[1][(tile.matrix * across + right) * down + below] = scale
            if const_expr(rows is not None):
                rows[1][(tile.matrix * down + below) * across + right] = scale

    @cute.jit
    def _store_rows(
        self,
        held: cute.Tensor,
        in_rows: cute.Tensor,
        in_cols: cute.Tensor,
        values: cute.Tensor,
        tile: Tile,
        row: Int32,
        col: Int32,
    ):
        """Eight codes of each of eight rows."""
        if tile.has(row, col):
            first = tile.offset(row, col) // VECTOR
            for i in cutlass.range_constexpr(VECTOR):
                word = (
                    in_cols[0, 0]
                    if const_expr(self.square)
                    else in_rows[row + i, col // self.block]
                )
                numbers = convert.widened(held[None, i])
                codes = convert.codes(self.spec, self.native, numbers, convert.as_float(word))
                there = convert.words(values, first + i * (tile.n // VECTOR), VECTOR)
                cute.autovec_copy(convert.registers(codes), there)

    @cute.jit
    def _turn_columns(
        self, held: cute.Tensor, words: cute.Tensor, turned: cute.Tensor, row: Int32, col: Int32
    ):
        """Eight codes of each of eight columns, to where 16 bytes of a column are read as one.

        The 16 bytes of a column are exchanged by its number, and their halves, so that lanes, which
        have columns 8 apart, use different banks.
        """
        inverses = cute.make_rmem_tensor(VECTOR, Int32)
        if const_expr(self.square):
            inverses.fill(words[0, 0])
        else:
            part = row // self.block * self.warps
            cute.autovec_copy(_vector(words, col, part), inverses)
        numbers = [convert.widened(held[None, i]) for i in range(VECTOR)]
        lane, unit = col // VECTOR, row // VECTOR
        place = ((unit // 2) ^ (lane % 8)) * 4 + ((unit % 2) ^ (lane // 8)) * 2
        for j in cutlass.range_constexpr(VECTOR):
            down = [numbers[i][j] for i in range(VECTOR)]
            codes = convert.codes(self.spec, self.native, down, convert.as_float(inverses[j]))
            there = copy.aligned(turned.iterator + (col + j) * (ROWS // 4) + place, 8)
            cute.autovec_copy(
                convert.registers(codes), cute.make_tensor(there, cute.make_layout(2))
            )

    @cute.jit
    def _store_columns(self, turned: cute.Tensor, values: cute.Tensor, tile: Tile, tid: Int32):
        """16 bytes a thread, 128 of a column by neighbouring lanes.

        Args:
            tile: in the transposed matrices.
        """
        units = const_expr(ROWS // 16)
        step = const_expr(self.threads // units)  # columns at once
        row = tid % units * 16
        for i in cutlass.range_constexpr(COLS // step):
            col = tid // units + i * step
            place = ((row // 16) ^ (col // VECTOR % 8)) * 4
            start = copy.aligned(turned.iterator + col * (ROWS // 4) + place, 16)
            read = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(4)), read)
            if const_expr(i * step >= COLS // 2):  # halves were exchanged
                read = convert.registers([read[2], read[3], read[0], read[1]])
            if tile.has(col, row):
                there = convert.words(values, tile.offset(col, row) // 16, 16)
                cute.autovec_copy(read, there)


def _vector(words: cute.Tensor, first: Int32, block: Int32) -> cute.Tensor:
    """Words of 8 lines in a row."""
    start: Any = words.iterator + block * PADDED + first
    return cute.make_tensor(copy.aligned(start, 16), cute.make_layout(VECTOR))


def build(spec: QuantizeSpec, config: QuantizeConfig) -> tuple[QuantizeColumns, tuple]:
    """The kernel and its symbolic arguments."""
    x, values, scales, *_ = convert.arguments(spec.x, spec.format)
    other_values, other_scales = convert.arguments(spec.x, spec.format)[1:3]
    rows = (other_values, other_scales) if spec.copies == "both" else None
    sizes = (Int32(0), Int32(0), Int32(0))
    return QuantizeColumns(spec, config), (x, rows, (values, scales), *sizes)
