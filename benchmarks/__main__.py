"""Command line: ``python -m benchmarks SUITE``, ``tune``, ``profile``, ``report``, ``compare``, ``merge``."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import compare, judge, record, shapes, supervisor

STEP_TIMEOUT_S = 120.0
NO_GPU = 2
"""Exit status."""


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for suite in shapes.SUITES:
        one = commands.add_parser(suite, help=f"measure {suite}")
        _running(one)
        one.add_argument("--shapes", help="such as '8192x4096 128x4096'; default: the suite's")
        one.add_argument("--smoke", action="store_true", help="the first shapes only")
        one.add_argument("--list", action="store_true", help="print the cases and stop")
        one.add_argument("--dry-run", action="store_true", help="print the plan and stop; no GPU")
        one.add_argument("--variants", help="names joined by commas, such as ours,compile")
        one.add_argument("--opts", help="only cases whose options contain this, such as w=bf16")
    tune = commands.add_parser("tune", help="time every candidate configuration of a shape")
    _running(tune)
    tune.add_argument("suite", choices=sorted(shapes.SUITES))
    tune.add_argument("shapes", help="such as 8192x4096, or several joined by commas")
    tune.add_argument("--config", action="append", default=[], help="keep such, as cluster=4")
    tune.add_argument(
        "--try",
        dest="tries",
        action="append",
        default=[],
        metavar="FIELDS",
        help="instead of the candidates: 'threads_per_row=64/128 stages=0/2', all combinations",
    )
    tune.add_argument("--limit", type=int, default=0, help="at most so many configurations")
    tune.add_argument("--opts", default="w=bf16", help="only such cases; empty for all")
    sweep = commands.add_parser("sweep", help="the rule's choice and every other, for GEMMs")
    _output(sweep)
    sweep.add_argument("suite", choices=[name for name in shapes.SUITES if "gemm" in name])
    sweep.add_argument("--shapes", help="such as 8192x4096x4096, or random:SEED:COUNT")
    sweep.add_argument("--rounds", type=int, default=8, help="samples of the best")
    profile = commands.add_parser("profile", help="DRAM throughput of our kernels, by ncu")
    _output(profile)
    profile.add_argument("suite", choices=sorted(shapes.SUITES))
    profile.add_argument("shapes", help="such as 8192x32000, or several")
    profile.add_argument("--opts", default="", help="only such cases; empty for all")
    profile.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    for name, text in (("host", "host time of a call"), ("calibration", "what the machine can do")):
        one = commands.add_parser(name, help=text)
        _output(one)
        one.add_argument("--smoke", action="store_true", help="a tenth of the work")
        one.add_argument("--rounds", type=int, default=30)
    report = commands.add_parser("report", help="write README and docs from the results")
    report.add_argument("--check", action="store_true", help="only say whether they are current")
    report.add_argument("--results", type=Path, default=record.RESULTS)
    both = commands.add_parser("compare", help="two result files; fails on a regression")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    both.add_argument("--variant", default="ours")
    merge = commands.add_parser("merge", help="put result files of another folder into the results")
    merge.add_argument("source", type=Path)
    merge.add_argument("target", type=Path, nargs="?", default=record.RESULTS)
    return top


def _output(one: argparse.ArgumentParser) -> None:
    one.add_argument("--out", type=Path, default=record.RESULTS, help="results folder")
    one.add_argument("--commit", default="", help="recorded; default: asks git")


def _running(one: argparse.ArgumentParser) -> None:
    _output(one)
    one.add_argument("--rounds", type=int, default=30, help="samples of each variant")
    one.add_argument("--seconds-budget", type=float, default=0, help="stop before; 0: no limit")
    one.add_argument(
        "--step-timeout", type=float, default=STEP_TIMEOUT_S, help="seconds; then hung"
    )
    one.add_argument("--in-process", action="store_true", help="no child process, no second try")
    one.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    one.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    one.add_argument("--exclude", action="append", default=[], help=argparse.SUPPRESS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(given)
    if args.command == "report":
        return _report(args)
    if args.command == "compare":
        return _compare(args)
    if args.command == "merge":
        print(f"{record.merge_folder(args.source, args.target)} records merged")
        return 0
    if args.command in ("host", "calibration"):
        return _machine(args)
    if args.command == "sweep":
        return _sweep(args)
    cases = _cases(args)
    if args.command == "profile":
        return _profile(args, cases, given)
    if getattr(args, "list", False):
        print("\n".join(case.label for case in cases))
        return 0
    if getattr(args, "dry_run", False):
        print(dry_run(cases))
        return 0
    if not args.worker and not args.in_process:
        return supervisor.supervise(given, args.step_timeout, args.seconds_budget)
    return _measure(args, cases)


def _cases(args: argparse.Namespace) -> list[shapes.Case]:
    suite = args.suite if args.command in ("tune", "profile") else args.command
    cases = shapes.cases(suite, args.shapes, getattr(args, "smoke", False))
    wanted = (args.opts or "").split()
    return [case for case in cases if all(_has(case, option) for option in wanted)]


def _has(case: shapes.Case, option: str) -> bool:
    """Whether a case has an option such as ``w=bf16``; one without any options always does."""
    return not case.opts or option in ["=".join(pair) for pair in case.opts]


def dry_run(cases: Sequence[shapes.Case]) -> str:
    """How each case would be timed, without a GPU."""
    from . import families, timing
    from .progress import table

    rows = []
    for case in cases:
        problem = families.problem(case)
        floor = judge.floor_us(problem.read_bytes, problem.write_bytes, problem.flop, case.dtype)
        chosen = timing.plan(problem.set_bytes, floor)
        total = f"{problem.set_bytes * chosen.sets / 1e6:.0f}"
        plan = (chosen.method, str(chosen.sets), str(chosen.laps), total, f"{floor:.1f}")
        rows.append((case.label, *plan))
    return table(("case", "method", "sets", "laps", "MB", "floor us"), rows)


def excluded(entries: Sequence[str]) -> dict[tuple[int, str], str]:
    """``INDEX:VARIANT:STATUS`` as `Options.exclude` has it; a variant may contain colons."""
    found = {}
    for entry in entries:
        index, _, rest = entry.partition(":")
        variant, _, status = rest.rpartition(":")
        found[int(index), variant] = status
    return found


def _measure(args: argparse.Namespace, cases: Sequence[shapes.Case]) -> int:
    from . import device, families, ours, runner

    if not device.available():
        return NO_GPU
    only = getattr(args, "variants", None)
    options = runner.Options(
        out=args.out,
        rounds=args.rounds,
        budget_s=args.seconds_budget,
        first=args.first,
        exclude=excluded(args.exclude),
        only=tuple(only.split(",")) if only else (),
        commit=args.commit,
        marker=args.worker,
    )

    if args.command != "tune":
        runner.Runner(
            options,
            families.problem,
            lambda case: [*ours.variants(case), *families.peers_of(case)],
        ).run(args.command, cases)
        return 0
    return _tune(args, options, cases)


def _tune(args, options, cases: Sequence[shapes.Case]) -> int:  # type: ignore[no-untyped-def]
    """Results go to a folder of their own: they are no results of the package."""
    import dataclasses

    from . import families, ours, runner, tune

    with tempfile.TemporaryDirectory() as folder:
        kept = args.out if args.out != record.RESULTS else Path(folder)
        options = dataclasses.replace(options, out=kept / "tune")
        tries, wanted = tune.grid(args.tries), tuple(args.config)
        runner.Runner(
            options,
            families.problem,
            lambda case: ours.config_variants(case, tries, wanted, args.limit),
            show=lambda rows: f"\n{tune.text(rows)}",
        ).run("tune", cases)
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from . import device, sweep

    if not device.available():
        return NO_GPU
    cases = sweep.cases_of(args.suite, args.shapes)
    print(sweep.text(sweep.run(args, cases), cases))
    return 0


def _machine(args: argparse.Namespace) -> int:
    """The suites without shapes: host and calibration."""
    from . import calibration, device, host

    if not device.available():
        return NO_GPU
    base = _base(args)
    if args.command == "host":
        records = host.run(base, host.CALLS // (10 if args.smoke else 1))
        print(host.text(records))
    else:
        records = calibration.run(base, args.rounds, args.smoke)
    record.merge(args.out / device.folder(base.gpu) / f"{args.command}.jsonl", records)
    return 0


def _profile(args: argparse.Namespace, cases: Sequence[shapes.Case], argv: Sequence[str]) -> int:
    from . import device, profile
    from .progress import table

    if not device.available():
        return NO_GPU
    if args.profiled:
        profile.profiled(cases)
        return 0
    records = profile.run(_base(args), args.suite, cases, argv)
    for one in records:
        record.merge(args.out / device.folder(one.gpu) / f"{one.op}.jsonl", [one])
    rows = [
        (case.label, one.note, f"{one.us['median']:.1f}", f"{one.dram_pct:.1f}")
        for case, one in zip(cases, records, strict=False)
    ]
    print(table(("row", "kernel", "us", "DRAM %"), rows))
    return 0 if records else 1


def _base(args: argparse.Namespace) -> record.Record:
    """What all records of a run say."""
    from . import device

    base = record.Record("", "", [], "", {}, "")
    base.gpu, base.date = device.gpu_name(), record.today()
    base.commit, base.versions = args.commit or record.commit(), device.versions("quack-norm")
    return base


def _report(args: argparse.Namespace) -> int:
    from . import report

    changed = report.generate(args.results, check=args.check)
    for path in changed:
        print(f"{path}: {'is not current' if args.check else 'written'}")
    return 1 if args.check and changed else 0


def _compare(args: argparse.Namespace) -> int:
    found = compare.changes(record.read(args.old), record.read(args.new), args.variant)
    print(compare.text(found))
    return 1 if any(change.regressed for change in found) else 0


if __name__ == "__main__":
    sys.exit(main())
