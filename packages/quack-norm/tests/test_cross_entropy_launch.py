"""What is handed to cross-entropy kernels, and what their results become in autograd.

Stand-ins compute on the CPU and insist on what the signatures promise.
"""

import contextlib
import functools
from typing import Any

import pytest
import torch
from cross_entropy_oracle import BF16, F16, F32, NONE, Options, labels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quack_core import arch
from quack_core.errors import UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.ops import rows
from quack_norm.ops.cross_entropy import autograd, launch, reference
from quack_norm.ops.cross_entropy.config import STATE_INTS, WEIGHT_CHUNKS
from quack_norm.ops.cross_entropy.rules import HELD_BYTES
from quack_norm.ops.cross_entropy.spec import CrossEntropyBwdSpec, CrossEntropyFwdSpec
from quack_norm.ops.row_map import launch as row_launch

NAMES = {F32: "float32", BF16: "bfloat16", F16: "float16"}


RESIDENT = 4


class Kernels:
    """Stand-ins for compiled kernels."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.launches: list[Any] = []
        self.state = torch.zeros(STATE_INTS, dtype=torch.int32)

    def load(self, module: str, spec: Any, config: Any, target: Any) -> Any:
        self.loaded.append(spec)
        kind = module.rpartition(".")[2]
        if isinstance(spec, CrossEntropyFwdSpec):
            assert kind.startswith("fwd")
            run: Any = self._forward
        else:
            run = self._backward if isinstance(spec, CrossEntropyBwdSpec) else self._rescale
            assert kind == ("bwd" if isinstance(spec, CrossEntropyBwdSpec) else "rescale")
        return functools.partial(run, spec)

    def _forward(
        self,
        spec: CrossEntropyFwdSpec,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        losses: Tensor | None,
        lse: Tensor,
        peak: Tensor,
        exp_sum: Tensor,
        sums: Tensor | None,
        total: Tensor | None,
        loss: Tensor | None,
        dx: Tensor | None,
        state: Tensor | None,
        *numbers: Any,
    ) -> None:
        self.launches.append(spec)
        *options_given, groups = numbers
        options = self._options(spec, tuple(options_given), spec.reduction)
        stays = not spec.smoothing and (not spec.dx or spec.n * input.itemsize <= HELD_BYTES)
        assert groups == (min(target.numel(), RESIDENT) if stays else 0)
        count = self._rows(spec, input, target, weight, dx if spec.dx else None)
        assert (dx is None) is not spec.dx
        assert all(dense(each, F32, (count,)) for each in (lse, peak, exp_sum))
        assert len({each.data_ptr() for each in (lse, peak, exp_sum)}) == 3
        if spec.reduction == "none":
            assert losses is not None and dense(losses, input.dtype, (count,))
            assert sums is None and total is None and loss is None and state is None
        else:
            assert losses is None and state is self.state
            assert sums is not None and dense(sums, F32, (2, max(count, WEIGHT_CHUNKS)))
            assert total is not None and dense(total, F32, (1,))
            assert loss is not None and dense(loss, input.dtype, (1,))
        logits = input.reshape(-1, spec.n).clone()
        right = reference.forward(logits, target, weight, *options)
        if losses is not None:
            losses.copy_(right[0])
        for found, value in zip((lse, peak, exp_sum), right[1:4], strict=True):
            found.copy_(value)
        if total is not None and loss is not None:
            total.copy_(right[4])
            loss.copy_(right[0])
        if dx is not None:
            saved = (logits, target, weight, *right[2:])
            gradient = reference.backward(torch.ones((), dtype=input.dtype), *saved, *options)
            dx.copy_(gradient.view(dx.shape))

    def _backward(
        self,
        spec: CrossEntropyBwdSpec,
        dloss: Tensor,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        peak: Tensor,
        exp_sum: Tensor,
        total: Tensor,
        dx: Tensor,
        *numbers: Any,
    ) -> None:
        self.launches.append(spec)
        options = self._options(spec, numbers, "none")
        count = self._rows(spec, input, target, weight, dx)
        assert NAMES[dloss.dtype] == spec.dloss and dloss.shape == (count,)
        assert dense(peak, F32, (count,)) and dense(exp_sum, F32, (count,))
        assert dense(total, F32, (1,))
        logits = input.reshape(-1, spec.n).clone()
        saved = (logits, target, weight, peak, exp_sum, total)
        dx.copy_(reference.backward(dloss, *saved, *options).view(dx.shape))

    def _rescale(self, spec: Any, dx: Tensor, factor: Tensor) -> None:
        self.launches.append(spec)
        assert (NAMES[dx.dtype], NAMES[factor.dtype]) == (spec.x, spec.factor)
        assert dx.dim() == 1 and dx.is_contiguous() and dx.data_ptr() % 16 == 0
        assert factor.shape == (1,)
        dx.copy_(dx.float() * factor.float())

    def _options(self, spec: Any, numbers: tuple[Any, ...], reduction: str) -> tuple[Any, ...]:
        """As of `reference.forward`."""
        assert [type(each) for each in numbers] == [int, float, float, float]
        ignore_index, smoothing, softcap, z_loss = numbers
        assert (smoothing > 0, z_loss > 0) == (spec.smoothing, spec.z_loss)
        return ignore_index, reduction, smoothing, softcap if spec.softcap else None, z_loss

    def _rows(
        self, spec: Any, input: Tensor, target: Tensor, weight: Tensor | None, dx: Tensor | None
    ) -> int:
        moved = [input] if dx is None else [input, dx]
        for tensor in moved:
            assert NAMES[tensor.dtype] == spec.x and tensor.shape == input.shape
            assert tensor.dim() == spec.rank and tensor.shape[-1] == spec.n
            assert spec.n == 1 or tensor.stride(-1) == 1
            steps = [
                step * tensor.element_size()
                for step, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
                if extent > 1
            ]
            assert all(number % spec.align == 0 for number in (tensor.data_ptr(), *steps))
        assert spec.in_phase == rows.in_phase(16 // input.element_size(), *moved)
        count = input.numel() // spec.n
        assert dense(target, getattr(torch, spec.target), (count,))
        assert (weight is None) == (spec.weight is None)
        if weight is not None:
            assert NAMES[weight.dtype] == spec.weight and dense(weight, weight.dtype, (spec.n,))
            assert weight.data_ptr() % 16 == 0
        return count


def dense(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(launch.cache, "load", made.load)
    monkeypatch.setattr(launch.arch, "detect", lambda device: arch.SM90)
    monkeypatch.setattr(row_launch.occupancy, "resident_clusters", lambda *a, **k: RESIDENT)
    workspace = launch.torch_workspace
    monkeypatch.setattr(workspace, "counters", lambda device, count: made.state)
    monkeypatch.setattr(row_launch.torch_workspace, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(launch, "_launchers", {})
    return made


OPTIONS = [
    NONE,
    Options(7, "none", 0.1, 3.0, 0.01),
    Options(),
    Options(label_smoothing=1),
    Options(reduction="sum", softcap=2),
    Options(2, "mean", 0.2, 5.0, 0.01),
]
SHAPES = [(6, 40), (4, 33, 3), (2, 8, 3, 5), (9,), (5, 1)]


def operands(
    shape: tuple[int, ...], layout: Layout, dtype: torch.dtype = BF16, ignore: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels that are every other element of memory, weights one element into theirs."""
    classes, place = shape[:2][-1], shape[:1] + shape[2:] if len(shape) > 1 else ()
    twice = labels((*place, 2), classes, 2)
    twice[..., 0].view(-1)[1::3] = ignore
    weight = random((classes,), F32, seed=3, layout=Layout.ODD_OFFSET).abs()
    return random(shape, dtype, seed=1, layout=layout), twice[..., 0], weight


