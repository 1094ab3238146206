"""Top-k against a stable sort, bit for bit; its softmax and gradients against float64.

Names carry the ids of known faults of the field.
"""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quack_core.errors import DTypeError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.ops.topk import reference
from quack_norm.ops.topk.api import topk
from quack_norm.ops.topk.autograd import topk_bwd, topk_fwd

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN, TINY = math.inf, math.nan, 2.0**-149
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])

# rows in parts of a warp, in a warp, of one piece and more; k of one run and many, all of a row
SIZES = [(1, 1), (2, 1), (3, 2), (5, 5), (7, 3), (8, 2), (9, 1), (16, 4), (31, 31), (33, 8)]
SIZES += [(64, 6), (64, 64), (100, 40), (128, 8), (255, 17), (256, 128), (256, 2), (300, 300)]
SIZES += [(511, 100), (512, 1), (512, 512), (513, 7), (1000, 1), (1000, 999), (1024, 64)]
SIZES += [(2049, 128), (4095, 2), (4096, 4096), (5120, 1025), (16383, 33), (16385, 256)]
SIZES += [(160, 8), (512, 40), (2048, 100), (4096, 64), (8192, 8), (8200, 128), (131072, 100)]
SIZES += [(32000, 50), (50257, 1024), (65537, 8), (128256, 2048), (262144, 64), (262144, 4096)]


def judge(x: Tensor, k: int) -> None:
    """Indices as the sort has them, and values that are those elements in every bit."""
    values, indices = topk(x, k)
    assert (values.dtype, indices.dtype) == (x.dtype, torch.int64)
    assert values.shape == indices.shape == (*x.shape[:-1], k)
    assert values.is_contiguous() and indices.is_contiguous()
    right = reference.forward(x.cpu(), k, False)[1]
    assert torch.equal(indices.cpu(), right)
    assert_bitwise(values, torch.gather(x, -1, indices))


@pytest.mark.exhaustive
@every_dtype
def test_n_20_500_random_rows(dtype: torch.dtype, device: str) -> None:
    """The size at which packing an index into the value gave wrong ones in 235 of 500 rows."""
    judge(random((500, 256), dtype, device, seed=1), 128)


