"""Which configuration a kernel gets: it has to fit, and was the fastest where it was measured.

A rule sees N, which operands there are, their dtypes and the architecture; never the number of rows
or where they lie: the same row gives the same bits in every batch.
"""

from collections.abc import Iterator
from dataclasses import replace

from quack_core import dtypes
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError
from quack_core.reduction.tiling import WARP

from .config import HELD_VALUES, BwdConfig, FwdConfig
from .spec import RMSNormBwdSpec, RMSNormFwdSpec

LONG_VALUES = 64
"""Columns per thread that a backward without kept rows may sum; twice as many spill."""
MIN_SHIFTED = 256
"""Shorter rows without full vectors move element by element."""
KB = 1024
MIN_RING = 4096
"""Elements of a row from which CTAs stay and keep the weight in registers."""
MIN_ODD_RING = 7680
"""The same in bytes, for rows that are no whole number of vectors."""
MIN_ADDED_RING = 16 * KB + 1
"""The same in bytes, where a residual is added."""
RING_BYTES = 48 * KB
"""Rows under way on an SM: more or less costs up to a tenth."""


def default_fwd(spec: RMSNormFwdSpec, arch: Arch) -> FwdConfig:
    """The configuration for a spec on an architecture.

    Raises:
        UnsupportedError: no configuration fits the architecture.
    """
    # Address and strides must not decide on the tiling, hence on the bits.
    best = replace(spec, align=16, weight_align=16, in_phase=True)
    for config in _ranked_fwd(best):
        if fits_fwd(config, best, arch):
            return config
    raise _unsupported("forward", spec.n, arch)


def _unsupported(direction: str, n: int, arch: Arch) -> UnsupportedError:
    return UnsupportedError(
        f"rmsnorm {direction}, n={n} on {arch.name}",
        f"a cluster of {arch.max_cluster} CTAs cannot hold such a row and its sums",
        "use shorter rows, or call it on the CPU",
    )


def fits_fwd(config: FwdConfig, spec: RMSNormFwdSpec, arch: Arch) -> bool:
    """Whether shared memory, cluster and registers of the architecture suffice."""
    if config.cluster > arch.max_cluster or config.smem_bytes(spec) > arch.smem_bytes:
        return False
    if config.persistent:
        ctas = max(1, config.ctas_per_sm)
        if ctas * config.num_threads > arch.max_threads_per_sm:
            return False
        if ctas * (config.smem_bytes(spec) + KB) > arch.smem_per_sm:
            return False
    values = config.tiling(spec).values
    if values > HELD_VALUES and not config.shifted:  # h alone is held, in float32
        return values <= config.registers - 72
    if config.shifted:  # x and residual are held as they are, and a vector of sums
        held = [spec.x, spec.residual]
        words = sum(dtypes.width(name) / 32 for name in held if name)
        return values * words <= config.registers - 44
    if config.persistent:  # everything as it is
        held = [spec.x, spec.residual, spec.weight, spec.bias]
        words = sum(dtypes.width(name) / 32 for name in held if name)
        return values * words <= config.registers - (44 if spec.odd else 40)
    words = 1 + (dtypes.width(spec.residual) / 32 if spec.residual else 0)  # x becomes float32
    return values * words <= config.registers - 32


