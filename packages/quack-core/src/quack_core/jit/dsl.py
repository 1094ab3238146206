"""The DSL's names that may move between its minor releases; other modules import them from here.

Importing this module imports cutlass. Deprecated names of the DSL disappear with its next minor
release, so a change of the DSL is met in this file.
"""

import functools
import re
from pathlib import Path
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import (
    find_runtime_libraries,
    load_module,
    make_fake_compact_tensor,
    make_fake_stream,
    make_fake_tensor,
)

from quack_core import log

from . import versions

__all__ = [
    "SymInt",
    "check_version",
    "compile_function",
    "cute",
    "cutlass",
    "load_function",
    "make_fake_compact_tensor",
    "make_fake_stream",
    "make_fake_tensor",
    "name_kernel",
    "runtime_libraries",
    "sym_int",
    "sym_int64",
]

SymInt = cute.SymInt
sym_int = cute.sym_int
sym_int64 = cute.sym_int64


@functools.cache
def check_version() -> None:
    """Warn, once a process, when the installed DSL lies outside the tested range."""
    text = versions.dsl()
    found = re.match(r"(\d+)\.(\d+)", text)  # 4.10rc1 is of 4.10
    if (
        found is None
        or not versions.TESTED[0] <= (int(found[1]), int(found[2])) <= versions.TESTED[1]
    ):
        first, last = (".".join(map(str, bound)) for bound in versions.TESTED)
        log.get("quack.jit").warning(
            "nvidia-cutlass-dsl %s is outside the tested range %s to %s; kernels may fail to compile",
            text,
            first,
            last,
        )


def name_kernel(function: Any, name: str) -> None:
    """Set the name of the function that will be generated; process-wide, so hold the compile lock."""
    function.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)


def reset_name(function: Any) -> None:
    """Back to the DSL's own naming."""
    function.set_name_prefix("")


def compile_function(function: Any, args: tuple[Any, ...], options: str) -> Any:
    """``cute.compile`` without an execution engine: the exported object is what gets loaded.

    The engine would be built only for the architecture of the GPU present, and doubles the time.
    """
    return cute.compile(function, *args, options=options, no_jit_engine=True)


def load_function(path: Path, name: str) -> Any:
    """The raw TVM-FFI function ``name`` of an exported object file."""
    return getattr(load_module(str(path), enable_tvm_ffi=True), name)


def runtime_libraries() -> list[str]:
    """Paths of the libraries that exported object files call: NVIDIA's runtime and TVM-FFI."""
    return [str(path) for path in find_runtime_libraries(enable_tvm_ffi=True)]
