"""The device functions on a GPU: the unit kernels of ``device_probe`` against exact values.

Operands are small integers wherever the result should be exact, and memory around the outputs has
to stay as it was.
"""

import functools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from quack_core import arch

PROBE = Path(__file__).parent / "device_probe"
sys.path.insert(0, str(PROBE))
try:
    from quack_device_probe.specs import PROBES, ProbeConfig
finally:
    sys.path.remove(str(PROBE))

MARK = 77.0
"""What outputs hold before; no result equals it by accident, being even or out of range."""


@pytest.fixture(autouse=True)
def probe_importable(monkeypatch):
    monkeypatch.syspath_prepend(PROBE)


@functools.cache
def compiled(probe):
    from quack_core.jit.compile import compile_kernel

    module = f"quack_device_probe.{probe.module}"
    return compile_kernel(module, probe.spec, ProbeConfig(), arch.detect()).function


def of_module(module):
    chosen = [probe for probe in PROBES if probe.module == module]
    return pytest.mark.parametrize("probe", chosen, ids=lambda probe: probe.id)


def even_numbers(shape, dtype, seed=0):
    """Even integers from -32 to 32 on the GPU: exact in every dtype, and so are sums of them."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randint(-16, 17, shape, generator=generator, device="cuda")
    return (2 * values).to(getattr(torch, dtype))


def rows_at(storage, offset, count, n, stride):
    """``count`` rows of ``n`` elements in a one-dimensional tensor, the first at ``offset``."""
    return storage.as_strided((count, n), (stride, 1), offset)


def marked(size, dtype):
    import torch

    return torch.full((size,), MARK, dtype=getattr(torch, dtype), device="cuda")


@of_module("vectors")
def test_vectors(cuda, probe):
    """Rows with exactly the promised alignment, not more; fewer rows than the last CTA takes."""
    import torch

    spec, rows = probe.spec, 13
    shift = spec.align // (4 if spec.dtype == "float32" else 2)  # elements
    stride, size = spec.n + shift, rows * (spec.n + shift) + 64
    x = rows_at(even_numbers((size,), spec.dtype), shift, rows, spec.n, stride)
    storage, expected = marked(size, spec.dtype), marked(size, spec.dtype)
    compiled(probe)(x, rows_at(storage, shift, rows, spec.n, stride))
    rows_at(expected, shift, rows, spec.n, stride).copy_(x)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("offset", range(8))
@of_module("unaligned")
def test_unaligned(cuda, probe, offset):
    """Every offset of the first row; with an odd stride, other rows begin at other offsets."""
    import torch

    spec, rows = probe.spec, 9
    piece, vec = spec.path == "piece", spec.tiling.vec
    aligned = spec.path == "shift"
    x_stride = spec.n + vec - spec.n % vec if aligned else spec.n
    x_first = 0 if aligned else offset
    numbers = even_numbers((rows * x_stride + 64,), spec.dtype)
    x = rows_at(numbers, x_first, rows, spec.n, x_stride)
    y_first = 8 + 3 * offset
    storage, expected = (marked(rows * spec.n + 64, spec.dtype) for _ in range(2))
    z = marked(rows * spec.tiling.cols, spec.dtype).view(rows, -1) if piece else None
    compiled(probe)(x, rows_at(storage, y_first, rows, spec.n, spec.n), z)
    rows_at(expected, y_first, rows, spec.n, spec.n).copy_(x)
    assert torch.equal(storage, expected)
    if piece:  # the row where it lies within its first vector, zeros around it
        held = torch.zeros_like(z)
        for row in range(rows):
            before = x[row].data_ptr() % 16 // x.element_size()
            held[row, before : before + spec.n] = x[row]
        assert torch.equal(z, held)


@of_module("bulk")
def test_bulk(cuda, probe):
    import torch

    spec = probe.spec
    rows = 8 * spec.cluster
    x = even_numbers((rows, spec.n), "float32")
    storage = marked((rows + 1) * spec.n, "float32")
    expected = storage.clone().view(rows + 1, spec.n)
    compiled(probe)(x, storage[: rows * spec.n].view(rows, spec.n))
    if spec.path == "add":
        expected[0] += x.sum(0)
    elif spec.path == "store":
        expected[:rows] = 2 * x
    else:
        row = torch.arange(rows, device="cuda")
        first = row - row % spec.cluster
        source = first + (row - 1) % spec.cluster if spec.path == "send" else first
        expected[:rows] = x[source]
    assert torch.equal(storage.view(rows + 1, spec.n), expected)


@of_module("tiles")
def test_tiles(cuda, probe):
    """No extent is a multiple of the tile's, and each ring is walked several times."""
    import torch

    spec, (rows, cols) = probe.spec, (100, 1000)
    x = even_numbers((rows, cols), spec.dtype)
    row, col = (torch.arange(size, device="cuda") for size in (rows, cols))
    in_tile = (row % spec.tile[0])[:, None] + col % spec.tile[1] // 8
    scaled = (x * (1 + in_tile % 2)).to(x.dtype)
    tiles = -(-rows // spec.tile[0])
    padded = tiles * spec.cluster * spec.tile[0]
    out_rows = rows if spec.cluster == 1 else padded
    storage = marked((out_rows + 1) * (cols + 8), spec.dtype)  # rows have a gap between them
    expected = storage.clone()
    target, wanted = (rows_at(s, 0, out_rows, cols, cols + 8) for s in (storage, expected))
    compiled(probe)(x, target)
    if spec.path == "add":
        wanted += scaled
    elif spec.path == "store":
        wanted.copy_(scaled)
    else:
        whole = torch.zeros((tiles * spec.tile[0], cols), dtype=x.dtype, device="cuda")
        whole[:rows] = scaled
        by_tile = whole.view(tiles, spec.tile[0], cols).repeat_interleave(spec.cluster, 0)
        wanted.copy_(by_tile.reshape(padded, cols))
    assert torch.equal(storage, expected)


def reduced(spec, x):
    """(rows, rounds, width) in float64, from the definition."""
    import torch

    scale = torch.arange(1, spec.rounds + 1, device=x.device, dtype=torch.float64)
    scaled = x.double()[:, None] * scale[:, None]
    if spec.reduction == "sum":
        return scaled.sum(-1, keepdim=True)
    if spec.reduction == "sum2":
        return torch.stack([scaled.sum(-1), (scaled**2).sum(-1)], -1)
    largest = scaled.amax(-1, keepdim=True)
    if spec.reduction == "max":
        return largest
    shift = torch.where(largest == -math.inf, torch.zeros_like(largest), largest)
    power = torch.exp2 if spec.reduction == "online" else torch.exp
    return torch.cat([largest, power(scaled - shift).sum(-1, keepdim=True)], -1)


def reduced_by_probe(probe, x):
    """(rows, rounds, width, threads of a row): what every thread of the kernel has got."""
    spec = probe.spec
    shape = (len(x), spec.rounds, spec.width, spec.threads_per_row * spec.cluster)
    y = marked(math.prod(shape), "float32").view(shape)
    compiled(probe)(x, y)
    return y


def same_in_every_thread(y):
    import torch

    return torch.equal(y.view(torch.int32), y[..., :1].view(torch.int32).expand_as(y))


def depth(spec):
    """Values that a thread holds, and levels of the tree over threads."""
    threads = spec.threads_per_row * spec.cluster
    return -(-spec.n // (spec.vec * threads)) * spec.vec, 1 + math.ceil(math.log2(threads))


def reductions(*names):
    chosen = [p for p in PROBES if p.module == "reduction" and p.spec.reduction in names]
    return pytest.mark.parametrize("probe", chosen, ids=lambda probe: probe.id)


def rows_with_special_values(spec, divisor=1):
    x = even_numbers((7, spec.n), "float32") / divisor
    x[1, spec.n // 3] = math.nan
    x[2, spec.n - 1] = math.inf
    x[3] = -math.inf
    x[4, : spec.n // 2] = -math.inf
    return x


@reductions("sum", "sum2", "max")
def test_reductions(cuda, probe):
    """Every thread gets the same bits; special rows stay what they are."""
    x = rows_with_special_values(probe.spec)
    y = reduced_by_probe(probe, x)
    assert same_in_every_thread(y)
    np.testing.assert_array_equal(y[..., 0].cpu(), reduced(probe.spec, x).cpu())


@reductions("online", "softmax")
def test_sums_of_exponentials(cuda, probe):
    """ex2.approx is within 2 ** -22; one per value, and one with a product and a sum per level.

    A maximum skips NaN, which the sum has.
    """
    spec = probe.spec
    x = rows_with_special_values(spec, divisor=4)
    y = reduced_by_probe(probe, x)
    assert same_in_every_thread(y)
    found, expected = y[..., 0].double().cpu().numpy(), reduced(spec, x).cpu().numpy()
    known = ~np.isnan(expected[..., 0])
    np.testing.assert_array_equal(found[..., 0][known], expected[..., 0][known])
    values, levels = depth(spec)
    bound = levels * (2**-22 + 2**-23) + values * 2**-24
    if spec.reduction == "softmax":  # a rounded factor and product, over distances of 16 at most
        bound += 16 * spec.rounds * 2**-23
    np.testing.assert_allclose(found[..., 1], expected[..., 1], rtol=bound)


@reductions("compensated")
def test_compensated_sums_of_exponentials(cuda, probe):
    """An exponential is rounded, and a factor in the warp, the CTA and the cluster: an ulp each.

    Differences are exact here, and sums carry what they lack.
    """
    spec = probe.spec
    x = rows_with_special_values(spec, divisor=4)
    y = reduced_by_probe(probe, x)
    assert same_in_every_thread(y)
    found, expected = y[..., 0].double().cpu().numpy(), reduced(spec, x).cpu().numpy()
    known = ~np.isnan(expected[..., 0])
    np.testing.assert_array_equal(found[..., 0][known], expected[..., 0][known])
    np.testing.assert_allclose(found[..., 1] + found[..., 2], expected[..., 1], rtol=4 * 2**-23)


def fast_maths(x):
    """Every function of ``fast_math`` on float32 values, as float64 by name."""
    import torch

    (probe,) = (p for p in PROBES if p.module == "maths")
    out = torch.full((len(probe.spec.functions), len(x)), math.nan, device="cuda")
    compiled(probe)(x, out)
    return dict(zip(probe.spec.functions, out.double(), strict=True))


def test_rsqrt_at_the_ends(cuda):
    import torch

    x = torch.tensor([0.0, math.inf, math.nan, -1.0], device="cuda")
    found = fast_maths(x)["rsqrt"].tolist()
    assert found[:2] == [math.inf, 0.0]
    assert all(map(math.isnan, found[2:]))
    assert fast_maths(x)["rsqrt_rest"].tolist() == [0.0] * 4
    small = torch.tensor([1e-40, 2.0**-149, 2.0**-126, 1e-31], device="cuda")
    exact = small.double().rsqrt()
    assert ((fast_maths(small)["rsqrt"] / exact - 1).abs() <= 2**-22.9).all()


def test_fast_maths_is_as_exact_as_promised(cuda):
    """The bounds are those of the PTX ISA for the approximations, and of the roundings around."""
    import torch

    x = torch.logspace(-30, 6.4, 100_001, base=2, device="cuda")  # up to where exp is still finite
    x = torch.cat([x, torch.tensor([1.0, 0.75, 1.25], device="cuda")])
    exact = x.double()
    bounds = {  # of the error: relative, absolute
        "rsqrt": (2**-22.9, 0),
        "exp2": (2**-22, 0),
        "exp": (2**-22 + 2**-23 * exact, 0),
        "log2": (2**-22, 2**-22),
        "log": (2**-21, 2**-21),
        "reciprocal": (2**-22, 0),
    }
    functions = fast_maths(x)
    rest = functions.pop("rsqrt_rest")
    # of second order in an error below 2**-22.9, and a few roundings at its own size
    assert ((functions["rsqrt"] + rest) / exact.rsqrt() - 1).abs().max() <= 2**-43
    for name, found in functions.items():
        expected = getattr(exact, name)()
        relative, absolute = bounds[name]
        assert ((found - expected).abs() <= relative * expected.abs() + absolute).all(), name


def grid_operands(spec, ctas):
    import torch

    def make(*shape):
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    work = make(ctas, spec.threads).fill_(-1)
    return work, make(spec.threads), make(1), torch.arange(spec.threads, device="cuda")


def probe_of(path):
    return next(p for p in PROBES if p.module == "grid" and p.spec.path == path)


def test_last_arrival_happens_once_and_sees_everything(cuda):
    probe, ctas, launches = probe_of("last"), 500, 20
    work, out, counter, thread = grid_operands(probe.spec, ctas)
    for launch in range(1, launches + 1):
        work.fill_(-1)
        compiled(probe)(work, out, counter)
        expected = launch * (ctas * (ctas - 1) // 2 + ctas * thread)
        assert out.tolist() == expected.tolist()
        assert counter.item() == 0


def test_semaphore_keeps_the_order(cuda):
    probe, ctas = probe_of("turns"), 64
    work, out, counter, _ = grid_operands(probe.spec, ctas)
    expected = 0
    for _ in range(20):
        compiled(probe)(work, out, counter)
        for cta in range(ctas):
            expected = (3 * expected + cta) % 2**32
        assert {value % 2**32 for value in out.tolist()} == {expected}
        assert counter.item() == 0


def test_named_barriers_hand_over(cuda):
    probe = probe_of("groups")
    threads = probe.spec.threads
    work, out, counter, _ = grid_operands(probe.spec, 200)
    compiled(probe)(work, out, counter)
    half = threads // 2
    assert out.tolist() == [0] * half + [6 * (threads - 1 - t) for t in range(half, threads)]
