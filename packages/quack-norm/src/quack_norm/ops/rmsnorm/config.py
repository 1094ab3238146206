"""How an RMSNorm kernel computes: frozen configurations. ``rules`` chooses them."""

from dataclasses import dataclass, replace

from quack_core import dtypes
from quack_core.arch import most_registers
from quack_core.reduction.tiling import WARP, RowTiling

from .spec import RMSNormBwdSpec, RMSNormFwdSpec

HELD_VALUES = 32
"""Elements per thread from which the one-tile kernel takes weight and residual piece by piece."""
REGISTERS = 65536
"""Of an SM."""


@dataclass(frozen=True)
class FwdConfig:
    """Forward.

    Args:
        threads_per_row: threads of a CTA that share a row.
        rows_per_cta: rows side by side in a CTA.
        cluster: CTAs that share a row.
        shifted: threads own 16-byte pieces of memory instead of vectors of the row; of one tile.
        stages: 0: a CTA works on one tile. Otherwise CTAs stay, draw rows from a counter, and have
            this many rows in flight, which one more warp fetches.
        ctas_per_sm: CTAs that should stay on an SM together; 0: as many as fit.
    """

    threads_per_row: int
    rows_per_cta: int = 1
    cluster: int = 1
    shifted: bool = False
    stages: int = 0
    ctas_per_sm: int = 0

    @property
    def module(self) -> str:
        """The kernel's module."""
        kernel = "fwd_ring" if self.persistent else "fwd_shifted" if self.shifted else "fwd"
        return f"{__package__}.{kernel}"

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

    @property
    def min_blocks(self) -> int:
        """CTAs per SM to ask the compiler for: it divides by threads, and forgets partitions."""
        blocks = max(1, self.ctas_per_sm)
        while self.ctas_per_sm and 65536 // (blocks * self.num_threads) // 8 * 8 > self.registers:
            blocks += 1
        return blocks

    def one_tile(self) -> "FwdConfig":
        """The same tiling, hence the same bits, with a CTA per tile: for few rows."""
        return replace(self, stages=0, ctas_per_sm=0)

    def tiling(self, spec: RMSNormFwdSpec) -> RowTiling:
        n, vec = spec.n, spec.vec
        if self.shifted:  # a slice may begin anywhere in its first vector
            vec = spec.full_vector
            step = vec * self.threads_per_row
            n = -(-(self.slice_cols(spec) + vec - 1) // step) * step * self.cluster
        elif self.persistent:  # a last vector may be no whole one
            vec = spec.full_vector
            n = -(-n // vec) * vec
        return RowTiling(n, vec, self.threads_per_row, self.rows_per_cta, self.cluster)

    def slice_cols(self, spec: RMSNormFwdSpec) -> int:
        """Columns of a CTA of the shifted kernel."""
        vec = spec.full_vector
        return -(-spec.n // (self.cluster * vec)) * vec

    def smem_bytes(self, spec: RMSNormFwdSpec) -> int:
        """Shared memory of a CTA."""
        tiling = self.tiling(spec)
        inputs = [name for name in (spec.x, spec.residual) if name]
        residues = 4 * tiling.vec * tiling.num_threads if self.shifted else 0
        if self.persistent:
            rows = sum(tiling.cols * dtypes.width(name) // 8 + 16 for name in inputs)
            residues += self.stages * (rows + 128 + 32) + 64
        return residues + tiling.shared_bytes(buffers=2 if self.persistent else 1) + 1024

    def groups(self, spec: RMSNormFwdSpec, rows: int, heads: int, resident: int) -> int:
        """Clusters to launch if the kernel is persistent."""
        return min(resident, rows)


@dataclass(frozen=True)
class BwdConfig:
    """Backward.

    Args:
        threads_per_row: threads of a CTA that share a row.
        rows_per_cta: rows side by side in a CTA.
        split: CTAs of a cluster that share the columns of a row.
        peers: CTAs of a cluster that have the same columns and add their column sums first.
        stages: rows in flight in shared memory; 0: rows come straight into registers.
        keep: a row stays in registers between the two passes over it, and the weight always; else
            they are read again, piece by piece, from global memory.
        ctas_per_sm: CTAs that should stay on an SM together.
    """

    threads_per_row: int
    rows_per_cta: int = 1
    split: int = 1
    peers: int = 1
    stages: int = 0
    keep: bool = True
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        if self.split > 1 and self.peers > 1:
            raise ValueError(f"split={self.split}, peers={self.peers}: one of them must be 1")
        if self.stages and not self.keep:
            raise ValueError(f"stages={self.stages} needs keep=True")

    persistent = True

    @property
    def module(self) -> str:
        """The kernel's module."""
        return f"{__package__}.{'bwd' if self.keep else 'bwd_long'}"

    @property
    def num_threads(self) -> int:
        return self.threads_per_row * self.rows_per_cta

    @property
    def cluster(self) -> int:
        return self.split * self.peers

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that ``ctas_per_sm`` fit."""
        return most_registers(REGISTERS, self.num_threads, self.ctas_per_sm)

    @property
    def state_ints(self) -> int:
        """Counters per head: CTAs of each rank that have arrived."""
        return self.cluster

    def tiling(self, spec: RMSNormBwdSpec) -> RowTiling:
        return RowTiling(spec.n, spec.vec, self.threads_per_row, self.rows_per_cta, self.split)

    def ring_bytes(self, spec: RMSNormBwdSpec) -> int:
        """Rows in flight, or the column sums that take their place after the last row."""
        tiling = self.tiling(spec)
        inputs = [name for name in (spec.x, spec.dout, spec.dresidual_out) if name]
        ring = self.stages * sum(dtypes.width(name) // 8 for name in inputs)
        shared_sums = spec.column_sums and (self.peers > 1 or self.rows_per_cta > 1)
        sums = 4 if shared_sums else 0
        return tiling.cols * tiling.rows_per_cta * max(ring, sums)

    def smem_bytes(self, spec: RMSNormBwdSpec) -> int:
        """Shared memory of a CTA."""
        return self.ring_bytes(spec) + self.tiling(spec).shared_bytes(buffers=2) + 16 + 1024 + 256

    def groups(self, spec: RMSNormBwdSpec, rows: int, heads: int, resident: int) -> int:
        """Clusters to launch for each head; ``rows`` counts the rows of one head."""
        tiles = -(-rows // (self.rows_per_cta * self.peers))
        return max(1, min(resident // heads, tiles))

    def work_elements(self, spec: RMSNormBwdSpec, groups: int, heads: int) -> int:
        """float32 scratch: a row of padded columns per sum, cluster and head."""
        tiling = self.tiling(spec)
        return spec.column_sums * groups * heads * tiling.cols * tiling.cluster
