"""Softmax and log-softmax against float64, forward and backward; torch's semantics."""

import math

import pytest
import torch
from torch import Tensor

from quack_core.errors import DTypeError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.ops.softmax.api import log_softmax, softmax
from quack_norm.ops.softmax.autograd import softmax_bwd, softmax_fwd

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan
PAIRS = [(softmax, torch.softmax), (log_softmax, torch.log_softmax)]
both = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["softmax", "log_softmax"])

SHAPES = [(3, 1), (5, 3), (17, 31), (70, 128), (9, 1000), (7, 1001), (3, 4095), (5, 4096)]
SHAPES += [(3, 5120), (2, 8191), (3, 16384), (2, 32000), (2, 50257), (2, 65536), (1, 131072)]
SHAPES += [(1, 151665), (2, 262144)]


def check(ours, torchs, x: Tensor, dout: Tensor, **how) -> None:
    """Result and gradient within the bound, torch's own float32 being the baseline."""
    scale = how.get("scale", 1.0)
    leaf = x.detach().requires_grad_()
    out = ours(leaf, **how)
    (dx,) = torch.autograd.grad(out, leaf, dout)
    exact = x.detach().double().requires_grad_()
    right = torchs(exact * scale, -1)
    (dright,) = torch.autograd.grad(right, exact, dout.double())
    plain = x.detach().float().requires_grad_()
    base = torchs(plain * scale, -1)
    (dbase,) = torch.autograd.grad(base, plain, dout.float())
    assert out.dtype == how.get("dtype", x.dtype) and out.is_contiguous()
    assert dx.dtype == x.dtype
    assert_accurate(out.detach(), right.detach(), base.detach().to(out.dtype), name="out")
    # the gradient is taken from the rounded result: torch's is, too
    saved = out.detach().double()
    sums = dout.double().sum(-1, keepdim=True)
    if ours is log_softmax:
        expected = (dout.double() - saved.exp() * sums) * scale
    else:
        expected = saved * (dout.double() - (dout.double() * saved).sum(-1, keepdim=True)) * scale
    size = (
        dright.abs().amax(-1, keepdim=True) + dout.double().abs().amax(-1, keepdim=True)
    ) * scale
    slack = torch.finfo(F32).eps * 16 * size.abs()
    error = (dx.double() - expected).abs()
    bound = torch.finfo(dx.dtype).eps * expected.abs() + slack + torch.finfo(dx.dtype).tiny
    assert (error <= bound).all(), float((error / bound).max())
    assert dbase.shape == dx.shape


@pytest.mark.exhaustive
@both
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_values_and_gradients(ours, torchs, shape, dtype, device: str) -> None:
    x = random(shape, dtype, device, seed=1, scale=3)
    check(ours, torchs, x, random(shape, dtype, device, seed=2))


@both
@pytest.mark.parametrize("layout", [key for key in Layout if key is not Layout.EXPANDED])
def test_layouts(ours, torchs, layout: Layout, device: str) -> None:
    x = random((7, 5, 264), BF16, device, seed=1, layout=layout)
    check(ours, torchs, x, random((7, 5, 264), BF16, device, seed=2, layout=layout))


@both
@pytest.mark.usefixtures("cuda")
def test_many_rows(ours, torchs) -> None:
    """More than a GPU has room for at once."""
    for shape in ((3001, 4096), (2999, 4097), (70, 32768), (35, 65537)):
        x = random(shape, BF16, "cuda", seed=1)
        check(ours, torchs, x, random(shape, BF16, "cuda", seed=2))


