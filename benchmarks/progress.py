"""What a run shows: a progress bar on a terminal, plain lines elsewhere, a table at the end."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self


class Progress:
    """Counts steps; use it as a context."""

    def __init__(self, title: str, total: int):
        self.title, self.total, self.done = title, total, 0
        self._start = time.monotonic()
        self._bar = None
        if sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self._bar = Bar()
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, line: str) -> None:
        """One step is done; `line` says how it went."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
            self._bar.console.print(line)
        else:
            seconds = time.monotonic() - self._start
            print(f"[{self.title} {self.done}/{self.total} {seconds:.0f}s] {line}", flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text with aligned columns; the first is aligned left, the others right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *padded[1:]]).rstrip()

    return "\n".join(
        [line(header), "  ".join("-" * width for width in widths), *map(line, cells[1:])]
    )
