"""From a warpgroup's registers to D: through shared memory, by TMA, a part at a time."""

from enum import StrEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.tensor_utils import LayoutEnum

from quack_core.device import barrier, tma
from quack_core.reduction.tiling import WARP

from ..visit import BLOCK_SUMS
from . import fragment
from .fragment import PAIR, ROWS, WARPGROUP

ATOM_M = 64
QUAD = 4
"""Neighbouring elements of a row that a thread has of 16 columns of pairs."""
CHUNK = 16
"""Bytes that a swizzle moves as a whole."""


class Form(StrEnum):
    """How a thread's values become columns of an output."""

    PLAIN = "plain"
    """In the order of the product's columns."""
    GATES = "gates"
    """Every second block of 8 columns: gates, where those of all pairs lie side by side in D."""
    UPS = "ups"
    """The blocks between: what they gate."""
    PAIRS = "pairs"
    """A gate and what it gates are neighbours in D, while blocks of 8 alternate in the tile."""
    MIRROR = "mirror"
    """As ``PLAIN``; the output is seen with rows and columns exchanged."""


class Sink(NamedTuple):
    """An output, or a half of its columns, seen by a warpgroup.

    Args:
        form: which values, and where they go.
        tiles: parts of 64 rows, and the buffers of all warpgroups.
        copy: from registers to a buffer; None for ``PAIRS``.
        buffers: the thread's elements of each: (..., buffers); for ``PAIRS`` all of shared memory.
        piece: registers for a part, in the output's dtype.
    """

    form: Form
    tiles: tma.Tiles
    copy: cute.TiledCopy | None
    buffers: cute.Tensor
    piece: cute.Tensor


def smem_layout(
    dtype: type[cutlass.Numeric], major: LayoutEnum, cols: int, buffers: int
) -> cute.ComposedLayout:
    """Of buffers for parts of 64 rows and so many columns."""
    return sm90.make_smem_layout_epi(dtype, major, (ATOM_M, cols), buffers)


def make_sink(
    mma: cute.TiledMma,
    tiles: tma.Tiles,
    shared: cute.Tensor,
    major: LayoutEnum,
    dtype: type[cutlass.Numeric],
    thread: Int32,
    form: Form = Form.PLAIN,
) -> Sink:
    """
    Args:
        mma: of one warpgroup.
        shared: (64, columns, buffers).
        thread: of the warpgroup.
    """
    if form == Form.PAIRS:
        return Sink(form, tiles, None, shared, cute.make_rmem_tensor(QUAD, dtype))
    # Elements of any width go where 16-bit ones would.
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(major.is_m_major_c(), 4), Float16)
    atom = sm90.get_smem_store_op(major, dtype, Float32)
    copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(matrix, mma))
    own = copy.get_slice(thread)
    shape = cute.shape(own.partition_S(shared))[:3]
    return Sink(form, tiles, copy, own.partition_D(shared), cute.make_rmem_tensor(shape, dtype))


@cute.jit
def store_piece(
    sink: Sink,
    values: list[Float32],
    buffer: Int32,
    at: tuple[Int32, Int32, Int32],
    pending: cutlass.Constexpr[int],
    number: Int32,
    thread: Int32,
    wanted: Boolean | bool = True,
) -> None:
    """Store a part: the values that the thread has of it.

    Threads: a warpgroup.
    Synchronises: two named barriers.

    Args:
        values: float32, in the order of the thread's sums.
        at: coordinates of the part.
        pending: stores that may still read other buffers.
        number: of the warpgroup's named barrier.
        wanted: whether it is stored at all; the same in all threads. It counts as a store that is
            pending either way.
    """
    if thread < WARP:
        tma.bulk_wait_read(pending)
    barrier.sync_numbered(number, WARPGROUP)
    if const_expr(sink.form == Form.PAIRS):
        _write_pairs(sink, values, buffer, thread)
    else:
        chosen = of_form(sink.form, values)
        for i in cutlass.range_constexpr(cute.size(sink.piece)):
            sink.piece[i] = chosen[i].to(sink.piece.element_type)
        cute.copy(sink.copy, sink.piece, sink.buffers[None, None, None, buffer])
    tma.publish_shared()
    barrier.sync_numbered(number, WARPGROUP)
    if thread < WARP:
        if wanted:
            tma.store_tile(sink.tiles, buffer, at)
        tma.bulk_commit()


def of_form(form: Form, values: list[Float32]) -> list[Float32]:
    """Those of a thread's values that an output, or a half of it, gets."""
    if form in (Form.PLAIN, Form.MIRROR):
        return values
    first = BLOCK_SUMS if form == Form.UPS else 0
    starts = range(first, len(values), 2 * BLOCK_SUMS)
    return [values[i] for start in starts for i in range(start, start + BLOCK_SUMS)]


def natural(values: list[Float32]) -> list[tuple[int, int, list[Float32]]]:
    """A thread's values as four neighbours in a row each: row of the two, block of 16 columns, values.

    Of each block a thread has columns 4 j to 4 j + 3, j its number of four: gate, up, gate, up.
    """
    found = []
    for block in range(len(values) // (2 * BLOCK_SUMS)):
        gates = values[2 * block * BLOCK_SUMS :][:BLOCK_SUMS]
        ups = values[(2 * block + 1) * BLOCK_SUMS :][:BLOCK_SUMS]
        for row in range(ROWS):
            both = zip(gates[row * PAIR :][:PAIR], ups[row * PAIR :][:PAIR], strict=True)
            found.append((row, block, [value for pair in both for value in pair]))
    return found


def _write_pairs(sink: Sink, values: list[Float32], buffer: Int32, thread: Int32) -> None:
    """Write a thread's pairs where they belong: 4 neighbours at once.

    The shared layout is the one that TMA takes apart: rows side by side, 16-byte pieces of a row
    exchanged by the number of the row.

    Source: CUDA driver API, CUtensorMapSwizzle.
    """
    dtype, cols = sink.piece.element_type, cute.size(sink.buffers, mode=[1])
    element = dtype.width // 8
    row_bytes = cols * element
    iterator: Any = sink.buffers.iterator
    base = Int32(iterator.toint()) + buffer * (ATOM_M * row_bytes)
    for row, block, four in natural(values):
        for i in range(QUAD):
            sink.piece[i] = four[i].to(dtype)
        y = fragment.first_row(thread) + row * fragment.ROW_STEP
        x = block * 16 + thread % 4 * QUAD
        place = y * row_bytes + x * element
        place = place ^ (((place >> 7) & (row_bytes // CHUNK - 1)) << 4)
        pointer = cute.make_ptr(
            dtype, base + place, cute.AddressSpace.smem, assumed_align=QUAD * element
        )
        cute.autovec_copy(sink.piece, cute.make_tensor(pointer, cute.make_layout(QUAD)))
