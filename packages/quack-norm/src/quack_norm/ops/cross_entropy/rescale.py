"""A gradient times the number that came in for it; nothing happens if that is 1."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import copy
from quack_core.jit.compile import symbolic
from quack_norm.ops.row_map.base import store_piece

from .config import RescaleConfig
from .spec import RescaleSpec


class Rescale:
    """CTAs stride over all elements.

    Threads: each takes a vector of 16 bytes at a time.
    Shared memory: none.
    Synchronises: nothing.
    """

    def __init__(self, spec: RescaleSpec, config: RescaleConfig):
        self.spec, self.config = spec, config

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        dx: cute.Tensor,  # (K,)
        factor: cute.Tensor,  # (1,)
        stream: cuda.CUstream,
    ):
        vec = const_expr(128 // dx.element_type.width)
        vectors = (Int64(cute.size(dx)) + vec - 1) // vec
        ctas = (vectors + self.config.num_threads - 1) // self.config.num_threads
        ctas = cutlass.min(Int32(ctas), Int32(self.config.most_ctas))
        self.kernel(dx, factor, vectors).launch(
            grid=[ctas, 1, 1], block=[self.config.num_threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mdX: cute.Tensor, mFactor: cute.Tensor, vectors: Int64):
        factor = Float32(mFactor[0])
        if factor != Float32(1.0):
            self._scale(mdX, factor, vectors)

    @cute.jit
    def _scale(self, mdX: cute.Tensor, factor: Float32, vectors: Int64):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        vec = const_expr(128 // mdX.element_type.width)
        size = Int64(cute.size(mdX))
        whole, rest = size // vec, Int32(size % vec)
        step = Int64(ctas) * self.config.num_threads
        i = Int64(block) * self.config.num_threads + tid
        while i < vectors:
            start = mdX.iterator + i * vec
            left = Int32(vec) if i < whole else rest
            piece = copy.load_piece(start, Int32(0), left, vec, copy.CHUNK)
            store_piece(piece.load().to(Float32) * factor, start, Int32(0), left, copy.CHUNK)
            i += step


def build(spec: RescaleSpec, config: RescaleConfig) -> tuple[Rescale, tuple]:
    """The kernel and its symbolic arguments."""
    numbers = symbolic(spec.x, (cute.sym_int64(),), align=16, contiguous=True)
    return Rescale(spec, config), (numbers, symbolic(spec.factor, (1,), align=2, contiguous=True))
