"""What is handed to softmax kernels: rows and alignment; stand-ins compute on the CPU."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_core import arch
from quack_core.testing.inputs import Layout, random
from quack_norm.ops import rows
from quack_norm.ops.row_map import launch as row_launch
from quack_norm.ops.softmax import launch, reference
from quack_norm.ops.softmax.spec import SoftmaxFwdSpec

RESIDENT = 132
SURELY = 2
"""SMs."""
BF16, F32 = torch.bfloat16, torch.float32


class Kernels:
    """Stand-ins for compiled kernels; they insist on what the signatures promise."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, Any]] = []

    def load(self, module: str, spec: Any, config: Any, target: Any) -> Any:
        self.loaded.append((spec, config))

        def forward(x: Tensor, out: Tensor, scale: float) -> None:
            self._take(spec, (x, out))
            out.copy_(reference.forward(x, spec.log, scale, out.dtype))

        def backward(out: Tensor, dout: Tensor, dx: Tensor, scale: float) -> None:
            self._take(spec, (out, dout, dx))
            dx.copy_(reference.backward(out, dout, spec.log, scale, dx.dtype))

        return forward if isinstance(spec, SoftmaxFwdSpec) else backward

    def _take(self, spec: Any, moved: tuple[Tensor, ...]) -> None:
        assert len({tensor.shape for tensor in moved}) == 1
        for tensor in moved:
            assert tensor.dim() == spec.rank and tensor.shape[-1] == spec.n
            assert tensor.shape[-1] == 1 or tensor.stride(-1) == 1
            steps = [
                step * tensor.element_size()
                for step, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
                if extent > 1
            ]
            assert all(number % spec.align == 0 for number in (tensor.data_ptr(), *steps))
        vector = 128 // (8 * moved[0].element_size())
        one_dtype = len({tensor.dtype for tensor in moved}) == 1
        assert spec.in_phase == (one_dtype and rows.in_phase(vector, *moved))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(row_launch.cache, "load", made.load)
    monkeypatch.setattr(row_launch.driver, "multiprocessors", lambda _: SURELY)
    monkeypatch.setattr(row_launch.occupancy, "resident_clusters", lambda *a, **k: RESIDENT)
    for module in (launch, row_launch):
        monkeypatch.setattr(module.arch, "detect", lambda device: arch.SM90)
    monkeypatch.setattr(row_launch.torch_workspace, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(launch, "_launchers", {})
    return made


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("shape", [(6, 40), (3, 4, 33), (2, 3, 2, 4096), (5,)])
def test_rows_of_any_layout(
    kernels: Kernels, shape: tuple[int, ...], layout: Layout, log: bool
) -> None:
    if len(shape) == 1 and layout is Layout.TRANSPOSED:
        pytest.skip("one dimension")
    x = random(shape, BF16, seed=1, layout=layout)
    out = launch.forward(x, log, 0.5, F32)
    assert torch.equal(out, reference.forward(x, log, 0.5, F32))
    dout = random(shape, F32, seed=2, layout=layout)
    dx = launch.backward(out, dout, log, 0.5, BF16)
    assert torch.equal(dx, reference.backward(out, dout, log, 0.5, BF16))


def test_a_kernel_per_kind_and_alignment(kernels: Kernels) -> None:
    x = random((4, 64), BF16, seed=1)
    for count in (1, 2, 4):
        launch.forward(x[:count], False, 1.0, BF16)
    assert len(kernels.loaded) == 1
    odd = random((4, 64), BF16, seed=1, layout=Layout.ODD_OFFSET)
    launch.forward(odd, False, 1.0, BF16)
    launch.forward(odd, False, 2.0, BF16)
    assert [spec.align for spec, _ in kernels.loaded] == [16, 2, 2]
    assert [spec.scaled for spec, _ in kernels.loaded] == [False, False, True]


@pytest.mark.parametrize(
    ("n", "few_in_registers"), [(2049, False), (4096, True), (8191, False), (65536, False)]
)
def test_long_rows_wait_in_shared_memory(kernels: Kernels, n: int, few_in_registers: bool) -> None:
    """Few of them go straight to registers if that gives the same bits."""
    x = random((RESIDENT + 1, n), BF16, seed=1)
    for count in (RESIDENT, RESIDENT + 1):
        launch.forward(x[:count], False, 1.0, BF16)
    waits = [config.unroll > 0 for _, config in kernels.loaded]
    assert waits == ([False, True] if few_in_registers else [True])
    tilings = {config.tiling(spec) for spec, config in kernels.loaded}
    assert len(tilings) == 1
