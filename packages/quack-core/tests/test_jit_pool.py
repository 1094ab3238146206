"""Kernels compiled by other processes; whatever goes wrong there, the call gets its kernel."""

import logging
import multiprocessing
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from quack_core import arch
from quack_core.errors import CompileError
from quack_core.jit import cache, jit_stats, pool, store, worker
from quack_core.jit.keys import Kernel
from quack_core.jit.pool import Deferred, Pool, WorkerError

SM90 = arch.get("sm90")
PROBE = Path(__file__).parent / "jit_probe"

pytestmark = pytest.mark.compiles_here


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(PROBE)
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    store.forget_folders()
    cache.clear_memory()
    yield
    store.forget_folders()
    cache.clear_memory()


def kernel(n=64, module="quack_probe.scale"):
    from quack_probe.spec import ScaleConfig, ScaleSpec

    return Kernel(module, ScaleSpec(n), ScaleConfig(), SM90)


def load(each):
    return cache.load(each.module, each.spec, each.config, each.arch)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write modules that kernels are built by."""
    folder = tmp_path / "source" / "quack_pool_probe"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder.parent)

    def write(name, body):
        (folder / f"{name}.py").write_text(textwrap.dedent(body))
        return kernel(module=f"quack_pool_probe.{name}")

    yield write
    for name in [name for name in sys.modules if name.startswith("quack_pool_probe")]:
        del sys.modules[name]


@pytest.mark.exhaustive
def test_a_call_is_deferred_and_finds_its_kernel_later(package, tmp_path):
    """All in one session of workers, whose start takes seconds."""
    says = tmp_path / "says"
    blind = package(
        "blind",
        f"""
        import os
        from quack_probe.scale import build as real
        def build(spec, config):
            names = ("CUDA_VISIBLE_DEVICES", "CUTE_DSL_ARCH", "QUACK_ARCH")
            open({str(says)!r}, "w").write(repr([os.environ[name] for name in names]))
            return real(spec, config)
        """,
    )
    fails = package("fails", "def build(spec, config):\n    raise ValueError('no such tile')\n")
    dies = package(
        "dies",
        f"""
        import os, signal
        from quack_probe.scale import build as real
        def build(spec, config):
            if os.getpid() != {os.getpid()}:
                os.kill(os.getpid(), signal.SIGABRT)
            return real(spec, config)
        """,
    )
    stuck = package(
        "stuck",
        f"""
        import os, time
        from quack_probe.scale import build as real
        def build(spec, config):
            if os.getpid() != {os.getpid()}:
                time.sleep(1000)
            return real(spec, config)
        """,
    )
    before = jit_stats()
    with Pool(4, seconds=5.0) as workers, workers.deferring():
        waiting = []
        for each in (kernel(1), kernel(2), blind, fails, dies, stuck, kernel(1)):
            with pytest.raises(Deferred) as caught:
                load(each)
            assert caught.value.kernel == each
            waiting.append(caught.value.done)
        assert waiting[0] is waiting[-1]  # asked for once
        while unfinished := [done for done in waiting if not done.done()]:
            workers.wait(unfinished)
        done = jit_stats() - before
        assert (done.compiled, done.loaded, done.deferred) == (0, 0, 7)
        for each in (kernel(1), kernel(2), blind):
            assert load(each) is not None
        done = jit_stats() - before
        assert (done.compiled, done.loaded) == (0, 3)
        assert says.read_text() == "['', 'sm_90a', 'sm_90a']"
        errors = [str(answer.exception()) for answer in waiting[3:6]]
        assert "ValueError: no such tile" in errors[0]
        assert "exit status -6" in errors[1]
        assert "took too long" in errors[2]
        with pytest.raises(CompileError, match="no such tile") as caught:
            load(fails)
        assert isinstance(caught.value.__cause__, ValueError)  # with its real traceback
        for each in (dies, stuck):
            assert load(each) is not None
        assert (jit_stats() - before).compiled == 2
        process = workers._process
    assert process.returncode == 0


def test_workers_that_are_killed_are_done_without(caplog):
    with Pool(1) as workers, workers.deferring():
        with pytest.raises(Deferred) as caught:
            load(kernel())
        os.kill(workers._process.pid, signal.SIGKILL)
        workers.wait([caught.value.done])
        with caplog.at_level(logging.WARNING, "quack.jit"):
            assert load(kernel()) is not None
        assert "the workers ended" in caplog.text
        assert load(kernel(65)) is not None  # no new ones


def test_workers_that_never_start_are_given_up(monkeypatch):
    monkeypatch.setattr(pool, "START_SECONDS", 0.3)
    with Pool(1, seconds=0.2) as workers, workers.deferring():
        with pytest.raises(Deferred) as caught:
            load(kernel())
        os.kill(workers._process.pid, signal.SIGSTOP)
        started = time.monotonic()
        workers.wait([caught.value.done])
        assert time.monotonic() - started < 10
        with pytest.raises(WorkerError, match="do not answer"):
            caught.value.done.result()


def test_many_kernels_do_not_block_on_workers_that_do_not_read(monkeypatch):
    """However many are wanted, what is sent ahead fits into the pipe."""
    monkeypatch.setattr(pool, "START_SECONDS", 0.5)
    with Pool(2, seconds=0.2) as workers:
        first = workers.submit(kernel(1))
        os.kill(workers._process.pid, signal.SIGSTOP)
        others = [workers.submit(kernel(n)) for n in range(2, 400)]
        workers.wait([first])
        assert all(future.done() for future in others)
        assert {str(future.exception()) for future in others} == {"the workers do not answer"}
        assert len(workers._sent) == len(workers._queue) == 0
    assert workers._process is None


def test_wait_for_nothing_returns():
    Pool(1).wait([])


def test_warm_calls_start_nothing():
    load(kernel())
    cache.clear_memory()
    with Pool(1) as workers, workers.deferring():
        assert load(kernel()) is not None
        assert workers._process is None


def test_without_a_folder_the_call_compiles(tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    with Pool(1) as workers, workers.deferring():
        assert load(kernel()) is not None
        assert workers._process is None


@pytest.mark.parametrize("end", ["says so", "is killed"])
def test_workers_end_with_the_process_that_started_them(end):
    ours, theirs = multiprocessing.Pipe()
    if end == "says so":
        ours.send(None)
    else:
        ours.close()
    worker.serve(theirs, 1, 1.0)  # returns


def test_compile_reports_each_kernel(monkeypatch):
    """With a stand-in for the process behind the workers."""
    workers = Pool(2)
    sent = []

    def send(each, future):  # answers at once, so that nothing is waited for
        sent.append(each.spec.n)
        threading.Timer(
            0.01, pool._resolve, (future, "broken" if each.spec.n == 2 else None)
        ).start()

    monkeypatch.setattr(workers, "_send", send)
    seen = {}
    workers.compile(
        map(kernel, (1, 2, 3, 1)), lambda each, error: seen.update({each.spec.n: error})
    )
    assert sent == [1, 2, 3]
    assert seen == {1: None, 2: "broken", 3: None}
