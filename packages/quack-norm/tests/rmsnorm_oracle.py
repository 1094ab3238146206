"""Cases of RMSNorm, their right answers in float64, and how results are judged."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core.testing.compare import EPS32, assert_accurate
from quack_core.testing.inputs import Layout, random
from quack_norm.ops.rmsnorm.api import rmsnorm

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {F32: "fp32", BF16: "bf16", F16: "fp16", None: "none"}


@dataclass(frozen=True)
class Case:
    """One situation. None for a dtype means that the operand is absent, or the default.

    Args:
        why: what this case has that no other has.
        shape: of x.
        scale, shift: standard deviation and mean of x.
        x_layout, dout_layout: how x (and residual) and the incoming gradient lie in memory.
    """

    why: str
    shape: tuple[int, ...]
    x: torch.dtype = BF16
    weight: torch.dtype | None = F32
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    out: torch.dtype | None = None
    residual_out: torch.dtype | None = None
    prenorm: bool = False
    per_head: bool = False
    offset: float = 0.0
    eps: float = 1e-6
    scale: float = 1.0
    shift: float = 0.0
    x_layout: Layout = Layout.CONTIGUOUS
    dout_layout: Layout = Layout.CONTIGUOUS

    @property
    def id(self) -> str:
        """For ``ids=``."""
        size = "x".join(map(str, self.shape))
        return f"{self.why.replace(' ', '_')}-{size}-{SHORT[self.x]}"

    @property
    def out_dtype(self) -> torch.dtype:
        return self.out or self.x

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of h as a result."""
        return self.residual_out or self.residual or self.x


@dataclass
class Operands:
    """Leaves and the gradients that come back to the results."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    dout: Tensor
    dresidual_out: Tensor | None

    def leaves(self) -> dict[str, Tensor]:
        named = {"x": self.x, "weight": self.weight, "bias": self.bias, "residual": self.residual}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


Results = dict[str, Tensor]


def operands(case: Case, device: str, seed: int = 0) -> Operands:
    """Random operands; weights are not near one and gradients not all alike."""

    def make(shape: tuple[int, ...], dtype: torch.dtype | None, key: int, **how: Any) -> Any:
        return None if dtype is None else random(shape, dtype, device, seed=seed + key, **how)

    parameter = case.shape[-2:] if case.per_head else case.shape[-1:]
    stored = case.stored_dtype if case.prenorm else None
    made = Operands(
        x=make(case.shape, case.x, 1, layout=case.x_layout, scale=case.scale, shift=case.shift),
        weight=make(parameter, case.weight, 2, shift=1.0 - case.offset, scale=0.5),
        bias=make(parameter, case.bias, 3),
        residual=make(case.shape, case.residual, 4, layout=case.x_layout, scale=case.scale),
        dout=make(case.shape, case.out_dtype, 5, layout=case.dout_layout),
        dresidual_out=make(case.shape, stored, 6, layout=case.dout_layout),
    )
    for leaf in made.leaves().values():
        leaf.requires_grad_()
    return made


def ours(case: Case, data: Operands) -> Results:
    """Results and gradients of the operator."""
    results = rmsnorm(
        data.x,
        data.weight,
        data.bias,
        residual=data.residual,
        eps=case.eps,
        weight_offset=case.offset,
        prenorm=case.prenorm,
        out_dtype=case.out,
        residual_dtype=case.residual_out,
        return_rstd=True,
    )
    names = ("out", "h", "rstd") if case.prenorm else ("out", "rstd")
    named = dict(zip(names, results, strict=True))
    return named | _gradients(named, data.leaves(), data.dout, data.dresidual_out)


def exact(case: Case, data: Operands) -> Results:
    """The definition in float64, differentiated by autograd."""
    leaves = {k: t.detach().double().requires_grad_() for k, t in data.leaves().items()}
    h = leaves["x"] + leaves["residual"] if "residual" in leaves else leaves["x"] * 1
    rstd = (h.square().mean(-1) + case.eps).rsqrt()
    normalised = h * rstd.unsqueeze(-1)
    out = _affine(normalised, leaves, case.offset)
    named = {"out": out, "h": h, "rstd": rstd}
    dout = data.dout.double()
    dh = None if data.dresidual_out is None else data.dresidual_out.double()
    results = named | _gradients(named, leaves, dout, dh)
    parameter = case.shape[-2:] if case.per_head else case.shape[-1:]
    # Where h was stored in 16 bits, each term of dweight carries that rounding, half an epsilon.
    stored = torch.finfo(case.stored_dtype).eps / EPS32 if case.residual is not None else 1.0
    terms = (dout * normalised).abs().sum_to_size(parameter)
    results["dweight_terms"] = terms * max(1.0, stored / 4)
    results["dbias_terms"] = dout.abs().sum_to_size(parameter)
    return {name: tensor.detach() for name, tensor in results.items()}


def torchs(case: Case, data: Operands) -> Results:
    """What torch gives without fusion: h rounded to its dtype, then ``F.rms_norm`` in float32."""
    leaves = {k: t.detach().float().requires_grad_() for k, t in data.leaves().items()}
    h = leaves["x"] + leaves["residual"] if "residual" in leaves else leaves["x"] * 1
    stored = h.to(case.stored_dtype)
    if case.residual is not None:
        h = h + (stored.float() - h).detach()  # the rounding has no derivative
    normalised = F.rms_norm(h, case.shape[-1:], eps=case.eps)
    out = _affine(normalised, leaves, case.offset)
    named = {"out": out, "h": h}
    dh = None if data.dresidual_out is None else data.dresidual_out.float()
    found = _gradients(named, leaves, data.dout.float(), dh)
    dtypes = {f"d{name}": tensor.dtype for name, tensor in data.leaves().items()}
    rounded = {name: tensor.to(dtypes[name]) for name, tensor in found.items()}
    return rounded | {"out": out.detach().to(case.out_dtype), "h": stored.detach()}


def check(case: Case, device: str, seed: int = 0) -> None:
    """Run a case forward and backward and judge every result."""
    data = operands(case, device, seed)
    judge(ours(case, data), exact(case, data), torchs(case, data))


def judge(found: Results, right: Results, baseline: Results) -> None:
    """Every result within the bound of its kind; rstd within 1e-5 relative."""
    for name, tensor in found.items():
        if name == "rstd":
            worst = ((tensor.double() - right["rstd"]).abs() / right["rstd"]).max()
            if tensor.numel() and not float(worst) <= 1e-5:
                raise AssertionError(f"rstd is off by {float(worst):.3g} relative")
        elif name in ("dweight", "dbias"):
            terms = right[f"{name}_terms"]
            assert_accurate(
                tensor, right[name], baseline[name], kind="columns", terms=terms, name=name
            )
        else:
            assert_accurate(tensor, right[name], baseline[name], name=name)


def variants(case: Case, **changes: Any) -> Case:
    """A case with some fields changed."""
    return replace(case, **changes)


def _affine(normalised: Tensor, leaves: dict[str, Tensor], offset: float) -> Tensor:
    out = normalised
    if "weight" in leaves:
        out = out * (leaves["weight"] + offset)
    if "bias" in leaves:
        out = out + leaves["bias"]
    return out


def _gradients(
    named: Results, leaves: dict[str, Tensor], dout: Tensor, dh: Tensor | None
) -> Results:
    outputs, incoming = [named["out"]], [dout]
    if dh is not None:
        outputs.append(named["h"])
        incoming.append(dh)
    found = torch.autograd.grad(outputs, list(leaves.values()), incoming)
    return {f"d{name}": tensor for name, tensor in zip(leaves, found, strict=True)}
