"""Public names come from the package root, and stay what they are whatever else is imported."""

import pytest

# Imports every submodule but the pytest plugin, which pytest itself has to import first, and the
# one for JAX where that is not installed.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil
skipped = (".plugin",) if importlib.util.find_spec("jax") else (".plugin", ".jax")
def import_all(package):
    for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not each.name.endswith(skipped):
            importlib.import_module(each.name)
"""


def test_norm_exports_exactly_the_promised_names(fresh_python):
    found = fresh_python("import quack_norm\nresult = quack_norm.__all__, dir(quack_norm)")
    assert found[0] == [
        "LayerNorm",
        "QuackRMSNorm",
        "RMSNorm",
        "__version__",
        "cross_entropy",
        "cross_entropy_from_lse",
        "layernorm",
        "log_softmax",
        "rmsnorm",
        "softmax",
        "topk",
    ]
    assert set(found[0]) <= set(found[1])


def test_gemm_exports_exactly_the_promised_names(fresh_python):
    found = fresh_python("import quack_gemm\nresult = quack_gemm.__all__, dir(quack_gemm)")
    assert found[0] == [
        "MLP",
        "GemmConfig",
        "Linear",
        "SplitK",
        "__version__",
        "gemm",
        "gemm_act",
        "gemm_add",
        "gemm_dact",
        "gemm_dact_bias",
        "gemm_dgated",
        "gemm_gated",
        "gemm_norm_act",
        "gemm_rms",
        "gemm_symmetric",
        "linear",
        "linear_act",
        "linear_gated",
        "mlp",
    ]
    assert set(found[0]) <= set(found[1])


def test_blockscaled_exports_exactly_the_promised_names(fresh_python):
    code = "import quack_blockscaled\nresult = quack_blockscaled.__all__, dir(quack_blockscaled)"
    found = fresh_python(code)
    assert found[0] == [
        "FP8_BLOCK_1X128",
        "FP8_BLOCK_128X128",
        "MXFP4",
        "MXFP6_E2M3",
        "MXFP6_E3M2",
        "MXFP8_E4M3",
        "MXFP8_E5M2",
        "NVFP4",
        "BlockFormat",
        "BlockScaledTensor",
        "ElementFormat",
        "ScaleFormat",
        "__version__",
        "dequantize",
        "linear",
        "load_file",
        "matmul",
        "matmul_grouped",
        "quantize",
        "quantize_both",
        "save_file",
        "supports",
    ]
    assert set(found[0]) <= set(found[1])


@pytest.mark.parametrize("package", ["quack_blockscaled", "quack_gemm", "quack_norm"])
def test_an_unknown_name_raises_attribute_error(fresh_python, package):
    code = f"""
import {package}
try:
    {package}.no_such_operator
except AttributeError as error:
    result = str(error)
"""
    assert fresh_python(code) == f"module '{package}' has no attribute 'no_such_operator'"


@pytest.fixture(scope="module")
def after_importing_everything(fresh_python) -> dict:
    return fresh_python(f"""
{IMPORT_ALL}
import types
import torch
import quack_blockscaled, quack_core, quack_gemm, quack_norm
before = {{
    (package, name): getattr(package, name)
    for package in (quack_blockscaled, quack_gemm, quack_norm)
    for name in package.__all__
}}
import_all(quack_blockscaled)
import_all(quack_core)
import_all(quack_gemm)
import_all(quack_norm)

x, weight = torch.randn(5, 24), torch.randn(24)
labels, half = torch.arange(5), x.bfloat16()
def error(got, want):
    return (got - want).abs().max() / want.abs().max()

