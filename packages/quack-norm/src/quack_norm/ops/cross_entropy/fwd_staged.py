"""Cross-entropy forward: rows of logits wait in shared memory, several CTAs on an SM.

The reduction over rows is part of the launch: whichever CTA comes last adds up, in a fixed order. A
mean needs the sum of label weights before its first gradient: while logits arrive, the CTAs that
run first add it up together. One warp of each CTA keeps these accounts, so that no other waits.
"""

import enum
import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import barrier, fast_math
from quack_core.device.barrier import Phase
from quack_core.device.reduce import (
    Partial,
    Reduction,
    finite,
    thread_max,
    thread_sum,
)
from quack_core.reduction.tiling import WARP
from quack_norm.ops.row_map.base import coordinates, num_rows, slice_pointer
from quack_norm.ops.row_map.staged import RowMapStaged

from . import chunks
from .config import FwdConfig
from .gradient import (
    Label,
    Options,
    Slope,
    capped,
    element,
    gradient,
    gradient_of_label,
    log_of,
    log_sum_exp,
    online_of,
    powers,
    read_label,
    slope_of,
)
from .losses import Losses, Results, arguments
from .spec import CrossEntropyFwdSpec

PEAK, EXP_SUM, DISTANCES, WEIGHTS = range(4)
"""What the reduction knows of a row: see ``smoothed``; the last two with label smoothing only."""


class Barrier(barrier.NamedBarrier):
    """Of the warps that compute; and, one way, from them to the one that keeps the accounts."""

    REDUCE = enum.auto()
    KNOWN = enum.auto()


