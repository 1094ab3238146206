"""What the five steps share: operands, compiling, checking against float64, timing. Not an idea."""

import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cutlass import Boolean, Int32, Int64, cute
from torch import Tensor

from quack_core import arch as arches
from quack_core.arch import Arch
from quack_core.device import copy
from quack_core.jit import cache
from quack_core.jit.compile import Compiled, compile_kernel, symbolic
from quack_core.jit.dsl import sym_int
from quack_core.reduction.tiling import RowTiling
from quack_core.testing import cubin
from quack_core.testing.inputs import random

TARGETS = ("sm_90a", "sm_100a", "sm_120a")
SHUFFLES = 5  # that 32 lanes need: 2**5
ROUNDING = 2.0**-24  # of one addition in float32, relative
MEETINGS = ("shfl", "bar", "st.async", "atom")  # instructions by which threads meet
BYTES = 2**29  # of a matrix to time: no cache holds it


@dataclass(frozen=True)
class Sum:
    """What to compute: the sum of each row of a float32 matrix (M, n), or of all of it."""

    level: str
    n: int

    @property
    def name(self) -> str:
        """Kernel name."""
        return f"sum_{self.level}_n{self.n}"


def row_operands(x: Tensor) -> tuple[Tensor, ...]:
    """What a kernel that sums rows is called with; the result comes last."""
    return x, x.new_empty(len(x))


@dataclass(frozen=True)
class Step:
    """One file of the staircase.

    Args:
        level: its module.
        tiling: how a row of n elements is spread over threads.
        additions: on the longest way from an element to the sum, by tiling and number of rows.
        lengths: of rows, to compile or to time.
        operands: what the kernel is called with for a matrix; the result comes last.
    """

    level: str
    tiling: Callable[[int], RowTiling]
    additions: Callable[[RowTiling, int], int]
    lengths: tuple[int, ...]
    operands: Callable[[Tensor], tuple[Tensor, ...]] = row_operands


def row_arguments(n: int) -> tuple[Any, Any]:
    """Symbolic arguments: any number of rows of n elements, and a sum for each."""
    rows = sym_int()
    return symbolic("float32", (rows, n)), symbolic("float32", (rows,), align=4)


def load_row(mX: cute.Tensor, row: Int32, tiling: RowTiling, thread: Int32, rank: Any = 0) -> Any:
    """A thread's vectors of a row, in registers; zeros beyond its end."""
    start = mX[Int64(row), None].iterator + rank * tiling.cols
    pred = None  # all vectors exist
    if tiling.ragged:
        pred = copy.column_predicate(tiling, thread, rank, Boolean(True))
    return copy.load_vectors(start, tiling, thread, copy.CHUNK, pred).load()


def compiled(step: Step, n: int, arch: Arch) -> Compiled:
    """The kernel of a step, with its assembly and machine code."""
    with tempfile.TemporaryDirectory() as folder:
        spec, tiling = Sum(step.level, n), step.tiling(n)
        return compile_kernel(step.level, spec, tiling, arch, dump_dir=Path(folder))


def inspect(step: Step) -> None:
    """Compile for three architectures; print registers, memory accesses and what reduces."""
    print(f"  {'target':>8}{'n':>8}{'registers':>11}  bits of a memory access; threads meet by")
    for target, n in itertools.product(TARGETS, step.lengths):
        kernel = compiled(step, n, arches.get(target))
        facts = cubin.static_facts(kernel.cubin or b"")
        accesses = sorted(facts.accesses.items())
        widths = (f"{name} {'/'.join(map(str, sorted(bits)))}" for name, bits in accesses)
        used = (name for name in MEETINGS if f"{name}." in (kernel.ptx or ""))
        cells = f"{', '.join(widths)}; {', '.join(used) or 'nothing'}"
        print(f"  {target:>8}{n:>8}{facts.usage.registers:>11}  {cells}", flush=True)


def check(step: Step, n: int, rows: int) -> tuple[Callable[[], object], float]:
    """Compare with float64 on this GPU.

    Returns:
        A call of the kernel on the same operands, and its error as a share of what is allowed.

    Raises:
        AssertionError: a sum is off by more than its additions can round.
    """
    tiling = step.tiling(n)
    function = cache.load(step.level, Sum(step.level, n), tiling, arches.detect())
    operands = step.operands(random((rows, n), torch.float32, "cuda", seed=n, shift=0.5))
    function(*operands)
    x, found = operands[0], operands[-1].double()
    terms = x.view(len(found), -1)
    exact, absolute = (t.sum(-1, dtype=torch.float64) for t in (terms, terms.abs()))
    # k additions that round one after another leave at most k * 2**-24 of what they add.
    allowed = step.additions(tiling, rows) * ROUNDING * absolute
    share = ((found - exact).abs() / allowed).max().item()
    assert share <= 1, f"{step.level}, {rows} x {n}: {share:.3g} times the error that is allowed"
    return lambda: function(*operands), share


def measure(step: Step) -> None:
    """Print errors, where 1 is what is allowed, and how fast the matrix is read."""
    print(f"  {'rows':>8}{'n':>8}{'error':>9}{'GB/s':>8}")
    for n in step.lengths:
        rows = BYTES // (4 * n)
        call, share = check(step, n, rows)
        print(f"  {rows:>8}{n:>8}{share:>9.3f}{BYTES / 1e9 / seconds(call):>8.0f}", flush=True)


def seconds(call: Callable[[], object], launches: int = 20) -> float:
    """Time on the GPU: the median of the launches."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    for mark in marks:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    return statistics.median(times) / 1e3


def main(step: Step) -> None:
    """On a GPU: check and time. Without one: compile and inspect."""
    (measure if torch.cuda.is_available() else inspect)(step)
