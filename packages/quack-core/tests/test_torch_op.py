"""The torch side of operators: dtypes, the eager predicate, registration."""

import contextlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quack_core import dtypes, torch_op
from quack_core.errors import DTypeError, UnsupportedError


@pytest.mark.parametrize("name", dtypes.SUPPORTED)
def test_dtype_names_round_trip(name: str) -> None:
    assert torch_op.dtype_name(torch_op.torch_dtype(name)) == name
    assert torch_op.torch_dtype(name).itemsize * 8 == dtypes.width(name)


@pytest.mark.parametrize("wrong", [torch.float64, torch.int32, "bfloat16", None])
def test_other_dtypes_are_refused(wrong: object) -> None:
    with pytest.raises(DTypeError, match="must be one of float32, bfloat16, float16"):
        torch_op.dtype_name(wrong)  # type: ignore[arg-type]
    with pytest.raises(DTypeError):
        torch_op.torch_dtype("float64")


class Subclass(Tensor):
    pass


def test_plain_tensors_are_eager() -> None:
    x = torch.ones(3)
    assert torch_op.eager(x)
    assert torch_op.eager(x, None, torch.nn.Parameter(x), None, x)
    with torch.no_grad():
        assert torch_op.eager(x)
    with torch.inference_mode():
        assert torch_op.eager(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch_op.eager(x)


def test_everything_else_is_not() -> None:
    x = torch.ones(3)
    assert not torch_op.eager(None)
    assert not torch_op.eager([1.0])
    for place in range(5):
        operands = [x] * 5
        operands[place] = x.as_subclass(Subclass)
        assert not torch_op.eager(*operands)
    with torch._subclasses.FakeTensorMode():
        assert not torch_op.eager(x)
    with torch.device("meta"):  # a function mode
        assert not torch_op.eager(x)
    with torch.autograd.forward_ad.dual_level():
        assert not torch_op.eager(x)
    assert torch_op.eager(x)


def test_transforms_and_tracers_are_not_eager() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_op.eager(x))
        return x * 2

    x = torch.ones(3)
    torch.func.vmap(function)(x)
    torch.func.grad(lambda x: function(x).sum())(x)
    torch.fx.experimental.proxy_tensor.make_fx(function)(x)
    assert seen and not any(seen)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return x + 1 if torch_op.eager(x) else x - 1

    assert torch.equal(compiled(x), x - 1)


def test_tangents_are_noticed() -> None:
    torch_op.check_no_tangent("op", torch.ones(3), None)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        torch_op.check_no_tangent("op", torch.ones(3))
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(UnsupportedError, match="op: an operand carries a tangent"):
            torch_op.check_no_tangent("op", None, dual)


def test_version_is_bumped() -> None:
    x = torch.ones(3)
    before = x._version
    torch_op.bump_version(x)
    assert x._version == before + 1
    with torch.inference_mode():
        torch_op.bump_version(torch.ones(3))  # has no version: nothing to do


def test_register_defines_an_operator_that_torch_accepts() -> None:
    library = torch.library.Library("quack_core_test", "FRAGMENT")

    def check(x: Tensor) -> None:
        if x.dim() != 1:
            raise ValueError("x must have one dimension")

    def fake(x: Tensor, factor: float) -> Tensor:
        check(x)
        return torch.empty_like(x)

    def save(ctx: object, inputs: tuple, output: Tensor) -> None:
        ctx.factor = inputs[1]  # type: ignore[attr-defined]

    scale = torch_op.register(
        library,
        "scale(Tensor x, float factor) -> Tensor",
        cpu=lambda x, factor: x * factor,
        cuda=lambda x, factor: x * factor,
        fake=fake,
        backward=lambda ctx, gradient: (gradient * ctx.factor, None),
        setup_context=save,
    )
    assert scale is torch.ops.quack_core_test.scale.default
    x = torch.randn(5, requires_grad=True)
    assert torch.equal(scale(x, 3.0), x * 3)
    assert torch.equal(torch.autograd.grad(scale(x, 3.0).sum(), x)[0], torch.full((5,), 3.0))
    assert scale(torch.empty(7, device="meta"), 2.0).shape == (7,)
    with pytest.raises(ValueError, match="one dimension"):
        scale(torch.empty(7, 2, device="meta"), 2.0)
    torch.library.opcheck(scale, (x, 2.0))


def test_what_has_an_address() -> None:
    x = torch.ones(3)
    assert torch_op.addressed(x) and torch_op.addressed(torch.nn.Parameter(x))
    assert not torch_op.addressed(x.to("meta"))
    with FakeTensorMode() as mode:
        assert not torch_op.addressed(mode.from_tensor(x))
    seen = []
    torch.compile(lambda x: seen.append(torch_op.addressed(x)) or x + 1, backend="eager")(x)
    assert seen == [False]


@pytest.mark.parametrize("count", [1, 2])
def test_launches_are_made_on_their_device(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    current, entered, launched = [0], [], []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    def launch(*args: int) -> str:
        launched.append((*args, current[0]))
        return "done"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch_op, "_current_device", lambda: current[0])
    mine, other = (torch_op.on_device(launch, index) for index in range(2))
    assert (mine is launch) == (count == 1)
    assert (mine(5), other(6)) == ("done", "done")
    assert launched == [(5, 0), (6, count - 1)] and current == [0]
    assert entered == ([1] if count > 1 else [])
