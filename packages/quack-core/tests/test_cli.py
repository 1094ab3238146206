"""The commands ``quack cache`` and ``quack env``, and warming up with a package made for it."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from quack_core import arch, driver, env
from quack_core.cli import warmup
from quack_core.cli.entry import main
from quack_core.errors import DeviceError, UnsupportedError
from quack_core.jit import cache, operators, pool, store
from quack_core.jit.keys import Kernel, Key
from quack_core.jit.models import MODELS

PROBE = Path(__file__).parent / "jit_probe"


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    store.forget_folders()
    yield store.folder()
    store.forget_folders()


def put(place, number):
    def export(folder):
        path = folder / "kernel.so"
        path.write_bytes(b"machine code")
        return path

    digest = hashlib.sha256(b"%d" % number).hexdigest()
    record = {"number": number, "target": "sm_90a", "module": "quack_x.kernel"}
    store.write(place, Key(digest, record), f"kernel_{number}", 1.5, export)
    return digest


def run(capsys, *words):
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_cache_path(place, capsys):
    assert run(capsys, "cache", "path") == (0, f"{place}\n", "")
    assert json.loads(run(capsys, "cache", "path", "--json")[1]) == {"path": str(place)}


def test_cache_list(place, capsys):
    digests = [put(place, number) for number in range(2)]
    os.utime(place / f"{digests[1]}.json", (1e9, 1e9))
    os.utime(place / f"{digests[1]}.so", (1e9, 1e9))
    status, out, _ = run(capsys, "cache", "list", "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["kernel"] for row in rows] == ["kernel_0", "kernel_1"]  # that of 2001 is last
    assert rows[1] == {
        "key": digests[1],
        "kernel": "kernel_1",
        "target": "sm_90a",
        "module": "quack_x.kernel",
        "size_bytes": sum(path.stat().st_size for path in place.glob(f"{digests[1]}.*")),
        "compile_seconds": 1.5,
        "used": "2001-09-09T01:46:40+00:00",
    }
    status, out, _ = run(capsys, "cache", "list")
    assert re.search(rf"{digests[1][:12]} +kernel_1 +sm_90a +\d+ +1\.50 s", out)


def test_cache_stats_and_clear(place, capsys, monkeypatch):
    monkeypatch.setenv("QUACK_CACHE_MAX_MB", "3")
    for number in range(3):
        put(place, number)
    next(place.glob("*.so")).write_bytes(b"?")
    size = sum(path.stat().st_size for path in place.iterdir())
    found = json.loads(run(capsys, "cache", "stats", "--json")[1])
    assert found == {
        "path": str(place),
        "entries": 3,
        "size_bytes": size,
        "limit_bytes": 3 << 20,
        "damaged": 1,
        "compile_seconds": 4.5,
    }
    assert "entries          3\n" in run(capsys, "cache", "stats")[1]
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody answers
    assert run(capsys, "cache", "clear")[0] == 1
    assert len(store.entries(place)) == 3
    status, out, _ = run(capsys, "cache", "clear", "--yes")
    assert status == 0
    assert "removed          3\n" in out
    assert list(place.iterdir()) == []


def test_env(capsys, monkeypatch):
    monkeypatch.setenv("QUACK_JIT", "warn")
    monkeypatch.delenv("QUACK_ARCH", raising=False)
    found = json.loads(run(capsys, "env", "--json")[1])
    assert found["variables"].keys() == {variable.name for variable in env.VARIABLES}
    assert (found["variables"]["QUACK_JIT"], found["variables"]["QUACK_ARCH"]) == ("warn", None)
    assert found["versions"]["python"].startswith("cpython 3.")
    lines = run(capsys, "env")[1].splitlines()
    assert "QUACK_JIT            warn" in lines
    assert "QUACK_ARCH           not set (the GPU's)" in lines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["warmup"], "say what to compile: --model or --shapes"),
        (["warmup", "--model", "gpt-0"], "model 'gpt-0' is unknown; known: llama3-8b"),
        (["warmup", "--model", "llama3-8b", "--ops", "fft"], "--ops: fft unknown"),
        (["warmup", "--model", "llama3-8b", "--arch", "sm_10"], "architecture 'sm_10' is unknown"),
        (["warmup", "--model", "llama3-8b"], "say --arch, such as --arch sm_90a: cannot tell"),
        (["cache", "burn"], "No such command 'burn'"),
    ],
)
def test_wrong_usage(words, says, capsys, monkeypatch):
    def no_driver():
        raise DeviceError("no CUDA driver found")

    monkeypatch.delenv("QUACK_ARCH", raising=False)
    monkeypatch.setattr(driver, "load", no_driver)
    status, out, err = run(capsys, *words)
    assert status in (1, 2)
    assert says in err
    assert out == ""


def test_without_a_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "file"))
    status, _, err = run(capsys, "cache", "path")
    assert status == 1
    assert str(tmp_path / "file") in err


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package of operators: one, whose kernels are those of the probe."""
    pytest.importorskip("torch", reason="packages of operators bring torch, quack-core does not")
    folder = tmp_path / "source" / "quack_warm_probe"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "kernels.py").write_text(
        textwrap.dedent("""
            from quack_core.jit.keys import Kernel
            from quack_probe.spec import ScaleConfig, ScaleSpec
            OPERATORS = ("scale",)
            def scale(x, bias=None, *, arch, twice=False):
                kind = None if bias is None else str(bias.dtype).removeprefix("torch.")
                sizes = [x.shape[-1], 2 * x.shape[-1]] if x.requires_grad else [x.shape[-1]]
                dtype = str(x.dtype).removeprefix("torch.")
                config = ScaleConfig(64 if twice else 32)
                return tuple(
                    Kernel("quack_probe.scale", ScaleSpec(n, dtype, kind), config, arch)
                    for n in sizes
                )
            def model_calls(model, arch):
                return ({"op": "scale", "x": f"{model.dtype}[8, {model.hidden}]"},)
        """)
    )
    for each in (PROBE, folder.parent):
        monkeypatch.syspath_prepend(each)
    monkeypatch.setattr(operators, "PACKAGES", ("quack_absent", "quack_warm_probe"))
    yield
    for name in [name for name in sys.modules if name.startswith("quack_warm_probe")]:
        del sys.modules[name]


