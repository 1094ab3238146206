"""Which kernels a call needs, for `quack_core.jit.compile_keys` and `quack warmup`.

Each function here bears the name of an operator, takes its arguments and the architecture, and
compiles and runs nothing: the operator is called with tensors of the meta device that have the
operands' shapes, strides and dtypes, and what would be launched is noted. With ``requires_grad`` so
is the backward of linear layers and MLPs. A kernel depends on all sizes, and on the number of SMs.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from quack_core.arch import Arch
from quack_core.jit.keys import Kernel
from quack_core.jit.models import Model

from . import api, autograd, fused, launch, layers

Kernels = tuple[Kernel, ...]

OPERATORS = (
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
)
"""What this module lists the kernels of."""

SMS = 132
"""SMs of an H100 SXM, H200 or GH200: what is taken where there is no GPU to ask."""

MOST_TOKENS = 8192
"""Of a model's calls: powers of two up to this."""


class _Notes(TorchDispatchMode):
    """Notes the kernels of GEMMs that are called.

    Args:
        arch: what they run on.
        out: where a result goes; None: to new memory.
    """

    def __init__(self, arch: Arch, out: Tensor | None) -> None:
        super().__init__()
        self.arch, self.out = arch, out
        self.sms = _sms(arch)
        self.kernels: dict[Kernel, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is autograd.gemm_fwd:
            self._note(found[0], *args)
        return found

    def _note(
        self,
        d: Tensor,
        a: Tensor,
        b: Tensor,
        tensors: list[Tensor],
        numbers: list[float],
        text: str,
        out_dtypes: str,
        concat: bool,
        config: str,
    ) -> None:
        if 0 in (*a.shape, *b.shape):
            return  # nothing is launched
        d = d if self.out is None else self.out
        steps = autograd.steps_of(text, tensors, numbers)
        if launch.is_single(a, b, steps):
            a, b, steps = launch.unbatched(a, b, steps)
            d = d[0]
        how = autograd.config_of(config)
        problem, chosen = launch.plan(a, b, d, steps, concat, how, self.arch, self.sms)
        for one in launch.kernels(problem.spec, chosen, self.arch):
            self.kernels[one] = None


def _sms(arch: Arch) -> int:
    """Of the GPU here, if it is of that architecture."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == arch.capability:
        return torch.cuda.get_device_properties().multi_processor_count
    return SMS


def _kernels(op: Any, *args: Any, arch: Arch, **kwargs: Any) -> Kernels:
    args, kwargs = tree_map(_bare, (args, kwargs))
    differentiable = op.__module__ == layers.__name__
    with _Notes(arch, kwargs.get("out")) as notes, torch.set_grad_enabled(differentiable):
        result = op(*args, **kwargs)
        if differentiable and result.requires_grad:
            for _ in range(1 + kwargs.get("accumulate", False)):  # the second time into the sum
                result.backward(torch.empty_like(result), retain_graph=True)
    return tuple(notes.kernels)


gemm = functools.partial(_kernels, api.gemm)
gemm_act = functools.partial(_kernels, fused.gemm_act)
gemm_add = functools.partial(_kernels, fused.gemm_add)
gemm_dact = functools.partial(_kernels, fused.gemm_dact)
gemm_dact_bias = functools.partial(_kernels, fused.gemm_dact_bias)
gemm_dgated = functools.partial(_kernels, fused.gemm_dgated)
gemm_gated = functools.partial(_kernels, fused.gemm_gated)
gemm_norm_act = functools.partial(_kernels, fused.gemm_norm_act)
gemm_rms = functools.partial(_kernels, fused.gemm_rms)
gemm_symmetric = functools.partial(_kernels, fused.gemm_symmetric)
linear = functools.partial(_kernels, layers.linear)
linear_act = functools.partial(_kernels, layers.linear_act)
linear_gated = functools.partial(_kernels, layers.linear_gated)
mlp = functools.partial(_kernels, layers.mlp)


def model_calls(model: Model, arch: Arch) -> tuple[dict[str, Any], ...]:
    """What a step of a model calls, training and inference, as lines of a shapes file.

    Args:
        arch: what it runs on; without kernels for it there are no calls.
    """
    if not arch.wgmma:
        return ()
    hidden, width, query = model.hidden, model.intermediate, model.heads * model.head
    sizes = ((query + 2 * model.kv_heads * model.head, hidden), (hidden, query))
    calls: list[dict[str, Any]] = []

    def tensor(*sizes: int) -> str:
        return f"{model.dtype}{list(sizes)}"

    for tokens in (1 << power for power in range(MOST_TOKENS.bit_length())):
        x = tensor(tokens, hidden)
        found: list[dict[str, Any]] = [
            {"op": "linear", "x": tensor(tokens, k), "weight": tensor(n, k)}
            for n, k in (*sizes, (model.vocab, hidden))
        ]
        weights = {"weight1": tensor(2 * width, hidden), "weight2": tensor(hidden, width)}
        for concat in (False, True):
            found.append({"op": "mlp", "x": x, **weights, "activation": "swiglu", "concat": concat})
        calls += [{**call, "grad": grad} for call in found for grad in (True, False)]
    return tuple(calls)


def selftest_kernel(arch: Arch) -> Kernel:
    """A kernel for ``quack doctor`` to compile."""
    a, b = (torch.empty(256, 256, dtype=torch.bfloat16, device="meta") for _ in "ab")
    return gemm(a, b.mT, arch=arch)[0]


def selftest() -> None:
    """Run a product on the current GPU and compare it with float64.

    Raises:
        RuntimeError: the result is wrong.
    """
    a, b = (torch.randn(256, 256, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    right = a.double() @ b.double().mT
    error = ((api.gemm(a, b.mT).double() - right).norm() / right.norm()).item()
    if not error < 4e-3:  # a bf16 rounding
        raise RuntimeError(f"gemm has a relative error of {error:.1e}, at most 4e-3 is right")


def _bare(x: Any) -> Any:
    """A tensor without memory and history; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad
    )
