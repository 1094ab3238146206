"""The linear layer of FP8 blocks: each product against float64, torch's rules, what is refused."""

from typing import Any

import pytest
import torch
from product_oracle import check, numbers
from torch import Tensor

from quack_blockscaled import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    BlockScaledTensor,
    linear,
    quantize,
)
from quack_core.errors import DeviceError, DTypeError, ShapeError
from quack_core.testing.compare import EPS32
from quack_core.testing.inputs import random

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def operands(
    m: int, n: int, k: int, device: str, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and the gradient of the result."""
    x = random((m, k), dtype, device, seed=1).requires_grad_()
    weight = random((n, k), weight_dtype, device, seed=2, scale=k**-0.5).requires_grad_()
    bias = random((n,), weight_dtype, device, seed=3).requires_grad_()
    return x, weight, bias, random((m, n), dtype, device, seed=4)


def across(x: Tensor) -> BlockScaledTensor:
    """Transposed, filled up with zeros."""
    filled = torch.cat([x, x.new_zeros(-x.shape[0] % 128, x.shape[1])])
    return quantize(filled.mT.contiguous(), FP8_BLOCK_1X128)


def worst(x: BlockScaledTensor) -> Tensor:
    """How far elements may be from what was quantised: half a step of e4m3, or of its subnormals."""
    values = numbers(x, "cpu").abs()
    ones = torch.ones_like(x.values)
    scale = numbers(BlockScaledTensor(ones, x.scales, x.format, x.dim, None, x.dtype), "cpu")
    return (
        torch.maximum(values / 16, scale * 2.0**-10) * 1.07
    )  # of what was quantised: 1 / (1 - 1/16)


@pytest.mark.parametrize("m", [1, 100, 128, 300])
@pytest.mark.parametrize(
    "dtype, weight_dtype", [(BF16, BF16), (BF16, F32), (F16, F32), (F32, F32)], ids=str
)
def test_each_product(m: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    x, weight, bias, dout = operands(m, 256, 384, device, dtype, weight_dtype)
    out = linear(x, weight)
    out.backward(dout)
    assert x.grad is not None and weight.grad is not None
    dtypes = [each.dtype for each in (out, x.grad, weight.grad)]
    assert dtypes == [dtype, dtype, weight_dtype]
    rows = FP8_BLOCK_1X128
    blocks = quantize(weight.detach(), FP8_BLOCK_128X128)
    check(out.detach(), quantize(x.detach(), rows), blocks.mT)
    check(x.grad, quantize(dout, rows), blocks)
    check(weight.grad, across(dout), across(x.detach()).mT)
    assert torch.equal(linear(x, weight, bias), out.add(bias).to(dtype))


def test_error_is_that_of_quantising() -> None:
    """Against the layer in float64: half a step of e4m3 in each factor."""
    x, weight, bias, dout = operands(300, 256, 384, "cpu", F32, F32)
    out = linear(x, weight, bias)
    found = torch.autograd.grad(out, (x, weight, bias), dout)
    x64, weight64, dout64 = (each.detach().double() for each in (x, weight, dout))
    rows, blocks = FP8_BLOCK_1X128, quantize(weight.detach(), FP8_BLOCK_128X128)
    products = (
        (out - bias, x64, weight64.mT, quantize(x.detach(), rows), blocks.mT),
        (found[0], dout64, weight64, quantize(dout, rows), blocks),
        (found[1], dout64.mT, x64, across(dout), across(x.detach()).mT),
    )
    for result, a, b, quantized_a, quantized_b in products:
        errors_a = worst(quantized_a)[:, : a.shape[1]]
        errors_b = worst(quantized_b)[: b.shape[0]]
        allowed = errors_a @ b.abs() + (a.abs() + errors_a) @ errors_b
        allowed += 512 * EPS32 * (a.abs() @ b.abs() + 1)
        assert ((result - a @ b).abs() <= allowed).all()
    error = (found[2] - dout64.sum(0)).abs()
    assert (error <= 300 * EPS32 * dout64.abs().sum(0)).all()


def test_shapes(device: str) -> None:
    _, weight, bias, _ = operands(1, 256, 384, device, BF16, F32)
    for shape in ((384,), (0, 384), (2, 3, 384), (2, 0, 384)):
        x = torch.zeros(shape, device=device, dtype=BF16, requires_grad=True)
        out = linear(x, weight, bias)
        assert out.shape == (*shape[:-1], 256)
        assert torch.equal(out, bias.to(BF16).expand(out.shape))
        grads = torch.autograd.grad(out.sum(), (x, weight, bias))
        assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]
        assert torch.equal(grads[1], torch.zeros_like(weight))
        assert (grads[2] == out[..., 0].numel()).all()


def test_rows_of_any_number_have_the_gradient_that_zeros_would_leave(device: str) -> None:
    x, weight, _, dout = operands(130, 128, 256, device, BF16, F32)
    (found,) = torch.autograd.grad(linear(x, weight), weight, dout)
    filled = [torch.cat([t.detach(), t.new_zeros(126, t.shape[1])]) for t in (x, dout)]
    (wanted,) = torch.autograd.grad(linear(filled[0], weight), weight, filled[1])
    assert torch.equal(found, wanted)


def test_only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """x is kept in 8 bits, transposed; nothing at all without a gradient."""
    x, weight, bias, dout = operands(256, 128, 384, "cpu", BF16, F32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, weight, bias)
        assert [tuple(t.shape) for t in kept] == [(128, 384), (256, 384), (2, 384)]
        assert kept[0] is weight and kept[1].dtype == torch.float8_e4m3fn
        kept.clear()
        linear(x.detach(), weight.detach(), bias).backward(dout)
        assert kept == [] and bias.grad is not None
    with torch.no_grad():
        assert not linear(x, weight, bias).requires_grad
    frozen = weight.detach()
    (dx,) = torch.autograd.grad(linear(x, frozen), x, dout)
    (dweight,) = torch.autograd.grad(linear(x.detach(), weight), weight, dout)
    both = torch.autograd.grad(linear(x, weight), (x, weight), dout)
    assert torch.equal(dx, both[0]) and torch.equal(dweight, both[1])


def test_torch_sees_it(device: str) -> None:
    x, weight, bias, dout = operands(130, 128, 256, device, BF16, F32)
    wanted = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), dout)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, weight, bias), (x, weight, bias), dout)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    there = [t.detach().to("meta").requires_grad_() for t in (x, weight, bias)]
    out = linear(*there)
    assert (out.shape, out.dtype, out.device.type) == ((130, 128), BF16, "meta")
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == t.dtype for t in there)
    with torch.autocast(torch.device(device).type, dtype=BF16):
        cast = linear(x.float(), weight, bias)
    assert cast.dtype == BF16 and torch.equal(cast, linear(x, weight, bias))


@pytest.mark.exhaustive
def test_one_graph_serves_all_numbers_of_rows(device: str) -> None:
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (130, 256, 70):
        x, weight, bias, dout = operands(m, 128, 256, device, BF16, F32)
        found, wanted = (
            torch.autograd.grad(layer(x, weight, bias), (x, weight, bias), dout)
            for layer in (compiled, linear)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_it_trains(device: str) -> None:
    """A few steps of descent lower the loss as those of a float32 layer do."""
    x = random((200, 256), F32, device, seed=1)
    right = random((128, 256), F32, device, seed=2) / 16
    losses: dict[Any, Tensor] = {}
    for layer in (linear, torch.nn.functional.linear):
        weight = torch.zeros(128, 256, device=device, requires_grad=True)
        for _ in range(20):
            loss = (layer(x, weight) - x @ right.mT).square().mean()
            (grad,) = torch.autograd.grad(loss, weight)
            weight = (weight - 12 * grad).detach().requires_grad_()
        losses[layer] = loss.detach()
    first = (x @ right.mT).square().mean()
    assert losses[linear] < first / 4
    assert losses[linear] < losses[torch.nn.functional.linear] + first / 100


def test_what_is_refused() -> None:
    x, weight, bias, _ = operands(4, 128, 256, "cpu", BF16, F32)
    with pytest.raises(
        ShapeError, match=r"weight\.shape\[0\] is 100: it must be a multiple of 128; .* to 128"
    ):
        linear(x, weight[:100])
    with pytest.raises(ShapeError, match=r"weight\.shape\[1\] is 200: .* pad it with zeros to 256"):
        linear(x[:, :200], weight[:, :200])
    with pytest.raises(ShapeError, match=r"x\.shape\[1\] is 128, weight\.shape\[1\] 256"):
        linear(x[:, :128], weight)
    with pytest.raises(ShapeError, match=r"bias has the shape \(127,\): it must be \(128,\)"):
        linear(x, weight, bias[:127])
    with pytest.raises(ShapeError, match="x has 0 dimensions, weight 2"):
        linear(x[0, 0], weight)
    with pytest.raises(DTypeError, match="x is float64"):
        linear(x.double(), weight)
    with pytest.raises(DTypeError, match="weight is BlockScaledTensor: it must be a tensor"):
        linear(x, quantize(weight.detach(), FP8_BLOCK_128X128))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="bias is on meta, x on cpu"):
        linear(x, weight, bias.to("meta"))
    out = linear(x, weight)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        torch.autograd.grad(grad.sum(), x)


# --- on a GPU


@pytest.mark.parametrize("m", [1, 130, 1000, 4096])
def test_on_a_gpu(m: int, cuda: str) -> None:
    x, weight, bias, dout = operands(m, 1152, 2048, cuda, BF16, F32)
    wanted = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), dout)
    for _ in range(3):
        found = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), dout)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    check(wanted[1], across(dout), across(x.detach()).mT)
