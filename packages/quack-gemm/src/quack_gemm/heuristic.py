"""Which configuration a GEMM gets, without timing anything: candidates, and a model of their cycles.

Pure Python, and no table of shapes. The model is coarse; what it has to get right is the order of
candidates: whole waves of tiles, how fast small tiles are fed, how much of the storing is hidden.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quack_core import dtypes
from quack_core.arch import Arch
from quack_core.errors import ShapeError, UnsupportedError

from .config import ATOM_M, MOST_CTAS, SWIZZLE_BYTES, GemmConfig, SplitK
from .spec import GemmSpec

FMA_PER_CYCLE = 2048
"""16-bit multiplications and additions of an SM's tensor cores per cycle; twice as many in 8 bits.
Source: H100 data sheet, 989 TFLOP/s dense in bf16 at 1.83 GHz on 132 SMs."""
SHARED_BYTES = 128
"""That the tensor cores read from shared memory per cycle. Source: CUDA programming guide."""

# The others are fitted to times of all candidates for 57 random shapes on one H200, as cycles of
# 1755 MHz (``python -m benchmarks sweep gemm_small --shapes random:2:24``, ``random:5:30`` and like
# them); no shape of a suite is among them, but of `COMMON`, which 128x4096x14336 showed.
LAUNCH_CYCLES = 4550
"""Launch, first loads, and the last store's way to memory."""
PORT_BYTES = 66
"""Into an SM's shared memory per cycle."""
L2_BYTES = 7000
"""Out of L2 per cycle."""
STRADDLING = 1.4
"""How much more those are whose rows do not begin at lines of 128 bytes."""
COMMON = 0.5
"""And how much less, if all SMs read the same at about the same time."""
LINE_BITS = 1024
DRAM_BYTES = 2650
"""Per cycle."""
STEP_CYCLES = 50
"""Of a stage, beside its products."""
PROMOTE_CYCLES = {True: 300, False: 80}
"""More, where its sums are added in full float32, with ping-pong (nobody multiplies meanwhile) and
without. Source: on the H200, tiles of 64x192 with turns took 700 cycles for the 384 that they multiply, those
of 128x192 without 930 for 768."""
CLUSTER_CYCLES = 75
"""For each CTA of a cluster but the first one: they begin and leave together."""
IDLE_GAIN = 0.2
"""How much faster SMs are when hardly any other one works: power limits their clock."""
SHARED_TILE = 1.09
"""How much longer warpgroups multiply that begin and end together."""
STORE_RATE = 13
"""Sums per cycle that the warpgroups of an SM round, write and store."""
PIECE_CYCLES = 80
"""For each piece that they store at a time: they wait for one another."""
TURN_CYCLES = 590
"""From one warpgroup's products to the other one's."""
EXCHANGE_BYTES = 13.6
"""Per cycle from an SM to others of its cluster."""
STEEP = 4
"""How little the lesser of the limits of a stage count, as an exponent."""
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15}
"""Clusters of so many CTAs at a time on ``SMS`` SMs: each stays in a group of SMs, of 16 or 18.
Source: quack_core.occupancy on the H200."""
SMS = 132


LEAST_BYTES = 112 << 10
"""In stages: fewer do not hide the latency of memory, which the model does not know. An SM takes 66 bytes
per cycle, some 1500 cycles late."""

SPLITS = (1, 2, 4, 8)
"""Parts of K that are considered. Clusters of 3 and of 6 CTAs took 1.2 times as long as their work, on the
average of 400 timed kernels: they leave more SMs without work than the count of clusters says."""

