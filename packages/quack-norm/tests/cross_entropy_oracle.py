"""Right answers of cross-entropy in float64, and how results are judged: always on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core.testing.compare import assert_accurate

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Options:
    """Everything but the tensors, with the defaults of the public function."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0

    def all(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())


NONE = Options(reduction="none")

Call = Callable[[Tensor, Tensor, Tensor | None, Options], tuple[Tensor, Tensor]]
"""Loss and lse of logits, labels and weights."""


def labels(shape: tuple[int, ...], classes: int, seed: int, ignore: int | None = None) -> Tensor:
    """Random classes, every third one ignored."""
    found = torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))
    if ignore is not None:
        found.view(-1)[::3] = ignore
    return found


def judge(
    call: Call,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    o: Options,
    dloss: Tensor,
) -> None:
    """Loss, lse and gradient against float64; the allowance is what torch loses in float32."""
    leaf = x.detach().requires_grad_()
    loss, lse = call(leaf, target, weight, o)
    (dx,) = torch.autograd.grad(loss, leaf, dloss)
    assert loss.dtype == x.dtype and loss.is_contiguous()
    assert loss.shape == (target.shape if o.reduction == "none" else ())
    assert (lse.dtype, lse.shape, lse.requires_grad) == (F32, target.shape, False)
    assert (dx.dtype, dx.shape, dx.is_contiguous()) == (x.dtype, x.shape, True)
    given = (x.detach().cpu(), target.cpu(), None if weight is None else weight.cpu(), o)
    compare(loss.detach().cpu(), lse.cpu(), dx.cpu(), *given, dloss.cpu())


def compare(
    loss: Tensor,
    lse: Tensor,
    dx: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    o: Options,
    dloss: Tensor,
) -> None:
    """As `judge`, for given results."""
    axis = min(x.dim() - 1, 1)
    right: dict[str, Tensor] = {}
    base: dict[str, Tensor] = {}
    for dtype, into in ((torch.float64, right), (F32, base)):
        wide = x.to(dtype).requires_grad_()
        into["loss"] = torchs(wide, target, weight, o)
        (into["dx"],) = torch.autograd.grad(into["loss"], wide, dloss.to(dtype))
        into["lse"] = torch.logsumexp(capped(wide, o), axis)
        into |= {name: tensor.detach() for name, tensor in into.items()}
    rounded = {name: tensor.to(x.dtype) for name, tensor in base.items()}
    if o.reduction == "none":
        assert_accurate(loss, right["loss"], rounded["loss"], name="loss")
    else:
        each = torchs(x.double(), target, weight, replace(o, reduction="none"))
        terms = each.abs().sum() / total_of(target, weight, o)
        kind: Any = {"kind": "columns", "terms": terms}
        assert_accurate(loss, right["loss"], rounded["loss"], **kind, name="loss")
    terms = gradient_terms(x.double(), target, weight, o, dloss.double())
    assert_accurate(dx, right["dx"], rounded["dx"], kind="columns", terms=terms, name="dx")
    assert_accurate(lse, right["lse"], base["lse"], name="lse")


def capped(x: Tensor, o: Options) -> Tensor:
    return x if o.softcap is None else o.softcap * torch.tanh(x / o.softcap)


def total_of(target: Tensor, weight: Tensor | None, o: Options) -> float:
    """What the sum of the losses is divided by."""
    kept = target[target != o.ignore_index].long()
    found = len(kept) if weight is None else float(weight.double()[kept].sum())
    return found if o.reduction == "mean" else 1.0


def torchs(x: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> Tensor:
    """Torch's loss in the dtype of x; the z-loss is added to it by definition."""
    common = {"ignore_index": o.ignore_index, "label_smoothing": o.label_smoothing}
    w = None if weight is None else weight.to(x.dtype)
    loss = F.cross_entropy(capped(x, o), target.long(), w, reduction=o.reduction, **common)
    if o.z_loss == 0:
        return loss
    lse = torch.logsumexp(capped(x, o), min(x.dim() - 1, 1))
    extra = o.z_loss * lse.square() * (target != o.ignore_index)
    return loss + (extra if o.reduction == "none" else extra.sum() / total_of(target, weight, o))


def gradient_terms(x: Tensor, target: Tensor, weight: Any, o: Options, dloss: Tensor) -> Tensor:
    """Sizes of the terms ``p * sum(q)`` and ``-q``; p errs as much as the argument of exp does."""
    axis, kept = min(x.dim() - 1, 1), target != o.ignore_index
    z = capped(x, o).movedim(axis, -1)
    w = torch.ones(z.shape[-1]) if weight is None else weight
    hot = F.one_hot(torch.where(kept, target.long(), 0), z.shape[-1])
    q = ((1 - o.label_smoothing) * hot + o.label_smoothing / z.shape[-1]) * w.double()
    sum_q = q.sum(-1, keepdim=True) + 2 * o.z_loss * torch.logsumexp(z, -1, keepdim=True).abs()
    argument = z.abs() + (z - z.amax(-1, keepdim=True)).abs()
    terms = (2 + argument) * z.softmax(-1) * sum_q + 2 * q
    terms = terms * (kept * dloss.abs() / total_of(target, weight, o)).unsqueeze(-1)
    return terms.nan_to_num(0.0, 0.0).movedim(-1, axis)  # not finite: judged by kind alone
