"""The kernels that are listed for a call are those that the call loads."""

import contextlib
import functools

import pytest
import torch

import quack_norm
from quack_core import arch, driver, occupancy, torch_workspace
from quack_core.cli.warmup import kernels_of
from quack_core.errors import UnsupportedError
from quack_core.jit import cache, compile_keys
from quack_core.jit.keys import Kernel
from quack_core.jit.models import MODELS
from quack_norm import kernels
from quack_norm.ops.cross_entropy import launch as ce_launch
from quack_norm.ops.rmsnorm import launch as norm_launch
from quack_norm.ops.softmax import launch as softmax_launch
from quack_norm.ops.topk import launch as topk_launch

SM90 = arch.get("sm90")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def loaded(monkeypatch):
    """Kernels that calls loaded; CPU tensors go where CUDA tensors go, and nothing is computed."""
    found = []

    def load(module, spec, config, target):
        found.append(Kernel(module, spec, config, target))
        return lambda *operands: None

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(arch, "detect", lambda *_: SM90)
    monkeypatch.setattr(cache, "load", load)
    monkeypatch.setattr(driver, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(occupancy, "resident_clusters", lambda *_, registers: 13)
    zeros = functools.partial(torch.zeros, dtype=torch.int32)
    monkeypatch.setattr(torch_workspace, "counters", lambda _, count: zeros(count))
    monkeypatch.setattr(torch_workspace, "relaxed_capture", contextlib.nullcontext)
    for module, name in [
        (norm_launch, "_forward"),
        (norm_launch, "_backward"),
        (softmax_launch, "_launchers"),
        (ce_launch, "_launchers"),
        (topk_launch, "_launchers"),
    ]:
        monkeypatch.setattr(module, name, {})
    return found


def t(*shape, dtype=BF16, grad=False):
    return torch.zeros(shape, dtype=dtype).requires_grad_(grad)


def labels(*shape):
    return torch.zeros(shape, dtype=torch.int64)


# Operator and arguments, for a number of rows.
CASES = {
    "rmsnorm": lambda m: ("rmsnorm", (t(m, 4096), t(4096)), {}),
    "rmsnorm, no weight": lambda m: ("rmsnorm", (t(m, 768),), {}),
    "rmsnorm, training": lambda m: ("rmsnorm", (t(m, 4096, grad=True), t(4096, grad=True)), {}),
    "rmsnorm, long rows": lambda m: (
        "rmsnorm",
        (t(m, 65536, grad=True), t(65536, dtype=F32, grad=True)),
        {},
    ),
    "rmsnorm, three dimensions": lambda m: ("rmsnorm", (t(2, m, 512), t(512)), {}),
    "rmsnorm, four dimensions": lambda m: ("rmsnorm", (t(2, m, 4, 128, grad=True), t(128)), {}),
    "rmsnorm, odd rows": lambda m: ("rmsnorm", (t(m, 4095, grad=True), t(4095, grad=True)), {}),
    "rmsnorm, half-aligned rows": lambda m: ("rmsnorm", (t(m, 1004), t(1004)), {"out_dtype": F32}),
    "rmsnorm, per head": lambda m: (
        "rmsnorm",
        (t(m, 4, 128, grad=True), t(4, 128, grad=True), t(4, 128, grad=True)),
        {},
    ),
    "rmsnorm, prenorm": lambda m: (
        "rmsnorm",
        (t(m, 4096, grad=True), t(4096, grad=True)),
        {"residual": t(m, 4096, grad=True), "prenorm": True},
    ),
    "rmsnorm, prenorm without residual": lambda m: (
        "rmsnorm",
        (t(m, 1024, grad=True), t(1024)),
        {"prenorm": True},
    ),
    "rmsnorm, residual in float32": lambda m: (
        "rmsnorm",
        (t(m, 1024, grad=True), t(1024, grad=True), t(1024, dtype=F32, grad=True)),
        {"residual": t(m, 1024, dtype=F32, grad=True), "weight_offset": 1.0},
    ),
    "rmsnorm, inference with residual": lambda m: (
        "rmsnorm",
        (t(m, 1024), t(1024)),
        {"residual": t(m, 1024), "prenorm": True, "return_rstd": True},
    ),
    "rmsnorm, out": lambda m: ("rmsnorm", (t(m, 1024),), {"out": t(m, 1024, dtype=F16)}),
    "layernorm": lambda m: (
        "layernorm",
        (t(m, 1024, grad=True), t(1024, grad=True), t(1024, grad=True)),
        {},
    ),
    "layernorm, statistics": lambda m: (
        "layernorm",
        (t(m, 1024), t(1024)),
        {"return_statistics": True},
    ),
    "softmax": lambda m: ("softmax", (t(m, 4096),), {}),
    "softmax, training": lambda m: ("softmax", (t(m, 1000, grad=True),), {"dtype": F32}),
    "softmax, odd rows": lambda m: ("softmax", (t(m, 16383, grad=True),), {"scale": 0.5}),
    "softmax, dim": lambda m: ("softmax", (t(3, 512, m, grad=True), 1, F16), {}),
    "log_softmax": lambda m: ("log_softmax", (t(2, m, 512, dtype=F32, grad=True),), {}),
    "cross_entropy": lambda m: ("cross_entropy", (t(m, 1000), labels(m)), {}),
    "cross_entropy, training": lambda m: (
        "cross_entropy",
        (t(m, 32000, grad=True), labels(m)),
        {"label_smoothing": 0.1},
    ),
    "cross_entropy, none": lambda m: (
        "cross_entropy",
        (t(m, 50257, grad=True), labels(m), t(50257)),
        {"reduction": "none", "z_loss": 1e-4, "softcap": 30.0},
    ),
    "cross_entropy, float16": lambda m: (
        "cross_entropy",
        (t(m, 1024, dtype=F16, grad=True), labels(m).int()),
        {"reduction": "sum"},
    ),
    "cross_entropy, images": lambda m: (
        "cross_entropy",
        (t(2, 128, m, grad=True), labels(2, m)),
        {},
    ),
    "topk": lambda m: ("topk", (t(m, 1024), 8), {}),
    "topk, training": lambda m: ("topk", (t(m, 128, grad=True), 8, True), {}),
    "topk, long rows": lambda m: ("topk", (t(m, 32000, grad=True), 64), {}),
    "topk, odd rows": lambda m: ("topk", (t(2, m, 161), 4), {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_listed_kernels_are_those_that_are_loaded(case, loaded):
    for rows in (3, 12, 40):  # on few rows, on some, and on many, where that matters
        name, args, kwargs = case(rows)
        results = getattr(quack_norm, name)(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        outputs = [result for result in results if result.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    listed = compile_keys(getattr(quack_norm, name), *args, arch=SM90, **kwargs)
    assert len(set(listed)) == len(listed)
    assert set(loaded) == set(listed)


def test_operands_need_no_memory(monkeypatch):
    monkeypatch.setenv("QUACK_ARCH", "sm120")
    x = torch.empty(1 << 20, 1 << 14, dtype=BF16, device="meta")
    found = compile_keys(quack_norm.softmax, x)
    assert {kernel.arch.name for kernel in found} == {"sm120"}
    assert {kernel.spec.n for kernel in found} == {1 << 14}


def test_operator_without_a_list():
    def unknown():
        """Of this module."""

    unknown.__module__ = "quack_norm.somewhere"
    with pytest.raises(UnsupportedError, match="unknown are not listed"):
        compile_keys(unknown, arch=SM90)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_calls_of_models_name_operators_with_lists(model):
    calls = kernels.model_calls(model, SM90)
    assert {call["op"] for call in calls} == {"rmsnorm", "softmax", "cross_entropy"}
    assert all(callable(getattr(kernels, call["op"])) for call in calls)


def test_a_step_of_a_warmed_up_model_loads_nothing_else(loaded):
    """As `quack warmup --model llama3-8b` lists them; on few rows and on many."""
    model = MODELS["llama3-8b"]
    warm = set(kernels_of(kernels.model_calls(model, SM90), SM90))
    for shape in ((40,), (3,), (1,), (2, 20), (1, 40)):
        x, w = t(*shape, model.hidden, grad=True), t(model.hidden, grad=True)
        quack_norm.rmsnorm(x, w, eps=1e-5).sum().backward()
        y, h = quack_norm.rmsnorm(x, w, residual=x * 1, prenorm=True)
        (y.sum() + h.sum()).backward()
        with torch.no_grad():
            quack_norm.rmsnorm(x, w)
            quack_norm.rmsnorm(x, w, residual=x, prenorm=True)
    for rows in (3, 40):
        for dtype in (BF16, F32):
            logits = t(rows, model.vocab, dtype=dtype, grad=True)
            quack_norm.cross_entropy(logits, labels(rows)).backward()
            with torch.no_grad():
                quack_norm.cross_entropy(logits, labels(rows))
                quack_norm.softmax(logits)
    assert len(set(loaded)) >= 12
    assert set(loaded) - warm == set()
