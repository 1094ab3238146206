"""From spec to function: memory, disk, compile; threads and processes share one compilation."""

import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from quack_core import arch
from quack_core.errors import CompileError, StaleSourceError
from quack_core.jit import cache, store
from quack_core.testing.fake_cuda import fake_cuda, rejection

PROBE = Path(__file__).parent / "jit_probe"
MODULE = "quack_probe.scale"
SM90 = arch.get("sm90")

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


@pytest.fixture
def compilations(monkeypatch):
    """Specs compiled so far."""
    from quack_core.jit import compile as compiler

    specs = []
    real = compiler.compile_kernel

    def compile_kernel(module, spec, config, arch, **kwargs):
        specs.append(spec)
        return real(module, spec, config, arch, **kwargs)

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    return specs


def load(n=64, name="sm90"):
    from quack_probe.spec import ScaleConfig, ScaleSpec

    return cache.load(MODULE, ScaleSpec(n), ScaleConfig(), arch.get(name))


def check(function, n=64):
    """The function is the kernel for rows of n: its argument checks say so."""
    wrong = fake_cuda((8, n + 1), "float32")
    assert f"expected to be {n}" in str(rejection(function, wrong, None, wrong, 1.0))


def entries(tmp_path, suffix=".so"):
    return sorted((tmp_path / "cache" / "kernels").glob(f"*{suffix}"))


def test_memory_disk_and_compile_KC_09(tmp_path, compilations, caplog):
    with caplog.at_level(logging.INFO, "quack.jit"):
        check(load())
        assert load() is load()
        cache.clear_memory()
        check(load())
    assert len(compilations) == 1
    lines = [r.getMessage() for r in caplog.records if r.name == "quack.jit"]
    assert [line.split()[0] for line in lines] == ["scale_n64"] * 2
    assert [line.split()[2] for line in lines] == ["miss", "hit"]
    (path,) = entries(tmp_path)
    assert all(line.split()[1] == path.name[:12] for line in lines)
    assert float(lines[1].split()[-2]) < 1.0


def test_entries_of_several_architectures(tmp_path, compilations):
    for name in ("sm90", "sm100"):
        check(load(name=name))
    assert len(compilations) == len(entries(tmp_path)) == 2


