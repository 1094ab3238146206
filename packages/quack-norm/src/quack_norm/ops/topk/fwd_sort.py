"""Top-k forward of short rows: a row in the registers of a warp, or of a part of it."""

import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, const_expr

from quack_core.device import copy
from quack_norm.ops.row_map.base import coordinates, slice_pointer

from .config import SortConfig
from .fwd import TopKFwd, arguments
from .keys import choose
from .spec import TopKFwdSpec


class TopKSort(TopKFwd):
    """Each CTA sorts the keys of ``rows_per_cta`` rows, as far as the first k need it.

    Threads: ``threads_per_row`` lanes of a warp per row.
    Shared memory: the k keys of each row; partial sums.
    Synchronises: warps only.
    Traffic: x once, and of it the k elements again, from L1 or L2; values and indices once.
    """

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, rows: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * self.tiling.rows_per_cta + self.row_in_cta(tid)
        valid = row < rows  # others repeat the first row and write nothing
        pX = slice_pointer(mX, coordinates(mX, row if valid else Int32(0)), 0)
        smem = cutlass.memory.SmemAllocator()
        shape = (self.config.capacity(self.spec), self.tiling.rows_per_cta)
        sKeys = smem.allocate_tensor(self.keys.dtype, cute.make_layout(shape), byte_alignment=16)
        exchange = self.allocate(smem) if const_expr(self.spec.softmax) else None

        thread, mine = self.thread_in_row(tid), sKeys[None, self.row_in_cta(tid)]
        keys = self.sort(self._load(pX, thread), thread, mine)
        self.publish(keys, mine, thread)
        self.write(mine, exchange, pX, mValues, mIndices, row, valid, tid)

    def _load(self, pX: cute.Pointer, thread: Int32) -> list:
        """Keys of a thread's elements; 0 where there is none."""
        tiling = self.config.tiling(self.spec)
        pred = copy.column_predicate(tiling, thread, Int32(0), Boolean(True))  # (1, 1, passes)
        rX = copy.load_vectors(pX, tiling, thread, self.spec.align, pred)  # (vec, passes)
        keys = [self.keys.dtype(0)] * self.config.num_keys(self.spec)
        for p in range(tiling.passes):
            first = tiling.start(thread) + p * tiling.step
            for v in range(tiling.vec):
                key = self.keys.of(rX[None, p], v, first + v)
                keys[p * tiling.vec + v] = choose(pred[0, 0, p], key, self.keys.dtype(0))
        return keys


def build(spec: TopKFwdSpec, config: SortConfig) -> tuple[TopKSort, tuple]:
    """The kernel and its symbolic arguments."""
    return TopKSort(spec, config), arguments(spec)
