"""Versions that decide what a compiled kernel is, read without importing what they describe."""

import ctypes
import functools
import importlib.metadata
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

FLAVOURS = (13, 12)
"""CUDA major versions that the DSL has a toolchain for, newest first."""

CPU_LEVELS = (
    "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "avx512bw avx512cd avx512dq avx512f avx512vl",
)
"""What Linux calls the instructions that the levels 2, 3 and 4 of x86-64 add to the one before.

Source: System V Application Binary Interface, AMD64 supplement, micro-architecture levels.
"""

_CPUINFO = Path("/proc/cpuinfo")

TESTED = ((4, 8), (4, 8))
"""First and last minor release of nvidia-cutlass-dsl that the tests ran with."""


def dsl() -> str:
    """Version of nvidia-cutlass-dsl."""
    return _package("nvidia-cutlass-dsl")


def tvm_ffi() -> str:
    """Version of apache-tvm-ffi."""
    return _package("apache-tvm-ffi")


@functools.cache
def flavour() -> str:
    """The DSL's toolchain, as ``cu13 4.8.1``, that it chooses itself when imported.

    With a driver the newest installed one that the driver can run, else the newest installed.
    """
    limit = driver_major()
    for major in FLAVOURS:
        version = _installed(f"nvidia-cutlass-dsl-libs-cu{major}")
        if version is not None and (limit is None or major <= limit):
            return f"cu{major} {version}"
    return "none"


def python() -> str:
    """Interpreter, version and binary interface."""
    # The first suffix names the interface; `sysconfig` does too, but takes 1 ms to load.
    return f"{sys.implementation.name} {platform.python_version()} {EXTENSION_SUFFIXES[0]}"


def host() -> str:
    """Operating system and CPU architecture: exported objects hold host code."""
    return f"{sys.platform} {platform.machine()}"


@functools.cache
def cpu_level() -> int:
    """Level of x86-64 that this processor has, 1 to 4; 0 for other architectures or if unknown.

    The DSL compiles the host's part of a kernel for the processor at hand, so that a cache moved to
    one of a lower level holds instructions that this one lacks.
    """
    if platform.machine() != "x86_64":
        return 0
    try:
        with _CPUINFO.open() as lines:  # of hundreds of cores: the first is enough
            flags = next((line.split() for line in lines if line.startswith("flags")), [])
    except OSError:
        return 0
    missing = (not set(names.split()) <= set(flags) for names in CPU_LEVELS)
    return 1 + next((level for level, lacks in enumerate(missing) if lacks), len(CPU_LEVELS))


@functools.cache
def driver_major() -> int | None:
    """Major CUDA version of the driver; None without one. Creates no context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            return number.value // 1000
    except (OSError, AttributeError):
        pass
    return None


@functools.cache
def _package(name: str) -> str:
    return _installed(name) or "none"


def _installed(name: str) -> str | None:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    # `found.version` parses all of the file as an e-mail, which takes longer than finding it.
    after = (found.read_text("METADATA") or "").partition("\nVersion: ")[2]
    return after.partition("\n")[0] or found.version
