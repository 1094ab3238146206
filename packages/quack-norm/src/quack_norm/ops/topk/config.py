"""How a top-k kernel computes: frozen configurations, and the rules that choose them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quack_core import dtypes
from quack_core.reduction.tiling import WARP, RowTiling

from .network import power_of_two, work
from .spec import TopKBwdSpec, TopKFwdSpec, key_bytes

_FOLDER = __name__.rpartition(".")[0]

SORTED_N = 512
"""Longest row that the threads of a warp hold: 16 keys each."""
KEYS = 8
"""Keys of a thread, unless a row has more than a warp of them; gradients of a thread."""
CTA = 128
"""Threads of a CTA that has several rows."""
REGISTER_KEYS = 16
"""Most keys of a thread; twice as many, where a row begins within a vector, fit 128 registers."""
SHARED_KEYS = 2048
"""Most keys that a CTA finds groups among; beyond, counting digits takes less."""
GROUPED_K = 128
"""Largest k of rows whose threads each have a bundle of groups: a CTA has 8 times as many."""
FILTERED_K = 32
"""Smallest k of rows whose keys are filtered. Of many random elements 1.4 k pass a bound that is the
k-th largest of 2 k maxima, and for smaller k too often more than 2 k."""
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
class GroupsConfig:
    """Of groups of consecutive elements those with the k largest maxima are found, then sorted.

    Args:
        threads_per_row: a power of two. From two warps on a thread's groups are a bundle.
        rows_per_cta: rows side by side in a CTA; 1 with bundles.
        group: elements of a group, a power of two up to a 128-bit vector; that with bundles.
        sorters: threads of a row that find and sort, a power of two; all if a warp has the row.
        kept: keys, a power of two from ``sorters`` on, that are sorted if no more than these pass
            the bound known from the level before; 0: all are sorted at once.
        in_flight: vectors that a thread loads before it looks at them, with bundles.
    """

    threads_per_row: int
    rows_per_cta: int
    group: int
    sorters: int
    kept: int = 0
    in_flight: int = 8

    def __post_init__(self) -> None:
        if 0 < self.kept < self.sorters:
            raise ValueError(f"kept={self.kept} must be 0, or {self.sorters} (sorters) or more")

    module: ClassVar[str] = f"{_FOLDER}.fwd_groups"

    @property
    def num_threads(self) -> int:
        return self.threads_per_row * self.rows_per_cta

    @property
    def bundled(self) -> bool:
        """Whether a thread's groups are a bundle."""
        return self.threads_per_row > WARP

    def has_bound(self, spec: TopKFwdSpec) -> bool:
        """Whether a bound of the groups' keys is known when they are to be found."""
        return self.kept > 0 and not (self.bundled and self.passes(spec) == 1)

    def vectors(self, spec: TopKFwdSpec) -> int:
        """128-bit vectors of memory that hold a row, wherever in one it begins."""
        begin = 0 if spec.whole else spec.full_vector - 1
        return -(-(spec.n + begin) // spec.full_vector)

    def passes(self, spec: TopKFwdSpec) -> int:
        """Vectors of a thread."""
        return -(-self.vectors(spec) // self.threads_per_row)

    def num_groups(self, spec: TopKFwdSpec) -> int:
        """Groups of a row."""
        return self.vectors(spec) * (spec.full_vector // self.group)

    def num_keys(self, spec: TopKFwdSpec) -> int:
        """Keys of groups of a sorter: all, or those of the k bundles."""
        if self.bundled:
            return max(1, power_of_two(spec.k * self.passes(spec)) // self.sorters)
        return power_of_two(self.passes(spec) * spec.full_vector // self.group)

    def num_elements(self, spec: TopKFwdSpec) -> int:
        """Keys of elements of a sorter."""
        return max(1, power_of_two(spec.k * self.group) // self.sorters)

    def group_capacity(self, spec: TopKFwdSpec) -> int:
        """Keys of groups of a row in shared memory: k; of bundles all, and what warps exchange."""
        if self.bundled:
            return max(self.threads_per_row, self.kept, self.num_keys(spec) * self.sorters)
        return max(power_of_two(spec.k), self.kept)

    def capacity(self, spec: TopKFwdSpec) -> int:
        """Keys of elements of a row in shared memory: the results, and what warps exchange."""
        exchanged = self.num_elements(spec) * self.sorters if self.sorters > WARP else 0
        return max(power_of_two(spec.k), self.kept, exchanged)

    def results(self, spec: TopKFwdSpec) -> RowTiling:
        """How results are written."""
        return RowTiling(spec.k, 1, self.sorters, self.rows_per_cta)

    def smem_bytes(self, spec: TopKFwdSpec) -> int:
        """Shared memory of a CTA."""
        groups = self.group_capacity(spec) * key_bytes(spec.x, self.num_groups(spec))
        keys = self.capacity(spec) * spec.key_bytes
        return (groups + keys + 4) * self.rows_per_cta + self.results(spec).shared_bytes() + 1024


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


FwdConfig = SortConfig | GroupsConfig | SelectConfig


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


def default_fwd(spec: TopKFwdSpec) -> FwdConfig:
    """Of N, k and dtype only: neither the rows that come with a row nor its alignment change the
    threads that it is spread over, and with these the order of a sum.
    """
    spec = replace(spec, align=16)
    candidates: list[SortConfig | GroupsConfig] = [*_sorts(spec), *_groups(spec)]
    if candidates:
        return min(candidates, key=lambda config: _instructions(spec, config))
    return _bundles(spec) or _select(spec)


def _sorts(spec: TopKFwdSpec) -> Iterator[SortConfig]:
    if spec.n <= SORTED_N:
        threads = min(WARP, max(1, power_of_two(spec.n) // KEYS))
        yield SortConfig(threads, CTA // threads)


def _groups(spec: TopKFwdSpec) -> Iterator[GroupsConfig]:
    """Those that are of use, with a row to a warp or less."""
    for threads in (4, 8, 16, 32):  # of 16 bytes each; memory moves 32 bytes or more
        for group in (2, 4, 8)[: spec.full_vector.bit_length() - 1]:
            config = GroupsConfig(threads, CTA // threads, group, threads)
            keys = max(config.num_keys(spec), config.num_elements(spec))
            if 2 * spec.k * group <= spec.n and keys <= REGISTER_KEYS:
                yield config
                kept = 2 * power_of_two(spec.k)
                if spec.k >= FILTERED_K and 2 * kept <= threads * config.num_keys(spec):
                    yield replace(config, kept=kept)


def _instructions(spec: TopKFwdSpec, config: SortConfig | GroupsConfig) -> int:
    """Of all threads of a row, about."""
    key, keys = 8, config.num_keys(spec)  # to make a key; a wide one takes three times as long
    wide = 3 if spec.key_bytes == 8 else 1
    if isinstance(config, SortConfig):
        return config.threads_per_row * (
            key * keys + wide * work(keys, config.threads_per_row, spec.k)
        )
    elements, threads = config.num_elements(spec), config.sorters
    wide_group = 3 if key_bytes(spec.x, config.num_groups(spec)) == 8 else 1
    steps = (key + config.group // 2) * keys + key * elements + 4 * key  # the loads of elements
    if config.kept:
        few = work(config.kept // threads, threads, spec.k)
        steps += (2 * wide_group + wide) * few + 4 * (wide_group * keys + wide * elements) + 8 * key
    else:
        steps += wide_group * work(keys, threads, spec.k) + wide * work(elements, threads, spec.k)
    return threads * steps


def _bundles(spec: TopKFwdSpec) -> GroupsConfig | None:
    """A row to a CTA, where it has enough groups and these are not too many."""
    vectors, size = spec.n // spec.full_vector, power_of_two(spec.k)
    # bundles, and groups of k of them: together fewest where they are as many
    threads = min(1024, max(CTA, 4 * size, power_of_two(math.isqrt(size * vectors))))
    config = GroupsConfig(threads, 1, spec.full_vector, WARP)
    keys = max(threads, size * power_of_two(config.passes(spec)), size * spec.full_vector)
    if spec.k > GROUPED_K or vectors < threads or keys > SHARED_KEYS:
        return None
    sorters = min(threads, max(WARP, keys // KEYS))
    kept = max(2 * size, sorters) if spec.k >= FILTERED_K else 0
    return replace(config, sorters=sorters, kept=kept)


def _select(spec: TopKFwdSpec) -> SelectConfig:
    size = power_of_two(spec.k)
    threads = next((t for length, t in LENGTHS if spec.n <= length), 1024)
    threads = max(threads, 2 * size // KEYS)
    return SelectConfig(threads, max(threads, min(2 * size, power_of_two(spec.n))))


def default_bwd(spec: TopKBwdSpec) -> BwdConfig:
    """Of k only: up to 8 gradients of a row are a thread's."""
    size = power_of_two(spec.k)
    threads = max(CTA, size // KEYS)
    return BwdConfig(threads, min(threads, size))
