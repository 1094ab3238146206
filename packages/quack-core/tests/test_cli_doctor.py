"""``quack doctor`` finds planted faults, exits with 1 and prints what mends them."""

import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import quack_core
from quack_core.cli import doctor
from quack_core.cli.site import Site, admits, requirement
from quack_core.errors import ArchError
from quack_core.jit import store, versions
from quack_core.jit.keys import Key

SOURCE = Path(quack_core.__file__).parents[1]

HEALTHY = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
    "apache-tvm-ffi": "0.1.15",
    "quack-core": "0.1.0",
    "quack-norm": "0.1.0",
    "torch": "2.13.0",
}


class Environment:
    """A site-packages folder that one can break."""

    def __init__(self, folder):
        self.folder = folder
        self.site = Site((str(folder),))
        for name, version in HEALTHY.items():
            self.install(name, version)

    def install(self, name, version, requires=()):
        self.remove(name)
        stem = name.replace("-", "_")
        library = self.folder / stem / "library.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(b"code of " + name.encode())
        info = self.folder / f"{stem}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
        if name == "quack-norm" and not requires:
            needs = "Requires-Dist: quack-core<1,>=0.1.0\n"
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        digest = hashlib.sha256(library.read_bytes()).digest()
        text = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        size = library.stat().st_size
        (info / "RECORD").write_text(f"{stem}/library.so,sha256={text},{size}\n")

    def remove(self, name):
        for info in self.folder.glob(f"{name.replace('-', '_')}-[0-9]*.dist-info"):
            shutil.rmtree(info)

    def library(self, name):
        return self.folder / name.replace("-", "_") / "library.so"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("QUACK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_capabilities", list)
    monkeypatch.setattr(versions, "driver_major", lambda: None)
    store.forget_folders()
    yield Environment(tmp_path / "site")
    store.forget_folders()


def put_entry(monkeypatch, damage):
    place = store.folder()

    def export(folder):
        path = folder / "kernel.so"
        path.write_bytes(b"machine code")
        return path

    key = Key(hashlib.sha256(b"key").hexdigest(), {"spec": 1})
    damage(store.write(place, key, "kernel", 0.1, export))


def driver(major):
    def plant(env, monkeypatch, tmp_path):
        monkeypatch.setattr(versions, "driver_major", lambda: major)
        monkeypatch.setattr(doctor, "_capabilities", lambda: [(9, 0)])

    return plant


def with_driver(major, plant):
    def both(env, monkeypatch, tmp_path):
        driver(major)(env, monkeypatch, tmp_path)
        plant(env, monkeypatch, tmp_path)

    return both


