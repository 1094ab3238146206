"""Cross-entropy in plain PyTorch: the definition that kernels are tested against, and the CPU path.

It rounds where the kernels round: all arithmetic in float32, each result once to its dtype. The
logits alone may be float64 as well; then everything is, for tests of the formulas.

    z      = softcap * tanh(input / softcap), or input without a softcap
    lse    = log(sum(exp(z)))                                       over the C classes
    loss   = (1 - s) * w[t] * (lse - z[t]) + s / C * sum_c(w[c] * (lse - z[c])) + z_loss * lse^2

for a position with label t, class weights w (ones if there are none) and label smoothing s.
Positions labelled ``ignore_index`` have loss and gradient zero, whatever their logits are. The mean
divides the sum of all losses, the z-loss included, by the sum of w[t] over the other positions.

An illegal label has the weight NaN: its loss and gradient are NaN, and so is a mean with all its
gradients but those of ignored positions.
"""

import math

import torch
from torch import Tensor


def forward(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss of each position, or its sum or mean.

    Args:
        input: logits ``(C,)``, ``(N, C)`` or ``(N, C, d1, ...)``.
        target: labels, int32 or int64, shaped like input without its classes.
        weight: ``(C,)`` or None.
        ignore_index: the label of positions that do not count, even if it is a class.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        label_smoothing: from 0 to 1.
        softcap: bound of the logits, or None.
        z_loss: factor of lse^2.

    Returns:
        ``(loss, lse, peak, exp_sum, total)``. ``loss`` has the dtype of input, and the shape of
        target under ``"none"``, no dimension otherwise. The others are float32 and but for ``lse``
        what `backward` needs: ``lse``, ``peak`` (the largest z) and ``exp_sum``, the sum of
        ``exp(z - peak)``, shaped like target, and ``total``, what the sum of the losses was
        divided by. Peak and sum stay apart because ``peak + log(exp_sum)`` keeps few bits of the
        sum if the peak is large.
    """
    axis = min(input.dim() - 1, 1)
    if input.shape[axis] == 0:  # every label that is not ignored is illegal
        absent = input.new_full((*input.shape[:axis], 1, *input.shape[axis + 1 :]), -math.inf)
        options = (ignore_index, reduction, label_smoothing, None, z_loss)
        return forward(absent, target, None, *options)
    z = _capped(_rows(input), softcap)
    w = None if weight is None else weight.to(z.dtype)
    kept, index, factor = _labels(target, w, z.shape[1], ignore_index, z.dtype)
    peak = z.amax(dim=1)
    exp_sum = _sum_of_rows(torch.exp(z - peak.unsqueeze(1)))
    lse = _lse(peak, exp_sum)
    losses = _losses(z - peak.unsqueeze(1), exp_sum.log(), index, factor, w, label_smoothing)
    if z_loss > 0:
        losses = losses + z_loss * lse.square()
    losses = torch.where(kept, losses, 0.0)
    total = factor.sum() if reduction == "mean" else factor.new_ones(())
    loss = losses.reshape(target.shape) if reduction == "none" else losses.sum() / total
    lse, peak, exp_sum = (each.reshape(target.shape) for each in (lse, peak, exp_sum))
    return loss.to(input.dtype), lse, peak, exp_sum, total


def backward(
    dloss: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    peak: Tensor,
    exp_sum: Tensor,
    total: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    """Gradient of `forward`: ``dz[c] = p[c] * (sum(q) + 2 * z_loss * lse) - q[c]``.

    Here p is the softmax of z, and q[c] the factor of ``lse - z[c]`` in the loss. It is multiplied
    by ``1 - tanh(input / softcap)^2`` and by ``dloss / total``.

    Args:
        dloss: gradient of the loss, shaped like it, of any dtype and strides.
        input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss: as in
            `forward`.
        peak, exp_sum, total: from `forward`.

    Returns:
        The gradient of input: contiguous, with its shape and dtype.
    """
    rows = _rows(input)
    if rows.numel() == 0:
        return torch.zeros(input.shape, dtype=input.dtype, device=input.device)
    z = _capped(rows, softcap)
    w = None if weight is None else weight.to(z.dtype)
    kept, index, factor = _labels(target, w, z.shape[1], ignore_index, z.dtype)
    peak, exp_sum = peak.reshape(-1), exp_sum.reshape(-1)
    q, sum_q = _shares(z, index, factor, w, label_smoothing)
    if z_loss > 0:
        sum_q = sum_q + 2 * z_loss * _lse(peak, exp_sum)
    p = torch.exp(z - peak.unsqueeze(1)) / exp_sum.unsqueeze(1)
    dz = p * sum_q.unsqueeze(1) - q
    if softcap is not None:
        dz = dz * (1 - torch.tanh(rows / softcap).square())
    incoming = dloss.to(z.dtype).reshape(-1, 1) / total
    # a total of zero makes the product of ignored rows NaN: select, do not multiply
    dz = torch.where(kept.unsqueeze(1), dz * incoming, 0.0)
    return _unrows(dz, input).to(input.dtype)


def _rows(input: Tensor) -> Tensor:
    """``(positions, C)``, contiguous: the order of a row's sum must not follow strides."""
    rows = input.unsqueeze(0) if input.dim() == 1 else input.movedim(1, -1)
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return wide.contiguous().reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def _unrows(rows: Tensor, input: Tensor) -> Tensor:
    """The inverse of `_rows`."""
    if input.dim() == 1:
        return rows.squeeze(0)
    shape = (input.shape[0], *input.shape[2:], input.shape[1])
    return rows.reshape(shape).movedim(-1, 1).contiguous()


def _capped(rows: Tensor, softcap: float | None) -> Tensor:
    return rows if softcap is None else softcap * torch.tanh(rows / softcap)


def _labels(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each position counts, an index inside the classes, and the weight of its label."""
    labels = target.reshape(-1).long()
    kept = labels != ignore_index
    legal = (labels >= 0) & (labels < classes)
    index = torch.where(kept & legal, labels, 0)
    factor = torch.ones_like(labels, dtype=dtype) if weight is None else weight[index]
    factor = torch.where(legal, factor, math.nan)
    return kept, index, torch.where(kept, factor, 0.0)


def _losses(
    shifted: Tensor,
    log_sum: Tensor,
    index: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    label_smoothing: float,
) -> Tensor:
    """Losses of rows ``shifted = z - peak``, without the z-loss."""
    losses = factor * (log_sum - shifted.gather(1, index.unsqueeze(1)).squeeze(1))
    if label_smoothing == 0:  # zero times an infinite loss would be NaN
        return losses
    each = log_sum.unsqueeze(1) - shifted
    spread = _sum_of_rows(each if weight is None else each * weight)
    return (1 - label_smoothing) * losses + label_smoothing / shifted.shape[1] * spread


def _shares(
    z: Tensor, index: Tensor, factor: Tensor, weight: Tensor | None, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """The factor q of ``lse - z[c]`` in the loss, for each row and class, and its sums of rows."""
    q, sum_q = torch.zeros_like(z), factor * (1 - label_smoothing)
    q.scatter_(1, index.unsqueeze(1), sum_q.unsqueeze(1))
    if label_smoothing == 0:
        return q, sum_q
    every = label_smoothing / z.shape[1] * (torch.ones_like(z[0]) if weight is None else weight)
    return q + every, sum_q + every.sum()


def _lse(peak: Tensor, exp_sum: Tensor) -> Tensor:
    """An infinite peak is the log-sum-exp itself; the sum is NaN then."""
    return torch.where(peak.isinf(), peak, peak + exp_sum.log())


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Sums over the last dimension whose bits do not depend on the number of rows.

    Torch splits the sum of one long row among threads, those of several it does not.
    """
    return rows.expand(2, -1).sum(dim=1)[:1] if rows.shape[0] == 1 else rows.sum(dim=1)
