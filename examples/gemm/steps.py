"""What the six steps share: compiling, checking against float64, timing. Not an idea."""

import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tiling import Product, Tiling
from torch import Tensor

from quack_core import arch as arches
from quack_core import occupancy
from quack_core.jit import cache
from quack_core.jit.compile import Compiled, compile_kernel
from quack_core.testing import cubin
from quack_core.testing.inputs import poisoned_like, random

TARGET = "sm_90a"  # the only one with instructions of warpgroups
INSTRUCTIONS = r"\b(?:HGMMA\.\w+|UTMALDG\.2D(?:\.MULTICAST)?|UTMASTG\.2D|USETMAXREG\.\w+)"
LARGEST = 4  # integers of which every sum below K = 2**20 is exact in float32
CHECKED = (
    (128, 256, 64),  # one tile, one stage
    (1, 8, 8),
    (300, 264, 1000),  # parts of tiles and of stages
    (1200, 2056, 320),
)


@dataclass(frozen=True)
class Step:
    """One file of the staircase.

    Args:
        level: its module.
        tiling: its tiles.
        shapes: M, N and K to time.
        stays: CTAs walk over tiles; else each tile has its own.
    """

    level: str
    tiling: Tiling
    shapes: tuple[tuple[int, int, int], ...] = ((4096, 4096, 4096), (8192, 8192, 1024))
    stays: bool = False


def compiled(step: Step) -> Compiled:
    """The kernel of a step, with its assembly and machine code."""
    with tempfile.TemporaryDirectory() as folder:
        spec, arch = Product(step.level), arches.get(TARGET)
        return compile_kernel(step.level, spec, step.tiling, arch, dump_dir=Path(folder))


def inspect(step: Step) -> None:
    """Compile; print registers, spills and what multiplies, loads and stores."""
    code = compiled(step).cubin or b""
    facts = cubin.static_facts(code)
    found = sorted(set(re.findall(INSTRUCTIONS, cubin.sass(code))))
    print(f"  {'target':>8}{'registers':>11}{'spills':>8}  instructions")
    spills = "yes" if facts.spills else "no"
    print(f"  {TARGET:>8}{facts.usage.registers:>11}{spills:>8}  {', '.join(found)}", flush=True)


def multiplier(step: Step) -> Callable[[Tensor, Tensor, Tensor], object]:
    """The kernel on this GPU, as a function of A, B and D."""
    kernel = cache.load(step.level, Product(step.level), step.tiling, arches.detect())
    if not step.stays:
        return kernel
    tiling, device = step.tiling, torch.cuda.current_device()
    at_once = occupancy.resident_clusters(device, tiling.cluster, tiling.threads, tiling.smem_bytes)
    return lambda a, b, d: kernel(a, b, d, at_once)


def check(step: Step, m: int, n: int, k: int) -> None:
    """Compare with float64 on this GPU: of small integers every sum is exact, so D has to be as well.

    Raises:
        AssertionError: an element differs.
    """
    draws = (random((rows, k), torch.float32, "cuda", seed=rows) for rows in (m, n))
    a, b = ((2 * x).round().clamp(-LARGEST, LARGEST).bfloat16() for x in draws)
    d = poisoned_like(a.new_empty(m, n))
    multiplier(step)(a, b, d)
    right = (a.double() @ b.double().T).bfloat16()
    wrong = (d != right).sum().item()
    assert wrong == 0, f"{step.level}, {m} x {n} x {k}: {wrong} of {m * n} elements differ"


def measure(step: Step) -> None:
    """Check all sizes, then print how fast normally distributed operands are multiplied."""
    for size in (*CHECKED, *step.shapes):
        check(step, *size)
    print(f"  {'m':>8}{'n':>8}{'k':>8}{'TFLOP/s':>10}")
    for m, n, k in step.shapes:
        a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
        d, call = a.new_empty(m, n), multiplier(step)
        rate = 2e-12 * m * n * k / seconds(lambda call=call, a=a, b=b, d=d: call(a, b, d))
        print(f"  {m:>8}{n:>8}{k:>8}{rate:>10.0f}", flush=True)


def seconds(call: Callable[[], object], launches: int = 20) -> float:
    """Time on the GPU: the median of the launches."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    for mark in marks:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairwise(marks)) / 1e3


def main(step: Step) -> None:
    """On a GPU: check and time. Without one: compile and inspect."""
    (measure if torch.cuda.is_available() else inspect)(step)
