"""CTAs and warps wait for one another: by the last arrival, by turns, by named barriers."""

import enum
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.memory
from cutlass import Int32, const_expr, cute

from quack_core.device import barrier
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int

from .specs import GridSpec, ProbeConfig


class Barrier(barrier.NamedBarrier):
    """Named barriers of the kernel."""

    WRITTEN = enum.auto()
    READ = enum.auto()


class Grid:
    """See the methods. ``work`` is scratch memory, ``out`` the result, ``counter`` is 0 again."""

    def __init__(self, spec: GridSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        work: cute.Tensor,  # (CTAs, threads)
        out: cute.Tensor,  # (threads,)
        counter: cute.Tensor,  # (1,)
        stream: cuda.CUstream,
    ):
        self.kernel(work, out, counter, work.shape[0]).launch(
            grid=[work.shape[0], 1, 1], block=[self.spec.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, work: cute.Tensor, out: cute.Tensor, counter: cute.Tensor, ctas: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate_tensor(Int32, cute.make_layout(self.spec.threads), 16)
        if const_expr(self.spec.path == "last"):
            self._last(work, out, counter.iterator, shared, ctas, block, tid)
        elif const_expr(self.spec.path == "turns"):
            self._turns(out, counter.iterator, ctas, block, tid)
        else:
            self._groups(out, shared, block, tid)

    @cute.jit
    def _last(self, work, out, counter, shared, ctas: Int32, block: Int32, tid: Int32):
        """Each CTA writes block + tid; the last one adds the rows, and counts itself in ``out``."""
        work[block, tid] = block + tid
        if barrier.last_arrival(counter, ctas, shared, tid):
            total = Int32(0)
            for i in range(ctas):
                total += work[i, tid]
            out[tid] = out[tid] + total

    @cute.jit
    def _turns(self, out, counter, ctas: Int32, block: Int32, tid: Int32):
        """out = 3 * out + block, CTA by CTA in order of their index."""
        barrier.semaphore_acquire(counter, block, tid)
        out[tid] = 3 * out[tid] + block
        amount = Int32(1) if block < ctas - 1 else 1 - ctas
        barrier.semaphore_release(counter, tid, amount)

    @cute.jit
    def _groups(self, out, shared, block: Int32, tid: Int32):
        """The first half of the threads writes shared memory, the second half reads it, 3 times."""
        half, threads = const_expr(self.spec.threads // 2), const_expr(self.spec.threads)
        total = Int32(0)
        for turn in range(3):
            if tid < half:
                shared[tid] = tid * (turn + 1)
                barrier.arrive_group(Barrier.WRITTEN, threads)
                barrier.sync_group(Barrier.READ, threads)
            else:
                barrier.sync_group(Barrier.WRITTEN, threads)
                total += shared[threads - 1 - tid]
                barrier.arrive_group(Barrier.READ, threads)
        if block == 0 and tid >= half:
            out[tid] = total


def build(spec: GridSpec, config: ProbeConfig) -> tuple[Grid, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    work = symbolic("int32", (sym_int(), spec.threads), align=16)
    out = symbolic("int32", (spec.threads,), align=16)
    return Grid(spec), (work, out, symbolic("int32", (1,), align=4))