def write_calls(tmp_path, *calls):
    path = tmp_path / "calls.jsonl"
    path.write_text(
        "\n".join(call if isinstance(call, str) else json.dumps(call) for call in calls)
    )
    return path


CALLS = (
    {"op": "scale", "x": "fp32[8, 48]", "bias": "float32[48]"},
    {"op": "scale", "x": "fp32[4, 8, 48]", "bias": "fp32[48]"},  # the same kernel
    "",
    {"op": "scale", "x": "fp32[8, 49]", "grad": True, "twice": True},
)


def check_that_nothing_is_compiled_elsewhere(tmp_path):
    """Where the folder was moved to, the DSL is not even imported."""
    moved = tmp_path / "another machine"
    (tmp_path / "cache").rename(moved)
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(PROBE)!r})
        from quack_core import arch
        from quack_core.jit import cache, jit_stats
        from quack_probe.spec import ScaleConfig, ScaleSpec
        cache.load("quack_probe.scale", ScaleSpec(48, bias="float32"), ScaleConfig(), arch.get("sm90"))
        print(jit_stats().compiled, jit_stats().loaded, "cutlass" in sys.modules)
    """)
    environment = {**os.environ, "QUACK_CACHE_DIR": str(moved), "QUACK_JIT": "error"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == "0 1 False\n"


@pytest.mark.exhaustive
def test_warmup_fills_the_cache_and_then_has_nothing_to_do(package, tmp_path, place, capsys):
    path = write_calls(tmp_path, *CALLS)
    words = ("warmup", "--shapes", str(path), "--arch", "sm_90a", "--workers", "2", "--json")
    status, out, _ = run(capsys, *words)
    first = json.loads(out)
    assert status == 0
    assert (first["compiled"], first["present"], first["failed"]) == (3, 0, [])
    assert first["folder"] == str(place)
    keys = [entry.record["key"] for entry in store.entries(place)]
    assert {key["target"] for key in keys} == {"sm_90a"}
    fields = [(key["spec"]["fields"], key["config"]["fields"]["threads"]) for key in keys]
    found = {(spec["n"], spec["bias"], threads) for spec, threads in fields}
    assert found == {(48, "float32", 32), (49, None, 64), (98, None, 64)}
    status, out, _ = run(capsys, *words)
    second = json.loads(out)
    assert (second["compiled"], second["present"]) == (0, 3)
    assert second["seconds"] < 5
    check_that_nothing_is_compiled_elsewhere(tmp_path)


@pytest.fixture
def no_workers(monkeypatch):
    """Kernels sent to workers; those of 64 elements fail."""
    sent = []

    def send(self, kernel, future):
        sent.append(kernel)
        if kernel.spec.n == 64:
            return pool._resolve(future, "Traceback\nCompileError: no such tile")
        put_as(kernel)
        return pool._resolve(future, None)

    def put_as(kernel):
        def export(folder):
            path = folder / "kernel.so"
            path.write_bytes(b"machine code")
            return path

        store.write(store.folder(), kernel.key(), kernel.name, 0.1, export)

    monkeypatch.setattr(pool.Pool, "_send", send)
    return sent


def test_failures_are_named_and_counted(package, no_workers, tmp_path, capsys):
    calls = [{"op": "scale", "x": f"fp32[8, {n}]"} for n in (63, 64, 65)]
    path = write_calls(tmp_path, *calls)
    status, out, err = run(capsys, "warmup", "--shapes", str(path), "--arch", "sm90")
    assert status == 1
    assert err == "scale_n64: CompileError: no such tile\n"
    assert "2 compiled, 0 there before, 1 failed" in out


def test_model_and_operators(package, no_workers, capsys):
    words = ("warmup", "--model", "llama3-8b", "--arch", "sm90", "--json")
    assert json.loads(run(capsys, *words)[1])["compiled"] == 1
    (kernel,) = no_workers
    assert (kernel.spec.n, kernel.spec.dtype) == (MODELS["llama3-8b"].hidden, "bfloat16")
    assert json.loads(run(capsys, *words, "--ops", "scale")[1])["present"] == 1


def test_operators_that_are_not_called(package, no_workers, tmp_path, capsys, monkeypatch):
    listing = operators.listing("quack_warm_probe")
    monkeypatch.setattr(listing, "OPERATORS", ("scale", "shift"))
    words = ("warmup", "--model", "llama3-8b", "--arch", "sm90", "--ops", "shift")
    status, _, err = run(capsys, *words)
    assert status == 2
    assert "--ops: none of these calls is of shift" in err
    assert no_workers == []


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ("scale fp32", ValueError, r"calls.jsonl:1: expected a JSON object with 'op'"),
        ({"x": "fp32[8]"}, ValueError, r"calls.jsonl:1: expected a JSON object with 'op'"),
        ({"op": "fft"}, UnsupportedError, "operator 'fft' is unknown; known: scale"),
        ({"op": "scale", "x": "fp33[8]"}, ValueError, "fp33 is no dtype; such as bf16"),
        ({"op": "scale", "x": "fp32[8]", "y": 1}, TypeError, r'"y": 1.*unexpected keyword'),
    ],
)
def test_calls_that_are_none(call, error, says, package, tmp_path):
    with pytest.raises(error, match=says):
        warmup.kernels_of(warmup.calls_of_file(write_calls(tmp_path, call)), arch.SM90)


def test_has_compares_the_whole_record(place, monkeypatch):
    monkeypatch.syspath_prepend(PROBE)
    from quack_probe.spec import ScaleConfig, ScaleSpec

    kernel = Kernel("quack_probe.scale", ScaleSpec(64), ScaleConfig(), arch.SM90)
    name = cache.key(kernel.module, kernel.spec, kernel.config, kernel.arch)
    assert not store.has(place, name)

    def export(folder):
        path = folder / "kernel.so"
        path.write_bytes(b"machine code")
        return path

    store.write(place, name, "kernel", 0.1, export)
    assert store.has(place, name)
    assert not store.has(place, Key(name.digest, {**name.record, "target": "sm_120a"}))
    (place / f"{name.digest}.so").write_bytes(b"?")
    assert not store.has(place, name)


def test_module_and_help():
    command = [sys.executable, "-m", "quack_core", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for name in ("doctor", "warmup", "cache", "env"):
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE)
    command = [sys.executable, "-m", "quack_core", "doctor", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--no-compile" in done.stdout
