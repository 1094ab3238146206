"""Operators inside PyTorch: registration, the eager fast path, dtypes.

Needs torch, which quack_core does not depend on: import this module where torch is a dependency.
Operators are defined through ``torch.library.Library``: the decorators of ``torch.library`` load
``torch._dynamo``, which takes seconds.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from quack_core import dtypes
from quack_core.errors import DTypeError, UnsupportedError

_DTYPES = {getattr(torch, name): name for name in dtypes.SUPPORTED}
_PLAIN = frozenset({Tensor, torch.nn.Parameter})

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._is_tracing
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # builds without CUDA lack it


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as `quack_core.dtypes` and the specs spell it.

    Raises:
        DTypeError: kernels do not take this dtype.
    """
    try:
        return _DTYPES[dtype]
    except (KeyError, TypeError):
        found = str(dtype).removeprefix("torch.")
        raise DTypeError(f"dtype {found} must be one of {', '.join(dtypes.SUPPORTED)}") from None


def name_of(dtype: torch.dtype) -> str:
    """The name of any dtype that some kernel takes, 8-bit ones included; it is not checked."""
    return str(dtype).removeprefix("torch.")


def check_dtype(operator: str, operand: str, dtype: torch.dtype) -> None:
    """Check that kernels take the dtype of an operand.

    Raises:
        DTypeError: they do not; names operator, operand, and the dtypes that they take.
    """
    try:
        dtype_name(dtype)
    except DTypeError:
        raise DTypeError(
            f"{operator}: {operand} is {str(dtype).removeprefix('torch.')}: it must be one of "
            f"{', '.join(dtypes.SUPPORTED)}; convert with .to()"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name; the inverse of `dtype_name`.

    Raises:
        DTypeError: no such name.
    """
    dtypes.width(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def addressed(x: Tensor) -> bool:
    """Whether a tensor has an address: not while torch.compile traces, nor have fake and meta tensors."""
    return not is_dynamo_compiling() and type(x) in _PLAIN and not x.is_meta


def plain(x: Any) -> bool:
    """Whether this is a tensor or a parameter, and no subclass of them."""
    return type(x) in _PLAIN


def span(x: Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor, and of the first one behind it."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.element_size()


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same elements in memory."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def eager(a: Any, b: Any = None, c: Any = None, d: Any = None, e: Any = None) -> bool:
    """Whether operands may go to a kernel directly, without torch's dispatcher.

    False where something has to see the call or wraps the tensors: torch.compile, export, fake
    tensors and other modes, tensor subclasses, functorch, forward-mode AD, jit tracing.

    Args:
        a, b, c, d, e: tensors; None stands for an absent one. (A tuple would cost more than the
            checks.)
    """
    if is_dynamo_compiling():  # first: torch.compile takes this for the constant True
        return False
    return (
        type(a) in _PLAIN
        and (b is None or type(b) in _PLAIN)
        and (c is None or type(c) in _PLAIN)
        and (d is None or type(d) in _PLAIN)
        and (e is None or type(e) in _PLAIN)
        and not _dispatch_modes()
        and not _function_modes()
        and _transforms() is None
        and forward_ad._current_level < 0
        and not _tracing()
    )


def recorded(*operands: Tensor | None) -> bool:
    """Whether there will be a backward. (An autograd function is not told: of parameters it hears
    that they need gradients even under ``no_grad``.)"""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def check_no_tangent(name: str, *operands: Tensor | None) -> None:
    """Raise if an operand carries a tangent of forward-mode AD, which would be dropped.

    Raises:
        UnsupportedError: names the operator and the way out.
    """
    if forward_ad._current_level < 0:
        return
    for operand in operands:
        if operand is not None and forward_ad.unpack_dual(operand).tangent is not None:
            raise UnsupportedError(
                f"{name}: an operand carries a tangent of forward-mode AD",
                "there is no forward-mode derivative",
                "use reverse mode, such as torch.autograd.grad",
            )


def bump_version(tensor: Tensor) -> None:
    """Tell autograd that a kernel changed ``tensor`` in place."""
    torch.autograd.graph.increment_version(tensor)


def on_device(launch: Callable[..., Any], device: int) -> Callable[..., Any]:
    """``launch`` with its device current; the caller's comes back afterwards.

    Args:
        launch: starts kernels on one device.
        device: index of that.
    """
    if torch.cuda.device_count() <= 1:
        return launch

    def switching(*args: Any) -> Any:
        if _current_device() == device:
            return launch(*args)
        with torch.cuda.device(device):
            return launch(*args)

    return switching


def register(
    library: torch.library.Library,
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define an operator that changes none of its operands, and return it.

    Args:
        library: a ``FRAGMENT`` of the package's namespace; the caller keeps it alive.
        schema: as for ``Library.define``; results must not alias operands or each other.
        cpu: implementation on the CPU.
        cuda: implementation on CUDA devices.
        fake: checks operands and returns empty results. It sees meta tensors, and fake ones as if
            on that device: torch itself gives the results theirs, and refuses devices that differ.
        backward: as for ``torch.library.register_autograd``.
        setup_context: likewise; None: ``backward`` needs nothing of the call.
    """
    setup_context = setup_context or _keep_nothing
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.split("(", 1)[0]
    library.impl(name, cpu, "CPU")
    library.impl(name, cuda, "CUDA")
    library.impl(name, fake, "Meta")  # register_fake reads source files first, for milliseconds
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, library.ns), name).default
    kernel = _differentiable(overload, Info(backward, setup_context))
    library.impl(name, kernel, "Autograd", with_keyset=True)
    return overload


def _differentiable(overload: torch._ops.OpOverload, info: Info) -> Callable[..., Any]:
    """As ``torch.library.register_autograd`` registers it, but made when it is first called.

    Making it takes a millisecond, which a process that only makes eager calls does not need.
    """
    made = functools.cache(lambda: make_autograd_impl(overload, info))
    return lambda keyset, *args: made()(keyset, *args)


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """For a ``backward`` that needs nothing of the call."""


def no_second_derivative(operator: str, instead: str, whose: str = "its") -> Callable[..., None]:
    """The ``backward`` of an operator that is itself one: it raises UnsupportedError.

    Args:
        operator: whose second derivative it would be.
        instead: what to do instead.
        whose: "their" if ``operator`` names several.
    """

    def backward(ctx: Any, *_: Any) -> None:
        raise UnsupportedError(
            f"{operator}: a second derivative was asked for",
            f"{whose} backward cannot be differentiated",
            instead,
        )

    return backward
