"""The pytest plugin, in runs of its own: devices, strictness, records on an invented GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import quack_core
from quack_core.testing import records

SOURCE = Path(quack_core.__file__).parents[1]

PLUGIN = ("-p", "quack_core.testing.plugin", "-p", "no:cacheprovider")

FAKE_GPU = """
from quack_core.testing import records
records.find_gpu = lambda: records.Gpu("Imaginary 9", "sm90", "999.1", "13.0", 2)
"""

TESTS = """
import pytest

def test_device(device):
    assert device in ("cpu", "cuda")

@pytest.mark.parametrize("i", range(3))
def test_on_gpu(cuda, i):
    assert cuda == "cuda"

def test_skipped():
    pytest.skip("no second GPU")

@pytest.mark.xfail(strict=True)
def test_known():
    raise ValueError
"""

FAULTS = """
import pytest

def test_bad():
    raise ValueError

@pytest.fixture
def broken():
    raise ValueError

def test_error(broken):
    pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one package and tests, and a GPU that does not exist."""
    package = tmp_path / "packages" / "quack-toy" / "src" / "quack_toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__about__.py").write_text('__version__ = "1.2.3"\n')
    (package / "kernel.py").write_text("N = 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(FAKE_GPU)
    (tmp_path / "test_toy.py").write_text(TESTS)
    return tmp_path


def run(tree: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """pytest in `tree`, with the packages on PYTHONPATH."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("QUACK_", "PYTEST_"))}
    sources = [str(path) for path in (SOURCE, *tree.glob("packages/*/src"))]
    environment |= {"PYTHONPATH": os.pathsep.join(sources), **variables}
    command = [sys.executable, "-m", "pytest", *PLUGIN, *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment, check=False, capture_output=True, text=True
    )


def record_of(tree: Path) -> dict:
    return json.loads((tree / "tests/records/sm90.json").read_text())


RECORD = ("--device", "cuda", "--record", "tests/records/sm90.json")


def test_cpu_skips_what_needs_a_gpu(tree):
    result = run(tree, "-rs")
    assert result.returncode == 0
    assert "needs a GPU: run with --device cuda" in result.stdout
    assert "1 passed, 4 skipped, 1 xfailed" in result.stdout


@pytest.mark.exhaustive
def test_require_gpu_makes_the_skip_a_failure(tree):
    result = run(tree, QUACK_REQUIRE_GPU="1")
    assert result.returncode == 1
    assert "QUACK_REQUIRE_GPU is set" in result.stdout
    assert "1 passed, 1 skipped, 1 xfailed, 3 errors" in result.stdout


