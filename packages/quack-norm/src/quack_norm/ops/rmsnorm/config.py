"""How an RMSNorm kernel computes: frozen configurations and the rules that choose them.

A rule sees N, which operands there are, their dtypes and the architecture; never the number of rows
or where they lie: the same row gives the same bits in every batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quack_core import dtypes, occupancy
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError
from quack_core.reduction.tiling import WARP, RowTiling

from .spec import RMSNormBwdSpec, RMSNormFwdSpec

HELD_VALUES = 32
"""Elements per thread from which the one-tile kernel takes weight and residual piece by piece."""
LONG_VALUES = 64
"""Columns per thread that a backward without kept rows may sum; twice as many spill."""
MIN_SHIFTED = 256
"""Shorter rows without full vectors move element by element."""
KB = 1024
REGISTERS = 65536
"""Of an SM."""
MIN_RING = 8 * KB
"""Bytes of a row from which CTAs stay and keep the weight in registers."""
MIN_ADDED_RING = 16 * KB + 1
"""The same where a residual is added."""
MIN_ODD_RING = 8 * KB - 512
"""The same for rows that are no whole number of vectors."""


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
        return occupancy.most_registers(REGISTERS, self.num_threads, max(1, self.ctas_per_sm))

    @property
    def state_ints(self) -> int:
        """Counters of the kernel: clusters that left, rows drawn."""
        return 2 * self.persistent

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that ``ctas_per_sm`` fit."""
        return occupancy.most_registers(REGISTERS, self.num_threads, max(1, self.ctas_per_sm))

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
        return occupancy.most_registers(REGISTERS, self.num_threads, self.ctas_per_sm)

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
        return values * words <= config.registers - 40
    words = 1 + (dtypes.width(spec.residual) / 32 if spec.residual else 0)  # x becomes float32
    return values * words <= config.registers - 32


def _ranked_fwd(spec: RMSNormFwdSpec) -> Iterator[FwdConfig]:
    """Configurations that could serve, best first."""
    row_bytes, whole = spec.n * dtypes.width(spec.x) // 8, spec.vec == spec.full_vector
    least = MIN_ADDED_RING if spec.residual else MIN_RING
    if not spec.per_head and row_bytes >= (least if whole else MIN_ODD_RING):
        yield from _rings(spec, whole)
    if not whole and spec.n >= MIN_SHIFTED:
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


def _rings(spec: RMSNormFwdSpec, whole: bool) -> Iterator[FwdConfig]:
    """CTAs that stay: about 48 KB of rows in shared memory, on one CTA per SM or few.

    Where threads shift what they read and write, rows take longer, and other CTAs fill the gaps.
    """
    width = dtypes.width(spec.x) // 8
    row_bytes = spec.n * width
    if whole:
        most = 24 * KB if row_bytes <= 24 * KB else 16 * KB if row_bytes <= 64 * KB else 32 * KB
    else:
        most = 32 * KB if row_bytes <= 32 * KB else 16 * KB
    for cluster in (c for size in (most, 32 * KB, 64 * KB) for c in clusters(spec.n, size // width)):
        cols = -(-spec.n // cluster)
        size = cols * width
        small = size <= (16 * KB if whole else 9 * KB)
        most_ctas = (2 if size <= 12 * KB else 1) if whole else 3 if small else 2 if size <= 16 * KB else 1
        threads = _threads(cols, spec.full_vector, (32 if small else 64) // width, low=WARP)
        for ctas in range(most_ctas, 0, -1):
            stages = max(2, min(3, 48 * KB // (ctas * size))) if whole else 2
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
    shifted = spec.vec < spec.full_vector and spec.n >= MIN_SHIFTED
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
