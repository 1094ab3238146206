"""Which configuration a kernel on rows gets: it has to fit, and was the fastest where it was measured.

A rule sees N, which operands there are, their dtypes and the architecture; never the number of rows
or where they lie: the same row gives the same bits in every batch.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from quack_core import dtypes
from quack_core.arch import Arch
from quack_core.reduction.tiling import WARP

from .config import HELD_VALUES, LONG, RowConfig, words
from .spec import RowSpec

Config = TypeVar("Config", bound=RowConfig)

MIN_SHIFTED = 256
"""Shorter rows without full vectors move element by element."""
KB = 1024
MIN_RING = 4097
"""Elements of a row from which CTAs stay and keep the weight in registers."""
MIN_ODD_RING = 7680
"""The same in bytes, for rows that are no whole number of vectors."""
MIN_ADDED_RING = 16 * KB
"""The same in bytes, where there is a second row."""
MAX_WARP_BYTES = 2 * KB
"""Of a row that one warp holds in registers, where longer ones wait in shared memory."""
STAGED_BYTES = 64 * KB
"""Rows that wait in the shared memory of an SM; twice as many where they are read in batches."""
MAX_STAGED = 128 * KB
"""Of a row of a norm: longer ones keep the weight in registers."""
RING_BYTES = 48 * KB
"""Rows under way on an SM: more or less costs up to a tenth."""


def choose(kind: type[Config], best: RowSpec, arch: Arch) -> Config | None:
    """The configuration for a spec on an architecture; None if none fits.

    Args:
        kind: the operator's class of configurations.
        best: the spec with full alignment. Address and strides must not decide on the tiling, hence
            on the bits.
    """
    for config in _ranked_waiting(best) if kind.waits else _ranked(best):
        if (kind.shiftable or not config.shifted) and fits(config, best, arch):
            return _as(kind, config)
    return None


def tries(kind: type[Config], spec: RowSpec, arch: Arch) -> list[Config]:
    """Configurations worth timing against the chosen one; all fit ``arch``."""
    found = (*_tries(spec), *(() if spec.per_head else _staged(spec)))
    fitting = (config for config in found if fits(config, spec, arch))
    return list(dict.fromkeys(_as(kind, c) for c in fitting if not (kind.waits and c.persistent)))


def _as(kind: type[Config], config: RowConfig) -> Config:
    fields = dataclasses.fields(config)
    return kind(**{field.name: getattr(config, field.name) for field in fields})


def fits(config: RowConfig, spec: RowSpec, arch: Arch) -> bool:
    """Whether shared memory, cluster and registers of the architecture suffice."""
    if config.cluster > arch.max_cluster or config.smem_bytes(spec) > arch.smem_bytes:
        return False
    if config.persistent or config.unroll:
        ctas = max(1, config.ctas_per_sm)
        if ctas * config.num_threads > arch.max_threads_per_sm:
            return False
        if ctas * (config.smem_bytes(spec) + KB) > arch.smem_per_sm:
            return False
    vector = spec.full_vector * words(*spec.columns)  # of column operands that come late
    if config.unroll:  # a batch as it is and, where there is only one, as float32 meanwhile
        once = config.batches(spec) == 1
        values = config.unroll * spec.full_vector * config.rows_per_thread
        held = values * (spec.kept if once else 1) + values * words(*spec.rows) / 2
        early = config.early(spec)
        late = vector / 4 if once else vector  # a value that is held makes room for its result
        held += values / config.rows_per_thread * words(*spec.columns) / 2 if early else late
        # Of few warps each thread reads all partial results; shifting needs some as well.
        spare = 12 if not once else 18 if spec.columns else 10
        if early and config.threads_per_row > 256:
            spare = 8
        spare += (16 * len(spec.rows) - 12) * spec.odd + spec.extra_registers
        return held <= config.registers - spare
    values = config.tiling(spec).values
    if values > HELD_VALUES and not config.shifted:  # held in float32
        return values * spec.kept <= config.registers - 72
    if config.shifted:  # x and residual are held as they are, and a vector of sums
        return values * words(*spec.rows) <= config.registers - 44
    if config.persistent:  # everything as it is, or rows alone, and as float32 meanwhile
        held = values * (1 + words(*spec.rows)) + vector / 2
        return config.early(spec) or held <= config.registers - 40
    held = values * (1 + words(*spec.rows[1:]))  # x becomes float32
    return held <= config.registers - 32


def _ranked(spec: RowSpec) -> Iterator[RowConfig]:
    """Configurations that could serve, best first."""
    several, short = len(spec.columns) > 1, spec.n <= 32 * WARP
    if not spec.per_head:
        yield from _over_two(spec)
        if several and not short:
            yield from _staged_with_columns(spec)
    if not spec.per_head and _stays(spec):
        if spec.n * dtypes.width(spec.x) // 8 <= (STAGED_BYTES if spec.odd else MAX_STAGED):
            yield from _staged(spec)
        yield from _odd_rings(spec) if spec.odd else _rings(spec)
    if spec.odd and spec.n >= MIN_SHIFTED:
        yield from _shifted(spec)
    if short and several and not spec.odd:  # a warp to a CTA, with rows of its own
        threads = threads_for(spec.n, spec.vec, 32, high=WARP)
        yield RowConfig(threads, WARP // threads)
    # Of two rows, and where columns take as many registers.
    much = len(spec.rows) > 1 and spec.n > 2048 or words(*spec.columns) >= 1 and spec.n >= LONG
    first = 8 if short else 32 if much else 16
    for values in (first, *(v for v in (16, 32, 128) if v > first)):
        yield from _tiles(spec, values)


def _ranked_waiting(spec: RowSpec) -> Iterator[RowConfig]:
    """The same where long rows wait in shared memory."""
    yield from _over_two(spec)
    if spec.n * dtypes.width(spec.x) // 8 > MAX_WARP_BYTES or (spec.odd and spec.n >= MIN_SHIFTED):
        yield from _staged(spec)
    for values in (8, 16, 32):  # of a warp
        if spec.n <= values * WARP:
            threads = threads_for(spec.n, spec.vec, values, high=WARP)
            yield RowConfig(threads, max(2, 128 // threads) if threads < WARP else 2)
    for values in (16, 32, 128):
        yield from _tiles(spec, values)


def _tiles(spec: RowSpec, values: int) -> Iterator[RowConfig]:
    """Threads that hold at most so many elements each."""
    most = 512 if values <= HELD_VALUES else 256
    for cluster in clusters(spec.n, most * values):
        threads = threads_for(-(-spec.n // cluster), spec.vec, values, high=most)
        yield RowConfig(threads, max(1, 128 // threads) if cluster == 1 else 1, cluster)


def _over_two(spec: RowSpec) -> Iterator[RowConfig]:
    """Rows that two CTAs, but not one, hold in registers at once, with a 16-bit weight at most."""
    half = 256 * HELD_VALUES
    few = len(spec.rows) == 1 and words(*spec.columns) <= 0.5
    if half < spec.n <= 2 * half and few and not spec.odd:
        yield RowConfig(threads_for(-(-spec.n // 2), spec.vec, HELD_VALUES), cluster=2)


def _staged(spec: RowSpec) -> Iterator[RowConfig]:
    """Rows in shared memory: at once if a CTA's threads can hold its slice, else in batches."""
    bytes_per_element = sum(dtypes.width(name) for name in spec.rows) // 8
    sizes = [(32 * KB << i) // bytes_per_element for i in range(3)]
    for cluster in (c for size in sizes for c in clusters(spec.n, size)):
        cols = -(-spec.n // cluster)
        vectors = -(-cols // spec.full_vector)
        at_once = vectors <= 1024
        most_ctas = max(
            1, (STAGED_BYTES if at_once else 2 * STAGED_BYTES) // (cols * bytes_per_element)
        )
        wide = ((2, 512),) if at_once and not spec.odd else ()
        for unroll, most in (*wide, (4, 256), (2, 256)):
            threads = threads_for(-(-vectors // unroll), 1, 1, low=WARP, high=most)
            first = min(16, most_ctas, 2048 // threads)
            last = 1 if not at_once else first if threads > 256 else min(first, 512 // threads)
            for ctas in range(first, last - 1, -1):
                yield RowConfig(threads, 1, cluster, ctas_per_sm=ctas, unroll=unroll)


def _staged_with_columns(spec: RowSpec) -> Iterator[RowConfig]:
    """The same with several column operands. Clusters are small, as every CTA reads its columns for
    each row; float32 ones are read once for two rows."""
    width = sum(dtypes.width(name) for name in spec.rows) // 8
    twice = words(*spec.columns) > 1 and not spec.odd
    short = 32 * KB if twice or (spec.odd and spec.n * width <= MAX_STAGED) else 16 * KB
    for limit, high in ((short, 128), (64 * KB, 256), (96 * KB, 256)):
        for cluster in clusters(spec.n, limit // width):
            cols = -(-spec.n // cluster)
            size = cols * width
            if limit == 16 * KB and cluster > 1:
                break
            threads = threads_for(-(-cols // (4 * spec.full_vector)), 1, 1, low=WARP, high=high)
            some = min(8, 96 * KB // size) if size <= 16 * KB else 4 if spec.odd else 3
            rows = 2 if twice and limit == short else 1
            for ctas in range(min(some, 4) if rows > 1 else some, 0, -1):
                yield RowConfig(
                    threads, 1, cluster, ctas_per_sm=ctas, unroll=4, rows_per_thread=rows
                )


def _shifted(spec: RowSpec) -> Iterator[RowConfig]:
    """Pieces of memory: many per thread, since a row has a piece more than its vectors."""
    values = 40 if spec.n <= 8192 else 72
    for cluster in clusters(spec.n, 256 * values):
        threads = threads_for(-(-spec.n // cluster), spec.full_vector, values, low=32, high=256)
        rows = max(1, 128 // threads) if cluster == 1 else 1
        yield RowConfig(threads, rows, cluster, True, ctas_per_sm=512 // (threads * rows))
        yield RowConfig(threads, rows, cluster, True)


def _stays(spec: RowSpec) -> bool:
    """Whether rows are long enough for CTAs that stay."""
    row_bytes = spec.n * dtypes.width(spec.x) // 8
    if spec.odd:
        return row_bytes >= MIN_ODD_RING
    return row_bytes >= MIN_ADDED_RING if len(spec.rows) > 1 else spec.n >= MIN_RING


def _rings(spec: RowSpec) -> Iterator[RowConfig]:
    """CTAs that stay, one or two on an SM: rows of whole vectors."""
    row_bytes = spec.n * dtypes.width(spec.x) // 8
    best = 24 * KB if row_bytes <= 24 * KB else 16 * KB if row_bytes <= 64 * KB else 32 * KB
    for cluster, size in _slices(spec, (best, 32 * KB, 64 * KB)):
        for ctas in (2, 1) if size <= 12 * KB else (1,):
            stages = max(2, min(3, RING_BYTES // (ctas * size)))
            yield from _ring(spec, cluster, 32 if size <= 16 * KB else 64, stages, ctas)


def _odd_rings(spec: RowSpec) -> Iterator[RowConfig]:
    """The same for other rows. They take a thread longer: several CTAs fill each other's gaps."""
    for cluster, size in _slices(spec, (32 * KB, 64 * KB)):
        for ctas in (3, 2, 1) if size <= 9 * KB else (2, 1):
            yield from _ring(spec, cluster, 32 if size <= 9 * KB else 64, 2, ctas)


def _slices(spec: RowSpec, most: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Clusters and the bytes of a row that each CTA has: at most ``most``, first things first."""
    width = dtypes.width(spec.x) // 8
    for size in most:
        for cluster in clusters(spec.n, size // width):
            yield cluster, -(-spec.n // cluster) * width


def _ring(
    spec: RowSpec, cluster: int, held_bytes: int, stages: int, ctas: int
) -> Iterator[RowConfig]:
    """Threads that hold so many bytes of x each, if a CTA has them."""
    values = held_bytes * 8 // dtypes.width(spec.x)
    threads = threads_for(-(-spec.n // cluster), spec.full_vector, values, low=WARP)
    if threads <= 512:
        yield RowConfig(threads, 1, cluster, stages=stages, ctas_per_sm=ctas)


def _tries(spec: RowSpec) -> Iterator[RowConfig]:
    shifted = spec.odd and spec.n >= MIN_SHIFTED
    for cluster in clusters(spec.n, 20480):
        for threads in (32, 64, 128, 256, 512):
            rows = max(1, 128 // threads) if cluster == 1 else 1
            yield RowConfig(threads, rows, cluster, shifted)
            if threads > 64 and not spec.per_head:
                for stages, ctas in ((1, 0), (2, 0), (1, 2), (2, 2), (2, 3)):
                    yield RowConfig(threads, 1, cluster, False, stages, ctas)


def clusters(n: int, cols: int) -> Iterator[int]:
    """Powers of two up to 16, from the one that leaves at most ``cols`` columns to each CTA."""
    cluster = 1
    while cluster <= 16:
        if n <= cols * cluster:
            yield cluster
        cluster *= 2


def threads_for(n: int, vec: int, values: int, low: int = 1, high: int = 1024) -> int:
    """The fewest threads that hold at most ``values`` elements each: whole warps if more than one."""
    needed = max(1, -(-n // max(values, vec)))
    if needed <= WARP:
        return max(low, 1 << (needed - 1).bit_length())
    vectors = -(-n // (WARP * vec))  # of a warp
    return min(high, max(low, WARP * -(-vectors // max(1, values // vec))))
