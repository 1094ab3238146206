"""Faults of the field that are about values; each test carries its row's id."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rmsnorm_oracle import BF16, F16, F32, Case, check

from quack_core.errors import UnsupportedError
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import random
from quack_norm.ops.layernorm.api import layernorm
from quack_norm.ops.rmsnorm.api import rmsnorm

Norm = Callable[..., torch.Tensor]

both_norms = pytest.mark.parametrize("norm", [rmsnorm, layernorm])
STATISTICS = {rmsnorm: {"return_rstd": True}, layernorm: {"return_statistics": True}}


def layer64(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    away = x.double() - x.double().mean(-1, keepdim=True)
    return away * (away.square().mean(-1, keepdim=True) + eps).rsqrt()


def rms64(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@both_norms
@pytest.mark.parametrize("shape", [(3, 0, 2520), (0, 64), (0,), (4, 0)], ids=str)
def test_kn_08_kn_09_nothing_to_do(norm: Norm, shape: tuple[int, ...], device: str) -> None:
    x = torch.zeros(shape, dtype=BF16, device=device, requires_grad=True)
    r = torch.zeros(shape, dtype=F32, device=device, requires_grad=True)
    w = torch.ones(shape[-1], device=device, requires_grad=True)
    b = torch.ones(shape[-1], device=device, requires_grad=True)
    y, h, rstd = norm(x, w, b, residual=r, prenorm=True, **STATISTICS[norm])
    per_row = shape[:-1] if norm is rmsnorm else (*shape[:-1], 2)
    assert (y.shape, h.shape, rstd.shape) == (shape, shape, per_row)
    assert (y.dtype, h.dtype, rstd.dtype) == (BF16, F32, F32)
    (y.float().sum() + h.sum()).backward()
    assert x.grad.shape == r.grad.shape == shape
    assert torch.equal(w.grad, torch.zeros_like(w))
    assert torch.equal(b.grad, torch.zeros_like(b))
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("value", [300.0, 60000.0])
def test_kn_10_squares_beyond_fp16(value: float, device: str) -> None:
    x = torch.full((3, 4096), value, dtype=F16, device=device)
    assert torch.equal(rmsnorm(x), torch.ones_like(x))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_kn_11_default_eps_is_one_number(dtype: torch.dtype, device: str) -> None:
    x = random((8, 32), dtype, device, seed=1, scale=0.058)
    baseline = F.rms_norm(x.float(), (32,), eps=1e-6).to(dtype)
    assert_accurate(rmsnorm(x), rms64(x), baseline)


def test_kn_12_zero_rows_and_spikes(device: str) -> None:
    x = torch.full((3, 64), 1e-3, device=device)
    x[0] = 0
    x[1, 17] = 1e4
    out = rmsnorm(x)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert_accurate(out, rms64(x), F.rms_norm(x, (64,), eps=1e-6))


def test_kn_12_eps_is_not_rescaled(device: str) -> None:
    """A row far below sqrt(eps) is divided by sqrt(eps), whatever scaling protects the squares."""
    x = torch.full((2, 64), 1e-10, device=device)
    out = rmsnorm(x, eps=1e-6)
    assert torch.allclose(out, torch.full_like(out, 1e-7), rtol=1e-6, atol=0)


def offset_rows(device: str) -> list[torch.Tensor]:
    """Rows with a mean far larger than their spread, as in the reports on layer norms."""
    steps = torch.arange(16, dtype=F32, device=device)
    peak = torch.full((1, 10240), 256.0, device=device)
    peak[0, -1] = 255
    return [
        torch.arange(40000, 40004, dtype=F32, device=device)[None],
        (1000 + 1e-3 * steps)[None],
        torch.full((1, 256), 1234.0, device=device),
        peak,
    ]


@pytest.mark.parametrize(
    ("row", "ends"),
    list(enumerate([(-1.3416, 1.3416), (-1.3415, 1.3442), (0.0, 0.0), (0.0094, -96.3734)])),
)
def test_kn_13_large_mean_of_layernorm(row: int, ends: tuple[float, float], device: str) -> None:
    """The mean is known to more bits than float32 has, so that distances from it are right."""
    x = offset_rows(device)[row]
    out, right = layernorm(x), layer64(x)
    assert (round(float(right[0, 0]), 4), round(float(right[0, -1]), 4)) == ends
    # the mean and the variance, a root and two products: each within some epsilons of float32
    worst = (out.double() - right).abs() / right.abs().clamp(min=torch.finfo(F32).tiny)
    assert float(worst.max()) <= 8 * torch.finfo(F32).eps
    if row == 2:
        assert not out.any()


def test_kn_13_gradients_where_the_mean_is_large(device: str) -> None:
    for x in offset_rows(device):
        x.requires_grad_()
        dout = random(tuple(x.shape), F32, device, seed=1)
        (dx,) = torch.autograd.grad(layernorm(x), x, dout)
        x64 = x.detach().double().requires_grad_()
        (right,) = torch.autograd.grad(layer64(x64), x64, dout.double())
        # dx is a difference of gradients: judge by what goes in, rstd * dout and its projections
        scale = (x64.detach().var(-1, correction=0) + 1e-5).rsqrt() * dout.abs().amax()
        size = layer64(x64.detach()).abs().amax() ** 2 + 1
        assert float((dx - right).abs().max()) <= 8 * torch.finfo(F32).eps * float(scale * size)


@pytest.mark.parametrize("row", range(4))
def test_kn_13_large_mean(row: int, device: str) -> None:
    x = offset_rows(device)[row]
    out = rmsnorm(x)
    # a sum of squares, a root and a product, each within an epsilon or two of float32
    worst = ((out.double() - rms64(x)) / rms64(x)).abs().max()
    assert float(worst) <= 8 * torch.finfo(F32).eps


@both_norms
@pytest.mark.parametrize("rows", [2, 16, 255, 256, 4096])
@pytest.mark.parametrize("n", [256, 1001, 4096], ids=lambda n: f"n{n}")
def test_kn_15_rows_do_not_depend_on_the_batch(norm: Norm, n: int, rows: int, device: str) -> None:
    if device == "cpu" and rows * n > 2**20:
        rows = 2**20 // n
    x = random((rows, n), BF16, device, seed=1)
    r = random((rows, n), BF16, device, seed=2)
    w = random((n,), F32, device, seed=3)
    dout = random((rows, n), BF16, device, seed=4)

    def run(at: slice) -> tuple[torch.Tensor, ...]:
        a, b = x[at].clone().requires_grad_(), r[at].clone().requires_grad_()
        y, h, rstd = norm(a, w, residual=b, prenorm=True, **STATISTICS[norm])
        return (y, h, rstd, *torch.autograd.grad((y, h), (a, b), (dout[at], dout[at])))

    together = run(slice(None))
    for first in sorted({0, 1, rows // 2, rows - 1}):
        for name, whole, alone in zip(
            ("out", "h", "rstd", "dx", "dresidual"), together, run(slice(first, first + 1)),
            strict=True,
        ):  # fmt: skip
            assert_bitwise(whole[first : first + 1], alone, f"{name} of row {first}")


@both_norms
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("weight", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [4096, 8192, 8200, 16384, 32776, 65536, 131072])
def test_kn_15_many_long_rows_and_few(
    norm: Norm, n: int, weight: torch.dtype, residual: bool, cuda: str
) -> None:
    """Those that wait in shared memory, and those of rings: where they are few, kernels differ."""
    x, w = random((2000, n), BF16, cuda, seed=1), random((n,), weight, cuda, seed=2)
    r = random((2000, n), BF16, cuda, seed=3) if residual else None

    def run(first: int) -> tuple[torch.Tensor, ...]:
        added = None if r is None else r[first:]
        return norm(x[first:], w, residual=added, prenorm=residual, **STATISTICS[norm])

    whole = run(0)
    for first in (1999, 1993, 1500, 1200):
        for i, (found, right) in enumerate(zip(run(first), whole, strict=True)):
            assert_bitwise(found, right[first:], f"result {i} from row {first}")


@pytest.mark.parametrize("n", [64, 72, 128, 256, 1000, 1536, 3584, 5120, 7168, 8200, 16384])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_kn_16_hidden_sizes(n: int, dtype: torch.dtype, device: str) -> None:
    check(Case("", (3, n), dtype, weight=dtype), device)


@pytest.mark.parametrize("n", [262145, 2**20])
def test_kn_17_beyond_the_longest_row(n: int, device: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"x.shape\[-1\] is {n}.*at most 262144"):
        rmsnorm(torch.zeros(1, n, dtype=BF16, device=device))


@both_norms
def test_kn_20_gradient_tensors_stay_as_they_are(norm: Norm, device: str) -> None:
    x = random((17, 256), BF16, device, seed=1).requires_grad_()
    w = random((256,), F32, device, seed=2).requires_grad_()
    dout, dh = random((17, 256), BF16, device, seed=3), random((17, 256), BF16, device, seed=4)
    kept = dout.clone(), dh.clone()
    y, h = norm(x, w, prenorm=True)
    first = torch.autograd.grad((y, h), (x, w), (dout, dh), retain_graph=True)
    again = torch.autograd.grad((y, h), (x, w), (dout, dh))
    assert_bitwise(dout, kept[0])
    assert_bitwise(dh, kept[1])
    for a, b in zip(first, again, strict=True):
        assert_bitwise(a, b)


def test_kn_20_two_norms_in_a_row(device: str) -> None:
    """z = y + rmsnorm(y): the gradient of y is used twice."""
    x = random((17, 256), F32, device, seed=1).requires_grad_()
    y = rmsnorm(x)
    (y + rmsnorm(y)).square().sum().backward()
    x64 = x.detach().double().requires_grad_()
    y64 = rms64(x64)
    (y64 + rms64(y64)).square().sum().backward()
    x32 = x.detach().clone().requires_grad_()
    y32 = F.rms_norm(x32, (256,), eps=1e-6)
    (y32 + F.rms_norm(y32, (256,), eps=1e-6)).square().sum().backward()
    # dx is a difference of nearly equal numbers: judge by what goes in, not by what is left
    scale = 4 * (1 + float(x64.detach().abs().max()))
    assert float((x.grad - x64.grad).abs().max()) <= 16 * torch.finfo(F32).eps * scale
    assert float((x32.grad - x64.grad).abs().max()) <= 16 * torch.finfo(F32).eps * scale


@both_norms
def test_kn_21_second_derivative_raises(norm: Norm, device: str) -> None:
    x = random((3, 64), F32, device, seed=1).requires_grad_()
    w = random((64,), F32, device, seed=2).requires_grad_()
    (dx,) = torch.autograd.grad(norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dx.square().sum().backward()


@both_norms
def test_kn_21_create_graph_alone_is_fine(norm: Norm, device: str) -> None:
    """Only using the second derivative raises; the first one is right."""
    x = random((3, 64), F32, device, seed=1).requires_grad_()
    dout = random((3, 64), F32, device, seed=2)
    (with_graph,) = torch.autograd.grad(norm(x), x, dout, create_graph=True)
    (without,) = torch.autograd.grad(norm(x), x, dout)
    assert_bitwise(with_graph, without)


def test_infinite_and_missing_values_stay_in_their_rows(device: str) -> None:
    x = random((5, 256), BF16, device, seed=1)
    clean = rmsnorm(x)
    x[1, 3], x[3, 7] = torch.nan, torch.inf
    out = rmsnorm(x)
    for row in (0, 2, 4):
        assert_bitwise(out[row], clean[row])
    assert out[1].isnan().all()
    assert out[3, 7].isnan() and torch.equal(out[3, 8:], torch.zeros_like(out[3, 8:]))
