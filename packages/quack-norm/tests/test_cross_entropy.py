"""Cross-entropy as callers see it: values against float64, and torch's semantics."""

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_oracle import BF16, F16, F32, NONE, Options, judge, labels
from torch import Tensor

import quack_norm
from quack_core.errors import DTypeError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import Layout, dirty_allocator, random
from quack_norm.ops.cross_entropy import check
from quack_norm.ops.cross_entropy.api import cross_entropy
from quack_norm.ops.cross_entropy.autograd import cross_entropy_bwd, cross_entropy_fwd

INF, NAN = math.inf, math.nan
SHORT = {F32: "fp32", BF16: "bf16", F16: "fp16"}


def ours(x: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> tuple[Tensor, Tensor]:
    return cross_entropy(x, target, weight, **vars(o), return_lse=True)  # type: ignore[return-value]


@dataclass(frozen=True)
class Case:
    """One situation.

    Args:
        why: what this case has that no other has.
        shape: of the logits.
        x, weight: dtypes; None if there is no weight.
        dloss: the incoming gradient of a sum or mean; None is a random one.
        layout: of logits, and of incoming gradients of losses.
    """

    why: str
    shape: tuple[int, ...]
    o: Options = field(default_factory=Options)
    x: torch.dtype = BF16
    target: torch.dtype = torch.int64
    weight: torch.dtype | None = None
    dloss: float | None = 1.0
    layout: Layout = Layout.CONTIGUOUS
    scale: float = 2.0

    def __str__(self) -> str:
        return f"{self.why.replace(' ', '_')}-{'x'.join(map(str, self.shape))}-{SHORT[self.x]}"


ALL = Options(3, "mean", 0.1, 5.0, 0.01)
SUM = Options(reduction="sum")
CASES = [
    Case("the usual call", (37, 4096)),
    Case("the usual call in float32", (37, 4096), x=F32, scale=5.0),
    Case("float16 keeps the logits", (37, 4096), x=F16),
    Case("a gradient that is not one", (37, 4096), dloss=0.3),
    Case("a gradient that is not one in float32", (37, 1001), x=F32, dloss=-3.0),
    Case("a gradient of zero", (5, 4096), dloss=0.0),
    Case("int32 labels", (37, 1000), target=torch.int32),
    Case("a sum", (37, 1000), SUM, dloss=0.25),
    Case("losses of rows", (37, 4096), NONE),
    Case("losses of rows in float32", (37, 1000), NONE, x=F32),
    Case("a class that is ignored", (37, 1000), Options(ignore_index=3)),
    Case("weights", (37, 1000), weight=F32),
    Case("weights in 16 bits", (37, 1000), NONE, x=F32, weight=F16),
    Case("weights of an odd number", (19, 1001), weight=BF16, dloss=2.0),
    Case("smoothing", (37, 4096), Options(label_smoothing=0.1)),
    Case("smoothing of odd rows", (19, 4095), Options(label_smoothing=0.1), x=F32),
    Case("smoothing alone", (19, 1000), Options(label_smoothing=1.0)),
    Case("smoothing with weights", (37, 4096), Options(label_smoothing=0.3), weight=F32),
    Case("smoothing with weights of odd rows", (9, 4097), replace(NONE, label_smoothing=0.3),
         weight=BF16),
    Case("softcap", (37, 4096), Options(softcap=5.0), scale=9.0),
    Case("softcap of odd rows", (19, 4097), Options(softcap=30.0), scale=40.0),
    Case("z-loss", (37, 4096), Options(z_loss=0.01)),
    Case("z-loss of losses of rows", (37, 999), replace(NONE, z_loss=0.01), x=F32),
    Case("everything", (37, 1000), ALL, weight=F32, dloss=0.5),
    Case("everything in float32", (37, 999), ALL, x=F32, weight=F32, target=torch.int32),
    Case("everything of losses of rows", (19, 4100), replace(ALL, reduction="none"), weight=BF16),
    Case("everything of a sum in float16", (19, 513), replace(ALL, reduction="sum"), x=F16,
         weight=F16, dloss=2.0),
    Case("one row without a batch", (1000,)),
    Case("one row without a batch of losses", (1001,), NONE, x=F32),
    Case("one class", (7, 1), dloss=3.0),
    Case("one class of losses", (7, 1), NONE, x=F32),
    Case("two classes", (600, 2), x=F32),
    Case("a dimension behind the classes", (3, 33, 50), weight=F32),
    Case("two dimensions behind the classes", (2, 129, 3, 5), replace(ALL, reduction="none")),
    Case("classes that lie contiguously", (3, 264, 5), layout=Layout.TRANSPOSED),
    Case("long rows", (5, 32768), Options(label_smoothing=0.1, z_loss=1e-4), x=F32, weight=F32),
]  # fmt: skip


def arranged(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Logits, labels, weights and the incoming gradient."""
    shape = case.shape
    classes, place = shape[:2][-1], shape[:1] + shape[2:] if len(shape) > 1 else ()
    x = random(shape, case.x, device, seed=1, scale=case.scale, layout=case.layout)
    target = labels(place, classes, 2)
    target.view(-1)[1::3] = case.o.ignore_index
    weight = None
    if case.weight is not None:
        weight = random((classes,), case.weight, device, seed=3).abs() + 0.1
    if case.o.reduction == "none":
        layout = Layout.CONTIGUOUS if len(place) < 2 else case.layout
        dloss = random(place, case.x, device, seed=4, layout=layout)
    else:
        dloss = torch.tensor(case.dloss, dtype=case.x, device=device)
    return x, target.to(device, case.target), weight, dloss


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case, device: str) -> None:
    x, target, weight, dloss = arranged(case, device)
    dirty_allocator(device)
    judge(ours, x, target, weight, case.o, dloss)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("classes", [264, 257])
def test_layouts(classes: int, reduction: str, layout: Layout, device: str) -> None:
    case = Case("", (7, classes), Options(reduction=reduction), layout=layout, dloss=0.5)
    judge(ours, *arranged(case, device)[:3], case.o, arranged(case, device)[3])


WIDTHS = [3, 31, 128, 513, 2048, 2049, 8191, 16384, 65536, 65537, 131072]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("classes", WIDTHS)
def test_widths(classes: int, dtype: torch.dtype, device: str) -> None:
    for o in (Options(), NONE):
        x, target, _, dloss = arranged(Case("", (5, classes), o, dtype), device)
        judge(ours, x, target, None, o, dloss)


VOCABULARIES = [32000, 50257, 102400, 128256, 151936, 152064, 201088, 256000, 262144]


@pytest.mark.exhaustive
@pytest.mark.parametrize("classes", VOCABULARIES)
def test_ks_18_vocabularies(classes: int, device: str) -> None:
    if device == "cpu" and classes > 60000:
        pytest.skip("only kernels differ with such sizes: run with --device cuda")
    for rows in (1, 7, 8):
        x, _, _, dloss = arranged(Case("", (rows, classes), dloss=0.5), device)
        target = torch.tensor([0, classes - 1, -100, 17, classes // 2, 1, -100, 5], device=device)
        judge(ours, x, target[:rows], None, Options(), dloss)


def test_ks_02_logits_far_from_zero(device: str) -> None:
    x = torch.tensor([[0.0, 1.0, 0.0]], device=device).expand(3, 3) - 1e7
    loss = cross_entropy(x, torch.arange(3, device=device), reduction="none")
    right = torch.tensor([1.5514, 0.5514, 1.5514])
    torch.testing.assert_close(loss.cpu(), right, rtol=0, atol=5e-5)  # as it is printed
    judge(ours, x, torch.arange(3, device=device), None, NONE, torch.ones(3, device=device))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_ks_03_widths_around_powers_of_two(reduction: str, device: str) -> None:
    """Equal logits: the loss is log(w), the gradient 1/w and -1 + 1/w."""
    for width in (*range(2, 40), *range(511, 516), *range(1021, 1026), 3001, 4095):
        o = Options(reduction=reduction)
        target = torch.tensor([0, width - 1], device=device)
        dloss = torch.ones(2 if reduction == "none" else (), device=device)
        judge(ours, torch.zeros(2, width, device=device), target, None, o, dloss)


SPECIAL = torch.tensor(
    [
        [-INF] * 4,
        [0.5, 1, 2, -1],
        [1, INF, 0, 2],
        [INF, 1, 0, 2],
        [NAN, 1, 0, 2],
        [-INF, 1, -INF, 2],
        [0, -1, 3, 0.25],
    ]
)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("repeat", [1, 33, 1025])
def test_ks_04_infinite_and_nan_logits(repeat: int, smoothing: float, device: str) -> None:
    """NaN, inf and numbers stand where torch has them; rows beside them are untouched."""
    o, x = replace(NONE, label_smoothing=smoothing), SPECIAL.repeat(1, repeat).to(device)
    for label in range(4):
        target = torch.full((7,), label, device=device)
        judge(ours, x, target, None, o, torch.ones(7, device=device))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ks_04_ignored_rows_may_hold_anything(reduction: str, device: str) -> None:
    target = torch.tensor([-100, 2, -100, -100, -100, 1, -100], device=device)
    for o in (Options(), Options(label_smoothing=0.1), Options(z_loss=0.1, softcap=3.0)):
        x = SPECIAL.to(device).requires_grad_()
        loss = cross_entropy(x, target, **vars(replace(o, reduction=reduction)))
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        assert torch.equal(dx[[0, 2, 3, 4, 6]], torch.zeros(5, 4, device=device))
        assert dx[[1, 5]].isfinite().all() and dx[1].abs().sum() > 0


NOTHING = [(4, 8), (8,), (2, 8, 3), (0, 8), (2, 8, 0), (0, 0), (3, 0), (0,)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", NOTHING, ids=str)
def test_ks_05_none_counts(shape: tuple[int, ...], weighted: bool, device: str) -> None:
    x = random(shape, F32, device, seed=1).requires_grad_()
    place = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.full(place, -100, device=device)
    weight = torch.arange(float(shape[:2][-1]), device=device) if weighted else None
    for reduction, expected in (("mean", NAN), ("sum", 0.0), ("none", 0.0)):
        loss = cross_entropy(x, target, weight, reduction=reduction)
        wanted = torch.full_like(loss, expected)
        assert torch.equal(loss.detach().nan_to_num(-1), wanted.nan_to_num(-1))
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        assert_bitwise(dx, torch.zeros(shape, device=device))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
def test_ks_06_each_row_has_its_own_incoming_gradient(layout: Layout, device: str) -> None:
    target = torch.tensor([-100, 3, 0, 6, -100, 1], device=device)
    each = random((2, 6), F32, device, seed=2, layout=layout)[1]
    x = random((6, 7), F32, device, seed=1)
    three = torch.tensor(3.0, device=device)
    for dloss in (each, three.expand(6), torch.zeros(6, device=device)):
        judge(ours, x, target, None, NONE, dloss)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_ks_06_incoming_gradients_of_any_dtype(dtype: torch.dtype, device: str) -> None:
    """Of the operator: autograd itself converts to the dtype of the loss."""
    x = random((2, 40, 3), BF16, device, seed=1)
    target = labels((2, 3), 40, 2).to(device)
    dloss = random((3, 2), dtype, device, seed=3).t()
    _, _, *saved = cross_entropy_fwd(x, target, None, *NONE.all())
    dx = cross_entropy_bwd(dloss, x, target, None, *saved, *NONE.all())
    same = cross_entropy_bwd(dloss.float().contiguous(), x, target, None, *saved, *NONE.all())
    assert_bitwise(dx, same)


def test_ks_07_the_mean_is_over_kept_rows(device: str) -> None:
    x, target = random((16, 5), F32, seed=1), labels((16,), 5, 2)
    target[[0, 1, 3, 4, 7, 8, 11, 12, 15]] = -100
    kept = [(row, t) for row, t in zip(x.tolist(), target.tolist(), strict=True) if t != -100]
    rows = [math.log(sum(map(math.exp, row))) - row[t] for row, t in kept]
    found = float(cross_entropy(x.to(device), target.to(device)))
    assert abs(found - sum(rows) / 7) <= 16 * torch.finfo(F32).eps * max(rows)


def test_ks_08_the_loss_is_there_without_a_gradient(device: str) -> None:
    x, target = random((5, 40), F32, device, seed=1), labels((5,), 40, 2).to(device)
    for reduction in ("none", "mean", "sum"):
        leaf = x.clone().requires_grad_()
        right = cross_entropy(leaf, target, reduction=reduction).detach()
        assert (right != 0).all()
        with torch.no_grad():
            assert_bitwise(cross_entropy(leaf, target, reduction=reduction), right)
        with torch.inference_mode():
            assert_bitwise(cross_entropy(x, target, reduction=reduction).clone(), right)
        assert_bitwise(cross_entropy(x, target, reduction=reduction), right)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(9, 33), (3, 33, 4)], ids=str)
def test_ks_09_operands_stay_as_they_are(
    shape: tuple[int, ...], reduction: str, device: str
) -> None:
    """loss = CE(logits) + mean of squares: both parts see the same logits."""
    x = random(shape, F32, device, seed=1)
    target = labels(shape[:1] + shape[2:], 33, 2, -100).to(device)
    weight = random((33,), F32, device, seed=3).abs()
    kept = [t.clone() for t in (x, target, weight)]
    alone, both = x.clone().requires_grad_(), x.clone().requires_grad_()
    cross_entropy(alone, target, weight, reduction=reduction).sum().backward()
    loss = cross_entropy(both, target, weight, reduction=reduction).sum() + both.square().mean()
    loss.backward()
    assert alone.grad is not None and both.grad is not None
    square = 2 * x.double() / x.numel()
    right = alone.grad.double() + square
    assert_accurate(both.grad, right, alone.grad + square.float())
    for tensor, before in zip((both.detach(), target, weight), kept, strict=True):
        assert_bitwise(tensor, before)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_ks_09_losses_of_rows_have_as_many_backwards_as_wanted(
    dtype: torch.dtype, device: str
) -> None:
    x = random((9, 33), dtype, device, seed=1).requires_grad_()
    target, dloss = labels((9,), 33, 2, -100).to(device), random((9,), dtype, device, seed=4)
    loss = cross_entropy(x, target, reduction="none")
    first = torch.autograd.grad(loss, x, dloss, retain_graph=True)[0]
    kept = first.clone()
    torch.autograd.grad(loss, x, 2 * dloss, retain_graph=True)
    assert_bitwise(torch.autograd.grad(loss, x, dloss)[0], kept)
    assert_bitwise(first, kept)


def test_ks_12_ks_13_known_values(device: str) -> None:
    """Label smoothing skips ignored rows; the mean divides by the weights of kept labels."""
    x = torch.tensor([[1.0, 2, 3], [3, 2, 1], [0, 0, 0]], device=device)
    target = torch.tensor([2, -100, 0], device=device)
    smooth, w = Options(label_smoothing=0.1), torch.tensor([1, 2, 0.5], device=device)
    for weight, o, reduction, expected in (
        (None, smooth, "mean", 0.8031),
        (None, smooth, "sum", 1.6062),
        (None, smooth, "none", [0.5076, 0, 1.0986]),
        (w, Options(), "mean", 0.8683),
        (w, Options(), "none", [0.2038, 0, 1.0986]),
    ):
        leaf = x.clone().requires_grad_()
        loss = cross_entropy(leaf, target, weight, **vars(replace(o, reduction=reduction)))
        assert_bitwise(
            loss.detach().cpu().mul(1e4).round(), torch.tensor(expected).mul(1e4).round()
        )


@pytest.mark.parametrize("classes", [3, 32000, 65537])
def test_ks_14_softcap_of_very_negative_logits(classes: int, device: str) -> None:
    """What pads a row must not enter the sum once the softcap has bounded it."""
    x, o = torch.full((1, classes), -40.0, device=device), Options(softcap=1.0)
    target = torch.tensor([1], device=device)
    _, lse = ours(x, target, None, o)
    if classes == 3:
        assert round(float(lse), 4) == 0.0986
    for logits in (x, torch.full_like(x, -INF)):
        for options in (o, replace(NONE, softcap=1.0, label_smoothing=0.1)):
            dloss = torch.ones(1 if options.reduction == "none" else (), device=device)
            judge(ours, logits, target, None, options, dloss)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bad", [-1, 8, 2**40, -(2**63), -99], ids=str)
def test_illegal_labels_give_nan_or_raise(bad: int, weighted: bool, device: str) -> None:
    x = random((2, 8, 2), F32, device, seed=1).requires_grad_()
    target = torch.tensor([[1, bad], [3, -100]], device=device)
    weight = torch.arange(8.0, device=device) if weighted else None
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"target\[0, 1\] is {bad}: .*less than.*8"):
            cross_entropy(x, target, weight)
        return
    for smoothing in (0.0, 0.1):
        loss = cross_entropy(x, target, weight, reduction="none", label_smoothing=smoothing)
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        assert loss.isnan().tolist() == [[False, True], [False, False]]
        assert dx.isnan().all(1).tolist() == dx.isnan().any(1).tolist() == loss.isnan().tolist()
        mean = cross_entropy(x, target, weight, label_smoothing=smoothing)
        (dx,) = torch.autograd.grad(mean, x)
        assert mean.isnan() and dx[1, :, 1].eq(0).all()
        assert dx.isnan().all(1).tolist() == [[True, True], [True, False]]


def test_int32_labels_are_not_compared_modulo_2_32(device: str) -> None:
    x = random((1, 8), F32, device, seed=1)
    target = torch.tensor([1], dtype=torch.int32, device=device)
    far = cross_entropy(x, target, ignore_index=2**32 + 1)
    assert_bitwise(far, cross_entropy(x, target))


# --- torch's semantics


TORCHS = {"size_average": None, "reduce": None, "reduction": "sum", "label_smoothing": 0.1}


def test_torch_signatures_are_accepted(device: str) -> None:
    x, target = random((5, 7), F32, device, seed=1), labels((5,), 7, 2).to(device)
    weight = random((7,), F32, device, seed=3).abs()
    call = {"input": x, "target": target, "weight": weight, "ignore_index": 3, **TORCHS}
    assert set(call) == set(inspect.signature(F.cross_entropy).parameters)
    given: Any = call
    torch.testing.assert_close(quack_norm.cross_entropy(**given), F.cross_entropy(**given))
    for mine, theirs in (
        (quack_norm.softmax, torch.softmax),
        (quack_norm.log_softmax, torch.log_softmax),
    ):
        for args, named in (
            ((x, 0), {}),
            ((x, 1, torch.float32), {}),
            ((x,), {"dim": -1}),
            ((), {"input": x, "dim": 0, "dtype": torch.float32}),
        ):
            torch.testing.assert_close(mine(*args, **named), theirs(*args, **named))


@pytest.mark.filterwarnings("ignore:.*size_average")
def test_torchs_modules_and_deprecated_arguments(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    x, target = random((5, 7, 2), F32, device, seed=1), labels((5, 2), 7, 2).to(device)
    weight = random((7,), F32, device, seed=3).abs()
    makers = [
        lambda: torch.nn.CrossEntropyLoss(weight, ignore_index=2, label_smoothing=0.1),
        lambda: torch.nn.CrossEntropyLoss(reduction="none"),
        lambda: torch.nn.CrossEntropyLoss(size_average=False),
    ]
    right = [make()(x, target) for make in makers]
    monkeypatch.setattr(F, "cross_entropy", cross_entropy)
    for make, expected in zip(makers, right, strict=True):
        torch.testing.assert_close(make()(x, target), expected)
    for average, reduce, reduction in ((True, None, "mean"), (None, False, "none")):
        found = cross_entropy(x, target, size_average=average, reduce=reduce, reduction="sum")
        assert_bitwise(found, cross_entropy(x, target, reduction=reduction))


def test_positional_arguments_of_torch_are_never_misread(device: str) -> None:
    """Torch's fourth is the deprecated size_average; here it is ignore_index, as documented."""
    x, target = random((5, 7), F32, device, seed=1), labels((5,), 7, 2).to(device)
    for average in (None, True):
        with pytest.raises(DTypeError, match="ignore_index is"):
            cross_entropy(x, target, None, average)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_ks_11_autocast_changes_nothing(device: str) -> None:
    x = random((5, 64), BF16, device, seed=1).requires_grad_()
    target, weight = labels((5,), 64, 2).to(device), random((64,), F32, device, seed=3).abs()
    with torch.autocast(device, dtype=BF16):
        loss = cross_entropy(x, target, weight)
    assert loss.dtype == BF16
    assert_bitwise(loss.detach(), cross_entropy(x.detach(), target, weight))
    assert torch.autograd.grad(loss, x)[0].dtype == BF16


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (DTypeError, "input is list", lambda x, t: cross_entropy([1.0], t)),
        (DTypeError, "input is float64", lambda x, t: cross_entropy(x.double(), t)),
        (UnsupportedError, "probabilities", lambda x, t: cross_entropy(x, x)),
        (ShapeError, r"target.shape\[0\] is 3", lambda x, t: cross_entropy(x, t[:3])),
        (
            check.OptionError,
            "reduction is 'max'",
            lambda x, t: cross_entropy(x, t, reduction="max"),
        ),
        (
            UnsupportedError,
            "inplace_backward=True, but input is a leaf",
            lambda x, t: cross_entropy(x.clone().requires_grad_(), t, inplace_backward=True),
        ),
        (
            UnsupportedError,
            "tangent of forward-mode AD",
            lambda x, t: torch.func.jvp(lambda y: cross_entropy(y, t), (x,), (x,)),
        ),
    ],
    ids=["a list", "float64", "probabilities", "sizes", "reduction", "leaf", "forward mode"],
)
@pytest.mark.parametrize("place", ["device", "meta"])
def test_mistakes_are_explained(
    error: type[Exception], says: str, call: Any, place: str, device: str
) -> None:
    at = device if place == "device" else "meta"
    with pytest.raises(error, match=says):
        call(torch.zeros(4, 8, device=at), torch.zeros(4, dtype=torch.int64, device=at))


