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

from quack_core.jit import locks, store, versions
from quack_core.jit.keys import Key

KEY = Key(hashlib.sha256(b"key").hexdigest(), {"spec": 1})
CODE = b"machine code" * 100


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    store.forget_folders()
    yield
    store.forget_folders()


def put(place, code=CODE, key=KEY, suffix=".so"):
    def export(folder):
        path = folder / f"kernel{suffix}"
        path.write_bytes(code)
        return path

    return store.write(place, key, "kernel", 0.1, export)


def get(place):
    return store.read(place, KEY, lambda path, symbol: (symbol, path.read_bytes()))


def files(place):
    return sorted(path.suffix for path in place.iterdir())


@pytest.fixture
def give_away(monkeypatch):
    """Make files another user's. Root, whose files all may trust, really does it."""

    def give(*paths):
        if os.geteuid() == 0:
            for path in paths:
                os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    return give


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_write_and_read():
    place = store.folder()
    assert get(place) is None
    path = put(place)
    assert path.read_bytes() == CODE
    assert get(place) == ("kernel", CODE)
    assert files(place) == [".json", ".so"]
    record = json.loads((place / f"{KEY.digest}.json").read_text())
    assert record["key"] == KEY.record
    assert record["sha256"] == hashlib.sha256(CODE).hexdigest()


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
def test_truncated_library_is_replaced_KC_02(size):
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
        {"sha256": "0" * 64},
        {"suffix": "/../../elsewhere.so"},
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


def test_missing_library_KC_01():
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

    def export(folder):
        (folder / "kernel.so").write_bytes(CODE[:50])
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
        def export(folder):
            (folder / "kernel.so").write_bytes(b"half")
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
    (leftover,) = place.glob(".*-*")
    assert (leftover / "kernel.so").read_bytes() == b"half"
    long_ago = time.time() - locks.LOCK_SECONDS - 1
    os.utime(leftover, (long_ago, long_ago))
    put(place)
    assert files(place) == [".json", ".lock", ".so"]  # the dead process's file is gone


def test_two_writers_without_locks_do_not_disturb_each_other_KC_01():
    place = store.folder()

    def export(folder):
        path = folder / "kernel.so"
        path.write_bytes(CODE)
        put(place, b"of the other writer")
        assert path.read_bytes() == CODE
        return path

    assert store.write(place, KEY, "kernel", 0.1, export) is not None
    assert get(place) == ("kernel", CODE)
    assert files(place) == [".json", ".so"]


def test_leftover_that_vanishes_is_no_trouble_KC_04(monkeypatch, caplog):
    """Another writer tidies up at the same time."""
    place = store.folder()
    gone = place / f".{KEY.digest}-gone"
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


def test_full_disk_KC_04(caplog):
    """What is there is still read; nothing more is written, and one line says so."""
    place = store.folder()
    put(place)
    other = Key(hashlib.sha256(b"other").hexdigest(), {"spec": 2})

    def export(folder):
        raise OSError(28, "No space left on device")

    for _ in range(3):
        assert store.write(place, other, "kernel", 0.1, export) is None
    assert put(place, key=other) is None
    with store.lock(place, other):  # makes no file either
        assert get(place) == ("kernel", CODE)
    assert files(place) == [".json", ".so"]
    (record,) = warned(caplog)
    assert "No space left" in record.getMessage()


def test_writes_that_end_early_KC_04():
    """A real one: the limit on the size of files acts like a disk that is full midway."""
    place = store.folder()
    script = textwrap.dedent(f"""
        import resource, signal
        from quack_core.jit import store
        from quack_core.jit.keys import Key
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        def export(folder):
            path = folder / "kernel.so"
            path.write_bytes({CODE!r})
            return path
        place = store.folder()
        print(store.write(place, Key({KEY.digest!r}, {KEY.record!r}), "kernel", 0.1, export))
    """)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n"
    assert "File too large" in done.stderr
    assert files(place) == []
    put(place)
    assert get(place) == ("kernel", CODE)


def test_folder_that_can_only_be_read_is_read_KC_04(monkeypatch, caplog):
    """A cache in a container image."""
    put(store.folder())
    store.forget_folders()

    def refuse(*args, **kwargs):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    place = store.folder()
    assert get(place) == ("kernel", CODE)
    assert warned(caplog) == []
    assert put(place) is None
    assert len(warned(caplog)) == 1


def test_folder_of_another_user_KC_03(tmp_path, caplog, give_away):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "kernels").mkdir(mode=0o700)
    give_away(tmp_path / "cache", tmp_path / "cache" / "kernels")
    assert [store.folder() for _ in range(3)] == [None] * 3
    (record,) = warned(caplog)
    assert "QUACK_CACHE_DIR" in record.getMessage()  # the way out


def test_open_folder_of_another_user_is_refused_KC_05(tmp_path, give_away):
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    os.chmod(tmp_path / "cache" / "kernels", 0o777)
    give_away(tmp_path / "cache" / "kernels")
    assert store.folder() is None
    assert mode(tmp_path / "cache" / "kernels") == 0o777


@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_entry_of_another_user_is_not_loaded_KC_05(suffix, give_away):
    place = store.folder()
    put(place)
    give_away(place / f"{KEY.digest}{suffix}")
    assert get(place) is None


