"""Losses from log-sum-exps of parts of the classes (N-17)."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core.errors import DTypeError, ShapeError
from quack_norm import cross_entropy_from_lse
from quack_norm.ops.cross_entropy.check import OptionError

ROWS, CLASSES = 12, 96


def head(device: str, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits in float64, and what a head makes of them in float32."""
    generator = torch.Generator(device).manual_seed(parts)
    logits = torch.randn(ROWS, CLASSES, dtype=torch.float64, device=device, generator=generator)
    target = torch.randint(CLASSES, (ROWS,), device=device, generator=generator)
    target[::5] = -100
    lse = logits.reshape(ROWS, parts, -1).logsumexp(2).float()
    chosen = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).float()
    return logits, lse.requires_grad_(), chosen.requires_grad_(), target


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("parts", [1, 8])
def test_n_17_values_and_gradients(parts: int, reduction: str, z_loss: float, device: str) -> None:
    logits, lse, chosen, target = head(device, parts)
    given = lse if parts > 1 else lse.squeeze(1)
    loss, whole = cross_entropy_from_lse(
        given, chosen, target, reduction=reduction, z_loss=z_loss, return_lse=True
    )
    kept = target != -100
    right = F.cross_entropy(logits, target, reduction="none")
    right = torch.where(kept, right + z_loss * logits.logsumexp(1).square(), 0.0)
    if reduction != "none":
        right = right.sum() / (kept.sum() if reduction == "mean" else 1)
    # each row: lse and logit rounded to float32, some operations on numbers below 8
    torch.testing.assert_close(loss.double(), right, rtol=0, atol=2.0**-18 * max(1, loss.numel()))
    assert loss.dtype == torch.float32 and not whole.requires_grad
    expected = torch.where(kept, logits.logsumexp(1), math.log(parts))
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=2.0**-20)

    loss.sum().backward()
    incoming = kept.double() / (kept.sum() if reduction == "mean" else 1)
    slope = (1 + 2 * z_loss * logits.logsumexp(1)) * incoming
    shares = lse.detach().double().softmax(1) * slope.unsqueeze(1)
    torch.testing.assert_close(lse.grad.double(), shares, rtol=0, atol=2.0**-20)
    torch.testing.assert_close(chosen.grad.double(), -incoming, rtol=0, atol=2.0**-22)


def test_ignored_rows_may_hold_anything(device: str) -> None:
    _, lse, chosen, target = head(device, 4)
    with torch.no_grad():
        lse[::5], chosen[::5] = math.nan, math.inf
    loss = cross_entropy_from_lse(lse, chosen, target)
    loss.backward()
    assert loss.isfinite() and lse.grad.isfinite().all() and chosen.grad.isfinite().all()
    assert not lse.grad[::5].any() and not chosen.grad[::5].any()


def test_parts_without_classes_and_nothing_that_counts(device: str) -> None:
    _, lse, chosen, target = head(device, 4)
    padded = torch.cat((lse, torch.full_like(lse[:, :1], -math.inf)), 1)
    a, b = (cross_entropy_from_lse(x, chosen, target, reduction="none") for x in (lse, padded))
    torch.testing.assert_close(a, b, rtol=0, atol=2.0**-21)
    assert cross_entropy_from_lse(lse, chosen, torch.full_like(target, -100)).isnan()
    none = torch.empty(0, 3, device=device), torch.empty(0, device=device), target[:0]
    assert cross_entropy_from_lse(*none, reduction="sum") == 0
    target[1] = -7
    losses = cross_entropy_from_lse(lse, chosen, target, reduction="none")
    assert losses.isnan().nonzero().tolist() == [[1]]


def test_compile_and_second_derivatives(device: str) -> None:
    _, lse, chosen, target = head(device, 4)
    compiled = torch.compile(cross_entropy_from_lse, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(lse, chosen, target), cross_entropy_from_lse(lse, chosen, target), rtol=0, atol=0
    )
    wide = lse.detach().requires_grad_()
    (first,) = torch.autograd.grad(
        cross_entropy_from_lse(wide, chosen, target), wide, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), wide)
    assert second.isfinite().all() and second.any()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"lse": torch.zeros(3, 2, 2)}, ShapeError, r"lse has shape \(3, 2, 2\)"),
        ({"lse": torch.zeros(3, 0)}, ShapeError, "at least one part"),
        ({"target_logit": torch.zeros(4)}, ShapeError, r"target_logit has shape \(4,\)"),
        ({"target": torch.zeros(3)}, DTypeError, "target is float32: it must be int32 or int64"),
        ({"lse": torch.zeros(3, dtype=torch.int32)}, DTypeError, "lse is int32"),
        ({"reduction": "max"}, OptionError, "reduction is 'max'"),
        ({"z_loss": -1.0}, OptionError, "z_loss is -1.0"),
    ],
)
def test_mistakes_are_explained(change: dict, error: type[Exception], says: str) -> None:
    right = {"lse": torch.zeros(3), "target_logit": torch.zeros(3), "target": torch.arange(3)}
    given = {**right, **change}
    operands = [given.pop(name) for name in right]
    with pytest.raises(error, match=says):
        cross_entropy_from_lse(*operands, **given)
