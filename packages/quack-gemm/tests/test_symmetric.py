"""Symmetric products: half is computed, and stored twice."""

import pytest
import torch
from torch import Tensor

from quack_core.errors import LayoutError, ShapeError
from quack_core.gemm.epilogue import AddVector, Mirror
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import random
from quack_gemm import autograd, gemm, gemm_symmetric, heuristic
from quack_gemm.spec import GemmSpec

BF16, F32 = torch.bfloat16, torch.float32
BLOCK = 64
"""Rows and columns of what is stored once, on the diagonal."""


def assert_symmetric(x: Tensor) -> None:
    """To the bit, but for the blocks on the diagonal; on the CPU those as well."""
    block = torch.arange(x.shape[-1], device=x.device) // BLOCK
    away = block[:, None] != block if x.is_cuda else torch.ones_like(block).bool()
    bits = x.view(torch.int16 if x.itemsize == 2 else torch.int32)
    assert ((bits == bits.mT) | ~away).all()


def compare(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    flat = (-1, exact.shape[-1])
    plain = plain.to(found.dtype)
    assert_accurate(found.reshape(flat), exact.reshape(flat), plain.reshape(flat))
    assert_symmetric(found)


def product(a: Tensor) -> Tensor:
    """In float32, by torch."""
    if not a.is_cuda:
        return a.float() @ a.float().mT
    both = a if a.dim() == 3 else a[None]
    found = torch.bmm(both, both.mT, out_dtype=F32)
    return found if a.dim() == 3 else found[0]


def symmetric(shape: tuple[int, ...], device: str, dtype: torch.dtype = BF16) -> Tensor:
    found = random(shape, F32, device, seed=9)
    return (found + found.mT).to(dtype)


@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("major", ["row", "column"])
@pytest.mark.parametrize("size", [(1, 8), (64, 64), (136, 72), (257, 64), (1000, 200)])
def test_sizes(size: tuple[int, int], major: str, out_dtype: torch.dtype, device: str) -> None:
    m, k = size
    if major == "column" and m % 8:
        m = -(-m // 8) * 8  # columns are strided by m
    a = random((m, k) if major == "row" else (k, m), BF16, device, seed=1)
    a = a if major == "row" else a.mT
    compare(gemm_symmetric(a, out_dtype=out_dtype), a.double() @ a.double().mT, product(a))


@pytest.mark.parametrize("batches", [1, 3])
def test_a_step_of_newton_and_schulz(batches: int, device: str) -> None:
    """b A + c A A of symmetric A: C is an operand, and A its own transpose."""
    a = symmetric((batches, 200, 200), device)
    found = gemm_symmetric(a, c=a, alpha=0.25, beta=-0.5)
    exact = 0.25 * (a.double() @ a.double().mT) - 0.5 * a.double()
    compare(found, exact, 0.25 * product(a) - 0.5 * a.float())
    shared = gemm_symmetric(a, c=a[0], alpha=0.25, beta=-0.5)
    exact = 0.25 * (a.double() @ a.double().mT) - 0.5 * a[0].double()
    compare(shared, exact, 0.25 * product(a) - 0.5 * a[0].float())


def test_out_may_be_c(device: str) -> None:
    a = random((296, 72), BF16, device, seed=1)
    c = symmetric((296, 296), device)
    expected = gemm_symmetric(a, c=c)
    assert gemm_symmetric(a, c=c, out=c) is c
    assert_bitwise(c, expected)
    with pytest.raises(LayoutError, match="out shares memory with a"):
        square = c.clone()
        gemm_symmetric(square, out=square)


def test_device_scalars_and_other_symmetric_products(device: str) -> None:
    a = symmetric((136, 136), device)
    alpha = torch.tensor([0.5], device=device)
    square = gemm_symmetric(a, alpha=alpha)
    cube = gemm(square, a, epilogue=[Mirror()])
    compare(cube, square.double() @ a.double(), square.float() @ a.float())


def test_every_configuration_mirrors(cuda: str) -> None:
    """The same numbers as the whole product, computed in the same way; the same bits again."""
    spec = GemmSpec("bfloat16", "bfloat16", "bfloat16", epilogue=(Mirror(),))
    for m, k in ((600, 200), (1025, 64), (65, 1000)):
        a = random((m, k), BF16, cuda, seed=m)
        for config in heuristic.candidates(spec):
            found = gemm(a, a.mT, epilogue=[Mirror()], config=config)
            whole = gemm(a, a.mT, config=config)
            assert_bitwise(found.tril(), whole.tril())
            assert_symmetric(found)
            assert_bitwise(gemm(a, a.mT, epilogue=[Mirror()], config=config), found)


def test_nothing_beside_is_written(cuda: str) -> None:
    a = random((200, 72), BF16, cuda, seed=1)
    wide = torch.full((300, 400), torch.nan, dtype=BF16, device=cuda)
    out = wide[8:208, 16:216]
    gemm_symmetric(a, out=out)
    assert not out.isnan().any()
    assert wide.isnan().sum() == wide.numel() - out.numel()


def test_half_the_clusters_are_counted() -> None:
    """The rule sees that half is to be done: a large product is thought to take little more of it."""
    from quack_core.arch import SM90

    def cycles(*ops: Mirror) -> float:
        spec = GemmSpec("bfloat16", "bfloat16", "bfloat16", epilogue=ops)
        problem = heuristic.Problem(8192, 8192, 8192, 1, spec, 132)
        return heuristic.cycles(problem, heuristic.default(problem, SM90))

    assert 0.5 < cycles(Mirror()) / cycles() < 0.6


def test_meta_and_opcheck(device: str) -> None:
    a = random((3, 72, 64), BF16, device, seed=1)
    assert gemm_symmetric(a.to("meta"), out_dtype=F32).shape == (3, 72, 72)
    steps = [(Mirror(), ())]
    torch.library.opcheck(
        autograd.gemm_fwd, autograd.arguments(a, a.mT.clone(), steps, [BF16], False)
    )
    assert gemm_symmetric(a[:, :0]).shape == (3, 0, 0)
    assert not gemm_symmetric(a[:, :, :0]).any()


def test_what_is_not_symmetric(device: str) -> None:
    a, b = random((72, 64), BF16, device, seed=1), random((64, 136), BF16, device, seed=2)
    with pytest.raises(ShapeError, match="D has 72 rows and 136 columns: .* square"):
        gemm(a, b, epilogue=[Mirror()])
    bias = torch.zeros(72, device=device)
    with pytest.raises(ShapeError, match="AddVector beside an op that mirrors D"):
        gemm(a, a.mT, epilogue=[(AddVector("float32"), bias), Mirror()])
