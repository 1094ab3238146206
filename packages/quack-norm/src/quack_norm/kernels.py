"""Which kernels a call needs, for `quack_core.jit.compile_keys` and `quack warmup`.

Each function here bears the name of an operator, takes its arguments and the architecture, and
compiles and runs nothing: operands count with shape, strides, dtype and ``requires_grad`` only, so
they may lie on the meta device. They are taken to begin at multiples of 16 bytes. With
``requires_grad`` the kernels of the backward are listed as well. Some kernels serve few rows and
some many, and where one ends depends on the GPU: both are listed.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quack_core.arch import Arch
from quack_core.jit.keys import Kernel
from quack_core.jit.models import Model
from quack_norm.ops import rows
from quack_norm.ops.cross_entropy import launch as ce
from quack_norm.ops.cross_entropy import rules as ce_rules
from quack_norm.ops.rmsnorm import bwd_prepare, bwd_rules, call, prepare
from quack_norm.ops.rmsnorm import rules as rmsnorm_rules
from quack_norm.ops.softmax import launch as row_softmax
from quack_norm.ops.topk import config as topk_config
from quack_norm.ops.topk import launch as row_topk

Kernels = tuple[Kernel, ...]

OPERATORS = ("cross_entropy", "layernorm", "log_softmax", "rmsnorm", "softmax", "topk")
"""What this module lists the kernels of."""


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    arch: Arch,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    prenorm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_rstd: bool = False,
    out: Tensor | None = None,
) -> Kernels:
    """Of `quack_norm.rmsnorm`; with ``prenorm``, h is taken to have a gradient too."""
    operands = (x, weight, bias, residual, out)
    options = (weight_offset, prenorm, out_dtype, residual_dtype, return_rstd)
    return tuple(_norm(arch, *operands, *options, centred=False))


def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    arch: Arch,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    return_statistics: bool = False,
    out: Tensor | None = None,
) -> Kernels:
    """Of `quack_norm.layernorm`; see `rmsnorm`."""
    operands = (x, weight, bias, residual, out)
    options = (0.0, prenorm, out_dtype, residual_dtype, return_statistics)
    return tuple(_norm(arch, *operands, *options, centred=True))


def softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    arch: Arch,
    scale: float = 1.0,
) -> Kernels:
    """Of `quack_norm.softmax`."""
    return tuple(_softmax(arch, input, dim, dtype, scale, log=False))


def log_softmax(
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    arch: Arch,
    scale: float = 1.0,
) -> Kernels:
    """Of `quack_norm.log_softmax`."""
    return tuple(_softmax(arch, input, dim, dtype, scale, log=True))


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    arch: Arch,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_lse: bool = False,
    inplace_backward: bool = False,
) -> Kernels:
    """Of `quack_norm.cross_entropy`."""
    packed = ce.as_rows(_bare(input))
    flags = (label_smoothing > 0, softcap is not None, z_loss > 0)
    record = input.requires_grad
    fused = record and reduction != "none" and input.dtype != torch.float16
    forward = ce.plain(ce.forward_spec(packed, target, weight, reduction, *flags, fused))
    found = [_kernel(forward, ce_rules.default_fwd(forward, arch), arch)]
    if fused:
        rescale = ce.rescale_spec(input.dtype, input.dtype)
        found.append(_kernel(rescale, ce_rules.default_rescale(rescale, arch), arch))
    elif record:
        backward = ce.plain(ce.backward_spec(input.dtype, packed, target, weight, *flags))
        found.append(_kernel(backward, ce_rules.default_bwd(backward, arch), arch))
    return tuple(found)


def topk(x: Tensor, k: int, softmax: bool = False, *, arch: Arch) -> Kernels:
    """Of `quack_norm.topk`."""
    outer = rows.outer_shape((_bare(x),), per_head=False)
    forward = row_topk.plain(row_topk.forward_spec(x, k, softmax, len(outer) + 1))
    found = [_kernel(forward, topk_config.default_fwd(forward), arch)]
    if x.requires_grad:
        kind = x.dtype if softmax else None
        backward = row_topk.backward_spec(x.shape[-1], k, x.dtype, x.dtype, kind)
        found.append(_kernel(backward, topk_config.default_bwd(backward), arch))
    return tuple(found)


def model_calls(model: Model, arch: Arch) -> tuple[dict[str, Any], ...]:
    """What a step of a model calls, training and inference, as lines of a shapes file.

    The number of rows changes no kernel; that they come in two dimensions or three does.
    """
    calls: list[dict[str, Any]] = []
    for rows_ in ("2048", "1, 2048"):
        x, weight = f"{model.dtype}[{rows_}, {model.hidden}]", f"{model.dtype}[{model.hidden}]"
        norm = {"op": "rmsnorm", "x": x, "weight": weight}
        for grad in (True, False):
            calls += [
                {**norm, "grad": grad},
                {**norm, "grad": grad, "residual": x, "prenorm": True},
            ]
    logits = f"[2048, {model.vocab}]"
    for dtype in dict.fromkeys((model.dtype, "float32")):
        loss = {"op": "cross_entropy", "input": f"{dtype}{logits}", "target": "int64[2048]"}
        calls += [{**loss, "grad": grad} for grad in (True, False)]
        calls.append({"op": "softmax", "input": f"{dtype}{logits}"})
    return tuple(calls)


def selftest_kernel(arch: Arch) -> Kernel:
    """A kernel for ``quack doctor`` to compile."""
    x, weight = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 1024), (1024,)))
    return rmsnorm(x, weight, arch=arch)[0]


def selftest() -> None:
    """Run RMSNorm on the current GPU and compare it with float64.

    Raises:
        RuntimeError: the result is wrong.
    """
    from quack_norm import rmsnorm as operator

    x = torch.randn(64, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(1024, dtype=torch.bfloat16, device="cuda")
    right = torch.nn.functional.rms_norm(x.double(), (1024,), weight.double(), 1e-6)
    error = ((operator(x, weight).double() - right).norm() / right.norm()).item()
    if not error < 4e-3:  # a bf16 rounding
        raise RuntimeError(f"rmsnorm has a relative error of {error:.1e}, at most 4e-3 is right")


def _norm(
    arch: Arch,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    weight_offset: float,
    prenorm: bool,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    want_rstd: bool,
    centred: bool,
) -> Iterator[Kernel]:
    record = _records(x, weight, bias, residual)
    stored = call.stored_dtype(x, residual, prenorm, residual_dtype, record)
    result = (out.dtype if out is not None else out_dtype) or x.dtype
    per_head = 2 in [t.ndim for t in (weight, bias) if t is not None]
    given = [None if t is None else _bare(t) for t in (out, x, residual)]
    outer = rows.outer_shape(given, per_head)
    _, packed, added = (None if t is None else rows.as_rows(t, outer) for t in given)
    assert packed is not None
    written = None if residual is None and stored == x.dtype else stored  # h is x itself
    options = (weight_offset, result, written, record or want_rstd, centred)
    forward = prepare.plain_forward(prepare.forward_spec(packed, weight, bias, added, *options))
    chosen = rmsnorm_rules.default_fwd(forward, arch)
    yield from _both(forward, chosen, arch)
    if not record:
        return
    h = packed if residual is None else packed.to(stored)
    grad = packed.to(result)
    passed = packed.to(stored) if prenorm else None
    wants = residual is not None and residual.requires_grad and residual.dtype != x.dtype
    backward = bwd_prepare.backward_spec(
        h,
        weight,
        grad,
        passed,
        weight_offset,
        x.dtype,
        residual.dtype if wants and residual is not None else None,
        weight is not None and weight.requires_grad,
        bias.dtype if bias is not None and bias.requires_grad else None,
        per_head,
        centred,
    )
    backward = bwd_prepare.plain_backward(backward)
    yield _kernel(backward, bwd_rules.default_bwd(backward, arch), arch)


def _softmax(
    arch: Arch, x: Tensor, dim: int, dtype: torch.dtype | None, scale: float, log: bool
) -> Iterator[Kernel]:
    record, result = x.requires_grad, dtype or x.dtype
    moved = _bare(x)
    if result not in (x.dtype, torch.float32):
        moved = moved.to(result)
    moved = moved.movedim(dim, -1) if moved.dim() else moved.view(1)
    packed = rows.as_rows(moved, rows.outer_shape((moved,), per_head=False))
    forward = row_softmax.plain(row_softmax.forward_spec(packed, log, scale, result))
    yield from _both(forward, row_softmax.choose(forward, arch), arch)
    if record:
        out = packed.to(result)
        backward = row_softmax.backward_spec(out, out, log, scale, moved.dtype)
        backward = row_softmax.plain(backward)
        yield from _both(backward, row_softmax.choose(backward, arch), arch)


def _both(spec: Any, chosen: Any, arch: Arch) -> Iterator[Kernel]:
    """The kernel for most numbers of rows and, where those are others, the kernels for few."""
    for config in dict.fromkeys((chosen, chosen.for_few(spec), chosen.crowded(spec, arch))):
        if config is not None:
            yield _kernel(spec, config, arch)


def _kernel(spec: Any, config: Any, arch: Arch) -> Kernel:
    return Kernel(config.module, spec, config, arch)


def _records(*operands: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in operands)


def _bare(x: Tensor) -> Tensor:
    """Without memory and history, so that nothing here is computed."""
    return x.detach().to("meta")
