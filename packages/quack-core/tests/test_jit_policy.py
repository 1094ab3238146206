"""What happens when a kernel has to be compiled, and the counts of what happened."""

import logging
import threading

import pytest

from quack_core import arch
from quack_core.errors import JitForbiddenError
from quack_core.jit import JitStats, cache, jit_policy, jit_stats, policy, store
from quack_core.jit.keys import Kernel

SM90 = arch.get("sm90")

pytestmark = pytest.mark.compiles_here


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUACK_JIT", raising=False)
    store.forget_folders()
    cache.clear_memory()
    yield
    store.forget_folders()
    cache.clear_memory()


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that were compiled, by a stand-in that stores them in the real way."""
    names = []

    class Compiled:
        name, function = "scale", "from memory"

    def compile_kernel(module, spec, config, arch, **kwargs):
        names.append(spec.name)
        return Compiled()

    def export(compiled, folder):
        path = folder / "scale.so"
        path.write_bytes(b"machine code")
        return path

    from quack_core.jit import compile as compiler

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cache, "_export", export)
    monkeypatch.setattr(cache, "_load", lambda path, symbol: (symbol, path.read_bytes()))
    return names


@pytest.fixture(autouse=True)
def probe(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(Path(__file__).parent / "jit_probe")


def kernel(n=64):
    from quack_probe.spec import ScaleConfig, ScaleSpec

    return Kernel("quack_probe.scale", ScaleSpec(n), ScaleConfig(), SM90)


def load(n=64):
    each = kernel(n)
    return cache.load(each.module, each.spec, each.config, each.arch)


def test_error_names_kernel_key_and_way_out(compiled):
    with (
        jit_policy("error"),
        pytest.raises(JitForbiddenError, match="scale_n64 for sm_90a") as caught,
    ):
        load()
    assert compiled == []
    assert kernel().key().digest[:12] in str(caught.value)
    assert "quack warmup" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert load() == ("scale", b"machine code")  # outside it is allowed


def test_what_is_on_disk_is_no_miss(compiled):
    load()
    cache.clear_memory()
    with jit_policy("error"):
        assert load() == ("scale", b"machine code")
    assert compiled == ["scale_n64"]


def test_warn_compiles_and_says_so(compiled, caplog):
    with jit_policy("warn"):
        load()
        load()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "scale_n64 for sm_90a is not in the cache" in line
    assert compiled == ["scale_n64"]


def test_variable_and_nesting(compiled, monkeypatch):
    monkeypatch.setenv("QUACK_JIT", "error")
    with pytest.raises(JitForbiddenError):
        load()
    with jit_policy("allow"):
        load(1)
        with jit_policy("error"), pytest.raises(JitForbiddenError):
            load(2)
        load(2)
    assert compiled == ["scale_n1", "scale_n2"]


@pytest.mark.parametrize("origin", ["QUACK_JIT", "jit_policy"])
def test_word_that_is_no_policy(origin, compiled, monkeypatch):
    message = rf"{origin}='never': expected one of allow, warn, error"
    if origin == "QUACK_JIT":
        monkeypatch.setenv(origin, "never")
        with pytest.raises(ValueError, match=message):
            load()
    else:
        with pytest.raises(ValueError, match=message), jit_policy("never"):
            pass
    assert compiled == []


def in_a_thread(function):
    """What it raises in another thread, where torch runs backward passes."""
    caught = []

    def run():
        try:
            function()
        except JitForbiddenError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught


def test_policies_hold_in_all_threads(compiled):
    with jit_policy("error"):
        assert len(in_a_thread(load)) == 1
    assert in_a_thread(load) == []


def test_a_capture_forbids_on_its_thread_only(compiled):
    with policy.forbidden("a capture"):
        assert in_a_thread(lambda: load(1)) == []
        with pytest.raises(JitForbiddenError, match="a capture"):
            load(2)
    assert compiled == ["scale_n1"]


def test_threads_may_leave_in_another_order(compiled):
    first, second = jit_policy("error"), jit_policy("allow")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    load(1)
    second.__exit__(None, None, None)
    load(2)
    with jit_policy("error"), pytest.raises(JitForbiddenError):
        load(3)
    assert compiled == ["scale_n1", "scale_n2"]


def test_without_a_cache_folder_too(compiled, tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    with jit_policy("error"), pytest.raises(JitForbiddenError):
        load()
    assert load() == "from memory"


def test_counts(compiled):
    before = jit_stats()
    load(1)
    load(1)
    load(2)
    cache.clear_memory()
    load(1)
    done = jit_stats() - before
    assert (done.compiled, done.loaded, done.deferred) == (2, 1, 0)
    assert done.compile_seconds > 0
    assert done.load_seconds > 0
    assert before - before == JitStats()


def test_ensure_stores_what_is_missing(compiled):
    assert cache.ensure(kernel())
    assert not cache.ensure(kernel())
    with jit_policy("error"):
        load()
    assert compiled == ["scale_n64"]
