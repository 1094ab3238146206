"""One row after the other: check every variant, time those that passed, write records at once."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from . import copies, device, judge, record, timing
from .marker import Marker
from .progress import Progress
from .rows import AGAIN, Outcome, final_table, finish, headline, is_ours, row_key
from .shapes import Case
from .timing import Plan
from .variant import Failure, Problem, Variant, attempt

FIRST_GUESS_S = 8.0
"""A case is expected to take at least this long."""
STICKY = 3
"""Exit status when the CUDA context is lost."""


@dataclass(frozen=True)
class Options:
    """How to run a suite.

    Args:
        out: results folder; records go to ``<out>/<gpu>/<op>.jsonl``.
        rounds: samples per variant.
        budget_s: stop before this many seconds; 0 is no limit.
        first: index of the first case.
        exclude: ``(case index, variant)`` to the status it gets: what crashed or hung before. An
            empty variant stands for the whole case.
        only: names of the variants to run, copies aside; empty is all.
        commit: recorded; empty asks git.
        marker: file that tells the supervisor what is being tried.
    """

    out: Path
    rounds: int = 30
    budget_s: float = 0.0
    first: int = 0
    exclude: Mapping[tuple[int, str], str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    commit: str = ""
    marker: Path | None = None


class Runner:
    """Runs the cases of a suite in this process."""

    def __init__(
        self,
        options: Options,
        problem: Callable[[Case], Problem],
        variants: Callable[[Case], Sequence[Variant]],
        show: Callable[[Sequence[record.Record]], str] = headline,
    ):
        self.options, self.problem, self.variants, self.show = options, problem, variants, show
        self.gpu = device.gpu_name()
        self.versions = {package: device.versions(package) for package in ("",)}
        self.commit = options.commit or record.commit()
        self.marker = Marker(options.marker)

    def run(self, title: str, cases: Sequence[Case]) -> bool:
        """All cases in order; False if the budget ended first."""
        start, longest, stopped = time.monotonic(), FIRST_GUESS_S, len(cases)
        todo = list(enumerate(cases))[self.options.first :]
        with torch.no_grad(), Progress(title, len(todo)) as progress:
            self._compile_ours(todo)
            for index, case in todo:
                before = time.monotonic()
                if self.options.budget_s and before - start + longest > self.options.budget_s:
                    print(f"budget used up: stopped before {case.label}", flush=True)
                    stopped = index
                    break
                rows = self.row(index, case)
                record.merge(self.path(case), rows)
                progress.step(f"{case.label}: {self.show(rows)}")
                if index > self.options.first:  # the first case imports and warms up what all use
                    longest = max(longest, time.monotonic() - before)
                torch.cuda.empty_cache()
        self.marker.clear()
        self._print_table(cases[:stopped])
        return stopped == len(cases)

    def _print_table(self, cases: Sequence[Case]) -> None:
        """The cases of this run, those of an attempt that crashed included."""
        found: dict[tuple, list[record.Record]] = {}
        for path in {self.path(case) for case in cases}:
            for one in record.read(path):
                found.setdefault(one.row, []).append(one)
        rows = [found.get(row_key(case), []) for case in cases]
        if any(is_ours(one) for row in rows for one in row):
            print(final_table(rows), flush=True)

    def path(self, case: Case) -> Path:
        return self.options.out / device.folder(self.gpu) / f"{case.op}.jsonl"

    def _compile_ours(self, todo: Sequence[tuple[int, Case]]) -> None:
        """Compile our kernels first: other libraries change the compiler's classes when imported."""
        for make in [make for inputs in (0, 1, 2) for make in copies.launches(inputs).values()]:
            attempt(make)  # a failure is reported with the rows
        for index, case in todo:
            small = replace(case, shape=(min(case.shape[0], 64), *case.shape[1:]))
            for variant in self.variants(case):
                name = variant.name
                if variant.role != "ours" or not self._wanted(index, name):
                    continue
                self.marker.set(index, name, compiling=True)
                attempt(lambda v=variant, s=small: v.prepare(s)(self.problem(s).make()))  # type: ignore[misc]
                self._require_context()

    def _wanted(self, index: int, name: str) -> bool:
        excluded = self.options.exclude
        if (index, name) in excluded or (index, "") in excluded:
            return False
        return not self.options.only or name in self.options.only

    def row(self, index: int, case: Case) -> list[record.Record]:
        """Records of one case, whatever happens to its variants."""
        problem = self.problem(case)
        outcomes = [self._check(index, problem, variant) for variant in self._selected(index, case)]
        moved = (problem.read_bytes, problem.write_bytes)
        floor = judge.floor_us(*moved, problem.flop, case.dtype)
        chosen = timing.plan(problem.set_bytes, floor)
        self.marker.set(index, "")
        times: dict[str, list[float]] = {}
        copy_times, clocks = dict(times), (0, 0.0)
        if any(outcome.launch for outcome in outcomes):
            times, copy_times, clocks = self._time(index, problem, outcomes, chosen)
        base = self._base(case, problem, chosen, floor, clocks)
        return finish(base, outcomes, times, copy_times, self._versions)

    def _selected(self, index: int, case: Case) -> list[Variant]:
        only = self.options.only
        return [v for v in self.variants(case) if not only or v.name in only]

    def _check(self, index: int, problem: Problem, variant: Variant) -> Outcome:
        for key in ((index, variant.name), (index, "")):
            if key in self.options.exclude:
                status = self.options.exclude[key]
                return Outcome(variant, status, f"{status} in an earlier attempt of this run")
        self.marker.set(index, variant.name)

        def check() -> Outcome:
            launch = variant.prepare(problem.case)
            err = problem.check(launch)
            torch.cuda.synchronize()
            return Outcome(variant, err=err, launch=launch)

        found = attempt(check)
        if isinstance(found, Failure):
            self._require_context()
            return Outcome(variant, found.status, found.note)
        return found

    def _time(
        self, index: int, problem: Problem, outcomes: Sequence[Outcome], chosen: Plan
    ) -> tuple[dict[str, list[float]], dict[str, list[float]], tuple[int, float]]:
        """Microseconds per call: variants (ours twice), copies; and the clocks meanwhile."""
        sets = [problem.make() for _ in range(chosen.sets)]
        replays: dict[str, Callable[[], None]] = {}
        for outcome in outcomes:
            if outcome.launch is None:
                continue
            self.marker.set(index, outcome.variant.name)
            made = attempt(functools.partial(timing.replay, outcome.launch, sets, chosen))
            if isinstance(made, Failure):  # it ran, but not in a graph
                self._require_context()
                outcome.status, outcome.note = made.status, f"in a graph: {made.note}"
            else:
                replays[outcome.variant.name] = made
        self.marker.set(index, "")
        copy_replays = self._copies(problem, chosen)
        repeated = [o.variant.name for o in outcomes if o.variant.role == "ours"]
        entries = dict(replays)
        entries |= {name + AGAIN: replays[name] for name in repeated if name in replays}
        entries |= copy_replays
        clocks = (0, 0.0)

        def read_clocks() -> None:
            nonlocal clocks
            clocks = device.clock_and_power()

        raw = timing.interleave(entries, self.options.rounds, timing.CudaClock(), read_clocks)
        per_call = {name: [t / chosen.launches for t in ts] for name, ts in raw.items()}
        copied = {name: per_call.pop(name) for name in copy_replays}
        return per_call, copied, clocks

    def _copies(self, problem: Problem, chosen: Plan) -> dict[str, Callable[[], None]]:
        total = problem.read_bytes + problem.write_bytes
        inputs = copies.inputs_for(problem.read_bytes, problem.write_bytes)
        sets = [copies.make(total, inputs) for _ in range(chosen.sets)]
        replays = {}

        def prepare(make: Callable[[], copies.CopyLaunch]) -> Callable[[], None]:
            launch = make()
            copies.check(launch, sets[0])
            return timing.replay(launch, sets, chosen)

        for name, make in copies.launches(inputs).items():
            made = attempt(functools.partial(prepare, make))
            if isinstance(made, Failure):
                self._require_context()
                print(f"{name}: {made.status}, {made.note}", flush=True)
            else:
                replays[name] = made
        return replays

    def _base(
        self, case: Case, problem: Problem, chosen: Plan, floor: float, clocks: tuple[int, float]
    ) -> record.Record:
        return record.Record(
            suite=case.suite,
            op=case.op,
            shape=list(case.shape),
            dtype=case.dtype,
            opts=dict(case.opts),
            variant="",
            method=chosen.method,
            rounds=self.options.rounds,
            sets=chosen.sets,
            launches=chosen.launches,
            set_bytes=problem.set_bytes,
            min_bytes=problem.read_bytes + problem.write_bytes,
            flop=problem.flop,
            floor_us=round(floor, 2),
            clock_mhz=clocks[0],
            power_w=clocks[1],
            gpu=self.gpu,
            date=record.today(),
            commit=self.commit,
        )

    def _versions(self, package: str) -> dict[str, str]:
        if package not in self.versions:
            self.versions[package] = device.versions(package)
        return self.versions[package]

    def _require_context(self) -> None:
        """Leave the process if nothing can run in it any more: the CUDA context is lost, or torch's
        random numbers are, to a graph whose recording has failed."""
        alive = attempt(device.try_out)
        if isinstance(alive, Failure):
            print(f"CUDA context lost: {alive.note}", flush=True)
            raise SystemExit(STICKY)
