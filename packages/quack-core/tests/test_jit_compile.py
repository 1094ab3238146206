"""Compiling for any architecture without a GPU, and the arguments that kernels are compiled for."""

import importlib
import logging
import re
import threading
from pathlib import Path

import pytest

from quack_core import arch
from quack_core.errors import CompileError, DTypeError, ShapeError
from quack_core.testing.fake_cuda import fake_cuda, rejection

PROBE = Path(__file__).parent / "jit_probe"


@pytest.fixture(autouse=True)
def probe_importable(monkeypatch):
    monkeypatch.syspath_prepend(PROBE)


def compile_scale(n=64, name="sm90", **kwargs):
    from quack_probe.spec import ScaleConfig, ScaleSpec

    from quack_core.jit.compile import compile_kernel

    return compile_kernel(
        "quack_probe.scale", ScaleSpec(n), ScaleConfig(), arch.get(name), **kwargs
    )


@pytest.mark.parametrize("name", ["sm90", "sm100", "sm103", "sm120", "sm_121a"])
def test_artifacts_of_every_architecture(name, tmp_path):
    compiled = compile_scale(64, name, dump_dir=tmp_path / "with space")
    assert (
        re.search(r"^\.target (\S+)", compiled.ptx, re.MULTILINE).group(1) == arch.get(name).target
    )
    assert re.findall(r"\.entry (\w+)", compiled.ptx) == ["scale_n64_0"]
    assert compiled.cubin[:4] == b"\x7fELF"
    (folder,) = (tmp_path / "with space").iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".ptx", ".cubin"}


def test_each_compilation_has_its_own_folder_and_name(tmp_path):
    first, second = (compile_scale(n, dump_dir=tmp_path) for n in (64, 65))
    assert len(list(tmp_path.iterdir())) == 2
    assert (first.name, second.name) == ("scale_n64", "scale_n65")
    assert "scale_n65_0" in second.ptx


def test_without_dump_dir_there_are_no_artifacts():
    compiled = compile_scale()
    assert compiled.ptx is None
    assert compiled.cubin is None


def test_function_checks_arguments_without_a_gpu():
    function = compile_scale().function
    x, y = fake_cuda((8, 64), "float32"), fake_cuda((9, 64), "float32")
    assert type(function).__module__ == "tvm_ffi.core"  # raw: no Python frame in between
    assert "expected to match x.shape[0]" in str(rejection(function, x, None, y, 1.0))


def test_export_loads_again(tmp_path):
    from quack_core.jit.dsl import load_function

    compiled = compile_scale(72)
    compiled.export(tmp_path / "scale.o")
    function = load_function(tmp_path / "scale.o", compiled.name)
    x = fake_cuda((8, 71), "float32")
    assert "expected to be 72" in str(rejection(function, x, None, x, 1.0))


def test_error_names_kernel_spec_and_architecture():
    from quack_probe.spec import ScaleConfig, ScaleSpec

    from quack_core.jit.compile import compile_kernel

    wrong = arch.get("sm90")._replace(target="sm_5")
    with pytest.raises(CompileError) as caught:
        compile_kernel("quack_probe.scale", ScaleSpec(64), ScaleConfig(threads=96), wrong)
    for part in ("quack_probe.scale", "sm90", "sm_5", "ScaleSpec(n=64", "threads=96"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_ours_pass_unchanged(monkeypatch):
    def build(spec, config):
        raise ShapeError("n is odd")

    monkeypatch.setattr(importlib.import_module("quack_probe.scale"), "build", build)
    with pytest.raises(ShapeError, match="n is odd"):
        compile_scale()


def test_threads_may_compile_at_once():
    results = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(compile_scale(n).function))
        for n in range(100, 104)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4


def test_threads_do_not_leak_KC_08():
    def count():
        return len(list(Path("/proc/self/task").iterdir()))

    functions = [compile_scale(n).function for n in range(200, 203)]
    before = count()
    functions += [compile_scale(n).function for n in range(203, 211)]
    assert count() <= before + 2


def test_to_cute():
    from quack_core.jit.compile import to_cute

    widths = {"float32": 32, "bfloat16": 16, "float16": 16, "int32": 32, "int64": 64}
    assert {name: to_cute(name).width for name in widths} == widths
    with pytest.raises(DTypeError, match="float8"):
        to_cute("float8")


@pytest.mark.parametrize(
    ("dtype", "align", "divisor", "assumed"),
    [("bfloat16", 16, 8, 16), ("float32", 16, 4, 16), ("float32", 2, 1, 4), ("float16", 4, 2, 4)],
)
def test_symbolic_strides(dtype, align, divisor, assumed):
    from quack_core.jit.compile import symbolic
    from quack_core.jit.dsl import sym_int

    rows = sym_int()
    tensor = symbolic(dtype, (rows, sym_int(), 96), align=align)
    *outer, last = tensor.stride
    assert tensor.shape[0] is rows
    assert tensor.shape[2] == 96
    assert last == 1
    assert [(stride.width, stride.divisibility) for stride in outer] == [(64, divisor)] * 2
    assert outer[0] is not outer[1]
    assert tensor._assumed_align == assumed


def test_symbolic_contiguous():
    from quack_core.jit.compile import symbolic
    from quack_core.jit.dsl import sym_int

    assert symbolic("float32", (sym_int(), 12, 96), contiguous=True).stride == (1152, 96, 1)
    assert symbolic("float32", (96,)).stride == (1,)


def test_symbolic_absent_operand():
    from quack_core.jit.compile import symbolic

    assert symbolic(None, (4, 4)) is None


@pytest.mark.parametrize(
    ("version", "warnings"),
    [("4.8.3", 0), ("4.8rc1", 0), ("4.9.0", 1), ("4.10rc1", 1), ("5.0", 1), ("dev", 1)],
)
def test_warns_once_outside_the_tested_range(version, warnings, monkeypatch, caplog):
    from quack_core.jit import dsl, versions

    monkeypatch.setattr(versions, "dsl", lambda: version)
    dsl.check_version.cache_clear()
    with caplog.at_level(logging.WARNING, "quack"):
        dsl.check_version()
        dsl.check_version()
    dsl.check_version.cache_clear()
    assert len(caplog.records) == warnings
    assert all(version in record.getMessage() for record in caplog.records)
