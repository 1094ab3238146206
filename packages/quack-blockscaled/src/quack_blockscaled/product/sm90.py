"""The product of FP8 blocks on Hopper: a persistent kernel whose warpgroups have roles."""

import functools
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.tensor_utils import LayoutEnum

from quack_core.device import barrier, tma
from quack_core.gemm import order, ragged
from quack_core.gemm.sm90 import fragment, ring, store
from quack_core.gemm.sm90.fragment import WARPGROUP
from quack_core.gemm.sm90.ring import Cluster
from quack_core.jit.compile import symbolic
from quack_core.jit.dsl import sym_int
from quack_core.layout import views
from quack_core.reduction.tiling import WARP

from . import scaling
from .scaling import Scales
from .spec import ATOM_M, BLOCK, GROUPS, PIECE_COLS, TILE_M, UNIT, MatmulConfig, MatmulSpec

ROW, K_MAJOR = LayoutEnum.ROW_MAJOR, OperandMajorMode.K
BUFFERS = 2
ALONE = (1, 1)
"""The shape of a cluster of one CTA."""
REGISTERS = (40, 232)
"""Per thread of the warpgroup that loads, and of the others."""
STORE = 1
"""First of the named barriers at which warpgroups write a piece of D."""
TURN = 3
"""First of those that say which of them may multiply."""


class Place(NamedTuple):
    """A tile of D.

    Args:
        row: its first one.
        col: in tiles.
        matrix: of B.
        end: the row behind the last one of its group; None: of D.
    """

    row: Int32
    col: Int32
    matrix: Int32
    end: Int32 | None


