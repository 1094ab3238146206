"""Linear layers and MLPs against float64 and torch's own, forward and backward."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quack_core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from quack_core.gemm.activations import reference
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import random
from quack_gemm import fused
from quack_gemm.api import compute
from quack_gemm.fused import (
    GATED,
    gemm_act,
    gemm_dact,
    gemm_dact_bias,
    gemm_dgated,
    gemm_gated,
    gemm_norm_act,
    gemm_rms,
)
from quack_gemm.layers import MLP, Linear, linear, linear_act, linear_gated, mlp

BF16, F32 = torch.bfloat16, torch.float32


def gated(x: Tensor, name: str, concat: bool) -> Tensor:
    gate, up = x.chunk(2, -1) if concat else (x[..., ::2], x[..., 1::2])
    return reference(GATED[name], gate) * up  # type: ignore[no-any-return]


def check(
    ours: Callable[..., Tensor], formula: Callable[..., Tensor], *leaves: Tensor | None
) -> None:
    """Result and gradients within twice torch's error in the operands' dtype, plus an ulp.

    Torch's, computed step by step in 16 bits, rounds more often: that is the baseline.
    """
    found = _run(ours, leaves, None)
    right = _run(formula, leaves, torch.float64)
    base = _run(formula, leaves, None)
    for name in right:
        rows = (-1, right[name].shape[-1])
        actual, wanted, plain = (each[name].reshape(rows) for each in (found, right, base))
        assert_accurate(actual, wanted, plain.to(actual.dtype), name=name)


def _run(
    function: Callable[..., Tensor], leaves: tuple[Tensor | None, ...], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    given = [
        None if leaf is None else leaf.detach().to(dtype or leaf.dtype).requires_grad_()
        for leaf in leaves
    ]
    out = function(*given)
    dout = random(tuple(out.shape), BF16, out.device, seed=9)
    out.backward(dout.to(out.dtype))
    found = {"out": out.detach()}
    for i, leaf in enumerate(given):
        if leaf is not None:
            assert leaf.grad is not None
            found[f"gradient {i}"] = leaf.grad
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(24, 64), (3, 5, 64), (7, 40)])
def test_linear(shape: tuple[int, ...], bias: bool, device: str) -> None:
    x = random(shape, BF16, device, seed=1)
    weight = random((72, shape[-1]), BF16, device, seed=2)
    check(linear, F.linear, x, weight, random((72,), BF16, device, seed=3) if bias else None)


@pytest.mark.parametrize(("n", "k"), [(105, 64), (72, 107), (33, 35)])
def test_odd_sizes_are_copied(n: int, k: int, device: str) -> None:
    x, weight = random((29, k), BF16, device, seed=1), random((n, k), BF16, device, seed=2)
    check(linear, F.linear, x, weight)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu_sq", "gelu"])
def test_linear_act(activation: str, device: str) -> None:
    x, weight = random((24, 64), BF16, device, seed=1), random((72, 64), BF16, device, seed=2)
    bias = random((72,), BF16, device, seed=3)

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return reference(activation, F.linear(x, weight, bias))  # type: ignore[no-any-return]

    check(lambda x, w, b: linear_act(x, w, activation, b), formula, x, weight, bias)


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("activation", list(GATED))
def test_linear_gated(activation: str, concat: bool, device: str) -> None:
    x, weight = random((24, 64), BF16, device, seed=1), random((80, 64), BF16, device, seed=2)
    bias = random((80,), BF16, device, seed=3)
    check(
        lambda x, w, b: linear_gated(x, w, activation, b, concat),
        lambda x, w, b: gated(F.linear(x, w, b), activation, concat),
        x,
        weight,
        bias,
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("activation", "concat"), [("silu", False), ("swiglu", False), ("geglu", True)]
)
def test_mlp(activation: str, concat: bool, recompute: bool, device: str) -> None:
    width = 80 if activation in GATED else 40
    x = random((24, 64), BF16, device, seed=1)
    weight1 = random((width, 64), BF16, device, seed=2, scale=0.2)
    weight2 = random((48, 40), BF16, device, seed=3, scale=0.2)
    bias1, bias2 = (random((n,), BF16, device, seed=n) for n in (width, 48))

    def formula(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        h = F.linear(x, w1, b1)
        h = gated(h, activation, concat) if activation in GATED else reference(activation, h)
        return F.linear(h, w2, b2)

    def ours(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        return mlp(x, w1, w2, activation, b1, b2, recompute=recompute, concat=concat)

    check(ours, formula, x, weight1, weight2, bias1, bias2)


def test_recomputing_changes_no_bits(device: str) -> None:
    x = random((24, 64), BF16, device, seed=1)
    weights = [random(s, BF16, device, seed=2, scale=0.2) for s in ((80, 64), (48, 40))]
    kept, again = (
        _run(
            lambda *leaves, recompute=recompute: mlp(*leaves, "swiglu", recompute=recompute),
            (x, *weights),
            None,
        )
        for recompute in (False, True)
    )
    for name in kept:
        assert_bitwise(kept[name], again[name])


@pytest.mark.parametrize("concat", [False, True])
def test_the_gradient_of_pairs_KG_12(concat: bool, device: str) -> None:
    dout = random((24, 64), BF16, device, seed=1)
    weight = random((64, 40), BF16, device, seed=2)
    preact = random((24, 80), BF16, device, seed=3)
    found = gemm_dgated(dout, weight, preact, "swiglu", concat=concat)
    right = []
    for dtype in (torch.float64, F32):
        leaf = preact.to(dtype).requires_grad_()
        gated(leaf, "swiglu", concat).backward(dout.to(dtype) @ weight.to(dtype))
        assert leaf.grad is not None
        right.append(leaf.grad)
    assert_accurate(found, right[0], right[1].to(BF16))


def test_the_gradient_of_an_activation(device: str) -> None:
    dout = random((24, 64), BF16, device, seed=1)
    weight = random((64, 40), BF16, device, seed=2)
    preact = random((24, 40), BF16, device, seed=3)
    found = gemm_dact(dout, weight, preact, "gelu_tanh")
    right = []
    for dtype in (torch.float64, F32):
        leaf = preact.to(dtype).requires_grad_()
        F.gelu(leaf, approximate="tanh").backward(dout.to(dtype) @ weight.to(dtype))
        assert leaf.grad is not None
        right.append(leaf.grad)
    assert_accurate(found, right[0], right[1].to(BF16))


def test_what_went_in_is_optional(device: str) -> None:
    a, b = random((24, 64), BF16, device, seed=1), random((80, 64), BF16, device, seed=2).mT
    preact, post = gemm_act(a, b, "silu")
    assert preact is not None
    assert_accurate(preact, a.double() @ b.double(), (a.float() @ b.float()).to(BF16))
    none, again = gemm_act(a, b, "silu", store_preact=False)
    assert none is None
    assert_bitwise(again, post)
    preact, post = gemm_gated(a, b, "swiglu", out_dtype=F32)
    assert preact is not None and preact.shape == (24, 80)
    assert post.shape == (24, 40) and post.dtype == F32
    with pytest.raises(DTypeError, match=r"'swish' must be one of swiglu"):
        gemm_gated(a, b, "swish")


def test_modules(device: str) -> None:
    torch.manual_seed(0)
    ours, theirs = (kind(64, 72, device=device, dtype=BF16) for kind in (Linear, nn.Linear))
    theirs.load_state_dict(ours.state_dict())
    x = random((3, 5, 64), BF16, device, seed=1)
    assert torch.allclose(ours(x), theirs(x), rtol=2.0**-7, atol=2.0**-7)
    module = MLP(64, 40, 48, device=device, dtype=BF16)
    assert module(x).shape == (3, 5, 48)
    assert_bitwise(module(x), mlp(x, module.fc1.weight, module.fc2.weight, "swiglu"))
    assert "activation=swiglu" in repr(module)


def test_compile_whole_graph(device: str) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    module = MLP(64, 40, 48, bias=True, device=device, dtype=BF16)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = random((3, 5, 64), BF16, device, seed=1)
    gradients = []
    for one in (module, compiled):
        leaf = x.clone().requires_grad_()
        one(leaf).sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*gradients, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("shape", [(24, 64), (3, 24, 64)])
def test_a_norm_in_two_gemms(shape: tuple[int, ...], device: str) -> None:
    """RMSNorm between two layers: its sums from one, its factors into the next."""
    a, b = random(shape, BF16, device, seed=1), random((80, 64), BF16, device, seed=2).mT
    c = random((*shape[:-1], 80), BF16, device, seed=3)
    weight = random((80, 48), BF16, device, seed=4)
    h, rstd = gemm_rms(a, b, c=c)
    exact = a.double() @ b.double() + c.double()
    right = (exact.square().mean(-1) + 1e-6).rsqrt()
    assert rstd.dtype == F32 and rstd.shape == shape[:-1]
    assert ((rstd - right).abs() <= 8 * 2.0**-24 * right).all()
    found = gemm_norm_act(h, weight, rstd, "silu", out_dtype=F32)
    wanted = F.silu((h.double() @ weight.double()) * rstd.double()[..., None])
    assert torch.allclose(found.double(), wanted, rtol=2.0**-18, atol=2.0**-18)
    halved = gemm_norm_act(h, weight.mT.contiguous().mT, rstd, "swiglu")
    assert halved.shape == (*shape[:-1], 24)


def test_the_gradient_of_a_bias_comes_with_that_of_an_activation(device: str) -> None:
    dout, weight = random((150, 64), BF16, device, seed=1), random((64, 40), BF16, device, seed=2)
    preact = random((150, 40), BF16, device, seed=3)
    dpre, dbias = gemm_dact_bias(dout, weight, preact, "gelu_tanh")
    assert_bitwise(dpre, gemm_dact(dout, weight, preact, "gelu_tanh"))
    leaf = preact.double().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(dout.double() @ weight.double())
    assert leaf.grad is not None and dbias.dtype == F32
    error = (dbias - leaf.grad.sum(0)).abs()
    assert (error <= 2.0**-18 * leaf.grad.abs().sum(0)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_converting_first(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 24, 64), (136, 64), (128, 64), (32, 64), (136,))
    given = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]

    def step(cast: bool) -> tuple[torch.Tensor, ...]:
        for one in given:
            one.grad = None

        def of(i: int) -> Tensor:
            return given[i].to(dtype) if cast else given[i]

        found = (
            linear(of(0), of(1), given[4]),  # a bias may have any dtype
            linear_act(of(0), of(1), "silu"),
            linear_gated(of(0), of(2), "swiglu"),
            mlp(of(0), of(2), of(3), "swiglu"),
        )
        sum(one.float().square().sum() for one in found).backward()
        return (*found, *(one.grad for one in given))

    with torch.autocast(torch.device(device).type, dtype):
        ours = step(cast=False)
    for one, other in zip(ours, step(cast=True), strict=True):
        assert one.dtype == other.dtype
        assert_bitwise(one, other)


def test_errors_speak_of_the_layer(device: str) -> None:
    def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    x = t(3, 8, 64)
    with pytest.raises(ShapeError, match=r"linear: weight.shape\[1\] is 63: it must be 64"):
        linear(x, t(16, 63))
    with pytest.raises(ShapeError, match=r"linear_act: weight has 3 dimensions: it must have 2"):
        linear_act(x, t(1, 16, 64), "silu")
    with pytest.raises(ShapeError, match=r"bias of weight has the shape \(15,\): .* \(16,\)"):
        linear(x, t(16, 64), t(15))
    with pytest.raises(ShapeError, match=r"linear_gated: weight.shape\[0\] is 24: .* of 16"):
        linear_gated(x, t(24, 64), "swiglu")
    with pytest.raises(ShapeError, match=r"mlp: weight2.shape\[1\] is 32: it must be 16"):
        mlp(x, t(32, 64), t(64, 32), "swiglu")
    with pytest.raises(UnsupportedError, match=r"linear: x is float32, weight is bfloat16"):
        linear(x.float(), t(16, 64))
    with pytest.raises(DTypeError, match=r"linear: x is float16, weight is bfloat16"):
        linear(x.half(), t(16, 64))
    with pytest.raises(DeviceError, match=r"weight on meta"):
        linear(x, t(16, 64).to("meta"))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_inference_stores_nothing_for_a_backward(
    device: str, off: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[int] = []

    def counted(*args: object, **kwargs: object) -> list[Tensor]:
        found = compute(*args, **kwargs)
        outputs.append(len(found))
        return found

    monkeypatch.setattr(fused, "compute", counted)  # of layers that have an activation
    x = random((8, 64), BF16, device, seed=1)
    module = MLP(64, 128, device=device, dtype=BF16)
    with off():
        module(x)
        linear_act(x, module.fc2.weight.mT.contiguous(), "silu")
    assert outputs == [1, 1]
    outputs.clear()
    module(x)
    assert outputs == [2]


def test_no_columns_to_multiply(device: str) -> None:
    x, weight = torch.zeros(2, 3, 0, dtype=BF16, device=device), torch.zeros(16, 0, dtype=BF16)
    bias = torch.arange(16.0, device=device)
    found = linear(x, weight.to(device), bias)
    assert_bitwise(found, bias.bfloat16().expand(2, 3, 16).contiguous())


def test_one_row_without_a_dimension_for_it(device: str) -> None:
    x, weight = random((64,), BF16, device, seed=1), random((16, 64), BF16, device, seed=2)
    assert_bitwise(linear(x, weight), linear(x[None], weight)[0])
