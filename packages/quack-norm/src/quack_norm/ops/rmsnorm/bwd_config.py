"""How a backward kernel computes: a frozen configuration. ``bwd_rules`` chooses it."""

from dataclasses import dataclass

from quack_core import dtypes
from quack_core.arch import most_registers
from quack_core.reduction.tiling import RowTiling
from quack_norm.ops.row_map.config import REGISTERS

from .bwd_spec import RMSNormBwdSpec


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
