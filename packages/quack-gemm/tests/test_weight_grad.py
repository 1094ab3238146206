"""Weights whose gradients are added up in float32, where autograd would round each of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quack_core.errors import DTypeError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_gemm import MLP, Linear, gemm, linear, linear_act, linear_gated, mlp

BF16, F32 = torch.bfloat16, torch.float32
ULP = 2.0**-24
"""Half of one, of float32."""


def leaf(*shape: int, device: str, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return random(shape, F32, device, seed=seed).to(dtype).requires_grad_()


def micro_batches(k: int, n: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Pairs of x and the gradient that comes in."""
    return [
        (random((40, k), BF16, device, seed=i), random((40, n), BF16, device, seed=10 + i))
        for i in range(4)
    ]


def right_sum(batches: list[tuple[Tensor, Tensor]], weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight's gradient over all batches in float64, and a bound of its error in float32."""
    exact, size = (torch.zeros_like(weight, dtype=torch.float64) for _ in range(2))
    for x, dout in batches:
        exact += dout.double().mT @ x.double()
        size += dout.double().abs().mT @ x.double().abs()
    return exact, (40 + len(batches)) * ULP * size  # a rounding for each product and each batch


@pytest.mark.parametrize(("k", "n"), [(64, 72), (37, 24)])  # rows of 37 are written apart
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_micro_batches_add_up_in_float32(dtype: torch.dtype, k: int, n: int, device: str) -> None:
    module = Linear(k, n, bias=False, device=device, dtype=dtype, accumulate=True)
    name, other = ("grad", "main_grad") if dtype == F32 else ("main_grad", "grad")
    batches, addresses = micro_batches(k, n, device), set()
    for x, dout in batches:
        with torch.autocast(torch.device(device).type, BF16):
            module(x).backward(dout)
        addresses.add(getattr(module.weight, name).data_ptr())
    found = getattr(module.weight, name)
    exact, allowed = right_sum(batches, module.weight)
    assert found.dtype == F32 and len(addresses) == 1
    assert getattr(module.weight, other, None) is None
    assert ((found - exact).abs() <= allowed).all()
    rounded = torch.stack([(d.float().mT @ x.float()).to(BF16).float() for x, d in batches]).sum(0)
    assert ((rounded - exact).abs() > allowed).any()  # what is avoided


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_buffer_of_the_users(dtype: torch.dtype, device: str) -> None:
    """Two layers of one buffer for all gradients, as optimisers of sharded weights have it."""
    flat = torch.zeros(2 * 72 * 64, device=device)
    weights = [leaf(72, 64, device=device, seed=i, dtype=dtype) for i in range(2)]
    for weight, part in zip(weights, flat.chunk(2), strict=True):
        setattr(weight, "grad" if dtype == F32 else "main_grad", part.view(72, 64))
    batches = micro_batches(64, 72, device)
    for x, dout in batches:
        with torch.autocast(torch.device(device).type, BF16):
            linear(x, weights[1], accumulate=True).backward(dout)
    exact, allowed = right_sum(batches, weights[1])
    assert not flat[: 72 * 64].any()
    assert ((flat[72 * 64 :].view(72, 64) - exact).abs() <= allowed).all()


LAYERS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, int], ...]]] = {
    "linear": (linear, ((72, 64),)),
    "linear_act": (lambda x, w, **k: linear_act(x, w, "silu", **k), ((72, 64),)),
    "linear_gated": (lambda x, w, **k: linear_gated(x, w, "swiglu", **k), ((80, 64),)),
    "mlp": (lambda x, v, w, **k: mlp(x, v, w, "gelu", **k), ((72, 64), (48, 72))),
    "mlp, gated": (
        lambda x, v, w, **k: mlp(x, v, w, "swiglu", recompute=True, **k),
        ((80, 64), (48, 40)),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer(name: str, device: str) -> None:
    """The same as autograd's, but for its rounding; and nothing else changes."""
    layer, shapes = LAYERS[name]
    found = []
    for accumulate in (False, True):
        x = leaf(3, 8, 64, device=device, seed=1, dtype=BF16)
        weights = [leaf(*s, device=device, seed=i, dtype=BF16) for i, s in enumerate(shapes)]
        out = layer(x, *weights, accumulate=accumulate)
        out.backward(random(tuple(out.shape), BF16, device, seed=9))
        grads = [w.main_grad.to(BF16) if accumulate else w.grad for w in weights]
        assert all((w.grad is None) == accumulate for w in weights)
        found.append([out.detach(), x.grad, *grads])
    for one, other in zip(*found, strict=True):
        assert_bitwise(one, other)


def test_biases_and_frozen_weights(device: str) -> None:
    module = MLP(64, 48, activation="relu", bias=True, device=device, dtype=BF16, accumulate=True)
    module.fc2.weight.requires_grad_(False)
    x = random((24, 64), BF16, device, seed=1)
    module(x).sum().backward()
    assert module.fc1.weight.main_grad.dtype == F32
    assert not hasattr(module.fc2.weight, "main_grad")
    assert module.fc1.bias.grad.dtype == module.fc2.bias.grad.dtype == BF16
    with torch.no_grad():
        module(x)


def test_a_weight_that_is_used_twice(device: str) -> None:
    weight = leaf(64, 64, device=device, seed=1, dtype=BF16)
    x = random((24, 64), BF16, device, seed=2)
    dout = random((24, 64), BF16, device, seed=3)
    both = linear(x, weight, accumulate=True) + linear(x, weight, accumulate=True)
    both.backward(dout)
    once = gemm(dout.mT, x, out_dtype=F32)
    assert_bitwise(weight.main_grad, 2 * once)


def test_sums_that_have_no_place(device: str) -> None:
    x = random((24, 64), BF16, device, seed=1)
    weight = leaf(72, 64, device=device, seed=2, dtype=BF16)
    with pytest.raises(UnsupportedError, match="linear: accumulate=True with a weight that was"):
        linear(x, weight * 2, accumulate=True)
    weight.main_grad = torch.zeros(72, 64, dtype=BF16, device=device)
    with pytest.raises(DTypeError, match="main_grad of the weight is torch.bfloat16: .* float32"):
        linear(x, weight, accumulate=True).sum().backward()
    weight.main_grad = torch.zeros(64, 72, device=device)
    with pytest.raises(ShapeError, match=r"main_grad of the weight has the shape \(64, 72\)"):
        linear(x, weight, accumulate=True).sum().backward()


def test_a_compiled_function_runs_such_a_layer_outside_its_graph(device: str) -> None:
    torch._dynamo.reset()
    module = Linear(64, 72, bias=False, device=device, dtype=BF16, accumulate=True)
    step = torch.compiler.disable(module)
    compiled = torch.compile(lambda x: step(x * 2) * 2, backend="aot_eager")
    x = random((24, 64), BF16, device, seed=1)
    compiled(x).sum().backward()
    exact = (4 * x.double()).sum(0).expand(72, 64)
    size = 4 * x.double().abs().sum(0)
    assert ((module.weight.main_grad - exact).abs() <= 24 * ULP * size).all()


def test_c_and_out_are_one_float32_tensor(device: str) -> None:
    a, b = (random(s, BF16, device, seed=i) for i, s in enumerate(((200, 136), (136, 264))))
    buffer = random((200, 264), F32, device, seed=3)
    expected = gemm(a, b, c=buffer, beta=1.0, out_dtype=F32)
    before = buffer.clone()
    assert gemm(a, b, c=buffer, out=buffer, beta=1.0) is buffer
    assert_bitwise(buffer, expected)
    exact = a.double() @ b.double() + before.double()
    size = a.double().abs() @ b.double().abs() + before.double().abs()
    assert ((buffer - exact).abs() <= 137 * ULP * size).all()
