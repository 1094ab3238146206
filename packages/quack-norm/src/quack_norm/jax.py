"""Softmax for JAX arrays: CuTe kernels inside programs of XLA, the definition on the CPU.

Needs the extra ``quack-norm[jax]``, and not torch. A kernel is looked up or compiled while a function
is lowered for CUDA. From then on XLA calls it, on its own stream and without Python: jax-tvm-ffi sets
the stream of the environment, which the kernels launch on, around each call.
"""

import functools
import math
import numbers
import threading
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
from jax import Array
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from quack_core import arch, driver, dtypes, occupancy
from quack_core.arch import Arch
from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from quack_core.jit import cache
from quack_norm.ops.row_map import rules
from quack_norm.ops.row_map.config import RowConfig
from quack_norm.ops.row_map.spec import MAX_ROWS
from quack_norm.ops.softmax.config import BwdConfig, FwdConfig
from quack_norm.ops.softmax.spec import MAX_N, SoftmaxBwdSpec, SoftmaxFwdSpec

__all__ = ["log_softmax", "softmax"]

ALIGN = 16
"""Bytes of the widest access; XLA's own allocations are aligned to more."""

PLATFORM = "gpu"
"""What kernels are registered for, as jax-tvm-ffi calls it."""

_registering = threading.Lock()


def softmax(x: Array, axis: int = -1, *, dtype: Any = None, scale: float = 1.0) -> Array:
    """``e ** (scale * x)`` along an axis, divided by its sum; as ``jax.nn.softmax``.

    CUDA arrays run a CuTe kernel, CPU arrays the definition in plain JAX. Works under ``jax.jit``,
    ``jax.vmap`` and ``jax.eval_shape``. Differentiable once, in reverse mode.

    Args:
        x: at least one dimension, in float32, bfloat16 or float16; up to 262144 elements along
            ``axis``. XLA copies to rows what does not lie along a last axis.
        axis: the axis that adds up to one.
        dtype: converts x first, and is the dtype of the result; by default that of x.
        scale: a Python number that multiplies x.

    Returns:
        Shaped like x.

    Raises:
        DTypeError, ShapeError: operands that kernels do not take.
        UnsupportedError: rows longer than 262144; second derivatives.
        ArchError: there is no kernel for the GPU.
        ImportError: CUDA arrays without jax-tvm-ffi.

    Numerics:
        All arithmetic is float32, the maximum is subtracted first, and results are rounded once. A
        row that holds NaN or inf, or nothing but -inf, becomes NaN. The gradient comes from the
        stored result. On CUDA deterministic; a row has the same bits whatever rows come with it.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    return _along("softmax", x, axis, dtype, scale, log=False)


def log_softmax(x: Array, axis: int = -1, *, dtype: Any = None, scale: float = 1.0) -> Array:
    """The logarithm of ``softmax``, computed without it; as ``jax.nn.log_softmax``.

    Arguments, results, errors and numerics are those of ``softmax``.
    """
    return _along("log_softmax", x, axis, dtype, scale, log=True)


# --- Checks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What is computed of rows along the last axis.

    Args:
        log: the logarithm is wanted.
        scale: multiplies x.
        x: dtype of x and of its gradient.
        out: dtype of the result.
    """

    log: bool
    scale: float
    x: str
    out: str


def _along(name: str, x: Array, axis: int, dtype: Any, scale: float, log: bool) -> Array:
    axis = _check(name, x, axis, scale)
    out = x.dtype.name if dtype is None else _dtype(name, "dtype", dtype)
    if out not in ("float32", x.dtype.name):  # a wider result needs no conversion of x
        x = x.astype(out)
    if x.size == 0:
        return x.astype(out)
    rows = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(_softmax(rows, Call(log, float(scale), x.dtype.name, out)), -1, axis)