def test_entry_of_another_architecture_is_a_miss():
    """A file that was renamed: its record says what it is."""
    place = store.folder()
    foreign = Key(hashlib.sha256(b"foreign").hexdigest(), {"spec": 1, "target": "sm_120a"})
    put(place, key=foreign)
    for path in list(place.iterdir()):
        path.rename(place / f"{KEY.digest}{path.suffix}")
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


def test_entry_for_a_newer_processor_is_a_miss(monkeypatch):
    """A cache that was moved: the DSL compiles host code for the processor at hand."""
    place = store.folder()
    monkeypatch.setattr(versions, "cpu_level", lambda: 4)
    put(place)
    assert get(place) == ("kernel", CODE)
    monkeypatch.setattr(versions, "cpu_level", lambda: 3)
    assert get(place) is None
    assert not store.has(place, KEY)
    assert store.damaged(place) == []
    put(place)
    monkeypatch.setattr(versions, "cpu_level", lambda: 4)
    assert get(place) == ("kernel", CODE)  # what the older one runs, the newer one does too
    assert store.has(place, KEY)


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("fpu sse sse2", 1),
        ("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3", 2),
        (" ".join(versions.CPU_LEVELS[:2]), 3),
        (" ".join(versions.CPU_LEVELS[:2]).replace("bmi2", ""), 2),
        (" ".join(versions.CPU_LEVELS), 4),
        (" ".join(versions.CPU_LEVELS[::2]), 2),
    ],
)
def test_levels_of_processors(flags, level, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(versions.platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n\nprocessor : 1\n")
    assert versions.cpu_level.__wrapped__() == level
    monkeypatch.setattr(versions.platform, "machine", lambda: "aarch64")
    assert versions.cpu_level.__wrapped__() == 0


def numbered(number):
    return Key(hashlib.sha256(b"%d" % number).hexdigest(), {"number": number})


def test_what_was_not_used_for_longest_is_evicted(monkeypatch):
    monkeypatch.setenv("QUACK_CACHE_MAX_MB", "1")
    place, code = store.folder(), b"x" * 300_000
    now = time.time()
    for number in range(3):  # of a megabyte, 3 of them and their records fit
        put(place, code, numbered(number))
        used = now - 100 + number
        os.utime(place / f"{numbered(number).digest}.json", (used, used))
        os.utime(place / f"{numbered(number).digest}.so", (used, used))

    def load(path, symbol):
        return path.read_bytes()

    assert store.read(place, numbered(0), load) == code  # now 1 is the oldest
    put(place, code, numbered(3))
    assert store.read(place, numbered(1), load) is None
    assert [store.read(place, numbered(n), load) for n in (0, 2, 3)] == [code] * 3
    assert sum(path.stat().st_size for path in place.iterdir()) < 1 << 20


@pytest.mark.parametrize(("limit", "left"), [("0", 4), ("1", 1)])
def test_one_entry_above_the_limit_stays(limit, left, monkeypatch):
    monkeypatch.setenv("QUACK_CACHE_MAX_MB", limit)
    place = store.folder()
    for number in range(4):
        put(place, b"x" * 2_000_000, numbered(number))
    assert len(store.entries(place)) == left
    assert store.read(place, numbered(3), lambda path, symbol: symbol) == "kernel"


def test_entries_damaged_and_clear():
    place = store.folder()
    for number in range(3):
        put(place, key=numbered(number), suffix=".o" if number == 2 else ".so")
    (place / f"{numbered(0).digest}.so").write_bytes(b"damaged")
    (place / f"{numbered(1).digest}.json").unlink()
    (place / f".{KEY.digest}-left").mkdir()
    found = {entry.digest: entry for entry in store.entries(place)}
    assert found.keys() == {numbered(n).digest for n in range(3)}
    assert found[numbered(1).digest].record is None
    assert found[numbered(1).digest].size_bytes == len(CODE)
    assert found[numbered(2).digest].record["key"] == {"number": 2}
    assert sorted(store.damaged(place)) == sorted(numbered(n).digest for n in (0, 1))
    total = sum(entry.size_bytes for entry in found.values())
    assert store.clear(place) == (3, total)
    assert list(place.iterdir()) == []


def test_soft_locks_on_network_folders(tmp_path, monkeypatch):
    place = store.folder()
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(locks, "_MOUNTS", mounts)
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path / 'cache'} nfs4 rw 0 0\n")
    assert locks.is_network(place)
    assert not locks.is_network(tmp_path)
    path = place / f"{KEY.digest[:3]}.lock"
    with store.lock(place, KEY):
        assert path.exists()
    assert not path.exists()  # that is what makes it free
    path.write_text("a process on another machine that was killed")
    long_ago = time.time() - locks.LOCK_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    started = time.monotonic()
    with store.lock(place, KEY):
        put(place)
    assert time.monotonic() - started < 5
    assert get(place) == ("kernel", CODE)


def test_soft_lock_that_stays_taken_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    place = store.folder()
    monkeypatch.setattr(locks, "is_network", lambda place: True)
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.2)
    with store.lock(place, KEY), store.lock(place, KEY):
        put(place)
    assert get(place) == ("kernel", CODE)
