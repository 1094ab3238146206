"""Softmax forward: what it computes, and the kernel of one tile per CTA."""

import math

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from quack_core.device import fast_math
from quack_core.device.reduce import (
    MAX_NUMBER,
    ONLINE_SOFTMAX,
    ONLINE_SOFTMAX_COMPENSATED,
    Partial,
    Reduction,
    finite,
    thread_compensated_sum,
    thread_max,
    thread_sum,
    warp_reduce,
)
from quack_core.jit.compile import symbolic
from quack_norm.ops.row_map.tile import RowMapTile

from .config import FwdConfig
from .spec import SoftmaxFwdSpec


class SoftmaxRows:
    """Maximum and sum in one reduction; what follows depends on both."""

    spec: SoftmaxFwdSpec
    fill = -math.inf

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        input: cute.Tensor,  # (M, N) or (M1, M0, N)
        out: cute.Tensor,  # like input
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.start((input, None, None, None, out, None, None), (scale,), stream)

    @property
    def needs_exists(self) -> bool:
        return self.spec.scaled  # which turns what fills the end of a row into anything

    def reduction_of(self, spec: SoftmaxFwdSpec) -> Reduction:
        return ONLINE_SOFTMAX_COMPENSATED if spec.out == "float32" else ONLINE_SOFTMAX

    def combine(self, first, second, scalars):
        return first * scalars[0] if self.spec.scaled else first

    def partial(self, values, exists) -> Partial:
        values = self.masked(values, exists)
        largest = thread_max(values)
        if self.spec.out == "float32":
            shift, count = finite(largest), cute.size(values.shape)
            powers = (fast_math.exp_rounded(values[i] - shift) for i in range(count))
            return largest, *thread_compensated_sum(powers)
        return largest, thread_sum(self.exponentials(values, finite(largest)))

    def keep(self, values, exists):
        """16-bit results are made of the exponentials below the maximum of a warp."""
        values = self.masked(values, exists)
        if self.spec.log or self.spec.out == "float32":  # float32 has no bits to spare for that
            return values, self.partial(values, None)
        (largest,) = warp_reduce((thread_max(values),), MAX_NUMBER, self.tiling.lanes)
        kept = self.exponentials(values, finite(largest))
        return (kept, largest), (largest, thread_sum(kept))

    def masked(self, values, exists):
        return values if exists is None else cute.where(exists, values, Float32(self.fill))

    def exponentials(self, values, shift: Float32):
        """e ** (v - shift), as precise as 16 bits can tell."""
        return cute.math.exp2((values - shift) * fast_math.LOG2_E, fastmath=True)

    def finish(self, total: Partial, scalars) -> tuple[Float32, ...]:
        """What is subtracted from v, and the logarithm of the sum or its inverse.

        Where the output is float32, the inverse comes with what it lacks.
        """
        largest, exponentials, *rest = total
        # All -inf: subtract 0, and 0 * inf gives the NaN that torch gives.
        shift = finite(largest)
        if self.spec.log:
            if rest:
                return shift, fast_math.log_rounded(exponentials, *rest)
            return shift, fast_math.log(exponentials)
        inverse = fast_math.inverse(exponentials)
        if rest:
            return shift, inverse, fast_math.inverse_rest(exponentials, *rest, inverse)
        return shift, inverse

    def result(self, values, known, columns, scalars):
        shift, last, *rest = known
        if self.spec.log:
            return (values - shift) - last
        if rest:
            return fast_math.exp_times(values - shift, last, *rest)
        if isinstance(values, tuple):
            kept, largest = values
            return kept * (fast_math.exp(largest - shift) * last)
        return self.exponentials(values, shift) * last


class SoftmaxFwd(SoftmaxRows, RowMapTile):
    """Softmax of rows that a CTA takes at once."""


def arguments(spec: SoftmaxFwdSpec, config: FwdConfig) -> tuple:
    """Symbolic operands of the launch function."""
    rows = (*(cute.sym_int() for _ in range(spec.rank - 1)), spec.n)
    x, out = (symbolic(name, rows, align=spec.align) for name in (spec.x, spec.out))
    return x, out, Float32(0)


def build(spec: SoftmaxFwdSpec, config: FwdConfig) -> tuple[SoftmaxFwd, tuple]:
    """The kernel and its symbolic arguments."""
    return SoftmaxFwd(spec, config), arguments(spec, config)
