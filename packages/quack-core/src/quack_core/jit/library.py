"""Compiled kernels as shared libraries: linked from object files, loaded by TVM-FFI alone.

An object file of the DSL is loaded by the DSL only, whose import takes 1 to 2 s. Linked, which takes
10 ms and any linker, it needs TVM-FFI and NVIDIA's small runtime library. That library is found in
NVIDIA's own wheel; it is never copied.
"""

import ctypes
import functools
import importlib.util
import logging
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quack_core import log

from . import versions

LINKERS = ("ld", "ld.lld", "ld.bfd", "ld.gold", "mold")
"""Programs that take the same few options; the first one found is used."""

LINK_SECONDS = 60.0
"""A linker that takes longer is stuck: it needs 10 ms."""


@functools.cache
def linker() -> str | None:
    """Path of the linker of this machine; None, and one line in the log, if there is none."""
    found = next(filter(None, map(shutil.which, LINKERS)), None)
    if found is None:
        _log().warning(
            "no linker found (%s): compiled kernels are kept as object files, and a process that "
            "loads them imports the DSL first; install binutils or lld",
            ", ".join(LINKERS),
        )
    return found


def link(object_file: Path, symbol: str, needed: Sequence[str]) -> Path | None:
    """Link an object file into the shared library beside it; None if that cannot be done here.

    Args:
        object_file: one of the DSL, for this machine's processor.
        symbol: a function in it; the library is loaded once, to see that it works.
        needed: paths of the libraries that it calls. Their names are kept in it, their places not.
    """
    program = linker()
    if program is None:
        return None
    library = object_file.with_suffix(".so")
    # Names are resolved when it is loaded, not at the first call, where a missing one would end
    # the process.
    options = ["-shared", "-z", "now", "-z", "noexecstack", "--no-as-needed", "-o", str(library)]
    command = [program, *options, str(object_file), *needed]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LINK_SECONDS)
        load(library, symbol)
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
        reason = getattr(error, "stderr", None) or error
        _log().warning("%s does not link %s, it stays an object file: %s", program, symbol, reason)
        return None
    return library


def load(path: Path, symbol: str) -> Any:
    """The raw TVM-FFI function ``symbol`` of a shared library.

    Raises:
        RuntimeError: NVIDIA's runtime library is missing, or the library does not load.
        AttributeError: it holds no such function.
    """
    import tvm_ffi

    _load_runtime()
    return getattr(tvm_ffi.load_module(str(path)), symbol)


def runtime() -> Path:
    """NVIDIA's runtime library of the flavour in use, in its own wheel.

    Raises:
        RuntimeError: no flavour of the DSL is installed, or the file is missing in it.
    """
    flavour = versions.flavour().partition(" ")[0]
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in () if package is None else package.submodule_search_locations or ():
        path = Path(folder, flavour, "lib", "libcute_dsl_runtime.so")
        if path.is_file():
            return path
    raise RuntimeError(
        f"libcute_dsl_runtime.so of flavour {flavour} is not installed: "
        "reinstall nvidia-cutlass-dsl (with the extra cu13 for CUDA 13)"
    )


@functools.cache
def _load_runtime() -> None:
    ctypes.CDLL(str(runtime()))  # kernels name it, and the loader then takes the one in memory


def _log() -> logging.Logger:
    return log.get("quack.jit")
