"""From a warpgroup's registers to D: through shared memory, by TMA, a part at a time."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import warp
from cutlass.tensor_utils import LayoutEnum

from quack_core.device import barrier, tma
from quack_core.reduction.tiling import WARP

from .fragment import WARPGROUP

ATOM_M = 64


class Sink(NamedTuple):
    """An output, seen by a warpgroup.

    Args:
        tiles: parts of 64 rows, and the buffers of all warpgroups.
        copy: from registers to a buffer.
        buffers: the thread's elements of each: (..., buffers).
        piece: registers for a part, in the output's dtype.
    """

    tiles: tma.Tiles
    copy: cute.TiledCopy
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
) -> Sink:
    """Args:
    mma: of one warpgroup.
    shared: (64, columns, buffers).
    thread: of the warpgroup.
    """
    # Elements of any width go where 16-bit ones would.
    matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(major.is_m_major_c(), 4), Float16)
    atom = sm90.get_smem_store_op(major, dtype, Float32)
    copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(matrix, mma))
    own = copy.get_slice(thread)
    shape = cute.shape(own.partition_S(shared))[:3]
    return Sink(tiles, copy, own.partition_D(shared), cute.make_rmem_tensor(shape, dtype))


@cute.jit
def store_piece(
    sink: Sink,
    values: list[Float32],
    buffer: Int32,
    at: tuple[Int32, Int32, Int32],
    pending: cutlass.Constexpr[int],
    number: Int32,
    thread: Int32,
) -> None:
    """Store a part: the values that the thread has of it.

    Threads: a warpgroup.
    Synchronises: two named barriers.

    Args:
        values: float32, in the order of the thread's sums.
        at: coordinates of the part.
        pending: stores that may still read other buffers.
        number: of the warpgroup's named barrier.
    """
    for i in cutlass.range_constexpr(cute.size(sink.piece)):
        sink.piece[i] = values[i].to(sink.piece.element_type)
    if thread < WARP:
        tma.bulk_wait_read(pending)
    barrier.sync_numbered(number, WARPGROUP)
    cute.copy(sink.copy, sink.piece, sink.buffers[None, None, None, buffer])
    tma.publish_shared()
    barrier.sync_numbered(number, WARPGROUP)
    if thread < WARP:
        tma.store_tile(sink.tiles, buffer, at)
        tma.bulk_commit()