def incoming(shape: tuple[int, ...], layout: Layout) -> Tensor:
    """Gradients of losses; a vector has no transpose."""
    if layout is Layout.TRANSPOSED and len(shape) < 2:
        layout = Layout.COLUMN_STRIDED
    return random(shape, F32, seed=4, layout=layout) if shape else torch.tensor(0.5)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("o", OPTIONS, ids=str)
def test_rows_of_any_layout(
    kernels: Kernels, o: Options, shape: tuple[int, ...], layout: Layout
) -> None:
    if len(shape) == 1 and layout is Layout.TRANSPOSED:
        pytest.skip("one dimension")
    x, target, weight = operands(shape, layout, ignore=o.ignore_index)
    before = x.clone()
    for label, w in ((target, weight), (target.int(), None)):
        right = reference.forward(x, label, w, *o.all())
        found = launch.forward(x, label, w, *o.all(), want_dx=o.reduction != "none")
        assert [t.shape for t in found[:4]] == [t.shape for t in right[:4]]
        for a, b in zip(found[1:4], right[1:4], strict=True):
            assert_bitwise(a, b)
        assert_bitwise(found[0], right[0])
        assert not any(each._is_view() for each in found[:4])  # loss *= 2 has to work
        dloss = incoming(label.shape, layout) if o.reduction == "none" else torch.tensor(3.0)
        saved = (*right[2:4], found[4])
        dx = launch.backward(dloss, x, label, w, *saved, *o.all())
        expected = reference.backward(dloss, x, label, w, *right[2:], *o.all())
        assert dx.shape == x.shape and dx.is_contiguous()
        assert_bitwise(dx, expected)
        if o.reduction == "none":
            assert found[4] is None and found[5] is None
            continue
        assert found[5] is not None
        fused = launch.as_input(found[5], x.shape)
        one = reference.backward(torch.tensor(1.0), x, label, w, *right[2:], *o.all())
        assert fused.is_contiguous()
        assert_bitwise(fused, one)
    assert_bitwise(x, before)


