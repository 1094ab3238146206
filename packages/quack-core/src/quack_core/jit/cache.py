"""Compiled kernels, from memory, from disk, or compiled now.

``load`` is for the first call with a spec: callers keep the function it returns (such as with
``functools.cache`` on plain values), since making the key reads source files. From disk a kernel
comes as a shared library, which TVM-FFI loads; the DSL is imported to compile.
"""

import contextlib
import functools
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from quack_core import log
from quack_core.arch import Arch
from quack_core.errors import StaleSourceError

from . import library, sources, stats, store
from .keys import Kernel, Key, key, roots
from .options import DEFAULT, Options

__all__ = ["Kernel", "Key", "clear_memory", "ensure", "key", "load"]

_functions: dict[str, Any] = {}  # digest: function
_guard = threading.Lock()
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # digest: one at a time


def load(module: str, spec: Any, config: Any, arch: Arch, options: Options = DEFAULT) -> Any:
    """The compiled function: the raw TVM-FFI function, with positional arguments and no stream.

    Args:
        module: full name of the kernel module, with ``build(spec, config)``.
        spec: what to compute; frozen, plain values, and a ``name``.
        config: how to compute it; frozen, plain values.
        arch: what to compile for.
        options: compile options.

    Raises:
        CompileError: the kernel does not compile.
        JitForbiddenError: it would have to be compiled, and the policy forbids that.
        StaleSourceError: a source file changed after this process imported it.
        TypeError: a field of spec or config is no plain value.
    """
    kernel = Kernel(module, spec, config, arch, options)
    return _get(kernel, kernel.key())


def ensure(kernel: Kernel) -> bool:
    """Have a kernel on disk, for other processes; returns whether it was compiled for that.

    Raises:
        CompileError, StaleSourceError, TypeError: as `load`.
    """
    before = stats.jit_stats().compiled
    name = kernel.key()
    with _locked(name):
        _find(kernel, name)
    return stats.jit_stats().compiled != before


def clear_memory() -> None:
    """Forget the functions of this process, not those on disk; for tests."""
    with _guard:
        _functions.clear()


def _get(kernel: Kernel, name: Key) -> Any:
    function = _functions.get(name.digest)
    if function is not None:
        return function
    with _locked(name):
        if name.digest not in _functions:
            _functions[name.digest] = _find(kernel, name)
        return _functions[name.digest]


def _locked(name: Key) -> threading.Lock:
    with _guard:
        return _locks[name.digest]


def _find(kernel: Kernel, name: Key) -> Any:
    """From disk, else compiled and stored."""
    place = store.folder()
    function = None if place is None else _read(kernel, name, place)
    return _miss(kernel, name, place) if function is None else function


def _miss(kernel: Kernel, name: Key, place: Path | None) -> Any:
    """Compiled and stored, if the policy allows it."""
    from . import policy

    policy.check(kernel, name)
    if place is None:
        return _compile(kernel, name, None)
    with store.lock(place, name):  # another process may have stored it meanwhile
        return _read(kernel, name, place) or _compile(kernel, name, place)


def _read(kernel: Kernel, name: Key, place: Path) -> Any:
    if any(variable.startswith("CUTE_DSL_KEEP") for variable in os.environ):
        return None  # the DSL was told to write PTX and the like, so it has to compile
    started = time.perf_counter()
    function = store.read(place, name, _load)
    if function is not None:
        seconds = time.perf_counter() - started
        stats.count(loaded=1, seconds=seconds)
        _report("hit", kernel, name, seconds)
    return function


def _compile(kernel: Kernel, name: Key, place: Path | None) -> Any:
    """Compile, check that the sources are still those of the key, store, load."""
    from .compile import compile_kernel

    started = time.perf_counter()
    module, spec, config = kernel.module, kernel.spec, kernel.config
    texts = name.record["sources"]
    try:
        compiled = compile_kernel(module, spec, config, kernel.arch, options=kernel.options)
    finally:
        sources.imported(texts)
    if sources.fingerprint(roots(module, spec, config)) != texts:
        raise StaleSourceError(
            f"the sources of {module} changed while it was compiled. Restart the process"
        )
    path = None
    if place is not None:
        seconds = time.perf_counter() - started
        export = functools.partial(_export, compiled)
        path = store.write(place, name, compiled.name, seconds, export)
    function = None
    if path is not None:
        with contextlib.suppress(FileNotFoundError):  # another process cleared the cache
            function = _load(path, compiled.name)
    seconds = time.perf_counter() - started
    stats.count(compiled=1, seconds=seconds)
    _report("miss", kernel, name, seconds)
    return compiled.function if function is None else function


def _export(compiled: Any, folder: Path) -> Path:
    """A shared library in a folder; the object file, if it cannot be linked here."""
    from . import dsl

    object_file = folder / f"{compiled.name}.o"
    compiled.export(object_file)
    return library.link(object_file, compiled.name, dsl.runtime_libraries()) or object_file


def _load(path: Path, symbol: str) -> Any:
    if path.suffix == ".so":
        return library.load(path, symbol)
    from . import dsl

    return dsl.load_function(path, symbol)


def _report(result: str, kernel: Kernel, name: Key, seconds: float) -> None:
    news = (kernel.name, name.digest[:12], result, seconds)
    log.get("quack.jit").info("%s %s %s in %.3f s", *news)