@pytest.mark.parametrize("part", [0, 1, 2])
def test_damaged_entry_compiles_again_KC_02(part, tmp_path, compilations):
    load()
    (path,) = entries(tmp_path)
    code = path.read_bytes()
    path.unlink()  # this process runs the old file: what is wrong has to be another one
    path.write_bytes(code[: [0, 1, len(code) // 2][part]])
    path.chmod(0o600)
    cache.clear_memory()
    check(load())
    assert len(compilations) == 2
    assert path.stat().st_size == len(code)
    cache.clear_memory()
    check(load())
    assert len(compilations) == 2


def test_object_that_does_not_load_compiles_again_KC_02(tmp_path, compilations):
    load()
    (record,) = entries(tmp_path, ".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"symbol": "another"}))
    cache.clear_memory()
    check(load())
    assert len(compilations) == 2


def test_memory_only_KC_04(tmp_path, compilations, caplog):
    (tmp_path / "cache").write_text("a file in its place")
    for n in (64, 65, 64):
        check(load(n), n)
    assert [spec.n for spec in compilations] == [64, 65]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_export_that_fails_KC_02(tmp_path, monkeypatch):
    from quack_core.jit.compile import Compiled

    real = Compiled.export

    def export(self, path):
        if "kernels" in path.parts:  # not the one in memory
            path.write_bytes(b"half")
            raise RuntimeError("midway")
        real(self, path)

    monkeypatch.setattr(Compiled, "export", export)
    check(load())
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".lock"]


def test_dsl_that_writes_files_has_to_compile(monkeypatch, compilations):
    monkeypatch.setenv("CUTE_DSL_KEEP", "ptx")
    load()
    cache.clear_memory()
    load()
    assert len(compilations) == 2


def test_threads_compile_once_KC_01(compilations):
    functions = []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        functions.append(load())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1
    assert [function is functions[0] for function in functions] == [True] * 8


def test_fifty_calls_compile_once_KC_07(compilations):
    for _ in range(50):  # the number of rows is no part of the spec
        load()
    assert [spec.n for spec in compilations] == [64]


def start_processes(tmp_path, count):
    """Processes that load fifty kernels each, ready to begin.

    A stand-in compiles, without the DSL: sixteen imports of it would take minutes.
    """
    script = textwrap.dedent(f"""
        import random, sys, time, types
        sys.path.insert(0, {str(PROBE)!r})
        from quack_core import arch
        from quack_core.jit import cache, jit_stats
        from quack_probe.spec import ScaleConfig, ScaleSpec
        class Compiled:
            function = "from memory"
            def __init__(self, spec):
                self.name = spec.name
        def export(compiled, folder):
            path = folder / "scale.so"
            path.write_bytes(b"first half")
            time.sleep(0.01)
            path.write_bytes(b"machine code of " + compiled.name.encode())
            return path
        def compile_kernel(module, spec, config, arch, **kwargs):
            with open({str(tmp_path / "compilations")!r}, "a") as log:
                log.write(f"{{spec.n}}\\n")
            return Compiled(spec)
        stand_in = types.ModuleType("quack_core.jit.compile")
        stand_in.compile_kernel = compile_kernel
        sys.modules["quack_core.jit.compile"] = stand_in
        cache._export = export
        cache._load = lambda path, symbol: (symbol, path.read_bytes())
        sizes = list(range(1, 51))
        random.Random(int(sys.argv[1]) // 4).shuffle(sizes)  # four at a time want the same first
        print("ready", flush=True)
        sys.stdin.readline()
        for n in sizes:
            found = cache.load({MODULE!r}, ScaleSpec(n), ScaleConfig(), arch.get("sm90"))
            assert found == (f"scale_n{{n}}", f"machine code of scale_n{{n}}".encode()), found
        stats = jit_stats()
        print(stats.compiled, stats.loaded)
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * count
    return processes


def begin(processes):
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def finish(processes):
    """How many kernels each compiled and loaded."""
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [(int(compiled), int(loaded)) for compiled, loaded in answers]


@pytest.mark.exhaustive
def test_sixteen_processes_and_fifty_keys_compile_fifty_times_KC_01(tmp_path):
    processes = start_processes(tmp_path, 16)
    begin(processes)
    counts = finish(processes)
    assert sum(compiled for compiled, _ in counts) == 50
    assert sum(loaded for _, loaded in counts) == 16 * 50 - 50
    compiled = map(int, (tmp_path / "compilations").read_text().split())
    assert sorted(compiled) == [*range(1, 51)]
    left = [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()]
    assert (left.count(".json"), left.count(".so")) == (50, 50)
    assert set(left) == {".json", ".lock", ".so"}


@pytest.mark.exhaustive
def test_killed_writers_leave_nothing_wrong_KC_02(tmp_path):
    """Four of eight are killed somewhere between a lock and the last rename."""
    processes = start_processes(tmp_path, 8)
    begin(processes)
    log = tmp_path / "compilations"
    for killed in processes[::2]:
        while killed.poll() is None and (not log.exists() or len(log.read_text().split()) < 4):
            time.sleep(0.001)
        killed.kill()
        killed.communicate()
        log.write_text("")  # count again, for the next one
    finish(processes[1::2])
    (last,) = start_processes(tmp_path, 1)
    begin([last])
    assert finish([last]) == [(0, 50)]
    whole = {path.stem for path in (tmp_path / "cache" / "kernels").glob("[0-9a-f]*.so")}
    assert len(whole) == 50
    assert store.damaged(tmp_path / "cache" / "kernels") == []


def test_edit_while_compiling_KC_06(tmp_path, monkeypatch):
    """The text that was traced is not the text of the key: nothing is stored."""
    import shutil

    from quack_core.jit import compile as compiler

    package = tmp_path / "source" / "quack_probe_edited"
    shutil.copytree(PROBE / "quack_probe", package)
    monkeypatch.syspath_prepend(tmp_path / "source")
    from quack_probe_edited.spec import ScaleConfig, ScaleSpec

    real = compiler.compile_kernel

    def compile_kernel(*args, **kwargs):
        compiled = real(*args, **kwargs)
        (package / "factor.py").write_text("FACTOR = 2.0")
        return compiled

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    for _ in range(2):
        with pytest.raises(StaleSourceError, match=r"factor.*Restart the process"):
            cache.load("quack_probe_edited.scale", ScaleSpec(64), ScaleConfig(), SM90)
    assert entries(tmp_path) == entries(tmp_path, ".json") == []


def test_edit_after_a_kernel_that_does_not_compile_KC_06(tmp_path, monkeypatch):
    """The old text is loaded: what it compiles to must not be stored under the new one."""
    import shutil

    package = tmp_path / "source" / "quack_probe_broken"
    shutil.copytree(PROBE / "quack_probe", package)
    scale = (package / "scale.py").read_text()
    (package / "scale.py").write_text("def build(spec, config):\n    raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path / "source")
    from quack_probe_broken.spec import ScaleConfig, ScaleSpec

    args = ("quack_probe_broken.scale", ScaleSpec(64), ScaleConfig(), SM90)
    with pytest.raises(CompileError, match="broken"):
        cache.load(*args)
    (package / "scale.py").write_text(scale)
    with pytest.raises(StaleSourceError, match=r"scale.*Restart the process"):
        cache.load(*args)


def test_edit_makes_another_entry_KC_06(tmp_path):
    """In two processes: the second one finds nothing under the new text."""
    import shutil

    source = tmp_path / "source"
    shutil.copytree(PROBE, source, ignore=shutil.ignore_patterns("__pycache__"))
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(source)!r})
        from quack_core import arch
        from quack_core.jit import cache
        from quack_probe.spec import ScaleConfig, ScaleSpec
        print(cache.key({MODULE!r}, ScaleSpec(64), ScaleConfig(), arch.get("sm90")).digest)
    """)
    digests = []
    for factor in (1.0, 2.0, 1.0):
        (source / "quack_probe" / "factor.py").write_text(f"FACTOR = {factor}\n")
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        digests.append(done.stdout)
    assert digests[0] == digests[2] != digests[1]
