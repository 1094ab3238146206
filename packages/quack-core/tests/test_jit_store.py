"""Entries on disk: whole files or none, private folders, and no error whatever the place is."""

import hashlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from quack_core.jit import store
from quack_core.jit.keys import Key

KEY = Key(hashlib.sha256(b"key").hexdigest(), {"spec": 1})
CODE = b"machine code" * 100


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    store.forget_folders()
    yield
    store.forget_folders()


def put(place, code=CODE):
    return store.write(place, KEY, "kernel", 0.1, lambda path: path.write_bytes(code))


def get(place):
    return store.read(place, KEY, lambda path, symbol: (symbol, path.read_bytes()))


def files(place):
    return sorted(path.suffix for path in place.iterdir())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_write_and_read():
    place = store.folder()
    assert get(place) is None
    path = put(place)
    assert path.read_bytes() == CODE
    assert get(place) == ("kernel", CODE)
    assert files(place) == [".json", ".o"]
    record = json.loads((place / f"{KEY.digest}.json").read_text())
    assert record["key"] == KEY.record
    assert record["object_sha256"] == hashlib.sha256(CODE).hexdigest()


def test_files_and_folders_are_private_KC_05(tmp_path):
    previous = os.umask(0)
    try:
        place = store.folder()
        with store.lock(place, KEY):
            put(place)
    finally:
        os.umask(previous)
    assert [mode(path) for path in (tmp_path / "cache", place)] == [0o700] * 2
    assert {mode(path) for path in place.iterdir()} == {0o600}


