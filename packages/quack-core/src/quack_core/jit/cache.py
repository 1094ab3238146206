"""Compiled kernels, from memory, from disk, or compiled now.

``load`` is for the first call with a spec: callers keep the function it returns (such as with
``functools.cache`` on plain values), since making the key reads source files. The DSL is imported
when there is something to load or to compile.
"""

import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quack_core import log
from quack_core.arch import Arch
from quack_core.errors import StaleSourceError

from . import sources, store
from .keys import Key, key, roots
from .options import DEFAULT, Options

__all__ = ["Key", "clear_memory", "key", "load"]

_functions: dict[str, Any] = {}  # digest: function
_guard = threading.Lock()
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # digest: one at a time


@dataclass(frozen=True)
class _Request:
    """The arguments of `load`, with their key."""

    module: str
    spec: Any
    config: Any
    arch: Arch
    options: Options
    key: Key


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
        StaleSourceError: a source file changed after this process imported it.
        TypeError: a field of spec or config is no plain value.
    """
    request = _Request(
        module, spec, config, arch, options, key(module, spec, config, arch, options)
    )
    digest = request.key.digest
    function = _functions.get(digest)
    if function is not None:
        return function
    with _guard:
        held = _locks[digest]
    with held:
        if digest not in _functions:
            _functions[digest] = _find(request)
        return _functions[digest]


def clear_memory() -> None:
    """Forget the functions of this process, not those on disk; for tests."""
    with _guard:
        _functions.clear()


def _find(request: _Request) -> Any:
    """From disk, else compiled and stored."""
    place = store.folder()
    if place is None:
        return _compile(request, None)
    function = _read(request, place)
    if function is None:
        with store.lock(place, request.key):  # another process may have stored it meanwhile
            function = _read(request, place) or _compile(request, place)
    return function


def _read(request: _Request, place: Path) -> Any:
    if any(name.startswith("CUTE_DSL_KEEP") for name in os.environ):
        return None  # the DSL was told to write PTX and the like, so it has to compile
    started = time.perf_counter()
    function = store.read(place, request.key, _load)
    if function is not None:
        _report("hit", request, started)
    return function


def _compile(request: _Request, place: Path | None) -> Any:
    """Compile, check that the sources are still those of the key, store, load."""
    from .compile import compile_kernel

    started = time.perf_counter()
    module, spec, config = request.module, request.spec, request.config
    texts = request.key.record["sources"]
    try:
        compiled = compile_kernel(module, spec, config, request.arch, options=request.options)
    finally:
        sources.imported(texts)
    if sources.fingerprint(roots(module, spec, config)) != texts:
        raise StaleSourceError(
            f"the sources of {module} changed while it was compiled. Restart the process"
        )
    path = None
    if place is not None:
        seconds = time.perf_counter() - started
        path = store.write(place, request.key, compiled.name, seconds, compiled.export)
    function = compiled.function if path is None else _load(path, compiled.name)
    _report("miss", request, started)
    return function


def _load(path: Path, symbol: str) -> Any:
    from . import dsl

    return dsl.load_function(path, symbol)


def _report(result: str, request: _Request, started: float) -> None:
    seconds = time.perf_counter() - started
    news = (request.spec.name, request.key.digest[:12], result, seconds)
    log.get("quack.jit").info("%s %s %s in %.3f s", *news)
