"""Which sums of a tile a thread has, and the operands of an epilogue that belong to them.

A warpgroup has 64 rows at a time, a warp 16 of them. Of every 8 columns, a thread has two neighbours, in
two rows that are 8 apart: sums come in the order (column of the pair, row, 8 columns).

Source: PTX ISA, wgmma.mma_async, register fragment of D.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.reduction.tiling import WARP

PAIR = 2
ROWS = 2
"""Rows of a thread, ``ROW_STEP`` apart."""
ROW_STEP = 8
BLOCK = 8
"""Columns of which a thread has a pair."""
WARPGROUP = 128


def first_row(thread: Int32) -> Int32:
    """The first row of a thread of a warpgroup, of 64."""
    return thread // WARP * 16 + thread % WARP // 4


def first_col(thread: Int32) -> Int32:
    """The first column of a thread, of 8."""
    return thread % 4 * PAIR


def sums_of(cols: int) -> int:
    """Sums of a thread in 64 rows of so many columns."""
    return cols // BLOCK * PAIR * ROWS


def place(i: int) -> tuple[int, int]:
    """Row, of the thread's two, and column, of the thread's pairs, of its sum number i."""
    return i // PAIR % ROWS, i // (PAIR * ROWS) * PAIR + i % PAIR


def offset(i: int) -> tuple[int, int]:
    """Rows and columns from a thread's first sum to its sum number i."""
    row, col = place(i)
    return row * ROW_STEP, col // PAIR * BLOCK + col % PAIR


def number_type(tensor: cute.Tensor) -> type[cutlass.Numeric]:
    """What elements of a vector are computed with as: integers stay integers."""
    return Int32 if issubclass(tensor.element_type, cutlass.Integer) else Float32


@cute.jit
def read_column(tensor: cute.Tensor, row: Int32, rows: Int32, batch: Int32) -> list:
    """The thread's two values of a column operand.

    Args:
        tensor: (M,) or (L, M).
        row: of the thread's first sum, in D.
        rows: of D.
    """
    found = []
    for i in cutlass.range_constexpr(ROWS):
        at = cutlass.min(row + i * ROW_STEP, rows - 1)
        found.append(_element(tensor, at, batch))
    return found


