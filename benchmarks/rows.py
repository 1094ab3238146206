"""From the samples of a row to its records, and to the lines that a run prints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from . import judge, record
from .progress import table
from .shapes import Case
from .timing import Launch
from .variant import Variant

AGAIN = " again"
"""Marks the second entry of our variant."""


@dataclass
class Outcome:
    """A variant on a row: a launch with its error, or a status with a note."""

    variant: Variant
    status: str = "ok"
    note: str = ""
    err: float = 0.0
    launch: Launch | None = None


def finish(
    base: record.Record,
    outcomes: Sequence[Outcome],
    times: Mapping[str, Sequence[float]],
    copy_times: Mapping[str, Sequence[float]],
    versions: Callable[[str], dict[str, str]],
) -> list[record.Record]:
    """Complete the records of a row: times, the best copy, the best peer, verdicts."""
    medians = {name: judge.summarise(ts).median for name, ts in copy_times.items()}
    copy_name = min(medians, key=medians.__getitem__, default="")
    records = []
    for outcome in outcomes:
        variant = outcome.variant
        samples = [*times.get(variant.name, ()), *times.get(variant.name + AGAIN, ())]
        notes = [note for note in (outcome.note, variant.note) if note]
        one = replace(
            base,
            variant=variant.name,
            status=outcome.status,
            err=round(outcome.err, 4),
            note="; ".join(notes),
            config=variant.config,
            versions=versions(variant.package),
            copy_us=round(medians.get(copy_name, 0.0), 3),
            copy_kernel=copy_name,
        )
        if samples and outcome.status == "ok":
            found = judge.summarise(samples)
            one.us = found.rounded()
            if base.flop:
                one.rate, one.rate_unit = round(base.flop / found.median * 1e-6, 1), "TFLOP/s"
            else:
                one.rate = round(base.min_bytes / found.median * 1e-6, 3)
        records.append(one)
    peers = [r for r, o in zip(records, outcomes, strict=True) if o.variant.role == "peer"]
    for one, outcome in zip(records, outcomes, strict=True):
        if outcome.variant.role == "ours":
            _judge_ours(one, peers, times)
    return records


def _judge_ours(
    ours: record.Record, peers: Sequence[record.Record], times: Mapping[str, Sequence[float]]
) -> None:
    timed = [peer for peer in peers if peer.median is not None]
    best = min(timed, key=lambda peer: peer.us["median"], default=None)
    if ours.median is not None:
        first, second = times[ours.variant], times[ours.variant + AGAIN]
        ours.spread = round(judge.noise(first, second), 4)
    if best is not None:
        ours.best_peer, ours.err_peer = best.variant, best.err
    if peers:
        ours.verdict = judge.verdict(ours.median, best.median if best else None, ours.spread)


HEADER = ("row", "variant", "us", "copy us", "copy/ours", "best peer", "peer us", "verdict")


def summary_row(rows: Sequence[record.Record], ours: record.Record) -> tuple[str, ...]:
    """Cells of one of our records for the table at the end of a run."""
    case = Case(ours.suite, ours.op, tuple(ours.shape), ours.dtype, tuple(ours.opts.items()))
    peer = next((r.median for r in rows if r.variant == ours.best_peer), None)
    time_us, ratio = ours.status, "-"
    if ours.median is not None:
        time_us = f"{ours.median:.2f}"
        ratio = f"{ours.copy_us / ours.median:.3f}"
    peer_us = f"{peer:.2f}" if peer is not None else "-"
    copy_us = f"{ours.copy_us:.2f}"
    cells = (case.label, ours.variant, time_us, copy_us, ratio, ours.best_peer or "-", peer_us)
    return (*cells, ours.verdict or "-")


def is_ours(one: record.Record) -> bool:
    return one.variant.startswith("ours")


def headline(rows: Sequence[record.Record]) -> str:
    """A row in one line."""
    parts = []
    for one in rows:
        parts.append(
            f"{one.variant} {one.median:.2f}" if one.median else f"{one.variant} {one.status}"
        )
    verdicts = {one.verdict for one in rows if one.verdict}
    copy_us = f"copy {rows[0].copy_us:.2f} ({rows[0].copy_kernel})" if rows else ""
    return ", ".join([*parts, copy_us, *sorted(verdicts)])


def final_table(rows: Sequence[Sequence[record.Record]]) -> str:
    """Our records of a run."""
    return table(HEADER, [summary_row(row, one) for row in rows for one in row if is_ours(one)])


def row_key(case: Case) -> tuple[object, ...]:
    """As ``Record.row``."""
    return (case.suite, case.op, case.shape, case.dtype, tuple(sorted(case.opts)))
