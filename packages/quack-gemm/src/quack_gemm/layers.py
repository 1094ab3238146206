"""Linear layers and MLPs, differentiable, and their modules."""

from typing import Any

import torch
from torch import Tensor, nn

from quack_core import torch_op
from quack_core.gemm.activations import derivative

from . import check, weight_grad
from .api import gemm
from .fused import GATED, gemm_act, gemm_dact, gemm_dact_bias, gemm_dgated, gemm_gated
from .launch import readable
from .weight_grad import Owner


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, accumulate: bool = False
) -> Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``. Differentiable once.

    Args:
        x: (..., K), bfloat16 or float16.
        weight: (N, K), of the same dtype.
        bias: (N,).
        accumulate: the backward adds the weight's gradient in float32, rounded once, to a float32
            tensor: ``weight.grad`` of a float32 weight, such as under ``torch.autocast``, and
            ``weight.main_grad`` of another one. Where that is missing or None, the first gradient
            becomes it. Autograd itself then gives the weight none, so hooks of the weight do not run.

    Returns:
        (..., N). Operands whose rows do not begin at multiples of 16 bytes are copied.
    """
    sums = weight_grad.owner("linear", weight, accumulate)
    x, weight = _autocast(x, weight)
    n = check.layer("linear", x, x.shape[-1], "weight", weight, bias)
    found: Tensor = _Linear.apply(_rows(x), weight, bias, sums)
    return found.reshape(*x.shape[:-1], n)


def linear_act(
    x: Tensor,
    weight: Tensor,
    activation: str,
    bias: Tensor | None = None,
    *,
    accumulate: bool = False,
) -> Tensor:
    """``f(x @ weight.T + bias)``; f one of ``ACTIVATIONS``. Differentiable once.

    Args:
        x, weight, bias, accumulate: as of ``linear``.
    """
    sums = weight_grad.owner("linear_act", weight, accumulate)
    x, weight = _autocast(x, weight)
    n = check.layer("linear_act", x, x.shape[-1], "weight", weight, bias)
    found: Tensor = _LinearAct.apply(
        _rows(x), weight, bias, activation, False, torch_op.recorded(x, weight, bias), sums
    )
    return found.reshape(*x.shape[:-1], n)


def linear_gated(
    x: Tensor,
    weight: Tensor,
    activation: str,
    bias: Tensor | None = None,
    concat: bool = False,
    *,
    accumulate: bool = False,
) -> Tensor:
    """``f(gate) * up`` of ``x @ weight.T + bias``; arguments as of ``gemm_gated``. Differentiable once.

    Args:
        weight: (2 N, K): gates are the even rows, or the first N with ``concat``.
        accumulate: as of ``linear``.

    Returns:
        (..., N)
    """
    sums = weight_grad.owner("linear_gated", weight, accumulate)
    x, weight = _autocast(x, weight)
    n = check.layer("linear_gated", x, x.shape[-1], "weight", weight, bias, gated=True)
    found: Tensor = _LinearAct.apply(
        _rows(x), weight, bias, activation, concat, torch_op.recorded(x, weight, bias), sums
    )
    return found.reshape(*x.shape[:-1], n)


def mlp(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    recompute: bool = False,
    concat: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """``f(x @ weight1.T + bias1) @ weight2.T + bias2``. Differentiable once.

    Args:
        x: (..., K).
        weight1: (F, K); (2 F, K) for a gated activation.
        weight2: (N, F).
        activation: one of ``ACTIVATIONS`` or ``GATED``.
        recompute: the first layer is computed again in the backward: only x is kept.
        concat: as of ``gemm_gated``.
        accumulate: as of ``linear``, for both weights.

    Returns:
        (..., N)
    """
    sums = tuple(weight_grad.owner("mlp", one, accumulate) for one in (weight1, weight2))
    x, weight1, weight2 = _autocast(x, weight1, weight2)
    width = check.layer("mlp", x, x.shape[-1], "weight1", weight1, bias1, activation in GATED)
    n = check.layer("mlp", x, width, "weight2", weight2, bias2)
    kept = torch_op.recorded(x, weight1, weight2, bias1, bias2) and not recompute
    args = (_rows(x), weight1, weight2, bias1, bias2, activation, concat, kept, sums)
    found: Tensor = _MLP.apply(*args)
    return found.reshape(*x.shape[:-1], n)


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose forward is ``linear``.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``.
        accumulate: as of ``linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        accumulate: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.accumulate = accumulate

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, accumulate=self.accumulate)


class MLP(nn.Module):
    """Two linear layers and an activation.

    Args:
        in_features, hidden_features, out_features: K, F and N of ``mlp``; N is K if None.
        activation: one of ``ACTIVATIONS`` or ``GATED``.
        bias: whether both layers have one.
        recompute, concat, accumulate: as of ``mlp``.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        *,
        recompute: bool = False,
        concat: bool = False,
        accumulate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        width = hidden_features * (2 if activation in GATED else 1)
        self.fc1 = nn.Linear(in_features, width, **where)
        self.fc2 = nn.Linear(hidden_features, out_features or in_features, **where)
        self.activation, self.recompute, self.concat = activation, recompute, concat
        self.accumulate = accumulate

    def forward(self, x: Tensor) -> Tensor:
        return mlp(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.activation,
            self.fc1.bias,
            self.fc2.bias,
            recompute=self.recompute,
            concat=self.concat,
            accumulate=self.accumulate,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation}, recompute={self.recompute}, concat={self.concat}"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: Owner | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.sums = None if bias is None else bias.dtype, sums
        return gemm(readable(x), readable(weight).mT, bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return *_gradients(needs, dout, x, weight, ctx.bias_dtype, ctx.sums), None


class _LinearAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        concat: bool,
        kept: bool,
        sums: Owner | None,
    ) -> Tensor:
        preact, out = _first(x, weight, bias, activation, concat, kept)
        ctx.save_for_backward(x, weight, preact)
        ctx.bias_dtype, ctx.sums = None if bias is None else bias.dtype, sums
        ctx.activation, ctx.concat = activation, concat
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, preact = ctx.saved_tensors
        dpre = _through(dout, preact, ctx.activation, ctx.concat)
        needs = ctx.needs_input_grad[:3]
        found = _gradients(needs, dpre, x, weight, ctx.bias_dtype, ctx.sums)
        return (*found, None, None, None, None)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        activation: str,
        concat: bool,
        kept: bool,
        sums: tuple[Owner | None, Owner | None],
    ) -> Tensor:
        preact, hidden = _first(x, weight1, bias1, activation, concat, kept)
        saved = (preact, hidden) if kept else (None, None)
        ctx.save_for_backward(x, weight1, weight2, bias1, *saved)
        ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (bias1, bias2))
        ctx.activation, ctx.concat, ctx.sums = activation, concat, sums
        return gemm(readable(hidden), readable(weight2).mT, bias=bias2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, bias1, preact, hidden = ctx.saved_tensors
        if preact is None:
            preact, hidden = _first(x, weight1, bias1, ctx.activation, ctx.concat, True)
        needs = ctx.needs_input_grad
        dout = readable(dout)
        _, dweight2, dbias2 = _gradients(
            (False, needs[2], needs[4]), dout, hidden, weight2, ctx.bias_dtypes[1], ctx.sums[1]
        )
        dx = dweight1 = dbias1 = None
        if needs[0] or needs[1] or needs[3]:
            dpre, dbias1 = _hidden_gradient(ctx, dout, readable(weight2), preact, needs[3])
            left = needs[3] and dbias1 is None
            dx, dweight1, summed = _gradients(
                (needs[0], needs[1], left), dpre, x, weight1, ctx.bias_dtypes[0], ctx.sums[0]
            )
            dbias1 = summed if dbias1 is None else dbias1.to(ctx.bias_dtypes[0])
        return dx, dweight1, dweight2, dbias1, dbias2, None, None, None, None


def _first(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    concat: bool,
    wanted: bool,
) -> tuple[Tensor | None, Tensor]:
    """A layer with its activation: what went into that, if it is wanted, and the result."""
    a, b = readable(x), readable(weight, "row" if activation in GATED else None).mT
    if activation in GATED:
        return gemm_gated(a, b, activation, bias=bias, store_preact=wanted, concat=concat)
    return gemm_act(a, b, activation, bias=bias, store_preact=wanted)


def _hidden_gradient(
    ctx: Any, dout: Tensor, weight2: Tensor, preact: Tensor, biased: bool
) -> tuple[Tensor, Tensor | None]:
    """Of what went into an MLP's activation; and its sum over rows, where the same kernel has it.

    Args:
        biased: whether the sum is wanted.
    """
    if ctx.activation in GATED:
        return gemm_dgated(dout, weight2, preact, ctx.activation, concat=ctx.concat), None
    if biased:
        return gemm_dact_bias(dout, weight2, preact, ctx.activation)
    return gemm_dact(dout, weight2, preact, ctx.activation), None


def _through(dout: Tensor, preact: Tensor, activation: str, concat: bool) -> Tensor:
    """The gradient of what went into an activation, in float32 and rounded once."""
    dy = dout.float()
    if activation not in GATED:
        return (dy * derivative(activation, preact.float())).to(dout.dtype)
    from quack_core.gemm.activations import reference

    name, values = GATED[activation], preact.float()
    gate, up = values.chunk(2, -1) if concat else (values[..., ::2], values[..., 1::2])
    parts = (dy * derivative(name, gate) * up, dy * reference(name, gate))
    found = torch.cat(parts, -1) if concat else torch.stack(parts, -1).flatten(-2)
    return found.to(dout.dtype)


def _gradients(
    needs: tuple[bool, ...],
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_dtype: torch.dtype | None,
    sums: Owner | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias of a linear layer.

    Args:
        sums: to which the weight's is added, instead of being one of the results.
    """
    dout = readable(dout)
    dx = gemm(dout, readable(weight)) if needs[0] else None
    dweight = dbias = None
    if needs[1] and sums is not None:
        sums.add(dout.mT, readable(x))
    elif needs[1]:
        dweight = gemm(dout.mT, readable(x))
    if needs[2] and bias_dtype is not None:
        dbias = dout.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dweight, dbias


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the dtype that ``torch.autocast`` wants, where that is on."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype in check.OUT else x for x in tensors)


def _rows(x: Tensor) -> Tensor:
    """(..., K) as (M, K)."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
