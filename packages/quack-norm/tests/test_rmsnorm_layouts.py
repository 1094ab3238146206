"""How operands lie in memory: strides, storage offsets, alignment. Results never depend on it."""

import pytest
import torch
from rmsnorm_oracle import BF16, F16, F32, Case, check, operands, ours, variants

from quack_core.errors import LayoutError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import Layout, arrange, dirty_allocator, random
from quack_norm.ops.rmsnorm.api import rmsnorm

pytestmark = pytest.mark.exhaustive

REPEATS_ROWS = (Layout.EXPANDED,)


@pytest.mark.parametrize("dout_layout", Layout, ids=lambda layout: f"dout_{layout.value}")
@pytest.mark.parametrize("x_layout", Layout, ids=lambda layout: f"x_{layout.value}")
def test_kn_02_layouts_of_x_and_dout(x_layout: Layout, dout_layout: Layout, device: str) -> None:
    case = Case("", (3, 5, 256), weight=BF16, bias=F32, residual=BF16, prenorm=True)
    check(variants(case, x_layout=x_layout, dout_layout=dout_layout), device)


@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
@pytest.mark.parametrize("n", [64, 1001], ids=lambda n: f"n{n}")
def test_layouts_give_the_same_bits(layout: Layout, n: int, device: str) -> None:
    """Vector width is a matter of N and dtypes: strides and alignment change no sum."""
    x = random((2, 3, 5, n), BF16, device, seed=1)
    if layout in REPEATS_ROWS:
        x = arrange(x, layout).contiguous()
    w = random((n,), F32, device, seed=2)
    found = rmsnorm(arrange(x, layout), w)
    assert found.is_contiguous()
    assert_bitwise(found, rmsnorm(x, w))


def test_kn_01_expanded_gradient(device: str) -> None:
    x = random((2, 1024, 256), BF16, device, seed=1).requires_grad_()
    w = random((256,), F32, device, seed=2).requires_grad_()
    rmsnorm(x, w).sum().backward()
    dx, dw = torch.autograd.grad(rmsnorm(x, w), (x, w), torch.ones_like(x))
    assert_bitwise(x.grad, dx)
    assert_bitwise(w.grad, dw)


def test_kn_03_transposed_input(device: str) -> None:
    x = random((256, 33), F16, device, seed=1).t()
    assert_bitwise(rmsnorm(x), rmsnorm(x.contiguous()))


@pytest.mark.parametrize("part", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
def test_kn_04_slices_of_a_packed_row(part: int, per_head: bool, device: str) -> None:
    tokens, heads, dim = 7, 3, 128
    qkv = random((tokens, 3 * heads * dim), BF16, device, seed=1)
    x = qkv[:, part * heads * dim : (part + 1) * heads * dim].view(tokens, heads, dim)
    w = random((heads, dim) if per_head else (dim,), F32, device, seed=2)
    before = qkv.clone()
    assert_bitwise(rmsnorm(x, w), rmsnorm(x.contiguous(), w))
    assert_bitwise(qkv, before)


def test_kn_04_slices_from_split_in_place(device: str) -> None:
    """q and k normalised within their packed row; v beside them stays as it was."""
    qkv = random((2, 5, 3 * 256), BF16, device, seed=1)
    before = qkv.clone()
    q, k, v = qkv.split(256, dim=-1)
    for part in (q, k):
        assert rmsnorm(part, out=part) is part
    q0, k0, v0 = before.split(256, dim=-1)
    assert_bitwise(q, rmsnorm(q0.contiguous()))
    assert_bitwise(k, rmsnorm(k0.contiguous()))
    assert_bitwise(v, v0)


def test_kn_04_no_copy_of_two_outer_strides(cuda: str) -> None:
    """Memory in use grows by the result alone."""
    x = random((64, 4096), BF16, cuda, seed=1)[:, : 8 * 256].view(64, 8, 256)
    rmsnorm(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = rmsnorm(x)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes


@pytest.mark.parametrize("offset", [8, 1, 2, 3, 4], ids=lambda n: f"offset{n}")
@pytest.mark.parametrize("n", [256, 1001], ids=lambda n: f"n{n}")
def test_kn_23_kn_24_storage_offsets(offset: int, n: int, device: str) -> None:
    """Aligned (8 elements) and at every other alignment class."""
    buffer = random((offset + 17 * n,), BF16, device, seed=1)
    x = buffer[offset:].view(17, n)
    w = random((n + offset,), F32, device, seed=2)[offset:]
    assert_bitwise(rmsnorm(x, w), rmsnorm(x.clone(), w.clone()))


def test_weight_with_stride(device: str) -> None:
    x = random((5, 256), BF16, device, seed=1).requires_grad_()
    w = random((256, 2), F32, device, seed=2)[:, 0].requires_grad_()
    plain = w.detach().contiguous().requires_grad_()
    y, expected = rmsnorm(x, w), rmsnorm(x, plain)
    assert_bitwise(y, expected)
    dout = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, w), dout)
    for a, b in zip(found, torch.autograd.grad(expected, (x, plain), dout), strict=True):
        assert_bitwise(a, b)


def test_single_rows_and_columns_with_any_stride(device: str) -> None:
    """Dimensions of size one may have any stride: it is never followed."""
    x = random((7, 3, 64), BF16, device, seed=1)
    row = x[:1, :1].as_strided((1, 1, 64), (12345, 777, 1))
    assert_bitwise(rmsnorm(row), rmsnorm(x[:1, :1].contiguous()))
    column = x[:, :, 0:1]
    assert_bitwise(rmsnorm(column), rmsnorm(column.contiguous()))


