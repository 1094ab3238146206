"""Tables for README and docs/performance.md, generated from the results and from nothing else."""

import math
from collections.abc import Sequence
from pathlib import Path

from . import quoted, record
from .measured import SUITES, Row, grouped, is_plain, is_product, peers_of, speedup
from .record import Record

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
ROOT = Path(__file__).parent.parent
PLOTS = "plots"
OPTIONS = {
    "w": "weight",
    "grad": "gradient",
    "k": "k",
    "layout": "layout",
    "scale": "scale by",
    "format": "to",
}
"""Of cases, as labels say them."""


def replace_block(text: str, block: str) -> str:
    """Put `block` between the markers.

    Raises:
        ValueError: a marker is missing, or they are in the wrong order.
    """
    first, last = text.find(BEGIN), text.find(END)
    if first < 0 or last < first:
        raise ValueError(f"the text needs {BEGIN} and, after it, {END}")
    inside = f"\n{block.strip()}\n" if block else "\n"
    return f"{text[: first + len(BEGIN)]}{inside}{text[last:]}"


def headline(found: Sequence[Row]) -> str:
    """Verdicts, geometric mean against the strongest peer of each row, worst row."""
    judged = [row["ours"] for row in found if "ours" in row]
    words = ("win", "tie", "loss", "void")
    counts = {word: sum(one.verdict == word for one in judged) for word in words}
    plural = {"win": "wins", "tie": "ties", "loss": "losses", "void": "void"}
    told = [f"{n} {word if n == 1 else plural[word]}" for word, n in counts.items() if n]
    ratios = {i: r for i, row in enumerate(found) if (r := speedup(row)) is not None}
    parts = [", ".join(told) + f" of {len(judged)} rows"]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        worst = min(ratios, key=ratios.__getitem__)
        parts.append(f"geometric mean {mean:.2f}x the strongest peer of each row")
        parts.append(f"worst row {_label(found[worst]['ours'])} at {ratios[worst]:.2f}x")
    return "; ".join(parts) + "."


def _label(one: Record) -> str:
    opts = [f"{OPTIONS[k]} {v}" if k in OPTIONS else f"+ {k}" for k, v in one.opts.items()]
    return " ".join(["x".join(map(str, one.shape)), one.dtype, *opts])


def _time(one: Record | None) -> str:
    if one is None:
        return ""
    return f"{one.median:.1f}" if one.median else one.status


def _versions(found: Sequence[Row]) -> str:
    """Where and with what the rows were measured."""
    ours = [row["ours"] for row in found if "ours" in row]
    gpus = sorted({one.gpu for one in ours})
    dates = sorted({one.date for one in ours})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    names = ("torch", "dsl", "driver")
    soft = {name: sorted({o.versions.get(name, "") for o in ours} - {""}) for name in names}
    peers = {
        o.versions.get("peer", "")
        for row in found
        for o in row.values()
        if o.variant in peers_of(found)
    }
    told = [f"torch {', '.join(soft['torch'])}", f"DSL {', '.join(soft['dsl'])}"]
    told += [f"driver {', '.join(soft['driver'])}"] if soft["driver"] else []
    told += sorted(peer for peer in peers if peer and not peer.startswith("torch "))
    return f"measured on {', '.join(gpus)}, {span}, {', '.join(told)}"


def full_table(found: Sequence[Row]) -> str:
    """Every row with every variant."""
    peers, product = peers_of(found), is_product(found)
    moved = [] if product else ["copy us", "copy / ours"]
    header = [*_heads(product), *moved, *peers.values(), "verdict"]
    lines = [_line(header), _line(["---", *["---:"] * (len(header) - 2), "---"])]
    for row in found:
        ours = row.get("ours")
        if ours is None:
            continue
        cells = [_label(ours), _time(ours), _rate(ours)]
        if not product:
            ratio = f"{ours.copy_us / ours.median:.3f}" if ours.median else ""
            cells += [f"{ours.copy_us:.1f}", ratio]
        cells += [_time(row.get(name)) for name in peers]
        lines.append(_line([*cells, ours.verdict]))
    return "\n".join(lines)


def short_table(found: Sequence[Row]) -> str:
    """The plain rows: ours, the copy or the rate, the strongest peer."""
    peers, product = peers_of(found), is_product(found)
    shape, time, rate = _heads(product)
    header = [shape, time, rate if product else "copy us", "strongest peer us", "verdict"]
    lines = [_line(header), _line(["---", "---:", "---:", "---:", "---"])]
    for row in found:
        ours = row.get("ours")
        if ours is None or not is_plain(ours):
            continue
        peer = row.get(ours.best_peer)
        told = f"{_time(peer)} ({peers.get(ours.best_peer, ours.best_peer)})" if peer else "none"
        cells = ["x".join(map(str, ours.shape)), _time(ours)]
        cells.append(_rate(ours) if product else f"{ours.copy_us:.1f}")
        lines.append(_line([*cells, told, ours.verdict]))
    return "\n".join(lines)