@pytest.mark.parametrize("size", [0, 1, len(CODE) // 2, len(CODE) - 1])
def test_truncated_object_is_replaced_KC_02(size):
    place = store.folder()
    os.truncate(put(place), size)
    assert get(place) is None
    assert mode(put(place)) == 0o600
    assert get(place) == ("kernel", CODE)


@pytest.mark.parametrize("size", [0, 1, 100])
def test_truncated_record_is_replaced_KC_02(size):
    place = store.folder()
    put(place)
    os.truncate(place / f"{KEY.digest}.json", size)
    assert get(place) is None
    put(place)
    assert get(place) == ("kernel", CODE)


@pytest.mark.parametrize(
    "damage",
    [
        {"key": {"spec": 2}},
        {"format": 0},
        {"object_sha256": "0" * 64},
        {"symbol": None},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_record_of_something_else_KC_02(damage):
    place = store.folder()
    put(place)
    path = place / f"{KEY.digest}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))

    def load(path, symbol):
        raise RuntimeError(f"no function {symbol}")

    assert store.read(place, KEY, load) is None


def test_missing_object_KC_01():
    place = store.folder()
    put(place).unlink()
    assert get(place) is None


def test_entry_that_others_can_write_is_not_loaded_KC_05():
    place = store.folder()
    os.chmod(put(place), 0o666)
    assert get(place) is None
    put(place)
    assert get(place) == ("kernel", CODE)


@pytest.mark.parametrize(
    "error", [OSError("disk full"), RuntimeError("export"), KeyboardInterrupt()]
)
def test_export_that_raises_midway_leaves_nothing_KC_02(error):
    place = store.folder()

    def export(path):
        path.write_bytes(CODE[:50])
        raise error

    if isinstance(error, Exception):
        assert store.write(place, KEY, "kernel", 0.1, export) is None
    else:
        with pytest.raises(KeyboardInterrupt):
            store.write(place, KEY, "kernel", 0.1, export)
    assert files(place) == []


def test_failed_export_keeps_the_old_entry_KC_02():
    place = store.folder()
    put(place)

    def export(path):
        raise RuntimeError

    store.write(place, KEY, "kernel", 0.1, export)
    assert get(place) == ("kernel", CODE)


def test_process_killed_during_export_KC_02():
    place = store.folder()
    script = textwrap.dedent(f"""
        import os, signal
        from quack_core.jit import store
        from quack_core.jit.keys import Key
        def export(path):
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        key = Key({KEY.digest!r}, {KEY.record!r})
        place = store.folder()
        with store.lock(place, key):
            store.write(place, key, "kernel", 0.1, export)
    """)
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert get(place) is None
    with store.lock(place, KEY):  # free again
        put(place)
    assert get(place) == ("kernel", CODE)
    (leftover,) = place.glob(".*.o")
    assert leftover.read_bytes() == b"half"
    long_ago = time.time() - store.LOCK_SECONDS - 1
    os.utime(leftover, (long_ago, long_ago))
    put(place)
    assert files(place) == [".json", ".lock", ".o"]  # the dead process's file is gone


def test_two_writers_without_locks_do_not_disturb_each_other_KC_01():
    place = store.folder()

    def export(path):
        path.write_bytes(CODE)
        put(place, b"of the other writer")
        assert path.read_bytes() == CODE

    assert store.write(place, KEY, "kernel", 0.1, export) is not None
    assert get(place) == ("kernel", CODE)
    assert files(place) == [".json", ".o"]


def test_leftover_that_vanishes_is_no_trouble_KC_04(monkeypatch, caplog):
    """Another writer tidies up at the same time."""
    place = store.folder()
    gone = place / f".{KEY.digest}-gone.o"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [gone])
    put(place)
    assert get(place) == ("kernel", CODE)
    assert warned(caplog) == []


def warned(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_file_in_place_of_the_folder_KC_04(tmp_path, caplog):
    (tmp_path / "cache").write_text("")
    assert [store.folder() for _ in range(3)] == [None] * 3
    (record,) = warned(caplog)
    assert str(tmp_path / "cache") in record.getMessage()


def test_folder_that_cannot_be_made_KC_04(tmp_path, caplog, monkeypatch):
    def mkdir(self, *args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert [store.folder() for _ in range(3)] == [None] * 3
    assert "Read-only" in warned(caplog)[0].getMessage()
    assert len(warned(caplog)) == 1


def test_place_that_becomes_unwritable_KC_04(caplog):
    place = store.folder()

    def export(path):
        raise OSError(28, "No space left on device")

    for _ in range(3):
        assert store.write(place, KEY, "kernel", 0.1, export) is None
    assert store.folder() is None
    assert len(warned(caplog)) == 1


def test_folder_of_another_user_KC_03(tmp_path, caplog, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "kernels").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert [store.folder() for _ in range(3)] == [None] * 3
    (record,) = warned(caplog)
    assert "QUACK_CACHE_DIR" in record.getMessage()  # the way out


def test_open_folder_of_another_user_is_refused_KC_05(tmp_path, monkeypatch):
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    os.chmod(tmp_path / "cache" / "kernels", 0o777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.folder() is None
    assert mode(tmp_path / "cache" / "kernels") == 0o777


def test_entry_of_another_user_is_not_loaded_KC_05(monkeypatch):
    place = store.folder()
    put(place)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert get(place) is None


@pytest.mark.parametrize("name", ["cache", "cache/kernels"])
def test_open_folder_of_ours_is_repaired_KC_05(tmp_path, name):
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    os.chmod(tmp_path / name, 0o777)
    assert store.folder() == tmp_path / "cache" / "kernels"
    assert mode(tmp_path / name) & 0o022 == 0


def test_shared_sticky_root_stays_as_it_is_KC_03(tmp_path):
    (tmp_path / "cache").mkdir()
    os.chmod(tmp_path / "cache", 0o1777)
    assert mode(store.folder()) == 0o700
    assert mode(tmp_path / "cache") == 0o1777


@pytest.mark.parametrize("home", [None, "/", "", "/nonexistent"])
def test_no_home(home, tmp_path, monkeypatch):
    monkeypatch.delenv("QUACK_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    if home is None:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no passwd entry
    else:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert store.folder() == tmp_path / f"quack-{os.geteuid()}" / "kernels"
    assert mode(tmp_path / f"quack-{os.geteuid()}") == 0o700


def test_default_is_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("QUACK_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / ".cache" / "quack" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.folder() == tmp_path / "xdg" / "quack" / "kernels"


def test_without_working_locks(monkeypatch):
    import filelock

    def acquire(self, *args, **kwargs):
        raise NotImplementedError("this file system has no locks")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    place = store.folder()
    with store.lock(place, KEY):
        put(place)
    assert get(place) == ("kernel", CODE)