def test_a_kernel_per_kind_and_alignment(kernels: Kernels) -> None:
    x, target, _ = operands((4, 64), Layout.CONTIGUOUS)
    for count in (1, 2, 4):
        launch.forward(x[:count], target[:count], None, *NONE.all())
    assert len(kernels.loaded) == 1
    odd = operands((4, 64), Layout.ODD_OFFSET)[0]
    launch.forward(odd, target, None, *NONE.all())
    launch.forward(odd, target, None, *Options().all())
    launch.forward(odd, target, None, *Options().all(), want_dx=True)
    launch.forward(odd, target.int(), None, *Options(softcap=1.0).all(), want_dx=True)
    assert [spec.align for spec in kernels.loaded] == [16, 2, 2, 2, 2]
    assert [spec.in_phase for spec in kernels.loaded] == [True, True, True, False, False]
    assert [spec.reduction for spec in kernels.loaded] == ["none", "none", *["mean"] * 3]
    assert [spec.softcap for spec in kernels.loaded] == [False] * 4 + [True]


def test_logits_in_rows_are_not_copied(kernels: Kernels) -> None:
    """Also those of more dimensions whose classes are contiguous; ranks differ by their strides."""
    for x, rank in (
        (random((6, 50), BF16, seed=1)[:, 3:43], 2),
        (random((2, 3, 40), BF16, seed=1).movedim(-1, 1), 2),
        (random((2, 4, 3, 40), BF16, seed=1)[:, :3].movedim(-1, 1), 3),
        (random((2, 3, 4, 50), BF16, seed=1)[..., :40].movedim(-1, 1), 2),
    ):
        packed = launch.as_rows(x)
        assert packed.data_ptr() == x.data_ptr() and packed.dim() == rank
        target = torch.zeros(x.shape[:1] + x.shape[2:], dtype=torch.int64)
        dx = launch.forward(x, target, None, *Options().all(), True, True)[5]
        assert dx is not None and dx.data_ptr() == x.data_ptr()


def test_of_a_copy_the_gradient_takes_the_place(kernels: Kernels) -> None:
    x, target, _ = operands((2, 40, 3), Layout.CONTIGUOUS)
    sizes: list[int] = []
    empty_like = torch.empty_like

    def counting(given: Tensor, **how: Any) -> Tensor:
        sizes.append(given.numel())
        return empty_like(given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", counting)
        launch.forward(x, target, None, *Options().all(), want_dx=True)
    assert sizes == [target.numel()] * 2


@pytest.mark.parametrize("want_dx", [False, True])
@pytest.mark.parametrize("shape", [(0, 8), (2, 8, 0), (0, 0), (3, 0), (0,)], ids=str)
def test_ks_05_nothing_is_not_launched(
    kernels: Kernels, shape: tuple[int, ...], want_dx: bool
) -> None:
    x = torch.zeros(shape)
    target = torch.full(shape[:1] + shape[2:] if len(shape) > 1 else (), -100)
    for o in (NONE, Options(), Options(reduction="sum")):
        right = reference.forward(x, target, None, *o.all())
        *found, dx = launch.forward(x, target, None, *o.all(), want_dx and o is not NONE)
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, right, strict=True))
        back = launch.backward(torch.ones_like(right[0]), x, target, None, *right[2:], *o.all())
        assert back.shape == shape
        if dx is not None:
            launch.rescale(dx, torch.tensor(2.0))
            assert launch.as_input(dx, x.shape).shape == shape
    assert kernels.launches == []


# --- autograd


def fused(x: Tensor, target: Tensor, o: Options, inplace: bool = False) -> tuple[Tensor, Tensor]:
    return autograd.FusedFunction.apply(inplace, x, target, None, *o.all())  # type: ignore[no-any-return]


@pytest.mark.parametrize("o", OPTIONS[2:], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.375])
def test_fused_gradients_are_those_of_the_reference(
    kernels: Kernels, factor: float, shape: tuple[int, ...], o: Options
) -> None:
    x, target, _ = operands(shape, Layout.CONTIGUOUS, F32, o.ignore_index)
    leaf = x.clone().requires_grad_()
    loss, lse = fused(leaf, target, o)
    (dx,) = torch.autograd.grad(loss, leaf, torch.tensor(factor))
    right = reference.forward(x, target, None, *o.all())
    expected = reference.backward(torch.tensor(1.0), x, target, None, *right[2:], *o.all())
    assert_bitwise(dx, expected * factor)
    assert not lse.requires_grad
    assert_bitwise(leaf.detach(), x)
    assert [type(each).__name__ for each in kernels.launches] == [
        "CrossEntropyFwdSpec",
        "RescaleSpec",
    ]


