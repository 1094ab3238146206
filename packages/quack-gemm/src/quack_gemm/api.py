"""The public functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.gemm.epilogue import Activation, AddC, AddVector, Kind, Op, Scale

from . import autograd, check, launch, repeat
from .config import GemmConfig
from .heuristic import SPLITS
from .reference import Step

Entry = Op | tuple[Any, ...]
"""An op of an epilogue, alone or with its operands: ``(op, operand, ...)``."""


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    # No 1.0: with dynamic shapes torch.compile makes a variable of a number that is a default.
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    epilogue: Sequence[Entry] = (),
    scale_a: float | Tensor | None = None,
    scale_b: float | Tensor | None = None,
    split_k: int | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """``activation(alpha * scale_a * scale_b * (a @ b) + beta * c + bias)``, then ``epilogue``.

    CUDA tensors run a CuTe kernel, CPU tensors the reference; meta and fake tensors give shapes.

    Args:
        a: (M, K) or (L, M, K): bfloat16, float16, float8_e4m3fn or float8_e5m2. One of its last two
            strides is 1; the other one, and the address, are multiples of 16 bytes. In 8 bits the
            last one is 1.
        b: (K, N) or (L, K, N), of the same dtype, or both of 8 bits, where the stride along K is 1.
            A matrix without L, or with an L of 1, belongs to all matrices of the other's batch.
        c: (M, N) or (L, M, N), added; not read if ``beta`` is the number 0.
        bias: (N,), added to each row.
        alpha, beta: numbers, or float32 tensors of one element, read when the kernel runs; 1 if None.
        out: where the result goes; shaped like it, with strides as of ``a``.
        out_dtype: bfloat16, float16 or float32; by default that of a 16-bit ``a``, else bfloat16.
        activation: one of `quack_core.gemm.epilogue.ACTIVATIONS`.
        epilogue: more ops, in order: an op, or a tuple of an op and its operands. With a ``Gate``,
            columns 2i and 2i + 1 of ``b`` are gate and up of column i of the result.
        scale_a: of quantised operands: a number, a float32 tensor of one element or of (M, 1).
        scale_b: likewise, or of (1, N).
        split_k: CTAs that have parts of each tile's K (1, 2, 4 or 8); chosen by a rule if None.
            Their sums are added in order, so the bits do not depend on timing.
        config: how to compute it, ``split_k`` included, and with `SplitK` other ways to add the parts;
            chosen by a rule if None.

    Returns:
        (M, N) or (L, M, N). Rows of a result that we allocate begin at multiples of 16 bytes: where N
        is odd it is a view of a wider tensor.

    Raises:
        DTypeError, ShapeError, LayoutError, DeviceError: name operand, dimension, found and needed.
        UnsupportedError: float32 operands, and the way out; a gradient.
        ArchError: there is no kernel for the GPU.

    Numerics:
        Products are summed in float32, those of 8-bit operands in parts of 128 along K, since the
        tensor cores of Hopper keep about 14 bits of such sums; the epilogue is float32, and results
        are rounded once. Deterministic for a shape and configuration, but for `SplitK.PARALLEL`, which
        no rule chooses.
    """
    given = {
        "a": a, "b": b, "c": c, "bias": bias, "alpha": alpha, "beta": beta,
        "scale_a": scale_a, "scale_b": scale_b, "out": out,
    }  # fmt: skip
    known = None
    if not epilogue:
        known = repeat.key(given, out_dtype, activation, split_k, config)
        found = repeat.call(known, given, out)
        if found is not None:
            return found
    m, n, _, batches = check.operands(a, b)
    steps = _steps(a, m, n, batches, c, bias, alpha, beta, activation, scale_a, scale_b)
    steps += [_entry(one) for one in epilogue]
    cols = check.steps(steps, m, n, batches, a.device)
    if out_dtype is None:
        out_dtype = out.dtype if out is not None else default_dtype(a)
    check.out_dtype(out_dtype)
    dtypes = [out_dtype, *(torch_op.torch_dtype(op.aux) for op, _ in steps if op.aux)]
    if len(dtypes) > 1 or any(op.reduces for op, _ in steps):
        raise check.UnsupportedError(
            "gemm: an op of the epilogue stores a copy or reduces",
            "gemm returns one tensor",
            "call gemm_act, gemm_gated or quack_gemm.api.compute",
        )
    if split_k is not None and split_k not in SPLITS:
        raise check.ShapeError(f"gemm: split_k is {split_k}: it must be one of {SPLITS}")
    if split_k is not None and config is not None:
        raise check.ShapeError("gemm: split_k and config were given: config holds split_k")
    if out is not None:
        shape = (m, cols) if batches is None else (batches, m, cols)
        check.output(out, shape, out_dtype, a, b, c)
        d = _into(a, b, steps, dtypes, out, config or split_k)
    else:
        d = compute(a, b, steps, dtypes, config=config or split_k)[0]
    if known is not None:
        repeat.remember(known, given, steps, d, config or split_k)
    return d


def default_dtype(a: Tensor) -> torch.dtype:
    """Of a result: that of a 16-bit operand, else bfloat16."""
    return a.dtype if a.itemsize == 2 else torch.bfloat16


def compute(
    a: Tensor,
    b: Tensor,
    steps: Sequence[Step],
    dtypes: Sequence[torch.dtype],
    concat: bool = False,
    config: GemmConfig | int | None = None,
) -> list[Tensor]:
    """All outputs of operands that have been checked; arguments as of ``reference.forward``."""
    if a.is_cuda and torch_op.eager(a, b) and not _needs_gradient(a, b, steps):
        return launch.forward(a, b, steps, dtypes, concat, config=config)
    torch_op.check_no_tangent("gemm", a, b, *_tensors(steps))
    return autograd.call(a, b, steps, dtypes, concat, config)


def _steps(
    a: Tensor,
    m: int,
    n: int,
    batches: int | None,
    c: Tensor | None,
    bias: Tensor | None,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    activation: str | None,
    scale_a: float | Tensor | None,
    scale_b: float | Tensor | None,
) -> list[Step]:
    """The epilogue that the arguments of ``gemm`` describe."""
    steps: list[Step] = []
    kind: Kind | None
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b), ("alpha", alpha)):
        if scale is None or (name == "alpha" and _is(scale, 1.0)):
            continue
        kind, value = launch.scale_kind(name, scale, m, n)
        steps.append((Scale(kind, name), (value,)))
    if c is not None and not _is(beta, 0.0):
        batched = isinstance(c, Tensor) and c.dim() == 3
        if beta is None or _is(beta, 1.0):
            steps.append((AddC(_dtype("c", c), None, batched), (c,)))
        else:
            kind, value = launch.scale_kind("beta", beta, m, n)
            steps.append((AddC(_dtype("c", c), kind, batched), (c, value)))
    if bias is not None:
        batched = isinstance(bias, Tensor) and bias.dim() == 2
        steps.append((AddVector(_dtype("bias", bias), Kind.ROW, batched), (bias,)))
    if activation is not None and activation != "identity":
        steps.append((Activation(activation), ()))
    return steps


def _is(factor: float | Tensor | None, value: float) -> bool:
    """Whether a factor is this number; not where the number lies on a device."""
    return not isinstance(factor, Tensor) and factor == value


def _dtype(name: str, x: Tensor) -> str:
    if not isinstance(x, Tensor):
        raise check.DTypeError(f"gemm: {name} is {type(x).__name__}: it must be a tensor")
    torch_op.check_dtype("gemm", name, x.dtype)
    return torch_op.dtype_name(x.dtype)


def _entry(one: Entry) -> Step:
    """An op and its operands."""
    op, *operands = one if isinstance(one, tuple) else (one,)
    if not isinstance(op, Op):
        raise check.DTypeError(f"gemm: epilogue holds {type(op).__name__}: it must be an Op")
    return op, tuple(operands)


def _needs_gradient(a: Tensor, b: Tensor, steps: Sequence[Step]) -> bool:
    return torch_op.recorded(a, b, *_tensors(steps))


def _tensors(steps: Sequence[Step]) -> list[Tensor]:
    """Operands of an epilogue that are tensors."""
    given = [operand for _, operands in steps for operand in operands]
    return [x for x in given if isinstance(x, Tensor)]


def _into(
    a: Tensor,
    b: Tensor,
    steps: Sequence[Step],
    dtypes: Sequence[torch.dtype],
    out: Tensor,
    config: GemmConfig | int | None,
) -> Tensor:
    """Write the result into ``out``."""
    if _needs_gradient(a, b, steps) or (torch.is_grad_enabled() and out.requires_grad):
        raise check.UnsupportedError(
            "gemm: out was given, and an operand requires a gradient",
            "results in given tensors are not differentiable",
            "leave out away, or use torch.no_grad()",
        )
    if a.is_cuda and torch_op.eager(a, b, out):
        launch.forward(a, b, steps, dtypes, out=out, config=config)
        torch_op.bump_version(out)
        return out
    torch_op.check_no_tangent("gemm", a, b, *_tensors(steps))
    return out.copy_(autograd.call(a, b, steps, dtypes, False, config)[0])