def _check(name: str, x: Array, axis: int, scale: float) -> int:
    """Check the operands of a call; return the axis counted from the front."""
    if not isinstance(x, jax.Array):
        raise DTypeError(
            f"{name}: x is {type(x).__name__}: it must be a jax.Array; convert with jnp.asarray()"
        )
    _dtype(name, "x", x.dtype)
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise DTypeError(f"{name}: axis is {type(axis).__name__}: it must be an int")
    if x.ndim == 0:
        raise ShapeError(f"{name}: x has no dimensions: it must have at least one; use x[None]")
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(
            f"{name}: axis is {axis}, x has {x.ndim} dimensions: it must be {-x.ndim} to "
            f"{x.ndim - 1}"
        )
    if not isinstance(scale, numbers.Real):
        raise DTypeError(
            f"{name}: scale is {type(scale).__name__}: it must be a Python number; multiply x by "
            "what is an array"
        )
    axis %= x.ndim
    n = x.shape[axis]
    if n > MAX_N:
        raise UnsupportedError(
            f"{name}: x.shape[{axis}] is {n}",
            f"rows have at most {MAX_N} elements",
            "use jax.nn",
        )
    rows = x.size // n if n else 0
    if isinstance(rows, int) and rows > MAX_ROWS:  # jax.export has symbolic sizes
        raise UnsupportedError(
            f"{name}: x has {rows} rows",
            f"kernels count at most {MAX_ROWS}",
            "split the batch",
        )
    return axis


def _dtype(name: str, what: str, given: Any) -> str:
    """The name of a dtype that kernels take."""
    found = jnp.dtype(given).name
    if found not in dtypes.SUPPORTED:
        raise DTypeError(
            f"{name}: {what} is {found}: it must be one of {', '.join(dtypes.SUPPORTED)}; "
            "convert with .astype()"
        )
    return found


# --- Definition ---------------------------------------------------------------------------------


def _forward_reference(x: Array, *, call: Call) -> Array:
    values = x.astype(jnp.float32) * call.scale
    function = jax.nn.log_softmax if call.log else jax.nn.softmax
    return function(values, axis=-1).astype(call.out)


def _backward_reference(out: Array, dout: Array, *, call: Call) -> Array:
    y, dy = out.astype(jnp.float32), dout.astype(jnp.float32)
    if call.log:
        dx = dy - jnp.exp(y) * dy.sum(-1, keepdims=True)
    else:
        dx = y * (dy - (dy * y).sum(-1, keepdims=True))
    return (dx * call.scale).astype(call.x)


# --- Kernels ------------------------------------------------------------------------------------


def _forward_kernel(x: Array, *, call: Call) -> Array:
    n, scaled = x.shape[-1], call.scale != 1.0
    same = call.x == call.out
    spec = SoftmaxFwdSpec(
        n, call.x, call.out, call.log, scaled, align=_align(n, call.x, call.out), in_phase=same
    )
    return _launch(spec, call.scale, call.out, x)


def _backward_kernel(out: Array, dout: Array, *, call: Call) -> Array:
    n, scaled = out.shape[-1], call.scale != 1.0
    align, same = _align(n, call.out, call.x), call.x == call.out
    spec = SoftmaxBwdSpec(
        n, call.out, call.out, call.x, call.log, scaled, align=align, in_phase=same
    )
    return _launch(spec, call.scale, call.x, out, dout)


