"""Two result files side by side: what became slower by more than the noise."""

from collections.abc import Sequence
from dataclasses import dataclass

from . import judge
from .progress import table
from .record import Key, Record


@dataclass(frozen=True)
class Change:
    """One variant on one row in both files; `ratio` is new time over old, None if one has no time."""

    key: Key
    old: Record
    new: Record

    @property
    def ratio(self) -> float | None:
        if not self.old.median or not self.new.median:
            return None
        return self.new.median / self.old.median

    @property
    def word(self) -> str:
        """One of "slower", "faster", "same", "void", or a change of status, "ok -> wrong"."""
        if self.old.status != self.new.status:
            return f"{self.old.status} -> {self.new.status}"
        if self.ratio is None:
            return "same"
        spread = max(self.old.spread, self.new.spread)
        if spread > judge.MARGIN:
            return "void"
        threshold = max(judge.MARGIN, 2 * spread)
        if abs(self.ratio - 1) <= threshold:
            return "same"
        return "slower" if self.ratio > 1 else "faster"

    @property
    def regressed(self) -> bool:
        lost = self.old.status == "ok" and self.new.status != "ok"
        return lost or self.word == "slower"


def changes(old: Sequence[Record], new: Sequence[Record], variant: str = "ours") -> list[Change]:
    """The rows of a variant that stand in both files, in the order of the old one."""
    after = {record.key: record for record in new}
    found = [record for record in old if record.variant == variant and record.key in after]
    return [Change(record.key, record, after[record.key]) for record in found]


def text(found: Sequence[Change]) -> str:
    """A table of all changes."""
    rows = []
    for change in found:
        suite, _, shape, dtype, opts, variant = change.key
        label = " ".join([suite, "x".join(map(str, shape)), dtype, *map("=".join, opts), variant])
        times = [f"{r.median:.2f}" if r.median else r.status for r in (change.old, change.new)]
        ratio = f"{change.ratio:.3f}" if change.ratio else "-"
        rows.append((label, *times, ratio, change.word))
    return table(("row", "old us", "new us", "new/old", "change"), rows)
