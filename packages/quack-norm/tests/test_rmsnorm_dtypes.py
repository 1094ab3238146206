"""Dtypes of the operands, all independent of one another, and which operands are there."""

import itertools

import pytest
import torch
from rmsnorm_oracle import BF16, F16, F32, SHORT, Case, check, exact, operands, ours

KINDS = (F32, BF16, F16)


FIELDS = ("x", "weight", "bias", "residual", "out", "residual_out")


def pairs() -> list[Case]:
    """27 cases in which every two fields take every two dtypes.

    An orthogonal array: each field is a linear function of (i, j, k) modulo 3, and no two of the
    functions are multiples of each other.
    """
    cases = []
    for i, j, k in itertools.product(range(3), repeat=3):
        levels = (i, j, k, i + j, i + k, j + k)
        dtypes = {name: KINDS[level % 3] for name, level in zip(FIELDS, levels, strict=True)}
        names = "_".join(SHORT[dtype] for dtype in dtypes.values())
        cases.append(Case(names, (5, 264), prenorm=True, **dtypes))
    return cases


PRESENT = [
    Case("KN-06 x bf16, weight fp32", (2, 3, 256), BF16, weight=F32),
    Case("KN-06 x bf16, weight bf16", (2, 3, 256), BF16, weight=BF16),
    Case("KN-06 x bf16, weight fp16", (2, 3, 256), BF16, weight=F16),
    Case("x fp32, weight bf16", (5, 256), F32, weight=BF16),
    Case("x fp16, out fp32", (5, 256), F16, out=F32),
    Case("x fp32, out bf16", (5, 256), F32, out=BF16),
    Case("nothing but x", (5, 256), weight=None),
    Case("offset without weight is no operand", (5, 256), weight=None, offset=1.0),
    Case("KN-14 offset", (5, 256), offset=1.0),
    Case("KN-14 another offset", (5, 256), weight=BF16, offset=-0.75),
    Case("bias without weight", (5, 256), weight=None, bias=F16),
    Case("bias in another dtype than the weight", (300, 256), weight=BF16, bias=F32),
    Case("residual without its result", (5, 256), residual=F32),
    Case("residual in 16 bits without its result", (5, 256), residual=BF16),
    Case("KN-05 residual and its result", (5, 256), residual=BF16, prenorm=True),
    Case("prenorm without residual", (5, 256), prenorm=True),
    Case("prenorm without residual, another dtype", (5, 256), prenorm=True, residual_out=F32),
    Case("prenorm, narrower h without residual", (5, 256), F32, prenorm=True, residual_out=BF16),
    Case("residual wider than x", (5, 256), residual=F32, prenorm=True),
    Case("residual narrower than x", (5, 256), F32, residual=BF16, prenorm=True),
    Case("odd, mixed widths", (5, 1001), F32, weight=BF16, residual=BF16, out=BF16, prenorm=True),
]


@pytest.mark.parametrize("case", [*pairs(), *PRESENT], ids=lambda case: case.id)
def test_forward_and_backward(case: Case, device: str) -> None:
    check(case, device)


def test_pairs_cover_every_two_dtypes() -> None:
    cases = pairs()
    for a, b in itertools.combinations(FIELDS, 2):
        found = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert len(found) == 9, (a, b)


def test_results_have_the_promised_dtypes(device: str) -> None:
    case = Case("", (5, 264), BF16, F32, F16, F32, out=F16, residual_out=BF16, prenorm=True)
    found = ours(case, operands(case, device))
    expected = {
        "out": F16,
        "h": BF16,
        "rstd": F32,
        "dx": BF16,
        "dweight": F32,
        "dbias": F16,
        "dresidual": F32,
    }
    assert {name: tensor.dtype for name, tensor in found.items()} == expected
    assert found["rstd"].shape == (5,)


def test_dweight_is_summed_in_float32(device: str) -> None:
    """Ten thousand equal terms: a 16-bit sum would stop growing at 256 of them."""
    x = torch.ones(10000, 64, dtype=BF16, device=device)
    w = torch.ones(64, dtype=F32, device=device, requires_grad=True)
    b = torch.zeros(64, dtype=F32, device=device, requires_grad=True)
    from quack_norm.ops.rmsnorm.api import rmsnorm

    dw, db = torch.autograd.grad(rmsnorm(x, w, b).float().sum(), (w, b))
    assert torch.allclose(dw, torch.full_like(dw, 10000), rtol=1e-5, atol=0)
    assert torch.equal(db, torch.full_like(db, 10000))


def test_exact_answer_matches_the_formula(device: str) -> None:
    """The oracle itself, on numbers that can be checked by hand."""
    case = Case("", (1, 2), F32, weight=F32, eps=0.0)
    data = operands(case, device)
    with torch.no_grad():
        data.x.copy_(torch.tensor([[3.0, 4.0]]))
        data.weight.copy_(torch.tensor([1.0, 2.0]))
        data.dout.copy_(torch.tensor([[1.0, 0.0]]))
    right = exact(case, data)
    rstd = (12.5) ** -0.5
    assert torch.allclose(right["out"], torch.tensor([[3 * rstd, 8 * rstd]]).double().to(device))
    expected = torch.tensor([[rstd * (1 - 3 * 3 / 25), -rstd * 3 * 4 / 25]]).double().to(device)
    assert torch.allclose(right["dx"], expected)
