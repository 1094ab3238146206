"""Which configuration a cross-entropy kernel gets."""

from collections.abc import Iterator
from dataclasses import replace

from quack_core import dtypes
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError
from quack_core.reduction.tiling import WARP
from quack_norm.ops.row_map import rules
from quack_norm.ops.row_map.rules import threads_for

from .config import BwdConfig, FwdConfig, RescaleConfig, StreamConfig
from .spec import CrossEntropyBwdSpec, CrossEntropyFwdSpec, RescaleSpec

SLICE_BYTES = 52 * 1024
"""Of a row in the shared memory of a CTA, unless the cluster is at its portable limit."""
FEW_THREADS_BYTES = 40 * 1024
"""Up to here 128 threads are enough for a slice; more take longer to agree."""
HELD_BYTES = 8 * 1024
"""Of a row whose gradient is computed from registers, where a longer one waits in shared memory."""
MOST_CTAS = 5
"""On an SM, where they have 128 threads or more."""
UNROLL = 4
"""Vectors of 16 bytes that each thread has under way."""


def default_fwd(spec: CrossEntropyFwdSpec, arch: Arch) -> FwdConfig | StreamConfig:
    """The configuration for a spec on an architecture.

    Raises:
        UnsupportedError: rows do not fit the shared memory of a cluster.
    """
    best = replace(spec, align=16, in_phase=True, reduction="sum" if spec.dx else "none")
    held = spec.n * dtypes.width(spec.x) // 8 <= HELD_BYTES  # until the sum is known
    if not spec.smoothing and (held or not spec.dx):
        return _stream(spec, arch)
    for config in _staged(best):
        if rules.fits(config, best, arch):
            # `fits` knows that odd rows are shifted, not that these are.
            fewer = spec.align < 16 and not spec.odd
            return replace(config, ctas_per_sm=max(1, config.ctas_per_sm - fewer))
    raise UnsupportedError(
        f"cross_entropy, {spec.n} classes on {arch.name}",
        f"the shared memory of a cluster of {arch.max_cluster} CTAs cannot hold such a row",
        "split the vocabulary, or use torch.nn.functional.cross_entropy",
    )


def _staged(spec: CrossEntropyFwdSpec) -> Iterator[FwdConfig]:
    """Two batches or more for each CTA; slices of up to 52 KB, larger ones in clusters of 8."""
    width = dtypes.width(spec.x) // 8
    for cluster in (1, 2, 4, 8, 16):
        cols = -(-spec.n // cluster)
        if cols * width > SLICE_BYTES and cluster < 8:
            continue
        vectors = -(-cols // spec.full_vector)
        high = 128 if cols * width <= FEW_THREADS_BYTES else 256
        threads = threads_for(-(-vectors // (2 * UNROLL)), 1, 1, low=WARP, high=high)
        for ctas in range(min(16, 1024 // threads) if threads < 128 else MOST_CTAS, 0, -1):
            yield FwdConfig(threads, cluster=cluster, ctas_per_sm=ctas, unroll=UNROLL)


def _stream(spec: CrossEntropyFwdSpec, arch: Arch) -> StreamConfig:
    """As many threads as keep the last batch of a row full, with 64 registers each, or 80.

    Addresses may decide how many registers they have, but not on their number.
    """
    vectors = -(-spec.n // spec.full_vector)
    threads = min(256, threads_for(-(-vectors // UNROLL), 1, 1, low=WARP))
    full = -(-vectors // (256 * UNROLL)) * 256 * UNROLL < 1.1 * vectors
    if threads == 256 and (spec.odd or not full):
        threads = 128
    shifted = spec.odd or spec.align < 16
    plain = not (shifted or spec.dx or spec.softcap or spec.weight or spec.x == "float32")
    resident = 640  # elsewhere, registers go less far
    if arch.name == "sm90":
        resident = 1024 if plain else 768
    if shifted and spec.softcap:
        resident -= 128
    return StreamConfig(threads, UNROLL, min(32, resident // threads))


def default_bwd(spec: CrossEntropyBwdSpec, arch: Arch) -> BwdConfig:
    """The configuration for a spec on an architecture."""
    ctas = 3 if spec.odd and arch.name != "sm90" else 4
    return BwdConfig(128 if spec.n <= 4096 else 256, ctas_per_sm=ctas)


def default_rescale(spec: RescaleSpec, arch: Arch) -> RescaleConfig:
    """The configuration for a spec on an architecture."""
    return RescaleConfig()
