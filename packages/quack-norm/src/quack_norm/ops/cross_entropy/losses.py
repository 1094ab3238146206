"""What both forward kernels do with a row's maximum and sum: its loss, and the launch."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import fast_math
from quack_core.device.reduce import finite
from quack_core.jit.compile import symbolic
from quack_norm.ops.row_map.base import num_rows, row_policy

from .config import STATE_INTS, FwdConfig, StreamConfig
from .gradient import Label, Options, log_of, log_sum_exp
from .spec import CrossEntropyFwdSpec


class Results(NamedTuple):
    """What a launch writes; None for what is not wanted."""

    losses: cute.Tensor | None
    lse: cute.Tensor
    peak: cute.Tensor
    exp_sum: cute.Tensor
    sums: cute.Tensor | None
    total: cute.Tensor | None
    loss: cute.Tensor | None
    dx: cute.Tensor | None


class Losses:
    """The launch of a kernel, and methods for it."""

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
        losses: cute.Tensor | None,  # (M,), if they are the result
        lse: cute.Tensor,  # (M,)
        peak: cute.Tensor,  # (M,)
        exp_sum: cute.Tensor,  # (M,)
        sums: cute.Tensor | None,  # (2, K), scratch of a sum or mean: K >= M, WEIGHT_CHUNKS
        total: cute.Tensor | None,  # (1,)
        loss: cute.Tensor | None,  # (1,)
        dx: cute.Tensor | None,  # like input; None in a kernel without gradient
        state: cute.Tensor | None,  # (STATE_INTS,)
        ignore_index: Int64,
        label_smoothing: Float32,
        softcap: Float32,
        z_loss: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        results = Results(losses, lse, peak, exp_sum, sums, total, loss, dx)
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

    def policy(self, mX: cute.Tensor) -> Int64 | None:
        """What L2 is told of the logits, where as much is written."""
        return row_policy(mX) if self.spec.dx else None

    def store(
        self, results: Results, row: Int64, label: Label, z: Float32, known, options: Options
    ) -> Float32:
        """Write what is known of a row whose label's logit is ``z``; one thread.

        Args:
            known: its largest logit, its sum and, with label smoothing, the last two of `smoothed`.

        Returns:
            Its loss.
        """
        log_sum, shift = log_of(known[1]), finite(known[0])
        lse = log_sum_exp(known[0], log_sum)
        loss = label.factor * (log_sum - (z - shift))
        if self.spec.smoothing:
            share = options.label_smoothing
            spread = known[3] * log_sum - known[2]
            loss = (Float32(1.0) - share) * loss + share * (1 / self.spec.n) * spread
        if self.spec.z_loss:
            loss = loss + options.z_loss * lse * lse
        loss = choose(label.kept, loss, Float32(0.0))
        results.lse[row] = lse
        results.peak[row] = known[0]
        results.exp_sum[row] = known[1]
        if results.losses is not None:
            results.losses[row] = results.losses.element_type(loss)
        return loss

    def store_reduced(self, results: Results, losses: Float32, total: Float32) -> None:
        """Write the sum of losses divided by ``total``; one thread."""
        results.total[0] = total
        results.loss[0] = results.loss.element_type(losses * fast_math.inverse(total))


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

    def where_reduced(name: str, shape: tuple, align: int = 4):
        return symbolic(name, shape, align=align, contiguous=True) if reduced else None

    return (
        symbolic(spec.x, rows, align=spec.align),
        per_row(spec.target),
        symbolic(spec.weight, (spec.n,), align=spec.weight_align),
        None if reduced else per_row(spec.x),
        *(per_row("float32") for _ in range(3)),
        where_reduced("float32", (2, cute.sym_int())),
        where_reduced("float32", (1,)),
        where_reduced(spec.x, (1,), align=2),
        symbolic(spec.x, rows, align=spec.align) if spec.dx else None,
        where_reduced("int32", (STATE_INTS,), align=8),
        Int64(0),
        Float32(0),
        Float32(0),
        Float32(0),
        Int32(0),
    )