class MatmulSm90:
    """CTAs walk over tiles of D; each 128 of K are summed by themselves, scaled, and added.

    Tiles of groups begin where their group does. One that reaches into the next group multiplies its
    rows as well, and writes those of its own.

    Threads: a warpgroup, one warp of which loads; two that multiply and store.
    Shared memory: stages of A, B and their scales; pieces of D on their way out.
    Scales of single rows come by TMA, a column of them at a time: gathered one by one they would
    take a fifth of the bandwidth of shared memory that the tensor cores need.
    Synchronises: a full and an empty mbarrier per stage; named barriers of a
    warpgroup around each piece that it stores; where tiles are not multiplied in parts, one that
    says whose turn it is.
    Traffic: A once for each column of tiles, B once for each row of them; less what L2 keeps.
    """

    def __init__(self, spec: MatmulSpec, config: MatmulConfig):
        self.spec, self.config = spec, config
        self.stages = config.depth(spec)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K)
        b: cute.Tensor,  # (L, N, K)
        scale_a: cute.Tensor,  # (K / 128, M)
        scale_b: cute.Tensor,  # (L, N / 128, K / 128) or (L, K / 128, N)
        d: cute.Tensor,  # (M, N)
        offsets: cute.Tensor | None,  # (L + 1,), of groups of rows
        sms: Int32,  # of the GPU
        stream: cuda.CUstream,
    ):
        config = self.config
        tile = (TILE_M, config.tile_n, BLOCK)
        self.d_dtype = d.element_type
        b = views.permute(b, 1, 2, 0)
        a_smem = hopper.make_smem_layout_a(ROW, tile, Float8E4M3FN, self.stages)
        b_smem = hopper.make_smem_layout_b(ROW, tile, Float8E4M3FN, self.stages)
        d_smem = store.smem_layout(self.d_dtype, ROW, PIECE_COLS, BUFFERS * GROUPS)
        load_a = tma.load_atom(a, a_smem, (TILE_M, BLOCK))
        load_b = tma.load_atom(b, b_smem, (config.tile_n, BLOCK))
        send = tma.add_atom if self.spec.accumulate else tma.store_atom
        store_d = send(d, d_smem, (ATOM_M, PIECE_COLS))
        tiles, count = self._tiles(d, offsets)
        self.kernel(
            self._mma(GROUPS, self.spec.parts),
            self._mma(1, 1),
            (*load_a, a_smem),
            (*load_b, b_smem),
            (*store_d, d_smem),
            d if const_expr(self.spec.grouped) else None,
            scaling.sources(scale_a, scale_b, self.spec, config, self.stages),
            tiles,
            cute.ceil_div(a.shape[1], BLOCK),
        ).launch(
            grid=[cutlass.min(count, sms), 1, 1],
            block=[config.num_threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _tiles(self, d: cute.Tensor, offsets: cute.Tensor | None):
        """What CTAs walk over, and how many tiles there are at most."""
        rows, across = d.shape[0], cute.ceil_div(d.shape[1], self.config.tile_n)
        if self.spec.grouped:
            groups = ragged.Groups(offsets, Int32(rows), Int32(across))
            return groups, ragged.most(groups, TILE_M)
        down = cute.ceil_div(rows, TILE_M)
        tiles = order.make(down, across, Int32(1), self.config.group)
        return tiles, tiles.total

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
        d: cute.Tensor | None,
        scales,
        tiles: order.Order | ragged.Groups,
        steps: Int32,
    ):
        # --- coordinates
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        warp_idx = cute.arch.make_warp_uniform(tid // WARP)

        # --- shared memory
        smem = cutlass.memory.SmemAllocator()
        barriers = ring.allocate(smem, self.stages)
        sA = smem.allocate_tensor(Float8E4M3FN, load_a[2].outer, 1024, load_a[2].inner)
        sB = smem.allocate_tensor(Float8E4M3FN, load_b[2].outer, 1024, load_b[2].inner)
        sD = smem.allocate_tensor(self.d_dtype, store_d[2].outer, 1024, store_d[2].inner)
        held = scaling.allocate(smem, self.spec, config, self.stages)

        # --- barriers
        arrivals = const_expr(1 if self.spec.rows_b else 1 + WARP)  # bytes, and copies of scales
        barrier.init_mbarriers(barriers.full, self.stages, arrivals, tid)
        readers = GROUPS * (WARPGROUP // WARP)
        barrier.init_mbarriers(barriers.empty, self.stages, readers, tid)
        if warp_idx == 0:
            tma.prefetch_descriptors((load_a[0], load_b[0], store_d[0]))
        cute.arch.sync_threads()

        # --- roles
        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == 0:
                b = tma.bind(load_b[0], load_b[1], sB, (config.tile_n, BLOCK))
                self._load((*load_a[:2], sA), b, scales, held, barriers, tiles, steps, tid)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            who, out = (group - 1, tid % WARPGROUP), (*store_d[:2], sD, d)
            multiply = (mma, mma_of_group, sA, sB, held)
            self._compute(*multiply, out, barriers, tiles, steps, *who)

    # --- where a tile is; in groups, for all lanes of a warp

    def _find(self, tiles, span, work: Int32, lane: Int32):
        """The group of a tile; None where there are no groups."""
        if not self.spec.grouped:
            return None
        span = ragged.begin() if span is None else span
        return ragged.find(tiles, span, work, lane, TILE_M)

    def _is_tile(self, tiles, span, work: Int32):
        """Whether there is one."""
        return ragged.is_group(tiles, span) if self.spec.grouped else work < tiles.total

    def _place(self, tiles, span, work: Int32) -> Place:
        """A tile's place."""
        band = self.config.group
        if self.spec.grouped:
            row, col = ragged.place(tiles, span, work, TILE_M, band)
            return Place(row, col, span.group, span.end)
        row, col, matrix = order.locate(tiles, work, band)
        return Place(row * TILE_M, col, matrix, None)

    # --- the warp that loads

    @cute.jit
    def _load(self, a, b, scales, held: Scales, barriers, tiles, steps: Int32, lane):
        """Fill stages, tile after tile."""
        num_bytes = const_expr(self.config.stage_bytes + scaling.num_bytes(self.spec, self.config))
        phase, work = barrier.empty_phase(), cute.arch.block_idx()[0]
        if const_expr(self.spec.rows_b):
            scales_b = scaling.bind(scales[1], held.b, Int32(0))
        span = self._find(tiles, None, work, lane)
        while self._is_tile(tiles, span, work):
            place = self._place(tiles, span, work)
            below = cute.domain_offset((place.row, 0), a[1])
            rows = tma.bind(a[0], below, a[2], (TILE_M, BLOCK))
            scales_a = scaling.bind(scales[0], held.a, place.row - place.row % UNIT)
            for k in cutlass.range(steps, unroll=1):
                at_b = (place.col, k, place.matrix)
                ring.fill(barriers, phase, rows, b, (0, k), at_b, num_bytes)
                mbar = barriers.full + phase.stage
                tma.load_tile(scales_a, (0, k), phase.stage, mbar)
                if const_expr(self.spec.rows_b):
                    tma.load_tile(scales_b, at_b, phase.stage, mbar)
                else:
                    first = place.col * self.config.tile_n
                    at_k = (k, place.matrix)
                    scaling.copy(scales[1], held.b, first, at_k, phase.stage, lane, self.config)
                    cute.arch.cp_async_mbarrier_arrive_noinc(mbar)
                phase = barrier.next_phase(phase, self.stages)
            work += cute.arch.grid_dim()[0]
            span = self._find(tiles, span, work, lane)
        # Also alone: copies of scales that are under way belong to this warp.
        ring.drain(barriers, phase, self.stages)

    # --- the warpgroups that multiply

    @cute.jit
    def _compute(
        self,
        mma,
        mma_of_group,
        sA,
        sB,
        held: Scales,
        out,
        barriers,
        tiles,
        steps: Int32,
        group: Int32,
        thread: Int32,
    ):
        """Multiply and store, tile after tile."""
        config = self.config
        thr_mma = mma.get_slice(cute.make_layout(GROUPS, stride=WARPGROUP)(group))
        rA = mma.make_fragment_A(thr_mma.partition_A(sA))
        rB = mma.make_fragment_B(thr_mma.partition_B(sB))
        shape = thr_mma.partition_shape_C((TILE_M, config.tile_n))
        of_part = thr_mma.partition_shape_C((TILE_M, config.tile_n // self.spec.parts))
        sums = cute.make_rmem_tensor(shape, Float32)
        at_once = const_expr(config.at_once(self.spec))
        count = const_expr(self.spec.parts * at_once)
        parts = tuple(cute.make_rmem_tensor(of_part, Float32) for _ in range(count))
        first_row = group * ATOM_M + fragment.first_row(thread)
        of_stage = scaling.of_columns if self.spec.rows_b else scaling.of_blocks
        phase, work, lane = barrier.full_phase(), cute.arch.block_idx()[0], thread % WARP
        rota = None
        if const_expr(self.spec.parts == 1):
            rota = ring.begin_turns(TURN, group)
        span = self._find(tiles, None, work, lane)
        while self._is_tile(tiles, span, work):
            place = self._place(tiles, span, work)
            sums.fill(Float32(0.0))
            walk = (barriers, phase, steps, self.stages, ALONE, Cluster(Int32(0), Int32(0)))
            row = first_row + place.row % UNIT if const_expr(self.spec.grouped) else first_row
            factors = functools.partial(of_stage, self.spec, config, held, thread, row)
            how = {"factors": factors, "rota": rota, "at_once": at_once}
            phase = ring.multiply_promoted(mma, sums, parts, rA, rB, *walk, **how)
            self._store(mma_of_group, out, sums, place, group, thread)
            work += cute.arch.grid_dim()[0]
            span = self._find(tiles, span, work, lane)
        if const_expr(self.spec.parts == 1):
            ring.end_turns(rota, group == 0)
        if thread < WARP:
            tma.bulk_wait_read(0)

    @cute.jit
    def _store(self, mma, out, sums, place: Place, group: Int32, thread: Int32):
        """Write a warpgroup's rows of a tile: of a group, its own."""
        top = place.row + group * ATOM_M
        if const_expr(place.end is None):
            self._send(mma, out, sums, top, place.col, group, thread)
        else:
            rows = place.end - top
            if (rows >= ATOM_M) | (place.end == out[3].shape[0]):  # TMA ends where D does
                self._send(mma, out, sums, top, place.col, group, thread)
            elif rows > 0:
                col = place.col * self.config.tile_n + fragment.first_col(thread)
                at = (top + fragment.first_row(thread), col)
                fragment.write_tile(out[3], sums, at, place.end)

    @cute.jit
    def _send(self, mma, out, sums, top: Int32, col: Int32, group: Int32, thread: Int32):
        """Write 64 rows by TMA, piece by piece.

        A tile has an even number of pieces: each begins with the same buffer.
        """
        below = cute.domain_offset((top, 0), out[1])
        tiles = tma.bind(out[0], below, out[2], (ATOM_M, PIECE_COLS))
        sink = store.make_sink(mma, tiles, out[2], ROW, self.d_dtype, thread)
        pieces = const_expr(self.config.tile_n // PIECE_COLS)
        size = const_expr(fragment.sums_of(PIECE_COLS))
        for p in cutlass.range_constexpr(pieces):
            store.store_piece(
                sink,
                [sums[p * size + i] for i in range(size)],
                group * BUFFERS + p % BUFFERS,
                (0, col * pieces + p),
                BUFFERS - 1,
                STORE + group,
                thread,
            )


def build(spec: MatmulSpec, config: MatmulConfig) -> tuple[MatmulSm90, tuple]:
    """The kernel and its symbolic arguments."""
    l, m, n, k, rows, steps = (sym_int() for _ in range(6))
    blocks = symbolic("float32", (l, rows, steps), align=4)
    return MatmulSm90(spec, config), (
        symbolic("float8_e4m3fn", (m, k)),
        symbolic("float8_e4m3fn", (l, n, k)),
        symbolic("float32", (steps, m)),
        symbolic("float32", (l, steps, n)) if spec.rows_b else blocks,
        symbolic(spec.d, (m, n)),
        symbolic("int32" if spec.grouped else None, (sym_int(),), align=4),
        Int32(0),
    )
