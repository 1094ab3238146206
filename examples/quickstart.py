"""RMSNorm, forward and backward: is it right, how fast is it, what was compiled?

On a GPU the kernels are checked against float64 and timed beside torch and a copy of the same
bytes. Without one the reference is checked on the CPU, and the kernels are compiled for three
architectures and inspected. The exit status is 1 if anything is wrong.
"""

import sys
from collections.abc import Callable

import kernel_code
import kernel_speed
import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core import arch as arches
from quack_core.errors import ArchError
from quack_core.testing import compare
from quack_core.testing.inputs import random
from quack_norm import rmsnorm

EPS = 1e-6
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

Leaves = dict[str, Tensor]
Norm = Callable[..., tuple[Tensor, Tensor]]


def operands(device: str) -> dict[str, Leaves]:
    """x, weight and residual of some calls."""

    def make(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return random(shape, dtype, device, seed=sum(shape), shift=0.5)

    qkv = make(256, 3, 8, 128, dtype=BF16)
    return {
        "bfloat16 rows, float32 weight": {"x": make(256, 4096, dtype=BF16), "weight": make(4096)},
        "odd rows in float16": {"x": make(128, 4095, dtype=F16), "weight": make(4095)},
        "a weight per head, q inside of qkv": {"x": qkv[:, 0], "weight": make(8, 128)},
        "a residual, added and returned": {
            "x": make(128, 4096, dtype=BF16),
            "weight": make(4096, dtype=BF16),
            "residual": make(128, 4096),
        },
    }


def quack(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The operator: the normalised rows, and what was normalised."""
    out, h = rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)
    return out, h


def exact(x: Tensor, weight: Tensor, residual: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """The definition; its operands are float64."""
    h = x + residual
    return h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * weight, h


def unfused(x: Tensor, weight: Tensor, residual: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """With torch's norm; its operands are float32."""
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], eps=EPS) * weight, h


def results(norm: Norm, leaves: Leaves, dtype: torch.dtype | None = None) -> Leaves:
    """Outputs, and gradients through both of them; operands are converted to `dtype` first."""
    leaves = {name: leaf.to(dtype or leaf.dtype).requires_grad_() for name, leaf in leaves.items()}
    outputs = norm(**leaves)
    incoming = [gradient(out) for out in outputs]
    found = torch.autograd.grad(outputs, list(leaves.values()), incoming)
    named = {f"d{name}": tensor for name, tensor in zip(leaves, found, strict=True)}
    return {"out": outputs[0].detach(), "h": outputs[1].detach(), **named}


def gradient(out: Tensor) -> Tensor:
    """Multiples of 1/8, which are the same in every dtype."""
    return random(tuple(out.shape), F32, out.device, seed=1).mul(8).round().div(8).to(out.dtype)


def errors(leaves: Leaves) -> dict[str, float]:
    """The largest error of each result, as a share of what is allowed.

    Raises:
        AssertionError: a result is off by more.
    """
    found, right = results(quack, leaves), results(exact, leaves, torch.float64)
    torchs = results(unfused, leaves, F32)
    baseline = {name: tensor.to(found[name].dtype) for name, tensor in torchs.items()}
    # dweight is a sum: it may also be off by the rounding of its terms in float32.
    normalised, _ = exact(right["h"], torch.ones_like(leaves["weight"]))
    terms = (gradient(right["out"]) * normalised).abs().sum_to_size(leaves["weight"].shape)
    share = compare.assert_accurate(
        found.pop("dweight"),
        right["dweight"],
        baseline["dweight"],
        kind="columns",
        terms=terms,
        name="dweight",
    )
    return {"dweight": share} | {
        name: compare.assert_accurate(tensor, right[name], baseline[name], name=name)
        for name, tensor in found.items()
    }


def check(device: str) -> bool:
    """Print a table of errors; tell whether all are within bounds."""
    names = ("out", "h", "dx", "dweight", "dresidual")
    print("\nErrors against float64; 1 is what is allowed: twice the error of torch, and an ulp\n")
    print(f"  {'':38}" + "".join(f"{name:>10}" for name in names))
    passed = True
    for what, leaves in operands(device).items():
        try:
            found = errors(leaves)
        except AssertionError as error:
            print(f"  {what:38}  WRONG: {error}")
            passed = False
        else:
            cells = (f"{found[name]:.2f}" if name in found else "" for name in names)
            print(f"  {what:38}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    return passed


def main() -> int:
    """Run all that this machine can run; 1 if anything is wrong."""
    arch = None
    if torch.cuda.is_available():
        try:
            arch = arches.detect()
        except ArchError as error:
            print(error)
    name = torch.cuda.get_device_name() if arch else "no GPU: the reference on the CPU"
    print(f"torch {torch.__version__}, {name}")
    passed = check("cuda" if arch else "cpu")
    if arch:
        kernel_speed.measure()
    else:
        passed = kernel_code.inspect() and passed
    kernel_code.restart(arch or arches.get("sm90"))
    print("\nall right" if passed else "\nWRONG: see above")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
