"""What both forward kernels do with the keys of a row: sort them, write the results."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quack_core.device import fast_math
from quack_core.device.reduce import SUM, thread_sum
from quack_core.jit.compile import symbolic
from quack_core.reduction.base import Exchange, ReductionBase
from quack_core.reduction.tiling import WARP

from .config import SelectConfig, SortConfig
from .keys import Keys, choose
from .network import Step, steps
from .spec import TopKFwdSpec


class TopKFwd(ReductionBase):
    """A kernel of ``threads_per_row`` threads per row, each with ``num_keys`` keys in registers.

    Its tiling is that of the results, whose sum the softmax needs.
    """

    def __init__(self, spec: TopKFwdSpec, config: SortConfig | SelectConfig):
        super().__init__(config.results(spec), SUM)
        self.spec, self.config, self.keys = spec, config, Keys(spec)

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
            grid=[cute.ceil_div(rows, self.tiling.rows_per_cta), 1, 1],
            block=[self.tiling.num_threads, 1, 1],
            stream=stream,
        )

    def network(self) -> list[Step]:
        threads = self.config.threads_per_row
        return list(steps(self.config.num_keys(self.spec), threads, self.spec.k))

    def sort(self, keys: list, thread: Int32, sKeys: cute.Tensor) -> list:
        """The largest keys first: key e of thread t is number ``num_keys * t + e``.

        Args:
            keys: of this thread.
            thread: of the row.
            sKeys: (capacity,) for the exchange between warps.

        Synchronises: two CTA barriers for each step between warps.
        """
        for step in self.network():
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
        step = self.config.threads_per_row  # neighbouring threads, neighbouring keys
        for e, key in enumerate(keys):
            sKeys[e * step + thread] = key
        cute.arch.sync_threads()
        others = [sKeys[(e ^ registers) * step + (thread ^ lanes)] for e in range(len(keys))]
        cute.arch.sync_threads()
        return others

    @cute.jit
    def write(
        self,
        keys: list,
        sKeys: cute.Tensor,
        exchange: Exchange | None,
        pX: cute.Pointer,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        row: Int32,
        valid: Boolean,
        tid: Int32,
    ) -> None:
        """Write the results of a row: the threads take them in turn, through shared memory.

        Args:
            keys: of this thread, sorted.
            sKeys: (capacity,) of the row; nobody reads it any more.
            exchange: for the sum of the softmax.
            pX: first element of the row.
            valid: whether the row exists.

        Synchronises: the threads of the row, and their reduction.
        """
        tiling, thread = const_expr(self.tiling), self.thread_in_row(tid)
        for e in cutlass.range_constexpr(len(keys)):
            p = thread * len(keys) + e
            if p < self.spec.k:
                sKeys[p] = keys[e]
        self._sync_row()
        wanted = [tiling.start(thread) + p * tiling.step for p in range(tiling.passes)]
        inside = [valid & (p < self.spec.k) for p in wanted]
        places = [choose(exists, p, Int32(0)) for p, exists in zip(wanted, inside, strict=True)]
        columns = [self.keys.column(sKeys[p]) for p in places]
        values = [element(pX + column) for column in columns]
        if const_expr(self.spec.softmax):
            largest = element(pX + self.keys.column(sKeys[0]))
            values = self._softmax(values, largest, inside, exchange, tid)
        for p in cutlass.range_constexpr(tiling.passes):
            if inside[p]:
                mIndices[Int64(row), wanted[p]] = Int64(columns[p])
                mValues[Int64(row), wanted[p]] = values[p].to(mValues.element_type)

    def _sync_row(self) -> None:
        if self.tiling.threads_per_row > WARP:
            cute.arch.sync_threads()
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
    """Each pair in order, the larger first."""
    keys = list(keys)
    for low in range(len(keys)):
        if not low & step.high_bit:
            a, b = keys[low], keys[low ^ step.mask]
            keys[low], keys[low ^ step.mask] = cutlass.max(a, b), cutlass.min(a, b)
    return keys


def arguments(spec: TopKFwdSpec) -> tuple:
    """Symbolic operands of the launch function."""
    m = cute.sym_int()
    outer = (m,) if spec.rank == 2 else (cute.sym_int(), cute.sym_int())
    x = symbolic(spec.x, (*outer, spec.n), align=spec.align)
    values = symbolic(spec.x, (m, spec.k), align=2, contiguous=True)
    return x, values, symbolic("int64", (m, spec.k), align=8, contiguous=True)
