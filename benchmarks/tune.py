"""Every candidate configuration of a shape, timed in one run: a table, fastest first."""

import ast
import itertools
from collections.abc import Iterable, Sequence

from .progress import table
from .record import Record


def grid(tries: Iterable[str]) -> list[dict[str, object]]:
    """Fields to set, from ``"threads_per_row=64/128 stages=0/2"``: every combination.

    Raises:
        ValueError: a piece is not ``name=value`` or ``name=value/value``.
    """
    found: list[dict[str, object]] = []
    for line in tries:
        choices = []
        for piece in line.replace(",", " ").split():
            name, equals, values = piece.partition("=")
            if not (name.isidentifier() and equals and values):
                raise ValueError(f"{piece!r}: write name=value or name=value/value")
            choices.append([(name, ast.literal_eval(value)) for value in values.split("/")])
        found += [dict(combination) for combination in itertools.product(*choices)]
    return found


def text(found: Sequence[Record]) -> str:
    """A row's records as a table; the rate beside the copy's."""
    timed = sorted((r for r in found if r.median), key=lambda r: r.us["median"])
    failed = [r for r in found if not r.median]
    rows = []
    for one in timed:
        us = one.us["median"]
        spread = (one.us["p90"] - one.us["p10"]) / us
        ratio = f"{one.copy_us / us:.3f}"
        cells = (one.variant, f"{us:.2f}", f"{one.rate:.3f}", ratio, f"{spread:.1%}", "")
        rows.append(cells)
    rows += [(one.variant, one.status, "-", "-", "-", one.note[:80]) for one in failed]
    return table(("config", "us", "TB/s", "copy/us", "spread", "note"), rows)
