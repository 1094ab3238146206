"""A small file in which a worker says what it is trying, for a supervisor that may have to kill it."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trying:
    """Case index and variant; an empty variant is the timing of the whole case."""

    index: int
    variant: str
    compiling: bool = False


class Marker:
    """Writes; without a path it does nothing."""

    def __init__(self, path: Path | None):
        self.path = path

    def set(self, index: int, variant: str, compiling: bool = False) -> None:
        if self.path is not None:
            state = {"index": index, "variant": variant, "compiling": compiling}
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(state))
            part.replace(self.path)

    def clear(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def read(path: Path) -> Trying | None:
    """What the worker was trying when it last said so; None before and after."""
    try:
        return Trying(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
