"""Cross-entropy forward: logits stream through registers.

While a batch of loads is reduced the next one is under way, at the end of a row the first one of
the next row: reducing over the CTA costs no time. Of rows that are one batch, threads still hold the
logits when the sum is known: then the kernel gives the gradient as well.
"""

import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import barrier, copy, fast_math
from quack_core.device.reduce import (
    SUM2,
    Partial,
    collect,
    cta_post,
    finite,
    thread_max,
    thread_sum,
    warp_reduce,
)
from quack_core.reduction.base import ReductionBase
from quack_core.reduction.tiling import WARP
from quack_norm.ops.row_map.base import coordinates, num_rows, slice_pointer, within

from . import chunks
from .config import StreamConfig
from .gradient import (
    Label,
    Options,
    capped,
    element,
    gradient,
    gradient_of_label,
    label_of,
    log_of,
    log_sum_exp,
    online_of,
    powers,
    slope_of,
)
from .losses import Losses, Results, arguments
from .spec import CrossEntropyFwdSpec

PAIR = 2
"""Vectors of shifted rows that are reduced together."""
AT_ONCE = 4
"""Loads that a thread has under way where the last CTA adds up."""
LOSS, LOST, WEIGHT = range(3)
"""What a CTA adds up over its rows: losses, what rounding took from their sum, weights of labels."""