# What is planted; the check that finds it; words of what it says; the remedy.
FAULTS = {
    "DSL missing": (
        lambda env, *_: env.remove("nvidia-cutlass-dsl"),
        "dsl",
        "nvidia-cutlass-dsl is not installed",
        "pip install 'nvidia-cutlass-dsl>=4.8,<5'",
    ),
    "DSL too old": (
        lambda env, *_: [env.install(n, "4.7.0") for n in HEALTHY if n.startswith("nvidia")],
        "dsl",
        "nvidia-cutlass-dsl 4.7.0 is not within >=4.8,<5",
        "pip install 'nvidia-cutlass-dsl>=4.8,<5'",
    ),
    "wheels of two versions": (
        lambda env, *_: env.install("nvidia-cutlass-dsl-libs-cu13", "4.9.0"),
        "dsl_wheels",
        "mixed: nvidia-cutlass-dsl-libs-cu13 4.9.0 beside nvidia-cutlass-dsl 4.8.1",
        (
            "pip install --force-reinstall --no-deps --no-cache-dir nvidia-cutlass-dsl==4.8.1 "
            "nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-cu12==4.8.1 "
            "nvidia-cutlass-dsl-libs-cu13==4.8.1"
        ),
    ),
    "file of the DSL missing": (
        lambda env, *_: env.library("nvidia-cutlass-dsl-libs-base").unlink(),
        "dsl_wheels",
        "nvidia_cutlass_dsl_libs_base/library.so is missing",
        "pip install --force-reinstall --no-deps --no-cache-dir nvidia-cutlass-dsl-libs-base==4.8.1",
    ),
    "library cut off": (
        lambda env, *_: env.library("apache-tvm-ffi").write_bytes(b"co"),
        "tvm_ffi",
        "apache_tvm_ffi/library.so has 2 bytes instead of 22",
        "pip install --force-reinstall --no-deps --no-cache-dir apache-tvm-ffi==0.1.15",
    ),
    "TVM-FFI too new": (
        lambda env, *_: env.install("apache-tvm-ffi", "0.2.0"),
        "tvm_ffi",
        "apache-tvm-ffi 0.2.0 is not within >=0.1.10,<0.2",
        "pip install 'apache-tvm-ffi>=0.1.10,<0.2'",
    ),
    "toolchain newer than the driver": (
        with_driver(12, lambda env, *_: env.remove("nvidia-cutlass-dsl-libs-cu12")),
        "flavour",
        "toolchain for CUDA 13, but the driver is for CUDA 12",
        "update the NVIDIA driver, or pip install nvidia-cutlass-dsl-libs-cu12==4.8.1",
    ),
    "driver too old": (
        driver(11),
        "flavour",
        "toolchain for CUDA 12, but the driver is for CUDA 11",
        "update the NVIDIA driver",
    ),
    "packages that do not go together": (
        lambda env, *_: env.install("quack-norm", "0.3.0", ["quack-core<1,>=0.3.0"]),
        "packages",
        "quack-norm 0.3.0 needs quack-core<1,>=0.3.0, found 0.1.0",
        "pip install --upgrade quack-core quack-norm",
    ),
    "torch without CUDA on a GPU machine": (
        with_driver(13, lambda env, *_: env.install("torch", "2.13.0+cpu")),
        "torch",
        "2.13.0+cpu is built without CUDA, but there is a GPU",
        "install a CUDA build of torch",
    ),
    "architecture that is none": (
        lambda env, monkeypatch, _: monkeypatch.setenv("QUACK_ARCH", "sm_75"),
        "environment",
        "QUACK_ARCH=sm_75: architecture 'sm_75' is unknown",
        "unset QUACK_ARCH",
    ),
    "misspelt variable": (
        lambda env, monkeypatch, _: monkeypatch.setenv("QUACK_CACHEDIR", "/x"),
        "environment",
        "QUACK_CACHEDIR=/x: there is no such variable",
        "unset QUACK_CACHEDIR",
    ),
    "cache folder that is a file": (
        lambda env, monkeypatch, tmp_path: (tmp_path / "cache").write_text(""),
        "cache",
        "cannot be used: ",
        "set QUACK_CACHE_DIR to a folder of your own",
    ),
    "full disk": (
        lambda env, monkeypatch, _: monkeypatch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1 << 20)
        ),
        "cache",
        "1 MiB free at",
        "make room there",
    ),
    "damaged entry": (
        lambda env, monkeypatch, _: put_entry(monkeypatch, lambda path: path.write_bytes(b"?")),
        "cache",
        "1 of 1 entries",
        "quack cache clear",
    ),
}


def report(environment, capsys, monkeypatch, *words):
    monkeypatch.setattr(Site, "here", lambda: environment.site)
    status = doctor.main([*words, "--no-compile", "--json"])
    return status, [doctor.Finding(**each) for each in json.loads(capsys.readouterr().out)]


def test_healthy_environment(environment, capsys, monkeypatch):
    status, findings = report(environment, capsys, monkeypatch)
    assert status == 0
    assert {finding.status for finding in findings} == {"ok"}
    assert len(findings) == 11
    assert not any(finding.remedy for finding in findings)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_fault(fault, environment, capsys, monkeypatch, tmp_path):
    plant, check, says, remedy = fault
    plant(environment, monkeypatch, tmp_path)
    status, findings = report(environment, capsys, monkeypatch)
    assert status == 1
    errors = [finding for finding in findings if finding.status == "error"]
    assert [finding.check for finding in errors] == [check]  # and nothing else
    assert says in errors[0].found
    assert errors[0].remedy.startswith(remedy)
    assert remedy in doctor.line(errors[0]).splitlines()[1]


def test_several_flavours_and_drivers(environment):
    environment.remove("nvidia-cutlass-dsl-libs-cu12")
    environment.remove("nvidia-cutlass-dsl-libs-cu13")
    (finding,) = doctor.flavour(environment.site)
    assert (finding.status, finding.found) == (
        "error",
        "no CUDA toolchain of the DSL is installed",
    )


def test_untested_dsl_is_a_warning(environment, capsys, monkeypatch):
    for name in HEALTHY:
        if name.startswith("nvidia"):
            environment.install(name, "4.11.0")
    status, findings = report(environment, capsys, monkeypatch)
    assert status == 0
    (finding,) = [each for each in findings if each.status == "warning"]
    assert finding.found == "nvidia-cutlass-dsl 4.11.0 is outside the tested range 4.8 to 4.8"