def test_more_positions_than_kernels_count() -> None:
    x, target = torch.empty(2**31, 1, device="meta"), torch.empty(2**31, device="meta").long()
    with pytest.raises(UnsupportedError, match="target has 2147483648 elements"):
        cross_entropy(x, target)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivatives_raise(reduction: str, device: str) -> None:
    x = random((2, 8), F32, device, seed=1).requires_grad_()
    loss = cross_entropy(x, torch.tensor([1, 2], device=device), reduction=reduction).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        dx.square().sum().backward()


# --- inside PyTorch


@pytest.fixture
def backend(device: str) -> str:
    """The CPU may have no C++ compiler: there the graph runs as it was traced."""
    torch._dynamo.reset()
    return "inductor" if device == "cuda" else "aot_eager"


@pytest.mark.exhaustive
@pytest.mark.parametrize("o", [Options(), NONE, ALL], ids=["mean", "none", "everything"])
@pytest.mark.parametrize("shape", [(4, 40), (40,), (2, 40, 3)], ids=str)
def test_the_operators_are_registered_rightly(
    shape: tuple[int, ...], o: Options, device: str
) -> None:
    x = random(shape, F32, device, seed=1)
    target = labels(shape[:1] + shape[2:] if len(shape) > 1 else (), 40, 2).to(device)
    weight = random((40,), F32, device, seed=3).abs()
    args = (target, weight, *o.all())
    torch.library.opcheck(cross_entropy_fwd, (x.clone().requires_grad_(), *args))
    loss, _, *saved = cross_entropy_fwd(x, *args)
    dloss = torch.ones_like(loss)
    torch.library.opcheck(cross_entropy_bwd, (dloss, x, *args[:2], *saved, *o.all()))


