"""What is installed, read from the metadata of distributions, without importing any of it."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

_BOUND = re.compile(r"(>=|<=|==|!=|~=|<|>)\s*([\w.]+)")


@dataclass(frozen=True)
class Site:
    """An environment.

    Args:
        path: folders that distributions are found in.
    """

    path: tuple[str, ...]

    @classmethod
    def here(cls) -> "Site":
        """That of this process."""
        return cls(tuple(sys.path))

    def find(self, name: str) -> Distribution | None:
        """A distribution; None if it is not installed."""
        found = importlib.metadata.distributions(name=name, path=list(self.path))
        return next(iter(found), None)

    def version(self, name: str) -> str | None:
        """Its version; None if it is not installed."""
        found = self.find(name)
        return None if found is None else found.version

    def starting_with(self, prefix: str) -> dict[str, Distribution]:
        """Distributions by normalised name."""
        every = importlib.metadata.distributions(path=list(self.path))
        named = ((normal(each.metadata["Name"] or ""), each) for each in every)
        return {name: each for name, each in named if name.startswith(prefix)}


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def damaged_files(distribution: Distribution) -> Iterator[str]:
    """Files that are missing or have another size than when they were installed."""
    for file in distribution.files or ():
        if file.suffix == ".pyc" or file.hash is None:
            continue
        path = Path(str(distribution.locate_file(file)))
        try:
            size = path.stat().st_size
        except OSError:
            yield f"{file} is missing"
            continue
        if file.size is not None and size != file.size:
            yield f"{file} has {size} bytes instead of {file.size}"


def requirement(distribution: Distribution, name: str) -> str | None:
    """The versions of ``name`` that a distribution asks for, such as ``>=0.1,<1``; None if any."""
    for text in distribution.requires or ():
        found = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)", text)
        if found and normal(found[1]) == name and "extra ==" not in text:
            return found[2].replace(" ", "") or None
    return None


def admits(bounds: str, version: str) -> bool:
    """Whether a version lies within bounds like ``>=4.8,<5``; other operators count as met."""
    found = numbers(version)
    for operator, text in _BOUND.findall(bounds):
        bound = numbers(text)
        width = max(len(found), len(bound))
        a, b = (each + (0,) * (width - len(each)) for each in (found, bound))
        met = {">=": a >= b, ">": a > b, "<=": a <= b, "<": a < b, "==": a == b}
        if not met.get(operator, True):
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``4.10rc1`` is (4, 10)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
