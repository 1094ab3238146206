"""Top-k in plain PyTorch: the definition that kernels are tested against, and the CPU path.

The first k of a stable descending sort of each row. NaN counts as larger than +inf; all NaN are
equal, and so are both zeros. Equal elements are ordered by their index.
"""

import torch
from torch import Tensor


def forward(x: Tensor, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
    """The k largest elements of each row, largest first.

    Args:
        x: ``(..., N)``, any strides.
        k: from 1 to N.
        softmax: normalise the k values of a row by their softmax.

    Returns:
        ``(values, indices)``, both contiguous ``(..., k)``. The values have the dtype of x. They
        are its elements, unrounded, or their softmax in float32 (float64 for float64), rounded
        once; NaN across rows whose largest value is NaN or infinite. Indices are int64.
    """
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices
    indices = order[..., :k].contiguous()
    values = torch.gather(x, -1, indices)  # the sort may change the bits of a NaN
    if softmax:
        values = torch.softmax(_wide(values), dim=-1).to(x.dtype)
    return values, indices


def backward(
    dvalues: Tensor, indices: Tensor, softmax_values: Tensor | None, n: int, dx_dtype: torch.dtype
) -> Tensor:
    """Gradient of `forward`: zero but at the indices, where it is that of the selected elements.

    With softmax, ``p * (dvalues - sum(p * dvalues))`` for the values p that it returned.

    Args:
        dvalues: gradient of the values, ``(..., k)``, any strides.
        indices: from `forward`.
        softmax_values: the values that `forward` returned with softmax, None without.
        n: N.
        dx_dtype: dtype of x.

    Returns:
        The gradient of x, ``(..., n)``, contiguous, in ``dx_dtype``.
    """
    selected = dvalues
    if softmax_values is not None:
        p, dp = _wide(softmax_values), _wide(dvalues)
        selected = p * (dp - _sum_of_rows(p * dp))
    dx = torch.zeros((*indices.shape[:-1], n), dtype=dx_dtype, device=indices.device)
    # no index occurs twice in a row: each element is written at most once
    return dx.scatter_(-1, indices, selected.to(dx_dtype))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Sums over the last dimension, kept with size 1; their bits do not depend on the batch.

    Torch splits the sum of one long row among threads, those of several it does not.
    """
    rows = rows.contiguous()
    if rows.numel() > rows.shape[-1]:
        return rows.sum(dim=-1, keepdim=True)
    return rows.expand(2, *rows.shape).sum(dim=-1, keepdim=True)[0]
