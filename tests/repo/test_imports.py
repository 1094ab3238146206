"""Importing and calling has no effects: what is loaded, what it costs, what stays untouched."""

import pytest

HEAVY = ("torch", "cutlass", "tvm_ffi", "triton", "cuda", "numpy")

IMPORTS = """
from quack_blockscaled import BlockScaledTensor, dequantize, load_file, quantize
from quack_gemm import gemm
from quack_norm import LayerNorm, QuackRMSNorm, RMSNorm, layernorm, rmsnorm
from quack_norm import cross_entropy, log_softmax, softmax, topk
import quack_blockscaled.files, quack_gemm.api, quack_norm.nn
"""

# One forward, and backward if there is one, on the CPU of each public function and module.
CALLS = """
import torch
from quack_gemm import gemm
from quack_norm import LayerNorm, QuackRMSNorm, RMSNorm, layernorm, rmsnorm
from quack_norm import cross_entropy, log_softmax, softmax, topk
from quack_blockscaled import NVFP4, quantize
x = torch.randn(3, 4, 40, requires_grad=True)
weight = torch.randn(40, requires_grad=True)
out, stored = rmsnorm(x, weight, weight, residual=x, prenorm=True)
(out.sum() + stored.sum()).backward()
layernorm(x, weight, weight, residual=x).sum().backward()
cross_entropy(softmax(x, 1) + log_softmax(x), torch.zeros(3, 40, dtype=torch.long)).backward()
topk(x, 5, softmax=True)[0].square().sum().backward()
gemm(x.detach().bfloat16(), weight.detach().bfloat16()[:, None], alpha=2.0, activation="silu")
quantize(x.detach()[..., :32], NVFP4).mT[..., :2].dequantize()
for module in (RMSNorm(40), QuackRMSNorm(dim=40), LayerNorm(40)):
    module(x).square().sum().backward()
"""

# `taken` holds each callable of the modules `prefix...` and of their classes, by name, so that a
# later `changed` sees which were replaced. State that a library keeps of itself is not callable.
SNAPSHOT = """
import types

def callables(prefix):
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != prefix or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] == prefix:
                for attribute, member in list(vars(value).items()):
                    found[value.__module__, value.__qualname__, attribute] = member
    return found

def changed(taken, prefix):
    now = callables(prefix)
    missing = object()
    return sorted(".".join(key) for key, value in taken.items() if now.get(key, missing) is not value)
"""


def test_importing_core_loads_nothing_heavy(fresh_python):
    code = f"import quack_core\nresult = [name for name in {HEAVY} if name in sys.modules]"
    assert fresh_python(code) == []


def test_pure_modules_load_nothing_heavy(fresh_python):
    code = f"""
import quack_core.arch, quack_core.dtypes, quack_core.env, quack_core.errors
import quack_core.gemm.epilogue, quack_core.layout.algebra, quack_core.reduction.tiling
import quack_blockscaled.formats, quack_blockscaled.record, quack_blockscaled.sizes
import quack_gemm.config, quack_gemm.heuristic, quack_gemm.spec
import quack_norm.ops.rmsnorm.config, quack_norm.ops.rmsnorm.rules, quack_norm.ops.rmsnorm.spec
result = [name for name in {HEAVY} if name in sys.modules]
"""
    assert fresh_python(code) == []


def test_a_forward_loads_neither_backward_nor_compiler(fresh_python):
    """A process that finds its kernels on disk starts without them; torch knows both operators."""
    found = fresh_python("""
import torch, quack_norm
quack_norm.rmsnorm(torch.ones(2, 8))
unused = [name for name in sys.modules if name.startswith("quack_norm.ops.rmsnorm.bwd")]
for name in ("compile", "operators", "policy", "pool"):
    unused += [f"quack_core.jit.{name}"] * (f"quack_core.jit.{name}" in sys.modules)
operators = torch.ops.quack_norm
result = unused, [str(operators.rmsnorm_fwd.default), str(operators.rmsnorm_bwd.default)]
""")
    assert found == [[], ["quack_norm.rmsnorm_fwd.default", "quack_norm.rmsnorm_bwd.default"]]


def test_every_public_name_costs_at_most_300_ms_beyond_torch(fresh_python):
    code = """
import time, torch
start = time.process_time()
from quack_blockscaled import BlockScaledTensor, dequantize, load_file, quantize, save_file, supports
from quack_gemm import gemm
from quack_norm import LayerNorm, QuackRMSNorm, RMSNorm, layernorm, rmsnorm
from quack_norm import cross_entropy, log_softmax, softmax, topk
result = time.process_time() - start
"""
    # One of several runs is enough: another process can only make one slower.
    assert any(fresh_python(code) <= 0.3 for _ in range(3))


@pytest.fixture(scope="module", params=[IMPORTS, CALLS], ids=["import", "call"])
def effects(request, fresh_python):
    """What imports or calls load and change."""
    return fresh_python(f"""
{SNAPSHOT}
import torch
before, taken = set(sys.modules), callables("torch")
{request.param}
loaded = set(sys.modules) - before
heavy = ("cutlass", "torch._dynamo", "torch._inductor", "triton", "cuda")
result = {{
    "loaded": [name for name in heavy if name in loaded],
    "initialized": torch.cuda.is_initialized(),
    "known": len(taken),
    "changed": changed(taken, "torch"),
}}
""")


def test_the_cpu_needs_neither_dsl_nor_compiler_nor_gpu(effects):
    assert (effects["loaded"], effects["initialized"]) == ([], False)


def test_nothing_of_torch_is_patched(effects):
    assert effects["known"] > 10000
    assert effects["changed"] == []


def test_nothing_of_the_dsl_is_patched_by_kernels(fresh_python):
    pytest.importorskip("cutlass")
    found = fresh_python(f"""
{SNAPSHOT}
import cutlass, cutlass.cute, cutlass.cute.runtime
taken = callables("cutlass")
import importlib, pkgutil, quack_blockscaled, quack_core, quack_gemm, quack_norm
for package in (quack_blockscaled, quack_core, quack_gemm, quack_norm):
    for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not each.name.endswith((".plugin", ".jax")):
            importlib.import_module(each.name)
from quack_core import arch
from quack_core.jit.compile import compile_kernel
from quack_norm.ops.rmsnorm.rules import default_fwd
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec
spec = RMSNormFwdSpec(n=1024, x="bfloat16", out="bfloat16")
sm90 = arch.get("sm90")
compile_kernel("quack_norm.ops.rmsnorm.fwd", spec, default_fwd(spec, sm90), sm90)
result = len(taken), changed(taken, "cutlass")
""")
    assert found[0] > 5000
    assert found[1] == []


def test_the_snapshot_sees_a_patch(fresh_python):
    found = fresh_python(f"""
{SNAPSHOT}
import torch
taken = callables("torch")
torch.add = torch.sub
torch.nn.Module.train = lambda self: self
result = changed(taken, "torch")
""")
    assert {"torch.add", "torch.nn.modules.module.Module.train"} <= set(found)
