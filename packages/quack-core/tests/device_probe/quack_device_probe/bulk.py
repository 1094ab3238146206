"""One-dimensional bulk copies: what a CTA loads, it stores, adds, or passes on in its cluster."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.memory
from cutlass import Int32, Int64, const_expr, cute

from quack_core.device import barrier, tma
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int

from .specs import BulkSpec, ProbeConfig

THREADS = 64


class Bulk:
    """CTA ``i`` brings row ``i`` of x to y: see ``BulkSpec.path``.

    * ``store``: doubled by the threads in between.
    * ``add``: added to row 0 of y.
    * ``send``: the row of the CTA before it in the cluster.
    * ``multicast``: the row of the first CTA of the cluster.
    """

    def __init__(self, spec: BulkSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        cluster = const_expr(self.spec.cluster)
        self.kernel(x, y).launch(
            grid=[x.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor):
        path, n, cluster = (const_expr(v) for v in (self.spec.path, self.spec.n, self.spec.cluster))
        num_bytes = const_expr(n * mX.element_type.width // 8)
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        rank, warp = row % cluster, cute.arch.make_warp_uniform(tid // 32)
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((n, 2))
        shared = smem.allocate_tensor(mX.element_type, layout, byte_alignment=128)
        mine, theirs = shared[None, 0].iterator, shared[None, 1].iterator
        mbar = barrier.allocate_mbarriers(smem, 2)
        barrier.init_mbarriers(mbar, 2, 1, tid)
        if const_expr(cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        source = mX[Int64(row), None].iterator
        loaded = barrier.full_phase()
        received = barrier.next_phase(loaded, 2)
        if warp == 0:
            barrier.expect_bytes(mbar, loaded, num_bytes)
            if const_expr(path != "multicast"):
                tma.bulk_load(source, mine, num_bytes, mbar)
            elif rank == 0:
                tma.bulk_load(source, mine, num_bytes, mbar, Int32((1 << cluster) - 1))
        barrier.wait(mbar, loaded)
        if const_expr(path == "send"):
            if warp == 0:
                barrier.expect_bytes(mbar, received, num_bytes)
                tma.bulk_send(mine, theirs, num_bytes, mbar + 1, (rank + 1) % cluster)
            barrier.wait(mbar, received)
        if const_expr(path == "store"):
            for i in range(tid, n, THREADS):
                shared[i, 0] = shared[i, 0] + shared[i, 0]
        tma.publish_shared()
        cute.arch.sync_threads()
        if warp == 1:
            if const_expr(path == "add"):
                tma.bulk_add(mine, mY[Int64(0), None].iterator, n)
            elif const_expr(path == "send"):
                tma.bulk_store(theirs, mY[Int64(row), None].iterator, num_bytes)
            else:
                tma.bulk_store(mine, mY[Int64(row), None].iterator, num_bytes)
            tma.bulk_commit()
            tma.bulk_wait_written()
        if const_expr(cluster > 1):  # a peer may still read what this CTA sends
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def build(spec: BulkSpec, config: ProbeConfig) -> tuple[Bulk, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    rows = sym_int()
    x, y = (symbolic(spec.dtype, (rows, spec.n), align=16) for _ in range(2))
    return Bulk(spec), (x, y)
