"""The modules: torch's signature and state, and what comes on top."""

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from rmsnorm_oracle import BF16, F16, F32
from torch import Tensor

from quack_core.errors import ShapeError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_norm.nn import LayerNorm, QuackRMSNorm, RMSNorm
from quack_norm.ops.layernorm.api import layernorm
from quack_norm.ops.rmsnorm.api import rmsnorm

BOTH = [(RMSNorm, rmsnorm), (LayerNorm, layernorm)]
both = pytest.mark.parametrize(("kind", "function"), BOTH, ids=["rmsnorm", "layernorm"])


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_signature_begins_as_torchs(kind: type) -> None:
    ours = list(inspect.signature(kind).parameters.values())
    theirs = list(inspect.signature(getattr(torch.nn, kind.__name__)).parameters.values())
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


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("shape", [64, (4, 16)], ids=str)
def test_layernorm_is_torchs(shape: object, options: dict[str, bool], device: str) -> None:
    theirs = torch.nn.LayerNorm(shape, 1e-3, device=device, **options)  # type: ignore[arg-type]
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = LayerNorm(shape, 1e-3, device=device, **options)  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    x = random((5, 4, 16), F32, device, seed=1).view(5, *ours.normalized_shape)
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours).startswith(repr(theirs)[:-1])


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_state_goes_both_ways(kind: type) -> None:
    theirs, ours = getattr(torch.nn, kind.__name__)(64), kind(64)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_bitwise(mine, yours)
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, type(theirs))


@both
def test_several_dimensions(kind: type, function: Callable[..., Tensor], device: str) -> None:
    shape = (3, 4, 16)
    module = kind(shape[1:], eps=1e-5, bias=True, device=device)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x, r = (random(shape, F32, device, seed=seed) for seed in (1, 2))
    y, h = module(x, r, prenorm=True)
    flat = function(
        x.view(3, 64),
        module.weight.view(64),
        module.bias.view(64),
        residual=r.view(3, 64),
        eps=1e-5,
    )
    assert_bitwise(y, flat.view(shape))
    assert_bitwise(h, x + r)
    assert module(x).shape == shape


@both
def test_options_reach_the_function(
    kind: type, function: Callable[..., Tensor], device: str
) -> None:
    offset = {"weight_offset": 1.0} if kind is RMSNorm else {}
    module = kind(64, 1e-3, device=device, out_dtype=F16, residual_dtype=F32, bias=True, **offset)
    start = 0 if offset else 1
    assert torch.equal(module.weight, torch.full_like(module.weight, start))  # the scale is one
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x, r = (random((5, 64), BF16, device, seed=seed) for seed in (1, 2))
    expected = function(
        x,
        module.weight,
        module.bias,
        residual=r,
        eps=1e-3,
        prenorm=True,
        out_dtype=F16,
        residual_dtype=F32,
        **offset,
    )
    for a, b in zip(module(x, r, True), expected, strict=True):
        assert_bitwise(a, b)
    assert [t.dtype for t in expected] == [F16, F32]


def test_without_parameters(device: str) -> None:
    module = RMSNorm(64, elementwise_affine=False, device=device)
    assert list(module.parameters()) == []
    x = random((5, 64), F32, device, seed=1)
    assert_bitwise(module(x), rmsnorm(x, eps=torch.finfo(F32).eps))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_gradients_reach_the_parameters(kind: type, device: str) -> None:
    module = kind(64, bias=True, device=device)
    module(random((5, 64), BF16, device, seed=1)).float().pow(3).sum().backward()
    assert float(module.weight.grad.abs().min()) > 0
    assert float(module.bias.grad.abs().min()) > 0


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize(
    "module",
    [
        QuackRMSNorm(64, bias=True, weight_offset=1.0, out_dtype=BF16),
        LayerNorm(64, bias=False, out_dtype=BF16),
    ],
    ids=["rmsnorm", "layernorm"],
)
def test_copies(module: torch.nn.Module, again: object) -> None:
    twin = again(module)  # type: ignore[operator]
    x = torch.randn(3, 64)
    assert_bitwise(twin(x), module(x))
    assert repr(twin) == repr(module)


def test_repr_names_what_differs() -> None:
    text = repr(QuackRMSNorm(64, bias=True, weight_offset=1.0, residual_dtype=F32))
    assert text.startswith("QuackRMSNorm((64,), eps=1e-06, elementwise_affine=True")
    assert "bias=True, weight_offset=1.0, residual_dtype=torch.float32" in text
    assert "bias" not in repr(RMSNorm(64))
    text = repr(LayerNorm(64, bias=False, out_dtype=F16))
    assert text.startswith("LayerNorm((64,), eps=1e-05, elementwise_affine=True")
    assert text.endswith("bias=False, out_dtype=torch.float16)")


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_wrong_shape(kind: type) -> None:
    with pytest.raises(ShapeError, match=rf"{kind.__name__}: x has shape \(3, 32\).*\(64,\)"):
        kind(64, elementwise_affine=False)(torch.zeros(3, 32))