RANGES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Parts of K in memory that are considered: two thirds or more of any number of SMs get one, and few
kernels are compiled."""
MOST_CHOICES = 3
"""Of them for a tile: the largest ones of a single wave. More parts take more memory for less work."""
SUM_CYCLES = 3860
"""The kernel that adds parts, beside what it reads. Source: 2.2 us at 1755 MHz, the fixed time of a launch
in the floors of all suites."""
L2_CAPACITY = 50 << 20
"""Bytes; more parts than that go through DRAM. Source: H100 data sheet."""
CLEARLY = 1.1
"""By how much the model must find them faster than all others: a margin, as it was fitted to no times of
such kernels."""


@dataclass(frozen=True)
class Problem:
    """What decides on a configuration.

    Args:
        m, n, k: of the product; n counts gates as well.
        batches: matrices.
        spec: what is computed.
        sms: SMs of the device.
    """

    m: int
    n: int
    k: int
    batches: int
    spec: GemmSpec
    sms: int


def check_arch(arch: Arch) -> None:
    """Raise where there are no kernels.

    Raises:
        UnsupportedError: names the architecture, and the way out.
    """
    if not arch.wgmma:
        raise UnsupportedError(
            f"gemm on {arch.name}", "there are kernels for sm90 only", "use torch.matmul"
        )


def default(problem: Problem, arch: Arch, split_k: int | None = None) -> GemmConfig:
    """The candidate with the fewest cycles.

    Args:
        split_k: only those with so many parts of K; None: any.

    Raises:
        ShapeError: none has so many parts.
        UnsupportedError: there are no kernels for the architecture.
    """
    check_arch(arch)
    found = [c for c in candidates(problem.spec) if split_k in (None, c.split_k)]
    if not found:
        there = sorted({config.split_k for config in candidates(problem.spec)})
        raise ShapeError(
            f"gemm: split_k is {split_k}: with such operands it must be one of {there}"
        )
    count, best = _least(problem, found)
    apart = separate(problem) if split_k is None else ()
    if apart:
        fewer, other = _least(problem, apart)
        best = other if fewer * CLEARLY < count else best
    return best


def _least(problem: Problem, configs: Sequence[GemmConfig]) -> tuple[float, GemmConfig]:
    """The fewest cycles, and the first configuration that takes as many."""
    counts = [cycles(problem, config) for config in configs]
    least = min(counts)
    return least, configs[counts.index(least)]


@functools.cache
def candidates(spec: GemmSpec) -> tuple[GemmConfig, ...]:
    """All configurations that fit, do not spill, and have stages enough, in the order of their texts.

    Those whose parts of K go through memory are in `separate`, as their number depends on the sizes.
    """
    return tuple(sorted([config for config in _all(spec) if _fits(config, spec)], key=repr))


def separate(problem: Problem) -> tuple[GemmConfig, ...]:
    """Configurations with parts of K in memory, whose tiles are so few that all run at a time."""
    found = []
    for config in tiles_apart(problem.spec):
        across, down = _clusters(problem, config)
        room = _resident(problem, config) // (across * down * problem.batches)
        most = min(room, math.ceil(problem.k / config.tile_k(problem.spec)))
        fitting = [ranges for ranges in RANGES if ranges <= most]
        found += [replace(config, split_k=ranges) for ranges in fitting[-MOST_CHOICES:]]
    return tuple(found)


@functools.cache
def tiles_apart(spec: GemmSpec) -> tuple[GemmConfig, ...]:
    """Those of `separate`, with two parts each."""
    tiles = [(m, n, 1, False) for m in (64, 128) for n in (64, 128, 256)]
    tiles += [(128, 256, 2, False), (256, 128, 1, False)]
    tiles += [(128, n, 1, True) for n in (16, 32, 64, 128)]  # rows of a as columns
    found = [
        GemmConfig(m, n, cluster_m, swap=swap, split_k=2, split_mode=SplitK.SEPARATE)
        for m, n, cluster_m, swap in tiles
    ]
    return tuple(sorted([config for config in found if _fits(config, spec)], key=repr))


def _all(spec: GemmSpec) -> Iterator[GemmConfig]:
    clusters = ((1, 1), (2, 1), (1, 2))
    for tile_m, tile_n in (
        *((64, n) for n in (64, 128, 192, 256)),
        *((128, n) for n in (64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256)),
        *((256, n) for n in (64, 96, 128)),
        *((192, n) for n in (128, 160)),
    ):
        for cluster_m, cluster_n in clusters:
            for pingpong in (False, True):
                if pingpong and (tile_m > 128 or tile_m * tile_n > 128 * 192):
                    continue
                yield GemmConfig(tile_m, tile_n, cluster_m, cluster_n, pingpong)
    if not (spec.gated or spec.doubled):
        for tile_n in (16, 32, 48, 64, 80, 96, 128, 160, 192, 256):  # rows of a as columns
            for tile_m in (64, 128):
                for cluster_m in (1, 2):
                    for split_k in SPLITS:
                        if cluster_m * split_k <= MOST_CTAS:
                            one = (tile_m, tile_n, cluster_m, 1)
                            yield GemmConfig(*one, swap=True, split_k=split_k)
    for tile_m, tile_n in ((64, 64), (64, 128), (128, 64), (128, 128)):
        for split_k in SPLITS[1:]:
            yield GemmConfig(tile_m, tile_n, 1, 1, split_k=split_k)
    for tile_m, tile_n in ((128, 128), (128, 192), (128, 256)):
        for cluster_m, cluster_n in clusters[1:]:
            yield GemmConfig(tile_m, tile_n, cluster_m, cluster_n, split_k=2)


def _fits(config: GemmConfig, spec: GemmSpec) -> bool:
    try:
        config.check(spec)
    except ValueError:
        return False
    product = config.product(spec)
    _, along_k = _along_k(config, product)
    if not along_k and config.tile_n > ATOM_M and config.tile_n % ATOM_M:
        return False  # read 16 or 32 columns at a time: on the H200 1.5 times as long with 176
    return config.depth(product) * config.stage_bytes(product) >= LEAST_BYTES


def cycles(problem: Problem, config: GemmConfig) -> float:
    """About how many cycles a launch takes."""
    spec = config.product(problem.spec)
    across, down = tiles = _clusters(problem, config)
    clusters = across * (across + 1) // 2 if spec.symmetric else across * down
    clusters *= problem.batches * config.ranges
    loaded = _loaded(problem, config, tiles)
    steps = math.ceil(math.ceil(problem.k / config.tile_k(spec)) / config.split_k)
    of_sm = _multiply(config, spec), _read(config, spec), config.stage_bytes(spec) / PORT_BYTES
    beside = STEP_CYCLES
    if dtypes.width(spec.a) == 8:
        beside += PROMOTE_CYCLES[config.pingpong]
    store, of_cluster = _store(config, spec), _traffic(problem) / clusters / DRAM_BYTES

    def round_of(count: int) -> float:
        """So many clusters at a time, a tile each."""
        ctas = count * config.cluster
        from_l2 = loaded * ctas / L2_BYTES
        step = sum(limit**STEEP for limit in (*of_sm, from_l2)) ** (1 / STEEP)
        step *= 1 - IDLE_GAIN * (1 - ctas / problem.sms)
        body = math.hypot(steps * (beside + step), of_cluster * count)
        return max(body + TURN_CYCLES, store) if config.pingpong else body + store

    resident = max(1, _resident(problem, config))
    full, rest = divmod(clusters, resident)
    total = full * round_of(resident) + (round_of(rest) if rest else 0)
    total += store if config.pingpong else 0  # nothing is multiplied beside the last one
    if config.split_mode == SplitK.SEPARATE:
        total += _sum(problem, config)
    return total + LAUNCH_CYCLES + CLUSTER_CYCLES * (config.cluster - 1)


def _loaded(problem: Problem, config: GemmConfig, clusters: tuple[int, int]) -> float:
    """Bytes of a stage that a CTA reads from L2, weighted as of `STRADDLING` and `COMMON`.

    Args:
        clusters: as of `_clusters`.
    """
    spec = config.product(problem.spec)
    rows, cols = _sides(problem, config)
    across, down = clusters

    def of(size: int, tile: int, tiles: int, cluster: int, others: int, contiguous: int) -> float:
        valid = min(1, size / (tiles * tile * cluster))
        weight = 1.0 if contiguous * dtypes.width(spec.a) % LINE_BITS == 0 else STRADDLING
        return tile * valid / others * weight * (COMMON if tiles == 1 else 1.0)

    rows_along_k, cols_along_k = _along_k(config, spec)
    length_a = problem.k if rows_along_k else rows
    length_b = problem.k if cols_along_k else cols
    a = of(rows, config.tile_m, across, config.cluster_m, config.cluster_n, length_a)
    b = of(cols, config.tile_n, down, config.cluster_n, config.cluster_m, length_b)
    return (a + b) * SWIZZLE_BYTES


def _sides(problem: Problem, config: GemmConfig) -> tuple[int, int]:
    """Rows and columns of the product that is computed."""
    return (problem.n, problem.m) if config.swap else (problem.m, problem.n)


def _along_k(config: GemmConfig, spec: GemmSpec) -> tuple[bool, bool]:
    """Whether K is contiguous in the operand of the product's rows, and in that of its columns."""
    found = spec.a_major == "row", spec.b_major == "column"
    return found[::-1] if config.swap else found


