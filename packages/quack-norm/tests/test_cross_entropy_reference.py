"""Cross-entropy on the CPU: values and gradients against torch in float64; what is refused."""

import functools
import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import cross_entropy_oracle
import pytest
import torch
import torch.nn.functional as F
from cross_entropy_oracle import BF16, F16, F32, NONE, Options, labels
from torch import Tensor

from quack_core.errors import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.ops.cross_entropy import check, reference

pytestmark = pytest.mark.exhaustive

INF, NAN = math.inf, math.nan


class Loss(torch.autograd.Function):
    """The reference as one differentiable function; also checks what goes into the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, target: Tensor, weight: Any, options: Options) -> Tensor:
        loss, _, *saved = reference.forward(input, target, weight, *options.all())
        ctx.save_for_backward(input, target, weight, *saved)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:  # type: ignore[override]
        if ctx.saved_tensors[0].dtype != torch.float64:
            check.backward(dloss, *ctx.saved_tensors, *ctx.options.all())
        return reference.backward(dloss, *ctx.saved_tensors, *ctx.options.all()), None, None, None


def ours(x: Tensor, target: Tensor, weight: Tensor | None = None, o: Options = NONE) -> Tensor:
    check.forward(x, target, weight, *o.all())
    check.labels(target, x.shape[min(x.dim() - 1, 1)], o.ignore_index)
    return Loss.apply(x, target, weight, o)


def call(x: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> tuple[Tensor, Tensor]:
    """Loss and lse; the loss has a gradient."""
    lse = reference.forward(x.detach(), target, weight, *o.all())[1]
    return ours(x, target, weight, o), lse


judge = functools.partial(cross_entropy_oracle.judge, call)


GRID = itertools.product((-100, 1), ("none", "mean", "sum"), (0.0, 0.3), (None, 1.5), (0.0, 0.1))
SETTINGS = [Options(*each) for each in GRID]


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 2.0, 1.0])], ids=["", "weighted"])
@pytest.mark.parametrize("o", SETTINGS, ids=str)
def test_gradients_are_derivatives(o: Options, weight: Tensor | None) -> None:
    """Finite differences in float64."""
    for shape, target in (((3,), torch.tensor(2)), ((2, 3, 2), labels((2, 2), 3, 2))):
        target.view(-1)[3:] = o.ignore_index
        x = random(shape, torch.float64, seed=1).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, f=target: Loss.apply(x, f, weight, o), (x,))


@pytest.mark.parametrize(
    ("dtype", "weighted"), [(F32, None), (F32, F32), (BF16, F32), (F16, BF16)], ids=str
)
@pytest.mark.parametrize("o", SETTINGS, ids=str)
def test_as_torch_in_float64(o: Options, weighted: torch.dtype | None, dtype: torch.dtype) -> None:
    x = random((12, 57), dtype, seed=3, scale=2.0)
    target = labels((12,), 57, 4, o.ignore_index)
    weight = None if weighted is None else random((57,), weighted, seed=5).abs() + 0.1
    dloss = random((12,) if o.reduction == "none" else (), dtype, seed=6, shift=2.0)
    judge(x, target.to(torch.int32) if weighted is None else target, weight, o, dloss)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 5, 3, 4), (2, 5, 0), (2, 5, 1, 2, 2)], ids=str)
def test_more_dimensions_and_any_strides(shape: tuple[int, ...], layout: Layout) -> None:
    x = random(shape, F32, seed=7, layout=layout)
    place = shape[:1] + shape[2:]
    o = Options(reduction="none", label_smoothing=0.1, softcap=5.0, z_loss=0.01)
    judge(x, labels(place, 5, 8, -100), torch.arange(1.0, 6), o, random(place, F32, seed=9))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.value)
def test_ks_06_each_row_has_its_own_incoming_gradient(layout: Layout) -> None:
    target = torch.tensor([-100, 3, 0, 6, -100, 1])
    each = random((2, 6), F32, seed=2, layout=layout)[1]
    for incoming in (each, torch.tensor(3.0).expand(6), torch.zeros(6)):
        judge(random((6, 7), F32, seed=1), target, None, NONE, incoming)


def test_ks_02_logits_far_from_zero() -> None:
    x = (torch.tensor([[0.0, 1.0, 0.0]]) - 1e7).expand(3, 3).requires_grad_()
    loss = ours(x, torch.arange(3))
    assert [round(value, 4) for value in loss.tolist()] == [1.5514, 0.5514, 1.5514]
    judge(x.detach(), torch.arange(3), None, NONE, torch.ones(3))


ROWS_FAR_OFF = [torch.arange(40000.0, 40004.0), 1000 + 1e-3 * torch.arange(16.0)]
ROWS_FAR_OFF += [torch.full((256,), 1234.0), torch.tensor([10239.0] * 256 + [255.0])]


@pytest.mark.parametrize("row", ROWS_FAR_OFF, ids=lambda row: f"n{len(row)}")
def test_kn_13_rows_with_a_large_mean(row: Tensor) -> None:
    for label in (0, len(row) - 1):
        judge(row[None], torch.tensor([label]), None, Options(z_loss=1e-4), torch.tensor(1.0))


def test_ks_03_every_width() -> None:
    """Equal logits: the loss is log(w) to a unit in the last place, softmax 1/w."""
    for width in (*range(2, 1100), *range(1101, 4097, 28)):
        x, target = torch.zeros(2, width), torch.tensor([0, width - 1])
        loss, lse, *saved = reference.forward(x, target, None, *NONE.all())
        bound = math.log(width) * torch.finfo(F32).eps
        assert abs(torch.stack((loss, lse)).double() - math.log(width)).max() <= bound
        dx = reference.backward(torch.ones(2), x, target, None, *saved, *NONE.all())
        assert abs((dx.double() + F.one_hot(target, width)).sum(1) - 1).max() <= 1e-6


SPECIAL = [[-INF] * 4, [0.5, 1, 2, -1], [1, INF, 0, 2], [INF, 1, 0, 2], [NAN, 1, 0, 2]]
SPECIAL = torch.tensor([*SPECIAL, [-INF, 1, -INF, 2], [0, -1, 3, 0.25]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("label", range(4))
def test_ks_04_infinite_and_nan_logits(label: int, smoothing: float) -> None:
    """NaN, inf and numbers stand where torch has them; rows beside them are untouched."""
    o = replace(NONE, label_smoothing=smoothing)
    judge(SPECIAL, torch.full((7,), label), None, o, torch.ones(7))


def test_ks_04_ignored_rows_may_hold_anything() -> None:
    """Torch's gradient is NaN there; a row that does not count must not spoil the others."""
    x = SPECIAL.clone().requires_grad_()
    target = torch.tensor([-100, 2, -100, -100, -100, 1, -100])
    for o in (Options(), Options(label_smoothing=0.1), Options(z_loss=0.1, softcap=3.0)):
        (dx,) = torch.autograd.grad(ours(x, target, None, o), x)
        assert torch.equal(dx[[0, 2, 3, 4, 6]], torch.zeros(5, 4))
        assert dx[[1, 5]].isfinite().all() and dx[1].abs().sum() > 0
    loss = ours(x, target, torch.zeros(4), Options())  # a mean over no weight
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan() and dx[[1, 5]].isnan().all() and dx[[0, 2, 3, 4, 6]].eq(0).all()


