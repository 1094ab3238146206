"""Compiled kernels on disk: one library and one JSON record per entry.

Files are written in a temporary folder beside them and then renamed, so a reader meets whole files
only; the record is renamed last and holds the library's checksum. Nothing here raises for what the
file system does: a place that cannot be used is reported once, and the caller goes on without it.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from quack_core import env, log

from . import locks, versions
from .keys import FORMAT, Key

SUFFIXES = (".so", ".o")
"""A shared library, or the object file that it could not be linked from."""

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MEGABYTE = 1 << 20

_guard = threading.Lock()
_folders: dict[Path, Path | None] = {}  # wanted place: the folder in use, None if refused
_unwritable: set[Path] = set()  # folders that are only read from now on


class Entry(NamedTuple):
    """A compiled kernel on disk.

    Args:
        digest: its name.
        size_bytes: of all its files.
        used: when it was last loaded or written, in seconds since 1970.
        record: what it is; None if its record is missing or damaged.
    """

    digest: str
    size_bytes: int
    used: float
    record: dict[str, Any] | None


def folder() -> Path | None:
    """The folder of compiled kernels, made and checked; None if there is none that can be used.

    ``$QUACK_CACHE_DIR/kernels``, or ``quack/kernels`` in the user's cache folder; without a home
    folder, one per user in the temporary folder.
    """
    root = _root()
    with _guard:
        if root not in _folders:
            try:
                _folders[root] = make_folder()
            except OSError as error:
                _give_up(root, error)
        return _folders[root]


def make_folder() -> Path:
    """The folder, made and checked now; see `folder`.

    Raises:
        OSError: it cannot be made, or others can change it.
    """
    root = _root()
    for path in (root, root / "kernels"):
        _secure(path, owners=(os.geteuid(), 0))
    return root / "kernels"


def read(place: Path, key: Key, load: Callable[[Path, str], Any]) -> Any:
    """The function of an entry, or None if there is no sound one.

    Args:
        place: the folder.
        key: the entry.
        load: loads a symbol of a library or object file.
    """
    path = _record_path(place, key.digest)
    try:
        record = json.loads(_own(path))
        if record["format"] != FORMAT or record["key"] != key.record:
            raise ValueError("record of another kernel")
        if record["cpu_level"] > versions.cpu_level():
            raise ValueError("it was compiled on a processor with more instructions")
        if record["suffix"] not in SUFFIXES:
            raise ValueError(f"files of kind {record['suffix']!r} are unknown")
        code = place / f"{key.digest}{record['suffix']}"
        if hashlib.sha256(_own(code)).hexdigest() != record["sha256"]:
            raise ValueError("checksum differs")
        function = load(code, record["symbol"])
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever is wrong, compiling again repairs it
        _log().info("entry %s cannot be used (%s): compiling again", key.digest[:12], error)
        return None
    with contextlib.suppress(OSError):  # a cache that can only be read
        os.utime(path)  # the entries that were not used for longest are the first to go
    return function


def has(place: Path, key: Key) -> bool:
    """Whether there is a sound entry, for this processor; nothing is loaded."""
    entry = Entry(key.digest, 0, 0.0, _record(_record_path(place, key.digest)))
    if entry.record is None or not _is_sound(place, entry):
        return False
    fits = entry.record.get("cpu_level", 0) <= versions.cpu_level()
    return bool(fits and entry.record.get("key") == key.record)


def write(
    place: Path, key: Key, symbol: str, seconds: float, export: Callable[[Path], Path]
) -> Path | None:
    """Store an entry; call it under `lock`. Returns its library, None if it was not stored.

    Args:
        place: the folder.
        key: the entry.
        symbol: name of the function in the library.
        seconds: how long compiling took.
        export: writes a file into an empty folder and returns its path, with one of `SUFFIXES`.
    """
    if place in _unwritable:
        return None
    try:
        _tidy(place, key)
        with _temporary(place, key) as folder:
            made = export(folder)
            os.chmod(made, 0o600)
            code = place / f"{key.digest}{made.suffix}"
            record = {
                "format": FORMAT,
                "key": key.record,
                "symbol": symbol,
                "suffix": made.suffix,
                "cpu_level": versions.cpu_level(),
                "sha256": hashlib.sha256(made.read_bytes()).hexdigest(),
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "compile_seconds": round(seconds, 3),
            }
            text = folder / "record.json"
            text.write_text(json.dumps(record, indent=1, sort_keys=True))
            os.chmod(text, 0o600)
            os.replace(made, code)
            os.replace(text, _record_path(place, key.digest))
        _evict(place, key.digest)
    except OSError as error:
        _only_read(place, error)
        return None
    except Exception as error:  # noqa: BLE001 - the kernel works without its entry
        _log().warning("%s was not stored: %s: %s", symbol, type(error).__name__, error)
        return None
    return code


def lock(place: Path, key: Key) -> AbstractContextManager[None]:
    """Hold an entry against other processes; where nothing can be written, there is no lock."""
    return contextlib.nullcontext() if place in _unwritable else locks.held(place, key.digest)


def entries(place: Path) -> list[Entry]:
    """What a folder holds, the entry that was used last in front."""
    found = [
        Entry(digest, size, used, _record(_record_path(place, digest)))
        for digest, (size, used) in _sizes(place).items()
    ]
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def damaged(place: Path) -> list[str]:
    """Digests of entries that no process would load; the next one that needs them compiles anew."""
    others = (entry for entry in entries(place) if not _is_of_another_version(entry))
    return [entry.digest for entry in others if not _is_sound(place, entry)]


def clear(place: Path) -> tuple[int, int]:
    """Remove all entries, and what killed writers left. Returns how many, and their bytes.

    Processes that have loaded them keep them; lock files stay, as others may wait for them.
    """
    present = entries(place)
    for entry in present:
        _remove(place, entry.digest)
    for leftover in place.glob(".*-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return len(present), sum(entry.size_bytes for entry in present)


def _log() -> logging.Logger:
    return log.get("quack.jit")


def forget_folders() -> None:
    """Check folders, and warn about them, anew; for tests."""
    with _guard:
        _folders.clear()
        _unwritable.clear()


def _root() -> Path:
    chosen = env.get("QUACK_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    if os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")) or _has_home():
        import platformdirs

        return Path(platformdirs.user_cache_dir("quack", appauthor=False))
    return Path(tempfile.gettempdir(), f"quack-{os.geteuid()}")


def _has_home() -> bool:
    """False without HOME and passwd entry, and for the ``HOME=/`` of containers run as any user."""
    home = os.path.expanduser("~")
    return os.path.isabs(home) and home.strip("/") != "" and os.path.isdir(home)


def _secure(path: Path, owners: tuple[int, ...]) -> None:
    """Make the folder, or see that only its owner can change it: what lies in it is loaded as code.

    Raises:
        OSError: it cannot be made, is another user's, or stays open to others.
    """
    try:
        path.mkdir(mode=_PRIVATE, parents=True)
    except FileExistsError:
        pass
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is no folder")
    if status.st_uid not in owners:
        raise PermissionError(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        os.chmod(path, stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)


def _record_path(place: Path, digest: str) -> Path:
    return place / f"{digest}.json"


def _own(path: Path) -> bytes:
    """Content of a file of ours, or of the system's, that nobody else can write."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"{path} can be written by others")
        return file.read()


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "format" in record else None


