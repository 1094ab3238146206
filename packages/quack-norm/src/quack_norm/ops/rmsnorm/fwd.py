"""RMSNorm forward: what it computes, and the kernel of one tile per CTA."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from quack_core.device import copy, fast_math
from quack_core.device.reduce import (
    SUM,
    Partial,
    Reduction,
    moments,
    thread_distances,
    thread_moments,
    thread_squares,
)
from quack_core.jit.compile import symbolic
from quack_norm.ops.row_map.tile import RowMapTile

from .config import FwdConfig
from .spec import STATISTICS, RMSNormFwdSpec


class RMSNormRows:
    """h = x + residual is reduced and stored; out = h * rstd * (weight + offset) + bias.

    LayerNorm (``spec.centred``) subtracts the mean of h first. It takes the mean in two float32
    numbers, and rstd as well where the result is float32: there, their own rounding would show.
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
        rstd: cute.Tensor | None,  # (M,) or (M1, M0), or (..., STATISTICS)
        state: cute.Tensor | None,  # (config.state_ints,)
        eps: Float32,
        weight_offset: Float32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        operands = (x, weight, bias, residual, out, residual_out, rstd, state)
        self.start(operands, (eps, weight_offset), stream, groups)

    @property
    def needs_exists(self) -> bool:
        return self.spec.centred

    def reduction_of(self, spec: RMSNormFwdSpec) -> Reduction:
        return moments(self.config.even(spec)) if spec.centred else SUM

    def combine(self, first, second, scalars):
        return first if second is None else first + second

    def partial(self, values, exists) -> Partial:
        return thread_moments(values, exists) if self.spec.centred else (thread_squares(values),)

    def keep(self, values, exists):
        """16-bit results of LayerNorm are made of the distances from the thread's point."""
        if not self.spec.centred or self.spec.out == "float32":
            return values, self.partial(values, exists)
        partial, left = thread_distances(values, exists)
        return (left, partial[1]), partial

    def finish(self, total: Partial, scalars) -> tuple[Float32, ...]:
        """rstd; for LayerNorm mean, and what float32 lacks of it; what rstd lacks if it matters."""
        share = Float32(1 / self.spec.n)
        exact = self.spec.out == "float32" and self.spec.weight is not None
        if not self.spec.centred:
            square = cute.math.fma(total[0], share, scalars[0])
            rstd = fast_math.rsqrt(square)
            return (rstd, fast_math.rsqrt_rest(square, rstd)) if exact else (rstd,)
        _, point, distances, squares = total
        beyond = fast_math.product(distances, share)
        squares = cute.math.fma(-beyond, distances, squares)
        variance = cute.math.fma(squares, share, scalars[0])
        rstd = fast_math.rsqrt(variance)
        known = rstd, *fast_math.fast_two_sum(point, beyond)
        return (*known, fast_math.rsqrt_rest(variance, rstd)) if exact else known

    def result(self, values, known, columns, scalars):
        rstd, *others = known
        exact = self.spec.out == "float32"
        if not self.spec.centred:
            normalised = values * rstd
        elif isinstance(values, tuple):
            left, point = values
            normalised = left * rstd + ((point - others[0]) - others[1]) * rstd
        elif exact:
            values = (values - others[0]) - others[1]
            normalised = values * rstd
        else:  # fused, in 16 bits
            values = values - others[0]
            normalised = values * rstd - fast_math.product(others[1], rstd)
        lost = None
        if exact and self.spec.weight is not None:  # one rounding for both products
            factor = cute.full_like(values, 1.0) * rstd
            lost = cute.math.fma(values, factor, -normalised)
            lost = lost + values * others[-1]
        return scale(normalised, lost, columns, scalars[1], self.spec)


class RMSNormFwd(RMSNormRows, RowMapTile):
    """RMSNorm of rows that a CTA takes at once."""


def scale(values, lost, columns: tuple, weight_offset: Float32, spec: RMSNormFwdSpec):
    """values * (weight + offset) + bias, in float32; absent operands are None.

    Args:
        lost: what values lack; None if that does not matter.
        columns: registers of weight and bias.
    """
    rW, rB = columns
    if rW is not None:
        weight = copy.widen(rW)
        weight = weight + weight_offset if spec.offset else weight
        if lost is None:
            values = values * weight
        else:
            values = cute.math.fma(values, weight, lost * weight)
    if rB is not None:
        values = values + copy.widen(rB)
    return values


def arguments(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple:
    """Symbolic operands of the launch function."""
    outer = tuple(cute.sym_int() for _ in range(spec.rank - 1))
    rows, weights = (*outer, spec.n), (outer[-1], spec.n) if spec.per_head else (spec.n,)

    def tensor(name: str | None, shape: tuple):
        align = spec.align if shape is rows else spec.weight_align
        return symbolic(name, shape, align=align)

    rstd = statistics(outer, spec.centred) if spec.rstd else None
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


def statistics(outer: tuple, centred: bool):
    """Symbolic rstd of each row, or its ``STATISTICS``."""
    shape = (*outer, STATISTICS) if centred else outer
    return symbolic("float32", shape, align=4, contiguous=True)


def build(spec: RMSNormFwdSpec, config: FwdConfig) -> tuple[RMSNormFwd, tuple]:
    """The kernel and its symbolic arguments."""
    return RMSNormFwd(spec, config), arguments(spec, config)
