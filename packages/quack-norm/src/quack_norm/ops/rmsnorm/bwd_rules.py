"""Which configuration a backward kernel gets."""

from collections.abc import Iterator

from quack_core import dtypes
from quack_core.arch import Arch
from quack_norm.ops.row_map.rules import clusters, threads_for

from .bwd_config import BwdConfig
from .bwd_spec import RMSNormBwdSpec
from .rules import unsupported

LONG_VALUES = 64
"""Columns per thread that a backward without kept rows may sum; twice as many spill."""


def default_bwd(spec: RMSNormBwdSpec, arch: Arch) -> BwdConfig:
    """The configuration for a spec on an architecture.

    Raises:
        UnsupportedError: no configuration fits the architecture.
    """
    for config in _ranked_bwd(spec):
        if fits_bwd(config, spec, arch):
            return config
    raise unsupported("backward", spec.n, arch)


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
    spare = 72 if not config.keep else 64 if spec.centred else 56
    return config.tiling(spec).values * words <= config.registers - spare


def _ranked_bwd(spec: RMSNormBwdSpec) -> Iterator[BwdConfig]:
    """Configurations that could serve, best first."""
    inputs = (spec.x, spec.dout, spec.dresidual_out)
    bits = min(min(spec.vec * dtypes.width(name), 8 * spec.align) for name in inputs if name)
    ring = (2, 1, 0) if bits >= 32 else (0,)  # cp.async moves at least 4 bytes
    if 8192 < spec.n <= 65536:  # two CTAs per SM hide each other's exchange over the cluster
        for split in clusters(spec.n, 4096):
            threads = threads_for(-(-spec.n // split), spec.vec, 16, low=32, high=256)
            for stages in ring:
                yield BwdConfig(threads, 1, split, 1, stages, True, 2)
    for values in (16, 32):
        for split in clusters(spec.n, 512 * values):
            low = max(1, 32 // spec.vec)
            threads = threads_for(-(-spec.n // split), spec.vec, values, low=low, high=512)
            rows = max(1, 256 // threads) if split == 1 else 1
            peers = 8 if split == 1 else 1
            for stages in ring:
                for ctas in (2, 1) if threads * rows <= 256 else (1,):
                    yield BwdConfig(threads, rows, split, peers, stages, True, ctas)
    for split in reversed(list(clusters(spec.n, 256 * LONG_VALUES))):
        yield BwdConfig(256, split=split, keep=False)


def candidates(spec: RMSNormBwdSpec, arch: Arch) -> list[BwdConfig]:
    """Configurations worth timing against the default, which comes first; all fit ``arch``."""
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
