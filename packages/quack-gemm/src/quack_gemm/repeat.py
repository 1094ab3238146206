"""A call of ``gemm`` like an earlier one: what cannot have changed is not looked at again.

A key holds all that checks and the choice of a kernel depend on, but for addresses: whether results
share memory with operands is seen in each call, and a kernel refuses an address that it cannot read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quack_core import torch_op

from . import launch
from .config import GemmConfig
from .reference import Step

_calls: dict[tuple[Any, ...], "Call"] = {}
MOST_CALLS = 4096


class Call(NamedTuple):
    """What a call comes down to.

    Args:
        launch: as `launch.launcher` gives it.
        operands: of the epilogue, in order: an argument of ``gemm``, and the shape in which the kernel
            takes it; None for a number.
        shape, stride, dtype: of D.
        read: arguments with which D must not share memory, and their bytes.
        bytes: of D.
    """

    launch: launch.Launch
    operands: tuple[tuple[str, tuple[int, ...] | None], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    read: tuple[tuple[str, int], ...]
    bytes: int


def key(given: Mapping[str, Any], *options: Any) -> tuple[Any, ...] | None:
    """The key of a call; None if something has to see it: gradients, modes, tensor subclasses.

    Args:
        given: the arguments that are tensors, or numbers in their place.
        options: the others.
    """
    a = given["a"]
    if not torch_op.eager(a) or not a.is_cuda:
        return None
    recording = torch.is_grad_enabled()
    found = list(options)
    for x in given.values():
        if x is None:
            found.append(None)
        elif not isinstance(x, Tensor):
            found.append((x == 0.0, x == 1.0))  # which change the epilogue
        elif not torch_op.plain(x) or (recording and x.requires_grad):
            return None
        else:
            found.append((x.shape, x.stride(), x.dtype, x.get_device()))
    return tuple(found)


def call(known: tuple[Any, ...] | None, given: Mapping[str, Any], out: Tensor | None) -> Any:
    """The result of a call that is known; None: it is not, or there is something to complain of."""
    try:
        one = _calls.get(known) if known is not None else None
    except TypeError:  # an option that no call accepts
        return None
    if one is None:
        return None
    if out is None:
        d = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=given["a"].device)
    else:
        d, start = out, out.data_ptr()
        for name, size in one.read:
            address = given[name].data_ptr()
            if start < address + size and address < start + one.bytes:
                return None
    operands = tuple([_operand(given[name], shape) for name, shape in one.operands])
    try:
        one.launch(given["a"], given["b"], (d,), operands or None)
    except (TypeError, ValueError):  # the checks say what is wrong
        return None
    if out is not None:
        torch_op.bump_version(out)
    return d


def remember(
    known: tuple[Any, ...],
    given: Mapping[str, Any],
    steps: Sequence[Step],
    d: Tensor,
    config: GemmConfig | int | None,
) -> None:
    """Keep what a call came down to, that went well.

    Args:
        d: its result.
    """
    a, b = given["a"], given["b"]
    if 0 in (*a.shape, *b.shape) or launch.is_single(a, b, steps):
        return  # there was more to do than a launch
    names = [what.name for op, _ in steps for what in op.operands]
    values = [value for _, values in steps for value in values]
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in values]
    read = {name: given[name] for name in ("a", "b", "c") if given[name] is not None}
    if len(_calls) >= MOST_CALLS:
        _calls.clear()
    _calls[known] = Call(
        launch.launcher(a, b, [d], steps, False, config),
        tuple(zip(names, shapes, strict=True)),
        tuple(d.shape),
        d.stride(),
        d.dtype,
        tuple((name, _bytes(x)) for name, x in read.items()),
        _bytes(d),
    )


def _operand(value: Any, shape: tuple[int, ...] | None) -> Any:
    """As the kernel takes it."""
    if shape is None:
        return float(value)
    return value if value.shape == shape else value.reshape(shape)


def _bytes(x: Tensor) -> int:
    """From a tensor's first to behind its last."""
    start, end = torch_op.span(x)
    return end - start
