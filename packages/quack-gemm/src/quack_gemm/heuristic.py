"""Which configuration a GEMM gets, without timing anything: candidates, and a model of their cycles.

Pure Python, and no table of shapes. The model is coarse; what it has to get right is the order of
candidates: whole waves of tiles, how fast small tiles are fed, how much of the storing is hidden.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from quack_core import dtypes
from quack_core.arch import Arch
from quack_core.errors import ShapeError, UnsupportedError

from .config import ATOM_M, GemmConfig
from .spec import GemmSpec

FMA_PER_CYCLE = 2048
"""16-bit multiplications and additions of an SM's tensor cores per cycle; twice as many in 8 bits.
Source: H100 data sheet, 989 TFLOP/s dense in bf16 at 1.83 GHz on 132 SMs."""
SHARED_BYTES = 128
"""That the tensor cores read from shared memory per cycle. Source: CUDA programming guide."""
L2_BYTES = 32
"""Per cycle and SM, when all of them load. Source: 5.5 to 7 TB/s measured on the H200 by others."""
DRAM_BYTES = 18
"""Per cycle and SM. Source: 4.28 TB/s of a copy on one H200 at 1.8 GHz, on 132 SMs."""
FILL_CYCLES = 1400
"""From a tile's first load to its first product: latency of TMA and of DRAM."""
STORE_CYCLES = 700
"""Of a tile, however small: barriers, TMA."""
COLLECT_CYCLES = 2500
"""For a part to be visible and counted: an atomic addition with a fence."""
STORE_RATE = 24
"""Sums per cycle that the warpgroups of an SM round, write and store."""


SPLITS = (1, 2, 3, 4, 6, 8)
"""Parts of K that are considered."""


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
        raise ShapeError(f"gemm: split_k is {split_k}: it must be one of {SPLITS}")
    return min(found, key=lambda config: (cycles(problem, config), repr(config)))


@functools.cache
def candidates(spec: GemmSpec) -> tuple[GemmConfig, ...]:
    """All configurations that fit, and do not spill."""
    return tuple(config for config in _all(spec) if _fits(config, spec))


def _all(spec: GemmSpec) -> Iterator[GemmConfig]:
    clusters = ((1, 1), (2, 1), (1, 2))
    for tile_m, tile_n in (
        *((64, n) for n in (64, 128, 192, 256)),
        *((128, n) for n in (64, 96, 128, 160, 192, 208, 224, 256)),
        *((256, n) for n in (64, 96, 128)),
        *((192, n) for n in (128, 160)),
    ):
        for cluster_m, cluster_n in clusters:
            for pingpong in (False, True):
                if pingpong and (tile_m > 128 or tile_m * tile_n > 128 * 192):
                    continue
                yield GemmConfig(tile_m, tile_n, cluster_m, cluster_n, pingpong)
    if not (spec.gated or spec.doubled):
        for tile_n in (16, 32, 64, 96, 128):  # rows of a as columns
            for tile_m in (64, 128):
                for cluster_m in (1, 2):
                    for split_k in SPLITS:
                        yield GemmConfig(tile_m, tile_n, cluster_m, 1, swap=True, split_k=split_k)
    for tile_m, tile_n in ((64, 64), (64, 128), (128, 64), (128, 128)):
        for split_k in SPLITS[1:]:
            yield GemmConfig(tile_m, tile_n, 1, 1, split_k=split_k)


def _fits(config: GemmConfig, spec: GemmSpec) -> bool:
    try:
        config.check(spec)
    except ValueError:
        return False
    return True


def cycles(problem: Problem, config: GemmConfig) -> float:
    """About how many cycles a launch takes."""
    spec = problem.spec
    rows, cols = (problem.n, problem.m) if config.swap else (problem.m, problem.n)
    bytes_k = dtypes.width(spec.a) / 8 * problem.k
    across = math.ceil(rows / (config.tile_m * config.cluster_m))
    down = math.ceil(cols / (config.tile_n * config.cluster_n))
    clusters = across * down * problem.batches
    resident = max(1, problem.sms // config.cluster)
    rounds = math.ceil(clusters * config.split_k / resident)

    k_steps = math.ceil(math.ceil(problem.k / config.tile_k(spec)) / config.split_k)
    multiply = k_steps * _step_cycles(config, spec)
    loaded = config.tile_m / config.cluster_n + config.tile_n / config.cluster_m
    load = loaded * bytes_k / config.split_k / L2_BYTES
    store = STORE_CYCLES + config.tile_m * config.tile_n / STORE_RATE * len(spec.outputs)
    if config.split_k > 1:  # float32 parts are written, and read by one
        part = config.tile_m * config.tile_n * 4 / L2_BYTES
        store += COLLECT_CYCLES + part * (1 + config.split_k)
    body = max(multiply, load)
    per_tile = max(body, store) if config.pingpong else body + store
    if config.pingpong:  # two tiles at a time: the first one waits for nobody, the last one stores
        total = rounds * per_tile + store
    else:
        total = rounds * per_tile
    traffic = (rows + cols) * bytes_k * problem.batches + sum(
        problem.m * problem.n * dtypes.width(name) / 8 for name in spec.outputs
    ) * problem.batches
    busy = min(problem.sms, clusters * config.cluster * config.split_k)
    return FILL_CYCLES + max(total, traffic / (DRAM_BYTES * busy))


def _step_cycles(config: GemmConfig, spec: GemmSpec) -> float:
    """Of a stage: as fast as the tensor cores multiply, or as they get their operands."""
    rate = FMA_PER_CYCLE * 16 / dtypes.width(spec.a)
    multiply = config.tile_m * config.tile_n * config.tile_k(spec) / rate
    instructions = config.tile_m // ATOM_M * (config.tile_k(spec) * dtypes.width(spec.a) // 256)
    read = instructions * (ATOM_M + config.tile_n) * 32 / SHARED_BYTES
    return max(multiply, read)
