"""What a profiler sees of our kernels: the share of the peak that device memory reaches.

Nsight Compute runs this program again, with one marked call per case, and prints its counters. It
empties the caches before the call and leaves the clocks alone.
"""

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from . import families, judge, ours, record
from .shapes import Case

SHARE = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
NUM_BYTES = "dram__bytes.sum"
DURATION = "gpu__time_duration.sum"
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
TIMEOUT_S = 300.0
MISSING = "ncu is not on the PATH: it comes with the CUDA toolkit (Nsight Compute)"


@dataclass(frozen=True)
class Counters:
    """A kernel as the profiler saw it.

    Args:
        kernel: its name.
        dram_pct: per cent of the peak throughput of device memory.
        dram_bytes: that it moved; what is still in the L2 at the end is not among them.
        us: its duration.
    """

    kernel: str
    dram_pct: float
    dram_bytes: float
    us: float


def run(
    base: record.Record, suite: str, cases: Sequence[Case], argv: Sequence[str]
) -> list[record.Record]:
    """Records of all cases, or none without a profiler.

    Args:
        base: GPU, date and commit.
        argv: the command line, which the profiled process repeats.

    Raises:
        RuntimeError: the profiler failed, or did not see a kernel.
    """
    if shutil.which("ncu") is None:
        print(MISSING, file=sys.stderr)
        return []
    options = ("--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw")
    metrics = ("--metrics", f"{SHARE},{NUM_BYTES},{DURATION}")
    child = (sys.executable, "-m", "benchmarks", *argv, "--profiled")
    done = subprocess.run(
        ["ncu", *options, *metrics, *child],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = counters(done.stdout)
    if done.returncode:
        raise RuntimeError(
            f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}"
        )
    return [_record(base, suite, case, _of_case(found, case)) for case in cases]


def _of_case(found: Sequence[Counters], case: Case) -> Counters:
    """Our kernel among those of all cases, by its name.

    Raises:
        RuntimeError: it is not there.
    """
    name = families.of(case).spec_of(case).name
    for one in found:
        if name in one.kernel:
            return one
    raise RuntimeError(f"no kernel {name} among {', '.join(one.kernel for one in found) or 'none'}")


def counters(text: str) -> list[Counters]:
    """The kernels in what the profiler printed, in order.

    Raises:
        ValueError: a unit is unknown.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line[:1] == '"')))
    units = next(rows, {})
    return [
        Counters(
            row["Kernel Name"],
            float(row[SHARE]),
            _scaled(row[NUM_BYTES], units[NUM_BYTES], UNITS),
            _scaled(row[DURATION], units[DURATION], MICROSECONDS),
        )
        for row in rows
    ]


def _scaled(value: str, unit: str, units: dict[str, float]) -> float:
    if unit not in units:
        raise ValueError(f"unit {unit!r} is not one of {', '.join(units)}")
    return float(value.replace(",", "")) * units[unit]


def _record(base: record.Record, suite: str, case: Case, seen: Counters) -> record.Record:
    problem = families.problem(case)
    least = problem.read_bytes + problem.write_bytes
    return replace(
        base,
        suite=f"{suite}_profile",
        op=case.op,
        shape=list(case.shape),
        dtype=case.dtype,
        opts=dict(case.opts),
        variant="ours",
        method="ncu",
        us={"median": round(seen.us, 2)},
        rounds=1,
        launches=1,
        set_bytes=problem.set_bytes,
        min_bytes=least,
        floor_us=round(
            judge.floor_us(problem.read_bytes, problem.write_bytes, problem.flop, case.dtype), 2
        ),
        rate=round(seen.dram_bytes / seen.us * 1e-6, 3),
        rate_unit="TB/s of DRAM",
        dram_pct=round(seen.dram_pct, 2),
        config=str(ours.default_config(case)),
        note=seen.kernel,
    )


def profiled(cases: Sequence[Case]) -> None:
    """In the profiled process: one marked call of each case, after others that warm up."""
    profiler = torch.cuda.profiler
    for case in cases:
        launch, buffers = families.of(case).public(case), families.problem(case).make()
        with torch.no_grad():
            for _ in range(2):
                launch(buffers)
            torch.cuda.synchronize()
            profiler.start()
            launch(buffers)
            torch.cuda.synchronize()
            profiler.stop()
        del buffers, launch
        torch.cuda.empty_cache()
