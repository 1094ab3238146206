"""Compiled kernels on disk: one object file and one JSON record per entry.

Files are written under a temporary name in the same folder and then renamed, so a reader meets
whole files only; the record is renamed last and holds the object's checksum. Nothing here raises
for what the file system does: a place that cannot be used is reported once, and the caller goes on
without it.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quack_core import env, log

from .keys import FORMAT, Key

LOCK_SECONDS = 600.0
"""How long to wait for another process that compiles the same kernel, before doing it too.

A temporary file older than this is of a process that was killed.
"""

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_guard = threading.Lock()
_folders: dict[Path, Path | None] = {}  # wanted place: the folder in use, None if refused


def folder() -> Path | None:
    """The folder of compiled kernels, made and checked; None if there is none that can be used.

    ``$QUACK_CACHE_DIR/kernels``, or ``quack/kernels`` in the user's cache folder; without a home
    folder, one per user in the temporary folder.
    """
    root = _root()
    with _guard:
        if root not in _folders:
            try:
                _secure(root, owners=(os.geteuid(), 0))
                _secure(root / "kernels", owners=(os.geteuid(),))
                _folders[root] = root / "kernels"
            except OSError as error:
                _give_up(root, error)
        return _folders[root]


def read(place: Path, key: Key, load: Callable[[Path, str], Any]) -> Any:
    """The function of an entry, or None if there is no sound one.

    Args:
        place: the folder.
        key: the entry.
        load: loads a symbol of an object file.
    """
    record_path, object_path = _paths(place, key)
    try:
        record = json.loads(_own(record_path))
        if record["format"] != FORMAT or record["key"] != key.record:
            raise ValueError("record of another kernel")
        if hashlib.sha256(_own(object_path)).hexdigest() != record["object_sha256"]:
            raise ValueError("checksum of the object differs")
        return load(object_path, record["symbol"])
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever is wrong, compiling again repairs it
        _log().info("entry %s cannot be used (%s): compiling again", key.digest[:12], error)
        return None


def write(
    place: Path, key: Key, symbol: str, seconds: float, export: Callable[[Path], None]
) -> Path | None:
    """Store an entry; call it under `lock`. Returns its object file, None if it was not stored.

    Args:
        place: the folder.
        key: the entry.
        symbol: name of the function in the object.
        seconds: how long compiling took.
        export: writes the object to a path.
    """
    record_path, object_path = _paths(place, key)
    try:
        _tidy(place, key)
        with _temporary(place, key, ".o") as path:
            export(path)
            checksum = hashlib.sha256(path.read_bytes()).hexdigest()
            os.replace(path, object_path)
        record = {
            "format": FORMAT,
            "key": key.record,
            "symbol": symbol,
            "object_sha256": checksum,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "compile_seconds": round(seconds, 3),
        }
        with _temporary(place, key, ".json") as path:
            path.write_text(json.dumps(record, indent=1, sort_keys=True))
            os.replace(path, record_path)
    except OSError as error:
        with _guard:
            _give_up(place.parent, error)
        return None
    except Exception as error:  # noqa: BLE001 - the kernel works without its entry
        _log().warning("%s was not stored: %s: %s", symbol, type(error).__name__, error)
        return None
    return object_path


@contextlib.contextmanager
def lock(place: Path, key: Key) -> Iterator[None]:
    """Hold an entry against other processes; where locks do not work, go on without."""
    import filelock

    held = filelock.FileLock(place / f"{key.digest}.lock", timeout=LOCK_SECONDS, mode=0o600)
    try:
        held.acquire()
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
        _log().info("no lock for %s (%s): going on without", key.digest[:12], error)
    try:
        yield
    finally:
        held.release()


def _log() -> logging.Logger:
    return log.get("quack.jit")


def forget_folders() -> None:
    """Check folders, and warn about them, anew; for tests."""
    with _guard:
        _folders.clear()


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


def _paths(place: Path, key: Key) -> tuple[Path, Path]:
    return place / f"{key.digest}.json", place / f"{key.digest}.o"


def _own(path: Path) -> bytes:
    """Content of a file of ours that nobody else can write."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"{path} can be written by others")
        return file.read()


def _tidy(place: Path, key: Key) -> None:
    """Remove old temporary files; where locks do not work, a young one may be another writer's."""
    for leftover in place.glob(f".{key.digest}-*"):
        with contextlib.suppress(FileNotFoundError):  # its writer was quicker
            if time.time() - leftover.stat().st_mtime > LOCK_SECONDS:
                leftover.unlink()


@contextlib.contextmanager
def _temporary(place: Path, key: Key, suffix: str) -> Iterator[Path]:
    """A new file, mode 0600, that is gone afterwards unless it was renamed."""
    handle, name = tempfile.mkstemp(prefix=f".{key.digest}-", suffix=suffix, dir=place)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _give_up(root: Path, error: OSError) -> None:
    """Use no disk from now on; the caller holds the guard, so there is one warning per place."""
    if _folders.get(root, root) is not None:
        _log().warning(
            "compiled kernels are not kept on disk: %s (%s). Every process compiles again; set "
            "QUACK_CACHE_DIR to a folder of your own",
            root,
            error,
        )
    _folders[root] = None