@pytest.mark.exhaustive
@every_dtype
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_sizes(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    for shift in (-5.0, 0.0, 5.0) if n < 10000 else (0.0,):
        judge(random((3, n), dtype, device, seed=n, shift=shift), k)


@pytest.mark.exhaustive
@every_dtype
@pytest.mark.parametrize(("n", "k"), [(8, 2), (256, 8), (1024, 64), (4097, 300)])
def test_many_rows(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    rows = 1001 if device == "cuda" else 67  # the reference has no CTAs among which to divide them
    judge(random((rows, n), dtype, device, seed=2), k)


@every_dtype
@pytest.mark.parametrize(
    ("n", "k"),
    [(16, 8), (200, 77), (512, 511), (1024, 64), (8192, 100), (3000, 200), (70000, 4096)],
)
def test_ks_19_ties_go_to_the_smaller_index(
    n: int, k: int, dtype: torch.dtype, device: str
) -> None:
    """Rows of one value, of few, and with ties at both sides of the k-th."""
    equal = torch.full((2, n), 2.5, dtype=dtype, device=device)
    assert topk(equal, k)[1].tolist() == [list(range(k))] * 2
    generator = torch.Generator().manual_seed(3)
    few = torch.randint(-2, 3, (5, n), generator=generator).to(dtype).to(device)
    judge(few, k)
    fewer = few.clamp(max=0)
    fewer[:, n // 2 : n // 2 + k // 2] = 1  # a half of k above the tie
    judge(fewer, k)
    judge(torch.where(few > 1, -0.0, 0.0).to(dtype), k)


@every_dtype
@pytest.mark.parametrize("n", [40, 2000])
def test_ks_19_rows_of_nan(n: int, dtype: torch.dtype, device: str) -> None:
    """Unique indices, in order, whatever the NaN's sign and payload, which the values keep."""
    values, indices = topk(torch.full((2, n), NAN, dtype=dtype, device=device), 8)
    assert indices.tolist() == [list(range(8))] * 2 and values.isnan().all()
    integer = torch.int32 if dtype == F32 else torch.int16
    infinity = torch.tensor([INF], dtype=dtype).view(integer).item()
    lowest = torch.iinfo(integer).min
    payloads = [infinity + 1, infinity, lowest + infinity + 1, 0, -1, lowest, infinity + 5]
    x = torch.zeros(n, dtype=integer)
    x[: len(payloads)] = torch.tensor(payloads)
    x = x.view(dtype).to(device)
    assert topk(x, 6)[1].tolist() == [0, 2, 4, 6, 1, 3]
    assert torch.equal(topk(x, 6)[0].view(integer), x[[0, 2, 4, 6, 1, 3]].view(integer))


@pytest.mark.exhaustive
@every_dtype
@pytest.mark.parametrize(("n", "k"), [(24, 1), (24, 5), (24, 24), (513, 12), (3000, 2999)])
def test_extremes_in_any_order(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    """NaN, infinities, zeros of both signs and subnormals, each of them often."""
    extremes = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, TINY, -TINY, 6e4, -6e4, 2.0**-126]
    generator = torch.Generator().manual_seed(5)
    chosen = torch.randint(0, len(extremes), (40, n), generator=generator)
    judge(torch.tensor(extremes)[chosen].to(dtype).to(device), k)


@pytest.mark.exhaustive
@every_dtype
@pytest.mark.parametrize(("n", "k"), [(256, 128), (300, 7), (5000, 600), (65536, 100)])
def test_any_bits(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    integer = torch.int32 if dtype == F32 else torch.int16
    limits = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(6)
    bits = torch.randint(limits.min, limits.max + 1, (7, n), generator=generator)
    judge(bits.to(integer).view(dtype).to(device), k)


@pytest.mark.exhaustive
@every_dtype
@pytest.mark.parametrize("n", [200, 5000])
def test_values_that_share_their_upper_bits(n: int, dtype: torch.dtype, device: str) -> None:
    """Digit after digit leaves all of them; the last ones decide."""
    integer = torch.int32 if dtype == F32 else torch.int16
    one = torch.ones(1, dtype=dtype).view(integer)
    generator = torch.Generator().manual_seed(7)
    low = torch.randint(0, 8, (4, n), generator=generator).to(integer)
    judge((one + low).view(dtype).to(device), n // 3)
    judge(-(one + low).view(dtype).to(device), n // 3)


def test_masked_logits_give_distinct_indices(device: str) -> None:
    """More elements wanted than are finite: -inf is an element like others."""
    for n in (64, 50257):
        x = torch.full((3, n), -INF, device=device)
        x[:, 40], x[1, 7], x[2, 63] = 1.0, INF, -1.0
        judge(x, 16)
        assert all(len(set(row)) == 16 for row in topk(x, 16)[1].tolist())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
@pytest.mark.parametrize("shape", [(5, 33), (7, 5, 264), (2, 1, 2, 33), (3, 2000)], ids=str)
def test_any_rank_and_strides(shape: tuple[int, ...], layout: Layout, device: str) -> None:
    for dtype in (F32, BF16):
        x = random(shape, dtype, device, seed=8, layout=layout)
        before = x.clone()
        judge(x, 9)
        assert_bitwise(x, before)


@pytest.mark.exhaustive
@every_dtype
@pytest.mark.parametrize("n", [40, 1000, 1001, 1024, 9000])
def test_rows_that_begin_anywhere(n: int, dtype: torch.dtype, device: str) -> None:
    """Elements around the rows are larger than all of theirs, and are never taken."""
    memory = torch.full((5 * n + 40,), INF, dtype=dtype, device=device)
    for offset in range(9):
        x = memory[offset : offset + 3 * (n + 7)].view(3, n + 7)[:, :n]
        x.copy_(random((3, n), dtype, device, seed=offset))
        judge(x, 11)
        assert_bitwise(topk(x, 11, True)[0], topk(x.clone(), 11, True)[0])
        memory.fill_(INF)


def test_one_row_and_none(device: str) -> None:
    assert topk(torch.tensor([1.0, 3.0, 2.0], device=device), 2)[1].tolist() == [1, 2]
    for shape in ((0, 8), (3, 0, 8), (0, 1000)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        for softmax in (False, True):
            values, indices = topk(x, 4, softmax)
            assert values.shape == indices.shape == (*shape[:-1], 4)
            assert torch.autograd.grad(values.sum(), x)[0].shape == shape


@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
@pytest.mark.parametrize(("n", "k"), [(40, 7), (3, 2), (1, 1), (9001, 300), (20000, 4096)])
def test_the_gradient_goes_to_the_indices(n: int, k: int, layout: Layout, device: str) -> None:
    """Zeros elsewhere; with rows that share a tile of the gradient, and rows over several tiles."""
    for dtype, kind in ((BF16, BF16), (F32, F32)):
        x = random((6, n), dtype, device, seed=9).requires_grad_()
        dvalues = random((6, k), kind, device, seed=10, layout=layout)
        values, indices = topk(x, k)
        (dx,) = torch.autograd.grad(values, x, dvalues)
        zeros = torch.zeros(6, n, dtype=dtype, device=device)
        assert_bitwise(dx, zeros.scatter(-1, indices, dvalues.to(dtype)))


def test_gradients_of_many_rows_and_dtypes(device: str) -> None:
    """The dtypes of a gradient, of the values and of x are independent."""
    for given in (F32, BF16, F16):
        for dtype in (F32, BF16, F16):
            x = random((1003, 17), dtype, device, seed=11)
            _, indices = topk(x, 5)
            dvalues = random((1003, 5), given, device, seed=12)
            zeros = torch.zeros(1003, 17, dtype=dtype, device=device)
            dx = topk_bwd(dvalues, indices, None, 17, dtype)
            assert_bitwise(dx, zeros.scatter(-1, indices, dvalues.to(dtype)))


@every_dtype
@pytest.mark.parametrize(
    ("n", "k"), [(5, 1), (8, 2), (9, 9), (64, 8), (256, 128), (512, 512), (5000, 40), (20000, 4096)]
)
def test_softmax_and_its_gradient(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    """As accurate as torch's in the same dtype, whose gradient starts from rounded values, too."""
    x = random((12, n), dtype, device, seed=13, scale=3.0)
    dvalues = random((12, k), dtype, device, seed=14)
    leaf = x.clone().requires_grad_()
    values, indices = topk(leaf, k, True)
    assert_bitwise(indices, topk(x, k)[1])
    (dx,) = torch.autograd.grad(values, leaf, dvalues)
    values = values.detach()
    right, base = {}, {}
    for kind, into in ((torch.float64, right), (dtype, base)):
        wide = x.to(kind).requires_grad_()
        into["values"] = wide.gather(-1, indices).softmax(-1)
        (into["dx"],) = torch.autograd.grad(into["values"], wide, dvalues.to(kind))
    baseline = x.float().gather(-1, indices).softmax(-1).to(dtype)
    assert_accurate(values, right["values"].detach(), baseline, name="values")
    if dtype != F32:  # there a few ulps of the values, judged above, are all that differs
        assert_accurate(dx, right["dx"], base["dx"], name="dx")

    def from_saved(kind: torch.dtype) -> Tensor:
        p, dp = values.to(kind), dvalues.to(kind)
        return p * (dp - (p * dp).sum(-1, keepdim=True))

    p, size = values.double(), dvalues.double().abs()
    terms = p * (size + (p * size).sum(-1, keepdim=True))
    exact, plain = from_saved(torch.float64), from_saved(F32).to(dtype)
    how = {"kind": "columns", "terms": terms, "name": "dx from the values"}
    assert_accurate(dx.gather(-1, indices), exact, plain, **how)
    assert_bitwise(dx, torch.zeros_like(dx).scatter(-1, indices, dx.gather(-1, indices)))
    if k == 1:
        assert_bitwise(values, torch.ones_like(values))
        assert_bitwise(dx.abs(), torch.zeros_like(dx))


def test_ks_02_softmax_far_from_zero(device: str) -> None:
    x = torch.tensor([[0.0, 1.0, 0.0, -9.0]], device=device) - 1e7
    expected = [1 / (1 + 2 / math.e), 1 / (2 + math.e), 1 / (2 + math.e)]
    found = topk(x, 3, True)[0].double().cpu()
    assert abs(found - torch.tensor([expected]).double()).max() <= 4 * torch.finfo(F32).eps


@pytest.mark.parametrize("n", [4, 2000])
def test_ks_04_softmax_of_infinite_and_nan_rows(n: int, device: str) -> None:
    """NaN across such a row, neighbours untouched; -inf among numbers is zero."""
    rows = [[-INF] * 4, [1, INF, 0, 2], [1, NAN, 0, 2], [-INF, 0, -INF, -INF], [1, 1, -INF, -9]]
    x = torch.full((5, n), -INF, device=device)
    x[:, :4] = torch.tensor(rows)
    values, indices = topk(x, 2, True)
    assert values[:3].isnan().all()
    assert values[3:].tolist() == [[1, 0], [0.5, 0.5]]
    assert indices.tolist() == [[0, 1], [1, 3], [1, 3], [1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("n", "k"), [(8, 2), (100, 40), (256, 128), (4096, 64), (9001, 300), (50257, 4096)]
)
def test_kn_15_rows_do_not_depend_on_the_batch(n: int, k: int, device: str) -> None:
    x, dvalues = random((40, n), F32, device, seed=15), random((40, k), F32, device, seed=16)

    def run(at: slice) -> tuple[Tensor, ...]:
        leaf = x[at].clone().requires_grad_()
        values, indices = topk(leaf, k, True)
        return values.detach(), indices, torch.autograd.grad(values, leaf, dvalues[at])[0]

    together = run(slice(None))
    for first, last in ((0, 1), (7, 8), (3, 20), (39, 40)):
        for whole, alone in zip(together, run(slice(first, last)), strict=True):
            assert_bitwise(whole[first:last], alone)


@pytest.mark.parametrize(("n", "k"), [(256, 128), (1024, 64), (9000, 100), (5000, 1000)])
def test_every_run_gives_the_same_bits(n: int, k: int, cuda: str) -> None:
    """Candidates are collected in another order each time; many of them are equal."""
    x = random((300, n), BF16, cuda, seed=17).round().requires_grad_()
    dvalues = random((300, k), BF16, cuda, seed=18)

    def run() -> tuple[Tensor, ...]:
        values, indices = topk(x, k, True)
        return values.detach(), indices, torch.autograd.grad(values, x, dvalues)[0]

    first = run()
    for _ in range(100):
        for before, after in zip(first, run(), strict=True):
            assert_bitwise(before, after)


def test_values_without_gradient_and_gradients_twice(device: str) -> None:
    x = random((4, 50), F32, device, seed=19).requires_grad_()
    values, indices = topk(x, 3, True)
    assert values.requires_grad and not indices.requires_grad
    dvalues = random((4, 3), F32, device, seed=20)
    before = dvalues.clone()
    first, second = (torch.autograd.grad(values, x, dvalues, retain_graph=True)[0] for _ in "ab")
    assert_bitwise(first, second)
    assert_bitwise(dvalues, before)
    assert not topk(x.detach(), 3)[0].requires_grad
    with torch.no_grad():
        assert not topk(x, 3)[0].requires_grad


@pytest.mark.parametrize("place", ["device", "meta"])
@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (DTypeError, "x is float64", lambda x: topk(x.double(), 1)),
        (DTypeError, "x is list", lambda x: topk([1.0], 1)),
        (DTypeError, "k is float", lambda x: topk(x, 1.0)),
        (DTypeError, "softmax is int", lambda x: topk(x, 1, 1)),
        (ShapeError, r"k is 5, x.shape\[-1\] is 4", lambda x: topk(x, 5)),
        (ShapeError, "k is 0", lambda x: topk(x, 0)),
        (ShapeError, "x has no dimension", lambda x: topk(x[0, 0], 1)),
    ],
    ids=["float64", "a list", "k", "softmax", "large k", "no k", "scalar"],
)
def test_mistakes_are_explained(error, says, call, place: str, device: str) -> None:
    x = torch.zeros(2, 4, device=device if place == "device" else "meta")
    with pytest.raises(error, match=says):
        call(x)


def test_limits_of_the_kernels_are_explained() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 5000, device="cuda")
        assert topk(x, 4096)[0].shape == (2, 4096)
        with pytest.raises(UnsupportedError, match="k is 4097.*at most 4096.*torch.sort"):
            topk(x, 4097)
        with pytest.raises(UnsupportedError, match=r"x.shape\[-1\] is 1073741825"):
            topk(torch.empty(2**30 + 1, device="cuda"), 1)


@pytest.mark.parametrize("softmax", [False, True])
def test_second_derivatives_raise(softmax: bool, device: str) -> None:
    x = random((2, 8), F32, device, seed=21).requires_grad_()
    (dx,) = torch.autograd.grad(topk(x, 3, softmax)[0].square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("n", [40, 1000])
def test_the_operators_are_registered_rightly(n: int, softmax: bool, device: str) -> None:
    x = random((4, n), F32, device, seed=22).requires_grad_()
    torch.library.opcheck(topk_fwd, (x, 5, softmax))
    values, indices = topk(x.detach(), 5, softmax)
    dvalues = random((4, 5), F32, device, seed=23)
    torch.library.opcheck(topk_bwd, (dvalues, indices, values if softmax else None, n, F32))


@pytest.mark.parametrize("softmax", [False, True])
def test_compile_whole_graph_with_dynamic_rows(softmax: bool, device: str) -> None:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = topk(x * 2, 6, softmax)
        return values * 3, indices

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for rows in (4, 5, 17):
        x = random((rows, 64), F32, device, seed=rows)
        dvalues = random((rows, 6), F32, device, seed=rows + 100)
        results = []
        for function in (compiled, block):
            leaf = x.clone().requires_grad_()
            values, indices = function(leaf)
            dx = torch.autograd.grad(values, leaf, dvalues)[0]
            results.append((values.detach(), indices, dx))
        for ours, plain in zip(*results, strict=True):
            assert_bitwise(ours, plain)


def test_meta_gives_shapes() -> None:
    values, indices = topk(torch.empty(3, 5, 7, device="meta", dtype=BF16), 2)
    assert values.shape == indices.shape == (3, 5, 2)
    assert (values.dtype, indices.dtype) == (BF16, torch.int64)
    assert values.device.type == indices.device.type == "meta"


@pytest.mark.parametrize(("n", "k"), [(256, 4), (4097, 4)])
def test_more_than_2_31_elements(n: int, k: int, cuda: str) -> None:
    rows = 2**31 // n + 5
    if torch.cuda.mem_get_info()[0] < 5 * rows * n * 2:
        pytest.skip("needs 22 GB of free GPU memory")
    x = torch.randn(rows, n, device=cuda, dtype=BF16).requires_grad_()
    values, indices = topk(x, k)
    judge(x.detach()[-5:].clone(), k)
    assert_bitwise(values[-5:].detach(), topk(x.detach()[-5:], k)[0])
    (dx,) = torch.autograd.grad(values, x, values.detach())
    assert_bitwise(dx[-5:].gather(-1, indices[-5:]), values[-5:].detach())
    assert int((dx[-5:] != 0).sum()) <= 5 * k
    del x, values, indices, dx
    torch.cuda.empty_cache()


def test_a_row_of_millions(cuda: str) -> None:
    judge(random((1, 5_000_001), F32, cuda, seed=24), 1000)
    judge(random((1, 5_000_001), BF16, cuda, seed=25), 1000)


def test_replays_of_a_graph(cuda: str) -> None:
    for n in (64, 5000):
        x = random((300, n), BF16, cuda, seed=26)
        right = topk(x, 9, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = topk(x, 9, True)
        for _ in range(5):
            for result in found:
                result.zero_()
            graph.replay()
            for result, expected in zip(found, right, strict=True):
                assert_bitwise(result, expected)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("n", "k"),
    [(9, 2), (40, 33), (250, 3), (256, 128), (1024, 64), (1001, 300), (3000, 2000), (9001, 100)],
)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.usefixtures("cuda")
def test_every_kernel(n: int, k: int, softmax: bool) -> None:
    """The smallest problems that take every path: ties down to the last digit, rows over tiles."""
    for x in (random((5, n), BF16, "cuda", seed=27), torch.ones(3, n, device="cuda")):
        x.requires_grad_()
        values, indices = topk(x, k, softmax)
        assert torch.equal(indices.cpu(), reference.forward(x.detach().cpu(), k, False)[1])
        (dx,) = torch.autograd.grad(values.sum(), x)
        assert dx.shape == x.shape
