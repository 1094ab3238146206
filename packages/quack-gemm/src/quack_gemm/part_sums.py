"""What comes behind a product whose parts of K lie in memory: their sum, the epilogue, the stores.

Needs no instruction of one architecture.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr

from quack_core.device import copy
from quack_core.gemm import epilogue as epi
from quack_core.gemm import visit
from quack_core.gemm.epilogue import Kind
from quack_core.gemm.visit import BLOCK_SUMS
from quack_core.layout import views

from .config import LOADS, SumConfig
from .signature import arguments_of_sum
from .spec import SumSpec

THREADS = 128
FLOAT_BYTES = 4
TURNED = {Kind.ROW: Kind.COLUMN, Kind.COLUMN: Kind.ROW}

Run = tuple[Int32, list[int]]
"""Neighbouring columns: the first one, and which of a thread's values belong to it and those behind."""


class PartSums:
    """A thread has four columns of a row of the product; with pairs four gates, and what they gate.

    Rows are those in memory: of a column-major D they are its columns.

    Threads: ``slices`` groups, each of which adds up neighbouring parts of the same columns. The first
    one adds what the others have found, in order, applies the epilogue and stores.
    Shared memory: with slices, a float32 for each sum of all groups but the first.
    Synchronises: the CTA once, with slices.
    Traffic: parts and operands once, in 16 bytes and in single elements; outputs once.
    """

    def __init__(self, spec: SumSpec, config: SumConfig):
        self.spec, self.config = spec.product, config
        self.turned = self.spec.d_major == "column"
        self.operands = epi.operands(self.spec.epilogue)
        self.sums = BLOCK_SUMS * (1 + self.spec.gated)
        self.lanes = THREADS // config.slices

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,  # (L * parts, M, N), in D's memory order, rows or columns padded
        outputs: tuple,  # D, then copies: (M, N) or (L, M, N)
        operands: tuple | None,  # of the epilogue's ops, in order
        stream: cuda.CUstream,
    ):
        outs = tuple(self.matrices(out) for out in outputs)
        rows, cols, batches = outs[0].shape
        cols = cols * 2 if const_expr(self.spec.gated) else cols
        cols = cols // 2 if const_expr(self.spec.doubled) else cols  # of the product
        across = cute.ceil_div(cols, self.sums)
        total = rows * across * batches
        divisor = cute.fast_divmod_create_divisor_v2
        self.kernel(
            self.matrices(parts),
            outs,
            self.given(operands),
            (divisor(rows * across), divisor(across)),
            (total, cols, parts.shape[0] // batches),
        ).launch(
            grid=[cute.ceil_div(total, self.lanes), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    def matrices(self, tensor: cute.Tensor) -> cute.Tensor:
        """(rows, columns, L), columns side by side in D's memory."""
        if cute.rank(tensor) == 2:
            found = views.expand(tensor, 2, 1)
        else:
            found = views.permute(tensor, 1, 2, 0)
        return views.transpose(found) if self.turned else found

    def given(self, operands: tuple | None) -> tuple:
        """Operands of the ops, those of D's shape like D."""
        return tuple(
            self.matrices(tensor) if one.kind in (Kind.TILE, Kind.PAIRS) else tensor
            for one, tensor in zip(self.operands, operands or (), strict=True)
        )

    @cute.kernel
    def kernel(self, parts, outs, operands, divisors, sizes):
        # --- coordinates
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        per_matrix, per_row = divisors
        total, cols, count = sizes
        lane, which = tid % self.lanes, tid // self.lanes
        work = block * self.lanes + lane
        is_mine = work < total
        matrix, inside = divmod(cutlass.min(work, total - 1), per_matrix)
        row, unit = divmod(inside, per_row)

        # --- sums
        first, last = Int32(0), count
        if const_expr(self.config.slices > 1):
            each = cute.ceil_div(count, self.config.slices)
            first = cutlass.min(which * each, count)
            last = cutlass.min(first + each, count)
        runs = self.runs(unit, cols, self.spec.gated)
        sums = self.add(parts, row, runs, matrix * count + first, matrix * count + last)
        if const_expr(self.config.slices > 1):
            self._add_slices(sums, lane, which)

        # --- the epilogue
        if is_mine and which == 0:
            self.finish(sums, outs, operands, row, unit, cols, matrix)

    def runs(self, unit: Int32, width: Int32, paired: bool) -> list[Run]:
        """Where a thread's values are in a row.

        Args:
            width: of the row.
            paired: the values are gates, then what they gate.
        """
        gates, ups = list(range(BLOCK_SUMS)), list(range(BLOCK_SUMS, 2 * BLOCK_SUMS))
        if not paired:
            return [(unit * BLOCK_SUMS, gates)]
        if self.spec.concat:
            return [(unit * BLOCK_SUMS, gates), (width // 2 + unit * BLOCK_SUMS, ups)]
        in_turn = [i for pair in zip(gates, ups, strict=True) for i in pair]
        return [(unit * 2 * BLOCK_SUMS, in_turn)]

    @cute.jit
    def add(self, parts, row: Int32, runs, first: Int32, last: Int32) -> cute.Tensor:
        """The thread's sums over matrices ``first`` to ``last`` of (rows, columns, matrices)."""
        sums = cute.make_rmem_tensor(self.sums, Float32)
        held = cute.make_rmem_tensor((self.sums, LOADS), Float32)
        sums.fill(Float32(0.0))
        for begin in cutlass.range(first, last, LOADS, unroll=1):
            for load in cutlass.range_constexpr(LOADS):  # all under way before the first sum
                part = cutlass.min(begin + load, last - 1)
                self._load(parts, row, runs, part, held[None, load])
            for load in cutlass.range_constexpr(LOADS):
                if begin + load < last:
                    sums.store(sums.load() + held[None, load].load())
        return sums

    def _load(self, parts, row: Int32, runs: list[Run], part: Int32, held: cute.Tensor):
        """The thread's values of a part, run after run."""
        for number, (start, places) in enumerate(runs):
            layout = cute.make_layout(len(places))
            at = cute.crd2idx((Int64(row), Int64(start), Int64(part)), parts.layout)
            source = copy.aligned(parts.iterator + at, BLOCK_SUMS * FLOAT_BYTES)
            into = cute.make_tensor(held.iterator + number * BLOCK_SUMS, layout)
            cute.autovec_copy(cute.make_tensor(source, layout), into)

    @cute.jit
    def _add_slices(self, sums: cute.Tensor, lane: Int32, which: Int32):
        """Add the sums of the other slices to those of the first one."""
        slices = const_expr(self.config.slices)
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((self.sums, self.lanes, slices - 1))
        shared = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        if which > 0:
            cute.autovec_copy(sums, shared[None, lane, which - 1])
        cute.arch.sync_threads()
        if which == 0:
            vector = cute.make_rmem_tensor(self.sums, Float32)
            for other in cutlass.range_constexpr(slices - 1):
                cute.autovec_copy(shared[None, lane, other], vector)
                for i in cutlass.range_constexpr(self.sums):
                    sums[i] = sums[i] + vector[i]

    @cute.jit
    def finish(self, sums, outs, operands, row: Int32, unit: Int32, cols: Int32, matrix: Int32):
        """Apply the epilogue and store."""
        given = [
            self._operand(i, operands[i], row, unit, cols, matrix)
            for i in range(len(self.operands))
        ]
        places = [i for _, run in self.runs(unit, cols, self.spec.gated) for i in run]
        for which, values in visit.outputs(
            self.spec.epilogue,
            [sums[places.index(i)] for i in range(self.sums)],
            lambda which, i: given[which][i] if isinstance(given[which], list) else given[which],
        ):
            out = outs[which]
            paired = const_expr(self.spec.paired[which])
            for start, places in self.runs(unit, out.shape[1], paired):
                _store(out, [values[i] for i in places], row, start, matrix)

    def _operand(self, i: int, tensor, row: Int32, unit: Int32, cols: Int32, matrix: Int32) -> Any:
        """An operand's value, or a list of them for the thread's values."""
        kind = self.operands[i].kind
        kind = TURNED.get(kind, kind) if self.turned else kind
        if kind == Kind.SCALAR:
            return Float32(tensor)
        if kind == Kind.DEVICE_SCALAR:
            return Float32(tensor[0])
        if kind in (Kind.ROW, Kind.COLUMN):
            vector = tensor if cute.rank(tensor) == 1 else tensor[Int64(matrix), None]
            if kind == Kind.COLUMN:
                return Float32(vector[row])
            return _read(vector, self.runs(unit, cols, self.spec.gated), cols)
        here = tensor[Int64(row), None, Int64(matrix)]
        if kind == Kind.TILE:
            return _read(here, self.runs(unit, cols, False), cols)
        found = _read(here, self.runs(unit, 2 * cols, True), 2 * cols)
        return list(zip(found[:BLOCK_SUMS], found[BLOCK_SUMS:], strict=True))


def _read(row: cute.Tensor, runs: list[Run], width: Int32) -> list[Float32]:
    """Elements of a row in the order of a thread's values; beyond its end, the last one."""
    found = {}
    for start, places in runs:
        for j, i in enumerate(places):
            found[i] = Float32(row[Int64(cutlass.min(start + j, width - 1))])
    return [found[i] for i in range(len(found))]


@cute.jit
def _store(out: cute.Tensor, values: list, row: Int32, start: Int32, matrix: Int32):
    """Store neighbours of a row, as far as it goes."""
    count, dtype = const_expr(len(values)), out.element_type
    vector = cute.make_rmem_tensor(count, dtype)
    for i in cutlass.range_constexpr(count):
        vector[i] = values[i].to(dtype)
    if start + count <= out.shape[1]:
        at = cute.crd2idx((Int64(row), Int64(start), Int64(matrix)), out.layout)
        bytes_ = const_expr(min(copy.CHUNK, count * dtype.width // 8))
        target = copy.aligned(out.iterator + at, bytes_)
        cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(count)))
    else:
        for i in cutlass.range_constexpr(count):
            if start + i < out.shape[1]:
                out[Int64(row), Int64(start + i), Int64(matrix)] = vector[i]


def build(spec: SumSpec, config: SumConfig) -> tuple[PartSums, tuple]:
    """The kernel and its symbolic arguments."""
    return PartSums(spec, config), arguments_of_sum(spec)
