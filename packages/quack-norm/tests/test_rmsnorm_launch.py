"""How operands reach a kernel, on any machine: a stand-in computes on the CPU what it is handed."""

import contextlib
from typing import Any

import pytest
import torch
from rmsnorm_fake import Kernel
from rmsnorm_oracle import BF16, F32, Case, Operands, operands
from torch import Tensor

from quack_core import torch_workspace
from quack_core.errors import ArchError, UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import Layout, arrange, random
from quack_norm.ops import rows
from quack_norm.ops.rmsnorm import autograd, launch, prepare, reference
from quack_norm.ops.row_map import launch as row_launch


def forward(data: Operands, **changes: Any) -> Any:
    options = {"out_dtype": None, "residual_dtype": BF16, "want_rstd": True} | changes
    return launch.forward(data.x, data.weight, data.bias, data.residual, 1e-6, 0.5, **options)


SHAPES = [(256,), (5, 256), (3, 5, 256), (2, 3, 5, 256), (2, 2, 3, 5, 64), (1, 1, 1, 64), (5, 1)]


# A single row has no heads, and nothing to swap its columns with.
PLACES = [
    (shape, layout, per_head)
    for shape in SHAPES
    for layout in Layout
    for per_head in (False, True)
    if len(shape) > 1 or not (per_head or layout is Layout.TRANSPOSED)
]


@pytest.mark.parametrize(
    ("shape", "layout", "per_head"),
    PLACES,
    ids=[f"{s}-{x.value}-{'per_head' if p else 'shared'}" for s, x, p in PLACES],
)
def test_any_rank_and_layout(
    shape: tuple[int, ...], layout: Layout, per_head: bool, kernel: Kernel
) -> None:
    case = Case("", shape, bias=F32, residual=BF16, prenorm=True, per_head=per_head)
    data = operands(case, "cpu")
    with torch.no_grad():
        data.x = arrange(data.x, layout)
        y, h, rstd = forward(data)
        args = (data.x, data.weight, data.bias, data.residual, 1e-6, 0.5, None, BF16)
        expected = reference.forward(*args)
        for found, right in zip((y, h, rstd), expected, strict=True):
            assert found.is_contiguous()
            assert_bitwise(found, right)
        dout = arrange(data.dout, layout)
        back = (h, data.weight, dout, rstd, data.dresidual_out, 0.5, BF16, F32, True, F32, per_head)
        for found, right in zip(launch.backward(*back), reference.backward(*back), strict=True):
            assert found is not None and right is not None
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert len(kernel.launched) == 2


COPIES = [
    ("contiguous", (2, 3, 64), lambda x: x, False),
    ("KN-04 slice of a packed row", (5, 192), lambda x: x[:, 64:128], False),
    ("KN-04 heads of a packed row", (5, 9 * 64), lambda x: x[:, 192:384].view(5, 3, 64), False),
    ("KN-04 heads, batch and tokens merge", (2, 5, 9, 64), lambda x: x[:, :, 3:6], False),
    ("batch and heads swapped", (3, 5, 64), lambda x: x.transpose(0, 1), False),
    ("expanded rows", (1, 1, 64), lambda x: x.expand(4, 3, 64), False),
    ("four dimensions, contiguous", (2, 2, 3, 64), lambda x: x, False),
    ("three outer strides", (4, 4, 6, 64), lambda x: x[::2, ::2, ::2], True),
    ("transposed", (3, 64, 5), lambda x: x.transpose(1, 2), True),
    ("every second column", (5, 128), lambda x: x[:, ::2], True),
]


@pytest.mark.parametrize(("why", "shape", "view", "copied"), COPIES, ids=[c[0] for c in COPIES])
def test_copies_only_where_strides_demand_it(
    why: str, shape: tuple[int, ...], view: Any, copied: bool, kernel: Kernel
) -> None:
    x = view(random(shape, BF16, seed=1))
    y, _, _ = launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False)
    assert_bitwise(y, reference.forward(x, None, None, None, 1e-6, 0.0, None, None)[0])
    handed = kernel.launched[-1][0]
    assert handed is not None
    assert (handed.data_ptr() != x.data_ptr()) == copied


def test_three_dimensions_are_handed_over_as_they_are(kernel: Kernel) -> None:
    x = random((3, 5, 64), BF16, seed=1)
    launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False)
    assert kernel.launched[-1][0] is x


def test_one_launcher_serves_all_batches(kernel: Kernel) -> None:
    for count in (1, 2, 17, 255):
        x = random((count, 64), BF16, seed=1)
        launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False)
    assert (len(kernel.loaded), len(kernel.launched)) == (1, 4)


def test_weight_with_stride_is_copied_after_the_refusal(kernel: Kernel) -> None:
    x = random((5, 64), BF16, seed=1)
    w = random((64, 2), F32, seed=2)[:, 0]
    y, _, rstd = launch.forward(x, w, None, None, 1e-6, 0.0, None, None, True)
    args = (x, w, None, None, 1e-6, 0.0, None, None, False)
    assert_bitwise(y, reference.forward(*args)[0])
    back = (x, w, x, rstd, None, 0.0, BF16, None, True, None, False)
    assert_bitwise(launch.backward(*back)[2], reference.backward(*back)[2])