@pytest.mark.parametrize("o", [Options(), replace(ALL, reduction="none")], ids=["mean", "none"])
def test_compile_whole_graph_with_dynamic_rows(o: Options, backend: str, device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    given: Any = {**vars(o), "return_lse": True}  # torch 2.11 cannot trace vars()

    def block(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(x, target, **given)  # type: ignore[return-value]

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    for rows in (4, 5, 17):
        x = random((rows, 64), F32, device, seed=rows)
        target = labels((rows,), 64, rows, o.ignore_index).to(device)
        dloss = torch.ones(() if o.reduction == "mean" else (rows,), device=device)
        judge(lambda x, target, *_: compiled(x, target), x, target, None, o, dloss)
        for a, b in zip(compiled(x.requires_grad_(), target), block(x, target), strict=True):
            assert_bitwise(a.detach(), b.detach())
        counts.add(counter.frame_count)
    assert len(counts) == 1


class Loss(torch.nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(x, target, label_smoothing=0.1)  # type: ignore[return-value]


def test_export(device: str) -> None:
    x, target = random((5, 64), F32, device, seed=1), labels((5,), 64, 2).to(device)
    rows = torch.export.Dim("rows", min=2)
    shapes = {"x": {0: rows}, "target": {0: rows}}
    program = torch.export.export(Loss(), (x, target), dynamic_shapes=shapes)
    longer = random((9, 64), F32, device, seed=2), labels((9,), 64, 3).to(device)
    assert_bitwise(program.module()(*longer), Loss()(*longer))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("shape", [(4, 40), (40,), (2, 40, 3)], ids=str)
def test_meta_and_fake_tensors_give_shapes(
    shape: tuple[int, ...], reduction: str, device: str
) -> None:
    x = random(shape, BF16, device, seed=1)
    target = labels(shape[:1] + shape[2:] if len(shape) > 1 else (), 40, 2).to(device)

    def described(x: Tensor, target: Tensor) -> list[tuple[Any, ...]]:
        results = ours(x, target, None, Options(reduction=reduction))
        return [(t.shape, t.dtype, t.stride(), t.device.type) for t in results]

    expected = described(x, target)
    meta = described(x.to("meta"), target.to("meta"))
    assert meta == [(*rest, "meta") for *rest, _ in expected]
    with torch._subclasses.FakeTensorMode() as mode:
        assert described(mode.from_tensor(x), mode.from_tensor(target)) == expected


def test_eager_calls_agree_with_the_operator(device: str) -> None:
    case = Case("", (7, 257), ALL, F32, weight=F32)
    x, target, weight, dloss = arranged(case, device)

    def operator(x: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> Any:
        return cross_entropy_fwd(x, target, weight, *o.all())[:2]

    judge(operator, x, target, weight, case.o, dloss)
    results = (call(x, target, weight, case.o) for call in (operator, ours))
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)
