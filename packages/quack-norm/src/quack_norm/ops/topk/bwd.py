"""Top-k backward: zeros and the gradients of the selected elements, written together."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import copy
from quack_core.device.reduce import SUM
from quack_core.jit.compile import symbolic
from quack_core.reduction.base import ReductionBase

from .config import BwdConfig
from .keys import choose
from .spec import TopKBwdSpec


class TopKBwd(ReductionBase):
    """Each CTA writes a tile of dx: consecutive elements, of one row or of several.

    The tile is put together in shared memory, zeros first. Then the CTA goes through the rows that
    meet the tile, ``rows_per_cta`` at a time, and keeps the gradients whose place is in it. A row
    that meets several tiles is read by each of them.

    Threads: ``threads_per_row`` share the gradients of a row.
    Shared memory: the tile; partial sums.
    Synchronises: two CTA barriers; with softmax, one more per round if a row has more than a warp.
    Traffic: dx once, in whole 16-byte accesses; gradients and indices once per row and tile.
    """

    def __init__(self, spec: TopKBwdSpec, config: BwdConfig):
        super().__init__(config.tiling(spec), SUM, buffers=2)
        self.spec, self.config, self.tile = spec, config, config.tile(spec)

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        dvalues: cute.Tensor,  # (M, k)
        indices: cute.Tensor,  # (M, k)
        values: cute.Tensor | None,  # (M, k), with softmax
        dx: cute.Tensor,  # (M, N)
        stream: cuda.CUstream,
    ):
        size = Int64(dx.shape[0]) * self.spec.n
        self.kernel(dvalues, indices, values, dx, size).launch(
            grid=[Int32((size + (self.tile - 1)) // self.tile), 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mDvalues: cute.Tensor,
        mIndices: cute.Tensor,
        mValues: cute.Tensor | None,
        mDx: cute.Tensor,
        size: Int64,
    ):
        n, rows_per_cta = const_expr(self.spec.n), const_expr(self.tiling.rows_per_cta)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = Int64(block) * self.tile
        count = choose(size - first < self.tile, Int32(size - first), Int32(self.tile))
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout(self.tile)
        sDx = smem.allocate_tensor(mDx.element_type, layout, byte_alignment=16)
        exchange = self.allocate(smem) if const_expr(self.spec.softmax) else None

        self._clear(sDx, tid)
        top = Int32(first // n)  # the row of the tile's first element
        bottom = Int32((first + (count - 1)) // n)
        rounds = (bottom - top) // rows_per_cta + 1
        for i in cutlass.range(rounds, unroll=1):
            row = top + i * rows_per_cta + self.row_in_cta(tid)
            begin = Int64(row) * n - first  # of the row, in the tile
            operands = mDvalues, mIndices, mValues
            self._row(operands, row, row <= bottom, begin, sDx, exchange, tid, i)
        cute.arch.sync_threads()
        self._write(sDx, mDx.iterator + first, count, tid)

    @cute.jit
    def _clear(self, sDx: cute.Tensor, tid: Int32) -> None:
        """Synchronises: one CTA barrier."""
        vec = const_expr(copy.CHUNK * 8 // sDx.element_type.width)
        zeros = cute.make_rmem_tensor(vec, sDx.element_type)
        zeros.fill(0)
        for i in cutlass.range_constexpr(self.tile // vec // self.tiling.num_threads):
            index = (i * self.tiling.num_threads + tid) * vec
            copy.store_piece(zeros, sDx.iterator, index, Int32(self.tile), copy.CHUNK, True)
        cute.arch.sync_threads()

    @cute.jit
    def _row(
        self, operands: tuple, row: Int32, valid: Boolean, begin: Int64, sDx, exchange, tid, i
    ) -> None:
        """Put the gradients of a row into the tile.

        Args:
            begin: of the row in the tile; negative if it begins before.
            i: the round.

        Synchronises: with softmax, the reduction.
        """
        mDvalues, mIndices, mValues = operands
        tiling = const_expr(self.tiling)
        start = tiling.start(self.thread_in_row(tid))
        wanted = [start + p * tiling.step for p in range(tiling.passes)]
        inside = [valid & (p < self.spec.k) for p in wanted]
        at = [
            (Int64(choose(exists, row, Int32(0))), choose(exists, p, Int32(0)))
            for p, exists in zip(wanted, inside, strict=True)
        ]
        places = [begin + mIndices[where] for where in at]
        gradients = [mDvalues[where].to(Float32) for where in at]
        if const_expr(self.spec.softmax):
            probabilities = [mValues[where].to(Float32) for where in at]
            gradients = self._through_softmax(gradients, probabilities, inside, exchange, tid, i)
        for p in cutlass.range_constexpr(tiling.passes):
            if inside[p] & (places[p] >= 0) & (places[p] < self.tile):
                sDx[Int32(places[p])] = gradients[p].to(sDx.element_type)

    def _through_softmax(
        self, gradients: list, probabilities: list, inside: list, exchange, tid: Int32, i: Int32
    ) -> list:
        """Gradients of what the softmax was taken of."""
        mine = Float32(0.0)
        for gradient, p, exists in zip(gradients, probabilities, inside, strict=True):
            mine = mine + choose(exists, gradient * p, Float32(0.0))
        (total,) = self.reduce((mine,), exchange, tid, i)
        pairs = zip(gradients, probabilities, strict=True)
        return [p * (gradient - total) for gradient, p in pairs]

    @cute.jit
    def _write(self, sDx: cute.Tensor, target: cute.Pointer, count: Int32, tid: Int32) -> None:
        """The tile to global memory."""
        vec = const_expr(copy.CHUNK * 8 // sDx.element_type.width)
        for i in cutlass.range_constexpr(self.tile // vec // self.tiling.num_threads):
            index = (i * self.tiling.num_threads + tid) * vec
            piece = copy.load_piece(sDx.iterator, index, count, vec, copy.CHUNK)
            copy.store_piece(piece, target, index, count, copy.CHUNK)


def build(spec: TopKBwdSpec, config: BwdConfig) -> tuple[TopKBwd, tuple]:
    """The kernel and its symbolic arguments."""
    m = cute.sym_int()
    dvalues = symbolic(spec.dvalues, (m, spec.k), align=2)
    indices = symbolic("int64", (m, spec.k), align=8, contiguous=True)
    values = symbolic(spec.values, (m, spec.k), align=2, contiguous=True)
    dx = symbolic(spec.dx, (m, spec.n), contiguous=True)
    return TopKBwd(spec, config), (dvalues, indices, values, dx)
