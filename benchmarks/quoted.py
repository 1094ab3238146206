"""Figures that users quote for quack-kernels, beside what our records say about the same thing.

Theirs are as users quote them: the GPUs, shapes and methods behind them differ from ours, and
nothing here reproduces them. Ours come from the records, or are said to be missing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .measured import Row, grouped, is_plain, over
from .record import Record

MISSING = "not measured"


@dataclass(frozen=True)
class Quoted:
    """A figure, and how to find ours among the rows of a suite; "" if no row says it."""

    what: str
    theirs: str
    suite: str
    ours: Callable[[Sequence[Row]], str]


def _usable(found: Sequence[Row]) -> list[Row]:
    """Plain rows of ours with a time that the noise does not make void."""
    rows = [row for row in found if "ours" in row and is_plain(row["ours"])]
    return [row for row in rows if row["ours"].median and row["ours"].verdict != "void"]


def _shape(row: Row) -> str:
    return "x".join(map(str, row["ours"].shape))


def speedups(found: Sequence[Row]) -> str:
    """The largest and the mean ratio to torch, and to torch.compile."""
    told = []
    for peer, title in (("eager", "torch"), ("compile", "torch.compile")):
        ratios = [(ratio, row) for row in _usable(found) if (ratio := over(row, peer)) is not None]
        if ratios:
            best, where = max(ratios, key=lambda pair: pair[0])
            mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
            rows = f"{len(ratios)} row" + ("s" if len(ratios) > 1 else "")
            told.append(
                f"up to {best:.1f}x {title} (at {_shape(where)}), mean {mean:.1f}x of {rows}"
            )
    return "; ".join(told)


def share(found: Sequence[Row]) -> str:
    """The largest share of device memory's peak that a profiler saw."""
    rows = [row for row in found if "ours" in row and row["ours"].dram_pct]
    if not rows:
        return ""
    best = max(rows, key=lambda row: row["ours"].dram_pct)
    return f"{best['ours'].dram_pct:.1f} % (at {_shape(best)})"


def nothing(found: Sequence[Row]) -> str:
    """No suite has a record of it."""
    return ""


FIGURES = (
    Quoted("RMSNorm forward against torch", "up to 5x", "norm_fwd", speedups),
    Quoted("RMSNorm backward against torch", "up to 26x", "norm_bwd", speedups),
    Quoted("Softmax against torch", "2.3x", "softmax", speedups),
    Quoted("Cross-entropy against torch", "1.8x", "ce", speedups),
    Quoted("Memory at 1024 rows", "35 % less", "memory", nothing),
    Quoted("Share of the bandwidth, in a profiler", "89.7 %", "norm_fwd_profile", share),
)


def table(records: Sequence[Record]) -> str:
    """The figures as a table."""
    lines = ["| figure | published for upstream | measured for ours |", "| --- | --- | --- |"]
    for one in FIGURES:
        ours = one.ours(grouped(records, one.suite)) or MISSING
        lines.append(f"| {one.what} | {one.theirs} | {ours} |")
    return "\n".join(lines)


TITLE = "Figures quoted for upstream, and ours"
NOTE = """\
Theirs are those that users quote for quack-kernels. They come from other GPUs, shapes and methods
and are not reproduced here; the tables above compare both on one GPU in one run. Ours are of plain
bf16 rows, void ones left out. Void or missing rows are \"not measured\"."""