def test_results_do_not_come_from_old_memory(device: str) -> None:
    case = Case("", (17, 1001), residual=BF16, prenorm=True, bias=F32)
    data = operands(case, device)
    first = ours(case, data)
    dirty_allocator(device)
    for name, tensor in ours(case, data).items():
        assert_bitwise(tensor, first[name], name)


OVERLAPS = {
    "one row later": lambda buffer: (buffer[:-1], buffer[1:]),
    "one element later": lambda buffer: (
        buffer.view(-1)[:256].view(4, 64),
        buffer.view(-1)[1:257].view(4, 64),
    ),
    "another dtype": lambda buffer: (buffer, buffer.view(F16)),
    "half a row": lambda buffer: (buffer[:, :32], buffer[:, 16:48]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_out_may_not_overlap_partly(name: str, device: str) -> None:
    x, out = OVERLAPS[name](torch.zeros(8, 64, dtype=BF16, device=device))
    with pytest.raises(LayoutError, match="out overlaps x"):
        rmsnorm(x, out=out)


def test_out_may_lie_between_the_rows_of_x(device: str) -> None:
    buffer = random((8, 128), BF16, device, seed=1)
    x, out = buffer[:, :64], buffer[:, 64:]
    expected = rmsnorm(x.contiguous())
    rmsnorm(x, out=out)
    assert_bitwise(out, expected)


PACKED = random((5, 9 * 64), BF16, seed=1)
BETWEEN = {
    "q and k": lambda p: (p[:, :192].view(5, 3, 64), p[:, 192:384].view(5, 3, 64)),
    "k and q": lambda p: (p[:, 192:384].view(5, 3, 64), p[:, :192].view(5, 3, 64)),
    "heads first": lambda p: tuple(p.view(5, 3, 3, 64)[:, i].transpose(0, 1) for i in (0, 1)),
    "heads interleaved": lambda p: tuple(p.view(5, 3, 3, 64)[:, :, i] for i in (0, 2)),
    "a batch of one": lambda p: tuple(p.view(5, 1, 9, 64)[:, :, i : i + 3] for i in (0, 3)),
}
ACROSS = {
    "one head later": lambda p: (p[:, :192].view(5, 3, 64), p[:, 64:256].view(5, 3, 64)),
    "one head of the next token": lambda p: (
        p[:4, 384:].view(4, 3, 64),
        p.view(-1)[448:][: 4 * 576].view(4, 576)[:, :192].view(4, 3, 64),
    ),
    "one element later": lambda p: (p[:, :63], p[:, 62:125]),
    "another pitch": lambda p: (
        p[:4, :192].view(4, 3, 64),
        p.view(10, 288)[:4, :192].view(4, 3, 64),
    ),
    "heads apart and together": lambda p: (
        p[:, :384].view(5, 3, 128)[..., :64],
        p[:, 192:384].view(5, 3, 64),
    ),
    "windows": lambda p: (p.as_strided((4, 3, 64), (576, 32, 1)), p[:4, 64:256].view(4, 3, 64)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_out_may_lie_between_the_heads_of_x(name: str, device: str) -> None:
    packed = PACKED.to(device, copy=True)
    x, out = BETWEEN[name](packed)
    expected, before = rmsnorm(x.contiguous()), x.clone()
    assert rmsnorm(x, out=out) is out
    assert_bitwise(out.contiguous(), expected)
    assert_bitwise(x, before)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", ACROSS)
def test_out_may_not_cross_the_heads_of_x(name: str, swap: bool, device: str) -> None:
    packed = PACKED.to(device, copy=True)
    x, out = ACROSS[name](packed)
    assert set(addresses(x)) & set(addresses(out))
    if swap:
        x, out = out, x
    with pytest.raises(LayoutError, match="out overlaps x"):
        rmsnorm(x, out=out)


def addresses(tensor: torch.Tensor) -> list[int]:
    """Of all elements."""
    starts = torch.tensor(tensor.data_ptr())
    for extent, step in zip(tensor.shape, tensor.stride(), strict=True):
        starts = starts[..., None] + torch.arange(extent) * step * tensor.element_size()
    return starts.flatten().tolist()


def test_out_may_not_be_the_weight(device: str) -> None:
    w = torch.zeros(1, 64, device=device)
    with pytest.raises(LayoutError, match="out overlaps weight"):
        rmsnorm(torch.zeros(1, 64, device=device), w[0], out=w)


@pytest.mark.parametrize("layout", [Layout.EXPANDED, Layout.TRANSPOSED, Layout.COLUMN_STRIDED])
def test_out_must_be_rows(layout: Layout, device: str) -> None:
    out = arrange(torch.zeros(8, 64, device=device), layout)
    with pytest.raises(LayoutError, match="out"):
        rmsnorm(torch.zeros(8, 64, device=device), out=out)


def test_out_of_many_strides(device: str) -> None:
    """Three outer strides: a kernel cannot write them, and copying would not be the caller's out."""
    x = random((2, 3, 5, 64), BF16, device, seed=1)
    out = torch.zeros(4, 6, 10, 64, dtype=BF16, device=device)[::2, ::2, ::2]
    with pytest.raises(LayoutError, match="at most two strides"):
        rmsnorm(x, out=out)
