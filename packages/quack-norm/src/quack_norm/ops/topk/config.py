"""How a top-k kernel computes: frozen configurations, and the rules that choose them."""

from dataclasses import dataclass
from typing import ClassVar

from quack_core import dtypes
from quack_core.reduction.tiling import WARP, RowTiling

from .network import power_of_two
from .spec import TopKBwdSpec, TopKFwdSpec

_FOLDER = __name__.rpartition(".")[0]

SORTED_N = 512
"""Longest row that the threads of a warp hold: 16 keys each."""
KEYS = 8
"""Keys of a thread, unless a row has more than a warp of them; gradients of a thread."""
CTA = 128
"""Threads of a CTA that has several rows."""
LENGTHS = ((2048, 128), (16384, 256), (65536, 512))
"""Threads of a CTA that selects from rows up to a length; 1024 for longer ones."""
TILE_BYTES = 16384
"""Of dx that a CTA writes: as many CTAs as have threads fit on an SM."""


@dataclass(frozen=True)
class SortConfig:
    """A warp, or a part of it, holds a row in registers.

    Args:
        threads_per_row: a power of two up to 32.
        rows_per_cta: rows side by side in a CTA.
    """

    threads_per_row: int
    rows_per_cta: int

    module: ClassVar[str] = f"{_FOLDER}.fwd_sort"

    @property
    def num_threads(self) -> int:
        return self.threads_per_row * self.rows_per_cta

    def tiling(self, spec: TopKFwdSpec) -> RowTiling:
        """How rows are loaded."""
        return RowTiling(spec.n, spec.vec, self.threads_per_row, self.rows_per_cta)

    def num_keys(self, spec: TopKFwdSpec) -> int:
        """Keys of a thread."""
        return power_of_two(self.tiling(spec).values)

    def capacity(self, spec: TopKFwdSpec) -> int:
        """Keys of a row in shared memory: the results."""
        return power_of_two(spec.k)

    def results(self, spec: TopKFwdSpec) -> RowTiling:
        """How results are written."""
        return RowTiling(spec.k, 1, self.threads_per_row, self.rows_per_cta)

    def smem_bytes(self, spec: TopKFwdSpec) -> int:
        """Shared memory of a CTA."""
        keys = self.capacity(spec) * self.rows_per_cta * spec.key_bytes
        return keys + self.results(spec).shared_bytes() + 1024


@dataclass(frozen=True)
class SelectConfig:
    """A CTA reads its row once per digit, until few enough candidates are left to be sorted.

    Args:
        num_threads: a power of two.
        candidates: keys that are sorted, a power of two from ``num_threads`` on.
        digit_bits: a digit's counters lie in shared memory; at least one per thread.
        in_flight: elements that a thread loads before it looks at them.
    """

    num_threads: int
    candidates: int
    digit_bits: int = 11
    in_flight: int = 16

    module: ClassVar[str] = f"{_FOLDER}.fwd_select"
    rows_per_cta: ClassVar[int] = 1

    @property
    def threads_per_row(self) -> int:
        return self.num_threads

    @property
    def num_bins(self) -> int:
        """Values of a digit."""
        return 1 << self.digit_bits

    def num_keys(self, spec: TopKFwdSpec) -> int:
        """Keys of a thread."""
        return self.candidates // self.num_threads

    def capacity(self, spec: TopKFwdSpec) -> int:
        """Keys of a row in shared memory: candidates, while they are sorted too, and results."""
        return self.candidates

    def results(self, spec: TopKFwdSpec) -> RowTiling:
        """How results are written."""
        return RowTiling(spec.k, 1, self.num_threads)

    def smem_bytes(self, spec: TopKFwdSpec) -> int:
        """Shared memory of a CTA."""
        counters = 4 * (self.num_bins + self.num_threads // WARP + 4)
        keys = self.candidates * spec.key_bytes
        return keys + counters + self.results(spec).shared_bytes() + 1024


@dataclass(frozen=True)
class BwdConfig:
    """A CTA owns consecutive elements of dx: part of a row, or several rows.

    Args:
        num_threads: threads of a CTA.
        threads_per_row: threads that share the gradients of a row; a power of two.
        tile_bytes: of dx.
    """

    num_threads: int
    threads_per_row: int
    tile_bytes: int = TILE_BYTES

    module: ClassVar[str] = f"{_FOLDER}.bwd"

    def tile(self, spec: TopKBwdSpec) -> int:
        """Elements of dx."""
        return self.tile_bytes * 8 // dtypes.width(spec.dx)

    def tiling(self, spec: TopKBwdSpec) -> RowTiling:
        """How the gradients of rows are read."""
        rows = self.num_threads // self.threads_per_row
        return RowTiling(spec.k, 1, self.threads_per_row, rows)

    def smem_bytes(self, spec: TopKBwdSpec) -> int:
        """Shared memory of a CTA."""
        return self.tile_bytes + self.tiling(spec).shared_bytes(buffers=2) + 1024


def default_fwd(spec: TopKFwdSpec) -> SortConfig | SelectConfig:
    """Of N and k only: a row has the same kernel whatever rows come with it."""
    if spec.n <= SORTED_N:
        threads = min(WARP, max(1, power_of_two(spec.n) // KEYS))
        return SortConfig(threads, CTA // threads)
    size = power_of_two(spec.k)
    threads = next((t for length, t in LENGTHS if spec.n <= length), 1024)
    threads = max(threads, 2 * size // KEYS)
    return SelectConfig(threads, max(threads, min(2 * size, power_of_two(spec.n))))


def default_bwd(spec: TopKBwdSpec) -> BwdConfig:
    """Of k only: up to 8 gradients of a row are a thread's."""
    size = power_of_two(spec.k)
    threads = max(CTA, size // KEYS)
    return BwdConfig(threads, min(threads, size))