@pytest.mark.exhaustive
def test_cuda_without_a_gpu_is_an_error(tree):
    (tree / "conftest.py").unlink()
    result = run(tree, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device cuda: no usable GPU: " in result.stderr
    assert "passed" not in result.stdout


@pytest.mark.exhaustive
def test_record_needs_the_gpu(tree):
    result = run(tree, "--record", "r.json")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "add --device cuda" in result.stderr


def test_plugin_loads_neither_torch_nor_the_dsl():
    heavy = "{'torch', 'cutlass', 'tvm_ffi'}"
    code = f"import quack_core.testing.plugin, sys; sys.exit(bool({heavy} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


WORKERS = [
    pytest.param((), id="serial"),
    pytest.param(("-n2",), id="xdist", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("workers", WORKERS)
def test_record(tree, workers):
    result = run(tree, *RECORD, *workers, f"--rootdir={tree}", str(tree / "test_toy.py"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "record of sm90 written to" in result.stdout
    record = record_of(tree)
    assert record["gpu"] == {"name": "Imaginary 9", "count": 2}
    assert (record["arch"], record["driver"], record["format"]) == ("sm90", "999.1", 1)
    assert record["versions"]["quack-toy"] == "1.2.3"
    assert record["versions"]["cuda"] == "13.0"
    assert {"torch", "python", "nvidia-cutlass-dsl", "apache-tvm-ffi"} <= set(record["versions"])
    counts = {"passed": 4, "failed": 0, "errors": 0, "skipped": 1, "xfailed": 1}
    assert record["counts"] == counts
    assert record["skip_reasons"] == {"no second GPU": 1}
    toy = tree / "packages/quack-toy/src/quack_toy"
    assert record["fingerprints"] == {"quack_toy": records.fingerprint(toy)}
    assert record["failures"] == []
    assert record["duration_s"] > 0
    assert str(tree) not in json.dumps(record)
    assert record["arguments"][-1] == "test_toy.py"
    folder = tree / "tests/records"
    assert [path.name for path in folder.iterdir()] == ["sm90.json"]  # no temporary file is left
    assert (folder / "sm90.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.exhaustive
def test_record_of_failures(tree):
    (tree / "test_faults.py").write_text(FAULTS)
    result = run(tree, *RECORD)
    assert result.returncode == 1
    record = record_of(tree)
    assert record["counts"]["failed"] == 1 and record["counts"]["errors"] == 1
    assert record["failures"] == ["test_faults.py::test_bad", "test_faults.py::test_error"]
    checked = run(tree, "--check-records", "test_toy.py").stdout
    assert "4 passed; 2 FAILED" in checked


@pytest.mark.exhaustive
def test_no_record_of_an_unfinished_run(tree):
    (tree / "tests/records").mkdir(parents=True)
    path = tree / "tests/records/sm90.json"
    path.write_text("old")
    assert run(tree, *RECORD, "-k", "nothing").returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    (tree / "test_faults.py").write_text("raise KeyboardInterrupt\n")
    result = run(tree, *RECORD)
    assert result.returncode == pytest.ExitCode.INTERRUPTED
    assert "no record: the run ended with exit status 2" in result.stdout
    assert path.read_text() == "old"


@pytest.mark.exhaustive
def test_no_record_if_sources_change_meanwhile(tree):
    kernel = tree / "packages/quack-toy/src/quack_toy/kernel.py"
    (tree / "test_toy.py").write_text(
        f"def test_edit():\n    open({str(kernel)!r}, 'a').write('#')\n"
    )
    result = run(tree, *RECORD)
    assert "no record: sources changed during the run" in result.stdout
    assert not (tree / "tests/records").exists()


@pytest.mark.exhaustive
def test_no_record_of_sources_from_elsewhere(tree):
    other = tree / "site" / "quack_toy"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    paths = os.pathsep.join([str(SOURCE), str(other.parent)])
    result = run(tree, *RECORD, PYTHONPATH=paths)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "quack_toy is imported from" in result.stderr
    result = run(tree, *RECORD, PYTHONPATH=str(SOURCE))
    assert "put packages/quack-toy/src on PYTHONPATH" in result.stderr


@pytest.mark.exhaustive
def test_check_records_never_fails_a_run(tree):
    folder = tree / "tests/records"
    folder.mkdir(parents=True)
    (folder / "sm90.json").write_text("{")
    (folder / "sm100.json").mkdir()
    result = run(tree, "--check-records")
    assert result.returncode == 0
    assert "sm90: sm90.json is unreadable" in result.stdout
    assert "sm100: sm100.json is unreadable" in result.stdout
    assert "sm120: no record" in result.stdout


@pytest.mark.exhaustive
def test_check_of_a_record(tree):
    assert run(tree, *RECORD).returncode == 0
    sm90, sm100, sm120 = records.check(tree)
    assert sm90.startswith("sm90: Imaginary 9, ")
    assert sm90.endswith("4 passed; all sources as recorded")
    assert sm100.startswith("sm100: no record") and sm120.startswith("sm120: no record")
    (tree / "packages/quack-toy/src/quack_toy/kernel.py").write_text("N = 2\n")
    assert next(records.check(tree)).endswith("4 passed; changed since: quack_toy")
    new = tree / "packages/quack-new/src/quack_new"
    new.mkdir(parents=True)
    (new / "__init__.py").write_text("")
    wanted = "4 passed; changed since: quack_toy; never recorded: quack_new"
    assert next(records.check(tree)).endswith(wanted)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"fingerprints": {}, "counts": 3}', "\xff"])
def test_check_of_a_damaged_record(tmp_path, text):
    path = tmp_path / "tests/records/sm90.json"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    assert "sm90: sm90.json is unreadable" in next(records.check(tmp_path))


def test_fingerprint_sees_every_source(tmp_path):
    seen = set()

    def add() -> None:
        before = len(seen)
        seen.add(records.fingerprint(tmp_path))
        assert len(seen) == before + 1

    add()
    (tmp_path / "a.py").write_text("x")
    add()
    (tmp_path / "a.py").write_text("y")
    add()
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.py").rename(tmp_path / "deep/a.py")
    add()
    (tmp_path / "note.txt").write_text("not a source")
    assert records.fingerprint(tmp_path) in seen


def test_write_is_whole_or_nothing(tmp_path):
    path = tmp_path / "sub" / "r.json"
    records.write(path, {"a": 1})
    with pytest.raises(TypeError):
        records.write(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]