NOTHING = [(4, 8), (8,), (2, 8, 3), (0, 8), (2, 8, 0), (0, 8, 3), (0, 0), (3, 0), (0,)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", NOTHING, ids=str)
def test_ks_05_none_counts(shape: tuple[int, ...], weighted: bool, smoothing: float) -> None:
    x = random(shape, F32, seed=1).requires_grad_()
    target = torch.full(shape[:1] + shape[2:] if len(shape) > 1 else (), -100)
    weight = torch.arange(float(shape[:2][-1])) if weighted else None
    for reduction, expected in (("mean", NAN), ("sum", 0.0), ("none", torch.zeros(target.shape))):
        loss = ours(x, target, weight, Options(-100, reduction, smoothing, z_loss=0.1))
        assert_bitwise(loss.detach().nan_to_num(-1), torch.as_tensor(expected).nan_to_num(-1))
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        assert_bitwise(dx, torch.zeros(shape))


def test_ks_07_the_mean_is_over_kept_rows() -> None:
    x, target = random((16, 5), F32, seed=1), labels((16,), 5, 2)
    target[[0, 1, 3, 4, 7, 8, 11, 12, 15]] = -100
    kept = [(row, t) for row, t in zip(x.tolist(), target.tolist(), strict=True) if t != -100]
    rows = [math.log(sum(map(math.exp, row))) - row[t] for row, t in kept]
    found = float(ours(x, target, None, Options()))  # of sums of five, then of seven
    assert abs(found - sum(rows) / 7) <= 16 * torch.finfo(F32).eps * max(rows)


def test_ks_12_ks_13_known_values() -> None:
    """Label smoothing skips ignored rows; the mean divides by the weights of kept labels."""
    x, target = torch.tensor([[1.0, 2, 3], [3, 2, 1], [0, 0, 0]]), torch.tensor([2, -100, 0])
    smooth, w = Options(label_smoothing=0.1), torch.tensor([1, 2, 0.5])
    for weight, o, reduction, expected in (
        (None, smooth, "mean", 0.8031),
        (None, smooth, "sum", 1.6062),
        (None, smooth, "none", [0.5076, 0, 1.0986]),
        (w, Options(), "mean", 0.8683),
        (w, Options(), "none", [0.2038, 0, 1.0986]),
    ):
        loss = ours(x, target, weight, replace(o, reduction=reduction))
        assert_bitwise(loss.mul(1e4).round(), torch.tensor(expected).mul(1e4).round())


def test_ks_14_softcap_of_very_negative_logits() -> None:
    x, o = torch.full((1, 3), -40.0), Options(softcap=1.0)
    assert round(float(reference.forward(x, torch.tensor([1]), None, *o.all())[1]), 4) == 0.0986
    judge(torch.full((1, 3), -INF), torch.tensor([1]), None, o, torch.tensor(1.0))


def test_ks_09_operands_stay_and_a_second_backward_is_the_same() -> None:
    x, target = random((9, 33), BF16, seed=1).requires_grad_(), labels((9,), 33, 2, -100)
    weight, dloss = random((33,), F32, seed=3).abs(), random((9,), BF16, seed=4)
    kept = [t.detach().clone() for t in (x, target, weight, dloss)]
    loss = ours(x, target, weight, Options(reduction="none", softcap=9.0, label_smoothing=0.1))
    first = torch.autograd.grad(loss, x, dloss, retain_graph=True)[0]
    assert_bitwise(first, torch.autograd.grad(loss, x, dloss)[0])
    for tensor, before in zip((x, target, weight, dloss), kept, strict=True):
        assert_bitwise(tensor.detach(), before)


@pytest.mark.parametrize("classes", [1, 32000, 50257, 102400, 262144])
def test_ks_18_vocabularies(classes: int) -> None:
    x, target = random((3, classes), BF16, seed=1), torch.tensor([0, -100, classes - 1])
    o = Options(label_smoothing=0.1, softcap=30.0, z_loss=1e-4)
    judge(x, target, None, o, torch.tensor(1.0, dtype=BF16))


@pytest.mark.parametrize("classes", [100, 50257])
def test_kn_15_rows_do_not_depend_on_the_batch(classes: int) -> None:
    """Nor on strides: the rows together lie transposed."""
    x = random((5, classes), F32, seed=1, layout=Layout.TRANSPOSED)
    target = labels((5,), classes, 2)
    o = Options(-100, "none", label_smoothing=0.1, softcap=30.0, z_loss=1e-4).all()

    def run(at: slice) -> tuple[Tensor, ...]:
        part = x[at].contiguous() if at.stop else x[at], target[at], None
        found = reference.forward(*part, *o)
        return *found[:4], reference.backward(torch.ones(len(part[1])), *part, *found[2:], *o)

    together = run(slice(None))
    for row in range(5):
        for whole, alone in zip(together, run(slice(row, row + 1)), strict=True):
            assert_bitwise(whole[row : row + 1], alone)


@pytest.mark.parametrize("bad", [-1, 8, 2**40, -(2**63), -99], ids=str)
@pytest.mark.parametrize("weight", [None, torch.arange(8.0)], ids=["plain", "weighted"])
def test_illegal_labels_give_nan_or_raise(bad: int, weight: Tensor | None) -> None:
    x, target = random((2, 8, 2), F32, seed=1).requires_grad_(), torch.tensor([[1, bad], [3, -100]])
    for smoothing in (0.0, 0.1, 1.0):
        loss = Loss.apply(x, target, weight, replace(NONE, label_smoothing=smoothing))
        (dx,) = torch.autograd.grad(loss, x, torch.ones(2, 2))
        assert loss.isnan().tolist() == [[False, True], [False, False]]
        assert dx.isnan().all(1).tolist() == dx.isnan().any(1).tolist() == loss.isnan().tolist()
        assert Loss.apply(x, target, weight, Options(label_smoothing=smoothing)).isnan()
    assert Loss.apply(x[:, :0, 0], target[0] * 0, None, Options(softcap=1.0)).isnan()  # no class
    far, one = Options(2**32 + 1), torch.tensor([1], dtype=torch.int32)  # 1 if cut to 32 bits
    assert Loss.apply(x[:1, :, 0], one, None, far) == Loss.apply(x[:1, :, 0], one, None, Options())
    with pytest.raises(IndexError, match=rf"target\[0, 1\] is {bad}: .*less than.*8, .*-100"):
        check.labels(target, 8, -100)
    with pytest.raises(check.LabelError, match="target is 9"):
        check.labels(torch.tensor(9, dtype=torch.int32), 8, -100)
    check.labels(torch.tensor([0, 7, bad]), 8, bad)


X, T, LEAF = torch.zeros(4, 8), torch.zeros(4).long(), torch.zeros(4, 8, requires_grad=True)
MISTAKES: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (DTypeError, "input is list: it must be a tensor", {"input": [1.0]}),
    (DTypeError, "input is float64: it must be one of float32, bfloat16", {"input": X.double()}),
    (DTypeError, "target is uint8: it must be int32 or int64.*long", {"target": T.byte()}),
    (UnsupportedError, "target is float32; .*probabilities.*torch.nn", {"target": X}),
    (DTypeError, "weight is int64", {"weight": T}),
    (ShapeError, "input has no dimension", {"input": X[0, 0], "target": T[0]}),
    (ShapeError, "target has 2 dimensions, input has 2: .*shape of input", {"target": T[:, None]}),
    (ShapeError, "target has 1 dimensions, input has 1", {"input": X[0], "target": T[:1]}),
    (ShapeError, r"target.shape\[0\] is 3, input.shape\[0\] is 4", {"target": T[:3]}),
    (ShapeError, r"input.shape\[2\] is 2", {"input": X.view(2, 8, 2), "target": T[:2, None]}),
    (ShapeError, r"weight.shape\[0\] is 7, input.shape\[1\] is 8", {"weight": X[0, :7]}),
    (ShapeError, r"input.shape\[0\] is 8", {"input": X[0], "target": T[0], "weight": X[0, :7]}),
    (ShapeError, "weight has 2 dimensions: .*8 classes", {"weight": X[:1]}),
    (UnsupportedError, "weight requires a gradient.*detach", {"weight": LEAF[0]}),
    (DTypeError, "ignore_index is float", {"ignore_index": 1.0}),
    (check.OptionError, f"ignore_index is {2**63}", {"ignore_index": 2**63}),
    (check.OptionError, "reduction is 'max': .*one of none, mean, sum", {"reduction": "max"}),
    (check.OptionError, "label_smoothing is 1.5: .*from 0 to 1", {"label_smoothing": 1.5}),
    (DTypeError, "softcap is Tensor.*item", {"softcap": X[0, 0]}),
    (check.OptionError, "softcap is 0: it must be positive.*None", {"softcap": 0}),
    (check.OptionError, "z_loss is -1: it must be finite", {"z_loss": -1}),
]  # fmt: skip


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(("error", "says", "wrong"), MISTAKES, ids=lambda each: str(each)[:30])
def test_mistakes_are_explained(error: Any, says: str, wrong: dict[str, Any], place: str) -> None:
    call: dict[str, Any] = {"input": X, "target": T, "weight": None, **vars(Options()), **wrong}
    moved = {k: v.to(place) if isinstance(v, Tensor) else v for k, v in call.items()}
    with pytest.raises(error, match=says):
        check.forward(**moved)