def _align(n: int, *names: str) -> int:
    """Bytes that divide the strides of contiguous rows of these dtypes."""
    return math.gcd(ALIGN, *(n * dtypes.width(name) // 8 for name in names))


def _launch(
    spec: SoftmaxFwdSpec | SoftmaxBwdSpec, scale: float, dtype: str, *operands: Array
) -> Array:
    """A call of XLA's, with operands and result as contiguous rows ``(M, N)``."""
    rows = tuple(operand.reshape(-1, spec.n) for operand in operands)
    target = arch.detect()
    config = _config(spec, rows[0].shape[0], target)
    with _registering:
        name = _register(spec, config, target)
    result = jax.ShapeDtypeStruct(rows[0].shape, dtype)
    return jax.ffi.ffi_call(name, result)(*rows, scale=scale).reshape(operands[0].shape)


def _config(spec: SoftmaxFwdSpec | SoftmaxBwdSpec, rows: int, target: Arch) -> RowConfig:
    """How the kernel computes. Where each CTA would have one row: the one of that, the same bits."""
    kind = FwdConfig if isinstance(spec, SoftmaxFwdSpec) else BwdConfig
    chosen = rules.choose(kind, replace(spec, align=ALIGN), target)
    if chosen is None:
        raise UnsupportedError(
            f"softmax, n={spec.n} on {target.name}",
            f"a cluster of {target.max_cluster} CTAs cannot hold such a row",
            "use shorter rows, or jax.nn",
        )
    single = chosen.for_few(spec)
    if single is None:
        return chosen
    sizes = (chosen.cluster, chosen.num_threads, chosen.smem_bytes(spec))
    try:
        device = driver.current_device()
        resident = occupancy.resident_clusters(device, *sizes, registers=chosen.registers)
    except DeviceError:  # lowered for a GPU that is not here
        return chosen
    return single if rows <= resident else chosen


@functools.cache
def _register(spec: SoftmaxFwdSpec | SoftmaxBwdSpec, config: RowConfig, target: Arch) -> str:
    """Load a kernel and make it known to XLA; the name is the same in every process."""
    try:
        import jax_tvm_ffi  # loads tvm_ffi, which loads torch if it is installed
    except ImportError as error:
        raise ImportError(
            "kernels on JAX arrays need jax-tvm-ffi: pip install 'quack-norm[jax]'"
        ) from error

    function = cache.load(config.module, spec, config, target)
    digest = cache.key(config.module, spec, config, target).digest
    name = f"quack_norm.{spec.name}.{digest[:16]}"
    arguments = ["args", "rets", "attrs.scale"]
    # A launch keeps no state outside its operands, so XLA may record it into a CUDA graph.
    jax_tvm_ffi.register_ffi_target(
        name, function, arguments, platform=PLATFORM, allow_cuda_graph=True
    )
    return name


# --- Primitives ---------------------------------------------------------------------------------


def _primitive(name: str, reference: Any, kernel: Any) -> Primitive:
    """An operation of rows along the last axis, by platform; others than these two are refused.

    Args:
        name: as it shows in a jaxpr.
        reference: ``reference(*operands, call=...)``: what the CPU runs.
        kernel: what CUDA runs; it is called when a program is lowered, so that no kernel is looked
            up where none will run.
    """
    primitive = Primitive(name)

    @functools.partial(jax.jit, static_argnames="call")
    def compiled(*operands: Array, call: Call) -> Array:
        return primitive.bind(*operands, call=call)

    def run(*operands: Array, call: Call) -> Array:
        with jax.disable_jit(False):  # there is no other way to run it
            return compiled(*operands, call=call)

    def batch(operands: Any, axes: Any, *, call: Call) -> tuple[Array, int]:
        sizes = (
            operand.shape[axis]
            for operand, axis in zip(operands, axes, strict=True)
            if axis is not None
        )
        size = next(sizes)
        moved = (
            jnp.broadcast_to(operand, (size, *operand.shape))
            if axis is None
            else jnp.moveaxis(operand, axis, 0)
            for operand, axis in zip(operands, axes, strict=True)
        )
        return primitive.bind(*moved, call=call), 0

    primitive.def_impl(run)
    batching.primitive_batchers[primitive] = batch
    for platform, function in (("cpu", reference), ("cuda", kernel)):
        lowering = mlir.lower_fun(function, multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform=platform)
    return primitive


_forward = _primitive("quack_norm_softmax_fwd", _forward_reference, _forward_kernel)
_backward = _primitive("quack_norm_softmax_bwd", _backward_reference, _backward_kernel)


@_forward.def_abstract_eval
def _forward_shape(x: Any, *, call: Call) -> Any:
    return x.update(dtype=jnp.dtype(call.out), weak_type=False)


@_backward.def_abstract_eval
def _backward_shape(out: Any, dout: Any, *, call: Call) -> Any:
    return out.update(dtype=jnp.dtype(call.x), weak_type=False)


def _no_second_derivative(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "softmax: a second derivative was asked for",
        "its backward cannot be differentiated",
        "use jax.nn for double backward",
    )


ad.primitive_jvps[_backward] = _no_second_derivative


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(x: Array, call: Call) -> Array:
    return _forward.bind(x, call=call)


def _save(x: Array, call: Call) -> tuple[Array, Array]:
    out = _softmax(x, call)
    return out, out


def _gradient(call: Call, out: Array, dout: Array) -> tuple[Array]:
    return (_backward.bind(out, dout, call=call),)


_softmax.defvjp(_save, _gradient)