def _is_of_another_version(entry: Entry) -> bool:
    """Whether it was written by a quack-core that stores entries in another way."""
    return entry.record is not None and entry.record["format"] != FORMAT


def _is_sound(place: Path, entry: Entry) -> bool:
    try:
        record = entry.record or {}
        code = place / f"{entry.digest}{record['suffix']}"
        return bool(hashlib.sha256(_own(code)).hexdigest() == record["sha256"])
    except (OSError, KeyError):
        return False


def _remove(place: Path, digest: str) -> None:
    for suffix in (".json", *SUFFIXES):  # the record first: no reader meets half an entry
        with contextlib.suppress(OSError):
            (place / f"{digest}{suffix}").unlink()


def _sizes(place: Path) -> dict[str, tuple[int, float]]:
    """Bytes of each entry, and when it was last used."""
    found: dict[str, tuple[int, float]] = {}
    with os.scandir(place) as files:
        for file in files:
            digest, suffix = os.path.splitext(file.name)
            if not digest.startswith(".") and suffix in (".json", *SUFFIXES):
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    status = file.stat()
                    size, used = found.get(digest, (0, 0.0))
                    found[digest] = size + status.st_size, max(used, status.st_mtime)
    return found


def _evict(place: Path, keep: str) -> None:
    """Remove what was not used for longest until the rest fits; ``keep`` was just written."""
    limit = env.get("QUACK_CACHE_MAX_MB") * _MEGABYTE
    present = _sizes(place)
    total = sum(size for size, _ in present.values())
    if not 0 < limit < total:
        return
    gone = 0
    for digest, (size, _) in sorted(present.items(), key=lambda item: item[1][1]):
        if total > limit and digest != keep:
            _remove(place, digest)
            total -= size
            gone += 1
    _log().info("cache above %d MB: removed %d entries", limit // _MEGABYTE, gone)


def _tidy(place: Path, key: Key) -> None:
    """Remove what killed writers left; where locks do not work, what is young may be in use."""
    for leftover in place.glob(f".{key.digest}-*"):
        with contextlib.suppress(FileNotFoundError):  # its writer was quicker
            if time.time() - leftover.stat().st_mtime > locks.LOCK_SECONDS:
                shutil.rmtree(leftover)


@contextlib.contextmanager
def _temporary(place: Path, key: Key) -> Iterator[Path]:
    """A new folder, mode 0700, that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=f".{key.digest}-", dir=place) as name:
        yield Path(name)


def _only_read(place: Path, error: OSError) -> None:
    """Write nothing more, and say so once; what is there already is still good."""
    with _guard:
        if place not in _unwritable:
            _unwritable.add(place)
            _log().warning(
                "newly compiled kernels are not kept on disk: %s (%s). Every process compiles "
                "them again; make room, or set QUACK_CACHE_DIR to a folder of your own",
                place,
                error,
            )


def _give_up(root: Path, error: OSError) -> None:
    """Use no disk from now on; the caller holds the guard, so there is one warning per place."""
    _log().warning(
        "compiled kernels are not kept on disk: %s (%s). Every process compiles again; set "
        "QUACK_CACHE_DIR to a folder of your own",
        root,
        error,
    )
    _folders[root] = None