def _ranked_fwd(spec: RMSNormFwdSpec) -> Iterator[FwdConfig]:
    """Configurations that could serve, best first."""
    if not spec.per_head and _stays(spec):
        yield from _odd_rings(spec) if spec.odd else _rings(spec)
    if spec.odd and spec.n >= MIN_SHIFTED:
        yield from _shifted(spec)
    first = 8 if spec.n <= 1024 else 32 if spec.residual and spec.n > 2048 else 16
    for values in (first, *(v for v in (16, 32, 128) if v > first)):
        most = 512 if values <= HELD_VALUES else 256
        for cluster in clusters(spec.n, most * values):
            threads = _threads(-(-spec.n // cluster), spec.vec, values, high=most)
            yield FwdConfig(threads, max(1, 128 // threads) if cluster == 1 else 1, cluster)


def _shifted(spec: RMSNormFwdSpec) -> Iterator[FwdConfig]:
    """Pieces of memory: many per thread, since a row has a piece more than its vectors."""
    values = 40 if spec.n <= 8192 else 72
    for cluster in clusters(spec.n, 256 * values):
        threads = _threads(-(-spec.n // cluster), spec.full_vector, values, low=32, high=256)
        rows = max(1, 128 // threads) if cluster == 1 else 1
        yield FwdConfig(threads, rows, cluster, True, ctas_per_sm=512 // (threads * rows))
        yield FwdConfig(threads, rows, cluster, True)


def _stays(spec: RMSNormFwdSpec) -> bool:
    """Whether rows are long enough for CTAs that stay."""
    row_bytes = spec.n * dtypes.width(spec.x) // 8
    if spec.odd:
        return row_bytes >= MIN_ODD_RING
    return row_bytes >= MIN_ADDED_RING if spec.residual else spec.n >= MIN_RING


def _rings(spec: RMSNormFwdSpec) -> Iterator[FwdConfig]:
    """CTAs that stay, one or two on an SM: rows of whole vectors."""
    row_bytes = spec.n * dtypes.width(spec.x) // 8
    best = 24 * KB if row_bytes <= 24 * KB else 16 * KB if row_bytes <= 64 * KB else 32 * KB
    for cluster, size in _slices(spec, (best, 32 * KB, 64 * KB)):
        for ctas in (2, 1) if size <= 12 * KB else (1,):
            stages = max(2, min(3, RING_BYTES // (ctas * size)))
            yield from _ring(spec, cluster, 32 if size <= 16 * KB else 64, stages, ctas)


def _odd_rings(spec: RMSNormFwdSpec) -> Iterator[FwdConfig]:
    """The same for other rows. They take a thread longer: several CTAs fill each other's gaps."""
    for cluster, size in _slices(spec, (32 * KB, 64 * KB)):
        for ctas in (3, 2, 1) if size <= 9 * KB else (2, 1):
            yield from _ring(spec, cluster, 32 if size <= 9 * KB else 64, 2, ctas)


def _slices(spec: RMSNormFwdSpec, most: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Clusters and the bytes of a row that each CTA has: at most ``most``, first things first."""
    width = dtypes.width(spec.x) // 8
    for size in most:
        for cluster in clusters(spec.n, size // width):
            yield cluster, -(-spec.n // cluster) * width


def _ring(
    spec: RMSNormFwdSpec, cluster: int, held_bytes: int, stages: int, ctas: int
) -> Iterator[FwdConfig]:
    """Threads that hold so many bytes of x each, if a CTA has them."""
    values = held_bytes * 8 // dtypes.width(spec.x)
    threads = _threads(-(-spec.n // cluster), spec.full_vector, values, low=WARP)
    if threads <= 512:
        yield FwdConfig(threads, 1, cluster, stages=stages, ctas_per_sm=ctas)


def default_bwd(spec: RMSNormBwdSpec, arch: Arch) -> BwdConfig:
    """The configuration for a spec on an architecture.

    Raises:
        UnsupportedError: no configuration fits the architecture.
    """
    for config in _ranked_bwd(spec):
        if fits_bwd(config, spec, arch):
            return config
    raise _unsupported("backward", spec.n, arch)


def fits_bwd(config: BwdConfig, spec: RMSNormBwdSpec, arch: Arch) -> bool:
    """Whether shared memory, cluster and registers of the architecture suffice."""
    smem = config.ctas_per_sm * (config.smem_bytes(spec) + 1024)
    if config.cluster > arch.max_cluster or smem > arch.smem_per_sm:
        return False
    if config.smem_bytes(spec) > arch.smem_bytes:
        return False
    if config.ctas_per_sm * config.num_threads > arch.max_threads_per_sm:
        return False
    if not config.keep and config.tiling(spec).values > LONG_VALUES:
        return False
    held = [spec.weight, spec.x, spec.dout, spec.dresidual_out] if config.keep else []
    words = spec.column_sums + sum(dtypes.width(name) / 32 for name in held if name)
    return config.tiling(spec).values * words <= config.registers - (56 if config.keep else 72)


def _ranked_bwd(spec: RMSNormBwdSpec) -> Iterator[BwdConfig]:
    """Configurations that could serve, best first."""
    inputs = (spec.x, spec.dout, spec.dresidual_out)
    bits = min(min(spec.vec * dtypes.width(name), 8 * spec.align) for name in inputs if name)
    ring = (2, 1, 0) if bits >= 32 else (0,)  # cp.async moves at least 4 bytes
    if 8192 < spec.n <= 65536:  # two CTAs per SM hide each other's exchange over the cluster
        for split in clusters(spec.n, 4096):
            threads = _threads(-(-spec.n // split), spec.vec, 16, low=32, high=256)
            for stages in ring:
                yield BwdConfig(threads, 1, split, 1, stages, True, 2)
    for values in (16, 32):
        for split in clusters(spec.n, 512 * values):
            low = max(1, 32 // spec.vec)
            threads = _threads(-(-spec.n // split), spec.vec, values, low=low, high=512)
            rows = max(1, 256 // threads) if split == 1 else 1
            peers = 8 if split == 1 else 1
            for stages in ring:
                for ctas in (2, 1) if threads * rows <= 256 else (1,):
                    yield BwdConfig(threads, rows, split, peers, stages, True, ctas)
    for split in reversed(list(clusters(spec.n, 256 * LONG_VALUES))):
        yield BwdConfig(256, split=split, keep=False)


def candidates(
    spec: RMSNormFwdSpec | RMSNormBwdSpec, arch: Arch
) -> list[FwdConfig] | list[BwdConfig]:
    """Configurations worth timing against the default, which comes first; all fit ``arch``."""
    if isinstance(spec, RMSNormFwdSpec):
        forward = [
            default_fwd(spec, arch),
            *filter(lambda c: fits_fwd(c, spec, arch), _tries(spec)),
        ]
        return list(dict.fromkeys(forward))
    first, found = default_bwd(spec, arch), []
    for stages in (1, 2, 3) if first.stages else (0,):
        for threads in (256, 512):
            for split in clusters(spec.n, threads * 32) if first.split > 1 else (1,):
                rows = max(1, threads // first.threads_per_row) if first.split == 1 else 1
                per_row = first.threads_per_row if first.split == 1 else threads
                for ctas in (1, 2, 4):
                    peers = 1 if split > 1 else 8
                    found.append(BwdConfig(per_row, rows, split, peers, stages, first.keep, ctas))
    fitting = filter(lambda c: fits_bwd(c, spec, arch), found)
    return list(dict.fromkeys([first, *fitting]))


def _tries(spec: RMSNormFwdSpec) -> Iterator[FwdConfig]:
    shifted = spec.odd and spec.n >= MIN_SHIFTED
    for cluster in clusters(spec.n, 20480):
        for threads in (32, 64, 128, 256, 512):
            rows = max(1, 128 // threads) if cluster == 1 else 1
            yield FwdConfig(threads, rows, cluster, shifted)
            if threads > 64 and not spec.per_head:
                for stages, ctas in ((1, 0), (2, 0), (1, 2), (2, 2), (2, 3)):
                    yield FwdConfig(threads, 1, cluster, False, stages, ctas)


def clusters(n: int, cols: int) -> Iterator[int]:
    """Powers of two up to 16, from the one that leaves at most ``cols`` columns to each CTA."""
    cluster = 1
    while cluster <= 16:
        if n <= cols * cluster:
            yield cluster
        cluster *= 2


def _threads(n: int, vec: int, values: int, low: int = 1, high: int = 1024) -> int:
    """The fewest threads that hold at most ``values`` elements each: whole warps if more than one."""
    needed = max(1, -(-n // max(values, vec)))
    if needed <= WARP:
        return max(low, 1 << (needed - 1).bit_length())
    vectors = -(-n // (WARP * vec))  # of a warp
    return min(high, max(low, WARP * -(-vectors // max(1, values // vec))))
