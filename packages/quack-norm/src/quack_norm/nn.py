"""Modules: drop-in replacements for those of ``torch.nn``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core.errors import ShapeError
from quack_norm.ops.rmsnorm.api import rmsnorm

# torch's rms_norm takes the epsilon of the dtype that it computes in: float32 for all of ours.
_TORCH_EPS = torch.finfo(torch.float32).eps


class RMSNorm(torch.nn.RMSNorm):
    """`quack_norm.rmsnorm` as a module; replaces `torch.nn.RMSNorm`, whose state it loads.

    Args:
        normalized_shape: the last dimensions of the input, which are normalised together.
        eps: added to the mean square; None is what torch takes, 1.1920929e-07.
        elementwise_affine: learn a weight.
        device: of the parameters.
        dtype: of the parameters; it need not be that of the input.
        bias: learn a bias as well.
        weight_offset: added to the weight in every call. The weight starts at one minus it.
        out_dtype: dtype of the result, by default that of the input.
        residual_dtype: dtype of ``input + residual`` as a result, by default that of residual.
    """

    bias: torch.nn.Parameter | None
    weight_offset: float = 0.0

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        weight_offset: float = 0.0,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]
        self.weight_offset = weight_offset
        self.out_dtype = out_dtype
        self.residual_dtype = residual_dtype
        values = torch.empty(self.normalized_shape, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if values is None else torch.nn.Parameter(values))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The scale starts at one, the bias at zero."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        bias = self._parameters.get("bias")  # torch's constructor calls this before there is one
        if bias is not None:
            torch.nn.init.zeros_(bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """Normalise ``x + residual``.

        Args:
            x: ``(..., *normalized_shape)``.
            residual: shaped like x.
            prenorm: return the sum as well.

        Returns:
            The normalised tensor, or with ``prenorm`` a tuple of it and the sum.
        """
        axes = len(self.normalized_shape)
        if tuple(x.shape[-axes:]) != tuple(self.normalized_shape):
            raise ShapeError(
                f"RMSNorm: x has shape {tuple(x.shape)}: its last dimensions must be "
                f"normalized_shape, {tuple(self.normalized_shape)}"
            )
        result: Tensor | tuple[Tensor, ...] = rmsnorm(
            x if axes == 1 else x.flatten(-axes),
            _flat(self.weight, axes),
            _flat(self.bias, axes),
            residual=_flat(residual, axes),
            eps=_TORCH_EPS if self.eps is None else self.eps,
            weight_offset=self.weight_offset,
            prenorm=prenorm,
            out_dtype=self.out_dtype,
            residual_dtype=self.residual_dtype,
        )
        if axes == 1:
            return result
        if isinstance(result, tuple):
            return tuple(tensor.view(x.shape) for tensor in result)
        return result.view(x.shape)

    def extra_repr(self) -> str:
        """The arguments that differ from torch's."""
        text = super().extra_repr()
        if self.bias is not None:
            text += ", bias=True"
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        for name in ("out_dtype", "residual_dtype"):
            if getattr(self, name) is not None:
                text += f", {name}={getattr(self, name)}"
        return text


class QuackRMSNorm(RMSNorm):
    """`RMSNorm` over the last dimension, with eps 1e-6 as in the function.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
        elementwise_affine: learn a weight.
        device: of the parameters.
        dtype: of the parameters.
        **options: the keywords of `RMSNorm`.
    """

    def __init__(
        self,
        dim: int,
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, eps, elementwise_affine, device, dtype, **options)


def _flat(tensor: Tensor | None, axes: int) -> Tensor | None:
    """The last ``axes`` dimensions as one."""
    return tensor if tensor is None or axes == 1 else tensor.flatten(-axes)
