"""Which matrices TMA reads as they are, what the others are told, and what layers copy."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quack_core.errors import LayoutError
from quack_gemm import check, gemm, linear, mlp
from quack_gemm.launch import readable

BF16 = torch.bfloat16


def matrix(rows: int, cols: int, *strides: int, offset: int = 0) -> torch.Tensor:
    return torch.empty(4096, dtype=BF16).as_strided((rows, cols), strides, offset)


@pytest.mark.parametrize(
    ("x", "order"),
    [
        (matrix(8, 16, 16, 1), "row"),
        (matrix(8, 9, 16, 1), "row"),
        (matrix(8, 16, 1, 8), "column"),
        (matrix(1, 9, 9, 1), "row"),
        (matrix(1, 16, 1, 24), "column"),  # one row, whose elements are apart
        (matrix(16, 1, 8, 1), "row"),
        (matrix(16, 1, 1, 1), "column"),
        (matrix(8, 9, 9, 1), None),
        (matrix(8, 16, 1, 9), None),
        (matrix(8, 16, 32, 2), None),
        (matrix(8, 16, 16, 1, offset=4), None),
        (matrix(8, 16, 16, 1, offset=8), "row"),
        (torch.empty(3, 8, 16, dtype=BF16), "row"),
        (torch.empty(3, 9, 17, dtype=BF16)[:, :8, :16], None),
        (torch.empty(3, 129, dtype=BF16)[:, :128].unflatten(1, (8, 16)), None),
        (matrix(8, 16, 0, 1), None),  # expanded, such as a gradient of a sum
        (torch.empty(1, 8, 16, dtype=BF16).expand(3, 8, 16), None),
        (torch.empty(1, 129, dtype=BF16)[:, :128].unflatten(1, (8, 16)), "row"),
    ],
)
def test_order(x: torch.Tensor, order: str | None) -> None:
    assert check.order(x) == order
    if order is not None:
        assert check.major("x", x) == order


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            matrix(8, 9, 9, 1),
            r"a.stride\(-2\) is 9: .* a positive multiple of 8; pad a.shape\[-1\]",
        ),
        (
            matrix(8, 16, 1, 9),
            r"a.stride\(-1\) is 9: .* a positive multiple of 8; pad a.shape\[-2\]",
        ),
        (matrix(8, 16, 32, 2), r"a has the strides \(32, 2\): one of the last two must be 1"),
        (matrix(8, 16, 16, 1, offset=4), r"address of a is 8 bytes off a multiple of 16"),
        (
            torch.empty(3, 129, dtype=BF16)[:, :128].unflatten(1, (8, 16)),
            r"a.stride\(0\) is 129: it must be a positive multiple of 8",
        ),
    ],
)
def test_unreadable(x: torch.Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check.major("a", x)


@pytest.mark.parametrize("n", [9, 16])
def test_results_of_cuda_tensors_have_aligned_rows_also_while_tracing(n: int) -> None:
    with FakeTensorMode():
        one, batch, b = (
            torch.empty(*shape, 64, dtype=BF16, device="cuda") for shape in ((8,), (1, 8), (n,))
        )
        assert gemm(one, b.mT).stride() == (16, 1)
        assert gemm(batch, b.mT).stride() == (128, 16, 1)
        assert gemm(one, b.mT, out_dtype=torch.float32).stride() == (12 if n == 9 else 16, 1)


def test_results_of_cpu_tensors_are_contiguous() -> None:
    assert gemm(torch.ones(8, 64, dtype=BF16), torch.ones(64, 9, dtype=BF16)).stride() == (9, 1)


def test_layers_copy_what_tma_cannot_read() -> None:
    found = readable(torch.empty(8, 9, dtype=BF16, device="meta"))
    assert found.shape == (8, 9) and found.stride() == (16, 1)
    fine = torch.empty(8, 16, dtype=BF16, device="meta")
    assert readable(fine) is fine
    assert readable(fine.mT).stride() == (1, 16)
    assert readable(fine.mT, "row").stride() == (8, 1)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("k", [pytest.param(64, marks=pytest.mark.exhaustive), 63])
def test_layers_compile_where_layouts_are_checked(k: int, dynamic: bool) -> None:
    """Of meta tensors layouts count, as they do of CUDA tensors."""

    def step(x: torch.Tensor, weight1: torch.Tensor, weight2: torch.Tensor) -> torch.Tensor:
        return linear(mlp(x, weight1, weight2, "swiglu"), weight1)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (8, 24):
        shapes = ((2, m, k), (80, k), (k, 40))
        given = [torch.empty(s, dtype=BF16, device="meta", requires_grad=True) for s in shapes]
        out = compiled(*given)
        assert out.shape == (2, m, 80)
        out.sum().backward()
        assert [one.grad is not None and one.grad.shape for one in given] == list(shapes)