@both
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_every_dim(ours, torchs, dim: int, device: str) -> None:
    x = random((3, 4, 5), F32, device, seed=1).requires_grad_()
    dout = random((3, 4, 5), F32, device, seed=2)
    out = ours(x, dim)
    (dx,) = torch.autograd.grad(out, x, dout)
    exact = x.detach().double().requires_grad_()
    right = torchs(exact, dim)
    (dright,) = torch.autograd.grad(right, exact, dout.double())
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), dright, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("scale", [0.125, -2.0, 0.0])
def test_scale(ours, torchs, scale: float, device: str) -> None:
    x = random((5, 520), F32, device, seed=1)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    dout = random((5, 520), F32, device, seed=2)
    out, right = ours(leaf, scale=scale), torchs(exact * scale, -1)
    torch.testing.assert_close(out.double(), right, rtol=2e-6, atol=2e-6)
    (dx,) = torch.autograd.grad(out, leaf, dout)
    (dright,) = torch.autograd.grad(right, exact, dout.double())
    torch.testing.assert_close(dx.double(), dright, rtol=1e-5, atol=2e-6)


@both
@pytest.mark.parametrize("given", [F32, BF16, F16])
@pytest.mark.parametrize("wanted", [F32, BF16, F16])
def test_dtype_converts_the_input_first(ours, torchs, given, wanted, device: str) -> None:
    x = random((4, 96), given, device, seed=1, scale=4).requires_grad_()
    out = ours(x, dtype=wanted)
    expected = torchs(x.detach().to(wanted).double(), -1)
    assert out.dtype == wanted
    assert_accurate(out.detach(), expected, torchs(x.detach().to(wanted).float(), -1).to(wanted))
    out.backward(torch.ones_like(out))
    assert x.grad is not None and x.grad.dtype == given


def test_rows_add_up_to_one(device: str) -> None:
    """As far as one float32 sum allows: half an epsilon per addition of its longest chain, and 8."""
    for n in (7, 128, 1001, 4096, 50257):
        y = softmax(random((6, n), F32, device, seed=n, scale=5))
        sums = y.double().sum(-1)
        chain = (
            n / 16 if device == "cpu" else 64
        )  # torch adds 16 vectors; a thread of ours 32 values
        assert ((sums - 1).abs() <= torch.finfo(F32).eps * (8 + chain / 2)).all()


def test_ks_02_the_maximum_is_subtracted_first(device: str) -> None:
    x = torch.tensor([[0.0, 1.0, 0.0]], device=device) - 1e7
    torch.testing.assert_close(
        log_softmax(x).cpu(), torch.tensor([[-1.5514, -0.5514, -1.5514]]), rtol=0, atol=5e-5
    )
    torch.testing.assert_close(
        softmax(x).cpu(), torch.tensor([[0.2119, 0.5761, 0.2119]]), rtol=0, atol=5e-5
    )


def test_ks_03_every_width(device: str) -> None:
    for width in (*range(2, 72), *range(511, 530), *range(1010, 1030), 2047, 3001, 4095, 4096):
        y = softmax(torch.zeros(2, width, device=device))
        assert ((y - 1 / width).abs() <= 1e-6 / width).all(), width


@both
@pytest.mark.parametrize("n", [4, 129, 4096, 4097, 40000])
def test_ks_04_rows_that_are_not_finite(ours, torchs, n: int, device: str) -> None:
    x = random((6, n), F32, device, seed=1)
    x[0] = -INF
    x[1, n // 2] = INF
    x[2, 0] = NAN
    x[3, : n // 2] = -INF
    right = torchs(x.double(), -1)
    found = ours(x)
    assert torch.equal(found.isnan(), right.isnan())
    assert found[:3].isnan().all() and not found[3:].isnan().any()
    torch.testing.assert_close(found[3:].double(), right[3:], rtol=3e-6, atol=3e-6)


@both
@pytest.mark.parametrize("n", [3, 127, 32000, 65537])
@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-3])
def test_ks_14_what_pads_a_row_does_not_count(ours, torchs, scale, n: int, device: str) -> None:
    """Least numbers would be the largest after the scale, or like all others, or NaN."""
    x = torch.full((3, n), -40.0, device=device)
    right = torchs(x.double() * scale, -1)
    assert_accurate(ours(x, scale=scale), right, torchs(x * scale, -1))


