"""What is timed: a variant is a name and a way to make a launch; a problem owns data and its check."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .shapes import Case
from .timing import Launch


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    Args:
        name: as records and tables show it.
        prepare: makes the launch for a case; compiles, and raises if it cannot take the case.
        package: distribution whose version is recorded.
        role: "ours", "peer" or "copy".
        note: what a reader must know to compare.
        config: our configuration, as text.
    """

    name: str
    prepare: Callable[[Case], Launch]
    package: str
    role: str = "peer"
    note: str = ""
    config: str = ""


T = TypeVar("T")


class Wrong(Exception):
    """A result outside its bound."""


class Problem(Protocol):
    """One case: its data, and whether a launch computes it."""

    case: Case
    read_bytes: int
    write_bytes: int
    set_bytes: int
    flop: int = 0

    def make(self) -> Any:
        """One set of buffers with fresh random inputs."""
        ...

    def check(self, launch: Launch) -> float:
        """Largest error as a fraction of its bound, on fresh data, into poisoned outputs.

        Raises:
            Wrong: names the worst element.
        """
        ...


_UNSUPPORTED = (NotImplementedError, ImportError, ValueError, TypeError, AssertionError, KeyError)


def status_of(error: Exception) -> str:
    """The status that a record gets instead of a time."""
    import torch

    if isinstance(error, Wrong):
        return "wrong"
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "oom"
    if isinstance(error, _UNSUPPORTED) or "support" in str(error):
        return "unsupported"
    return "compile-error"


@dataclass(frozen=True)
class Failure:
    """What went wrong: a status and a sentence."""

    status: str
    note: str


def attempt(call: Callable[[], T]) -> T | Failure:
    """The result of a call, or its failure: whatever one variant does, the others are measured."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        return Failure(status_of(error), note_of(error))


def note_of(error: Exception) -> str:
    """Error class and the head of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
