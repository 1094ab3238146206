"""The modules: torch's signature and state, and what comes on top."""

import copy
import inspect
import pickle

import pytest
import torch
from rmsnorm_oracle import BF16, F16, F32

from quack_core.errors import ShapeError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_norm.nn import QuackRMSNorm, RMSNorm
from quack_norm.ops.rmsnorm.api import rmsnorm


def test_signature_begins_as_torchs() -> None:
    ours = list(inspect.signature(RMSNorm).parameters.values())
    theirs = list(inspect.signature(torch.nn.RMSNorm).parameters.values())
    for mine, yours in zip(ours, theirs, strict=False):
        assert (mine.name, mine.default, mine.kind) == (yours.name, yours.default, yours.kind)
    assert {p.kind for p in ours[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


def test_the_example_of_the_contract(device: str) -> None:
    rms_norm = QuackRMSNorm(dim=512).to(device)
    output = rms_norm(torch.randn(16, 1024, 512, device=device))
    assert output.shape == (16, 1024, 512)
    assert abs(float(output.square().mean()) - 1) < 1e-3


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_eps_means_what_torch_means(eps: float | None, dtype: torch.dtype, device: str) -> None:
    """A row far below one shows which eps was taken: four standard ones differ by factors."""
    x = random((5, 64), dtype, device, seed=1, scale=1e-3)
    theirs = torch.nn.RMSNorm(64, eps, device=device, dtype=dtype)
    ours = RMSNorm(64, eps, device=device, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))


def test_state_goes_both_ways() -> None:
    theirs, ours = torch.nn.RMSNorm(64), RMSNorm(64)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert_bitwise(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, torch.nn.RMSNorm)


def test_several_dimensions(device: str) -> None:
    shape = (3, 4, 16)
    module = RMSNorm(shape[1:], eps=1e-5, bias=True, device=device)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x, r = (random(shape, F32, device, seed=seed) for seed in (1, 2))
    y, h = module(x, r, prenorm=True)
    flat = rmsnorm(
        x.view(3, 64),
        module.weight.view(64),
        module.bias.view(64),
        residual=r.view(3, 64),
        eps=1e-5,
    )
    assert_bitwise(y, flat.view(shape))
    assert_bitwise(h, x + r)
    assert module(x).shape == shape


def test_options_reach_the_function(device: str) -> None:
    module = RMSNorm(
        64, 1e-5, device=device, weight_offset=1.0, out_dtype=F16, residual_dtype=F32, bias=True
    )
    assert float(module.weight.abs().max()) == 0  # the scale starts at one
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x, r = (random((5, 64), BF16, device, seed=seed) for seed in (1, 2))
    expected = rmsnorm(
        x,
        module.weight,
        module.bias,
        residual=r,
        eps=1e-5,
        weight_offset=1.0,
        prenorm=True,
        out_dtype=F16,
        residual_dtype=F32,
    )
    for a, b in zip(module(x, r, True), expected, strict=True):
        assert_bitwise(a, b)
    assert [t.dtype for t in expected] == [F16, F32]


def test_without_parameters(device: str) -> None:
    module = RMSNorm(64, elementwise_affine=False, device=device)
    assert list(module.parameters()) == []
    x = random((5, 64), F32, device, seed=1)
    assert_bitwise(module(x), rmsnorm(x, eps=torch.finfo(F32).eps))


def test_gradients_reach_the_parameters(device: str) -> None:
    module = RMSNorm(64, bias=True, device=device)
    module(random((5, 64), BF16, device, seed=1)).float().square().sum().backward()
    assert float(module.weight.grad.abs().min()) > 0
    assert float(module.bias.grad.abs().min()) > 0


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(again: object) -> None:
    module = QuackRMSNorm(64, bias=True, weight_offset=1.0, out_dtype=BF16)
    twin = again(module)  # type: ignore[operator]
    x = torch.randn(3, 64)
    assert_bitwise(twin(x), module(x))
    assert repr(twin) == repr(module)


def test_repr_names_what_differs() -> None:
    text = repr(QuackRMSNorm(64, bias=True, weight_offset=1.0, residual_dtype=F32))
    assert text.startswith("QuackRMSNorm((64,), eps=1e-06, elementwise_affine=True")
    assert "bias=True, weight_offset=1.0, residual_dtype=torch.float32" in text
    assert "bias" not in repr(RMSNorm(64))


def test_wrong_shape() -> None:
    with pytest.raises(ShapeError, match=r"shape \(3, 32\).*\(64,\)"):
        RMSNorm(64, elementwise_affine=False)(torch.zeros(3, 32))