@both
def test_nothing_and_little(ours, torchs, device: str) -> None:
    for shape in ((0, 4), (3, 0), (2, 0, 5)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        out = ours(x)
        assert out.shape == shape
        out.sum().backward()
        assert x.grad is not None and x.grad.shape == shape
    scalar = torch.tensor(3.0, device=device)
    assert torch.equal(ours(scalar, 0), torchs(scalar, 0))


@both
def test_the_input_is_left_alone(ours, torchs, device: str) -> None:
    x = random((5, 264), BF16, device, seed=1)
    before = x.clone()
    ours(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (DTypeError, "softmax: input is float64", lambda x: softmax(x.double())),
        (DTypeError, "softmax: input is list", lambda x: softmax([1.0])),
        (DTypeError, "softmax: dim is float", lambda x: softmax(x, 1.0)),
        (DTypeError, "log_softmax: dtype is int32", lambda x: log_softmax(x, dtype=torch.int32)),
        (DTypeError, "softmax: scale is Tensor", lambda x: softmax(x, scale=x.sum())),
        (
            ShapeError,
            "dim is 2, input has 2 dimensions: it must be -2 to 1",
            lambda x: softmax(x, 2),
        ),
        (
            UnsupportedError,
            r"input.shape\[1\] is 262145",
            lambda x: softmax(x.new_zeros(1, 262145)),
        ),
    ],
    ids=["float64", "a list", "dim", "dtype", "scale", "no such dim", "long"],
)
@pytest.mark.parametrize("place", ["device", "meta"])
def test_mistakes_are_explained(error, says, call, place: str, device: str) -> None:
    x = torch.zeros(2, 4, device=device if place == "device" else "meta")
    with pytest.raises(error, match=says):
        call(x)


def test_second_derivatives_raise(device: str) -> None:
    x = random((2, 8), F32, device, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("log", [False, True])
def test_the_operators_are_registered_rightly(log: bool, device: str) -> None:
    x = random((4, 40), F32, device, seed=1).requires_grad_()
    torch.library.opcheck(softmax_fwd, (x, log, 0.5, BF16))
    out, dout = softmax(x.detach()), random((4, 40), F32, device, seed=2)
    torch.library.opcheck(softmax_bwd, (out, dout, log, 0.5, F32))


def test_compile_whole_graph_with_dynamic_rows(device: str) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    def block(x: Tensor) -> Tensor:
        return log_softmax(softmax(x * 2, scale=0.5), 0)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for rows in (4, 5, 17):
        x = random((rows, 64), F32, device, seed=rows).requires_grad_()
        assert_bitwise(compiled(x).detach(), block(x).detach())


@both
def test_meta_gives_shapes(ours, torchs) -> None:
    out = ours(torch.empty(3, 5, 7, device="meta", dtype=BF16), 1, F32)
    assert (out.shape, out.dtype, out.device.type) == ((3, 5, 7), F32, "meta")


@both
def test_a_row_has_the_same_bits_in_every_batch(ours, torchs, cuda: str) -> None:
    for n in (128, 1000, 4096, 4097, 16384, 65536):
        x = random((2000, n), BF16, cuda, seed=n)
        whole = ours(x)
        for rows in (1, 7, 500):
            assert_bitwise(ours(x[:rows]), whole[:rows])
            assert_bitwise(ours(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("n", [4096, 4095])
def test_ks_01_more_than_2_31_elements(n: int, cuda: str) -> None:
    rows = 2**31 // n + 5
    if torch.cuda.mem_get_info()[0] < 3 * rows * n * 4:
        pytest.skip("needs 26 GB of free GPU memory")
    x = torch.randn(rows, n, device=cuda)
    y = softmax(x)
    sums = y[-5:].double().sum(-1)
    assert ((sums - 1).abs() <= 1e-6).all()
    assert_bitwise(y[-5:], softmax(x[-5:].clone()))
    del x, y
    torch.cuda.empty_cache()


def test_replays_of_a_graph(cuda: str) -> None:
    for n in (1000, 16384, 65536):
        x = random((300, n), BF16, cuda, seed=1)
        right = softmax(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = softmax(x)
        for _ in range(5):
            out.zero_()
            graph.replay()
            assert_bitwise(out, right)