product, silu = half.float() @ half.float().T, torch.nn.functional.silu
square, pairs = torch.randn(5, 5).bfloat16(), torch.randn(16, 24).bfloat16()
eight, wide = torch.randn(8, 24).bfloat16(), torch.randn(5, 16).bfloat16()
both = half.float() @ pairs.float().T
gated = silu(both[:, ::2]) * both[:, 1::2]
wanted = torch.nn.functional.rms_norm(x, (24,), weight, 1e-6)
plain = torch.nn.functional.rms_norm(x, (24,), None, 1e-6)
centred = torch.nn.functional.layer_norm(x, (24,), weight)
whole = square.abs().ceil().repeat(1, 32)  # up to 16 such numbers lose nothing
blocks = quack_blockscaled.quantize(whole, quack_blockscaled.MXFP8_E4M3)
scales = blocks.scales.float().repeat_interleave(32, 1)
left, right = torch.eye(128)[:5] * 448, (1 + torch.arange(128.0) // 8) * torch.ones(128, 1)
factors = (
    quack_blockscaled.quantize(left, quack_blockscaled.FP8_BLOCK_1X128),
    quack_blockscaled.quantize(right, quack_blockscaled.FP8_BLOCK_128X128).mT,
)
stacked = quack_blockscaled.quantize(right[None], quack_blockscaled.FP8_BLOCK_128X128).mT
offsets = torch.tensor([0, 5], dtype=torch.int32)
grouped = quack_blockscaled.matmul_grouped(factors[0], stacked, offsets)
outcomes = {{
    "quantize": (blocks.values.float() * scales, whole),
    "dequantize": (quack_blockscaled.dequantize(blocks), whole),
    "matmul": (quack_blockscaled.matmul(*factors), left @ factors[1].dequantize()),
    "matmul_grouped": (grouped, left @ factors[1].dequantize()),
    "rmsnorm": (quack_norm.rmsnorm(x, weight), wanted),
    "RMSNorm": (quack_norm.RMSNorm(24, eps=1e-6)(x), plain),
    "QuackRMSNorm": (quack_norm.QuackRMSNorm(dim=24)(x), plain),
    "layernorm": (quack_norm.layernorm(x, weight), centred),
    "LayerNorm": (quack_norm.LayerNorm(24)(x), torch.nn.LayerNorm(24)(x)),
    "softmax": (quack_norm.softmax(x), torch.softmax(x, -1)),
    "log_softmax": (quack_norm.log_softmax(x), torch.log_softmax(x, -1)),
    "cross_entropy": (
        quack_norm.cross_entropy(x, labels), torch.nn.functional.cross_entropy(x, labels)
    ),
    "cross_entropy_from_lse": (
        quack_norm.cross_entropy_from_lse(x, x[:, 0], labels), (x.logsumexp(1) - x[:, 0]).mean()
    ),
    "topk": (quack_norm.topk(x, 7)[0], torch.topk(x, 7).values),
    "gemm": (quack_gemm.gemm(half, half.T), product.bfloat16()),
    "gemm_add": (quack_gemm.gemm_add(half, half.T, square), (product + square).bfloat16()),
    "gemm_act": (quack_gemm.gemm_act(half, half.T, "silu")[1], silu(product).bfloat16()),
    "gemm_gated": (quack_gemm.gemm_gated(half, pairs.T, "swiglu")[1], gated.bfloat16()),
    "gemm_dact": (
        quack_gemm.gemm_dact(half, half.T, square, "relu"), (product * (square > 0)).bfloat16()
    ),
    "gemm_dact_bias": (
        quack_gemm.gemm_dact_bias(half, half.T, square, "relu")[1],
        (product * (square > 0)).sum(0),
    ),
    "gemm_dgated": (
        quack_gemm.gemm_dgated(half, eight.T, wide, "reglu")[:, 1::2],
        (half.float() @ eight.float().T * wide[:, ::2].relu()).bfloat16(),
    ),
    "gemm_rms": (
        quack_gemm.gemm_rms(half, half.T)[1], (product.square().mean(-1) + 1e-6).rsqrt()
    ),
    "gemm_symmetric": (quack_gemm.gemm_symmetric(half), product.bfloat16()),
    "gemm_norm_act": (
        quack_gemm.gemm_norm_act(half, half.T, torch.full((5,), 0.5)), (product * 0.5).bfloat16()
    ),
    "linear": (quack_gemm.linear(half, half), product.bfloat16()),
    "linear_act": (quack_gemm.linear_act(half, half, "silu"), silu(product).bfloat16()),
    "linear_gated": (quack_gemm.linear_gated(half, pairs, "swiglu"), gated.bfloat16()),
    "mlp": (
        quack_gemm.mlp(half, half, square.mT, "relu"),
        (product.relu().bfloat16().float() @ square.float()).bfloat16(),
    ),
    "Linear": (quack_gemm.Linear(24, 5, dtype=half.dtype)(half).shape[1], 5),
    "MLP": (quack_gemm.MLP(24, 16, dtype=half.dtype)(half).shape[1], 24),
    "GemmConfig": (quack_gemm.GemmConfig(tile_m=64).tile_m, 64),
}}
modules = [each.name for each in pkgutil.iter_modules(quack_core.__path__)]
result = {{
    "replaced": [
        name for (package, name), value in before.items() if getattr(package, name) is not value
    ],
    "errors": {{
        name: float(abs(got - want) if isinstance(got, int) else error(got.float(), want.float()))
        for name, (got, want) in outcomes.items()
    }},
    "modules": len(modules),
    "hidden": [
        name for name in modules if not isinstance(getattr(quack_core, name), types.ModuleType)
    ],
}}
""")


def test_no_submodule_replaces_a_public_name(after_importing_everything):
    assert after_importing_everything["replaced"] == []


NAMES = ["rmsnorm", "RMSNorm", "QuackRMSNorm", "layernorm", "LayerNorm"]
NAMES += ["softmax", "log_softmax", "cross_entropy", "cross_entropy_from_lse", "topk", "gemm"]
NAMES += ["quantize", "dequantize", "matmul"]


@pytest.mark.parametrize("name", NAMES)
def test_public_names_still_work(after_importing_everything, name):
    # Some roundings on each side, of values no larger than the largest: four float32 epsilons.
    assert after_importing_everything["errors"][name] <= 4 * 2.0**-23


def test_no_name_of_core_hides_a_submodule(after_importing_everything):
    assert after_importing_everything["modules"] > 8
    assert after_importing_everything["hidden"] == []