def test_out_is_written_in_place(kernel: Kernel) -> None:
    x = random((2, 3, 5, 64), BF16, seed=1)
    expected = reference.forward(x, None, None, None, 1e-6, 0.0, None, None)[0]
    out = torch.zeros(2, 3, 5, 128, dtype=BF16)[..., :64]
    result, _, _ = launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False, out)
    assert result is out
    assert_bitwise(out, expected)


def test_a_launchers_own_error_comes_through(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        def run(*_: Any) -> None:
            raise ValueError("the launcher's own")

        return run

    monkeypatch.setattr(prepare.cache, "load", broken)
    with pytest.raises(ValueError, match="the launcher's own"):
        launch.forward(torch.ones(2, 64), None, None, None, 1e-6, 0.0, None, None, False)


@pytest.mark.parametrize(
    ("shape", "strides", "groups"),
    [
        ((5, 64), (64, 1), [5]),
        ((2, 3, 64), (192, 64, 1), [6]),
        ((2, 3, 64), (1000, 64, 1), [2, 3]),
        ((2, 3, 4, 64), (1000, 256, 64, 1), [2, 12]),
        ((2, 1, 4, 64), (256, 7, 64, 1), [8]),
        ((2, 3, 4, 64), (5000, 1000, 64, 1), [2, 3, 4]),
        ((4, 3, 64), (0, 0, 1), [12]),
        ((4, 3, 64), (0, 64, 1), [4, 3]),
        ((64,), (1,), []),
        ((1, 1, 64), (3, 5, 1), []),
    ],
)
def test_outer_groups(shape: tuple, strides: tuple, groups: list) -> None:
    assert rows.outer_groups(shape, strides) == groups


def test_an_unknown_architecture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_workspace, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(launch, "_forward", {})
    monkeypatch.setattr(prepare.arch, "detect", lambda _: prepare.arch.from_capability((8, 0)))
    with pytest.raises(ArchError, match="8.0 is not supported"):
        launch.forward(torch.ones(2, 64), None, None, None, 1e-6, 0.0, None, None, False)


FUNCTION = [
    Case("everything", (5, 256), bias=F32, residual=BF16, residual_out=F32, prenorm=True),
    Case("residual without h", (5, 256), residual=BF16, residual_out=BF16),
    Case("h is x", (5, 256), prenorm=True, residual_out=BF16),
    Case("h is x in another dtype", (5, 256), prenorm=True, residual_out=F32),
    Case("x alone", (2, 3, 5, 256), weight=None),
    Case("per head", (5, 3, 64), per_head=True, bias=F32),
]


@pytest.mark.parametrize("case", FUNCTION, ids=lambda case: case.id)
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
def test_function_agrees_with_the_operator(case: Case, centred: bool, kernel: Kernel) -> None:
    """Eager calls on CUDA tensors go through the autograd function, all others the operator."""
    data = operands(case, "cpu")
    args = (data.x, data.weight, data.bias, data.residual, 1e-6, 0.0, case.out, case.residual_out)
    leaves = list(data.leaves().values())

    def run(call: Any) -> list[Tensor]:
        y, h, rstd = call(*args, centred)
        assert y.requires_grad and not rstd.requires_grad
        outputs, incoming = [y], [data.dout]
        if case.prenorm:
            outputs.append(h)
            incoming.append(data.dresidual_out)
        return [*outputs, rstd, *torch.autograd.grad(outputs, leaves, incoming)]

    found, right = run(autograd.RMSNormFunction.apply), run(autograd.rmsnorm_fwd)
    for a, b in zip(found, right, strict=True):
        assert_bitwise(a, b)


def test_function_returns_x_and_adds_its_gradient_inside(kernel: Kernel) -> None:
    x = random((5, 64), BF16, seed=1).requires_grad_()
    y, h, _ = autograd.RMSNormFunction.apply(x, None, None, None, 1e-6, 0.0, None, BF16, False)
    assert h.data_ptr() == x.data_ptr()
    assert h.grad_fn is y.grad_fn
    (dx,) = torch.autograd.grad(h, x, torch.ones_like(x), retain_graph=True)
    assert_bitwise(dx, torch.ones_like(x))


def test_function_has_no_second_derivative(kernel: Kernel) -> None:
    x = random((5, 64), F32, seed=1).requires_grad_()
    y, _, _ = autograd.RMSNormFunction.apply(x, None, None, None, 1e-6, 0.0, None, None, False)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        dx.sum().backward()


def test_few_rows_do_not_ask_how_many_are_resident(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking takes 10 ms of a first call."""
    asked: list[object] = []

    def resident(*args: object, registers: int) -> int:
        asked.append(args)
        return 13

    monkeypatch.setattr(row_launch.occupancy, "resident_clusters", resident)
    options = {"out_dtype": None, "residual_dtype": None, "want_rstd": False}
    for rows_, times in ((1, 0), (2, 0), (3, 1), (100, 1)):
        x, weight = random((rows_, 8192), BF16, "cpu", seed=1), torch.ones(8192, dtype=BF16)
        launch.forward(x, weight, None, None, 1e-6, 0.0, **options)
        assert len(asked) == times
