"""What an operator on rows computes, apart from how rows move; and the pieces that all of them use."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64

from quack_core.device import copy, l2
from quack_core.device.barrier import NamedBarrier
from quack_core.device.reduce import SUM, Partial, Reduction, side_by_side
from quack_core.reduction.base import ReductionBase
from quack_core.reduction.tiling import RowTiling

from .config import LATE_WORDS, words

Values = cute.TensorSSA | tuple[cute.TensorSSA | Float32, ...]
"""float32 vectors of a thread: one, or several that belong together, with numbers for all of them."""


class RowMap(ReductionBase):
    """A kernel that reads one or two rows, reduces over them, and writes one or two.

    An operator is a class with the methods below, mixed into a class that moves rows. What a row
    lacks at its end reads as ``fill``.
    """

    fill = 0.0
    num_values = 1  # vectors that ``combine`` gives
    needs_exists = False  # whether ``partial`` has to know what belongs to the row
    holds = False  # whether threads hold their values between reduction and result

    def __init__(self, spec, config, buffers: int = 1, barrier: NamedBarrier | None = None):
        self.spec, self.config = spec, config
        self.of_row = self.reduction_of(spec)
        several = side_by_side(self.of_row, config.rows_per_thread)
        super().__init__(config.tiling(spec), several, buffers, barrier)

    def reduction_of(self, spec) -> Reduction:
        """The reduction of ``partial``."""
        return SUM

    def combine(
        self,
        first: cute.TensorSSA,
        second: cute.TensorSSA | None,
        scalars: tuple[Float32, ...],
    ) -> Values:
        """The values that are reduced, and written to the second output if there is one."""
        raise NotImplementedError

    def partial(self, values: Values, exists: cute.TensorSSA | None) -> Partial:
        """A thread's part of the reduction.

        Args:
            exists: which elements belong to the row; None if all do, or if ``needs_exists`` is false.
        """
        raise NotImplementedError

    def keep(self, values: Values, exists: cute.TensorSSA | None) -> tuple[Values, Partial]:
        """Instead of ``partial`` where ``holds``: also what ``result`` needs of the values."""
        return values, self.partial(values, exists)

    def finish(self, total: Partial, scalars: tuple[Float32, ...]) -> tuple[Float32, ...]:
        """What is known of a row after the reduction; its first values are the row's statistics."""
        raise NotImplementedError

    def result(
        self,
        values: Values,
        known: tuple[Float32, ...],
        columns: tuple[cute.Tensor | None, ...],
        scalars: tuple[Float32, ...],
    ) -> cute.TensorSSA:
        """The values to write.

        Args:
            columns: registers of the operands that all rows share, such as weight and bias.
        """
        raise NotImplementedError

    def smem_percent(self, l1: bool) -> int:
        """How much of an SM's memory to ask for: what its CTAs need, or all.

        Args:
            l1: whether L1, which has the rest, should keep column operands.
        """
        if not l1:
            return 100
        reserved = 1024  # by the system, for each CTA
        of_sm = cutlass.memory.SmemAllocator.capacity_in_bytes() + reserved
        needed = max(1, self.config.ctas_per_sm) * (self.config.smem_bytes(self.spec) + reserved)
        return min(100, -(-100 * needed // of_sm))

    def policy(self, mX: cute.Tensor) -> Int64 | None:
        """What L2 is told of the rows that are read."""
        return row_policy(mX)

    def by_vector(
        self, rows: list[Values], known: list, columns, scalars, dtype, tiling: RowTiling
    ) -> list[cute.TensorSSA]:
        """``result`` of rows in the output's dtype, for a thread's vectors (vec, passes) one by one.

        So that column operands take few registers, and are read once for all rows.

        Args:
            known: of each row.
            columns: gives the registers of column operands for a pass.
        """
        stored, out = [], [copy.make_registers(tiling, dtype) for _ in rows]
        for values in rows:
            stored.append([])
            for part in apart(values):
                stored[-1].append(part)
                if isinstance(part, cute.TensorSSA):
                    stored[-1][-1] = copy.make_registers(tiling, Float32)
                    stored[-1][-1].store(part)
        at_once = max(1, LATE_WORDS // max(1, int(tiling.vec * words(*self.spec.columns))))
        for p in range(tiling.passes):
            if p and p % at_once == 0:  # or else all of them come first, and spill
                cute.arch.sync_warp()
            operands = columns(p)
            for parts, facts, registers in zip(stored, known, out, strict=True):
                vector = together(
                    [q[None, p].load() if isinstance(q, cute.Tensor) else q for q in parts]
                )
                registers[None, p].store(self.result(vector, facts, operands, scalars).to(dtype))
        return [registers.load() for registers in out]

    def exists(self, tiling: RowTiling, thread: Int32, count: Int32) -> cute.TensorSSA | None:
        """Which of a thread's elements (vec, passes) belong to the row.

        Args:
            tiling: of a slice of the row.
            count: elements of the row from the slice's first on.
        """
        if not self.needs_exists or tiling.cols * tiling.cluster == self.spec.n:
            return None
        return existing(tiling, thread, count)

    @cute.jit
    def count_from(self, first: Int32, cols: cutlass.Constexpr[int]) -> Int32:
        """Elements of a slice of ``cols`` columns of a row; it may lie beyond the end."""
        count = self.spec.n - first
        if count > cols:
            count = Int32(cols)
        if count < 0:
            count = Int32(0)
        return count

    def values(self, registers: list, scalars: tuple[Float32, ...]) -> Values:
        """``combine`` on registers of the rows' dtypes; None for an absent second row."""
        first, second = (None if r is None else r.load().to(Float32) for r in registers)
        return self.combine(first, second, scalars)


def existing(tiling: RowTiling, thread: Int32, count: Int32) -> cute.TensorSSA:
    """Which of a thread's elements (vec, passes) are among the first ``count`` of a slice."""
    return within((tiling.vec, tiling.passes), tiling.start(thread), tiling.step, count)


def within(shape: tuple[int, int], first: Int32, step: int, count: Int32) -> cute.TensorSSA:
    """Which elements of vectors (vec, vectors) lie before ``count``.

    Args:
        first: index of their first element.
        step: from one vector to the next.
    """
    found = cute.make_rmem_tensor(shape, Boolean)
    for p in range(shape[1]):
        for v in range(shape[0]):
            found[v, p] = first + p * step + v < count
    return found.load()


def apart(values: Values) -> tuple[cute.TensorSSA | Float32, ...]:
    """The vectors and numbers of values."""
    return values if isinstance(values, tuple) else (values,)


def together(parts: list[cute.TensorSSA | Float32]) -> Values:
    """The inverse of ``apart``."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def num_rows(tensor: cute.Tensor) -> Int32:
    """Rows of (M, N) or (M1, M0, N)."""
    if cute.rank(tensor) == 2:
        return tensor.shape[0]
    return tensor.shape[0] * tensor.shape[1]


def coordinates(tensor: cute.Tensor, row: Int32) -> tuple[Int32, ...]:
    """A row index as coordinates of (M, N) or (M1, M0, N)."""
    if cute.rank(tensor) == 2:
        return (row,)
    inner = tensor.shape[1]
    return row // inner, row % inner


def row_policy(tensor: cute.Tensor) -> Int64:
    """What L2 is told of rows that are read once, while as many are written."""
    width = tensor.element_type.width // 8
    return l2.streamed(Int64(num_rows(tensor)) * tensor.shape[-1] * width)


def slice_pointer(tensor: cute.Tensor, at: tuple[Int32, ...], first: Int32) -> cute.Pointer:
    """Element ``first`` of a row. 64-bit: a 32-bit offset would wrap at 2**32 elements."""
    return tensor[(*(Int64(i) for i in at), None)].iterator + first


def column_pointer(tensor: cute.Tensor, at: tuple[Int32, ...], first: Int32) -> cute.Pointer:
    """Element ``first`` of an operand that all rows share, or all rows of a head."""
    if cute.rank(tensor) == 1:
        return tensor.iterator + first
    return tensor[Int64(at[-1]), None].iterator + first


def store_statistics(
    tensor: cute.Tensor, at: tuple[Int32, ...], known: tuple[Float32, ...]
) -> None:
    """One value per row, or as many as the last dimension of the tensor has."""
    if cute.rank(tensor) == len(at):
        tensor[at if len(at) > 1 else at[0]] = known[0]
    else:
        for i in range(tensor.shape[-1]):
            tensor[(*at, i)] = known[i]


def store_row(values, pointer: cute.Pointer, tiling, thread: Int32, align: int, pred) -> None:
    """Round a thread's values to the output's dtype and write them to its vectors."""
    registers = copy.make_registers(tiling, pointer.dtype)
    registers.store(values.to(pointer.dtype))
    copy.store_vectors(registers, pointer, tiling, thread, align, pred)


def store_piece(
    values, start: cute.Pointer, index: Int32, count: Int32, align: int, whole: bool = False
) -> None:
    """Round one vector to the output's dtype and write it: ``copy.store_piece``."""
    registers = cute.make_rmem_tensor(cute.size(values.shape), start.dtype)
    registers.store(values.to(start.dtype))
    copy.store_piece(registers, start, index, count, align, whole)
