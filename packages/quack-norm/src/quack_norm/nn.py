"""Modules: drop-in replacements for those of ``torch.nn``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core.errors import ShapeError
from quack_norm.ops.layernorm.api import layernorm
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
        return _normalise(
            self,
            rmsnorm,
            x,
            residual,
            eps=_TORCH_EPS if self.eps is None else self.eps,
            weight_offset=self.weight_offset,
            prenorm=prenorm,
        )

    def extra_repr(self) -> str:
        """Torch's arguments, and those of ours that are not as by default."""
        text = super().extra_repr()
        if self.bias is not None:
            text += ", bias=True"
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        return text + _dtypes(self)


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


class LayerNorm(torch.nn.LayerNorm):
    """`quack_norm.layernorm` as a module; replaces `torch.nn.LayerNorm`, whose state it loads.

    Args:
        normalized_shape: the last dimensions of the input, which are normalised together.
        eps: added to the variance.
        elementwise_affine: learn a weight, and a bias with it.
        bias: whether to learn the bias.
        device: of the parameters.
        dtype: of the parameters; it need not be that of the input.
        out_dtype: dtype of the result, by default that of the input.
        residual_dtype: dtype of ``input + residual`` as a result, by default that of residual.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        self.out_dtype = out_dtype
        self.residual_dtype = residual_dtype

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
        return _normalise(self, layernorm, x, residual, eps=self.eps, prenorm=prenorm)

    def extra_repr(self) -> str:
        """Torch's arguments, and those of ours that are not as by default."""
        text = super().extra_repr()
        if self.elementwise_affine and self.bias is None and "bias=" not in text:
            text += ", bias=False"
        return text + _dtypes(self)


def _normalise(
    module: RMSNorm | LayerNorm,
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    x: Tensor,
    residual: Tensor | None,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """``function`` over all dimensions of the module's normalized_shape together."""
    axes = len(module.normalized_shape)
    if tuple(x.shape[-axes:]) != tuple(module.normalized_shape):
        raise ShapeError(
            f"{type(module).__name__}: x has shape {tuple(x.shape)}: its last dimensions must be "
            f"normalized_shape, {tuple(module.normalized_shape)}"
        )
    result = function(
        x if axes == 1 else x.flatten(-axes),
        _flat(module.weight, axes),
        _flat(module.bias, axes),
        residual=_flat(residual, axes),
        out_dtype=module.out_dtype,
        residual_dtype=module.residual_dtype,
        **options,
    )
    if axes == 1:
        return result
    if isinstance(result, tuple):
        return tuple(tensor.view(x.shape) for tensor in result)
    return result.view(x.shape)


def _dtypes(module: RMSNorm | LayerNorm) -> str:
    """Text of the dtypes that are not as by default."""
    given = ((name, getattr(module, name)) for name in ("out_dtype", "residual_dtype"))
    return "".join(f", {name}={dtype}" for name, dtype in given if dtype is not None)


def _flat(tensor: Tensor | None, axes: int) -> Tensor | None:
    """The last ``axes`` dimensions as one."""
    return tensor if tensor is None or axes == 1 else tensor.flatten(-axes)
