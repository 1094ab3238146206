"""What is handed to top-k kernels: rows, alignment; stand-ins compute on the CPU."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_core import arch
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.ops.topk import launch, reference
from quack_norm.ops.topk.spec import TopKFwdSpec

BF16, F32 = torch.bfloat16, torch.float32


class Kernels:
    """Stand-ins for compiled kernels; they insist on what the signatures promise."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, Any]] = []

    def load(self, module: str, spec: Any, config: Any, target: Any) -> Any:
        self.loaded.append((module.rpartition(".")[2], spec))

        def forward(x: Tensor, values: Tensor, indices: Tensor) -> None:
            assert x.dim() == spec.rank and x.shape[-1] == spec.n
            assert x.shape[-1] == 1 or x.stride(-1) == 1
            steps = [
                step * x.element_size()
                for step, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True)
                if extent > 1
            ]
            assert all(number % spec.align == 0 for number in (x.data_ptr(), *steps))
            for result in (values, indices):
                assert result.shape == (x.numel() // spec.n, spec.k) and result.is_contiguous()
            right = reference.forward(x, spec.k, spec.softmax)
            for result, expected in zip((values, indices), right, strict=True):
                result.copy_(expected.view(-1, spec.k))

        def backward(dvalues: Tensor, indices: Tensor, values: Tensor | None, dx: Tensor) -> None:
            assert (values is not None) == spec.softmax
            assert dvalues.shape == indices.shape == (dx.shape[0], spec.k)
            assert spec.k == 1 or dvalues.stride(-1) == 1
            for tensor in (indices, values, dx):
                assert tensor is None or tensor.is_contiguous()
            dx.copy_(reference.backward(dvalues, indices, values, spec.n, dx.dtype))

        return forward if isinstance(spec, TopKFwdSpec) else backward


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(launch.cache, "load", made.load)
    monkeypatch.setattr(launch.arch, "detect", lambda device: arch.SM90)
    monkeypatch.setattr(launch.torch_workspace, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(launch, "_launchers", {})
    return made


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("shape", [(6, 40), (3, 4, 33), (2, 3, 2, 600), (5,), (2, 1)], ids=str)
def test_rows_of_any_layout(
    kernels: Kernels, shape: tuple[int, ...], layout: Layout, softmax: bool
) -> None:
    if len(shape) == 1 and layout is Layout.TRANSPOSED:
        pytest.skip("one dimension")
    k = min(5, shape[-1])
    x = random(shape, BF16, seed=1, layout=layout)
    values, indices = launch.forward(x, k, softmax)
    for found, right in zip((values, indices), reference.forward(x, k, softmax), strict=True):
        assert_bitwise(found, right)
    dvalues = random((*shape[:-1], k), F32, seed=2, layout=layout)
    saved = values if softmax else None
    dx = launch.backward(dvalues, indices, saved, shape[-1], BF16)
    assert_bitwise(dx, reference.backward(dvalues, indices, saved, shape[-1], BF16))


def test_a_kernel_per_kind_and_alignment(kernels: Kernels) -> None:
    for layout in (Layout.CONTIGUOUS, Layout.ODD_OFFSET):
        for n, k in ((16, 8), (4096, 8), (4096, 300)):
            for rows in (1, 3):
                x = random((rows, n), BF16, seed=1, layout=layout)
                launch.forward(x, k, False)
    assert [(module, spec.n, spec.align) for module, spec in kernels.loaded] == [
        ("fwd_sort", 16, 16),
        ("fwd_groups", 4096, 16),
        ("fwd_select", 4096, 2),
        ("fwd_sort", 16, 2),
        ("fwd_groups", 4096, 2),
    ]


def test_no_rows_launch_nothing(kernels: Kernels) -> None:
    values, indices = launch.forward(torch.empty(0, 7), 3, True)
    assert values.shape == indices.shape == (0, 3)
    assert launch.backward(values, indices, values, 7, F32).shape == (0, 7)
    assert kernels.loaded == []
