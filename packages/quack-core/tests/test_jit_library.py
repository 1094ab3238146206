"""What the cache keeps loads without the DSL; without a linker, with it."""

import json
import logging
import os
import re
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from quack_core import arch
from quack_core.jit import cache, library, store, versions
from quack_core.testing.fake_cuda import fake_cuda, rejection

PROBE = Path(__file__).parent / "jit_probe"
MODULE = "quack_probe.scale"

pytestmark = pytest.mark.compiles_here


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(PROBE)
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    store.forget_folders()
    cache.clear_memory()
    library.linker.cache_clear()
    yield
    store.forget_folders()
    cache.clear_memory()
    library.linker.cache_clear()


def load(n=64):
    from quack_probe.spec import ScaleConfig, ScaleSpec

    return cache.load(MODULE, ScaleSpec(n), ScaleConfig(), arch.get("sm90"))


def check(function, n=64):
    """The function is the kernel for rows of n: its argument checks say so."""
    wrong = fake_cuda((8, n + 1), "float32")
    assert f"expected to be {n}" in str(rejection(function, wrong, None, wrong, 1.0))


def suffixes(tmp_path):
    return sorted(path.suffix for path in (tmp_path / "cache" / "kernels").iterdir())


def in_a_new_process(tmp_path, env=None):
    """Load the probe kernel elsewhere; returns what it says and its log."""
    script = textwrap.dedent(f"""
        import json, sys
        sys.path.insert(0, {str(PROBE)!r})
        from quack_core import arch
        from quack_core.jit import cache, jit_stats
        from quack_core.testing.fake_cuda import fake_cuda, rejection
        from quack_probe.spec import ScaleConfig, ScaleSpec
        import tvm_ffi  # takes torch along
        function = cache.load({MODULE!r}, ScaleSpec(64), ScaleConfig(), arch.get("sm90"))
        wrong = fake_cuda((8, 65), "float32")
        text = str(rejection(function, wrong, None, wrong, 1.0))
        stats = jit_stats()
        print(json.dumps({{
            "dsl": "cutlass" in sys.modules,
            "works": "expected to be 64" in text,
            "counts": [stats.compiled, stats.loaded],
        }}))
    """)
    environment = os.environ | {"QUACK_LOG": "INFO"} | (env or {})
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout), done.stderr


def test_filled_cache_needs_no_dsl_KC_09(tmp_path):
    check(load())
    assert suffixes(tmp_path) == [".json", ".lock", ".so"]
    answer, log = in_a_new_process(tmp_path)
    assert answer == {"dsl": False, "works": True, "counts": [0, 1]}
    assert re.fullmatch(r"quack\.jit INFO: scale_n64 \w{12} hit in 0\.\d+ s", log.strip())


def test_library_names_what_it_needs_but_not_where(tmp_path):
    """So that a cache may move to another machine or environment."""
    load()
    (path,) = (tmp_path / "cache" / "kernels").glob("*.so")
    code = path.read_bytes()
    assert b"libcute_dsl_runtime.so\0" in code
    assert b"libtvm_ffi.so\0" in code
    assert b"site-packages" not in code
    assert str(tmp_path).encode() not in code


def test_without_a_linker_the_dsl_loads_object_files(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    check(load(64))
    check(load(65), 65)
    assert suffixes(tmp_path).count(".o") == 2
    assert ".so" not in suffixes(tmp_path)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1  # for both kernels
    assert "no linker found" in lines[0] and "binutils" in lines[0]
    answer, _ = in_a_new_process(tmp_path)
    assert answer == {"dsl": True, "works": True, "counts": [0, 1]}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("echo no such option >&2; exit 1", id="fails"),
        # junk goes to the output alone: the words after it are libraries of this environment
        pytest.param(
            'while [ "$1" != -o ]; do shift; done; echo junk > "$2"',
            id="junk",
        ),
    ],
)
def test_linker_that_does_not_work(script, tmp_path, monkeypatch, caplog):
    program = tmp_path / "bin" / "ld"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))
    check(load())
    assert suffixes(tmp_path) == [".json", ".lock", ".o"]
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(program) in line and "stays an object file" in line


def test_runtime_of_the_flavour_in_the_key(monkeypatch, tmp_path):
    flavour = versions.flavour().split()[0]
    assert library.runtime().parts[-3:] == (flavour, "lib", "libcute_dsl_runtime.so")
    from quack_probe.spec import ScaleConfig, ScaleSpec

    def digest():
        return cache.key(MODULE, ScaleSpec(64), ScaleConfig(), arch.get("sm90")).digest

    here = digest()
    monkeypatch.setattr(versions, "flavour", lambda: "cu11 4.8.1")
    assert digest() != here
    with pytest.raises(RuntimeError, match="flavour cu11 is not installed: reinstall"):
        library.runtime()


def test_entry_without_the_runtime_library_is_a_miss(monkeypatch, caplog):
    """As after the DSL was removed, or its other flavour: nothing of the entry is loaded."""
    check(load())
    cache.clear_memory()
    monkeypatch.setattr(library, "runtime", lambda: Path("/nowhere/libcute_dsl_runtime.so"))
    library._load_runtime.cache_clear()
    compiled = []
    monkeypatch.setattr(cache, "_compile", lambda *args: compiled.append(args) or "compiled")
    with caplog.at_level(logging.INFO, "quack.jit"):
        assert load() == "compiled"
    assert len(compiled) == 1
    assert "libcute_dsl_runtime.so" in caplog.text