def test_the_fused_loss_can_be_changed_in_place(kernels: Kernels) -> None:
    x, target, _ = operands((4, 8), Layout.CONTIGUOUS, F32)
    found = []
    for change in (lambda loss: loss.mul_(0.5), lambda loss: loss * 0.5):
        leaf = x.clone().requires_grad_()
        change(fused(leaf, target, Options())[0]).backward()
        found.append(leaf.grad)
    assert_bitwise(*found)


def test_ks_09_a_second_backward_of_a_fused_loss_raises(kernels: Kernels) -> None:
    x, target, _ = operands((4, 8), Layout.CONTIGUOUS, F32)
    x.requires_grad_()
    loss, _ = fused(x, target, Options())
    (first,) = torch.autograd.grad(loss, x, torch.tensor(2.0), retain_graph=True)
    kept = first.clone()
    with pytest.raises(UnsupportedError, match='second backward.*reduction="none"'):
        torch.autograd.grad(loss, x)
    assert_bitwise(first, kept)


def test_no_gradient_flows_from_lse_alone(kernels: Kernels) -> None:
    x, target, _ = operands((4, 8), Layout.CONTIGUOUS, F32)
    x.requires_grad_()
    for _, lse in (
        fused(x, target, Options()),
        autograd.CrossEntropyFunction.apply(False, x, target, None, *NONE.all()),
    ):
        (x.sum() + lse.sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))


def test_second_derivatives_of_a_fused_loss_raise(kernels: Kernels) -> None:
    x, target, _ = operands((4, 8), Layout.CONTIGUOUS, F32)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(fused(x, target, Options())[0], x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        dx.square().sum().backward()


@pytest.mark.parametrize("width", [40, 47], ids=["contiguous", "strided"])
def test_in_place_the_gradient_takes_the_logits_memory(kernels: Kernels, width: int) -> None:
    x, target, _ = operands((5, width), Layout.CONTIGUOUS, F32)
    leaf = x.clone().requires_grad_()
    logits = (leaf * 3)[:, :40]
    target = target % 40
    held, address = logits.detach().clone(), logits.data_ptr()
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    loss, _ = fused(logits, target, Options(), inplace=True)
    assert not torch.equal(logits.detach(), held)
    loss.backward(torch.tensor(0.25))
    right = reference.forward(held, target, None, *Options().all())
    saved = (held, target, None, *right[2:])
    expected = reference.backward(torch.tensor(1.0), *saved, *Options().all()) * 0.25
    assert seen[0].data_ptr() == address
    assert_bitwise(seen[0].contiguous(), expected)
    assert leaf.grad is not None
    assert_bitwise(leaf.grad[:, :40].contiguous(), expected * 3)


def test_ks_09_in_place_whoever_kept_the_logits_notices(kernels: Kernels) -> None:
    x, target, _ = operands((4, 8), Layout.CONTIGUOUS, F32)
    leaf = x.clone().requires_grad_()
    logits = leaf * 2
    other = logits.square().mean()
    loss = fused(logits, target, Options(), inplace=True)[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def test_a_gradient_may_be_kept_elsewhere_meanwhile(kernels: Kernels) -> None:
    """Hooks on saved tensors, as those that move them to the host."""
    x, target, _ = operands((4, 8), Layout.CONTIGUOUS, F32)
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        loss, _ = fused(leaf, target, Options())
    loss.backward(torch.tensor(2.0))
    plain = x.clone().requires_grad_()
    fused(plain, target, Options())[0].backward(torch.tensor(2.0))
    assert leaf.grad is not None and plain.grad is not None
    assert_bitwise(leaf.grad, plain.grad)


def test_modes_see_the_backward_and_it_can_be_repeated(kernels: Kernels) -> None:
    """Where torch has to see each operation, what the forward computed is not overwritten."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    x, target, _ = operands((4, 8), Layout.CONTIGUOUS, F32)
    x.requires_grad_()
    loss, _ = fused(x, target, Options())
    with Watch():
        twice = [torch.autograd.grad(loss, x, loss * 0 + 2, True)[0] for _ in range(2)]
    (one,) = torch.autograd.grad(loss, x)
    assert_bitwise(twice[0], 2 * one)
    assert_bitwise(twice[1], 2 * one)


def test_rescale_of_memory_without_alignment() -> None:
    for layout in (Layout.ODD_OFFSET, Layout.ROW_STRIDED):
        dx = random((3, 5), BF16, seed=1, layout=layout)
        right = dx * 3
        launch.rescale(dx, torch.tensor(3.0, dtype=BF16))
        assert_bitwise(dx.contiguous(), right)
