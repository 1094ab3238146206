"""Sums over rows (column sums) in the same launch: registers, CTA, cluster, grid; in a fixed order."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from quack_core.device import copy
from quack_core.device.barrier import last_arrival
from quack_core.reduction.tiling import RowTiling

FLOATS = 4
"""Columns that a thread adds together: one 128-bit access."""
ROWS_UNROLL = 8


def load_peer(pointer: cute.Pointer, count: int) -> cute.TensorSSA:
    """Vector of float32 from another CTA's shared memory (``map_dsmem_ptr``)."""
    vector = ir.VectorType.get([count], Float32.mlir_type)
    value = llvm.load(vector, pointer.to_llvm_ptr(), alignment=4 * count)
    return cute.TensorSSA(value, (count,), Float32)


class ColumnSums:
    """Each thread brings float32 sums for its vectors; the grid returns one row per sum.

    A cluster is either split over the columns of a row (``tiling.cluster`` CTAs), or its ``peers``
    CTAs have the same columns and add theirs first, through distributed shared memory. Then every
    cluster writes one row of partial sums, and the CTA that arrives last for a slice of columns adds
    the rows in index order. Who is last varies, the order of the additions does not.

    Shared memory: float32 of ``shape`` if ``needs_shared``; it may be memory that the kernel used
    before.
    Traffic: clusters * columns * 4 bytes written and read, mostly in L2.
    """

    def __init__(self, tiling: RowTiling, peers: int, batch: int = 16):
        self.tiling, self.peers, self.batch = tiling, peers, batch
        self.slice = tiling.cols // peers
        if self.slice * peers != tiling.cols or self.slice % FLOATS:
            raise ValueError(f"{tiling.cols} columns: must be a multiple of {FLOATS} * {peers=}")

    @property
    def needs_shared(self) -> bool:
        """Whether a CTA has anything to add before it writes its sums to global memory."""
        return self.peers > 1 or self.tiling.rows_per_cta > 1

    @property
    def shape(self) -> tuple[int, int]:
        """Float32 values in shared memory: (columns, rows of the CTA)."""
        return self.tiling.cols, self.tiling.rows_per_cta

    @property
    def work_columns(self) -> int:
        """Columns of the scratch memory, padded."""
        return self.tiling.cols * self.tiling.cluster

    @cute.jit
    def partial(
        self, sums: cute.Tensor, shared: cute.Tensor, work: cute.Pointer, rank: Int32, tid: Int32
    ):
        """Add registers ``sums`` (vec, passes) over CTA and peers; write this CTA's slice to ``work``.

        Args:
            shared: float32 (columns, rows).
            work: this cluster's row of partial sums.
            rank: of the CTA in its cluster.

        Synchronises: the cluster (or CTA) twice if ``needs_shared``; ``shared`` is free again
        afterwards.
        """
        tiling = const_expr(self.tiling)
        thread, row = tid % tiling.threads_per_row, tid // tiling.threads_per_row
        if const_expr(not self.needs_shared):
            copy.store_vectors(sums, work + rank * tiling.cols, tiling, thread, copy.CHUNK)
        else:
            copy.store_vectors(sums, shared[None, row].iterator, tiling, thread, copy.CHUNK)
            if const_expr(tiling.rows_per_cta > 1):
                cute.arch.sync_threads()
                self._add_rows(shared, tid)
            self._sync()
            self._add_peers(shared, work, rank, tid)
            self._sync()

    @cute.jit
    def _add_peers(self, shared: cute.Tensor, work: cute.Pointer, rank: Int32, tid: Int32):
        """Add this CTA's slice over its peers and write it to ``work``."""
        tiling = const_expr(self.tiling)
        begin = rank % self.peers * self.slice
        for at in cutlass.range(tid, self.slice // FLOATS, tiling.num_threads, unroll=1):
            column = begin + at * FLOATS
            here = copy.aligned(shared.iterator + column, 4 * FLOATS)
            total = cute.make_rmem_tensor(FLOATS, Float32)
            if const_expr(self.peers == 1):
                cute.autovec_copy(cute.make_tensor(here, cute.make_layout(FLOATS)), total)
            else:
                total.fill(0.0)
                for peer in cutlass.range_constexpr(self.peers):
                    there = cute.arch.map_dsmem_ptr(here, Int32(peer))
                    total.store(total.load() + load_peer(there, FLOATS))
            into = copy.aligned(work + rank // self.peers * tiling.cols + column, 4 * FLOATS)
            cute.autovec_copy(total, cute.make_tensor(into, cute.make_layout(FLOATS)))

    @cute.jit
    def _add_rows(self, shared: cute.Tensor, tid: Int32):
        """Add the rows of the CTA into its first one."""
        tiling = const_expr(self.tiling)
        for at in cutlass.range(tid, tiling.cols // FLOATS, tiling.num_threads, unroll=1):
            total = cute.make_rmem_tensor(FLOATS, Float32)
            total.fill(0.0)
            for r in cutlass.range(tiling.rows_per_cta, unroll=ROWS_UNROLL):
                here = copy.aligned(shared[None, r].iterator + at * FLOATS, 4 * FLOATS)
                part = cute.make_tensor(here, cute.make_layout(FLOATS)).load()
                total.store(total.load() + part)
            into = copy.aligned(shared.iterator + at * FLOATS, 4 * FLOATS)
            cute.autovec_copy(total, cute.make_tensor(into, cute.make_layout(FLOATS)))

    @cute.jit
    def _sync(self):
        if const_expr(self.peers > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def arrive(
        self, counters: cute.Pointer, groups: Int32, shared: cute.Tensor, rank: Int32, tid: Int32
    ):
        """Whether this CTA is the last of its rank; then it calls ``finish`` for each sum."""
        return last_arrival(counters + rank, groups, shared, tid)

    @cute.jit
    def finish(
        self,
        work: cute.Pointer,
        row_stride: Int32,
        groups: Int32,
        out: cute.Tensor,
        rank: Int32,
        tid: Int32,
    ):
        """Add the clusters' rows of partial sums in index order and write this rank's columns.

        Args:
            work: the first cluster's row of this sum.
            row_stride: float32 values between the rows of two clusters.
            out: (N,), any dtype.
        """
        tiling, batch = const_expr(self.tiling), const_expr(self.batch)
        begin = rank * self.slice
        for at in cutlass.range(tid, self.slice // FLOATS, tiling.num_threads, unroll=1):
            column = begin + at * FLOATS
            total = cute.make_rmem_tensor(FLOATS, Float32)
            total.fill(0.0)
            parts = cute.make_rmem_tensor(cute.make_layout((FLOATS, batch)), Float32)
            for base in cutlass.range(0, groups, batch, unroll=1):
                parts.fill(0.0)  # a batch of loads in flight, then its sum
                for j in cutlass.range_constexpr(batch):
                    if base + j < groups:
                        offset = Int64(base + j) * row_stride + column
                        there = copy.aligned(work + offset, 4 * FLOATS)
                        source = cute.make_tensor(there, cute.make_layout(FLOATS))
                        cute.autovec_copy(source, parts[None, j])
                for j in cutlass.range_constexpr(batch):
                    total.store(total.load() + parts[None, j].load())
            for i in cutlass.range_constexpr(FLOATS):
                if column + i < tiling.n:
                    out[column + i] = total[i].to(out.element_type)
