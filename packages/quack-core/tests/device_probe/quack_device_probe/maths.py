"""Arithmetic on single values: every function of ``fast_math``."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import const_expr, cute

from quack_core.device import fast_math
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int

from .specs import MathsSpec, ProbeConfig

THREADS = 128


class Maths:
    """out[i, j] = FUNCTIONS[i](x[j]), an element per thread."""

    def __init__(self, spec: MathsSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        grid = [cute.ceil_div(x.shape[0], THREADS), 1, 1]
        self.kernel(x, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        j = block * THREADS + thread
        if j < mX.shape[0]:
            x = mX[j]
            for i in cutlass.range_constexpr(len(self.spec.functions)):
                name = const_expr(self.spec.functions[i])
                function = const_expr(getattr(fast_math, name))
                operands = (x, fast_math.rsqrt(x)) if const_expr(name == "rsqrt_rest") else (x,)
                mOut[i, j] = function(*operands)


def build(spec: MathsSpec, config: ProbeConfig) -> tuple[Maths, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    count = sym_int()
    x = symbolic("float32", (count,), align=4)
    return Maths(spec), (x, symbolic("float32", (len(spec.functions), count), align=4))
