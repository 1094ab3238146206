"""Cross-entropy backward: the gradient of logits for any incoming one, element by element."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import copy, fast_math
from quack_core.device.reduce import finite
from quack_core.jit import dsl
from quack_core.jit.compile import symbolic, to_cute
from quack_norm.ops.row_map.base import (
    coordinates,
    num_rows,
    row_policy,
    slice_pointer,
    store_piece,
)

from .config import BwdConfig
from .gradient import (
    Options,
    Slope,
    element,
    gradient,
    gradient_of_label,
    log_of,
    log_sum_exp,
    read_label,
    slope_of,
)
from .spec import CrossEntropyBwdSpec


class CrossEntropyBwd:
    """A CTA works on some columns of one row; dx may be the logits' own memory.

    Threads: each has ``unroll`` vectors of 16 bytes, which a warp reads and writes side by side.
    Shared memory: none.
    Synchronises: two CTA barriers: the label's logit is read before any gradient is written, and
    its gradient is written last.
    Traffic: logits and gradient once.
    """

    def __init__(self, spec: CrossEntropyBwdSpec, config: BwdConfig):
        self.spec, self.config = spec, config
        self.cols = config.num_threads * config.unroll * spec.full_vector
        # One more block than whole vectors need, where rows begin anywhere.
        aligned = spec.align == copy.CHUNK and not spec.odd
        span = spec.n if aligned or not spec.in_phase else spec.n + spec.full_vector - 1
        self.blocks = -(-span // self.cols)
        self.align = copy.CHUNK if spec.in_phase else spec.align

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        dloss: cute.Tensor,  # (M,)
        input: cute.Tensor,  # (M, V) or (M1, M0, V)
        target: cute.Tensor,  # (M,)
        weight: cute.Tensor | None,  # (V,)
        peak: cute.Tensor,  # (M,)
        exp_sum: cute.Tensor,  # (M,)
        total: cute.Tensor,  # (1,)
        dx: cute.Tensor,  # like input
        ignore_index: Int64,
        label_smoothing: Float32,
        softcap: Float32,
        z_loss: Float32,
        stream: cuda.CUstream,
    ):
        options = Options(ignore_index, label_smoothing, softcap, z_loss)
        self.kernel(dloss, input, target, weight, peak, exp_sum, total, dx, options).launch(
            grid=[self.blocks * num_rows(input), 1, 1],
            block=[self.config.num_threads, 1, 1],
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=0,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mG, mX, mT, mW, mPeak, mSum, mTotal, mdX, options: Options):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, at = block // self.blocks, coordinates(mX, block // self.blocks)
        source, target = slice_pointer(mX, at, Int32(0)), slice_pointer(mdX, at, Int32(0))
        begin = block % self.blocks * self.cols
        if const_expr(self.spec.in_phase):
            begin = begin - copy.vector_offset(target, self.spec.full_vector)

        pieces = self._load(source, begin, tid, row_policy(mX))
        label = read_label(mT, mW, Int64(row), options.ignore_index, self.spec.n)
        logit = Float32(element(source + label.index)[0])
        if label.kept:
            slope = self._slope(mG, mW, mPeak, mSum, mTotal, Int64(row), label, options, tid)
            cute.arch.sync_threads()
            self._store(pieces, mW, target, begin, tid, slope, options)
            cute.arch.sync_threads()
            mine = label.index - begin
            if tid == 0 and mine >= 0 and mine < self.cols:
                weight = Float32(1.0)
                if const_expr(mW is not None):
                    weight = label.factor
                value = gradient_of_label(logit, weight, slope, self.spec, options)
                element(target + label.index)[0] = target.dtype(value)
        else:
            zeros = cute.make_rmem_tensor(self.spec.full_vector, Float32)
            zeros.fill(0.0)
            for u in cutlass.range_constexpr(self.config.unroll):
                index = self._index(begin, tid, u)
                store_piece(zeros.load(), target, index, Int32(self.spec.n), self.align)

    def _index(self, begin: Int32, tid: Int32, u: int) -> Int32:
        """First element of a thread's vector."""
        return begin + (u * self.config.num_threads + tid) * self.spec.full_vector

    def _load(
        self, source: cute.Pointer, begin: Int32, tid: Int32, policy: Int64
    ) -> list[cute.Tensor]:
        """The thread's vectors of logits."""
        n, vec = Int32(self.spec.n), self.spec.full_vector
        return [
            copy.load_piece(source, self._index(begin, tid, u), n, vec, self.align, policy=policy)
            for u in range(self.config.unroll)
        ]

    @cute.jit
    def _slope(
        self, mG, mW, mPeak, mSum, mTotal, row: Int64, label, options: Options, tid: Int32
    ) -> Slope:
        peak, exp_sum = mPeak[row], mSum[row]
        incoming = Float32(mG[row]) * fast_math.inverse(mTotal[0])
        weight_sum = Float32(self.spec.n)
        if const_expr(mW is not None and self.spec.smoothing):
            weight_sum = self._weight_sum(mW, tid)
        lse = log_sum_exp(peak, log_of(exp_sum))
        return slope_of(label, finite(peak), exp_sum, lse, weight_sum, incoming, self.spec, options)

    @cute.jit
    def _weight_sum(self, mW: cute.Tensor, tid: Int32) -> Float32:
        """Sum of all class weights; every warp adds them up by itself."""
        total = Float32(0.0)
        lane = cute.arch.lane_idx()
        for i in cutlass.range(lane, Int32(self.spec.n), 32, unroll=8):
            total += Float32(mW[i])
        for i in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << i)
        return total

    @cute.jit
    def _store(
        self, pieces, mW, target: cute.Pointer, begin: Int32, tid: Int32, slope, options: Options
    ):
        """Gradients of the thread's logits but for the label's own share."""
        n, vec = Int32(self.spec.n), self.spec.full_vector
        for u in cutlass.range_constexpr(self.config.unroll):
            index = self._index(begin, tid, u)
            weight = None
            if const_expr(mW is not None and self.spec.smoothing):
                weight = copy.load_piece(mW.iterator, index, n, vec, mW.element_type.width // 8)
                weight = weight.load().to(Float32)
            x = pieces[u].load().to(Float32)
            dx = gradient(x, weight, slope, self.spec, options)
            store_piece(dx, target, index, n, self.align)


def arguments(spec: CrossEntropyBwdSpec) -> tuple:
    """Symbolic operands of the launch function."""
    outer = tuple(cute.sym_int() for _ in range(spec.rank - 1))
    count = outer[0] if spec.rank == 2 else cute.sym_int()
    rows = (*outer, spec.n)

    def per_row(name: str):
        return symbolic(name, (count,), align=8 if name == "int64" else 4, contiguous=True)

    return (
        strided(spec.dloss, count),
        symbolic(spec.x, rows, align=spec.align),
        per_row(spec.target),
        symbolic(spec.weight, (spec.n,), align=16),
        per_row("float32"),
        per_row("float32"),
        symbolic("float32", (1,), align=4, contiguous=True),
        symbolic(spec.x, rows, align=spec.align),
        Int64(0),
        Float32(0),
        Float32(0),
        Float32(0),
    )


def strided(dtype: str, count):
    """A symbolic vector of any stride."""
    element_type = to_cute(dtype)
    return dsl.make_fake_tensor(
        element_type, (count,), stride=(dsl.sym_int64(),), assumed_align=element_type.width // 8
    )


def build(spec: CrossEntropyBwdSpec, config: BwdConfig) -> tuple[CrossEntropyBwd, tuple]:
    """The kernel and its symbolic arguments."""
    return CrossEntropyBwd(spec, config), arguments(spec)
