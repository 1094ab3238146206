"""Cross-entropy of rows whose log-sum-exp a fused head has already computed, in parts."""

import math

import torch
from torch import Tensor

from . import check


def cross_entropy_from_lse(
    lse: Tensor,
    target_logit: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy from log-sum-exps over parts of the classes, and the logit of each label.

    For heads that never write their logits: each tile of a GEMM, or each shard of a vocabulary,
    leaves the log-sum-exp of its logits, and one of them the logit of the label.

        loss = log(sum_p e ** lse[p]) - target_logit + z_loss * log(sum_p e ** lse[p]) ** 2

    Plain PyTorch operations on P numbers per row: they run on any device, compile to one kernel under
    ``torch.compile``, and are differentiable any number of times, in ``lse`` and ``target_logit``.

    Args:
        lse: ``(M, P)``, P >= 1 parts, or ``(M,)`` if there is one; float32, bfloat16 or float16. A
            part without classes has -inf.
        target_logit: ``(M,)``, on the same device; its values at ignored rows are not used.
        target: ``(M,)``, int32 or int64: says which rows are ignored. Its classes are not known
            here: of illegal labels only negative ones are found, and give NaN.
        ignore_index: the label of rows that do not count: loss and gradients are zero.
        reduction: ``"none"``, ``"mean"`` over the rows that count, or ``"sum"``.
        z_loss: factor of the squared log-sum-exp.
        return_lse: return the log-sum-exp of each row, ``(M,)``, as well; not differentiable.

    Returns:
        The loss in float32: ``(M,)``, or no dimension; with ``return_lse`` a pair.

    Raises:
        ShapeError, DTypeError, DeviceError, OptionError: name the operand, what was found, what is
            needed and the way out.

    Numerics:
        float32 throughout. The difference of two rounded numbers: a loss near zero keeps the bits
        that ``lse`` and ``target_logit`` have in common with it, no more.
    """
    check.partial(lse, target_logit, target, ignore_index, reduction, z_loss)
    kept = target != ignore_index
    # Before anything else: zero times a derivative that is NaN would be NaN.
    parts = lse.unsqueeze(1) if lse.dim() == 1 else lse
    parts = torch.where(kept.unsqueeze(1), parts.float(), 0.0)
    whole = torch.logsumexp(parts, 1)
    losses = whole - torch.where(kept, target_logit.float(), 0.0) + z_loss * whole.square()
    losses = torch.where(kept, losses, 0.0)
    losses = torch.where(kept & (target < 0), math.nan, losses)
    loss = losses
    if reduction != "none":
        loss = losses.sum()
    if reduction == "mean":
        loss = loss / kept.sum()
    return (loss, whole.detach()) if return_lse else loss
