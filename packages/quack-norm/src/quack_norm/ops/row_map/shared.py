"""Rows in shared memory: how they get there in bulk, and between it, registers and the result.

A row that is not aligned arrives with what lies around it in its 16-byte blocks. Threads own the
same elements wherever a row lies: they are shifted in registers when read and when written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from quack_core.device import copy
from quack_core.reduction.tiling import WARP, RowTiling

from .base import store_row


def bytes_beyond(pointer: cute.Pointer) -> Int32:
    """Bytes from the last multiple of 16 to an address."""
    return Int32(pointer.toint() & Int64(copy.CHUNK - 1))


def padding(dtype: type[cutlass.Numeric], shifted: bool) -> int:
    """Elements by which a row in shared memory is longer, so that its 16-byte blocks fit."""
    return copy.CHUNK * 8 // dtype.width if shifted else 0


def cover(pointer: cute.Pointer, count: Int32, shifted: bool) -> tuple[cute.Pointer, Int32]:
    """Start and length in bytes of the 16-byte blocks that hold ``count`` elements."""
    num_bytes = count * (pointer.dtype.width // 8)
    if not shifted:
        return pointer, num_bytes
    before = bytes_beyond(pointer)
    start = cute.make_ptr(
        pointer.dtype, pointer.toint() - Int64(before), pointer.memspace, assumed_align=copy.CHUNK
    )
    return start, (before + num_bytes + copy.CHUNK - 1) // copy.CHUNK * copy.CHUNK


def read(
    shared: cute.Pointer,
    source: cute.Pointer,
    tiling: RowTiling,
    thread: Int32,
    count: Int32,
    pred: cute.Tensor | None,
    shifted: bool,
    fill: float,
) -> cute.Tensor:
    """The thread's vectors of a slice of a row: registers (vec, passes).

    Args:
        shared: where the blocks that cover the slice lie.
        source: its first element in global memory.
        count: elements of the row from there on.
        pred: which vectors exist; None if all do, or if ``shifted``.
        fill: what lies beyond.
    """
    if not shifted:
        return copy.load_vectors(shared, tiling, thread, copy.CHUNK, pred, fill)
    start, num_bytes = shared + tiling.start(thread), bytes_beyond(source)
    registers = copy.read_shifted(start, num_bytes, tiling.vec, tiling.passes, tiling.step)
    for p in range(tiling.passes):
        index = tiling.start(thread) + p * tiling.step
        copy.clear_outside(registers[None, p], index, count, fill)
    return registers


def vector(shared: cute.Pointer, index: Int32, vec: int) -> cute.Tensor:
    """A vector at an aligned place: registers (vec,)."""
    registers = cute.make_rmem_tensor(vec, shared.dtype)
    start = copy.aligned(shared + index, copy.CHUNK)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(vec)), registers)
    return registers


def write(
    values: cute.TensorSSA,
    target: cute.Pointer,
    tiling: RowTiling,
    thread: Int32,
    count: Int32,
    pred: cute.Tensor | None,
    shifted: bool,
) -> None:
    """Round a thread's values to the output's dtype and write them; arguments as of ``read``."""
    if not shifted:
        store_row(values, target, tiling, thread, copy.CHUNK, pred)
        return
    registers = copy.make_registers(tiling, target.dtype)
    registers.store(values.to(target.dtype))
    copy.store_shifted(registers, target, tiling.start(thread // WARP * WARP), count)