@cute.jit
def fetch_row(
    tensor: cute.Tensor,
    col: Int32,
    cols: Int32,
    batch: Int32,
    thread: Int32,
    count: cutlass.Constexpr[int],
    natural: cutlass.Constexpr[Callable[[Int32], Int32]],
) -> cute.Tensor:
    """The thread's share of a tile's part of a row operand, on its way to ``share_row``.

    Args:
        tensor: (N,) or (L, N).
        col: of the tile's first column, in D.
        cols: of D.
        count: columns of the tile.
        natural: which element belongs to a column.
    """
    held = cute.make_rmem_tensor(-(-count // WARPGROUP), number_type(tensor))
    for i in cutlass.range_constexpr(cute.size(held)):
        at = natural(cutlass.min(col + thread + i * WARPGROUP, cols - 1))
        held[i] = _element(tensor, at, batch)
    return held


@cute.jit
def share_row(held: cute.Tensor, shared: cute.Tensor, thread: Int32) -> None:
    """Write it into shared memory: (columns of the tile,), of the same dtype."""
    for i in cutlass.range_constexpr(cute.size(held)):
        at = thread + i * WARPGROUP
        if at < cute.size(shared):
            shared[at] = held[i]


@cute.jit
def read_row(shared: cute.Tensor, col: Int32, cols: cutlass.Constexpr[int]) -> cute.Tensor:
    """The thread's values of a row operand, for so many columns: (pairs of columns,).

    Args:
        col: of the thread's first sum, in the tile.
    """
    found = cute.make_rmem_tensor((PAIR, cols // BLOCK), shared.element_type)
    layout = cute.make_layout((PAIR, cols // BLOCK), stride=(1, BLOCK))
    source = cute.make_tensor((shared.iterator + col).align(8), layout)
    for i in cutlass.range_constexpr(cols // BLOCK):
        cute.autovec_copy(source[None, i], found[None, i])
    return found


@cute.jit
def read_tile(
    tensor: cute.Tensor, at: tuple[Int32, Int32], batch: Int32, cols: cutlass.Constexpr[int]
) -> cute.Tensor:
    """The thread's elements of an operand of D's shape, for so many columns; zeros outside.

    Args:
        tensor: (M, N, L), any memory order.
        at: row and column of the thread's first sum, in D.
    """
    rows, width = tensor.shape[0], tensor.shape[1]  # type: ignore[index]
    found = cute.make_rmem_tensor(sums_of(cols), tensor.element_type)
    found.fill(tensor.element_type(0.0))
    for i in cutlass.range_constexpr(cute.size(found)):
        r, c = const_expr(place(i))
        row, col = at[0] + r * ROW_STEP, at[1] + c // PAIR * BLOCK + c % PAIR
        if row < rows and col < width:
            found[i] = tensor[Int64(row), Int64(col), Int64(batch)]
    return found


@cute.jit
def read_pairs(
    tensor: cute.Tensor,
    at: tuple[Int32, Int32],
    batch: Int32,
    cols: cutlass.Constexpr[int],
    apart: Int32,
    step: cutlass.Constexpr[int],
) -> tuple[cute.Tensor, cute.Tensor]:
    """The thread's two values of an operand with twice the columns of D; zeros outside.

    Args:
        tensor: (M, 2 N, L).
        at: row and column of the thread's first sum, in D.
        apart: columns from the first value to the second.
        step: columns from one first value to the next.
    """
    rows, width = tensor.shape[0], tensor.shape[1]  # type: ignore[index]
    first = cute.make_rmem_tensor(sums_of(cols), tensor.element_type)
    second = cute.make_rmem_tensor(sums_of(cols), tensor.element_type)
    first.fill(tensor.element_type(0.0))
    second.fill(tensor.element_type(0.0))
    for i in cutlass.range_constexpr(cute.size(first)):
        r, c = const_expr(place(i))
        row, col = at[0] + r * ROW_STEP, at[1] + c // PAIR * BLOCK + c % PAIR
        if row < rows and 2 * col < width:
            first[i] = tensor[Int64(row), Int64(col * step), Int64(batch)]
            second[i] = tensor[Int64(row), Int64(col * step + apart), Int64(batch)]
    return first, second


@cute.jit
def write_tile(
    tensor: cute.Tensor, sums: cute.Tensor, at: tuple[Int32, Int32], rows: Int32
) -> None:
    """Write the thread's sums, pair by pair, where rows end at no multiple of anything.

    Args:
        tensor: (M, N), row by row, whose pairs lie at multiples of their size; N is even.
        sums: float32, of a tile.
        at: row and column of the thread's first sum, in D.
        rows: those from here on are left alone.
    """
    dtype = tensor.element_type
    pair = cute.make_rmem_tensor(PAIR, dtype)
    for i in cutlass.range_constexpr(0, cute.size(sums), PAIR):
        r, c = const_expr(place(i))
        row, col = at[0] + r * ROW_STEP, at[1] + c // PAIR * BLOCK
        if row < rows and col < tensor.shape[1]:  # type: ignore[index]
            for j in cutlass.range_constexpr(PAIR):
                pair[j] = sums[i + j].to(dtype)
            source = tensor.iterator + cute.crd2idx((Int64(row), col), tensor.layout)
            target = source.align(PAIR * dtype.width // 8)
            cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(PAIR)))


def _element(tensor: cute.Tensor, index: Int32, batch: Int32) -> Any:
    """As ``number_type`` says; of integers that int32 does not have, the ends of its range."""
    found = tensor[index] if cute.rank(tensor) == 1 else tensor[Int64(batch), index]
    if number_type(tensor) is Float32:
        return Float32(found)
    if tensor.element_type.width > Int32.width:
        found = cutlass.min(cutlass.max(found, Int64(-(2**31))), Int64(2**31 - 1))
    return Int32(found)
