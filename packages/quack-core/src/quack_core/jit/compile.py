"""From spec and config to machine code, for any architecture and without a GPU.

A kernel module offers ``build(spec, config) -> (kernel, args)``: ``kernel`` has a ``@cute.jit``
method ``__call__(self, *args, stream)`` and a ``@cute.kernel`` method ``kernel``; ``args`` are
symbolic arguments, all but the stream.
"""

import functools
import importlib
import math
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quack_core.arch import Arch
from quack_core.errors import CompileError, DTypeError, QuackError

from . import dsl
from .options import DEFAULT, Options

LOCK = threading.RLock()
"""Held while the DSL traces and compiles, and while its process-wide state is changed."""

_CUTE_NAMES = {
    "float32": "Float32",
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float8_e4m3fn": "Float8E4M3FN",
    "float8_e5m2": "Float8E5M2",
    "int32": "Int32",
    "int64": "Int64",
}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        name: kernel name and exported symbol.
        ptx: assembly, if artifacts were asked for.
        cubin: machine code, if artifacts were asked for.
    """

    name: str
    ptx: str | None
    cubin: bytes | None
    _jit: Any = field(repr=False)

    def export(self, path: Path) -> None:
        """Write the object file that ``dsl.load_function(path, name)`` loads."""
        with LOCK:
            self._jit.export_to_c(str(path), function_name=self.name)

    @functools.cached_property
    def function(self) -> Any:
        """The raw TVM-FFI function: the cheapest call; positional arguments, no stream.

        It can be called on a GPU of the architecture that it was compiled for. Its argument checks
        work everywhere.
        """
        memory = os.memfd_create("quack-kernel")  # works where no folder can be written
        try:
            path = Path(f"/proc/self/fd/{memory}")
            self.export(path)
            return dsl.load_function(path, self.name)
        finally:
            os.close(memory)


def compile_kernel(
    module: str,
    spec: Any,
    config: Any,
    arch: Arch,
    *,
    options: Options = DEFAULT,
    dump_dir: Path | None = None,
) -> Compiled:
    """Compile the kernel that ``module.build(spec, config)`` describes, for ``arch.target``.

    Args:
        module: full name of the kernel module.
        spec: what to compute; ``spec.name`` names the kernel.
        config: how to compute it.
        arch: target; it need not be the architecture of a GPU present.
        options: see :class:`quack_core.jit.options.Options`.
        dump_dir: keep PTX and cubin, in a new folder below this one.

    Raises:
        CompileError: the DSL rejected the kernel; its exception is the cause.
    """
    dsl.check_version()
    build = importlib.import_module(module).build
    folder = None if dump_dir is None else _fresh_folder(dump_dir, f"{spec.name}-{arch.target}-")
    try:
        with LOCK:
            kernel, args = build(spec, config)
            stream = dsl.make_fake_stream(use_tvm_ffi_env_stream=True)
            jit = _named_compile(
                kernel, (*args, stream), spec.name, options.text(arch.target, folder)
            )
    except QuackError:
        raise
    except Exception as error:
        raise CompileError(
            f"{module} does not compile for {arch.name} ({arch.target}): "
            f"{type(error).__name__}: {error}; spec {spec!r}, config {config!r}"
        ) from error
    artifacts = None if folder is None else jit.artifacts
    return Compiled(
        spec.name,
        None if artifacts is None else artifacts.PTX,
        None if artifacts is None else artifacts.CUBIN,
        jit,
    )


def to_cute(name: str) -> Any:
    """The DSL's type for torch's dtype name: a floating-point one, ``int32`` or ``int64``.

    Raises:
        DTypeError: another name.
    """
    if name not in _CUTE_NAMES:
        raise DTypeError(f"dtype {name!r} has no kernels: expected one of {', '.join(_CUTE_NAMES)}")
    return getattr(dsl.cutlass, _CUTE_NAMES[name])


def symbolic(
    dtype: str | None, shape: Sequence[Any], *, align: int = 16, contiguous: bool = False
) -> Any:
    """A row-major tensor argument for ``build``; ``None`` for an operand that is absent.

    Args:
        dtype: torch's dtype name, or None.
        shape: integers are baked in, ``sym_int()`` values stay free (one object ties sizes).
        align: bytes that divide the address and every outer stride; at least the element's size.
        contiguous: compact strides. Otherwise the outer strides are free 64-bit numbers, so that
            offsets are computed in 64 bits.

    Returns:
        A tensor whose last stride is 1.
    """
    if dtype is None:
        return None
    element = to_cute(dtype)
    bytes_ = element.width // 8
    align = math.lcm(align, bytes_)
    if contiguous:
        order = tuple(reversed(range(len(shape))))
        return dsl.make_fake_compact_tensor(
            element, tuple(shape), stride_order=order, assumed_align=align
        )
    outer = (dsl.sym_int64(divisibility=align // bytes_) for _ in shape[:-1])
    return dsl.make_fake_tensor(element, tuple(shape), stride=(*outer, 1), assumed_align=align)


def _named_compile(kernel: Any, args: tuple[Any, ...], name: str, options: str) -> Any:
    """Compile under ``name``, which profilers and file names show, then restore the DSL's naming."""
    functions = type(kernel).kernel, type(kernel).__call__
    try:
        for function in functions:
            dsl.name_kernel(function, name)
        return dsl.compile_function(kernel, args, options)
    finally:
        for function in functions:
            dsl.reset_name(function)


def _fresh_folder(parent: Path, prefix: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
