"""How rows are spread over threads, CTAs and clusters, and how they move: frozen configurations."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from quack_core import dtypes
from quack_core.arch import Arch, most_registers
from quack_core.reduction.tiling import WARP, RowTiling

from .spec import RowSpec

HELD_VALUES = 32
"""Elements per thread from which the one-tile kernel takes weight and residual piece by piece."""
REGISTERS = 65536
"""Of an SM."""
LATE_WORDS = 16
"""Registers for column operands that are read after the reduction, at least those of a vector."""
EARLY_WORDS = 8
"""Registers for column operands beside a row that waits: with more, fewer CTAs are on an SM."""
LONG = 4096
"""Elements of a row of which CTAs of one tile are too many for an SM."""
CROWD = 8
"""CTAs on an SM, if the row of each waits in shared memory."""
LINE = 8
"""Widest accesses in a line of 128 bytes."""


def words(*names: str) -> float:
    """Registers of an element of each of some dtypes."""
    return sum(dtypes.width(name) / 32 for name in names)


@dataclass(frozen=True)
class RowConfig:
    """A kernel of an operator on rows; each operator has a subclass, in its own folder.

    Args:
        threads_per_row: threads of a CTA that share a row.
        rows_per_cta: rows side by side in a CTA.
        cluster: CTAs that share a row.
        shifted: threads own 16-byte pieces of memory instead of vectors of the row; of one tile.
        stages: 0: a CTA works on one tile. Otherwise CTAs stay, draw rows from a counter, and have
            this many rows in flight, which one more warp fetches.
        ctas_per_sm: CTAs that should be on an SM together; 0: as many as fit.
        unroll: 0: threads hold their part of a row. Otherwise it waits in shared memory, and they
            take this many vectors at a time.
        rows_per_thread: rows of which a thread has the same columns, where they wait in shared
            memory: column operands are read once for all of them.
    """

    threads_per_row: int
    rows_per_cta: int = 1
    cluster: int = 1
    shifted: bool = False
    stages: int = 0
    ctas_per_sm: int = 0
    unroll: int = 0
    rows_per_thread: int = 1

    kernel: ClassVar[str] = "fwd"
    shiftable: ClassVar[bool] = False  # whether there is a kernel for ``shifted``
    waits: ClassVar[bool] = False  # whether long rows wait in shared memory instead of registers

    @property
    def module(self) -> str:
        """The kernel's module, in the operator's folder."""
        moved = "_ring" if self.persistent else "_staged" if self.unroll else ""
        moved = "_shifted" if self.shifted else moved
        return f"{type(self).__module__.rpartition('.')[0]}.{self.kernel}{moved}"

    @property
    def num_threads(self) -> int:
        """Threads of a CTA, with the warp that fetches."""
        return self.threads_per_row * self.rows_per_cta + WARP * self.persistent

    @property
    def persistent(self) -> bool:
        return self.stages > 0

    @property
    def state_ints(self) -> int:
        """Counters of the kernel: clusters that left, rows drawn."""
        return 2 * self.persistent

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that ``ctas_per_sm`` fit."""
        return most_registers(REGISTERS, self.num_threads, max(1, self.ctas_per_sm))

    def for_few(self, spec: RowSpec) -> Self | None:
        """One tile per CTA with the same bits, for few rows; None if that is not to be had."""
        single = replace(self, stages=0, ctas_per_sm=0, unroll=0, rows_per_thread=1)
        if spec.odd or not (self.persistent or self.batches(spec) == 1):
            return None
        if self.unroll and single.tiling(spec).passes != self.unroll:
            return None
        return single

    def crowded(self, spec: RowSpec, arch: Arch) -> Self | None:
        """For a kernel of one tile, one with the same bits of which `CROWD` CTAs are on an SM; None if that
        is not to be had. Its row waits in shared memory, which takes fewer registers: where all
        rows are on the GPU at once with it only, it is faster, else slower."""
        one_tile = not (self.persistent or self.unroll or self.shifted)
        alone = self.cluster == self.rows_per_cta == 1
        plain = len(spec.rows) == 1 and words(spec.x) < 1 and not (spec.odd or spec.per_head)
        if not (one_tile and alone and plain and spec.n >= LONG):
            return None
        found = replace(self, ctas_per_sm=CROWD, unroll=self.tiling(spec).passes)
        fits = CROWD * found.num_threads <= arch.max_threads_per_sm
        return found if fits and found.batches(spec) == 1 else None

    def tiling(self, spec: RowSpec) -> RowTiling:
        n, vec = spec.n, spec.vec
        if self.shifted:  # a slice may begin anywhere in its first vector
            vec = spec.full_vector
            step = vec * self.threads_per_row
            n = -(-(self.slice_cols(spec) + vec - 1) // step) * step * self.cluster
        elif self.persistent or self.unroll:  # a last vector may be no whole one
            vec = spec.full_vector
            n = -(-n // vec) * vec
        return RowTiling(n, vec, self.threads_per_row, self.rows_per_cta, self.cluster)

    def slice_cols(self, spec: RowSpec) -> int:
        """Columns of a CTA of the shifted kernel, and of the staged one."""
        vec = spec.full_vector
        if self.unroll and self.cluster > 1:  # whole lines, or a batch
            batch = self.batch(spec).n
            vec = batch if batch * self.cluster >= spec.n else vec * LINE
        return -(-spec.n // (self.cluster * vec)) * vec

    def batch(self, spec: RowSpec) -> RowTiling:
        """What a CTA of the staged kernel takes at a time."""
        vec, threads = spec.full_vector, self.threads_per_row
        return RowTiling(threads * vec * self.unroll, vec, threads)

    def batches(self, spec: RowSpec) -> int:
        """How many of them a CTA has; 0: the kernel is another one."""
        return -(-self.slice_cols(spec) // self.batch(spec).n) if self.unroll else 0

    def early(self, spec: RowSpec) -> bool:
        """Whether threads read their part of column operands before a row is reduced, and hold it.

        CTAs that stay read it once; others have it on its way while they reduce.
        """
        if self.persistent:
            held = self.tiling(spec).values * words(*spec.rows, *spec.columns)
            return held <= self.registers - (44 if spec.odd else 40) - spec.extra_registers
        held = self.unroll * spec.full_vector * words(*spec.columns)
        return self.batches(spec) == 1 and held <= EARLY_WORDS

    def even(self, spec: RowSpec) -> bool:
        """Whether all threads have the same number of elements, and they are a power of two."""
        tiling = self.tiling(spec)
        cols = self.batches(spec) * self.batch(spec).n if self.unroll else tiling.cols
        return cols * self.cluster == spec.n and tiling.warps_per_row.bit_count() == 1

    def smem_bytes(self, spec: RowSpec) -> int:
        """Shared memory of a CTA."""
        tiling = self.tiling(spec)
        residues = 4 * tiling.vec * tiling.num_threads if self.shifted else 0
        if self.unroll:
            batches = self.batches(spec)
            cols = batches * self.batch(spec).n if spec.odd else self.slice_cols(spec)
            row = 8 * batches + 128 * len(spec.rows)
            row += sum(cols * dtypes.width(name) // 8 + 16 for name in spec.rows)
            residues += self.rows_per_thread * row
        if self.persistent:
            rows = sum(tiling.cols * dtypes.width(name) // 8 + 16 for name in spec.rows)
            residues += self.stages * (rows + 128 + 32) + 64
        exchange = tiling.shared_bytes(buffers=2 if self.persistent else 1)
        return residues + self.rows_per_thread * exchange + 1024

    def groups(self, spec: RowSpec, rows: int, heads: int, resident: int) -> int:
        """Clusters to launch if the kernel is persistent."""
        return min(resident, rows)