def _clusters(problem: Problem, config: GemmConfig) -> tuple[int, int]:
    """Of a matrix: along the rows of the product that is computed, and along its columns."""
    rows, cols = _sides(problem, config)
    across = math.ceil(rows / (config.tile_m * config.cluster_m))
    return across, math.ceil(cols / (config.tile_n * config.cluster_n))


def _resident(problem: Problem, config: GemmConfig) -> int:
    """Clusters at a time."""
    return RESIDENT[config.cluster] * problem.sms // SMS


def _sum(problem: Problem, config: GemmConfig) -> float:
    """The kernel that adds parts."""
    parts = problem.m * problem.n * problem.batches * config.ranges * 4
    if parts > L2_CAPACITY:  # they are written there as well
        return SUM_CYCLES + 2 * parts / DRAM_BYTES
    return SUM_CYCLES + parts / L2_BYTES


def _multiply(config: GemmConfig, spec: GemmSpec) -> float:
    """Of a stage, in the tensor cores."""
    rate = FMA_PER_CYCLE * 16 / dtypes.width(spec.a)
    multiply = config.tile_m * config.tile_n * config.tile_k(spec) / rate
    return multiply if config.pingpong else multiply * SHARED_TILE


def _read(config: GemmConfig, spec: GemmSpec) -> float:
    """Of a stage, until the tensor cores have their operands."""
    instructions = config.tile_m // ATOM_M * (config.tile_k(spec) * dtypes.width(spec.a) // 256)
    return instructions * (ATOM_M + config.tile_n) * 32 / SHARED_BYTES


@functools.cache  # independent of sizes, and half of the time of a choice
def _store(config: GemmConfig, spec: GemmSpec) -> float:
    """Of a tile: what comes behind its products."""
    sums = config.tile_m * config.tile_n
    each = sums / STORE_RATE + config.pieces(spec) * PIECE_CYCLES
    each *= len(spec.outputs) + spec.symmetric
    if config.peers == 1:
        return each
    sent = sums * 4 * (config.peers - 1) / config.peers
    return sent / EXCHANGE_BYTES + each / config.shares(spec)


def _traffic(problem: Problem) -> float:
    """Bytes that have to pass through DRAM."""
    m, n, k = problem.m, problem.n, problem.k
    read = (m + n) * k * dtypes.width(problem.spec.a) / 8
    written = sum(m * n * dtypes.width(name) / 8 for name in problem.spec.outputs)
    return problem.batches * (read + written)
