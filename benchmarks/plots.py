"""Plots of the results as SVG: rate against N, and speed-up over the strongest peer."""

from collections.abc import Sequence
from pathlib import Path

from .record import Record
from .report import PEERS, SUITES, grouped, speedup

SERIES = {"ours": "ours", **PEERS}
LARGE = 1 << 24
"""Elements from which a row counts as bound by memory."""


def draw(records: Sequence[Record], folder: Path) -> list[str]:
    """Write the plots; returns their file names."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "quack"  # the same numbers give the same file
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for suite in SUITES:
        found = [row for row in grouped(records, suite) if "ours" in row]
        if found:
            names += [_rate(suite, found, folder), _speedup(suite, found, folder)]
    return names


def _rate(suite: str, found: Sequence[dict[str, Record]], folder: Path) -> str:
    """GB/s of minimal bytes against N, bf16 weight, rows that are bound by memory."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    kept = [
        row
        for row in found
        if row["ours"].opts == {"w": "bf16"}
        and row["ours"].shape[0] * row["ours"].shape[1] >= LARGE
    ]
    best: dict[int, dict[str, Record]] = {}
    for row in kept:  # one row for each N: the largest
        n = row["ours"].shape[1]
        if n not in best or row["ours"].shape[0] > best[n]["ours"].shape[0]:
            best[n] = row
    for name, label in SERIES.items():
        points = [(n, row[name].rate * 1e3) for n, row in sorted(best.items()) if _timed(row, name)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    copied = [
        (n, row["ours"].min_bytes / row["ours"].copy_us * 1e-3)
        for n, row in sorted(best.items())
        if row["ours"].copy_us
    ]
    if copied:
        axes.plot(*zip(*copied, strict=True), "k--", label="copy of the same bytes")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N")
    axes.set_ylabel("GB/s")
    axes.set_title(SUITES[suite])
    axes.legend()
    axes.grid(alpha=0.3)
    return _save(figure, folder / f"{suite}_rate.svg")


def _speedup(suite: str, found: Sequence[dict[str, Record]], folder: Path) -> str:
    """Bars: the strongest peer's time over ours, every row."""
    import matplotlib.pyplot as plt

    bars = [(row["ours"], ratio) for row in found if (ratio := speedup(row)) is not None]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.22 * len(bars)))
    labels = [_bar_label(one) for one, _ in bars]
    axes.barh(range(len(bars)), [ratio for _, ratio in bars])
    axes.set_yticks(range(len(bars)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("time of the strongest peer / ours")
    axes.set_title(SUITES[suite])
    return _save(figure, folder / f"{suite}_speedup.svg")


def _bar_label(one: Record) -> str:
    opts = " ".join(f"{name}={value}" for name, value in one.opts.items())
    return f"{'x'.join(map(str, one.shape))} {one.dtype} {opts} ({one.best_peer})"


def _timed(row: dict[str, Record], name: str) -> bool:
    return name in row and row[name].median is not None


def _save(figure, path: Path) -> str:  # type: ignore[no-untyped-def]
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path.name
