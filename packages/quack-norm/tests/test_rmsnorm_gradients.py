"""Which gradients are wanted, which come in, and what autograd has to be told."""

import itertools

import pytest
import torch
from rmsnorm_oracle import BF16, F32, Case, Operands, exact, judge, operands, torchs
from torch import Tensor

from quack_core.errors import UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_norm.ops.rmsnorm.api import rmsnorm

CASE = Case("", (17, 256), BF16, weight=F32, bias=BF16, residual=BF16, prenorm=True)
NAMES = ("x", "weight", "bias", "residual")


def run(data: Operands, **options: object) -> tuple[Tensor, Tensor]:
    y, h = rmsnorm(data.x, data.weight, data.bias, residual=data.residual, prenorm=True, **options)
    return y, h


def all_gradients(data: Operands) -> dict[str, Tensor]:
    leaves = data.leaves()
    found = torch.autograd.grad(run(data), list(leaves.values()), (data.dout, data.dresidual_out))
    return dict(zip(leaves, found, strict=True))


WANTED = [c for k in range(1, 5) for c in itertools.combinations(NAMES, k)]


@pytest.mark.parametrize("wanted", WANTED, ids="-".join)
def test_any_subset_of_gradients(wanted: tuple[str, ...], device: str) -> None:
    """N-05, N-06: bias only, residual only, weight only, and all others."""
    data = operands(CASE, device)
    expected = all_gradients(data)
    for name, leaf in data.leaves().items():
        leaf.requires_grad_(name in wanted)
    y, h = run(data)
    outputs = [t for t in (y, h) if t.requires_grad]
    if not {"x", "residual"} & set(wanted):
        assert y.requires_grad
        outputs = [y]
    leaves = [data.leaves()[name] for name in wanted]
    incoming = (data.dout, data.dresidual_out)[: len(outputs)]
    found = torch.autograd.grad(outputs, leaves, incoming)
    for name, gradient in zip(wanted, found, strict=True):
        assert_bitwise(gradient, expected[name], name)


def test_kn_05_gradient_of_h_is_added_after_the_norm(device: str) -> None:
    case = Case("", (17, 256), F32, weight=F32, residual=F32, prenorm=True)
    data = operands(case, device)
    y, h = run(data)
    loss = (y * data.dout).sum() + (h * data.dresidual_out).sum()
    dx, dweight, dresidual = torch.autograd.grad(loss, (data.x, data.weight, data.residual))
    assert_bitwise(dx, dresidual)
    found = {"dx": dx, "dweight": dweight, "dresidual": dresidual}
    judge(found, exact(case, data), torchs(case, data))


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no_residual"])
def test_kn_05_only_one_result_is_used(residual: bool, device: str) -> None:
    data = operands(CASE, device)
    if not residual:
        data.residual = None
    zeros = torch.zeros_like(data.dout)
    leaves = list(data.leaves().values())
    y, h = run(data)
    only_y = torch.autograd.grad(y, leaves, data.dout, retain_graph=True)
    both = torch.autograd.grad((y, h), leaves, (data.dout, zeros), retain_graph=True)
    for a, b in zip(only_y, both, strict=True):
        assert_bitwise(a, b)
    only_h = torch.autograd.grad(h, leaves, data.dresidual_out, allow_unused=True)
    for name, gradient in zip(data.leaves(), only_h, strict=True):
        if name in ("x", "residual"):
            assert_bitwise(gradient, data.dresidual_out)
        else:
            assert gradient is None or not gradient.any()


def test_prenorm_without_residual_returns_x(device: str) -> None:
    x = random((5, 64), BF16, device, seed=1)
    _, h = rmsnorm(x, prenorm=True)
    assert h is x
    leaf = x.clone().requires_grad_()
    _, h = rmsnorm(leaf, prenorm=True)
    assert h.data_ptr() == leaf.data_ptr()


def test_rstd_has_no_gradient(device: str) -> None:
    x = random((5, 64), BF16, device, seed=1).requires_grad_()
    y, rstd = rmsnorm(x, return_rstd=True)
    assert y.requires_grad
    assert not rstd.requires_grad


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
def test_nothing_is_recorded(mode: type, device: str) -> None:
    data = operands(CASE, device)
    with mode():
        y, h = run(data)
    assert not y.requires_grad
    assert not h.requires_grad
    expected = run(data)
    assert_bitwise(y, expected[0])
    assert_bitwise(h, expected[1])


def test_changed_operands_are_noticed(device: str) -> None:
    """C-06: what the backward reads carries a version; a later write makes the backward raise."""
    x = random((5, 64), F32, device, seed=1).requires_grad_()
    w = random((64,), F32, device, seed=2).requires_grad_()
    y = rmsnorm(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_out_bumps_the_version(device: str) -> None:
    """C-06: autograd must notice that out= overwrote what another operator had saved."""
    out = random((5, 64), F32, device, seed=1)
    a = random((5, 64), F32, device, seed=2).requires_grad_()
    product = a * out  # saves out
    before = out._version
    with torch.no_grad():
        result = rmsnorm(random((5, 64), F32, device, seed=3), out=out)
    assert result is out
    assert out._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_out_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x = random((5, 64), F32, device, seed=1)
        expected = rmsnorm(x)
        assert_bitwise(rmsnorm(x, out=x), expected)


@pytest.mark.parametrize("which", ["x", "weight", "out"])
def test_out_with_gradients_raises(which: str, device: str) -> None:
    tensors = {name: torch.ones(1, 64, device=device) for name in ("x", "out")}
    tensors["weight"] = torch.ones(64, device=device)
    tensors[which].requires_grad_()
    with pytest.raises(UnsupportedError, match=f"{which} requires a gradient"):
        rmsnorm(tensors["x"], tensors["weight"], out=tensors["out"])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_checkpointing(reentrant: bool, device: str) -> None:
    data = operands(CASE, device)
    expected = all_gradients(data)
    y, h = torch.utils.checkpoint.checkpoint(
        lambda *leaves: rmsnorm(*leaves[:3], residual=leaves[3], prenorm=True),
        *(data.leaves()[name] for name in NAMES),
        use_reentrant=reentrant,
    )
    torch.autograd.backward((y, h), (data.dout, data.dresidual_out))
    for name, leaf in data.leaves().items():
        assert_bitwise(leaf.grad, expected[name], name)


def test_gradients_accumulate(device: str) -> None:
    """dx and dresidual may be one tensor: accumulating one must not change the other."""
    data = operands(CASE, device)
    expected = all_gradients(data)
    for _ in range(2):
        torch.autograd.backward(run(data), (data.dout, data.dresidual_out))
    for name in ("x", "residual"):
        assert_bitwise(data.leaves()[name].grad, 2 * expected[name], name)
    data.x.grad.zero_()
    assert_bitwise(data.residual.grad, 2 * expected["residual"])


def test_forward_mode_raises(device: str) -> None:
    import torch.autograd.forward_ad as fwAD

    with fwAD.dual_level():
        x = fwAD.make_dual(torch.ones(2, 64, device=device), torch.ones(2, 64, device=device))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            rmsnorm(x)