def _heads(product: bool) -> tuple[str, str, str]:
    return ("M x N x K", "ours us", "TFLOP/s") if product else ("M x N", "ours us", "TB/s")


def _rate(ours: Record) -> str:
    if not ours.median:
        return ""
    return f"{ours.rate:.0f}" if ours.rate_unit == "TFLOP/s" else f"{ours.rate:.2f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


PROFILED = """\
Nsight Compute, one call with empty caches; `python -m benchmarks profile SUITE SHAPES`. The peak is
what the memory's clock and width allow, not what a copy reaches. Writes that are still in the L2
when a kernel ends are not counted."""


def readme_block(records: Sequence[Record]) -> str:
    """What stands between the markers of README.md."""
    parts = []
    for suite, title in SUITES.items():
        found = grouped(records, suite)
        if not any("ours" in row for row in found):
            continue
        dtype = next(row["ours"].dtype for row in found if "ours" in row)
        parts += [f"**{title}**, {dtype}, {_versions(found)}.", headline(found), short_table(found)]
    if parts:
        parts.append("All rows, losses included, and how they were measured: docs/performance.md.")
    return "\n\n".join(parts)


def docs_block(records: Sequence[Record], plots: Sequence[str] = ()) -> str:
    """What stands between the markers of docs/performance.md."""
    parts = []
    for suite, title in SUITES.items():
        found = grouped(records, suite)
        if not any("ours" in row for row in found):
            continue
        parts += [f"## {title}", f"Microseconds, {_versions(found)}.", headline(found)]
        of_suite = [name for name in plots if Path(name).stem.rpartition("_")[0] == suite]
        parts += [f"![{title}: {name}]({name})" for name in of_suite]
        parts.append(full_table(found))
        parts += _failures(found)
    if table := profile_table(records):
        parts += ["## In a profiler", PROFILED, table]
    if parts:
        parts += [f"## {quoted.TITLE}", quoted.NOTE, quoted.table(records)]
    return "\n\n".join(parts)


def profile_table(records: Sequence[Record]) -> str:
    """What a profiler saw of our kernels; empty without such records."""
    seen = [one for one in records if one.dram_pct]
    if not seen:
        return ""
    header = ["operator", "M x N", "us", "DRAM TB/s", "% of its peak"]
    lines = [_line(header), _line(["---", "---", "---:", "---:", "---:"])]
    for one in seen:
        shape = " ".join(["x".join(map(str, one.shape)), *_opts(one)])
        cells = [one.op, shape, _time(one), f"{one.rate:.2f}", f"{one.dram_pct:.1f}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _opts(one: Record) -> list[str]:
    return [f"{name}={value}" for name, value in one.opts.items()]


def _failures(found: Sequence[Row]) -> list[str]:
    """Each distinct reason why a variant has no time."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in found:
        for one in row.values():
            if one.status != "ok":
                key = (one.variant, one.status, one.note)
                reasons.setdefault(key, []).append("x".join(map(str, one.shape)))
    lines, peers = [], peers_of(found)
    for (name, status, note), where in reasons.items():
        text = note.replace("|", "\\|")
        lines.append(
            f"* {peers.get(name, name)}, {status} ({', '.join(dict.fromkeys(where))}): {text}"
        )
    return ["Without a time:\n\n" + "\n".join(lines)] if lines else []


def generate(results: Path, root: Path = ROOT, check: bool = False) -> list[Path]:
    """Write README.md, docs/performance.md and the plots.

    Args:
        results: folder of result files.
        root: where README.md and docs/ are.
        check: write nothing; plots are not compared.

    Returns:
        The files whose text changed, or would change.
    """
    records = record.read(results)
    names: list[str] = []
    if not check:
        from . import plots

        names = plots.draw(records, root / "docs" / PLOTS)
    else:
        names = sorted(path.name for path in (root / "docs" / PLOTS).glob("*.svg"))
    links = [f"{PLOTS}/{name}" for name in names]
    blocks = {
        root / "README.md": readme_block(records),
        root / "docs" / "performance.md": docs_block(records, links),
    }
    changed = []
    for path, block in blocks.items():
        text = path.read_text()
        new = replace_block(text, block)
        if new != text:
            changed.append(path)
            if not check:
                path.write_text(new)
    return changed