def test_kl_02_mixed_devices_and_foreign_results_raise() -> None:
    for call in ((X, T.to("meta"), None), (X, T, X[0].to("meta"))):
        with pytest.raises(DeviceError, match="is on meta, input on cpu.*on one device"):
            check.forward(*call, *Options().all())
    right = {"dloss": X[0, 0], "peak": X[:, 0], "exp_sum": X[:, 0], "total": X[0, 0]}
    check.backward(input=X, target=T, weight=None, **right, **vars(Options()))
    for name in right:
        with pytest.raises(ShapeError, match=rf"{name} .*\(3,\).* must be"):
            wrong = {**right, name: X[:3, 0]}
            check.backward(input=X, target=T, weight=None, **wrong, **vars(Options()))


def test_ks_09_only_memory_of_a_result_may_be_overwritten() -> None:
    for right in (X, LEAF * 2, (LEAF * 2).view(2, 2, 8)):
        check.in_place(right)
    for wrong in (LEAF, LEAF.view(2, 2, 8), LEAF[1:]):
        with pytest.raises(UnsupportedError, match="input is a leaf or a view of one"):
            check.in_place(wrong)
    with pytest.raises(LayoutError, match=r"input.stride\(0\) is 0 for 5 elements"):
        check.in_place((LEAF[:1] * 2).expand(5, 8))
    windows = (LEAF.view(-1) * 2).as_strided((5, 8), (1, 1))
    with pytest.raises(LayoutError, match=r"input.stride\(1\) is 1 for 8 elements"):
        check.in_place(windows)
    check.in_place((LEAF * 2).t()[::2])


def test_deprecated_arguments_mean_what_they_mean_in_torch() -> None:
    x, target = random((5, 7), F32, seed=1), labels((5,), 7, 2)
    for average, reduce in itertools.product((None, False, True), repeat=2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = check.reduction_of(average, reduce, "none")
            assert len(caught) == (average is not None or reduce is not None)
            expected = F.cross_entropy(x, target, None, average, -100, reduce, "none")
        assert torch.equal(F.cross_entropy(x, target, reduction=found), expected)
