"""The GEMM of Hopper: a persistent kernel whose warpgroups have roles."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.tensor_utils import LayoutEnum

from quack_core import dtypes
from quack_core.device import barrier, tma
from quack_core.gemm import order
from quack_core.gemm.epilogue import Kind
from quack_core.gemm.sm90 import ring, split, store
from quack_core.gemm.sm90.ring import Cluster
from quack_core.gemm.sm90.store import Form
from quack_core.reduction.tiling import WARP

from ..config import ATOM_M, PARTS, WARPGROUP, GemmConfig, SplitK
from ..signature import arguments
from ..spec import GemmSpec
from . import views
from .finish import Ends, TileEpilogue
from .places import Sizes, Walk, Worker

TURN = 4
"""First of the named barriers that say which of two warpgroups may multiply."""


class GemmSm90:
    """Clusters walk over tiles of D; a tile's product is summed in registers.

    Threads: a warpgroup, one warp of which loads; then those that multiply and store.
    Shared memory: stages of A and B; parts of D on their way out; row operands of the epilogue; what
    warps reduce of columns; with split-K, sums of the other CTAs.
    Synchronises: a full and an empty mbarrier per stage, over the cluster; named barriers of a
    warpgroup around each part that it stores, and around what it reduces of columns; with ping-pong,
    one that says whose turn it is; with split-K, two mbarriers per warpgroup for sums that are exchanged.
    Traffic: A once for each column of clusters, B once for each row of them; less what L2 keeps.
    """

    def __init__(self, spec: GemmSpec, config: GemmConfig):
        config.check(spec)
        self.spec, self.config = spec, config
        self.stages, self.tile_k = config.depth(spec), config.tile_k(spec)
        self.epilogue, self.walk = TileEpilogue(spec, config), Walk(spec, config)
        self.shape = (config.cluster_m, config.cluster_n)
        self.promoted = dtypes.width(spec.a) == 8
        self.shares = config.shares(spec)
        self.parts = PARTS if self.promoted else 1  # of a tile's columns, in an instruction

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K) or (L, M, K)
        b: cute.Tensor,  # (K, N) or (L, K, N)
        outputs: tuple,  # D, then copies: (M, N) or (L, M, N); of parts (L * parts, M, N), padded
        operands: tuple | None,  # of the epilogue's ops, in order
        reduced: tuple | None,  # (M or N, tiles) or (L, M or N, tiles), float32
        max_clusters: Int32,  # that the GPU holds at once
        stream: cuda.CUstream,
    ):
        config, spec = self.config, self.spec
        mA, mB, outs, tiles = self._matrices(a, b, outputs, operands)
        self.a_dtype, self.b_dtype = mA.element_type, mB.element_type
        a_major, b_major = LayoutEnum.from_tensor(mA), LayoutEnum.from_tensor(mB)
        rows_cols = outs[0].shape
        outs = [self._columns(outs[which], form) for which, form in spec.sinks]
        self.majors = [LayoutEnum.from_tensor(out) for out in outs]
        self.out_dtypes = [out.element_type for out in outs]
        n, k = mB.shape[0], mA.shape[1]
        if const_expr(spec.gated):
            mB = views.paired(mB, spec.concat)

        mma = self._mma(a_major, b_major, config.sharing, self.parts)
        tile = (config.tile_m, config.tile_n, self.tile_k)
        a_smem = sm90.make_smem_layout_a(a_major, tile, self.a_dtype, self.stages)
        b_smem = sm90.make_smem_layout_b(b_major, tile, self.b_dtype, self.stages)
        load_a, cA = tma.load_atom(mA, a_smem, (tile[0], tile[2]), config.cluster_n)
        load_b, cB = tma.load_atom(mB, b_smem, (tile[1], tile[2]), config.cluster_m)
        buffers = config.buffers(spec) * config.groups
        d_smem = [
            store.smem_layout(self.out_dtypes[i], self.majors[i], self._piece(i)[1], buffers)
            for i in range(len(outs))
        ]
        atom = tma.add_atom if config.split_mode == SplitK.PARALLEL else tma.store_atom
        stores = [atom(outs[i], d_smem[i], self._piece(i)) for i in range(len(outs))]

        tile_order = self.walk.make_order(mA.shape[0], n, rows_cols[2])
        clusters = cutlass.min(tile_order.total, max_clusters)
        self.kernel(
            mma,
            self._mma(a_major, b_major, 1, 1),
            (load_a, cA, a_smem),
            (load_b, cB, b_smem),
            tuple((*pair, smem) for pair, smem in zip(stores, d_smem, strict=True)),
            tuple(tiles),
            Sizes(rows_cols[0], n, cute.ceil_div(k, self.tile_k)),
            tile_order,
            reduced,
        ).launch(
            grid=[config.cluster_m, config.cluster_n, clusters * config.peers],
            block=[config.num_threads, 1, 1],
            cluster=[config.cluster_m, config.cluster_n, config.peers],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=config.prefetch,
        )

    def _matrices(self, a, b, outputs, operands) -> tuple:
        """A, B, outputs and operands of the product that the kernel computes: (rows, columns, L)."""
        mA, mB = views.matrices(a), views.transposed(views.matrices(b))
        outs = [views.matrices(out) for out in outputs]
        given = list(operands) if operands is not None else []
        for i, one in enumerate(self.epilogue.operands):
            if one.kind in (Kind.TILE, Kind.PAIRS):
                given[i] = views.matrices(given[i])
        if self.config.swap:
            mA, mB, outs = mB, mA, [views.transposed(out) for out in outs]
            for i, one in enumerate(self.epilogue.operands):
                if one.kind in (Kind.TILE, Kind.PAIRS):
                    given[i] = views.transposed(given[i])
        return mA, mB, outs, given

    def _columns(self, out: cute.Tensor, form: str) -> cute.Tensor:
        """The columns of an output that a sink stores."""
        if form in (Form.GATES, Form.UPS):
            return views.half(out, int(form == Form.UPS))
        if form == Form.MIRROR:
            return views.transposed(out)
        return out

    def _mma(
        self, a_major: LayoutEnum, b_major: LayoutEnum, groups: int, parts: int
    ) -> cute.TiledMma:
        """The matrix instruction of so many warpgroups, one below the other, for a part of the
        columns."""
        return sm90.make_trivial_tiled_mma(
            self.a_dtype,
            self.b_dtype,
            a_major.sm90_mma_major_mode(),
            b_major.sm90_mma_major_mode(),
            Float32,
            (groups, 1, 1),
            tiler_mn=(ATOM_M, self.config.tile_n // parts),
        )

    @cute.kernel
    def kernel(
        self,
        mma,
        mma_of_group,
        load_a,
        load_b,
        stores,
        operands,
        sizes: Sizes,
        tile_order: order.Order | order.Lower,
        reduced,
    ):
        # --- coordinates
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        warp_idx = cute.arch.make_warp_uniform(tid // WARP)
        row, col, z = (cute.arch.make_warp_uniform(i) for i in cute.arch.block_idx())
        at = Cluster(row, col, z % config.peers)
        work, clusters = z // config.peers, cute.arch.grid_dim()[2] // config.peers

        # --- shared memory
        smem = cutlass.memory.SmemAllocator()
        barriers = ring.allocate(smem, self.stages)
        sA = self._stages(smem, self.a_dtype, load_a[2])
        sB = self._stages(smem, self.b_dtype, load_b[2])
        sinks = [self._stages(smem, dtype, stores[i][2]) for i, dtype in enumerate(self.out_dtypes)]
        shared_rows, inbox = self._rows(smem), None
        shared_columns = self.epilogue.vectors.allocate(smem)
        if const_expr(config.peers > 1):
            sizes_of_inbox = (config.accumulators, config.peers, self.shares, config.groups)
            inbox = split.allocate(smem, *sizes_of_inbox)

        # --- barriers
        sharers = const_expr(config.cluster_m + config.cluster_n - 1)
        ring.init(barriers, self.stages, sharers, 4 * config.sharing, tid)
        if const_expr(config.peers > 1):
            split.init(inbox, self.shares, config.groups, tid)
        if warp_idx == 0:
            tma.prefetch_descriptors((load_a[0], load_b[0], *(s[0] for s in stores)))
        self._sync_all()

        # --- roles
        if group == 0:
            cute.arch.setmaxregister_decrease(config.registers[0])
            if warp_idx == 0:
                a, b = self._bind(load_a, sA, at, 1), self._bind(load_b, sB, at, 0)
                self._load(a, b, barriers, sizes, tile_order, at, work, clusters)
        else:
            cute.arch.setmaxregister_increase(config.registers[1])
            outs = [
                store.make_sink(
                    mma_of_group,
                    tma.bind(stores[i][0], stores[i][1], sinks[i], self._piece(i)),
                    sinks[i],
                    self.majors[i],
                    self.out_dtypes[i],
                    tid % WARPGROUP,
                    Form(self.spec.sinks[i][1]),
                )
                for i in range(len(sinks))
            ]
            ends = Ends(operands, shared_rows, outs, reduced, shared_columns)
            who = Worker(group - 1, tid % WARPGROUP)
            walk = (sizes, tile_order, inbox, at, work, clusters)
            self._compute(mma, sA, sB, ends, barriers, *walk, who)

    def _stages(self, smem, dtype, layout):
        """Room for stages of a swizzled layout."""
        return smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)

    def _rows(self, smem) -> cute.Tensor | None:
        """Room for row operands of a tile, for each warpgroup."""
        shape = (self.config.tile_n, self.epilogue.num_rows, self.config.groups)
        if not self.epilogue.num_rows:
            return None
        return smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)

    def _piece(self, i: int) -> tuple[int, int]:
        """Rows and columns of sink i that a warpgroup stores at a time."""
        which, form = self.spec.sinks[i]
        cols = self.spec.cols(which, self.epilogue.cols)
        return ATOM_M, cols // 2 if form in (Form.GATES, Form.UPS) else cols

    @cute.jit
    def _sync_all(self):
        """All threads of the cluster have initialised their mbarriers."""
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _bind(self, load, shared, at: Cluster, mode: int) -> tma.Tiles:
        """Tiles of an operand that the CTAs along a mode of the cluster share."""
        rows = self.config.tile_m if mode else self.config.tile_n
        tile = (rows, self.tile_k)
        if self.shape[mode] == 1:
            return tma.bind(load[0], load[1], shared, tile)
        cluster = cute.make_layout((*self.shape, self.config.peers))
        return tma.bind_shared(load[0], load[1], shared, tile, cluster, tuple(at), mode)

    def _part(self, thr_mma) -> tuple:
        """Shape of a thread's sums of a part of the columns."""
        config = self.config
        return thr_mma.partition_shape_C((config.tile_m, config.tile_n // self.parts))

    # --- the warp that loads

    @cute.jit
    def _load(
        self, a, b, barriers, sizes: Sizes, tile_order, at: Cluster, work: Int32, step: Int32
    ):
        """Fill stages, tile after tile."""
        num_bytes = const_expr(self.config.stage_bytes(self.spec))
        phase, ahead = barrier.empty_phase(), Int32(0)
        if const_expr(self.config.prefetch):
            ahead = self._fill_ahead(a, b, barriers, self.walk.locate(tile_order, work, at, sizes))
            phase = ring.skip(phase, ahead, self.stages)
        while work < tile_order.total:
            tile, first, count = self.walk.locate(tile_order, work, at, sizes)
            of_a, of_b = self.walk.operands_of(tile.matrix)
            for k in cutlass.range(first + ahead, first + count, unroll=1):
                at_a, at_b = (tile.row, k, of_a), (tile.col, k, of_b)
                ring.fill(barriers, phase, a, b, at_a, at_b, num_bytes)
                phase = barrier.next_phase(phase, self.stages)
            ahead = Int32(0)
            work += step
        if const_expr(self.config.cluster > 1):
            ring.drain(barriers, phase, self.stages)

    def _fill_ahead(self, a, b, barriers, located) -> Int32:
        """Begin with B while the kernel before this one ends; how many stages that is."""
        tile, first, count = located
        of_a, of_b = self.walk.operands_of(tile.matrix)
        both = ((a, (tile.row, of_a)), (b, (tile.col, of_b)))
        (late, at_late), (early, at_early) = reversed(both) if self.config.swap else both
        ahead = cutlass.min(count, self.stages)
        num_bytes = self.config.stage_bytes(self.spec)
        ring.fill_ahead(barriers, early, late, at_early, at_late, first, ahead, num_bytes)
        return ahead

    # --- the warpgroups that multiply

    @cute.jit
    def _compute(
        self,
        mma,
        sA,
        sB,
        ends: Ends,
        barriers,
        sizes: Sizes,
        tile_order,
        inbox,
        at: Cluster,
        work: Int32,
        step: Int32,
        who: Worker,
    ):
        """Multiply, apply the epilogue, store: tile after tile."""
        config = self.config
        leader = cute.make_layout(config.sharing, stride=WARPGROUP)(
            Int32(0) if const_expr(config.pingpong) else who.group
        )
        thr_mma = mma.get_slice(leader)
        rA = mma.make_fragment_A(thr_mma.partition_A(sA))
        rB = mma.make_fragment_B(thr_mma.partition_B(sB))
        shape = thr_mma.partition_shape_C((config.tile_m, config.tile_n))
        sums = cute.make_rmem_tensor(shape, Float32)
        parts = [cute.make_rmem_tensor(self._part(thr_mma), Float32) for _ in range(self.parts)]
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        if const_expr(config.prefetch):  # operands of the epilogue, and D, are the kernel before's
            cute.arch.griddepcontrol_wait()
            # Not before: the kernel behind would begin while the one before this still writes.
            cute.arch.griddepcontrol_launch_dependents()
        phase, total, done = barrier.full_phase(), tile_order.total, Int32(0)
        tiles, turn = (total - work + step - 1) // step, None
        if const_expr(config.pingpong):
            if who.group == 1:
                phase = ring.skip(phase, sizes.steps, self.stages)
            rota = ring.begin_turns(TURN, who.group)
            turn = rota.next
            work += who.group * step
            step = step * 2
        while work < total:
            tile, _, count = self.walk.locate(tile_order, work, at, sizes)
            held = self.epilogue.fetch(ends.operands, tile, sizes, who)
            sums.fill(Float32(0.0))
            if const_expr(config.pingpong):
                barrier.sync_numbered(rota.mine, ring.TWO_WARPGROUPS)
            walk = (barriers, phase, count, self.stages, self.shape, at, turn)
            if const_expr(self.promoted):
                phase = ring.multiply_promoted(mma, sums, tuple(parts), rA, rB, *walk)
            else:
                phase = ring.multiply(mma, sums, rA, rB, *walk)
            if const_expr(config.pingpong):
                phase = ring.skip(phase, count, self.stages)
            if const_expr(config.peers > 1):
                share = split.exchange(
                    sums, inbox, self._exchange(at, who), config.peers, self.shares, done
                )
                if at.part < self.shares:
                    self.epilogue.finish(share, ends, held, tile, sizes, who, done, at.part)
            else:
                self.epilogue.finish(sums, ends, held, tile, sizes, who, done)
            done += 1
            work += step
        if const_expr(config.pingpong):  # the last one to multiply has signalled, and nobody came
            ring.end_turns(rota, who.group == tiles % 2)
        if const_expr(config.peers > 1):
            split.drain(inbox, who.group, done)
        if who.thread < WARP:
            tma.bulk_wait_read(0)

    def _exchange(self, at: Cluster, who: Worker) -> split.Exchange:
        """The CTAs of a cluster that have parts of the same tile."""
        rows, cols = self.shape
        first = at.row + rows * at.col
        return split.Exchange(at.part, first, rows * cols, who.group, who.thread)


def build(spec: GemmSpec, config: GemmConfig) -> tuple[GemmSm90, tuple]:
    """The kernel and its symbolic arguments."""
    return GemmSm90(spec, config), arguments(spec, config)
