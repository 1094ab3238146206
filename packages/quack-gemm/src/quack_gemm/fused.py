"""GEMM with an activation behind it, and what their gradients need."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.gemm.epilogue import (
    Activation,
    ActivationGrad,
    AddC,
    AddVector,
    ColumnReduce,
    Gate,
    GateGrad,
    Kind,
    Mirror,
    RowReduce,
    Scale,
    StoreAux,
)

from . import check
from .api import compute, default_dtype, gemm
from .reference import Step

GATED = {
    "swiglu": "silu",
    "geglu": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "swiglu_quick": "quick_gelu",
}
"""Gated activations, and the function of the gate."""


def gemm_act(
    a: Tensor,
    b: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    store_preact: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """``f(a @ b + bias)``, and what goes into f.

    Args:
        a, b, bias, out_dtype: as of ``gemm``.
        activation: one of `quack_core.gemm.epilogue.ACTIVATIONS`.
        store_preact: whether what goes into f is wanted, such as for a backward; in the
            dtype of a, or bfloat16 where that has 8 bits.

    Returns:
        ``a @ b + bias`` or None, and the result.
    """
    steps = _biased(a, b, bias)
    steps += [(StoreAux(torch_op.name_of(default_dtype(a))), ())] if store_preact else []
    return _both(a, b, [*steps, (Activation(activation), ())], store_preact, out_dtype, False)


def gemm_gated(
    a: Tensor,
    b: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    store_preact: bool = True,
    out_dtype: torch.dtype | None = None,
    concat: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """``f(gate) * up``, of gates and what they gate among the columns of ``a @ b + bias``.

    Args:
        a: (M, K) or (L, M, K), as of ``gemm``.
        b: (K, 2 N) or (L, K, 2 N) with a stride of 1 along K; N a multiple of 8.
        activation: a key of ``GATED``, such as "swiglu".
        bias: (2 N,).
        store_preact: whether ``a @ b + bias`` is wanted.
        concat: gates are the first N columns; else they are the even ones.

    Returns:
        ``a @ b + bias`` (M, 2 N) or None, and the result (M, N).
    """
    steps = _biased(a, b, bias)
    steps += [(StoreAux(torch_op.name_of(default_dtype(a))), ())] if store_preact else []
    gate = Gate(_of_gate(activation))
    return _both(a, b, [*steps, (gate, ())], store_preact, out_dtype, concat)


def gemm_dact(
    dout: Tensor,
    weight: Tensor,
    preact: Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``(dout @ weight) * f'(preact)``: the gradient of what went into an activation.

    Args:
        dout: (M, K).
        weight: (K, N).
        preact: (M, N), last stride 1.
    """
    op = ActivationGrad(activation, _name(preact), preact.dim() == 3)
    return gemm(dout, weight, epilogue=[(op, preact)], out_dtype=out_dtype)


