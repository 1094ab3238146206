"""The product of FP8 blocks on Hopper: a persistent kernel whose warpgroups have roles."""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.tensor_utils import LayoutEnum

from quack_core.device import barrier, tma
from quack_core.gemm import order
from quack_core.gemm.sm90 import fragment, ring, store
from quack_core.gemm.sm90.fragment import WARPGROUP
from quack_core.gemm.sm90.ring import Cluster
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int
from quack_core.layout import views
from quack_core.reduction.tiling import WARP

from . import scaling
from .scaling import Scales
from .spec import ATOM_M, BLOCK, GROUPS, PARTS, PIECE_COLS, TILE_M, MatmulConfig, MatmulSpec

ROW, K_MAJOR = LayoutEnum.ROW_MAJOR, OperandMajorMode.K
BUFFERS = 2
REGISTERS = (40, 232)
"""Per thread of the warpgroup that loads, and of the others."""
STORE = 1
"""First of the named barriers at which warpgroups write a piece of D."""


class MatmulSm90:
    """Clusters walk over tiles of D; each 128 of K are summed by themselves, scaled, and added.

    Threads: a warpgroup, one warp of which loads; two that multiply and store.
    Shared memory: stages of A, B and their scales; pieces of D on their way out.
    Synchronises: a full and an empty mbarrier per stage, over the cluster; named barriers of a
    warpgroup around each piece that it stores.
    Traffic: A once for each column of tiles, B once for each row of clusters; less what L2 keeps.
    """

    def __init__(self, spec: MatmulSpec, config: MatmulConfig):
        self.spec, self.config = spec, config
        self.stages, self.shape = config.depth(spec), (config.cluster_m, 1)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (L, N, K)
        scale_a: cute.Tensor,  # (M, K / 128)
        scale_b: cute.Tensor,  # (L, N / 128 or N, K / 128)
        d: cute.Tensor,  # (M, N)
        max_clusters: Int32,  # that the GPU holds at once
        stream: cuda.CUstream,
    ):
        config = self.config
        tile = (TILE_M, config.tile_n, BLOCK)
        self.d_dtype = d.element_type
        b, scale_b = (views.permute(one, 1, 2, 0) for one in (b, scale_b))
        a_smem = hopper.make_smem_layout_a(ROW, tile, Float8E4M3FN, self.stages)
        b_smem = hopper.make_smem_layout_b(ROW, tile, Float8E4M3FN, self.stages)
        d_smem = store.smem_layout(self.d_dtype, ROW, PIECE_COLS, BUFFERS * GROUPS)
        load_a = tma.load_atom(a, a_smem, (TILE_M, BLOCK))
        load_b = tma.load_atom(b, b_smem, (config.tile_n, BLOCK), config.cluster_m)
        send = tma.add_atom if self.spec.accumulate else tma.store_atom
        store_d = send(d, d_smem, (ATOM_M, PIECE_COLS))
        down = cute.ceil_div(d.shape[0], TILE_M * config.cluster_m)
        across = cute.ceil_div(d.shape[1], config.tile_n)
        tiles = order.make(down, across, Int32(1), config.group)
        self.kernel(
            self._mma(GROUPS, PARTS),
            self._mma(1, 1),
            (*load_a, a_smem),
            (*load_b, b_smem),
            (*store_d, d_smem),
            Scales(scale_a, scale_b),
            tiles,
            cute.ceil_div(a.shape[1], BLOCK),
        ).launch(
            grid=[config.cluster_m, 1, cutlass.min(tiles.total, max_clusters)],
            block=[config.num_threads, 1, 1],
            cluster=[config.cluster_m, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _mma(self, groups: int, parts: int) -> cute.TiledMma:
        """The matrix instruction of so many warpgroups for a part of the columns."""
        tiler = (ATOM_M, self.config.tile_n // parts)
        kinds = (Float8E4M3FN, Float8E4M3FN, K_MAJOR, K_MAJOR, Float32)
        return hopper.make_trivial_tiled_mma(*kinds, (groups, 1, 1), tiler_mn=tiler)

    @cute.kernel
    def kernel(
        self,
        mma,
        mma_of_group,
        load_a,
        load_b,
        store_d,
        scales: Scales,
        tiles: order.Order,
        steps: Int32,
    ):
        # --- coordinates
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        warp_idx = cute.arch.make_warp_uniform(tid // WARP)
        at = Cluster(cute.arch.make_warp_uniform(cute.arch.block_idx()[0]), Int32(0))

        # --- shared memory
        smem = cutlass.memory.SmemAllocator()
        barriers = ring.allocate(smem, self.stages)
        sA = smem.allocate_tensor(Float8E4M3FN, load_a[2].outer, 1024, load_a[2].inner)
        sB = smem.allocate_tensor(Float8E4M3FN, load_b[2].outer, 1024, load_b[2].inner)
        sD = smem.allocate_tensor(self.d_dtype, store_d[2].outer, 1024, store_d[2].inner)
        held = scaling.allocate(smem, self.spec, config, self.stages)

        # --- barriers
        barrier.init_mbarriers(barriers.full, self.stages, 1 + WARP, tid)  # bytes, then scales
        readers = GROUPS * (WARPGROUP // WARP) * config.cluster_m
        barrier.init_mbarriers(barriers.empty, self.stages, readers, tid)
        if warp_idx == 0:
            tma.prefetch_descriptors((load_a[0], load_b[0], store_d[0]))
        if const_expr(config.cluster_m > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        # --- roles
        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == 0:
                a = tma.bind(load_a[0], load_a[1], sA, (TILE_M, BLOCK))
                b = self._bind_b(load_b, sB, at)
                self._load(a, b, scales, held, barriers, tiles, steps, at, tid)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            out = tma.bind(store_d[0], store_d[1], sD, (ATOM_M, PIECE_COLS))
            thread = tid % WARPGROUP
            sink = store.make_sink(mma_of_group, out, sD, ROW, self.d_dtype, thread)
            self._compute(mma, sA, sB, held, sink, barriers, tiles, steps, at, group - 1, thread)

    def _bind_b(self, load, shared, at: Cluster) -> tma.Tiles:
        """Tiles of B, of which each CTA of a cluster loads a part."""
        tile = (self.config.tile_n, BLOCK)
        if self.config.cluster_m == 1:
            return tma.bind(load[0], load[1], shared, tile)
        cluster = cute.make_layout((*self.shape, 1))
        return tma.bind_shared(load[0], load[1], shared, tile, cluster, (at.row, at.col, 0), 0)

    # --- the warp that loads

    @cute.jit
    def _load(
        self, a, b, scales: Scales, held: Scales, barriers, tiles, steps: Int32, at: Cluster, lane
    ):
        """Fill stages, tile after tile."""
        cols = const_expr(1 if self.spec.rows_b else self.config.scale_cols)
        phase, work = barrier.empty_phase(), cute.arch.block_idx()[2]
        while work < tiles.total:
            row, col, matrix = order.locate(tiles, work, self.config.group)
            row = row * self.config.cluster_m + at.row
            for k in cutlass.range(steps, unroll=1):
                num_bytes = const_expr(self.config.stage_bytes)
                ring.fill(barriers, phase, a, b, (row, k), (col, k, matrix), num_bytes)
                first = (row * TILE_M, col * self.config.tile_n, matrix)
                scaling.load(scales, held, first, k, phase.stage, lane, cols)
                cute.arch.cp_async_mbarrier_arrive_noinc(barriers.full + phase.stage)
                phase = barrier.next_phase(phase, self.stages)
            work += cute.arch.grid_dim()[2]
        # Also alone: copies of scales that are under way belong to this warp.
        ring.drain(barriers, phase, self.stages)

    # --- the warpgroups that multiply

    @cute.jit
    def _compute(
        self,
        mma,
        sA,
        sB,
        held: Scales,
        sink: store.Sink,
        barriers,
        tiles: order.Order,
        steps: Int32,
        at: Cluster,
        group: Int32,
        thread: Int32,
    ):
        """Multiply and store, tile after tile."""
        config = self.config
        thr_mma = mma.get_slice(cute.make_layout(GROUPS, stride=WARPGROUP)(group))
        rA = mma.make_fragment_A(thr_mma.partition_A(sA))
        rB = mma.make_fragment_B(thr_mma.partition_B(sB))
        shape = thr_mma.partition_shape_C((TILE_M, config.tile_n))
        of_part = thr_mma.partition_shape_C((TILE_M, config.tile_n // PARTS))
        sums = cute.make_rmem_tensor(shape, Float32)
        parts = tuple(cute.make_rmem_tensor(of_part, Float32) for _ in range(PARTS))
        first_row = group * ATOM_M + fragment.first_row(thread)
        of_stage = scaling.of_columns if self.spec.rows_b else scaling.of_blocks
        factors = functools.partial(of_stage, held, thread, first_row, config)
        phase, work, done = barrier.full_phase(), cute.arch.block_idx()[2], Int32(0)
        pieces = const_expr(config.tile_n // PIECE_COLS)
        size = const_expr(fragment.sums_of(PIECE_COLS))
        while work < tiles.total:
            row, col, _ = order.locate(tiles, work, config.group)
            row = row * config.cluster_m + at.row
            sums.fill(Float32(0.0))
            walk = (barriers, phase, steps, self.stages, self.shape, at)
            phase = ring.multiply_promoted(mma, sums, parts, rA, rB, *walk, factors=factors)
            for p in cutlass.range_constexpr(pieces):
                store.store_piece(
                    sink,
                    [sums[p * size + i] for i in range(size)],
                    group * BUFFERS + (done * pieces + p) % BUFFERS,
                    (row * GROUPS + group, col * pieces + p),
                    BUFFERS - 1,
                    STORE + group,
                    thread,
                )
            done += 1
            work += cute.arch.grid_dim()[2]
        if thread < WARP:
            tma.bulk_wait_read(0)


def build(spec: MatmulSpec, config: MatmulConfig) -> tuple[MatmulSm90, tuple]:
    """The kernel and its symbolic arguments."""
    l, m, n, k, rows, steps = (sym_int() for _ in range(6))
    return MatmulSm90(spec, config), (
        symbolic("float8_e4m3fn", (m, k)),
        symbolic("float8_e4m3fn", (l, n, k)),
        symbolic("float32", (m, steps), align=4),
        symbolic("float32", (l, n if spec.rows_b else rows, steps), align=4),
        symbolic(spec.d, (m, n)),
        Int32(0),
    )