class CrossEntropyStream(Losses, ReductionBase):
    """CTAs stay; each works on every so many-th row.

    Threads: a warp owns consecutive elements of a batch, each thread ``unroll`` vectors of them.
    Shared memory: two sets of partial results, in turn, so that one barrier per row is enough; the
    CTA's sums over its rows.
    Synchronises: one CTA barrier per row; the last CTA adds up what all have left in ``sums``. With the
    gradient of a mean, CTAs first wait for the total: see ``chunks``.
    Global state: the counters of ``chunks``, zero before and after a launch.
    Traffic: logits and gradient once.

    Rows of any alignment: threads own the same elements wherever a row lies. They read the 16-byte
    blocks of memory that cover them, and shift them in registers.
    """

    carveout = 10

    def __init__(self, spec: CrossEntropyFwdSpec, config: StreamConfig):
        super().__init__(config.tiling(spec), online_of(spec), buffers=2)
        self.spec, self.config, self.num_threads = spec, config, config.threads
        self.shifted = spec.odd or spec.align < copy.CHUNK
        self.batches = -(-spec.n // self.tiling.n)
        if spec.dx and self.batches > 1:
            raise ValueError(f"{config}: {spec.n} classes are {self.batches} batches, not one")

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
        mine = smem.allocate_tensor(Float32, cute.make_layout(3), byte_alignment=16)
        answer = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        if const_expr(mState is not None):
            if tid == 0:
                mine.fill(0.0)

        layout = cute.make_layout((self.tiling.vec, self.config.unroll + self.shifted))
        ahead = cute.make_rmem_tensor(layout, mX.element_type)
        cta, target, turn, scale = row, Int64(0), Int32(0), Float32(1.0)
        if row < rows:
            self._fetch(mX, row, Int32(0), tid, ahead)
            target = Int64(mT[Int64(row)])
        if const_expr(self.early):
            scale = self._scale(mT, mW, results, mState, options, mine, cta, tid)
        while row < rows:
            label = label_of(target, mW, options.ignore_index, self.spec.n)
            logit = Float32(element(slice_pointer(mX, coordinates(mX, row), label.index))[0])
            total = self.reduction.neutral()
            for b in cutlass.range(1, self.batches, unroll=1):
                values = self._take(ahead, mX, row)
                self._fetch(mX, row, b, tid, ahead)
                total = self._absorb(total, b - 1, tid, values, options)
            values = self._take(ahead, mX, row)
            after = row + step
            if after < rows:
                self._fetch(mX, after, Int32(0), tid, ahead)
                target = Int64(mT[Int64(after)])
            total = self._absorb(total, Int32(self.batches - 1), tid, values, options)

            partials = exchange.warps[None, None, None, turn]
            cta_post(self.reduction.within_warp(total, WARP), partials, tid // WARP, Int32(0))
            cute.arch.sync_threads()
            if const_expr(self.spec.dx):
                known = collect(partials, self.reduction, Int32(0))
                self._differentiate(
                    mX, results, row, values, label, logit, known, scale, options, tid
                )
                self._account(results, mState, row, label, logit, known, mine, options, tid)
            else:
                if tid < WARP:
                    known = collect(partials, self.reduction, Int32(0))
                    self._account(results, mState, row, label, logit, known, mine, options, tid)
            turn, row = turn ^ 1, after

        if const_expr(mState is not None):
            self._reduce_rows(results, mState, mine, answer, exchange, cta, step, tid)

    @property
    def early(self) -> bool:
        """Whether the total is needed before the losses are added up."""
        return self.spec.dx and self.spec.reduction == "mean"

    @cute.jit
    def _scale(
        self, mT, mW, results: Results, mState, options: Options, mine, cta: Int32, tid: Int32
    ) -> Float32:
        """What gradients are multiplied by; every thread gets it."""
        if tid < WARP:
            announced = chunks.announced_total(mState.iterator, cta)
            total = chunks.sum_of_weights(
                mT, mW, results.sums, mState.iterator, announced, cta, options, self.spec.n
            )
            if tid == 0:
                mine[WEIGHT] = total
        cute.arch.sync_threads()
        return fast_math.inverse(mine[WEIGHT])

    @cute.jit
    def _account(
        self, results: Results, mState, row: Int32, label: Label, logit, known, mine, options, tid
    ):
        """Write what is known of a row, and add it to the CTA's sums."""
        if tid == 0:
            z = capped(logit, self.spec, options)
            loss = self.store(results, Int64(row), label, z, known, options)
            if const_expr(mState is not None):
                _add(mine, loss, Float32(0.0) if self.early else label.factor)

    @cute.jit
    def _differentiate(
        self,
        mX,
        results: Results,
        row: Int32,
        values,
        label: Label,
        logit,
        known,
        scale,
        options,
        tid,
    ):
        """Write the gradient of a row; the label's own class last, by the warp that has it."""
        tiling, n = const_expr(self.tiling), Int32(self.spec.n)
        target = slice_pointer(results.dx, coordinates(results.dx, row), Int32(0))
        lse = log_sum_exp(known[0], log_of(known[1]))
        count = Float32(self.spec.n)
        slope = slope_of(label, finite(known[0]), known[1], lse, count, scale, self.spec, options)
        out = cute.make_rmem_tensor(values.layout, results.dx.element_type)
        x = values.load().to(Float32)
        out.store(gradient(x, None, slope, self.spec, options).to(results.dx.element_type))
        if not label.kept:
            out.fill(0.0)
        start = tiling.start(tid)
        if const_expr(self.shifted):
            copy.store_shifted(out, target, tiling.start(tid // WARP * WARP), n)
            cute.arch.sync_warp()
        else:
            for u in cutlass.range_constexpr(self.config.unroll):
                index = start + u * tiling.step
                copy.store_piece(out[None, u], target, index, n, copy.CHUNK, whole=True)
        place = label.index - start
        if label.kept and place >= 0 and place < tiling.step * self.config.unroll:
            if place % tiling.step < tiling.vec:
                value = gradient_of_label(logit, Float32(1.0), slope, self.spec, options)
                element(target + label.index)[0] = results.dx.element_type(value)

    @cute.jit
    def _reduce_rows(self, results: Results, mState, mine, answer, exchange, cta, ctas, tid: Int32):
        """Leave the CTA's sums to the last CTA, which adds up all."""
        sums = results.sums
        if tid == 0:
            lost = mine[LOST] if mine[LOST] == mine[LOST] else Float32(0.0)  # inf - inf
            sums[0, cta], sums[1, cta] = mine[LOSS] + lost, mine[WEIGHT]
        if barrier.last_arrival(mState.iterator + chunks.DONE, ctas, answer, tid):
            loss, weight = Float32(0.0), Float32(0.0)
            for first in cutlass.range(tid, ctas, AT_ONCE * self.num_threads, unroll=1):
                places = [first + i * self.num_threads for i in range(AT_ONCE)]
                pairs = [[sums[i, cutlass.min(p, ctas - 1)] for i in range(2)] for p in places]
                for i in cutlass.range_constexpr(AT_ONCE):
                    if places[i] < ctas:
                        loss, weight = loss + pairs[i][0], weight + pairs[i][1]
            partials = exchange.warps[None, None, None, 0]
            cta_post(warp_reduce((loss, weight), SUM2), partials, tid // WARP, Int32(0))
            cute.arch.sync_threads()
            loss, weight = collect(partials, SUM2, Int32(0))
            if const_expr(self.early):
                weight = mine[WEIGHT]
                if tid < WARP:
                    chunks.clear(mState)
            if tid == 0:
                one = Float32(1.0)
                self.store_reduced(results, loss, weight if self.spec.reduction == "mean" else one)

    @cute.jit
    def _fetch(self, mX: cute.Tensor, row: Int32, b: Int32, tid: Int32, pieces: cute.Tensor):
        """Start to load a thread's share of a batch."""
        tiling, n = const_expr(self.tiling), Int32(self.spec.n)
        pointer = slice_pointer(mX, coordinates(mX, row), Int32(0))
        first, policy = b * tiling.n + tiling.start(tid), self.policy(mX)
        if const_expr(self.shifted):
            first = first - copy.vector_offset(pointer, tiling.vec)
        for u in cutlass.range_constexpr(cute.size(pieces, mode=[1])):
            index = first + u * tiling.step
            if const_expr(u == self.config.unroll):  # behind all others: lane 0's
                index = index if cute.arch.lane_idx() == 0 else n
            access = (tiling.vec, copy.CHUNK, -math.inf, policy)
            piece = copy.load_piece(pointer, index, n, *access)
            pieces[None, u].store(piece.load())

    @cute.jit
    def _take(self, pieces: cute.Tensor, mX: cute.Tensor, row: Int32) -> cute.Tensor:
        """The thread's vectors out of what has been loaded, in registers of their own."""
        if const_expr(self.shifted):
            pointer = slice_pointer(mX, coordinates(mX, row), Int32(0))
            offset = copy.vector_offset(pointer, self.tiling.vec) * (pointer.dtype.width // 8)
            vectors = copy.shift_pieces(pieces, offset)
        else:
            vectors = cute.make_rmem_tensor(pieces.layout, pieces.element_type)
            vectors.store(pieces.load())
        return vectors

    @cute.jit
    def _absorb(
        self, total: Partial, b: Int32, tid: Int32, vectors: cute.Tensor, options: Options
    ) -> Partial:
        """Reduce them; shifting has taken registers, so that fewer become float32 at once."""
        tiling, unroll = const_expr(self.tiling), const_expr(self.config.unroll)
        start = b * tiling.n + tiling.start(tid)
        if const_expr(self.shifted):
            self._clear(vectors, start)
        together = const_expr(PAIR if self.shifted else unroll)
        for u in cutlass.range_constexpr(0, unroll, together):
            shape = const_expr((tiling.vec, min(together, unroll - u)))
            some = cute.make_tensor(vectors[None, u].iterator, cute.make_layout(shape))
            # Shifting leaves words that the compiler widens in fewer operations by itself.
            x = some.load().to(Float32) if self.shifted else copy.widen(some)
            z = capped(x, self.spec, options)
            if const_expr(self.spec.softcap):  # which makes a number of what lies beyond the row
                exists = within(shape, start + u * tiling.step, tiling.step, self.spec.n)
                z = cute.where(exists, z, cute.full_like(z, -math.inf))
            largest = thread_max(z)
            partial = (largest, thread_sum(powers(z - finite(largest), self.spec)))
            total = self.reduction.combine(total, partial)
        return total

    @cute.jit
    def _clear(self, vectors: cute.Tensor, first: Int32):
        """What lies beyond the row does not count."""
        n = Int32(self.spec.n)
        for u in cutlass.range_constexpr(self.config.unroll):
            copy.clear_outside(vectors[None, u], first + u * self.tiling.step, n, -math.inf)


def _add(sums: cute.Tensor, loss: Float32, weight: Float32) -> None:
    """Add a row to the CTA's sums; one thread."""
    total, lost = fast_math.two_sum(sums[LOSS], loss)
    sums[LOSS], sums[LOST] = total, sums[LOST] + lost
    sums[WEIGHT] = sums[WEIGHT] + weight


def build(spec: CrossEntropyFwdSpec, config: StreamConfig) -> tuple[CrossEntropyStream, tuple]:
    """The kernel and its symbolic arguments."""
    return CrossEntropyStream(spec, config), arguments(spec)
