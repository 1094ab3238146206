"""The GEMM of Hopper: a persistent kernel whose warpgroups have roles."""

import functools
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.tensor_utils import LayoutEnum

from quack_core import dtypes
from quack_core.device import barrier, tma
from quack_core.gemm import epilogue as epi
from quack_core.gemm import order
from quack_core.gemm.epilogue import Kind
from quack_core.gemm.sm90 import fragment, ring, rows, split, store, visit
from quack_core.gemm.sm90.ring import Cluster
from quack_core.gemm.sm90.store import Form
from quack_core.jit.compile import symbolic, to_cute
from quack_core.jit.dsl import make_fake_tensor, sym_int, sym_int64
from quack_core.reduction.tiling import WARP

from ..config import ATOM_M, PARTS, WARPGROUP, GemmConfig
from ..spec import GemmSpec
from . import views

ALIGN = 16
"""Bytes that TMA wants addresses and strides to be multiples of."""
SWAPPED = {Kind.ROW: Kind.COLUMN, Kind.COLUMN: Kind.ROW}
STORE, TURN = 1, 4
"""First of the named barriers of warpgroups: where they write a part of D; whose turn it is."""


class GemmSm90:
    """Clusters walk over tiles of D; a tile's product is summed in registers.

    Threads: a warpgroup, one warp of which loads; then those that multiply and store.
    Shared memory: stages of A and B; parts of D on their way out; row operands of the epilogue.
    Synchronises: a full and an empty mbarrier per stage, over the cluster; named barriers of a
    warpgroup around each part that it stores; with ping-pong, one that says whose turn it is.
    Traffic: A once for each column of clusters, B once for each row of them; less what L2 keeps.
    """

    def __init__(self, spec: GemmSpec, config: GemmConfig):
        config.check(spec)
        self.spec, self.config = spec, config
        self.stages, self.tile_k = config.depth(spec), config.tile_k(spec)
        self.cols, self.buffers = config.piece_cols(spec), config.buffers(spec)
        self.shape = (config.cluster_m, config.cluster_n)
        self.operands = epi.operands(spec.epilogue)
        self.promoted = dtypes.width(spec.a) == 8
        self.parts = PARTS if self.promoted else 1  # of a tile's columns, in an instruction

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,  # (M, K) or (L, M, K)
        b: cute.Tensor,  # (K, N) or (L, K, N)
        outputs: tuple,  # D, then copies: (M, N) or (L, M, N)
        operands: tuple | None,  # of the epilogue's ops, in order
        reduced: tuple | None,  # of rows: (M, tiles) or (L, M, tiles), float32
        max_clusters: Int32,  # that the GPU holds at once
        parts: cute.Tensor | None,  # scratch of split-K, float32: config.part_elements of each tile
        counters: cute.Tensor | None,  # int32: as many as tiles have warpgroups
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
        buffers = self.buffers * config.groups
        d_smem = [
            store.smem_layout(self.out_dtypes[i], self.majors[i], self._piece(i)[1], buffers)
            for i in range(len(outs))
        ]
        stores = [tma.store_atom(outs[i], d_smem[i], self._piece(i)) for i in range(len(outs))]

        down = cute.ceil_div(mA.shape[0], config.tile_m * config.cluster_m)
        across = cute.ceil_div(n, config.tile_n * config.cluster_n)
        tile_order = order.make(down, across, rows_cols[2], config.group)
        clusters = cutlass.min(tile_order.total * config.split_k, max_clusters)
        self.kernel(
            mma,
            self._mma(a_major, b_major, 1, 1),
            (load_a, cA, a_smem),
            (load_b, cB, b_smem),
            tuple((*pair, smem) for pair, smem in zip(stores, d_smem, strict=True)),
            tuple(tiles),
            (rows_cols[0], n, cute.ceil_div(k, self.tile_k)),
            tile_order,
            reduced,
            parts,
            counters,
        ).launch(
            grid=[config.cluster_m, config.cluster_n, clusters],
            block=[config.num_threads, 1, 1],
            cluster=[config.cluster_m, config.cluster_n, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=config.prefetch,
        )

    def _matrices(self, a, b, outputs, operands) -> tuple:
        """A, B, outputs and operands of the product that the kernel computes: (rows, columns, L)."""
        mA, mB = views.matrices(a), views.transposed(views.matrices(b))
        outs = [views.matrices(out) for out in outputs]
        given = list(operands) if operands is not None else []
        for i, one in enumerate(self.operands):
            if one.kind in (Kind.TILE, Kind.PAIRS):
                given[i] = views.matrices(given[i])
        if self.config.swap:
            mA, mB, outs = mB, mA, [views.transposed(out) for out in outs]
            for i, one in enumerate(self.operands):
                if one.kind in (Kind.TILE, Kind.PAIRS):
                    given[i] = views.transposed(given[i])
        return mA, mB, outs, given

    def _columns(self, out: cute.Tensor, form: str) -> cute.Tensor:
        """The columns of an output that a sink stores."""
        if form in (Form.GATES, Form.UPS):
            return views.half(out, int(form == Form.UPS))
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
        sizes,
        tile_order,
        reduced,
        parts,
        counters,
    ):
        # --- coordinates
        config = self.config
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // WARPGROUP)
        warp_idx = cute.arch.make_warp_uniform(tid // WARP)
        col_of_cluster, row_of_cluster = cute.arch.block_idx()[1], cute.arch.block_idx()[0]
        at = Cluster(
            cute.arch.make_warp_uniform(row_of_cluster), cute.arch.make_warp_uniform(col_of_cluster)
        )

        # --- shared memory
        smem = cutlass.memory.SmemAllocator()
        barriers = ring.allocate(smem, self.stages)
        sA = self._stages(smem, self.a_dtype, load_a[2])
        sB = self._stages(smem, self.b_dtype, load_b[2])
        sinks = [self._stages(smem, dtype, stores[i][2]) for i, dtype in enumerate(self.out_dtypes)]
        num_rows = const_expr(sum(self._kind(o) == Kind.ROW for o in self.operands))
        layout = cute.make_layout((config.tile_n, max(1, num_rows), config.groups))
        shared_rows = None
        if const_expr(num_rows):
            shared_rows = smem.allocate_tensor(Float32, layout, byte_alignment=16)

        answer = smem.allocate_tensor(Int32, cute.make_layout(config.groups), byte_alignment=16)

        # --- barriers
        sharers = const_expr(config.cluster_m + config.cluster_n - 1)
        ring.init(barriers, self.stages, sharers, 4 * config.sharing, tid)
        if warp_idx == 0:
            tma.prefetch_descriptors((load_a[0], load_b[0], *(s[0] for s in stores)))
        self._sync_all()
        if const_expr(config.prefetch):
            cute.arch.griddepcontrol_launch_dependents()

        # --- roles
        clusters = cute.arch.grid_dim()[2]
        work = cute.arch.block_idx()[2]
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
            self._compute(
                mma,
                sA,
                sB,
                outs,
                operands,
                shared_rows,
                barriers,
                sizes,
                tile_order,
                (parts, counters, answer, reduced),
                at,
                work,
                clusters,
                group - 1,
                tid % WARPGROUP,
            )
        if const_expr(config.cluster > 1):  # no CTA leaves while another one signals it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _stages(self, smem, dtype, layout):
        """Room for stages of a swizzled layout."""
        return smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)

    def _piece(self, i: int) -> tuple[int, int]:
        """Rows and columns of sink i that a warpgroup stores at a time."""
        which, form = self.spec.sinks[i]
        cols = self.spec.cols(which, self.cols)
        return ATOM_M, cols // 2 if form in (Form.GATES, Form.UPS) else cols

    def _kind(self, operand: epi.Operand) -> Kind:
        """What it is for the product that the kernel computes."""
        return SWAPPED.get(operand.kind, operand.kind) if self.config.swap else operand.kind

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
        cluster = cute.make_layout((*self.shape, 1))
        return tma.bind_shared(load[0], load[1], shared, tile, cluster, (*at, 0), mode)

    @cute.jit
    def _locate(self, tile_order, work: Int32, at: Cluster, steps: Int32):
        """Row and column of this CTA's tile, in tiles, and the matrix of the batch; first step along
        K, and how many."""
        first, count = Int32(0), steps
        if const_expr(self.config.split_k > 1):
            first, count = split.part(work % self.config.split_k, self.config.split_k, steps)
        tile = work // self.config.split_k
        row, col, matrix = order.locate(tile_order, tile, self.config.group)
        row, col = row * self.shape[0] + at.row, col * self.shape[1] + at.col
        return row, col, matrix, first, count

    def _part(self, thr_mma) -> tuple:
        """Shape of a thread's sums of a part of the columns."""
        config = self.config
        return thr_mma.partition_shape_C((config.tile_m, config.tile_n // self.parts))

    # --- the warp that loads

    @cute.jit
    def _load(self, a, b, barriers, sizes, tile_order, at: Cluster, work: Int32, step: Int32):
        """Fill stages, tile after tile."""
        num_bytes = const_expr(self.config.stage_bytes(self.spec))
        phase, ahead = barrier.empty_phase(), Int32(0)
        if const_expr(self.config.prefetch):
            ahead = self._fill_ahead(a, b, barriers, self._locate(tile_order, work, at, sizes[2]))
            phase = ring.skip(phase, ahead, self.stages)
        while work < tile_order.total * self.config.split_k:
            row, col, matrix, first, count = self._locate(tile_order, work, at, sizes[2])
            of_a, of_b = self._matrices_of(matrix)
            for k in cutlass.range(first + ahead, first + count, unroll=1):
                ring.fill(barriers, phase, a, b, (row, k, of_a), (col, k, of_b), num_bytes)
                phase = barrier.next_phase(phase, self.stages)
            ahead = Int32(0)
            work += step

    def _matrices_of(self, matrix: Int32) -> tuple[Int32, Int32]:
        """Which matrix of each operand belongs to one of D's."""
        batched = (self.spec.a_batched, self.spec.b_batched)
        first, second = reversed(batched) if self.config.swap else batched
        return matrix if first else Int32(0), matrix if second else Int32(0)

    def _fill_ahead(self, a, b, barriers, tile) -> Int32:
        """Begin with B while the kernel before this one ends; how many stages that is."""
        row, col, matrix, first, count = tile
        of_a, of_b = self._matrices_of(matrix)
        both = ((a, (row, of_a)), (b, (col, of_b)))
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
        outs,
        operands,
        shared_rows,
        barriers,
        sizes,
        tile_order,
        scratch,
        at: Cluster,
        work: Int32,
        step: Int32,
        group: Int32,
        thread: Int32,
    ):
        """Multiply, apply the epilogue, store: tile after tile."""
        config = self.config
        leader = cute.make_layout(config.sharing, stride=WARPGROUP)(
            Int32(0) if const_expr(config.pingpong) else group
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
        phase, total = barrier.full_phase(), tile_order.total * config.split_k
        tiles = (total - work + step - 1) // step
        if const_expr(config.pingpong):
            if group == 1:
                phase = ring.skip(phase, sizes[2], self.stages)
                barrier.arrive_numbered(Int32(TURN), 2 * WARPGROUP)
            work += group * step
            step = step * 2
        while work < total:
            row, col, matrix, _, count = self._locate(tile_order, work, at, sizes[2])
            held = self._fetch(operands, row, col, matrix, sizes, group, thread)
            sums.fill(Float32(0.0))
            if const_expr(config.pingpong):
                barrier.sync_numbered(TURN + group, 2 * WARPGROUP)
            turn = TURN + 1 - group if const_expr(config.pingpong) else None
            if const_expr(self.promoted):
                phase = ring.multiply_promoted(
                    mma,
                    sums,
                    tuple(parts),
                    rA,
                    rB,
                    barriers,
                    phase,
                    count,
                    self.stages,
                    self.shape,
                    at,
                    turn,
                )
            else:
                phase = ring.multiply(
                    mma, sums, rA, rB, barriers, phase, count, self.stages, self.shape, at, turn
                )
            if const_expr(config.pingpong):
                phase = ring.skip(phase, count, self.stages)
            last = Boolean(True)
            if const_expr(config.split_k > 1):
                last = self._collect(sums, scratch, work, at, group, thread)
            if last:
                self._finish(
                    sums,
                    outs,
                    operands,
                    held,
                    shared_rows,
                    scratch[3],
                    row,
                    col,
                    matrix,
                    sizes,
                    group,
                    thread,
                )
            work += step
        if const_expr(config.pingpong):  # the last one to multiply has signalled, and nobody came
            if group == tiles % 2:
                barrier.sync_numbered(TURN + group, 2 * WARPGROUP)
        if thread < WARP:
            tma.bulk_wait_read(0)

    def _collect(self, sums, scratch, work: Int32, at: Cluster, group: Int32, thread: Int32):
        """Whether this part of a tile's K is the last one that comes; then ``sums`` are all."""
        parts, counters, answer, _ = scratch
        splits, cluster = self.config.split_k, self.config.cluster
        tile = work // splits * cluster + at.row + self.shape[0] * at.col
        return split.collect(
            sums,
            parts,
            counters,
            answer,
            tile,
            work % splits,
            splits,
            self.config.sharing,
            group,
            STORE + group,
            thread,
        )

    # --- the epilogue

    def _first_row(self, row: Int32, i: int, group: Int32, thread: Int32) -> Int32:
        """Of D, the row of the thread's first sum in its instruction i."""
        inside = i * ATOM_M if self.config.pingpong else (i * self.config.sharing + group) * ATOM_M
        return row * self.config.tile_m + inside + fragment.first_row(thread)

    @cute.jit
    def _fetch(self, operands, row, col, matrix, sizes, group: Int32, thread: Int32) -> list:
        """Vectors and scalars of a tile, on their way while it is multiplied."""
        held = []
        for i in cutlass.range_constexpr(len(self.operands)):
            kind, tensor = self._kind(self.operands[i]), operands[i]
            if const_expr(kind == Kind.SCALAR):
                held.append(Float32(tensor))
            elif const_expr(kind == Kind.DEVICE_SCALAR):
                held.append(Float32(tensor[0]))
            elif const_expr(kind == Kind.ROW):
                first = col * self.config.tile_n
                held.append(
                    fragment.fetch_row(
                        tensor,
                        first,
                        sizes[1],
                        matrix,
                        thread,
                        self.config.tile_n,
                        functools.partial(self._natural, cols=sizes[1]),
                    )
                )
            elif const_expr(kind == Kind.COLUMN):
                held.append(
                    [
                        fragment.read_column(
                            tensor, self._first_row(row, j, group, thread), sizes[0], matrix
                        )
                        for j in range(self.config.atoms)
                    ]
                )
            else:
                held.append(None)
        return held

    def _natural(self, col: Int32, cols: Int32) -> Int32:
        return views.natural(col, cols, self.spec.concat) if self.spec.gated else col

    @cute.jit
    def _finish(
        self,
        sums,
        outs,
        operands,
        held,
        shared_rows,
        reduced,
        row,
        col,
        matrix,
        sizes,
        group,
        thread,
    ):
        """Apply the epilogue to a tile and store it, part by part."""
        config = self.config
        if const_expr(shared_rows is not None):
            barrier.sync_numbered(STORE + group, WARPGROUP)  # the tile before has been read
            number = 0
            for i in cutlass.range_constexpr(len(self.operands)):
                if const_expr(self._kind(self.operands[i]) == Kind.ROW):
                    fragment.share_row(held[i], shared_rows[None, number, group], thread)
                    number += 1
            barrier.sync_numbered(STORE + group, WARPGROUP)
        per_piece = const_expr(fragment.sums_of(self.cols))
        per_atom = const_expr(config.tile_n // self.cols)
        names = const_expr(self.spec.reductions)
        so_far = [rows.neutral(name) for name in names]
        for p in cutlass.range_constexpr(config.pieces(self.spec)):
            atom, inside = const_expr(p // per_atom), const_expr(p % per_atom)
            first = (
                self._first_row(row, atom, group, thread),
                col * config.tile_n + inside * self.cols + fragment.first_col(thread),
            )
            given = self._given(
                operands, held, shared_rows, first, atom, inside, matrix, group, thread
            )
            rows_before = row * config.tile_m // ATOM_M
            below = Int32(atom) if const_expr(config.pingpong) else atom * config.sharing + group
            place = (rows_before + below, col * per_atom + inside, matrix)
            buffer = group * self.buffers + p % self.buffers
            pending = const_expr(self.buffers * len(outs) - 1)
            for which, values in visit.outputs(
                self.spec.epilogue,
                [sums[p * per_piece + i] for i in range(per_piece)],
                functools.partial(_value, given),
            ):
                if const_expr(which < 0):
                    i = const_expr(-which - 1)
                    before = so_far[i] if inside else rows.neutral(names[i])
                    so_far[i] = rows.add(names[i], before, values, first[1], sizes[1])
                for out in [outs[i] for i, sink in enumerate(self.spec.sinks) if sink[0] == which]:
                    store.store_piece(out, values, buffer, place, pending, STORE + group, thread)

            if const_expr(inside == per_atom - 1):
                for i in cutlass.range_constexpr(len(names)):
                    rows.store(
                        names[i],
                        so_far[i],
                        reduced[i],
                        first[0],
                        sizes[0],
                        col,
                        matrix,
                        thread % WARP,
                    )

    def _given(
        self, operands, held, shared_rows, first, atom, inside, matrix, group, thread
    ) -> list:
        """Each operand's values for a part, as ``_value`` takes them."""
        given, number = [], 0
        for i, operand in enumerate(self.operands):
            kind = self._kind(operand)
            if kind == Kind.ROW:
                start = inside * self.cols + fragment.first_col(thread)
                given.append(
                    (kind, fragment.read_row(shared_rows[None, number, group], start, self.cols))
                )
                number += 1
            elif kind == Kind.COLUMN:
                given.append((kind, held[i][atom]))
            elif kind == Kind.TILE:
                found = fragment.read_tile(operands[i], first, matrix, self.cols)
                given.append((kind, found.load().to(Float32)))
            elif kind == Kind.PAIRS:
                apart, step = (operands[i].shape[1] // 2, 1) if self.spec.concat else (1, 2)
                found = fragment.read_pairs(operands[i], first, matrix, self.cols, apart, step)
                given.append((kind, [half.load().to(Float32) for half in found]))
            else:
                given.append((kind, held[i]))
        return given


def _value(given: list[tuple], which: int, i: int) -> Float32:
    """An operand's value for the thread's sum number i."""
    kind, values = given[which]
    row, col = fragment.place(i)
    if kind == Kind.ROW:
        return values[col]
    if kind == Kind.COLUMN:
        return values[row]
    if kind == Kind.TILE:
        return values[i]
    if kind == Kind.PAIRS:
        return values[0][i], values[1][i]
    return values


def arguments(spec: GemmSpec, config: GemmConfig) -> tuple:
    """Symbolic operands of the launch function, all but the stream."""
    batch, m, n, k = (sym_int() for _ in range(4))
    cols = sym_int() if spec.gated or spec.doubled else n  # of D

    def matrix(dtype: str, shape: tuple, major: str, batched: bool) -> Any:
        element = to_cute(dtype)
        per_16 = ALIGN * 8 // element.width
        outer = sym_int64(divisibility=per_16)
        stride = (outer, 1) if major == "row" else (1, outer)
        if batched:
            shape, stride = (batch, *shape), (sym_int64(divisibility=per_16), *stride)
        return make_fake_tensor(element, shape, stride=stride, assumed_align=ALIGN)

    def operand(one: epi.Operand) -> Any:
        if one.kind == Kind.SCALAR:
            return Float32(0)
        element = to_cute(one.dtype)
        align = element.width // 8
        if one.kind in (Kind.TILE, Kind.PAIRS):
            stride = (sym_int64(), 1)
            shape = (m, {Kind.TILE: n, Kind.PAIRS: cols}[one.kind])
            if one.batched:
                shape, stride = (batch, *shape), (sym_int64(), *stride)
            return make_fake_tensor(element, shape, stride=stride, assumed_align=align)
        shape = {Kind.ROW: (n,), Kind.COLUMN: (m,)}.get(one.kind, (1,))
        stride = (1,)
        if one.batched:
            shape, stride = (batch, *shape), (sym_int64(), 1)
        return make_fake_tensor(element, shape, stride=stride, assumed_align=align)

    outputs = tuple(
        matrix(dtype, (m, n if ratio == (1, 1) else cols), spec.d_major, spec.batched)
        for dtype, ratio in zip(spec.outputs, spec.ratios, strict=True)
    )
    return (
        matrix(spec.a, (m, k), spec.a_major, spec.a_batched),
        matrix(spec.b, (k, n), spec.b_major, spec.b_batched),
        outputs,
        tuple(operand(one) for one in epi.operands(spec.epilogue)) or None,
        tuple(_partials(m, batch, spec) for _ in spec.reductions) or None,
        Int32(0),
        *(_scratch(name) if config.split_k > 1 else None for name in ("float32", "int32")),
    )


def _partials(m: Any, batch: Any, spec: GemmSpec) -> Any:
    shape = (batch, m, sym_int()) if spec.batched else (m, sym_int())
    return symbolic("float32", shape, align=4, contiguous=True)


def _scratch(dtype: str) -> Any:
    return symbolic(dtype, (sym_int(),), align=ALIGN, contiguous=True)


def build(spec: GemmSpec, config: GemmConfig) -> tuple[GemmSm90, tuple]:
    """The kernel and its symbolic arguments."""
    return GemmSm90(spec, config), arguments(spec, config)
