"""RMSNorm forward: what it computes, and the kernel of one tile per CTA."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from quack_core.device import fast_math
from quack_core.device.reduce import MOMENTS, SUM, Partial, Reduction, thread_moments, thread_sum
from quack_core.jit.compile import symbolic
from quack_norm.ops.row_map.tile import RowMapTile

from .config import FwdConfig
from .spec import RMSNormBwdSpec, RMSNormFwdSpec


class RMSNormRows:
    """h = x + residual is reduced and stored; out = h * rstd * (weight + offset) + bias.

    LayerNorm (``spec.centred``) subtracts the mean of h first.
    """

    spec: RMSNormFwdSpec

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        x: cute.Tensor,  # (M, N) or (M1, M0, N)
        weight: cute.Tensor | None,  # (N,), or (M0, N) in the kernels of one tile
        bias: cute.Tensor | None,  # like weight
        residual: cute.Tensor | None,  # like x
        out: cute.Tensor,  # like x
        residual_out: cute.Tensor | None,  # like x
        rstd: cute.Tensor | None,  # (M,) or (M1, M0), or (..., 4)
        state: cute.Tensor | None,  # (config.state_ints,)
        eps: Float32,
        weight_offset: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        operands = (x, weight, bias, residual, out, residual_out, rstd, state)
        self.start(operands, (eps, weight_offset), groups, stream)

    @property
    def needs_exists(self) -> bool:
        return self.spec.centred

    def reduction_of(self, spec: RMSNormFwdSpec) -> Reduction:
        return MOMENTS if spec.centred else SUM

    def combine(self, first, second, scalars):
        return first if second is None else first + second

    def partial(self, values, exists) -> Partial:
        return (
            thread_moments(values, exists) if self.spec.centred else (thread_sum(values * values),)
        )

    def finish(self, total: Partial, scalars) -> tuple[Float32, ...]:
        """rstd; if the mean is subtracted, the mean as well, and its two parts"""
        mean_square = total[-1] * (1 / self.spec.n)
        rstd = fast_math.rsqrt(mean_square + scalars[0])
        if not self.spec.centred:
            return (rstd,)
        _, base, offset, _ = total
        return rstd, base + offset, base, offset

    def result(self, values, known, columns, scalars):
        if self.spec.centred:
            values = (values - known[2]) - known[3]
        return scale(values, known[0], *columns, scalars[1], self.spec)


class RMSNormFwd(RMSNormRows, RowMapTile):
    """RMSNorm of rows that a CTA takes at once."""


def scale(h, rstd: Float32, rW, rB, weight_offset: Float32, spec: RMSNormFwdSpec):
    """h * rstd * (weight + offset) + bias, in float32; absent operands are None."""
    values = h * rstd
    if rW is not None:
        weight = rW.load().to(Float32)
        weight = weight + weight_offset if spec.offset else weight
        if spec.out == "float32":  # one rounding for both products
            factor = cute.full_like(values, 1.0) * rstd
            lost = cute.math.fma(h, factor, -values)
            values = cute.math.fma(values, weight, lost * weight)
        else:
            values = values * weight
    if rB is not None:
        values = values + rB.load().to(Float32)
    return values


def arguments(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple:
    """Symbolic operands of the launch function."""
    outer = tuple(cute.sym_int() for _ in range(spec.rank - 1))
    rows, weights = (*outer, spec.n), (outer[-1], spec.n) if spec.per_head else (spec.n,)

    def tensor(name: str | None, shape: tuple):
        align = spec.align if shape is rows else spec.weight_align
        return symbolic(name, shape, align=align)

    rstd = statistics(spec, outer) if spec.rstd else None
    state = None
    if config.state_ints:
        state = symbolic("int32", (config.state_ints,), align=4, contiguous=True)
    return (
        tensor(spec.x, rows),
        tensor(spec.weight, weights),
        tensor(spec.bias, weights),
        tensor(spec.residual, rows),
        tensor(spec.out, rows),
        tensor(spec.residual_out, rows),
        rstd,
        state,
        Float32(0),
        Float32(0),
        Int32(0),
    )


def statistics(spec: RMSNormFwdSpec | RMSNormBwdSpec, outer: tuple):
    """Symbolic rstd of each row, or all that ``spec.statistics`` counts."""
    shape = (*outer, 4) if spec.centred else outer
    return symbolic("float32", shape, align=4, contiguous=True)


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwd, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwd(spec, config), arguments(spec, config)
