"""What is refused, and what the message says: the same on the CPU, on CUDA and for meta tensors."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rmsnorm_oracle import BF16, F16, F32
from torch._subclasses import FakeTensorMode

import quack_norm
from quack_core.arch import ARCHS, SM90, SM120
from quack_core.errors import (
    DeviceError,
    DTypeError,
    LayoutError,
    QuackError,
    ShapeError,
    UnsupportedError,
)
from quack_norm.ops.rmsnorm.api import rmsnorm
from quack_norm.ops.rmsnorm.bwd_rules import default_bwd
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.rules import default_fwd
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec


@dataclass(frozen=True)
class Mistake:
    """Wrong operands. ``call`` gets a function that makes tensors on the device under test."""

    why: str
    error: type[QuackError]
    says: str
    call: Callable[[Callable[..., Any]], Any]


MISTAKES = [
    Mistake("no tensor", DTypeError, "x is list", lambda t: rmsnorm([1.0])),  # type: ignore[arg-type]
    Mistake("nothing", DTypeError, "x is NoneType", lambda t: rmsnorm(None)),  # type: ignore[arg-type]
    Mistake(
        "x float64",
        DTypeError,
        "x is float64: it must be one of float32, bfloat16, float16",
        lambda t: rmsnorm(t(4, 64, dtype=torch.float64)),
    ),
    Mistake("x int", DTypeError, "x is int32", lambda t: rmsnorm(t(4, 64, dtype=torch.int32))),
    Mistake(
        "weight int",
        DTypeError,
        "weight is int64",
        lambda t: rmsnorm(t(4, 64), t(64, dtype=torch.int64)),
    ),
    Mistake(
        "out_dtype",
        DTypeError,
        "out_dtype is float8_e4m3fn",
        lambda t: rmsnorm(t(4, 64), out_dtype=torch.float8_e4m3fn),
    ),
    Mistake(
        "residual_dtype",
        DTypeError,
        "residual_dtype is int32",
        lambda t: rmsnorm(t(4, 64), prenorm=True, residual_dtype=torch.int32),
    ),
    Mistake("no dimension", ShapeError, "x has no dimension", lambda t: rmsnorm(t())),
    Mistake(
        "weight too short",
        ShapeError,
        r"weight.shape\[-1\] is 32, x.shape\[-1\] is 64",
        lambda t: rmsnorm(t(4, 64), t(32)),
    ),
    Mistake(
        "weight of one element is not broadcast",
        ShapeError,
        r"weight.shape\[-1\] is 1",
        lambda t: rmsnorm(t(4, 64), t(1)),
    ),
    Mistake(
        "heads",
        ShapeError,
        r"weight.shape\[-2\] is 5, x.shape\[-2\] is 3",
        lambda t: rmsnorm(t(4, 3, 64), t(5, 64)),
    ),
    Mistake(
        "weight of three dimensions",
        ShapeError,
        "weight has 3 dimensions",
        lambda t: rmsnorm(t(4, 3, 64), t(4, 3, 64)),
    ),
    Mistake(
        "weight of more dimensions than x",
        ShapeError,
        "weight has 2 dimensions",
        lambda t: rmsnorm(t(64), t(1, 64)),
    ),
    Mistake(
        "bias per head, weight shared",
        ShapeError,
        r"bias has shape \(3, 64\)",
        lambda t: rmsnorm(t(4, 3, 64), t(64), t(3, 64)),
    ),
    Mistake(
        "bias",
        ShapeError,
        r"bias.shape\[-1\] is 63",
        lambda t: rmsnorm(t(4, 64), None, t(63)),
    ),
    Mistake(
        "residual of another shape",
        ShapeError,
        r"residual.shape\[0\] is 1, x.shape\[0\] is 4.*expand",
        lambda t: rmsnorm(t(4, 64), residual=t(1, 64)),
    ),
    Mistake(
        "residual with the same number of elements",
        ShapeError,
        "residual has 2 dimensions, x has 4",
        lambda t: rmsnorm(t(2, 2, 2, 64), residual=t(8, 64)),
    ),
    Mistake(
        "residual with other dimensions, four of them",
        ShapeError,
        r"residual.shape\[1\] is 3",
        lambda t: rmsnorm(t(2, 2, 3, 64), residual=t(2, 3, 2, 64)),
    ),
    Mistake(
        "out of another shape",
        ShapeError,
        r"out.shape\[0\] is 5.*not resized",
        lambda t: rmsnorm(t(4, 64), out=t(5, 64)),
    ),
    Mistake(
        "out of another dtype than asked for",
        DTypeError,
        "out is float32, out_dtype is bfloat16",
        lambda t: rmsnorm(t(4, 64), out=t(4, 64), out_dtype=BF16),
    ),
    Mistake(
        "eps as a tensor",
        DTypeError,
        "eps is Tensor.*item",
        lambda t: rmsnorm(t(4, 64), eps=torch.tensor(1e-6)),  # type: ignore[arg-type]
    ),
    Mistake(
        "no eps",
        DTypeError,
        "eps is NoneType",
        lambda t: rmsnorm(t(4, 64), eps=None),  # type: ignore[arg-type]
    ),
    Mistake(
        "offset as a tensor",
        DTypeError,
        "weight_offset is Tensor",
        lambda t: rmsnorm(t(4, 64), t(64), weight_offset=torch.tensor(1.0)),  # type: ignore[arg-type]
    ),
    Mistake(
        "KN-17 rows too long",
        UnsupportedError,
        "262145.*at most 262144",
        lambda t: rmsnorm(t(1, 262145)),
    ),
]


@pytest.mark.parametrize("place", ["device", "meta"])
@pytest.mark.parametrize("again", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.why.replace(" ", "_"))
def test_mistakes_are_explained(mistake: Mistake, again: bool, place: str, device: str) -> None:
    """Warm: a right call of the same kind came before, so that a launcher is already there."""

    def make(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device if place == "device" else place)

    if again:
        for x in (make(4, 64), make(4, 3, 64), make(2, 2, 3, 64), make(64)):
            rmsnorm(x, residual=make(*x.shape))
            rmsnorm(x, make(64))
            rmsnorm(x, make(64), make(64))
            rmsnorm(x, out=make(*x.shape))
        rmsnorm(make(4, 3, 64), make(3, 64))
    with torch.no_grad(), pytest.raises(mistake.error, match=mistake.says):
        mistake.call(make)


@pytest.mark.parametrize("name", ["weight", "bias", "residual", "out"])
def test_kl_02_mixed_devices_raise(name: str, device: str) -> None:
    shape = (64,) if name in ("weight", "bias") else (4, 64)
    other = torch.zeros(shape, device="meta")
    with pytest.raises(DeviceError, match=f"{name} is on meta.*must be on one device"):
        rmsnorm(torch.zeros(4, 64, device=device), **{name: other})


def test_kl_02_cpu_weight_for_a_cuda_tensor(cuda: str) -> None:
    with pytest.raises(DeviceError, match="weight is on cpu, x on cuda"):
        rmsnorm(torch.zeros(4, 64, device=cuda), torch.zeros(64))


def test_errors_are_the_builtin_kinds() -> None:
    x = torch.zeros(4, 64)
    with pytest.raises(ValueError):
        rmsnorm(x, torch.zeros(32))
    with pytest.raises(TypeError):
        rmsnorm(x.double())
    with pytest.raises(NotImplementedError):
        rmsnorm(torch.zeros(1, 262145))


def test_kc_07_numbers_of_every_kind(device: str) -> None:
    """Sizes never enter a key, and numbers of other libraries are numbers."""
    numpy = pytest.importorskip("numpy")
    x = torch.ones(4, 64, dtype=F16, device=device)
    expected = rmsnorm(x, eps=0.5, weight_offset=1.0)
    assert torch.equal(rmsnorm(x, eps=numpy.float32(0.5), weight_offset=1), expected)


def test_kc_07_one_launcher_for_all_batches(cuda: str) -> None:
    from quack_norm.ops.rmsnorm import launch

    w = torch.ones(72, device=cuda)
    rmsnorm(torch.ones(1, 72, device=cuda), w)
    before = len(launch._forward)
    for rows in range(2, 52):
        rmsnorm(torch.ones(rows, 72, device=cuda), w)
    assert len(launch._forward) == before


def test_kl_10_every_public_name_with_the_fewest_arguments(device: str) -> None:
    x = torch.ones(2, 64, device=device)
    even = torch.full_like(x, 1 / 64)
    found = {
        "rmsnorm": (quack_norm.rmsnorm(x), x),
        "RMSNorm": (quack_norm.RMSNorm(64).to(device)(x), x),
        "QuackRMSNorm": (quack_norm.QuackRMSNorm(64).to(device)(x), x),
        "layernorm": (quack_norm.layernorm(x), torch.zeros_like(x)),
        "LayerNorm": (quack_norm.LayerNorm(64).to(device)(x), torch.zeros_like(x)),
        "softmax": (quack_norm.softmax(x), even),
        "log_softmax": (quack_norm.log_softmax(x), even.log()),
        "cross_entropy": (
            quack_norm.cross_entropy(x, torch.tensor([3, 5], device=device)),
            -even[0, 0].log(),
        ),
        "cross_entropy_from_lse": (
            quack_norm.cross_entropy_from_lse(x, x[:, 0], torch.tensor([3, 5], device=device)),
            -even[0, 0].log(),
        ),
        "topk": (quack_norm.topk(x, 2)[0], x[:, :2]),
    }
    assert set(found) == {name for name in quack_norm.__all__ if not name.startswith("_")}
    for name, (out, wanted) in found.items():
        torch.testing.assert_close(out, wanted, msg=name)


LONG = [8192, 16384, 32768, 65536, 131072, 262144, 262139]


@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kn_18_long_rows_fit_every_architecture(n: int, dtype: str) -> None:
    """Shared memory within the limit, or an error that says so before anything is compiled."""
    align = 16 if n % 8 == 0 else 2 if dtype == "bfloat16" else 4
    operands = {"x": dtype, "weight": "float32", "align": align}
    forward = RMSNormFwdSpec(n, out=dtype, rstd=True, **operands)
    backward = RMSNormBwdSpec(n, dout=dtype, dx=dtype, dweight=True, **operands)
    for arch in ARCHS:
        for choose, spec in ((default_fwd, forward), (default_bwd, backward)):
            try:
                config = choose(spec, arch)  # type: ignore[operator]
            except UnsupportedError as error:
                assert f"n={n}" in str(error)
                assert arch.name in str(error)
            else:
                assert config.smem_bytes(spec) <= arch.smem_bytes
                assert config.cluster <= arch.max_cluster
    assert default_fwd(forward, SM90).num_threads <= SM90.max_threads
    assert default_bwd(backward, SM90).num_threads <= SM90.max_threads


@pytest.mark.parametrize("dbias", ["float32", None])
def test_kn_18_limit_of_the_backward_on_sm120(dbias: str | None) -> None:
    """The one that the documentation names."""
    n = 131072
    operands = {"x": "bfloat16", "dout": "bfloat16", "dx": "bfloat16", "weight": "float32"}
    fits, too_long = (
        RMSNormBwdSpec(size, dweight=True, dbias=dbias, **operands) for size in (n, n + 8)
    )
    assert default_bwd(fits, SM120).smem_bytes(fits) <= SM120.smem_bytes
    with pytest.raises(UnsupportedError, match=f"n={n + 8} on sm120.*use shorter rows"):
        default_bwd(too_long, SM120)


def test_kn_17_too_many_rows() -> None:
    most = 2**31 - 2**21
    assert rmsnorm(torch.zeros(1, 1, device="meta").expand(most, 1)).shape == (most, 1)
    with pytest.raises(UnsupportedError, match=f"x has {most + 1} rows.*{most}.*split the batch"):
        rmsnorm(torch.zeros(1, 1, device="meta").expand(most + 1, 1))


@pytest.mark.parametrize("place", ["device", "meta"])
def test_kn_17_too_many_heads_for_the_backward(place: str, device: str) -> None:
    """They lie along a dimension of the grid that ends there; the forward has them with its rows."""
    place = device if place == "device" else place
    for heads in (65535, 65536):
        x = torch.ones(1, heads, 1, device=place, requires_grad=True)
        y = rmsnorm(x, torch.ones(heads, 1, device=place))
        assert y.shape == x.shape
        if heads == 65535:
            y.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
        else:
            with pytest.raises(
                UnsupportedError, match=r"\[-2\] is 65536; .*at most 65535 heads.*split"
            ):
                y.sum().backward()
    shared = torch.ones(1, 65536, 1, device=place, requires_grad=True)
    rmsnorm(shared, torch.ones(1, device=place)).sum().backward()
    assert shared.grad is not None


IMPORT = """
import sys, torch
import quack_norm, quack_norm.nn
quack_norm.rmsnorm
loaded = [m for m in ("cutlass", "torch._dynamo", "triton") if m in sys.modules]
print(loaded, torch.cuda.is_initialized())
quack_norm.rmsnorm(torch.ones(2, 8, requires_grad=True)).sum().backward()
print([m for m in ("cutlass", "torch._dynamo", "triton") if m in sys.modules])
"""


def test_kl_05_kl_06_import_loads_nothing_and_the_cpu_works() -> None:
    found = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["[] False", "[]"]


def test_other_memory_than_x_goes_with_prenorm_in_fake_mode() -> None:
    with FakeTensorMode(), torch.no_grad():
        x, out = torch.empty(3, 64), torch.empty(3, 64)
        y, h = rmsnorm(x, prenorm=True, out=out)
    assert y is out and h.shape == x.shape


def test_out_must_not_destroy_the_second_result(device: str) -> None:
    """Without residual and change of dtype h is x itself, which out= would overwrite."""
    x = torch.randn(3, 64, device=device)
    before = x.clone()
    with torch.no_grad(), pytest.raises(LayoutError, match="out is x, which prenorm=True returns"):
        rmsnorm(x, prenorm=True, out=x)
    assert torch.equal(x, before)
    with torch.no_grad():
        out, h = rmsnorm(x, prenorm=True, out=x, residual_dtype=torch.bfloat16)
    assert out is x and torch.equal(h, before.bfloat16())


def test_residual_dtype_is_checked_where_it_has_no_effect(device: str) -> None:
    with pytest.raises(DTypeError, match="int8"):
        rmsnorm(torch.randn(3, 64, device=device), residual_dtype=torch.int8)