def test_no_linker_is_a_warning(environment, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    status, findings = report(environment, capsys, monkeypatch)
    assert status == 0
    (finding,) = [each for each in findings if each.status == "warning"]
    assert finding.check == "linker" and "binutils" in finding.remedy


@pytest.mark.parametrize(
    ("capabilities", "statuses"),
    [([(9, 0)], ["ok"]), ([(7, 5)], ["error"]), ([], ["warning"]), ([(9, 0), (12, 1)], ["ok"] * 2)],
)
def test_gpus(capabilities, statuses, environment, monkeypatch):
    monkeypatch.setattr(versions, "driver_major", lambda: 13)
    monkeypatch.setattr(doctor, "_capabilities", lambda: capabilities)
    assert [finding.status for finding in doctor.gpu(environment.site)] == statuses


def test_a_check_that_fails_is_a_finding(environment, capsys, monkeypatch):
    def broken(name):
        raise ArchError("what", "limit")

    monkeypatch.setattr(doctor.shutil, "which", broken)
    status, findings = report(environment, capsys, monkeypatch)
    assert status == 1
    (finding,) = [each for each in findings if each.status == "error"]
    assert finding.found == "cannot be checked: ArchError: what; limit"
    assert findings[-1].check == "cache"  # the others went on


@pytest.mark.parametrize(
    ("stub", "says", "remedy"),
    [
        (
            "raise ImportError('libcute_dsl.so: file too short')",
            "ImportError: libcute_dsl.so: file too short",
            "pip install --force-reinstall quack-core",
        ),
        ("import os; os.abort()", "exit status -6", "mend what is above"),
    ],
)
def test_kernel_that_does_not_compile(stub, says, remedy, environment, monkeypatch, tmp_path):
    """In a process of its own, so that a crash is a finding too."""
    package = tmp_path / "broken" / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass"
    package.mkdir(parents=True)  # where the wheel's own file for site puts it in front
    (package / "__init__.py").write_text(stub)
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.setattr(doctor.operators, "PACKAGES", ())
    (finding,) = doctor.kernels(environment.site)
    assert finding.status == "error"
    assert says in finding.found
    assert finding.remedy.startswith(remedy)


def test_kernels_compile_here(environment, monkeypatch):
    monkeypatch.setattr(doctor.operators, "PACKAGES", ())
    monkeypatch.setenv("QUACK_ARCH", "sm120")
    (finding,) = doctor.kernels(environment.site)
    assert finding.status == "ok"
    assert finding.found.startswith("quack_core: blank compiled for sm_120a in ")


def test_standard_library_only(tmp_path):
    """It runs where nothing else can be imported, and says so."""
    script = textwrap.dedent("""
        import sys
        sys.path = [entry for entry in sys.path if "-packages" not in entry]
        from quack_core.cli.entry import main
        status = main(["doctor", "--no-compile"])
        ours = [name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names]
        print(status, sorted({name.partition(".")[0] for name in ours} - {"__main__"}))
        print(main(["env"]))
    """)
    alone = tmp_path / "alone"  # also where it is installed beside all else
    shutil.copytree(SOURCE / "quack_core", alone / "quack_core")
    environment = {name: value for name, value in os.environ.items() if name[:6] != "QUACK_"}
    environment |= {"PYTHONPATH": str(alone), "QUACK_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-S", "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    *lines, result, status = done.stdout.splitlines()
    assert result == "1 ['quack_core']"
    assert "error    dsl: nvidia-cutlass-dsl is not installed" in lines
    assert "         -> pip install 'nvidia-cutlass-dsl>=4.8,<5'" in lines
    assert status == "2"
    assert "click and rich not found: pip install 'quack-core[cli]'" in done.stderr


def test_ranges_are_those_of_the_package():
    try:
        core = importlib.metadata.distribution("quack-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("quack-core is not installed")
    for name, bounds in doctor.REQUIRED.items():
        assert set((requirement(core, name) or "").split(",")) == set(bounds.split(","))


@pytest.mark.parametrize(
    ("bounds", "version", "met"),
    [
        (">=4.8,<5", "4.8.1", True),
        (">=4.8,<5", "4.8", True),
        (">=4.8,<5", "4.7.9", False),
        (">=4.8,<5", "5.0", False),
        (">=4.8,<5", "4.10rc1", True),
        ("<0.2,>=0.1.10", "0.1.9", False),
        ("==1.0", "1.0.0", True),
        (">1,<=2", "1.0", False),
        ("", "7", True),
    ],
)
def test_admits(bounds, version, met):
    assert admits(bounds, version) is met