class CrossEntropyFwd(Losses, RowMapStaged):
    """A CTA, or a cluster of CTAs that share the classes, works on one row.

    Threads: the first ``threads_per_row`` compute; one more warp keeps the accounts.
    Shared memory: the CTA's logits, partial results, and what the warps tell one another.
    Synchronises: as ``RowMapStaged``; one way each, warps that compute tell the other one what they
    know, and hear the total from it on an mbarrier; a barrier of the CTA whose class is the label's.
    For a mean, CTAs wait for others that run already: see ``chunks``.
    Global state: the counters of ``chunks``, zero before and after a launch.
    Traffic: logits and gradient once.
    """

    fill = -math.inf
    carveout = 100

    def __init__(self, spec: CrossEntropyFwdSpec, config: FwdConfig):
        super().__init__(spec, config, barrier=Barrier.REDUCE)
        self.num_threads = config.num_threads

    @property
    def needs_exists(self) -> bool:
        return self.spec.softcap or self.spec.smoothing  # which make something of what fills a row

    def reduction_of(self, spec: CrossEntropyFwdSpec) -> Reduction:
        return smoothed(online_of(spec)) if spec.smoothing else online_of(spec)

    def grid(self, rows: Int32, groups: Int32) -> Int32:
        return self.tiling.cluster * rows

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
        # --- coordinates
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, rank = block // self.tiling.cluster, block % self.tiling.cluster
        at, first = coordinates(mX, row), rank * self.cols
        place = (at, first, tid, self.count_from(first, self.cols))
        computes = tid < self.tiling.num_threads

        # --- shared memory
        smem = cutlass.memory.SmemAllocator()
        stages = (self._stages(smem, mX)[None, 0], None)
        exchange = self.allocate(smem)
        full = barrier.allocate_mbarriers(smem, self.batches + 1)
        told = full + self.batches  # the total is in shared memory
        facts = smem.allocate_tensor(Float32, cute.make_layout(4), byte_alignment=16)
        total = smem.allocate_tensor(Float32, cute.make_layout(1), byte_alignment=4)

        # --- logits start to arrive
        barrier.init_mbarriers(full, self.batches + 1, 1, tid)
        if tid < WARP:
            cute.arch.sync_warp()
            self._fetch(mX, None, stages[0], None, full, at, first, place[3])
        announced = Int32(0)
        if const_expr(self.spec.reduction == "mean"):
            if not computes:
                announced = chunks.announced_total(mState.iterator, row)
        label = read_label(mT, mW, Int64(row), options.ignore_index, self.spec.n)
        logit = Float32(element(slice_pointer(mX, at, label.index))[0])  # before dx is there
        self.start_cluster(exchange, tid)
        cute.arch.sync_threads()

        if computes:
            # --- maximum and sum
            partial = self._accumulate_classes(mX, mW, stages, full, place, options)
            self.join_cluster()
            if const_expr(self.tiling.cluster > 1):  # what rank 0 knows then, all of them know
                self._await_total(told)
            known = self.reduce(partial, exchange, tid, Int32(0))
            if const_expr(self.tiling.cluster == 1):
                self._await_total(told)
            if rank == 0:
                if tid == 0:
                    for i in cutlass.range_constexpr(len(known)):
                        facts[i] = known[i]
                barrier.arrive_group(Barrier.KNOWN, self.num_threads)

            # --- the gradient
            if const_expr(self.spec.dx):
                if label.kept:
                    slope = self._slope(label, known, total, options)
                    self._gradients(mX, mW, results.dx, stages, place, slope, options)
                    self._correct(results.dx, mW, place, label, logit, slope, options)
                else:
                    self._clear(results.dx, place)
        else:
            # --- the accounts
            self.join_cluster()
            sum_of_weights = Float32(1.0)
            if const_expr(self.spec.reduction == "mean"):
                sum_of_weights = chunks.sum_of_weights(
                    mT, mW, results.sums, mState.iterator, announced, row, options, self.spec.n
                )
                if tid == self.tiling.num_threads:
                    total[0] = sum_of_weights
                barrier.arrive(told, Phase(Int32(0), Int32(0)))
            if rank == 0:
                barrier.sync_group(Barrier.KNOWN, self.num_threads)
                z = capped(logit, self.spec, options)
                self._account(results, row, label, z, facts, options)
                if const_expr(mState is not None):
                    rows = num_rows(mX)
                    if chunks.is_last(results.sums, mState.iterator, row, rows):
                        self._conclude(results, mState, rows, sum_of_weights)

    # --- the accounts

    def _await_total(self, told: cute.Pointer) -> None:
        if self.spec.reduction == "mean":
            barrier.wait(told, Phase(Int32(0), Int32(0)))

    @cute.jit
    def _account(self, results: Results, row: Int32, label: Label, z: Float32, facts, options):
        """Write what is known of the row."""
        if cute.arch.lane_idx() == 0:
            loss = self.store(results, Int64(row), label, z, facts, options)
            if const_expr(results.sums is not None):
                results.sums[chunks.LOSSES, row] = loss

    @cute.jit
    def _conclude(self, results: Results, mState, rows: Int32, total: Float32):
        """Add up the losses; all counters are zero again."""
        losses = chunks.sum_of_losses(results.sums, rows)
        chunks.clear(mState)
        if cute.arch.lane_idx() == 0:
            self.store_reduced(results, losses, total)

    # --- the reduction over classes

    @cute.jit
    def _accumulate_classes(
        self, mX, mW, stages, full: cute.Pointer, place, options: Options
    ) -> Partial:
        """A thread's part of maximum, sum and, for label smoothing, weighted distances."""
        _, _, tid, count = place
        total = self.reduction.neutral()
        for b in cutlass.range((count + self.batch.n - 1) // self.batch.n, unroll=1):
            barrier.wait(full, Phase(b, Int32(0)))
            x = self._values(mX, None, stages, place, (), b)
            z = capped(x, self.spec, options)
            exists = self.exists(self.batch, tid, count - b * self.batch.n)
            if const_expr(exists is not None):
                z = cute.where(exists, z, cute.full_like(z, self.fill))
            largest = thread_max(z)
            below = z - finite(largest)
            partial = (largest, thread_sum(powers(below, self.spec)))
            if const_expr(self.spec.smoothing):
                weight = cute.full_like(z, 1.0)
                if const_expr(mW is not None):
                    weight = self._columns((mW,), place, b)[0].load().to(Float32)
                if const_expr(exists is not None):
                    weight = cute.where(exists, weight, cute.full_like(z, 0.0))
                    below = cute.where(exists, below, cute.full_like(z, 0.0))
                partial = (*partial, thread_sum(weight * below), thread_sum(weight))
            total = self.reduction.combine(total, partial)
        return total

    def combine(self, first, second, scalars):
        return first

    # --- the gradient

    def _slope(self, label: Label, known: Partial, total: cute.Tensor, options: Options) -> Slope:
        """Of this row; every thread works it out."""
        incoming = fast_math.inverse(total[0]) if self.spec.reduction == "mean" else Float32(1.0)
        peak, exp_sum = known[PEAK], known[EXP_SUM]
        lse = log_sum_exp(peak, log_of(exp_sum))
        weights = known[WEIGHTS] if self.spec.smoothing else Float32(self.spec.n)
        return slope_of(label, finite(peak), exp_sum, lse, weights, incoming, self.spec, options)

    @cute.jit
    def _correct(
        self, mdX, mW, place, label: Label, logit: Float32, slope: Slope, options: Options
    ):
        """Write the gradient of the label's own class, after its CTA has written all others."""
        at, first, tid, count = place
        mine = label.index - first
        if mine >= 0 and mine < count:
            barrier.sync_group(Barrier.REDUCE, self.tiling.num_threads)
            if tid == 0:
                weight = Float32(1.0)
                if const_expr(mW is not None):
                    weight = label.factor
                value = gradient_of_label(logit, weight, slope, self.spec, options)
                out = element(slice_pointer(mdX, at, label.index))
                out[0] = out.element_type(value)

    def _gradients(self, mX, mW, mdX, stages, place, slope: Slope, options: Options) -> None:
        """Gradient of the CTA's logits but for the label's own share."""
        weights = mW if self.spec.smoothing else None
        self._results(mX, None, weights, None, mdX, [stages], [place], [slope], options)

    def result(self, values, known, columns, scalars):
        weight = None if columns[0] is None else columns[0].load().to(Float32)
        return gradient(values, weight, known, self.spec, scalars)

    @cute.jit
    def _clear(self, mdX, place):
        """Gradient of a row that does not count."""
        _, _, _, count = place
        zeros = cute.make_rmem_tensor((self.batch.vec, self.batch.passes), Float32)
        zeros.fill(0.0)
        for b in cutlass.range((count + self.batch.n - 1) // self.batch.n, unroll=1):
            self._write(zeros.load(), mdX, place, b)


def smoothed(online: Reduction) -> Reduction:
    """(m, s) of ``online``, the sum of weight * (value - m), and the sum of weights."""

    def combine(a: Partial, b: Partial) -> Partial:
        largest, total = online.combine(a[:2], b[:2])
        moved = [v[2] + v[3] * (finite(v[0]) - finite(largest)) for v in (a, b)]
        return largest, total, moved[0] + moved[1], a[3] + b[3]

    return Reduction((*online.identity, 0.0, 0.0), combine)


def build(spec: CrossEntropyFwdSpec, config: FwdConfig) -> tuple[CrossEntropyFwd, tuple]:
    """The kernel and its symbolic arguments."""
    return CrossEntropyFwd(spec, config), arguments(spec)
