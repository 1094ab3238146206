"""The kernels that are listed for a call are those that the call loads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import quack_gemm
from quack_core import arch
from quack_core.cli.warmup import kernels_of
from quack_core.errors import LayoutError, UnsupportedError
from quack_core.gemm.epilogue import AddVector
from quack_core.jit import compile_keys
from quack_core.jit.keys import Kernel
from quack_core.jit.models import MODELS, Model
from quack_core.testing import fake_cuda
from quack_gemm import GemmConfig, SplitK, kernels, launch, repeat

SM90, SM100 = arch.get("sm90"), arch.get("sm100")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """Kernels that calls loaded; CPU tensors go where CUDA tensors go, and nothing is computed."""
    found: list[Kernel] = []

    def load(module: str, spec: Any, config: Any, target: arch.Arch) -> Callable[..., None]:
        found.append(Kernel(module, spec, config, target))
        return lambda *operands: None

    fake_cuda.stand_in(monkeypatch, load)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(repeat, "_calls", {})
    monkeypatch.setattr(launch, "_kernel", launch._kernel.__wrapped__)
    return found


def t(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_(grad)


FP8 = torch.float8_e4m3fn
HOW = GemmConfig(128, 128, pingpong=True)

CASES: dict[str, Callable[[int], tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    "gemm": lambda m: ("gemm", (t(m, 64), t(136, 64).mT), {}),
    "gemm, all arguments": lambda m: (
        "gemm",
        (t(m, 64), t(64, 136)),
        {"c": t(m, 136), "bias": t(136), "alpha": 2.0, "beta": t(1, dtype=F32), "out_dtype": F32},
    ),
    "gemm, an epilogue": lambda m: (
        "gemm",
        (t(m, 64), t(64, 136)),
        {"epilogue": [(AddVector("float32"), t(136, dtype=F32))], "activation": "silu"},
    ),
    "gemm, split": lambda m: ("gemm", (t(m, 4096), t(136, 4096).mT), {"split_k": 4}),
    "gemm, parts in memory": lambda m: (
        "gemm",
        (t(m, 4096), t(136, 4096).mT),
        {"config": GemmConfig(128, 128, split_k=24, split_mode=SplitK.SEPARATE), "bias": t(136)},
    ),
    "gemm, parts added": lambda m: (
        "gemm",
        (t(m, 4096), t(136, 4096).mT),
        {
            "config": GemmConfig(128, 128, split_k=24, split_mode=SplitK.PARALLEL),
            "c": t(m, 136),
            "out_dtype": F32,
        },
    ),
    "gemm, a long K": lambda m: ("gemm", (t(128, 64 * m), t(128, 64 * m).mT), {}),
    "gemm, configured": lambda m: ("gemm", (t(m, 64), t(136, 64).mT), {"config": HOW}),
    "gemm, 8 bits": lambda m: ("gemm", (t(m, 64, dtype=FP8), t(136, 64, dtype=FP8).mT), {}),
    "gemm, batches": lambda m: ("gemm", (t(3, m, 64), t(3, 136, 64).mT), {}),
    "gemm, a batch of one": lambda m: (
        "gemm",
        (t(1, m, 64), t(136, 64).mT),
        {"c": t(1, m, 136), "bias": t(1, 136)},
    ),
    "gemm, out": lambda m: ("gemm", (t(m, 64), t(136, 64).mT), {"out": t(136, m).mT}),
    "gemm, nothing": lambda m: ("gemm", (t(m, 0), t(0, 136)), {}),
    "gemm_act": lambda m: ("gemm_act", (t(m, 64), t(136, 64).mT, "gelu"), {}),
    "gemm_gated": lambda m: ("gemm_gated", (t(m, 64), t(256, 64).mT, "swiglu"), {"concat": True}),
    "gemm_dact": lambda m: ("gemm_dact", (t(m, 64), t(64, 136), t(m, 136), "gelu"), {}),
    "gemm_dact_bias": lambda m: (
        "gemm_dact_bias",
        (t(m, 64), t(64, 136), t(m, 136), "gelu"),
        {},
    ),
    "gemm_dgated": lambda m: ("gemm_dgated", (t(m, 64), t(64, 128), t(m, 256), "swiglu"), {}),
    "gemm_add": lambda m: ("gemm_add", (t(m, 64), t(64, 136), t(m, 136)), {}),
    "gemm_rms": lambda m: ("gemm_rms", (t(m, 64), t(64, 136)), {"c": t(m, 136)}),
    "gemm_symmetric": lambda m: ("gemm_symmetric", (t(m, 64),), {"c": t(m, m), "beta": 0.5}),
    "gemm_norm_act": lambda m: (
        "gemm_norm_act",
        (t(m, 64), t(136, 64).mT, t(m, dtype=F32), "silu"),
        {},
    ),
    "linear": lambda m: ("linear", (t(2, m, 64), t(136, 64), t(136)), {}),
    "linear, training": lambda m: ("linear", (t(m, 64, grad=True), t(136, 64, grad=True)), {}),
    "linear, accumulating": lambda m: (
        "linear",
        (t(m, 64, grad=True), t(136, 64, grad=True)),
        {"accumulate": True},
    ),
    "linear, a frozen weight": lambda m: ("linear", (t(m, 64, grad=True), t(136, 64)), {}),
    "linear_act, training": lambda m: (
        "linear_act",
        (t(m, 64, grad=True), t(136, 64, grad=True), "relu", t(136, grad=True)),
        {},
    ),
    "linear_gated, training": lambda m: (
        "linear_gated",
        (t(m, 64, grad=True), t(256, 64, grad=True), "geglu"),
        {"concat": True},
    ),
    "mlp": lambda m: ("mlp", (t(m, 64), t(256, 64), t(64, 128), "swiglu"), {}),
    "mlp, training": lambda m: (
        "mlp",
        (t(m, 64, grad=True), t(136, 64, grad=True), t(64, 136, grad=True), "relu_sq"),
        {},
    ),
    "mlp, biases": lambda m: (
        "mlp",
        (t(m, 64, grad=True), t(136, 64, grad=True), t(64, 136, grad=True), "relu"),
        {"bias1": t(136, grad=True), "bias2": t(64, grad=True)},
    ),
    "mlp, recomputing": lambda m: (
        "mlp",
        (t(m, 64, grad=True), t(256, 64, grad=True), t(64, 128, grad=True), "swiglu"),
        {"recompute": True},
    ),
}


@pytest.mark.parametrize("rows", [8, 200, 4096])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_listed_is_loaded(case: Any, rows: int, loaded: list[Kernel]) -> None:
    name, args, kwargs = case(rows)
    listed = compile_keys(getattr(quack_gemm, name), *args, arch=SM90, **kwargs)
    assert loaded == []
    result = getattr(quack_gemm, name)(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        for _ in range(1 + kwargs.get("accumulate", False)):
            result.backward(torch.ones_like(result), retain_graph=True)
    assert set(listed) == set(loaded)
    assert {each.key() for each in listed} == {each.key() for each in loaded}  # texts, named texts
    assert len(listed) == len(set(listed))
    assert bool(listed) == (0 not in args[0].shape)


def test_every_operator_has_a_list() -> None:
    named = {name for name in quack_gemm.__all__ if name.islower() and name[0] != "_"}
    assert named == set(kernels.OPERATORS)
    assert all(callable(getattr(kernels, name)) for name in kernels.OPERATORS)


def test_operands_that_cannot_be_read() -> None:
    with pytest.raises(LayoutError, match=r"a.stride\(-2\) is 63"):
        compile_keys(quack_gemm.gemm, t(8, 63), t(64, 63)[:, :63].mT, arch=SM90)


def test_another_architecture() -> None:
    with pytest.raises(UnsupportedError, match="gemm on sm100"):
        compile_keys(quack_gemm.gemm, t(8, 64), t(64, 64), arch=SM100)
    assert kernels.model_calls(MODELS["llama3-8b"], SM100) == ()


SMALL = Model(64, 1024, heads=2, kv_heads=1, intermediate=128, head=32)


def test_a_step_of_a_model_loads_only_what_was_listed(loaded: list[Kernel]) -> None:
    warm = set(kernels_of(kernels.model_calls(SMALL, SM90), SM90))
    assert loaded == [] and len(warm) >= 8
    for tokens in (1, 32, 2048):
        for grad in (True, False):
            x = t(tokens, 64, grad=grad)
            for n, k in ((128, 64), (64, 64), (1024, 64)):
                out = quack_gemm.linear(t(tokens, k, grad=grad), t(n, k, grad=grad))
                if grad:
                    out.backward(torch.ones_like(out))
            weights = t(256, 64, grad=grad), t(64, 128, grad=grad)
            out = quack_gemm.mlp(x, *weights, "swiglu")
            if grad:
                out.backward(torch.ones_like(out))
    assert len(set(loaded)) >= 8
    assert set(loaded) - warm == set()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_calls_of_models(model: Model) -> None:
    calls = kernels.model_calls(model, SM90)
    assert {call["op"] for call in calls} == {"linear", "mlp"}
    width = {call["weight"] for call in calls if call["op"] == "linear"}
    assert f"bfloat16[{model.vocab}, {model.hidden}]" in width
    # As the configurations of Llama 3 and Qwen 3 have it: queries are as wide as tokens.
    assert model.heads * model.head == model.hidden
    assert f"bfloat16[{model.hidden + 2 * model.kv_heads * 128}, {model.hidden}]" in width


def test_selftest_compiles() -> None:
    assert kernels.selftest_kernel(SM90).spec.b_major == "column"
