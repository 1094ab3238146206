"""How rows are spread over the threads of CTAs and clusters. Plain integers: no DSL, no GPU."""

from dataclasses import dataclass
from typing import Any

WARP = 32


@dataclass(frozen=True)
class RowTiling:
    """A row of ``n`` elements belongs to ``threads_per_row`` threads in each of ``cluster`` CTAs.

    CTA ``r`` of the cluster owns the columns ``[r * cols, (r + 1) * cols)``, and each warp (or the
    threads of a row, if these are fewer) owns consecutive ones among them: in pass ``p`` thread
    ``t`` has the ``vec`` elements from ``start(t) + p * step`` on. The owner of an element, and with
    it the order of every sum, follows from these numbers alone: neither the number of rows nor an
    address changes it.

    Args:
        n: elements of a row.
        vec: consecutive elements per thread and pass; must divide ``n``.
        threads_per_row: threads of a CTA that share a row; whole warps, or a power of two below.
        rows_per_cta: rows that a CTA works on side by side.
        cluster: CTAs that share a row; needs ``rows_per_cta == 1`` if above 1.
    """

    n: int
    vec: int
    threads_per_row: int
    rows_per_cta: int = 1
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.n < 1 or self.vec < 1 or self.n % self.vec:
            raise ValueError(f"vec={self.vec} must be positive and divide n={self.n}")
        threads = self.threads_per_row
        if threads < 1 or (threads % WARP and threads.bit_count() != 1):
            raise ValueError(
                f"threads_per_row={threads}: must be a multiple of {WARP}, or a power of two below"
            )
        if self.num_threads % WARP or not WARP <= self.num_threads <= 1024:
            raise ValueError(f"{self.num_threads} threads: must be a multiple of 32 up to 1024")
        if self.cluster.bit_count() != 1 or self.cluster > 16:
            raise ValueError(f"cluster={self.cluster} must be a power of two up to 16")
        if self.cluster > 1 and (self.rows_per_cta > 1 or self.threads_per_row < WARP):
            raise ValueError(f"cluster={self.cluster} needs one row per CTA and whole warps")

    @property
    def num_threads(self) -> int:
        return self.threads_per_row * self.rows_per_cta

    @property
    def passes(self) -> int:
        """Vectors per thread."""
        return -(-self.n // (self.vec * self.threads_per_row * self.cluster))

    @property
    def lanes(self) -> int:
        """Threads of a warp that share a row."""
        return min(WARP, self.threads_per_row)

    @property
    def step(self) -> int:
        """Elements between two vectors of a thread."""
        return self.vec * self.lanes

    def start(self, thread: Any) -> Any:
        """First element of a thread of the row in its CTA's columns; for int and Int32."""
        if self.passes == 1:
            return thread * self.vec
        return (thread // self.lanes * (self.passes * self.lanes) + thread % self.lanes) * self.vec

    @property
    def cols(self) -> int:
        """Columns of a CTA, padded to whole passes."""
        return self.values * self.threads_per_row

    @property
    def ragged(self) -> bool:
        """Whether some vectors lie beyond the end of the row."""
        return self.cols * self.cluster != self.n

    @property
    def values(self) -> int:
        """Elements per thread."""
        return self.vec * self.passes

    @property
    def warps_per_row(self) -> int:
        """Warps of a CTA that share a row; 1 also if several rows share a warp."""
        return max(1, self.threads_per_row // WARP)

    def owner(self, column: int) -> tuple[int, int, int]:
        """(CTA in the cluster, thread of the row, value of the thread) of an element."""
        rank, column = divmod(column, self.cols)
        warp, column = divmod(column, self.step * self.passes)
        step, element = divmod(column, self.step)
        lane, value = divmod(element, self.vec)
        return rank, warp * self.lanes + lane, step * self.vec + value

    def shared_bytes(self, width: int = 1, buffers: int = 1) -> int:
        """Bytes that a reduction of ``width`` float32 values needs, barriers included."""
        partials = self.warps_per_row * self.rows_per_cta + self.cluster
        return 4 * width * partials * buffers + 8 * buffers + 48
