"""``quack doctor``: what is wrong with an environment, and the command that mends it.

It uses the standard library, and of ours what needs nothing else, so that it runs where the DSL,
torch, click or rich are missing or broken. Kernels are compiled in processes of their own.
"""

import argparse
import ctypes
import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quack_core import arch, env
from quack_core.cli.site import Site, admits, damaged_files, numbers, requirement
from quack_core.errors import QuackError
from quack_core.jit import library, operators, store, versions

DSL, TVM_FFI = "nvidia-cutlass-dsl", "apache-tvm-ffi"
REQUIRED = {DSL: ">=4.8,<5", TVM_FFI: ">=0.1.10,<0.2"}
"""What quack-core asks for; a test compares it with the package's own metadata."""

MIN_FREE_BYTES = 1 << 30
TEST_SECONDS = 300

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        check: what was looked at.
        status: an ``error`` keeps kernels from working, a ``warning`` makes them slow or doubtful.
        found: what was found.
        remedy: the command or step that mends it; empty if nothing is wrong.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""


def main(argv: Sequence[str]) -> int:
    """Print the report; returns 1 if there is an error, else 0."""
    parser = argparse.ArgumentParser(prog="quack doctor", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-compile", action="store_true", help="skip compiling test kernels")
    options = parser.parse_args(argv)
    findings = []
    for finding in examine(Site.here(), compile_kernels=not options.no_compile):
        findings.append(finding)
        if not options.json:
            print(line(finding), flush=True)
    failed = any(finding.status == "error" for finding in findings)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    return int(failed)


def line(finding: Finding) -> str:
    """A finding as text, with its remedy on a line of its own."""
    text = f"{finding.status:8} {finding.check}: {finding.found}"
    return f"{text}\n         -> {finding.remedy}" if finding.remedy else text


def examine(site: Site, compile_kernels: bool = True) -> Iterator[Finding]:
    """All checks, one finding or more of each; one that fails itself is a finding too.

    Args:
        site: the environment.
        compile_kernels: also compile a kernel of each installed package.
    """
    checks: list[Callable[[Site], Iterator[Finding]]] = [
        interpreter,
        dsl,
        dsl_wheels,
        tvm_ffi,
        packages,
        torch,
        gpu,
        flavour,
        environment,
        linker,
        cache,
    ]
    if compile_kernels:
        checks.append(kernels)
    for check in checks:
        try:
            yield from check(site)
        except Exception as error:  # noqa: BLE001 - the report goes on
            text = f"cannot be checked: {type(error).__name__}: {error}"
            yield Finding(check.__name__, "error", text, "report this with the whole output")


def interpreter(site: Site) -> Iterator[Finding]:
    """Python and the system."""
    found = f"Python {platform.python_version()} on {versions.host()}"
    yield Finding("interpreter", "ok", found)


def dsl(site: Site) -> Iterator[Finding]:
    """The DSL's version."""
    yield _versioned(site, "dsl", DSL)


def tvm_ffi(site: Site) -> Iterator[Finding]:
    """TVM-FFI's version and files."""
    yield _versioned(site, "tvm_ffi", TVM_FFI)
    yield from _files(site, "tvm_ffi", [TVM_FFI])


def dsl_wheels(site: Site) -> Iterator[Finding]:
    """The wheels that the DSL consists of: all of one version, and whole."""
    parts = {name: each.version for name, each in site.starting_with(DSL).items()}
    if not parts:
        return
    wanted = parts.get(DSL) or max(parts.values(), key=numbers)
    others = [f"{name} {version}" for name, version in parts.items() if version != wanted]
    if others:
        found = f"{', '.join(sorted(others))} beside {DSL} {wanted}"
        yield Finding("dsl_wheels", "error", f"mixed: {found}", _reinstall(parts, wanted))
    else:
        yield Finding("dsl_wheels", "ok", f"{len(parts)} wheels of {wanted}")
    yield from _files(site, "dsl_wheels", list(parts))


def packages(site: Site) -> Iterator[Finding]:
    """Our packages: do they go together?"""
    ours = site.starting_with("quack-")
    core = ours.get("quack-core")
    if core is None:
        return  # a source tree on PYTHONPATH
    for name, each in ours.items():
        bounds = requirement(each, "quack-core")
        if bounds and not admits(bounds, core.version):
            found = f"{name} {each.version} needs quack-core{bounds}, found {core.version}"
            yield Finding("packages", "error", found, f"pip install --upgrade quack-core {name}")
    yield Finding("packages", "ok", ", ".join(f"{n} {d.version}" for n, d in sorted(ours.items())))


def torch(site: Site) -> Iterator[Finding]:
    """PyTorch: there, recent, and built for CUDA where there is a GPU."""
    version = site.version("torch")
    needed = any(importlib.util.find_spec(name) for name in operators.PACKAGES)
    if version is None:
        status: Status = "error" if needed else "ok"
        yield Finding("torch", status, "not installed", "pip install torch" if needed else "")
    elif not admits(">=2.10", version):
        found = f"{version} is older than 2.10"
        yield Finding("torch", "error", found, "pip install --upgrade 'torch>=2.10'")
    elif version.endswith("+cpu") and _capabilities():
        found = f"{version} is built without CUDA, but there is a GPU"
        yield Finding("torch", "error", found, "install a CUDA build of torch, see pytorch.org")
    else:
        yield Finding("torch", "ok", version)


def gpu(site: Site) -> Iterator[Finding]:
    """Driver and architectures. Without a GPU kernels compile, and CPU tensors run."""
    driver = versions.driver_major()
    if driver is None:
        yield Finding("gpu", "ok", "no NVIDIA driver: kernels can be compiled, not run")
        return
    for capability in _capabilities():
        try:
            each = arch.from_capability(capability)
            yield Finding("gpu", "ok", f"{each.name} ({each.target}), driver for CUDA {driver}")
        except QuackError as error:
            yield Finding("gpu", "error", str(error), "use a GPU of a supported architecture")
    if not _capabilities():
        found = f"driver for CUDA {driver}, but no GPU is visible"
        yield Finding("gpu", "warning", found, "unset CUDA_VISIBLE_DEVICES, or see nvidia-smi")


def flavour(site: Site) -> Iterator[Finding]:
    """The DSL's CUDA toolchain: one has to be there that the driver can run."""
    driver = versions.driver_major()
    parts = {major: site.version(f"{DSL}-libs-cu{major}") for major in versions.FLAVOURS}
    there = [major for major, version in parts.items() if version is not None]
    if not there:
        found = "no CUDA toolchain of the DSL is installed"
        yield Finding("flavour", "error", found, f"pip install --force-reinstall '{DSL}>=4.8,<5'")
    elif driver is not None and driver < min(there):
        found = f"toolchain for CUDA {min(there)}, but the driver is for CUDA {driver}"
        remedy = "update the NVIDIA driver"
        if driver >= min(versions.FLAVOURS):
            remedy += f", or pip install {DSL}-libs-cu{driver}=={parts[min(there)]}"
        yield Finding("flavour", "error", found, remedy)
    else:
        chosen = max(major for major in there if driver is None or major <= driver)
        yield Finding("flavour", "ok", f"CUDA {chosen} ({parts[chosen]})")


def environment(site: Site) -> Iterator[Finding]:
    """Our variables: known, and of values that they can have."""
    known = {variable.name: variable for variable in env.VARIABLES}
    wrong = 0
    for name, text in sorted(os.environ.items()):
        if not name.startswith("QUACK_"):
            continue
        problem = _problem(known.get(name), text)
        if problem:
            wrong += 1
            remedy = f"unset {name}; docs/reference/environment.md lists all variables"
            yield Finding("environment", "error", f"{name}={text}: {problem}", remedy)
    if not wrong:
        yield Finding("environment", "ok", "variables have values that they can have")


def linker(site: Site) -> Iterator[Finding]:
    """What makes kernels load without the DSL."""
    found = next(filter(None, map(shutil.which, library.LINKERS)), None)
    if found is None:
        text = "none: a new process imports the DSL to load a kernel, which takes 1 to 2 s"
        yield Finding("linker", "warning", text, "install binutils, such as apt install binutils")
    else:
        yield Finding("linker", "ok", found)


def cache(site: Site) -> Iterator[Finding]:
    """The folder of compiled kernels."""
    move = "set QUACK_CACHE_DIR to a folder of your own on a local disk"
    try:
        place = store.make_folder()
    except OSError as error:
        yield Finding("cache", "error", f"cannot be used: {error}", move)
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("cache", "error", f"{place} cannot be written", move)
        return
    free = shutil.disk_usage(place).free
    if free < MIN_FREE_BYTES:
        found = f"{free >> 20} MiB free at {place}"
        yield Finding("cache", "error", found, f"make room there, or {move}")
    present, damaged = store.entries(place), store.damaged(place)
    if damaged:
        found = f"{len(damaged)} of {len(present)} entries at {place} are damaged"
        remedy = "quack cache clear, and check the disk"
        yield Finding("cache", "error", found, remedy)
    size = sum(entry.size_bytes for entry in present)
    yield Finding("cache", "ok", f"{len(present)} kernels, {size >> 20} MiB at {place}")


def kernels(site: Site) -> Iterator[Finding]:
    """Compile a kernel of each installed package; on a GPU run it and check the result."""
    for package in ("quack_core", *operators.PACKAGES):
        if importlib.util.find_spec(package) is not None:
            yield _compiled(package)


def _compiled(package: str) -> Finding:
    command = [sys.executable, "-P", "-m", "quack_core.cli.selftest", package]
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        found = f"{package}: no kernel within {TEST_SECONDS} s"
        return Finding("kernels", "error", found, f"run it by hand: {' '.join(command)}")
    if done.returncode == 0:
        return Finding("kernels", "ok", f"{package}: {done.stdout.strip()}")
    last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    remedy = f"mend what is above; if nothing is, run {' '.join(command)}"
    if "No module named" in last or "ImportError" in last:
        remedy = f"pip install --force-reinstall {package.replace('_', '-')} '{DSL}>=4.8,<5'"
    return Finding("kernels", "error", f"{package}: {last}", remedy)


def _versioned(site: Site, check: str, name: str) -> Finding:
    version, bounds = site.version(name), REQUIRED[name]
    install = f"pip install '{name}{bounds}'"
    if version is None:
        return Finding(check, "error", f"{name} is not installed", install)
    if not admits(bounds, version):
        return Finding(check, "error", f"{name} {version} is not within {bounds}", install)
    if name == DSL and not versions.TESTED[0] <= numbers(version)[:2] <= versions.TESTED[1]:
        first, last = (".".join(map(str, bound)) for bound in versions.TESTED)
        found = f"{name} {version} is outside the tested range {first} to {last}"
        return Finding(check, "warning", found, f"pip install '{name}=={last}.*'")
    return Finding(check, "ok", f"{name} {version}")


def _files(site: Site, check: str, names: Sequence[str]) -> Iterator[Finding]:
    for name in names:
        each = site.find(name)
        bad = [] if each is None else list(damaged_files(each))
        if each is not None and bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            found = f"{name} is damaged: {bad[0]}{more}"
            yield Finding(check, "error", found, _reinstall([name], each.version))


def _reinstall(names: "Sequence[str] | dict[str, str]", version: str) -> str:
    wheels = " ".join(f"{name}=={version}" for name in sorted(names))
    return f"pip install --force-reinstall --no-deps --no-cache-dir {wheels}"


def _problem(variable: env.Variable | None, text: str) -> str:
    """What is wrong with the text of a variable; empty if nothing is."""
    if variable is None:
        return "there is no such variable"
    try:
        variable.parse(text)
        if variable.name in ("QUACK_ARCH", "QUACK_COMPILE_ARCH") and text:
            arch.get(text)
        if variable.choices and text and text.lower() not in variable.choices:
            return f"expected one of {', '.join(variable.choices)}"
    except (ValueError, QuackError) as error:
        return str(error)
    return ""


def _capabilities() -> list[tuple[int, int]]:
    """Of all GPUs that are visible; creates no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return []
        found = []
        for index in range(count.value):  # attributes 75 and 76: compute capability
            cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, index)
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)
            found.append((major.value, minor.value))
        return found
    except (OSError, AttributeError):
        return []
