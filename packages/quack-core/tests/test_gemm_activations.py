"""KG-12: every activation and its derivative; the definitions against torch, kernels' code against those."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quack_core.device import activation
from quack_core.errors import DTypeError
from quack_core.gemm import activations
from quack_core.gemm.epilogue import ACTIVATIONS

PROBE = Path(__file__).parent / "device_probe"
INF, NAN = math.inf, math.nan
EPS = 2.0**-23
"""An ulp of float32, relative, at most."""

FORMULAS = {  # of a float: f, f'
    "identity": (lambda x: x, lambda x: 1.0),
    "relu": (lambda x: max(x, 0.0), lambda x: float(x > 0)),
    "relu_sq": (lambda x: max(x, 0.0) ** 2, lambda x: 2 * max(x, 0.0)),
    "sigmoid": (lambda x: 1 / (1 + math.exp(-x)), lambda x: 1 / (2 + 2 * math.cosh(x))),
    "silu": (
        lambda x: x / (1 + math.exp(-x)),
        lambda x: (1 + math.exp(-x) * (1 + x)) / (1 + math.exp(-x)) ** 2,
    ),
    "quick_gelu": (
        lambda x: x / (1 + math.exp(-1.702 * x)),
        lambda x: (1 + math.exp(-1.702 * x) * (1 + 1.702 * x)) / (1 + math.exp(-1.702 * x)) ** 2,
    ),
    "tanh": (math.tanh, lambda x: 1 / math.cosh(x) ** 2),
    "gelu": (
        lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
        lambda x: (
            math.erfc(-x / math.sqrt(2)) / 2 + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        ),
    ),
    "gelu_tanh": (
        lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        None,
    ),
}
POINTS = [-7.5, -4.0, -3.0, -1.5, -1.0, -0.3, -1e-3, 0.0, 1e-3, 0.3, 1.0, 1.5, 3.0, 4.0, 7.5]


def test_kg12_all_tables_have_the_same_activations():
    assert set(activation.FUNCTIONS) == set(activation.DERIVATIVES) == set(ACTIVATIONS)
    assert set(FORMULAS) == set(ACTIVATIONS)
    for name in ACTIVATIONS:
        activations.reference(name, torch.zeros(1))
        activations.derivative(name, torch.zeros(1))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kg12_activation_is_its_formula(name):
    f, slope = FORMULAS[name]
    x = torch.tensor(POINTS, dtype=torch.float64)
    exact = np.array([f(v) for v in POINTS])
    np.testing.assert_allclose(activations.reference(name, x), exact, rtol=1e-12, atol=1e-15)
    if slope is not None:
        exact = np.array([slope(v) for v in POINTS])
        np.testing.assert_allclose(activations.derivative(name, x), exact, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kg12_derivative_is_that_of_autograd(name):
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([0.0, -0.0, 40.0, -40.0])])
    x = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(activations.reference(name, x).sum(), x)
    found = activations.derivative(name, x.detach())
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)


class Checked(torch.autograd.Function):
    """An activation with our derivative."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.save_for_backward(x)
        ctx.name = name
        return activations.reference(name, x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * activations.derivative(ctx.name, *ctx.saved_tensors), None


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kg12_gradcheck(name):
    x = torch.tensor([v for v in POINTS if abs(v) > 0.1]).double().requires_grad_()  # no kinks
    assert torch.autograd.gradcheck(lambda x: Checked.apply(x, name), (x,))


def test_kg12_quick_gelu_uses_1_702():
    x = torch.ones(1, dtype=torch.float64)
    assert activations.reference("quick_gelu", x).item() == 1 / (1 + math.exp(-1.702))
    assert activation.QUICK == 1.702


@pytest.mark.parametrize("function", [activations.reference, activations.derivative])
def test_names_are_checked(function):
    with pytest.raises(DTypeError, match="'swish' must be one of identity, relu"):
        function("swish", torch.zeros(1))


# --- the code of kernels, on the CPU


SPECIAL = (0.0, INF, -INF, NAN, 1e-38, -1e-38, 88.8, -88.8, -87.0, -104.0, 1e20, -1e20, 3e38, -3e38)
MAGNITUDES = np.concatenate([np.logspace(-12, 0, 500), np.linspace(0.5, 0.6, 400)])
ARGUMENTS = np.concatenate(
    [np.linspace(-60, 60, 6001), MAGNITUDES, -MAGNITUDES, np.array(SPECIAL)]
).astype(np.float32)
ON_HOST = tuple(name for name in ACTIVATIONS if name != "gelu")  # erf exists on GPUs only


@pytest.fixture(scope="module")
def on_host():
    """``{name: values at ARGUMENTS}``, evaluated by one process, with an exact reciprocal.

    Those of a derivative are ``(name, "derivative")``.
    """
    cases = [("activation", name) for name in ON_HOST] + [("derivative", name) for name in ON_HOST]
    requests = [(*case, ARGUMENTS.tolist()) for case in cases]
    path = os.pathsep.join([str(PROBE), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-m", "quack_device_probe.host"],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONPATH": path, "CUTE_DSL_DISABLE_FILE_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    keys = [*ON_HOST, *((name, "derivative") for name in ON_HOST)]
    return {key: np.array(rows) for key, rows in zip(keys, found, strict=True)}


def exact(name):
    if name == "gelu_tanh":  # 1 + tanh, as torch has it, cancels in float64 too
        x = ARGUMENTS.astype(np.float64)
        with np.errstate(all="ignore"):
            return x / (1 + np.exp(-2 * activation.SQRT_2_OVER_PI * (x + 0.044715 * x**3)))
    return activations.reference(name, torch.from_numpy(ARGUMENTS).double()).numpy()


def tolerance(name, x, ex2_ulp=2, rcp_ulp=1):
    """Relative error of the formula, to first order in an ulp.

    What rounds the argument of ex2, by half an ulp each, counts as often as the argument is large:
    products and constants. Sum, reciprocal and product follow.
    """
    factor = {"quick_gelu": 1.702, "gelu_tanh": 1.6 * (1 + 0.045 * x * x)}.get(name, 1.0)
    steps = {"quick_gelu": 4, "gelu_tanh": 7}.get(name, 2)
    return (np.abs(x * factor) * steps / 2 + ex2_ulp + rcp_ulp + 2) * EPS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sigmoid", "silu", "quick_gelu", "gelu_tanh"])
def test_activations_of_kernels_are_within_their_rounding_errors(on_host, name):
    finite = np.isfinite(ARGUMENTS)
    x, expected, found = (v[finite] for v in (ARGUMENTS.astype("d"), exact(name), on_host[name]))
    regular = np.abs(expected) > 2.0**-112  # the inverse of the largest exponential flushes to 0
    assert regular.sum() > 5000
    error = np.abs(found - expected)
    assert (error <= tolerance(name, x) * np.abs(expected))[regular].all()
    assert (error <= 2.0**-112)[~regular].all()


@pytest.mark.exhaustive
def test_tanh_of_kernels_has_a_small_relative_error(on_host):
    """1 - 2 / (1 + e ** 2x) alone has an absolute one: nothing is left of arguments below 1e-7."""
    finite = np.isfinite(ARGUMENTS)
    x, expected, found = (v[finite] for v in (ARGUMENTS, exact("tanh"), on_host["tanh"]))
    relative = np.abs(found - expected) / np.maximum(np.abs(expected), 1e-300)
    assert relative[np.abs(x) < activation.TANH_NEAR].max() <= 1.5 * EPS
    assert relative.max() <= 8 * EPS
    assert np.abs(found).max() == 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["identity", "relu", "relu_sq"])
def test_activations_without_rounding(on_host, name):
    with np.errstate(over="ignore"):
        expected = activations.reference(name, torch.from_numpy(ARGUMENTS)).numpy()
    np.testing.assert_array_equal(on_host[name].astype(np.float32), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.parametrize("value", [INF, -INF, NAN, 0.0])
def test_special_values_are_those_of_torch(on_host, name, value):
    (expected,) = activations.reference(name, torch.tensor([value])).tolist()
    index = len(ARGUMENTS) - len(SPECIAL) + SPECIAL.index(value)
    np.testing.assert_equal(on_host[name][index], expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_HOST)
def test_kg12_derivatives_of_kernels(on_host, name):
    """Where a term with x is subtracted, the error is one of the largest term."""
    near = np.abs(ARGUMENTS) < 60
    x = ARGUMENTS[near].astype(np.float64)
    expected = activations.derivative(name, torch.from_numpy(x)).numpy()
    error = np.abs(on_host[name, "derivative"][near] - expected)
    assert (error <= (8 + 2 * np.abs(x)) * EPS * np.maximum(np.abs(expected), 0.1)).all()


def ulps(values, count):
    return np.float32(values * (1 + count * EPS))


@pytest.mark.parametrize("ex2_ulp", [-2, 2])
@pytest.mark.parametrize("rcp_ulp", [-1, 1])
def test_approximations_of_a_gpu_stay_within_the_same_bounds(ex2_ulp, rcp_ulp):
    """The formulas with ex2.approx and rcp.approx as far off as PTX admits."""
    x = ARGUMENTS[np.abs(ARGUMENTS) < 40]
    one, wide = np.float32(1), x.astype(np.float64)

    def sigmoid(x):
        power = ulps(np.exp2(-x * np.float32(math.log2(math.e))), ex2_ulp)
        return ulps(one / (one + power), rcp_ulp)

    right = 1 / (1 + np.exp(-wide))
    assert (np.abs(sigmoid(x) - right) <= tolerance("sigmoid", wide) * right).all()
    silu = np.abs(x * sigmoid(x) - wide * right)
    assert (silu <= tolerance("silu", wide) * np.abs(wide * right)).all()
    far = np.abs(x) >= activation.TANH_NEAR
    tanh = one - np.float32(2) * sigmoid(-(x + x))[far]
    # 2 / (1 + e ** 2x) is up to three times the result, and four or five ulps off.
    assert (np.abs(tanh - np.tanh(wide[far])) <= 14 * EPS * np.abs(np.tanh(wide[far]))).all()


@pytest.mark.parametrize("erf_ulp", [-2, 2])
def test_gelu_has_a_small_absolute_error(erf_ulp):
    """As torch's on a GPU, x (1 + erf) / 2 cancels for x < -3: the error is one of 1 + erf."""
    x = ARGUMENTS[np.isfinite(ARGUMENTS) & (np.abs(ARGUMENTS) < 60)]
    argument = torch.from_numpy(x * np.float32(math.sqrt(0.5))).double()
    erf = ulps(torch.erf(argument).numpy().astype(np.float32), erf_ulp).astype(np.float64)
    half = np.float64(np.float32(0.5) * x)
    found = np.float32(half * np.clip(erf, -1, 1) + half)
    right = torch.nn.functional.gelu(torch.from_numpy(x).double()).numpy()
    error = np.abs(found - right)
    assert (error <= np.abs(half) * 3.5 * EPS + np.abs(right) * EPS).all()
    for dtype, smallest in ((torch.bfloat16, -2.9), (torch.float16, -2.2)):
        visible = x > smallest  # below half an ulp of the output
        assert (error[visible] <= np.abs(right[visible]) * torch.finfo(dtype).eps / 2).all()
