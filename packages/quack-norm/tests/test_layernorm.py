"""LayerNorm against float64, forward and backward: what differs from RMSNorm, whose kernels it shares."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core.errors import DTypeError, ShapeError, UnsupportedError
from quack_core.testing.compare import EPS32, assert_accurate, assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.ops.layernorm.api import layernorm

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

SHAPES = [(3, 1), (17, 31), (70, 128), (9, 1000), (7, 1001), (3, 4095), (5, 4096), (3, 5120)]
SHAPES += [(2, 8191), (3, 16384), (2, 50257), (2, 65536), (1, 131072), (2, 262144)]


def moments(h: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h minus its mean, rstd and mean, the latter two (..., 1), in the dtype of h."""
    mean = h.mean(-1, keepdim=True)
    away = h - mean
    return away, (away.square().mean(-1, keepdim=True) + eps).rsqrt(), mean


def check(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    shift: float = 0.0,
    weight: torch.dtype | None = F32,
    bias: torch.dtype | None = F32,
    residual: torch.dtype | None = None,
    per_head: bool = False,
    layout: Layout = Layout.CONTIGUOUS,
    eps: float = 1e-5,
) -> None:
    """Results and every gradient within the bounds of contract 1, torch in float32 the baseline."""
    parameter = shape[-2:] if per_head else shape[-1:]

    def make(size: tuple[int, ...], kind: torch.dtype | None, seed: int, **how: object) -> Tensor:
        return None if kind is None else random(size, kind, device, seed=seed, **how)  # type: ignore[return-value,arg-type]

    leaves = {
        "x": make(shape, dtype, 1, shift=shift, layout=layout),
        "weight": make(parameter, weight, 2, shift=1.0, scale=0.5),
        "bias": make(parameter, bias, 3),
        "residual": make(shape, residual, 4, layout=layout),
    }
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    dout = random(shape, dtype, device, seed=5, layout=layout)

    def formula(kind: torch.dtype) -> dict[str, Tensor]:
        given = {k: v.detach().to(kind).requires_grad_() for k, v in leaves.items()}
        h = given["x"] + given["residual"] if residual else given["x"] * 1
        if residual and kind == F32:  # torch, not fused, stores it; the rounding has no derivative
            h = h + (h.to(residual).float() - h).detach()
        away, rstd, mean = moments(h, eps)
        normalised = away * rstd
        if kind == F32 and not per_head:  # torch's own kernel is the baseline
            out = F.layer_norm(h, shape[-1:], given.get("weight"), given.get("bias"), eps)
        else:
            out = normalised * given["weight"] if weight else normalised
            out = out + given["bias"] if bias else out
        grads = torch.autograd.grad(out, tuple(given.values()), dout.to(kind))
        found = {f"d{name}": grad for name, grad in zip(given, grads, strict=True)}
        # The mean is known to float32 of its distance from a value of the row: that error is in each.
        spread = normalised.abs() + normalised.abs().amax(-1, keepdim=True)
        terms = (dout.to(kind).abs() * spread).sum_to_size(parameter).detach()
        return {"out": out.detach(), "h": h.detach(), "rstd": rstd, "mean": mean, **found} | {
            "terms": terms
        }

    right, base = formula(torch.float64), formula(F32)
    results = layernorm(
        leaves["x"],
        leaves.get("weight"),
        leaves.get("bias"),
        residual=leaves.get("residual"),
        eps=eps,
        return_statistics=True,
    )
    out, statistics = results
    assert statistics.shape == (*shape[:-1], 2) and not statistics.requires_grad
    assert_accurate(out.detach(), right["out"], base["out"].to(dtype), name="out")
    rstd = right["rstd"][..., 0]
    size = right["h"].abs().amax(-1)
    assert ((statistics[..., 0].double() - rstd).abs() <= 1e-5 * rstd * (1 + size * rstd)).all()
    assert ((statistics[..., 1].double() - right["mean"][..., 0]).abs() <= 8 * EPS32 * size).all()
    grads = torch.autograd.grad(out, tuple(leaves.values()), dout)
    for name, grad in zip(leaves, grads, strict=True):
        key = f"d{name}"
        baseline = base[key].to(grad.dtype)
        if name in ("weight", "bias"):
            terms = (
                right["terms"] if name == "weight" else dout.double().abs().sum_to_size(parameter)
            )
            stored = torch.finfo(residual).eps / EPS32 if residual else 1.0
            assert_accurate(
                grad,
                right[key],
                baseline,
                kind="columns",
                terms=terms * max(1, stored / 4),
                name=key,
            )
        else:
            assert_accurate(grad, right[key], baseline, name=key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(shape, dtype, device, eps=0.5 if shape[-1] < 4 else 1e-5)


@pytest.mark.parametrize("n", [128, 1000, 4096, 4097, 16384])
@pytest.mark.parametrize("shift", [30.0, 1e4])
def test_a_large_mean_cancels_nothing(n: int, shift: float, device: str) -> None:
    check((9, n), F32, device, shift=shift)


@pytest.mark.parametrize(
    "options",
    [
        {"weight": None, "bias": None},
        {"weight": BF16, "bias": None},
        {"weight": None, "bias": BF16},
        {"weight": F16, "bias": F32},
        {"residual": BF16},
        {"residual": F32, "weight": BF16},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_operands(dtype: torch.dtype, options: dict[str, torch.dtype], device: str) -> None:
    for n in (264, 4096, 4099):
        check((6, n), dtype, device, **options)  # type: ignore[arg-type]


def test_weights_of_heads(device: str) -> None:
    check((5, 3, 64), BF16, device, per_head=True)


@pytest.mark.parametrize("layout", [key for key in Layout if key is not Layout.EXPANDED])
def test_layouts(layout: Layout, device: str) -> None:
    check((4, 5, 264), BF16, device, layout=layout)


def test_it_is_torchs(device: str) -> None:
    x = random((6, 200), F32, device, seed=1)
    w, b = (random((200,), F32, device, seed=seed) for seed in (2, 3))
    torch.testing.assert_close(layernorm(x, w, b), F.layer_norm(x, (200,), w, b))


def test_the_gradient_of_h_is_added_after_the_norm(device: str) -> None:
    """As KN-05: y and h are both used; h in float32, so that nothing is rounded between them."""
    shape = (17, 256)
    x, r = (random(shape, F32, device, seed=seed).requires_grad_() for seed in (1, 2))
    w = random(shape[-1:], BF16, device, seed=3).requires_grad_()
    dout, dh = (random(shape, F32, device, seed=seed) for seed in (4, 5))

    def gradients(kind: torch.dtype) -> tuple[Tensor, ...]:
        given = [t.detach().to(kind).requires_grad_() for t in (x, r, w)]
        h = given[0] + given[1]
        away, rstd, _ = moments(h, 1e-5)
        return torch.autograd.grad((away * rstd * given[2], h), given, (dout.to(kind), dh.to(kind)))

    y, h = layernorm(x, w, residual=r, prenorm=True)
    found = torch.autograd.grad((y, h), (x, r, w), (dout, dh))
    right, base = gradients(torch.float64), gradients(F32)
    for name, a, b, c in zip(("dx", "dresidual"), found, right, base, strict=False):
        assert_accurate(a, b, c, name=name)
    h64 = x.detach().double() + r.detach().double()
    away, rstd, _ = moments(h64, 1e-5)
    terms = (dout.double() * away * rstd).abs().sum(0)
    assert_accurate(found[2], right[2], base[2].bfloat16(), kind="columns", terms=terms)


@pytest.mark.parametrize("n", [1, 5, 96, 1000, 1001, 4095, 4096, 16384, 65536])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_recording_a_gradient_changes_no_bit(n: int, dtype: torch.dtype, device: str) -> None:
    """Then the kernel stores statistics: it must not fuse other products for that reason."""
    x, w = random((3, n), dtype, device, seed=1), random((n,), F32, device, seed=2)
    for weight in (None, w):
        with torch.no_grad():
            alone = layernorm(x, weight)
        assert_bitwise(layernorm(x.clone().requires_grad_(), weight).detach(), alone)


def test_one_value_has_no_gradient(device: str) -> None:
    """It is its own mean: dx is 0, and not what a product lost in rounding."""
    for dtype in (F32, BF16):
        x = random((65, 1), dtype, device, seed=1).requires_grad_()
        w = random((1,), F32, device, seed=2)
        (dx,) = torch.autograd.grad(layernorm(x, w), x, random((65, 1), dtype, device, seed=3))
        assert not dx.any()


def test_prenorm_and_out(device: str) -> None:
    x, r = (random((6, 200), BF16, device, seed=seed) for seed in (1, 2))
    y, h = layernorm(x, residual=r, prenorm=True)
    assert torch.equal(h, (x.float() + r.float()).bfloat16())
    out = torch.empty_like(x)
    with torch.no_grad():
        assert layernorm(x, residual=r, out=out) is out
    assert_bitwise(out, y)


def test_rows_that_are_not_finite(device: str) -> None:
    for n in (128, 4096, 4097):
        x = random((4, n), F32, device, seed=1)
        x[0, 3], x[1, n - 1] = torch.inf, torch.nan
        y = layernorm(x)
        assert y[:2].isnan().all() and y[2:].isfinite().all()


def test_constant_rows_give_the_bias(device: str) -> None:
    for n in (1, 128, 1001, 4096):
        x = torch.full((3, n), 7.25, device=device)
        b = random((n,), F32, device, seed=1)
        assert torch.equal(layernorm(x, bias=b), b.expand(3, n))


@pytest.mark.parametrize("place", ["device", "meta"])
def test_mistakes_bear_its_name(place: str, device: str) -> None:
    x = torch.zeros(2, 4, device=device if place == "device" else "meta")
    with pytest.raises(ShapeError, match=r"layernorm: weight.shape\[-1\] is 3"):
        layernorm(x, x.new_zeros(3))
    with pytest.raises(DTypeError, match="layernorm: x is float64"):
        layernorm(x.double())
    with pytest.raises(UnsupportedError, match=r"layernorm: x.shape\[-1\] is 262145"):
        layernorm(x.new_zeros(1, 262145))


def test_compile_whole_graph(device: str) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layernorm, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5, 17):
        x = random((rows, 96), F32, device, seed=rows)
        assert_bitwise(compiled(x), layernorm(x))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [128, 1000, 4096, 4097, 16384, 65536])
def test_a_row_has_the_same_bits_in_every_batch(n: int, dtype: torch.dtype, cuda: str) -> None:
    """More rows than CTAs stay, and few; the short ones are KN-15 in test_rmsnorm_faults."""
    x = random((2000, n), dtype, cuda, seed=n)
    whole = layernorm(x)
    for rows in (1, 7, 500):
        assert_bitwise(layernorm(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("n", [1536, 4096, 8192, 20480, 65536])
def test_rows_that_share_float32_columns(n: int, cuda: str) -> None:
    """A thread reads weight and bias once for two rows; with an odd number of rows one is alone."""
    weight, bias = (random((n,), F32, cuda, seed=s) for s in (1, 2))
    x, residual = (random((1333, n), BF16, cuda, seed=s) for s in (3, 4))
    whole, h = layernorm(x, weight, bias, residual=residual, prenorm=True)
    assert_bitwise(h, x + residual)
    for rows in (1, 2, 701):
        last = layernorm(x[-rows:], weight, bias, residual=residual[-rows:], prenorm=True)
        assert_bitwise(last[0], whole[-rows:])
        assert_bitwise(last[1], h[-rows:])
    exact = F.layer_norm(x.double() + residual.double(), (n,), weight.double(), bias.double())
    assert torch.allclose(whole.double(), exact, rtol=2.0**-8, atol=2.0**-8)
