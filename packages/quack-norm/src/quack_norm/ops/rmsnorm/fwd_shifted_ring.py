"""RMSNorm forward of long rows that are no whole number of vectors (odd N): CTAs that stay.

As ``fwd_shifted``, a thread owns 16-byte pieces of memory. Rows V apart, V the elements of a vector,
begin at the same offset within one, so a cluster keeps to the rows of one offset: the weight is
shifted once, and a row then moves like one of whole vectors.
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr

from quack_core.device import copy

from .config import FwdConfig
from .fwd import arguments, coordinates, slice_pointer
from .fwd_ring import RMSNormFwdRing
from .fwd_shifted import meet
from .spec import RMSNormFwdSpec


class RMSNormFwdShiftedRing(RMSNormFwdRing):
    """Clusters walk over lines: the rows ``phase``, ``phase + V``, ``phase + 2 * V`` and so on.

    Beyond ``RMSNormFwdRing``, per row: one more CTA barrier, and single elements at both ends.
    Global state: a counter per phase, clusters that left.
    """

    def __init__(self, spec: RMSNormFwdSpec, config: FwdConfig):
        super().__init__(spec, config)
        self.cols = config.slice_cols(spec)

    def _share(self, rows: Int32, group: Int32, groups: Int32) -> tuple[Int32, Int32, Int32]:
        vec = self.tiling.vec
        phase = group % vec
        return group // vec, (rows - phase + vec - 1) // vec, (groups - phase + vec - 1) // vec

    def _row(self, group: Int32, line: Int32) -> Int32:
        return group % self.tiling.vec + line * self.tiling.vec

    def _counter(self, group: Int32) -> Int32:
        return 1 + group % self.tiling.vec

    @cute.jit
    def _place(self, mX, group: Int32, line: Int32, rank: Int32, tid: Int32):
        """(thread, first column of the CTA, offset of its rows, elements of its slice)"""
        first = rank * self.cols
        at = coordinates(mX, self._row(group, line))
        offset = copy.vector_offset(slice_pointer(mX, at, first), self.tiling.vec)
        count = self.spec.n - first
        if count > self.cols:
            count = Int32(self.cols)
        return tid, first, offset, count

    def _scratch(self, smem: cutlass.memory.SmemAllocator) -> cute.Tensor:
        layout = cute.make_layout((self.tiling.threads_per_row, self.tiling.vec, 1))
        return smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def _index(self, place, p: int) -> Int32:
        """The first element of the thread in a pass; may lie before the slice."""
        tid, _, offset, _ = place
        return tid * self.tiling.vec + p * self.tiling.step - offset

    @cute.jit
    def _fetch(self, mX, mR, sX, sR, group: Int32, line: Int32, lines: Int32, place, stage: Int32):
        tiling = const_expr(self.tiling)
        tid, first, offset, count = place
        valid = line < lines
        at = coordinates(mX, self._row(group, line if valid else Int32(0)))
        pred = cute.make_rmem_tensor(cute.make_layout((1, 1, tiling.passes)), cutlass.Boolean)
        for p in cutlass.range_constexpr(tiling.passes):
            index = self._index(place, p)
            pred[0, 0, p] = valid & (index + tiling.vec > 0) & (index < count)
        source, target = slice_pointer(mX, at, first) - offset, sX[None, stage].iterator
        copy.fetch_vectors(source, target, tiling, tid, copy.CHUNK, pred)
        if const_expr(mR is not None):
            source, target = slice_pointer(mR, at, first) - offset, sR[None, stage].iterator
            copy.fetch_vectors(source, target, tiling, tid, copy.CHUNK, pred)
        cute.arch.cp_async_commit_group()

    def _read(self, ring: cute.Tensor | None, stage: Int32, place) -> cute.Tensor | None:
        if ring is None:
            return None
        tid, _, _, count = place
        pointer = ring[None, stage].iterator
        registers = copy.load_vectors(pointer, self.tiling, tid, copy.CHUNK)
        for p in range(self.tiling.passes):
            copy.clear_outside(registers[None, p], self._index(place, p), count)
        return registers

    def _weight(self, tensor: cute.Tensor | None, place) -> cute.Tensor | None:
        if tensor is None:
            return None
        first = place[1]
        registers = copy.make_registers(self.tiling, tensor.element_type)
        count, vec = self.spec.n - first, self.tiling.vec
        for p in range(self.tiling.passes):
            pointer, index = tensor.iterator + first, self._index(place, p)
            registers[None, p].store(copy.load_shifted(pointer, index, count, vec).load())
        return registers

    def _sum(self, rX: cute.Tensor, rR: cute.Tensor | None, scratch, place) -> Float32:
        tid, _, offset, _ = place
        squares = cute.make_rmem_tensor(self.tiling.vec, Float32)
        squares.fill(0.0)
        for p in range(self.tiling.passes):
            h = self._value(rX[None, p], None if rR is None else rR[None, p])
            squares.store(squares.load() + h * h)
        return meet(squares, scratch, tid, offset, Int32(0), self.tiling)

    def _store(self, values: cute.TensorSSA, tensor: cute.Tensor, at, place) -> None:
        _, first, _, count = place
        registers = copy.make_registers(self.tiling, tensor.element_type)
        registers.store(values.to(tensor.element_type))
        pointer = slice_pointer(tensor, at, first)
        for p in range(self.tiling.passes):
            piece = registers[None, p]
            copy.store_piece(piece, pointer, self._index(place, p), count, copy.CHUNK)


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwdShiftedRing, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwdShiftedRing(spec, config), arguments(spec, config)
