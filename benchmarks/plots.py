"""Plots of the results as SVG: rate against N, and speed-up over the strongest peer and torch."""

from collections.abc import Sequence
from pathlib import Path

from .measured import SUITES, Row, grouped, is_plain, is_product, over, peers_of, speedup
from .record import Record

VECTOR = 8
"""bf16 elements of a 16-byte access."""
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
            names += [] if is_product(found) else [_rate(suite, found, folder)]
            names.append(_speedup(suite, found, folder))
    return names


def _rate(suite: str, found: Sequence[Row], folder: Path) -> str:
    """GB/s of minimal bytes against N, plain rows that are bound by memory."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    kept = [
        row
        for row in found
        if is_plain(row["ours"]) and row["ours"].shape[0] * row["ours"].shape[1] >= LARGE
    ]
    best: dict[int, Row] = {}
    for row in kept:  # one row for each N: the largest
        n = row["ours"].shape[1]
        if n not in best or row["ours"].shape[0] > best[n]["ours"].shape[0]:
            best[n] = row
    for name, label in {"ours": "ours", **peers_of(found)}.items():
        points = [(n, row[name].rate * 1e3) for n, row in sorted(best.items()) if _timed(row, name)]
        _line(axes, points, label, marker="o")
    copied = [
        (n, row["ours"].min_bytes / row["ours"].copy_us * 1e-3)
        for n, row in sorted(best.items())
        if row["ours"].copy_us
    ]
    only_read = any(row["ours"].copy_kernel.startswith("sum") for row in best.values())
    plainly = "sum" if only_read else "copy"
    _line(axes, copied, f"{plainly} of the same bytes", color="black", linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N")
    axes.set_ylabel("GB/s")
    axes.set_title(SUITES[suite])
    axes.legend()
    axes.grid(alpha=0.3)
    return _save(figure, folder / f"{suite}_rate.svg")


def _line(axes, points: Sequence[tuple[int, float]], label: str, **style) -> None:  # type: ignore[no-untyped-def]
    """A curve through rows of whole vectors; crosses for the others, which are another matter."""
    whole = [(n, rate) for n, rate in points if n % VECTOR == 0]
    odd = [(n, rate) for n, rate in points if n % VECTOR]
    if whole:
        (line,) = axes.plot(*zip(*whole, strict=True), label=label, **style)
        style["color"], label = line.get_color(), "_"  # one entry in the legend
    if odd:
        axes.plot(*zip(*odd, strict=True), label=label, **style | {"linestyle": "", "marker": "x"})


def _speedup(suite: str, found: Sequence[Row], folder: Path) -> str:
    """Bars: the strongest peer's time over ours, every row; dots: torch's."""
    import matplotlib.pyplot as plt

    kept = [(row, ratio) for row in found if (ratio := speedup(row)) is not None]
    bars = [(row["ours"], ratio) for row, ratio in kept]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.22 * len(bars)))
    labels = [_bar_label(one) for one, _ in bars]
    lengths = [ratio - 1 for _, ratio in bars]  # from one on: the axis is logarithmic
    axes.barh(range(len(bars)), lengths, left=1, label="strongest peer")
    dots = [(ratio, i) for i, (row, _) in enumerate(kept) if (ratio := over(row, "eager"))]
    if dots:
        axes.plot(*zip(*dots, strict=True), "k.", label="torch")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend()
    axes.set_yticks(range(len(bars)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("time of a peer / ours")
    axes.set_title(SUITES[suite])
    return _save(figure, folder / f"{suite}_speedup.svg")


def _bar_label(one: Record) -> str:
    opts = " ".join(f"{name}={value}" for name, value in one.opts.items())
    return f"{'x'.join(map(str, one.shape))} {one.dtype} {opts} ({one.best_peer})"


def _timed(row: Row, name: str) -> bool:
    return name in row and row[name].median is not None


def _save(figure, path: Path) -> str:  # type: ignore[no-untyped-def]
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path.name