def gemm_dact_bias(
    dout: Tensor,
    weight: Tensor,
    preact: Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``gemm_dact``, and its sum over the rows: the gradient of a bias in front of the activation.

    Args:
        dout, weight, preact, activation, out_dtype: as of ``gemm_dact``.

    Returns:
        (M, N) or (L, M, N), and float32 (N,) or (L, N), of values before they are rounded.
    """
    op = ActivationGrad(activation, _name(preact), preact.dim() == 3)
    steps: list[Step] = [(op, (preact,)), (ColumnReduce("sum"), ())]
    dpre, dbias = _checked(dout, weight, steps, [out_dtype or default_dtype(dout)], False)
    return dpre, dbias


def gemm_dgated(
    dout: Tensor,
    weight: Tensor,
    preact: Tensor,
    activation: str,
    *,
    out_dtype: torch.dtype | None = None,
    concat: bool = False,
) -> Tensor:
    """The gradient of gates and what they gate, from that of what ``gemm_gated`` gave.

    Args:
        dout: (M, K).
        weight: (K, N); N a multiple of 8.
        preact: (M, 2 N), as ``gemm_gated`` gave it; last stride 1.
        activation, concat: as of ``gemm_gated``.

    Returns:
        (M, 2 N)
    """
    op = GateGrad(_of_gate(activation), _name(preact), preact.dim() == 3)
    steps: list[Step] = [(op, (preact,))]
    return _checked(dout, weight, steps, [out_dtype or default_dtype(dout)], concat)[0]


def gemm_rms(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``h = a @ b + c + bias``, and 1 / sqrt(mean of h^2 + eps) of each row: what a following RMSNorm
    needs.

    Args:
        a, b, c, bias, out_dtype: as of ``gemm``.

    Returns:
        h (M, N) or (L, M, N), and float32 (M,) or (L, M), of h before it is rounded.
    """
    steps: list[Step] = []
    if c is not None:
        torch_op.check_dtype("gemm", "c", c.dtype)
        steps.append((AddC(_name(c), None, c.dim() == 3), (c,)))
    steps += [*_biased(a, b, bias), (RowReduce("sum_squares"), ())]
    h, squares = _checked(a, b, steps, [out_dtype or default_dtype(a)], False)
    return h, torch.rsqrt(squares / b.shape[-1] + eps)


def gemm_norm_act(
    a: Tensor,
    b: Tensor,
    rstd: Tensor,
    activation: str = "identity",
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``f(rstd * (a @ b) + bias)``: a GEMM of normalised rows, before they are normalised.

    The norm's weight belongs into ``b``.

    Args:
        rstd: float32 (M,) or (L, M), as ``gemm_rms`` gives it.
        activation: one of `quack_core.gemm.epilogue.ACTIVATIONS`, or of ``GATED``.
    """
    steps: list[Step] = [(Scale(Kind.COLUMN, "rstd", "float32", rstd.dim() == 2), (rstd,))]
    steps += _biased(a, b, bias)
    if activation in GATED:
        steps.append((Gate(GATED[activation]), ()))
    else:
        steps.append((Activation(activation), ()))
    return _checked(a, b, steps, [out_dtype or default_dtype(a)], False)[0]


def gemm_add(a: Tensor, b: Tensor, c: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``a @ b + c``; operands as of ``gemm``."""
    return gemm(a, b, c=c, out=out)


def gemm_symmetric(
    a: Tensor,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    c: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``alpha * (a @ a.T) + beta * c`` for a symmetric c: half of it is computed, and stored twice.

    For more products that are symmetric, such as a @ b of matrices that are and commute, call ``gemm``
    with ``epilogue=[Mirror()]``.

    Args:
        a: (M, K) or (L, M, K), as of ``gemm``.
        c: (M, M) or (L, M, M), symmetric, which is not checked: which of its halves is read is not said.
        alpha, beta, out, out_dtype: as of ``gemm``.

    Returns:
        (M, M) or (L, M, M), symmetric to the bit but for the blocks of 64 x 64 on the diagonal, whose
        halves are computed one by one.
    """
    mirror = [Mirror()]
    return gemm(a, a.mT, c=c, alpha=alpha, beta=beta, out=out, out_dtype=out_dtype, epilogue=mirror)


def _biased(a: Tensor, b: Tensor, bias: Tensor | None) -> list[Step]:
    if bias is None:
        return []
    torch_op.check_dtype("gemm", "bias", bias.dtype)
    return [(AddVector(_name(bias), Kind.ROW, bias.dim() == 2), (bias,))]


def _both(
    a: Tensor,
    b: Tensor,
    steps: list[Step],
    store_preact: bool,
    out_dtype: torch.dtype | None,
    concat: bool,
) -> tuple[Tensor | None, Tensor]:
    dtypes = [out_dtype or default_dtype(a), *([default_dtype(a)] if store_preact else [])]
    post, *pre = _checked(a, b, steps, dtypes, concat)
    return (pre[0] if pre else None), post


def _checked(
    a: Tensor, b: Tensor, steps: list[Step], dtypes: Sequence[torch.dtype], concat: bool
) -> list[Tensor]:
    check.product(a, b, steps, dtypes)
    return compute(a, b, steps, dtypes, concat)


def _of_gate(activation: str) -> str:
    if activation not in GATED:
        raise check.DTypeError(f"gemm: activation {activation!r} must be one of {', '.join(GATED)}")
    return GATED[activation]


def _name(x: Tensor) -> str:
    return torch_op.name_of(x.dtype)
