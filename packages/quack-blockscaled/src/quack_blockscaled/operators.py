"""Quantisers as registered operators: what torch.compile, export, fake tensors and the CPU see.

A format crosses torch's dispatcher as text, from which it is made again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import UnsupportedError

from . import record, reference
from .formats import BlockFormat
from .product import launch as multiply
from .product import reference as multiplied
from .quantizer import launch

_LIBRARY = torch.library.Library("quack_blockscaled", "FRAGMENT")


def _direct(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the dispatcher has nothing to do, which takes longer than small kernels: plain CUDA
    tensors, and nobody to be told that there is no gradient."""
    return x.is_cuda and torch_op.eager(x, *others) and not torch_op.recorded(x, *others)


def quantize(
    x: Tensor,
    format: BlockFormat,
    dim: int,
    scale_rounding: str,
    element_rounding: str,
    seed: int | None,
    tensor_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Values and scales; arguments as of `quack_blockscaled.quantize`, checked."""
    if _direct(x, tensor_scale):
        return launch.forward(x, format, dim, scale_rounding, element_rounding, seed, tensor_scale)
    found: tuple[Tensor, Tensor] = quantize_fwd(
        x, tensor_scale, record.text(format), dim, scale_rounding, element_rounding, seed
    )
    return found


Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_both(
    x: Tensor, format: BlockFormat, scale_rounding: str, tensor_scale: Tensor | None
) -> Parts:
    """Values and scales along the last dimension, then those along the one before it."""
    if _direct(x, tensor_scale):
        return launch.both(x, format, scale_rounding, tensor_scale)
    found: Parts = quantize_both_fwd(x, tensor_scale, record.text(format), scale_rounding)
    return found


def dequantize(
    values: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    format: BlockFormat,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    """Parts of a `BlockScaledTensor` as numbers."""
    if _direct(values, scales, tensor_scale):
        return launch.numbers(values, scales, tensor_scale, format, dim, dtype)
    found: Tensor = dequantize_fwd(values, scales, tensor_scale, record.text(format), dim, dtype)
    return found


def _quantize_cpu(
    x: Tensor,
    tensor_scale: Tensor | None,
    format: str,
    dim: int,
    scale_rounding: str,
    element_rounding: str,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    known = record.parse(format)
    values, scales, _ = reference.quantize(
        x,
        known,
        dim=dim,
        scale_rounding=scale_rounding,
        element_rounding=element_rounding,
        seed=seed,
        per_tensor_scale=tensor_scale,
    )
    if known.by_column:
        scales = launch.empty_scales(x, known, dim).copy_(scales)
    return values, scales


def _quantize_cuda(
    x: Tensor,
    tensor_scale: Tensor | None,
    format: str,
    dim: int,
    scale_rounding: str,
    element_rounding: str,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    return launch.forward(
        x, record.parse(format), dim, scale_rounding, element_rounding, seed, tensor_scale
    )


def _quantize_fake(
    x: Tensor,
    tensor_scale: Tensor | None,
    format: str,
    dim: int,
    scale_rounding: str,
    element_rounding: str,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    return launch.empty(x, record.parse(format), dim)


def _both_cpu(x: Tensor, tensor_scale: Tensor | None, format: str, scale_rounding: str) -> Parts:
    how = (scale_rounding, "nearest-even", None)
    rows = _quantize_cpu(x, tensor_scale, format, -1, *how)
    return *rows, *_quantize_cpu(x, tensor_scale, format, -2, *how)


def _both_cuda(x: Tensor, tensor_scale: Tensor | None, format: str, scale_rounding: str) -> Parts:
    return launch.both(x, record.parse(format), scale_rounding, tensor_scale)


def _both_fake(x: Tensor, tensor_scale: Tensor | None, format: str, scale_rounding: str) -> Parts:
    return *launch.empty(x, record.parse(format), -1), *launch.empty(x, record.parse(format), -2)


def _dequantize_cpu(
    values: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    format: str,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    return reference.dequantize(
        values, scales, record.parse(format), dim=dim, per_tensor_scale=tensor_scale, dtype=dtype
    )


def _dequantize_cuda(
    values: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    format: str,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    return launch.numbers(values, scales, tensor_scale, record.parse(format), dim, dtype)


def _dequantize_fake(
    values: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    format: str,
    dim: int,
    dtype: torch.dtype,
) -> Tensor:
    return launch.empty_numbers(values, record.parse(format), dim, dtype)


def _no_gradient(name: str) -> Callable[..., None]:
    def backward(ctx: Any, *_: Any) -> None:
        raise UnsupportedError(
            f"{name}: a gradient was asked for", "it has none", "use torch.no_grad() or .detach()"
        )

    return backward


quantize_fwd = torch_op.register(
    _LIBRARY,
    "quantize_fwd(Tensor x, Tensor? tensor_scale, str format, int dim, str scale_rounding, "
    "str element_rounding, SymInt? seed) -> (Tensor, Tensor)",
    cpu=_quantize_cpu,
    cuda=_quantize_cuda,
    fake=_quantize_fake,
    backward=_no_gradient("quantize"),
)

quantize_both_fwd = torch_op.register(
    _LIBRARY,
    "quantize_both_fwd(Tensor x, Tensor? tensor_scale, str format, str scale_rounding) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    cpu=_both_cpu,
    cuda=_both_cuda,
    fake=_both_fake,
    backward=_no_gradient("quantize_both"),
)

dequantize_fwd = torch_op.register(
    _LIBRARY,
    "dequantize_fwd(Tensor values, Tensor scales, Tensor? tensor_scale, str format, int dim, "
    "ScalarType dtype) -> Tensor",
    cpu=_dequantize_cpu,
    cuda=_dequantize_cuda,
    fake=_dequantize_fake,
    backward=_no_gradient("dequantize"),
)


def _matmul_fake(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    return multiply.empty(a, b.shape[0], dtype)


matmul_fwd = torch_op.register(
    _LIBRARY,
    "matmul_fwd(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, ScalarType dtype) -> Tensor",
    cpu=multiplied.matmul,
    cuda=multiply.forward,
    fake=_matmul_fake,
    backward=_no_gradient("matmul"),
)


def matmul(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Parts of two `BlockScaledTensor`, checked; arguments as of `product.reference.matmul`."""
    if _direct(a, scale_a, b, scale_b):
        return multiply.forward(a, scale_a, b, scale_b, dtype)
    found: Tensor = matmul_fwd(a, scale_a, b, scale_b, dtype)
    return found


def _grouped_fake(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    return multiply.empty(a, b.shape[1], dtype)


matmul_grouped_fwd = torch_op.register(
    _LIBRARY,
    "matmul_grouped_fwd(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor offsets, "
    "ScalarType dtype) -> Tensor",
    cpu=multiplied.grouped,
    cuda=multiply.grouped,
    fake=_grouped_fake,
    backward=_no_gradient("matmul_grouped"),
)


def matmul_grouped(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Parts of two `BlockScaledTensor`, checked; arguments as of `product.reference.grouped`."""
    if _direct(a, scale_a, b, scale_b, offsets):
        return multiply.grouped(a, scale_a, b, scale_b, offsets, dtype)
    found: Tensor = matmul_grouped_fwd(a, scale_a, b, scale_b, offsets, dtype)
    return found


def matmul_into(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out: Tensor, accumulate: bool
) -> Tensor:
    """`matmul`, written to ``out`` or added to it."""
    if a.is_cuda and torch_op.eager(a, scale_a, b, scale_b, out):
        multiply.forward(a, scale_a, b, scale_b, out.dtype, out=out, accumulate=accumulate)
        torch_op.bump_version(out)
        return out
    found = matmul(a, scale_a, b, scale_b, out.dtype)
    return out.add_(found) if accumulate else out.copy_(found)


def writable(out: Tensor) -> bool:
    """Whether kernels can write a product there; nothing is known while torch.compile traces."""
    return not torch_op.addressed(out) or multiply.is_readable(out)
