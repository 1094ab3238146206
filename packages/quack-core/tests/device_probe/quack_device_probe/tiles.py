"""Tiles of a matrix go through a ring: one warp loads them, four warps scale and store them."""

import enum
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
from cutlass import Int32, const_expr, cute

from quack_core.device import barrier, tma
from quack_core.jit.compile import symbolic, to_cute
from quack_core.jit.dsl import sym_int

from .specs import ProbeConfig, TileSpec

WORKERS = 128


class Barrier(barrier.NamedBarrier):
    """Named barriers of the kernel."""

    STORE = enum.auto()


class Tiles:
    """CTA ``i`` brings the row ``i // cluster`` of x's tiles, scaled, to the row ``i`` of y's.

    Within a tile the elements with an odd sum of row and ``column // 8`` are doubled, so that a
    thread that finds another element than it looks for shows.
    ``add`` adds to y; with ``multicast`` the CTAs of a cluster load each tile together.
    """

    def __init__(self, spec: TileSpec) -> None:
        self.spec, self.dtype = spec, to_cute(spec.dtype)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        tile, cluster = const_expr(self.spec.tile), const_expr(self.spec.cluster)
        layout = self._layout()
        load = tma.load_atom(x, layout, tile, cluster)
        if const_expr(self.spec.path == "add"):
            store = tma.add_atom(y, layout, tile)
        else:
            store = tma.store_atom(y, layout, tile)
        self.kernel(*load, *store, cute.ceil_div(x.shape[1], tile[1])).launch(
            grid=[cute.ceil_div(x.shape[0], tile[0]) * cluster, 1, 1],
            block=[32 + WORKERS, 1, 1],
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
            stream=stream,
        )

    def _layout(self):
        """(rows, columns, stages): rows of 128 bytes, swizzled or not."""
        (rows, cols), stages = self.spec.tile, self.spec.stages
        layout = cute.make_layout((rows, cols, stages), stride=(cols, 1, rows * cols))
        if self.spec.swizzled:
            return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout)
        return layout

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        mX: cute.Tensor,
        store: cute.CopyAtom,
        mY: cute.Tensor,
        count: Int32,
    ):
        tile, stages = const_expr(self.spec.tile), const_expr(self.spec.stages)
        cluster = const_expr(self.spec.cluster)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, rank = cute.arch.make_warp_uniform(tid // 32), block % cluster
        if warp == 0:
            tma.prefetch_descriptors((load, store))
        smem = cutlass.memory.SmemAllocator()
        layout = self._layout()
        if const_expr(self.spec.swizzled):
            shared = smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
        else:
            shared = smem.allocate_tensor(self.dtype, layout, 1024)
        full = barrier.allocate_mbarriers(smem, stages)
        empty = barrier.allocate_mbarriers(smem, stages)
        barrier.init_mbarriers(full, stages, 1, tid)
        barrier.init_mbarriers(empty, stages, cluster, tid)
        if const_expr(cluster > 1):
            ranks = cute.make_layout((cluster, 1))
            source = tma.bind_shared(load, mX, shared, tile, ranks, (rank, Int32(0)), 0)
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            source = tma.bind(load, mX, shared, tile)
            cute.arch.sync_threads()
        if warp == 0:
            phase = barrier.empty_phase()
            for i in range(count):
                barrier.wait(empty, phase)
                barrier.expect_bytes(full, phase, tma.tile_bytes(self.dtype, tile))
                tma.load_tile(source, (block // cluster, i), phase.stage, full + phase.stage)
                phase = barrier.next_phase(phase, stages)
        else:
            target = tma.bind(store, mY, shared, tile)
            self._scale(target, shared, full, empty, count, block, tid - 32, warp)
        if const_expr(cluster > 1):  # peers arrive here until they have read everything
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def _scale(self, target, shared, full, empty, count, block, thread: Int32, warp: Int32):
        (rows, cols), stages = const_expr(self.spec.tile), const_expr(self.spec.stages)
        phase = barrier.full_phase()
        for i in range(count):
            barrier.wait(full, phase)
            for at in range(thread, rows * cols, WORKERS):
                row, col = at // cols, at % cols
                value = shared[row, col, phase.stage]
                if (row + col // 8) % 2 == 1:
                    shared[row, col, phase.stage] = (value + value).to(self.dtype)
            tma.publish_shared()
            barrier.sync_group(Barrier.STORE, WORKERS)
            if warp == 1:
                tma.store_tile(target, phase.stage, (block, i))
                tma.bulk_commit()
                tma.bulk_wait_read()
                if const_expr(self.spec.cluster == 1):
                    barrier.arrive(empty, phase)
                else:
                    for peer in cutlass.range_constexpr(self.spec.cluster):
                        barrier.arrive(empty, phase, Int32(peer))
            phase = barrier.next_phase(phase, stages)


def build(spec: TileSpec, config: ProbeConfig) -> tuple[Tiles, tuple[Any, ...]]:
    """The kernel and its symbolic arguments."""
    (rows, more), cols = (sym_int(), sym_int()), sym_int()
    x = symbolic(spec.dtype, (rows, cols), align=16)
    y = symbolic(spec.dtype, (more if spec.cluster > 1 else rows, cols), align=16)
    return Tiles(spec), (x, y)
