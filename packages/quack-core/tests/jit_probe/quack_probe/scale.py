"""Kernel that scales rows."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int64, cute

from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int

from .factor import FACTOR
from .spec import ScaleConfig, ScaleSpec


class Scale:
    """One CTA scales one row."""

    def __init__(self, spec: ScaleSpec, config: ScaleConfig) -> None:
        self.spec, self.config = spec, config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (M, N)
        bias: cute.Tensor | None,  # (N,)
        y: cute.Tensor,  # (M, N)
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(x, bias, y, scale).launch(
            grid=[x.shape[0], 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mB: cute.Tensor | None, mY: cute.Tensor, scale: Float32):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for column in cutlass.range(tid, self.spec.n, self.config.threads):
            value = mX[Int64(row), column].to(Float32) * scale * FACTOR
            if cutlass.const_expr(mB is not None):
                value = value + mB[column].to(Float32)
            mY[Int64(row), column] = value.to(mY.element_type)


def build(spec: ScaleSpec, config: ScaleConfig) -> tuple[Scale, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    rows = sym_int()
    x, y = (symbolic(spec.dtype, (rows, spec.n), align=4) for _ in range(2))
    bias = symbolic(spec.bias, (spec.n,), align=4)
    return Scale(spec, config), (x, bias, y, Float32(0))
