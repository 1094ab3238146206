"""Quantising CUDA tensors: allocate, find the kernel, launch."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quack_core import arch, torch_op, torch_workspace
from quack_core.errors import UnsupportedError
from quack_core.jit import cache

from .. import sizes
from ..formats import BlockFormat
from .spec import QuantizeConfig, QuantizeSpec

ALIGN = 16


def forward(
    x: Tensor,
    format: BlockFormat,
    dim: int,
    scale_rounding: str,
    element_rounding: str,
    tensor_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `reference.quantize`, on CUDA tensors; x is copied unless it is contiguous and aligned.

    Raises:
        UnsupportedError: there is no kernel for that; names the way out.
    """
    if dim != -1:
        raise UnsupportedError(
            f"quantize: dim is {dim}, x is on {x.device}",
            "there are kernels for blocks along the last dimension only",
            "quantize x.mT.contiguous() with dim=-1, and take .mT of the result",
        )
    if element_rounding != "nearest-even":
        raise UnsupportedError(
            f"quantize: element_rounding is {element_rounding!r}, x is on {x.device}",
            "kernels round to the nearest only",
            "call .cpu() on x first: CPU tensors run the reference",
        )
    spec = QuantizeSpec(torch_op.dtype_name(x.dtype), format, scale_rounding)
    values, scales = empty(x, format, dim)
    if x.numel() == 0:
        return values, scales
    x = x.contiguous()
    if x.data_ptr() % ALIGN:
        x = x.clone()
    stored = scales.flatten()
    if stored.dtype != torch.float32:
        stored = stored.view(torch.uint8)
    codes = values.flatten().view(torch.uint8)
    columns = min(x.shape[-1], 2**31 - 1)  # more are in one row, where they do not matter
    _kernel(spec, x.get_device())(x.flatten(), codes, stored, columns)
    return values, scales


def empty(x: Tensor, format: BlockFormat, dim: int) -> tuple[Tensor, Tensor]:
    """Values and scales of a tensor like x, to be written."""
    parts = (
        (sizes.values_shape(x.shape, format, dim), format.element.dtype),
        (sizes.scales_shape(x.shape, format, dim), format.scale.dtype),
    )
    values, scales = (x.new_empty(shape, dtype=getattr(torch, name)) for shape, name in parts)
    return values, scales


@functools.cache
def _kernel(spec: QuantizeSpec, device: int) -> Callable[..., None]:
    """Finding a kernel reads source files."""
    with torch_workspace.relaxed_capture():
        found: Callable[..., None] = cache.load(
            spec.module, spec, QuantizeConfig(), arch.detect(device)
        )
    return found
