"""Fingerprints of the sources that a kernel is made of, found by reading, not by importing.

Followed are ``import`` statements anywhere in a file, relative ones and those inside functions
included, to modules of our packages (``quack_*``) and of the package that the kernel itself is
in. The ``__init__`` of every package passed on the way counts with its text; its own imports are
followed only where a statement names the package for something that is no submodule. Names given
to ``importlib`` at run time are not seen.

A process that starts with a filled cache does this before its first kernel, so it has to take few
milliseconds: statements are found by a pattern, not by parsing, which takes 2 ms a file. Whatever
the pattern sees in a comment or a string beyond them, at worst, adds a file to a key.
"""

import functools
import hashlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from quack_core.errors import StaleSourceError

PREFIX = "quack_"
"""Top-level packages with this prefix are first-party."""

# What follows the word is looked ahead at, so that prose before a statement swallows none of it.
_IMPORT = re.compile(
    r"import\b(?=[ \t\f]*(?:\((?P<inside>(?:[^()#]|#[^\n]*)*)\)|(?P<names>[^\n;#]*)))"
)
_FROM = re.compile(r".*\bfrom\b([\w. \t\f]+)$")
_CONTINUED = re.compile(r"\\\r?\n")
_COMMENT = re.compile(r"#[^\n]*")

_IMPORTED_NS = time.monotonic_ns()
_seen: dict[str, tuple[str, bool]] = {}  # module: hash of its text when read; was it loaded then?


def fingerprint(roots: Iterable[str]) -> dict[str, str]:
    """Module names with the SHA-256 of their text: the roots and what they import, transitively.

    Args:
        roots: full module names; their top-level packages are first-party too.

    Raises:
        ModuleNotFoundError: a root has no source file.
        StaleSourceError: a file differs from the text that this process has loaded.
    """
    roots = tuple(roots)
    owners = {name.partition(".")[0] for name in roots}
    find_once = functools.cache(find)  # files may come and go between fingerprints
    hashes: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in hashes:
            continue
        path = find_once(module)
        if path is None:
            _missing(module)
        text = _read(path)
        hashes[module] = _remember(module, path, text)
        package = module if _is_package(path) else module.rpartition(".")[0]
        for origin, name in _targets(text, package):
            if origin.startswith(PREFIX) or origin.partition(".")[0] in owners:
                waiting.extend(_resolve(origin, name, find_once))
    for package in {parent for module in hashes for parent in _parents(module)} - hashes.keys():
        path = find_once(package)
        if path is not None:
            hashes[package] = _remember(package, path, _read(path))
    return dict(sorted(hashes.items()))


def imported(hashes: dict[str, str]) -> None:
    """Say that modules which were not loaded when they were read have been imported since.

    Args:
        hashes: a fingerprint from just before; it is taken for the text that was imported.
    """
    for module, digest in hashes.items():
        if module in sys.modules and not _seen.get(module, ("", False))[1]:
            _seen[module] = digest, True


def find(module: str) -> str | None:
    """Source file of a module, found without importing it; None if there is none."""
    top, *inside = module.split(".")
    folders, path = _top(top)
    if inside:
        places = [os.path.join(folder, *inside) for folder in folders]
        files = (place + end for place in places for end in (f"{os.sep}__init__.py", ".py"))
        path = next(filter(os.path.isfile, files), None)
    return path


def _top(name: str) -> tuple[list[str], str | None]:
    """Folders of a top-level package, and its source file."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # loaded without a spec, such as the __main__ of a script
        spec = None
    origin = getattr(sys.modules.get(name), "__file__", None) if spec is None else spec.origin
    folders = () if spec is None else spec.submodule_search_locations or ()
    return list(folders), origin if origin is not None and origin.endswith(".py") else None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_package(path: str) -> bool:
    return path.endswith("__init__.py")


def _resolve(origin: str, name: str, find_once: Callable[[str], str | None]) -> list[str]:
    """The module that an import names: what a package is asked for may be a module in it."""
    if not name:  # `import a.b`
        origin, _, name = origin.rpartition(".")
    home = find_once(origin) if origin else None
    if home is not None and not _is_package(home):  # it holds values only
        return [origin]
    inside = f"{origin}.{name}" if origin else name
    if find_once(inside) is not None:
        return [inside]
    return [] if home is None else [origin]


def _targets(text: bytes, package: str) -> Iterator[tuple[str, str]]:
    """Absolute module and name of every import statement of a file, as `_imports` tells them."""
    parts = package.split(".")
    for level, base, name in _imports(text):
        if level:
            base = ".".join([*parts[: len(parts) - level + 1], *([base] if base else [])])
        yield base, name


@functools.lru_cache(maxsize=1024)
def _imports(text: bytes) -> frozenset[tuple[int, str, str]]:
    """(level, module, name) of every import statement; a star import has the empty name."""
    found = set()
    code = _CONTINUED.sub(" ", text.decode(errors="replace"))
    for match in _IMPORT.finditer(code):
        before = code[code.rfind("\n", 0, match.start()) + 1 : match.start()]
        origin = _FROM.match(before)
        dotted = "" if origin is None else "".join(origin[1].split())
        inside = match["inside"]
        names = match["names"] if inside is None else _COMMENT.sub("", inside)
        base = dotted.lstrip(".")
        for each in names.split(","):
            words = each.split()
            name = "".join(words[: words.index("as")] if "as" in words else words)
            if not dotted:
                found.add((0, name, ""))
            elif name:
                found.add((len(dotted) - len(base), base, "" if name == "*" else name))
    return frozenset(found)


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _remember(module: str, path: str, text: bytes) -> str:
    """Hash of the text, after checking that a loaded module was made of the same text."""
    digest = hashlib.sha256(text).hexdigest()
    loaded = module in sys.modules
    before, was_loaded = _seen.get(module, ("", False))
    if (
        loaded
        and digest != before
        and (was_loaded or (module.startswith(PREFIX) and _edited_since_import(path)))
    ):
        raise StaleSourceError(
            f"{path} changed after this process imported {module}: compiling would mix old "
            "and new code. Restart the process"
        )
    _seen[module] = digest, loaded
    return digest


def _edited_since_import(path: str) -> bool:
    """Whether a file of ours, unseen since it was imported, was written after this module was.

    Ours are imported before or soon after this module. The time is counted back on the monotonic
    clock, so that setting the clock does no harm.
    """
    now = time.time_ns()
    imported = now - (time.monotonic_ns() - _IMPORTED_NS)
    return imported < os.stat(path).st_mtime_ns <= now


def _missing(module: str) -> NoReturn:
    if module in sys.modules and getattr(sys.modules[module], "__file__", None):
        raise StaleSourceError(
            f"the source of {module} is gone since this process imported it. Restart the process"
        )
    raise ModuleNotFoundError(f"no source file of {module} found", name=module)
