"""What all forward kernels do with the keys of a row: sort them, write the results."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import fast_math
from quack_core.device.barrier import NamedBarrier
from quack_core.device.reduce import SUM, thread_sum
from quack_core.jit.compile import symbolic
from quack_core.reduction.base import Exchange, ReductionBase
from quack_core.reduction.tiling import WARP

from .config import FwdConfig
from .keys import Keys, choose
from .network import Step, steps
from .spec import TopKFwdSpec


class TopKFwd(ReductionBase):
    """A kernel whose threads have keys of a row in registers, and sort them.

    Its tiling is that of the results, whose sum the softmax needs: the threads that share a row
    there sort its keys as well.
    """

    def __init__(self, spec: TopKFwdSpec, config: FwdConfig, barrier: NamedBarrier | None = None):
        super().__init__(config.results(spec), SUM, barrier=barrier)
        self.spec, self.config, self.keys = spec, config, Keys(spec.x, spec.n)

    @cute.jit
    def __call__(  # the launcher's messages use these names
        self,
        x: cute.Tensor,  # (M, N) or (M1, M0, N)
        values: cute.Tensor,  # (M, k)
        indices: cute.Tensor,  # (M, k)
        stream: cuda.CUstream,
    ):
        rows = values.shape[0]
        self.kernel(x, values, indices, rows).launch(
            grid=[cute.ceil_div(rows, self.config.rows_per_cta), 1, 1],
            block=[self.config.num_threads, 1, 1],
            stream=stream,
        )

    def sort(self, keys: list, thread: Int32, sKeys: cute.Tensor) -> list:
        """The k largest keys first: key e of thread t is number ``len(keys) * t + e`` of the result.

        Args:
            keys: of this thread; their number is a power of two.
            thread: of the row.
            sKeys: for the exchange between warps: keys of all threads.

        Synchronises: two barriers of the row's threads for each step between warps.
        """
        for step in steps(len(keys), self.tiling.threads_per_row, self.spec.k):
            if step.mask >= len(keys):
                keys = self._meet_threads(keys, step, thread, sKeys)
            elif step.halves:
                keys = _halve(keys, step.run)
            else:
                keys = _meet_registers(keys, step)
        return keys

    def _meet_threads(self, keys: list, step: Step, thread: Int32, sKeys: cute.Tensor) -> list:
        lanes, registers = divmod(step.mask, len(keys))
        if lanes < WARP:
            others = [
                cute.arch.shuffle_sync_bfly(keys[e ^ registers], offset=lanes)
                for e in range(len(keys))
            ]
        else:
            others = self._exchange(keys, lanes, registers, thread, sKeys)
        if step.halves:
            return [cutlass.max(a, b) for a, b in zip(keys, others, strict=True)]
        lower = (thread & (step.high_bit // len(keys))) == 0
        return [choose((a > b) == lower, a, b) for a, b in zip(keys, others, strict=True)]

    def _exchange(
        self, keys: list, lanes: int, registers: int, thread: Int32, sKeys: cute.Tensor
    ) -> list:
        """The keys of thread ``thread ^ lanes``."""
        step = self.tiling.threads_per_row  # neighbouring threads, neighbouring keys
        for e, key in enumerate(keys):
            sKeys[e * step + thread] = key
        self._sync()
        others = [sKeys[(e ^ registers) * step + (thread ^ lanes)] for e in range(len(keys))]
        self._sync()
        return others

    @cute.jit
    def publish(self, keys: list, sKeys: cute.Tensor, thread: Int32) -> None:
        """Sorted keys of this thread into shared memory, as far as they are among the first k."""
        for e in cutlass.range_constexpr(len(keys)):
            p = thread * len(keys) + e
            if p < self.spec.k:
                sKeys[p] = keys[e]

    @cute.jit
    def write(
        self,
        sKeys: cute.Tensor,
        exchange: Exchange | None,
        pX: cute.Pointer,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        row: Int32,
        valid: Boolean,
        tid: Int32,
    ) -> None:
        """Write the results of a row: the threads take them in turn.

        Args:
            sKeys: of the row, into which its threads have published sorted keys.
            exchange: for the sum of the softmax.
            pX: first element of the row.
            valid: whether the row exists.

        Synchronises: the threads of the row, and their reduction.
        """
        tiling, thread = const_expr(self.tiling), self.thread_in_row(tid)
        self.sync_row()
        wanted = [tiling.start(thread) + p * tiling.step for p in range(tiling.passes)]
        inside = [valid & (p < self.spec.k) for p in wanted]
        places = [choose(exists, p, Int32(0)) for p, exists in zip(wanted, inside, strict=True)]
        columns = [self.keys.place(sKeys[p]) for p in places]
        values = [element(pX + column) for column in columns]
        if const_expr(self.spec.softmax):
            largest = element(pX + self.keys.place(sKeys[0]))
            values = self._softmax(values, largest, inside, exchange, tid)
        for p in cutlass.range_constexpr(tiling.passes):
            if inside[p]:
                mIndices[Int64(row), wanted[p]] = Int64(columns[p])
                mValues[Int64(row), wanted[p]] = values[p].to(mValues.element_type)

    def sync_row(self) -> None:
        """Wait for the threads that sort a row."""
        if self.tiling.threads_per_row > WARP:
            self._sync()
        else:
            cute.arch.sync_warp()

    def _softmax(self, values: list, largest, inside: list, exchange: Exchange, tid: Int32) -> list:
        """The softmax of the row's values; NaN where the largest is not finite."""
        below = cute.make_rmem_tensor(len(values), Float32)
        for p, value in enumerate(values):
            below[p] = value.to(Float32) - largest.to(Float32)
        powers = cute.make_rmem_tensor(len(values), Float32)
        powers.store(fast_math.exp_rounded(below.load()))
        for p, exists in enumerate(inside):
            powers[p] = choose(exists, powers[p], Float32(0.0))
        (total,) = self.reduce((thread_sum(powers.load()),), exchange, tid, Int32(0))
        shares = fast_math.divide(powers.load(), total, fast_math.reciprocal(total))
        return [shares[p] for p in range(len(values))]


def element(pointer: cute.Pointer):
    """What a pointer points to."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _halve(keys: list, run: int) -> list:
    """The larger of each key of a run and its mirror in the next one."""
    return [
        cutlass.max(keys[first + i], keys[first + 2 * run - 1 - i])
        for first in range(0, len(keys), 2 * run)
        for i in range(run)
    ]


def _meet_registers(keys: list, step: Step) -> list:
    """Each pair in order, the larger first.

    A 64-bit maximum takes four instructions; what is left of the pair then takes two.
    """
    keys, wide = list(keys), keys[0].dtype.width == 64
    for low in range(len(keys)):
        if not low & step.high_bit:
            a, b = keys[low], keys[low ^ step.mask]
            larger = cutlass.max(a, b)
            smaller = a ^ b ^ larger if wide else cutlass.min(a, b)
            keys[low], keys[low ^ step.mask] = larger, smaller
    return keys


def arguments(spec: TopKFwdSpec) -> tuple:
    """Symbolic operands of the launch function."""
    m = cute.sym_int()
    outer = (m,) if spec.rank == 2 else (cute.sym_int(), cute.sym_int())
    x = symbolic(spec.x, (*outer, spec.n), align=spec.align)
    values = symbolic(spec.x, (m, spec.k), align=2, contiguous=True)
    return x, values, symbolic("int64", (m, spec.k), align=8, contiguous=True)
