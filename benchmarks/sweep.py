"""All configurations of a GEMM on a list of shapes: how far the rule's choice is from the best.

Results are a JSON list in ``<out>/<gpu>/gemm_sweep.json``, an object for each shape. Whether results
are right is for the tests and the suites; here only time counts.
"""

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from quack_core import arch
from quack_core.jit.pool import Pool
from quack_gemm.config import GemmConfig
from quack_gemm.launch import kernels as kernels_of
from quack_gemm.spec import GemmSpec

from . import device, gemm, judge, ours, record, shapes, timing
from .progress import Progress, table
from .shapes import Case
from .variant import Failure, attempt

REPLAY_US = 600.0
"""A replay takes at least about this long."""
HOPELESS = 1.8
"""Times the least cycles that the rule predicts; such configurations are left out. Of the first 45
shapes, which had none left out, none was fastest with a configuration beyond 1.5."""
FINAL = 10
"""Configurations that are timed again, with the default one among them."""
SCREENING_ROUNDS = 2


def random_shapes(seed: int, count: int) -> list[tuple[int, ...]]:
    """M, N, K as nobody chose them: sizes spread evenly over their logarithms.

    M is anything from 1 to 16384, N and K are multiples of 8 from 512 to 16384.
    """
    draw = random.Random(seed)

    def size(low: int, high: int, step: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))) / step) * step

    return [(size(1, 16384, 1), size(512, 16384, 8), size(512, 16384, 8)) for _ in range(count)]


def cases_of(suite: str, text: str | None) -> list[Case]:
    """Cases of a suite, weights as torch.nn.Linear keeps them.

    Args:
        text: shapes in place of the suite's, or ``"random:SEED:COUNT"``.
    """
    if text and text.startswith("random:"):
        _, seed, count = text.split(":")
        chosen = random_shapes(int(seed), int(count))
        text = " ".join("x".join(map(str, shape)) for shape in chosen)
    return [case for case in shapes.cases(suite, text) if case.opt("layout") == "nt"]


def run(options: Any, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Sweep all cases; one result for each.

    Args:
        options: as of the command line: out, rounds, commit.
    """
    _compile([(gemm.spec_of(case), config) for case in cases for config in _promising(case)])
    found = []
    gpu = device.gpu_name()
    path = options.out / device.folder(gpu) / "gemm_sweep.json"
    common = {
        "gpu": gpu,
        "date": record.today(),
        "commit": options.commit or record.commit(),
        "versions": device.versions("quack-gemm"),
    }
    with torch.no_grad(), Progress("sweep", len(cases)) as progress:
        for case in cases:
            one = sweep(case, options.rounds)
            found.append(one)
            _merge(path, {**_name(case), **one, **common})
            progress.step(f"{case.label}: {one['ratio']:.3f}")
            torch.cuda.empty_cache()
    return found


def sweep(case: Case, rounds: int) -> dict[str, Any]:
    """Times of all candidates of a case, and of cuBLAS, in microseconds."""
    problem = gemm.problem(case)
    floor = judge.floor_us(problem.read_bytes, problem.write_bytes, problem.flop, case.dtype)
    plan = timing.plan(problem.set_bytes, floor)
    laps = max(1, math.ceil(REPLAY_US / (plan.sets * floor)))
    plan = timing.Plan(plan.sets, laps, plan.method)
    sets = [problem.make() for _ in range(plan.sets)]
    launches: dict[str, Callable[[], None]] = {}
    failed = {}
    for config in _promising(case):
        launch = gemm.explicit(case, config, None, None, 0)
        made = attempt(lambda run=launch: timing.replay(run, sets, plan))  # type: ignore[misc]
        if isinstance(made, Failure):
            failed[ours.short(config)] = made.note
        else:
            launches[ours.short(config)] = made
    name = ours.short(gemm.default_config(case))
    peers = {p.name: timing.replay(p.prepare(case), sets, plan) for p in gemm.peers(case)[:1]}
    times = _time(launches, SCREENING_ROUNDS, plan)
    final = dict.fromkeys([name, *sorted(times, key=lambda one: times[one])[:FINAL]])
    again = _time({one: launches[one] for one in final} | peers, rounds, plan)
    times.update({one: again[one] for one in final})
    best = min(final, key=lambda one: times[one])
    return {
        "default": name,
        "default_us": times[name],
        "best": best,
        "best_us": times[best],
        "ratio": round(times[name] / times[best], 4),
        **{f"{peer}_us": again[peer] for peer in peers},
        "us": dict(sorted(times.items(), key=lambda pair: pair[1])),
        "failed": failed,
    }


def _promising(case: Case) -> list[GemmConfig]:
    """All configurations but the hopeless ones, the default among them."""
    found = gemm.candidates(case)
    cycles = gemm.predicted(case, found)
    least = min(cycles)
    return [c for c, each in zip(found, cycles, strict=True) if each <= HOPELESS * least]


def _time(
    launches: dict[str, Callable[[], None]], rounds: int, plan: timing.Plan
) -> dict[str, float]:
    raw = timing.interleave(launches, rounds, timing.CudaClock())
    return {name: round(statistics.median(us) / plan.launches, 2) for name, us in raw.items()}


def _name(case: Case) -> dict[str, Any]:
    return {
        "suite": case.suite,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "opts": dict(case.opts),
    }


def _merge(path: Path, new: dict[str, Any]) -> None:
    """Into the file, in the place of an older result of the same row."""
    key = ("suite", "shape", "dtype", "opts")
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [one for one in old if any(one[k] != new[k] for k in key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(one) for one in [*kept, new])
    path.write_text(f"[\n{text}\n]\n")


def _compile(todo: Iterable[tuple[GemmSpec, GemmConfig]]) -> None:
    """Put kernels into the cache, by all cores; one that fails there fails again when timed."""
    target = arch.detect()
    kernels = dict.fromkeys(one for pair in todo for one in kernels_of(*pair, target))
    start = time.monotonic()
    with Pool(len(os.sched_getaffinity(0))) as pool:
        pool.compile(list(kernels), lambda kernel, error: None)
    print(f"{len(kernels)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)


def text(found: Sequence[dict[str, Any]], cases: Sequence[Case]) -> str:
    """A table of the choices, and how far they are from the best on the whole."""
    rows = [
        (
            case.label,
            f"{one['default_us']:.2f}",
            f"{one['best_us']:.2f}",
            f"{one.get('cublas_us', 0):.2f}",
            f"{one['ratio']:.3f}",
            one["default"],
            one["best"] if one["best"] != one["default"] else "",
        )
        for case, one in zip(cases, found, strict=True)
    ]
    ratios = [one["ratio"] for one in found]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    heads = ("row", "default us", "best us", "cublas us", "ratio", "default", "best")
    return f"{table(heads, rows)}\ngeometric mean {mean:.4f}, worst {max(ratios):.3f}"
