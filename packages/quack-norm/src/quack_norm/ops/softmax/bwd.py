"""Softmax backward: what it computes, and the kernel of one tile per CTA."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from quack_core.device import fast_math
from quack_core.device.reduce import Partial, thread_sum
from quack_core.jit.compile import symbolic
from quack_norm.ops.row_map.tile import RowMapTile

from .config import BwdConfig
from .spec import SoftmaxBwdSpec


class SoftmaxGradientRows:
    """One sum per row: of dout * out, or of the logarithm, of dout."""

    spec: SoftmaxBwdSpec
    num_values = 2  # out and dout

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        out: cute.Tensor,  # (M, N) or (M1, M0, N)
        dout: cute.Tensor,  # like out
        dx: cute.Tensor,  # like out
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.start((out, None, None, dout, dx, None, None), (scale,), stream)

    def combine(self, first, second, scalars):
        return first, second

    def partial(self, values, exists) -> Partial:
        out, dout = values
        return (thread_sum(dout if self.spec.log else dout * out),)

    def finish(self, total: Partial, scalars) -> tuple[Float32, ...]:
        return total

    def result(self, values, known, columns, scalars):
        out, dout = values
        if self.spec.log:
            share = cute.math.exp2(out * fast_math.LOG2_E, fastmath=True)
            dx = dout - share * known[0]
        else:
            dx = out * (dout - known[0])
        return dx * scalars[0] if self.spec.scaled else dx


class SoftmaxBwd(SoftmaxGradientRows, RowMapTile):
    """Gradient for rows that a CTA takes at once."""


def arguments(spec: SoftmaxBwdSpec, config: BwdConfig) -> tuple:
    """Symbolic operands of the launch function."""
    rows = (*(cute.sym_int() for _ in range(spec.rank - 1)), spec.n)
    names = (spec.out, spec.dout, spec.dx)
    operands = (symbolic(name, rows, align=spec.align) for name in names)
    return *operands, Float32(0)


def build(spec: SoftmaxBwdSpec, config: BwdConfig) -> tuple[SoftmaxBwd, tuple]:
    """The kernel and its symbolic arguments."""
    return SoftmaxBwd(spec, config), arguments(spec, config)
