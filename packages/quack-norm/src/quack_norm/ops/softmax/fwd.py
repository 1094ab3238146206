"""Softmax forward: what it computes, and the kernel of one tile per CTA."""

import math

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from quack_core.device import fast_math
from quack_core.device.reduce import ONLINE_SOFTMAX, Partial, Reduction, thread_online
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
        state: cute.Tensor | None,  # (config.state_ints,)
        scale: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        self.start((input, None, None, None, out, None, None, state), (scale,), groups, stream)

    def reduction_of(self, spec: SoftmaxFwdSpec) -> Reduction:
        return ONLINE_SOFTMAX

    def combine(self, first, second, scalars):
        return first * scalars[0] if self.spec.scaled else first

    def partial(self, values, exists) -> Partial:
        return thread_online(values, fast_math.LOG2_E)

    def finish(self, total: Partial, scalars) -> tuple[Float32, ...]:
        """What is subtracted before e ** v, and the factor after it or, of the logarithm, all."""
        largest, exponentials = total
        # All -inf: subtract 0, and 0 * inf gives the NaN that torch gives.
        shift = finite(largest)
        if self.spec.log:
            return shift, fast_math.log(exponentials)
        inverse = fast_math.reciprocal(exponentials)
        return shift, inverse + inverse * (Float32(1.0) - exponentials * inverse)

    def result(self, values, known, columns, scalars):
        shift, last = known
        if self.spec.log:
            return (values - shift) - last
        return cute.math.exp2((values - shift) * fast_math.LOG2_E, fastmath=True) * last


class SoftmaxFwd(SoftmaxRows, RowMapTile):
    """Softmax of rows that a CTA takes at once."""


@cute.jit
def finite(largest: Float32) -> Float32:
    """A maximum that can be subtracted: 0 for -inf."""
    return Float32(0.0) if largest == Float32(-math.inf) else largest


def arguments(spec: SoftmaxFwdSpec, config: FwdConfig) -> tuple:
    """Symbolic operands of the launch function."""
    rows = (*(cute.sym_int() for _ in range(spec.rank - 1)), spec.n)
    x, out = (symbolic(name, rows, align=spec.align) for name in (spec.x, spec.out))
    return x, out, counters(config), Float32(0), Int32(0)


def counters(config: FwdConfig):
    """Symbolic counters of a kernel whose CTAs stay."""
    ints = config.state_ints
    return symbolic("int32", (ints,), align=4, contiguous=True) if ints else None


def build(spec: SoftmaxFwdSpec, config: FwdConfig) -> tuple[SoftmaxFwd, tuple]:
    """The kernel and its symbolic arguments."""
    return SoftmaxFwd(spec, config), arguments(spec, config)
