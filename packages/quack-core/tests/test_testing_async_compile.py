"""Tests whose kernels are not ready run again later, in pytest runs of their own.

Workers are stood in for: a kernel is ready a while after it was asked for.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quack_core

SOURCE = Path(quack_core.__file__).parents[1]

CONFTEST = """
import os, threading
from pathlib import Path
import pytest
from quack_core import arch
from quack_core.jit import policy, pool
from quack_core.jit.keys import Kernel, Key

LOG = Path(os.environ["LOG"])

class Spec:
    def __init__(self, name):
        self.name = name

def say(word):
    with LOG.open("a") as log:
        log.write(word + "\\n")

def call(name):
    "As an operator whose kernel is not on disk."
    policy.check(Kernel("module", Spec(name), None, arch.get("sm90")), Key(name, {}))
    say(f"ran {name}")

def send(self, kernel, future):
    say(f"asked for {kernel.name}, {self.workers} workers")
    error = "broken" if kernel.name == "bad" else None
    threading.Timer(0.2, pool._resolve, (future, error)).start()

pool.Pool._send = send
pool.store.folder = lambda: "/cache"

@pytest.fixture
def op():
    return call

@pytest.fixture(scope="session")
def costly():
    call("costly")
    return "costly"
"""

TESTS = """
import contextlib, threading
import pytest

def test_one(op):
    op("a")

def test_two_kernels(op):
    op("a")
    op("b")

def test_plain():
    pass

def test_session_fixture(costly):
    assert costly == "costly"

def test_session_fixture_again(costly):
    assert costly == "costly"

def test_in_a_thread(op):
    seen = []
    def run():
        with contextlib.suppress(BaseException):
            op("c")
            seen.append(1)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [1]

def test_fails_after_its_kernel(op):
    op("d")
    raise ValueError("of its own")

def test_worker_fails(op):
    op("bad")

@pytest.mark.parametrize("i", range(3))
def test_many(op, i):
    op(f"many{i}")

@pytest.mark.compiles_here
def test_of_compiling_itself(op):
    op("here")

@pytest.mark.skip(reason="never")
def test_skipped(op):
    op("never")
"""


def run(tmp_path, *options, conftest=CONFTEST, tests=TESTS):
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_it.py").write_text(tests)
    log = tmp_path / "log"
    log.write_text("")
    environment = {name: value for name, value in os.environ.items() if name[:6] != "QUACK_"}
    environment |= {"PYTHONPATH": str(SOURCE), "LOG": str(log)}
    command = [sys.executable, "-m", "pytest", "-p", "quack_core.testing.plugin", "-rA"]
    command += ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path), *options]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=120
    )
    return done, log.read_text().splitlines()


@pytest.mark.parametrize(
    "xdist",
    [pytest.param(False, id="alone"), pytest.param(True, id="xdist", marks=pytest.mark.exhaustive)],
)
def test_deferred_tests_run_again(xdist, tmp_path):
    done, log = run(tmp_path, *(["-n", "2"] if xdist else []), "--async-compile=6")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 failed, 11 passed, 1 skipped" in done.stdout
    assert "ValueError: of its own" in done.stdout
    assert "tests without a result" not in done.stdout
    share = 3 if xdist else 6
    asked = [line for line in log if line.startswith("asked")]
    names = {"a", "b", "c", "d", "bad", "costly", "many0", "many1", "many2"}
    assert set(asked) == {f"asked for {name}, {share} workers" for name in names}
    if not xdist:  # there, each process asks for itself
        assert len(asked) == len(names)
        assert log.index("asked for many2, 6 workers") < log.index("ran a")  # all others first
    assert log.count("ran here") == 1
    assert "never" not in " ".join(log)


@pytest.mark.exhaustive
def test_warm_session_asks_for_nothing(tmp_path):
    conftest = CONFTEST.replace("    policy.check(", "    (lambda *_: None)(")
    done, log = run(tmp_path, "--async-compile", conftest=conftest)
    assert "1 failed, 11 passed, 1 skipped" in done.stdout
    assert [line for line in log if line.startswith("asked")] == []


@pytest.mark.exhaustive
def test_without_the_option_calls_compile(tmp_path):
    done, log = run(tmp_path)
    assert "1 failed, 11 passed, 1 skipped" in done.stdout
    assert [line for line in log if line.startswith("asked")] == []


@pytest.mark.exhaustive
def test_stops_at_the_first_failure(tmp_path):
    done, _ = run(tmp_path, "--async-compile=2", "-x")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in done.stdout


@pytest.mark.exhaustive
def test_new_kernels_without_end_compile_at_last(tmp_path):
    tests = """
import itertools
count = itertools.count()

def test_endless(op):
    op(f"endless{next(count)}")
"""
    conftest = CONFTEST + "\nfrom quack_core.testing import async_compile\n"
    conftest += "async_compile.MAX_ATTEMPTS = 3\n"
    done, log = run(tmp_path, "--async-compile=2", conftest=conftest, tests=tests)
    assert done.returncode == 0, done.stdout
    assert [line.split(",")[0] for line in log] == [
        "asked for endless0",
        "asked for endless1",
        "ran endless2",
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("xdist", [False, True], ids=["alone", "xdist"])
def test_a_session_that_loses_a_test_fails(xdist, tmp_path):
    """Here one that is deferred and never run again."""
    conftest = CONFTEST + "\nfrom quack_core.testing.async_compile import Deferral\n"
    conftest += "Deferral._ready = lambda self, session: iter(())\n"
    tests = "def test_lost(op):\n    op('a')\n\ndef test_kept():\n    pass\n"
    options = ["-n", "1"] if xdist else []
    done, _ = run(tmp_path, *options, "--async-compile=1", conftest=conftest, tests=tests)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 passed" in done.stdout
    assert "tests without a result" in done.stdout
    assert "test_it.py::test_lost" in done.stdout
    done, _ = run(tmp_path, *options, conftest=conftest, tests=tests)
    assert done.returncode == 0  # it is the option that looks


@pytest.mark.exhaustive
def test_number_of_workers(tmp_path):
    done, _ = run(tmp_path, "--async-compile=-1")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--async-compile=-1: must be at least 0" in done.stderr
    done, _ = run(tmp_path, "--async-compile=1", "--collect-only", "-q")
    assert done.returncode == 0
