"""Cross-entropy forward that reads logits only: they stream through registers.

While a batch of loads is reduced the next one is under way, at the end of a row the first one of
the next row: reducing over the CTA costs no time.
"""

import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import barrier, copy
from quack_core.device.reduce import (
    ONLINE_SOFTMAX,
    ONLINE_SOFTMAX_ROUNDED,
    Partial,
    collect,
    cta_post,
    finite,
    thread_max,
    thread_sum,
)
from quack_core.reduction.base import ReductionBase
from quack_core.reduction.tiling import WARP
from quack_norm.ops.row_map.base import coordinates, existing, num_rows, slice_pointer

from .config import StreamConfig
from .gradient import Options, capped, element, label_of, log_sum_exp, powers
from .losses import Losses, Results, arguments
from .spec import CrossEntropyFwdSpec

KEPT, ILLEGAL, ARRIVED = range(3)
"""Counters of a launch: labels that count, illegal ones among them, CTAs that are done."""


class CrossEntropyStream(Losses, ReductionBase):
    """CTAs stay; each works on every so many-th row.

    Threads: a warp owns consecutive elements of a batch, each thread ``unroll`` vectors of them.
    Shared memory: two sets of partial results, in turn, so that one barrier per row is enough.
    Synchronises: one CTA barrier per row.
    Global state: ``KEPT``, ``ILLEGAL``, ``ARRIVED``, zero before and after a launch.
    Traffic: logits once.

    Rows of any alignment: threads own the same elements wherever a row lies. They read the 16-byte
    blocks of memory that cover them, and shift them in registers.
    """

    carveout = 10

    def __init__(self, spec: CrossEntropyFwdSpec, config: StreamConfig):
        online = ONLINE_SOFTMAX_ROUNDED if spec.x == "float32" else ONLINE_SOFTMAX
        super().__init__(config.tiling(spec), online, buffers=2)
        self.spec, self.config, self.num_threads = spec, config, config.threads
        self.shifted = spec.odd or spec.align < copy.CHUNK
        self.batches = -(-spec.n // self.tiling.n)

    def grid(self, rows: Int32, groups: Int32) -> Int32:
        return groups

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mT: cute.Tensor,
        mW: cute.Tensor | None,
        results: Results,
        mState: cute.Tensor | None,
        options: Options,
    ):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        rows = num_rows(mX)
        smem = cutlass.memory.SmemAllocator()
        exchange = self.allocate(smem)
        warps = const_expr(self.num_threads // WARP)
        sums = smem.allocate_tensor(Float32, cute.make_layout((1, warps, 1)), byte_alignment=16)
        answer = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)

        layout = cute.make_layout((self.tiling.vec, self.config.unroll + self.shifted))
        now, ahead = (cute.make_rmem_tensor(layout, mX.element_type) for _ in range(2))
        target, turn, kept, illegal = Int64(0), Int32(0), Int32(0), Int32(0)
        if row < rows:
            self._fetch(mX, row, Int32(0), tid, ahead)
            target = Int64(mT[Int64(row)])
        while row < rows:
            label = label_of(target, mW, options.ignore_index, self.spec.n)
            logit = Float32(element(slice_pointer(mX, coordinates(mX, row), label.index))[0])
            total = self.reduction.neutral()
            for b in cutlass.range(1, self.batches, unroll=1):
                now.store(ahead.load())
                self._fetch(mX, row, b, tid, ahead)
                total = self._absorb(total, mX, row, b - 1, tid, now, options)
            now.store(ahead.load())
            after = row + step
            if after < rows:
                self._fetch(mX, after, Int32(0), tid, ahead)
                target = Int64(mT[Int64(after)])
            total = self._absorb(total, mX, row, Int32(self.batches - 1), tid, now, options)

            partials = exchange.warps[None, None, None, turn]
            cta_post(self.reduction.within_warp(total, WARP), partials, tid // WARP, Int32(0))
            cute.arch.sync_threads()
            if tid < WARP:
                known = collect(partials, self.reduction, Int32(0))
                if tid == 0:
                    lse = log_sum_exp(known[0], known[1])
                    z = capped(logit, self.spec, options)
                    loss = self.loss_of(label, z, known, lse, options)
                    self.store(results, Int64(row), loss, lse, known[0], known[1])
            kept += Int32(label.kept)
            illegal += Int32(label.factor != label.factor)
            turn, row = turn ^ 1, after

        if const_expr(mState is not None):
            if tid == 0:
                count(mState.iterator + KEPT, kept)
                count(mState.iterator + ILLEGAL, illegal)
            if barrier.last_arrival(mState.iterator + ARRIVED, step, answer, tid):
                total = self._total(mT, mW, mState, options, sums, tid)
                self.reduce_rows(total, results, mState, sums, tid)

    @cute.jit
    def _total(self, mT, mW, mState, options: Options, sums: cute.Tensor, tid: Int32) -> Float32:
        """What the sum of losses is divided by; counting needs no order, adding up weights does."""
        total = Float32(1.0)
        if const_expr(self.spec.reduction == "mean" and mW is None):
            total = Float32(mState[KEPT])
            total = Float32(math.nan) if mState[ILLEGAL] > 0 else total
        elif const_expr(self.spec.reduction == "mean"):
            total = self.label_weights(mT, mW, options.ignore_index, sums, tid)
        return total

    @cute.jit
    def _fetch(self, mX: cute.Tensor, row: Int32, b: Int32, tid: Int32, pieces: cute.Tensor):
        """Start to load a thread's share of a batch."""
        tiling, n = const_expr(self.tiling), Int32(self.spec.n)
        pointer = slice_pointer(mX, coordinates(mX, row), Int32(0))
        first = b * tiling.n + tiling.start(tid)
        if const_expr(self.shifted):
            first = first - copy.vector_offset(pointer, tiling.vec)
        for u in cutlass.range_constexpr(cute.size(pieces, mode=[1])):
            index = first + u * tiling.step
            if const_expr(u == self.config.unroll):  # behind all others: lane 0's
                index = index if cute.arch.lane_idx() == 0 else n
            piece = copy.load_piece(pointer, index, n, tiling.vec, copy.CHUNK, -math.inf)
            pieces[None, u].store(piece.load())

    @cute.jit
    def _absorb(
        self, total: Partial, mX, row: Int32, b: Int32, tid: Int32, pieces: cute.Tensor, options
    ) -> Partial:
        """Reduce what has been loaded."""
        tiling, vectors = const_expr(self.tiling), pieces
        if const_expr(self.shifted):
            pointer = slice_pointer(mX, coordinates(mX, row), Int32(0))
            offset = copy.vector_offset(pointer, tiling.vec) * (pointer.dtype.width // 8)
            vectors = copy.shift_pieces(pieces, offset)
            self._clear(vectors, b * tiling.n + tiling.start(tid))
        z = capped(vectors.load().to(Float32), self.spec, options)
        if const_expr(self.spec.softcap):  # which makes a number of what lies beyond the row
            exists = existing(tiling, tid, self.spec.n - b * tiling.n)
            z = cute.where(exists, z, cute.full_like(z, -math.inf))
        largest = thread_max(z)
        partial = (largest, thread_sum(powers(z - finite(largest), self.spec)))
        return self.reduction.combine(total, partial)

    @cute.jit
    def _clear(self, vectors: cute.Tensor, first: Int32):
        """What lies beyond the row does not count."""
        n = Int32(self.spec.n)
        for u in cutlass.range_constexpr(self.config.unroll):
            copy.clear_outside(vectors[None, u], first + u * self.tiling.step, n, -math.inf)


def count(counter: cute.Pointer, number: Int32) -> None:
    """Add to a counter; the answer is not waited for."""
    cute.arch.red(counter, number, op="add", dtype=Int32, sem="relaxed", scope="gpu")


def build(spec: CrossEntropyFwdSpec, config: StreamConfig) -> tuple[CrossEntropyStream, tuple]:
    """The kernel and its symbolic arguments."""
    return CrossEntropyStream(spec, config), arguments(spec)
