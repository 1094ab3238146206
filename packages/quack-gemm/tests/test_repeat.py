"""Calls like an earlier one: what they hand to the kernel, and when they are looked at again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_core.errors import DTypeError, LayoutError, ShapeError
from quack_core.testing import fake_cuda
from quack_gemm import check, gemm, launch, repeat
from quack_gemm.config import GemmConfig

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What kernels were called with; CPU tensors go where CUDA tensors go."""
    found: list[tuple[Any, ...]] = []
    fake_cuda.stand_in(monkeypatch, lambda *_: lambda *operands: found.append(operands))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    monkeypatch.setattr(repeat, "_calls", {})
    return found


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The first operand of each call that was checked."""
    found: list[Tensor] = []

    def operands(a: Tensor, b: Tensor) -> Any:
        found.append(a)
        return real(a, b)

    real = check.operands
    monkeypatch.setattr(check, "operands", operands)
    return found


def t(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bias": lambda: {"bias": t(136)},
    "bias, activation": lambda: {"bias": t(136, dtype=F32), "activation": "silu"},
    "c": lambda: {"c": t(72, 136)},
    "a number": lambda: {"alpha": 0.25},
    "numbers": lambda: {"alpha": 0.25, "beta": 0.5, "c": t(72, 136)},
    "tensors": lambda: {"alpha": t(1, dtype=F32), "scale_a": t(72, 1, dtype=F32)},
    "a scalar": lambda: {"scale_b": t(dtype=F32)},
    "out": lambda: {"out": t(72, 136)},
    "out and c": lambda: {"out": t(72, 136), "c": t(72, 136), "out_dtype": BF16},
    "split": lambda: {"split_k": 2},
    "config": lambda: {"config": GemmConfig(64, 64, 1, 1)},
    "dtype": lambda: {"out_dtype": F32},
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_is_the_first_one(
    name: str, launched: list[tuple[Any, ...]], looked_at: list[Tensor]
) -> None:
    a, b, given = t(72, 64), t(136, 64).mT, CALLS[name]()
    results = [gemm(a, b, **given) for _ in range(2)]
    assert len(looked_at) == 1
    first, second = launched
    assert [type(x) for x in first] == [type(x) for x in second]
    assert first[0] is second[0] is a and first[1] is second[1] is b
    outs, operands = [call[2] for call in launched], [call[3] or () for call in launched]
    assert [one[0] is result for one, result in zip(outs, results, strict=True)] == [True, True]
    assert results[0].dtype == results[1].dtype and results[0].stride() == results[1].stride()
    assert results[0].shape == results[1].shape == (72, 136)
    for x, y in zip(*operands, strict=True):
        if isinstance(x, Tensor):
            assert (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())
        else:
            assert x == y
    assert first[4:] == second[4:]


def test_other_numbers_and_tensors_reach_the_kernel(launched: list[tuple[Any, ...]]) -> None:
    a, b = t(72, 64), t(136, 64).mT
    for alpha in (0.25, 0.75):
        for bias in (t(136), t(136)):
            gemm(a, b, alpha=alpha, bias=bias)
            assert launched[-1][3][0] == alpha and launched[-1][3][1] is bias


def test_numbers_that_change_the_epilogue(launched: list[tuple[Any, ...]]) -> None:
    a, b, c = t(72, 64), t(136, 64).mT, t(72, 136)
    for _ in range(2):
        for alpha, beta, count in ((1.0, 1.0, 1), (0.5, 1.0, 2), (1.0, 0.0, 0), (0.5, 0.5, 3)):
            gemm(a, b, c=c, alpha=alpha, beta=beta)
            assert len(launched[-1][3] or ()) == count, (alpha, beta)


CHANGES: dict[str, Callable[[], tuple[Tensor, Tensor, dict[str, Any]]]] = {
    "a's rows": lambda: (t(73, 64), t(136, 64).mT, {}),
    "a's strides": lambda: (t(64, 72).mT, t(136, 64).mT, {}),
    "b's strides": lambda: (t(72, 64), t(64, 136), {}),
    "dtypes": lambda: (t(72, 64).half(), t(136, 64).half().mT, {}),
    "out_dtype": lambda: (t(72, 64), t(136, 64).mT, {"out_dtype": F32}),
    "activation": lambda: (t(72, 64), t(136, 64).mT, {"activation": "relu"}),
    "split_k": lambda: (t(72, 64), t(136, 64).mT, {"split_k": 2}),
    "config": lambda: (t(72, 64), t(136, 64).mT, {"config": GemmConfig()}),
    "out": lambda: (t(72, 64), t(136, 64).mT, {"out": t(136, 72).mT}),
    "batch": lambda: (t(2, 72, 64), t(136, 64).mT, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_call_is_looked_at(
    name: str, launched: list[tuple[Any, ...]], looked_at: list[Tensor]
) -> None:
    gemm(t(72, 64), t(136, 64).mT)
    a, b, given = CHANGES[name]()
    gemm(a, b, **given)
    assert len(looked_at) == 2


def test_errors_are_those_of_a_first_call(launched: list[tuple[Any, ...]]) -> None:
    a, b, out = t(72, 64), t(136, 64).mT, t(72, 136)
    gemm(a, b, out=out)
    memory = torch.zeros(72 * 64 + 72 * 136, dtype=BF16)
    inside = memory[:4608].view(72, 64), memory[4000 : 4000 + 9792].view(72, 136)
    with pytest.raises(LayoutError, match="out shares memory with a"):
        gemm(inside[0], b, out=inside[1])
    behind = memory[4608 : 4608 + 9792].view(72, 136)
    assert gemm(inside[0], b, out=behind) is behind
    with pytest.raises(ShapeError, match=r"b\.shape"):
        gemm(a, t(136, 56).mT)
    with pytest.raises(DTypeError, match="activation|silu"):
        gemm(a, b, activation=["silu"])  # type: ignore[arg-type]


def test_a_gradient_is_asked_for_after_a_call_without(launched: list[tuple[Any, ...]]) -> None:
    a, b = t(72, 64), t(136, 64).mT
    with torch.no_grad():
        gemm(a, b)
    count = len(launched)
    result = gemm(a.requires_grad_(), b)
    assert result.requires_grad
    with torch.no_grad():
        assert not gemm(a, b).requires_grad
    assert len(launched) > count


def test_out_counts_as_written(launched: list[tuple[Any, ...]]) -> None:
    a, b, out = t(72, 64), t(136, 64).mT, t(72, 136)
    for i in range(3):
        assert out._version == i
        gemm(a, b, out=out)


def test_what_is_no_launch_is_not_kept(launched: list[tuple[Any, ...]]) -> None:
    for a, b in (
        (t(0, 64), t(136, 64).mT),
        (t(72, 0), t(136, 0).mT),
        (t(1, 72, 64), t(136, 64).mT),
    ):
        assert gemm(a, b).shape == gemm(a, b).shape
    assert repeat._calls == {}


def test_few_calls_are_kept(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "MOST_CALLS", 3)
    for rows in range(1, 10):
        gemm(t(rows, 64), t(136, 64).mT)
        assert 1 <= len(repeat._calls) <= 3
