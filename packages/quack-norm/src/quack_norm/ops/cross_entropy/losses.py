"""What both forward kernels do with a row's maximum and sum: its loss, and the sum of all."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import fast_math
from quack_core.device.reduce import SUM, collect, cta_post, finite, warp_reduce
from quack_core.jit.compile import symbolic
from quack_core.reduction.tiling import WARP
from quack_norm.ops.row_map.base import num_rows

from .config import FwdConfig, StreamConfig
from .gradient import Label, Options, label_of
from .spec import CrossEntropyFwdSpec

AT_ONCE = 8
"""Loads that a thread has under way where a CTA reads something of every row."""


class Results(NamedTuple):
    """What a launch writes; None for what is not wanted."""

    losses: cute.Tensor
    lse: cute.Tensor
    peak: cute.Tensor
    exp_sum: cute.Tensor
    total: cute.Tensor | None
    loss: cute.Tensor | None
    dx: cute.Tensor | None


class Losses:
    """The launch of a kernel, and methods for it; ``num_threads`` of a CTA add up losses."""

    spec: CrossEntropyFwdSpec
    config: FwdConfig | StreamConfig
    num_threads: int
    carveout: int  # percent of an SM's memory that should be shared memory

    def grid(self, rows: Int32, groups: Int32) -> Int32:
        """CTAs to launch."""
        raise NotImplementedError

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        input: cute.Tensor,  # (M, V) or (M1, M0, V)
        target: cute.Tensor,  # (M,)
        weight: cute.Tensor | None,  # (V,)
        losses: cute.Tensor,  # (M,), float32 unless they are the result
        lse: cute.Tensor,  # (M,)
        peak: cute.Tensor,  # (M,)
        exp_sum: cute.Tensor,  # (M,)
        total: cute.Tensor | None,  # (1,)
        loss: cute.Tensor | None,  # (1,)
        dx: cute.Tensor | None,  # like input; None in a kernel without gradient
        state: cute.Tensor | None,  # (3,)
        ignore_index: Int64,
        label_smoothing: Float32,
        softcap: Float32,
        z_loss: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        results = Results(losses, lse, peak, exp_sum, total, loss, dx)
        options = Options(ignore_index, label_smoothing, softcap, z_loss)
        cluster = const_expr(self.config.cluster)
        self.kernel(input, target, weight, results, state, options).launch(
            grid=[self.grid(num_rows(input), groups), 1, 1],
            block=[self.num_threads, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=max(1, self.config.ctas_per_sm),
            preferred_smem_carveout=self.carveout,
            stream=stream,
        )

    @property
    def early(self) -> bool:
        """Whether the total is needed before the losses are added up."""
        return self.spec.dx and self.spec.reduction == "mean"

    def loss_of(self, label: Label, z: Float32, known, lse: Float32, options: Options):
        """Loss of a row whose label's logit is ``z``.

        Args:
            known: its largest logit, its sum and, with label smoothing, the last two of `smoothed`.
        """
        log_sum, shift = fast_math.log(known[1]), finite(known[0])
        loss = label.factor * (log_sum - (z - shift))
        if self.spec.smoothing:
            share = options.label_smoothing
            spread = known[3] * log_sum - known[2]
            loss = (Float32(1.0) - share) * loss + share * (1 / self.spec.n) * spread
        if self.spec.z_loss:
            loss = loss + options.z_loss * lse * lse
        return choose(label.kept, loss, Float32(0.0))

    def store(self, results: Results, row: Int64, loss, lse, peak, exp_sum) -> None:
        """Write what is known of a row; one thread."""
        results.losses[row] = results.losses.element_type(loss)
        results.lse[row] = lse
        results.peak[row] = peak
        results.exp_sum[row] = exp_sum

    @cute.jit
    def reduce_rows(self, total: Float32, results: Results, mState, sums: cute.Tensor, tid: Int32):
        """Divide the sum of all losses by ``total``; counters back to zero."""
        losses = self.sum_of_cta(self.share_of_losses(results.losses, tid), sums, tid)
        if tid == 0:
            results.total[0] = total
            results.loss[0] = results.loss.element_type(losses * fast_math.inverse(total))
            for i in cutlass.range_constexpr(cute.size(mState)):
                mState[i] = Int32(0)

    @cute.jit
    def label_weights(
        self, mT: cute.Tensor, mW: cute.Tensor | None, ignore_index: Int64, sums, tid: Int32
    ) -> Float32:
        """Sum of the weights of all labels that count."""
        total, rows = Float32(0.0), Int32(cute.size(mT))
        for first in cutlass.range(tid, rows, AT_ONCE * self.num_threads, unroll=1):
            for target in self._of_rows(mT, first, rows, ignore_index):
                total += label_of(Int64(target), mW, ignore_index, self.spec.n).factor
        return self.sum_of_cta(total, sums, tid)

    @cute.jit
    def share_of_losses(self, losses: cute.Tensor, tid: Int32) -> Float32:
        """A thread's share of the sum of all losses."""
        total, rows = Float32(0.0), Int32(cute.size(losses))
        for first in cutlass.range(tid, rows, AT_ONCE * self.num_threads, unroll=1):
            for loss in self._of_rows(losses, first, rows, Float32(0.0)):
                total += loss
        return total

    def _of_rows(self, tensor: cute.Tensor, first: Int32, rows: Int32, otherwise) -> list:
        """Some rows' values, ``otherwise`` beyond the last; all loads are under way together."""
        places = [first + j * self.num_threads for j in range(AT_ONCE)]
        values = [tensor[Int64(cutlass.min(i, rows - 1))] for i in places]
        pairs = zip(places, values, strict=True)
        return [choose(i < rows, value, otherwise) for i, value in pairs]

    @cute.jit
    def sum_of_cta(self, value: Float32, sums: cute.Tensor, tid: Int32) -> Float32:
        """Sum over all threads. Synchronises: two CTA barriers."""
        of_warp = warp_reduce((value,), SUM)
        cute.arch.sync_threads()
        cta_post(of_warp, sums, tid // WARP, Int32(0))
        cute.arch.sync_threads()
        return collect(sums, SUM, Int32(0))[0]


@cute.jit
def choose(condition: Boolean, a, b):
    """One of two numbers, of the second's type."""
    return type(b)(a) if condition else b


def arguments(spec: CrossEntropyFwdSpec) -> tuple:
    """Symbolic operands of the launch function."""
    outer = tuple(cute.sym_int() for _ in range(spec.rank - 1))
    count = outer[0] if spec.rank == 2 else cute.sym_int()
    rows = (*outer, spec.n)
    reduced = spec.reduction != "none"

    def per_row(name: str):
        return symbolic(name, (count,), align=8 if name == "int64" else 4, contiguous=True)

    return (
        symbolic(spec.x, rows, align=spec.align),
        per_row(spec.target),
        symbolic(spec.weight, (spec.n,), align=spec.weight_align),
        per_row("float32" if reduced else spec.x),
        *(per_row("float32") for _ in range(3)),
        symbolic("float32", (1,), align=4, contiguous=True) if reduced else None,
        symbolic(spec.x, (1,), align=2, contiguous=True) if reduced else None,
        symbolic(spec.x, rows, align=spec.align) if spec.dx else None,
        symbolic("int32", (3,), align=4, contiguous=True) if reduced else None,
        Int64(0),
        Float32(0),
        Float32(0),
        Float32(0),
        Int32(0),
    )
