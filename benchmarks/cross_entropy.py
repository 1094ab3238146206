"""Cross-entropy as problems: data, float64 references, checks; and what it is compared with.

Three operations: ``cross_entropy_fwd`` has a loss and a log-sum-exp for each row;
``cross_entropy_fused`` the loss and the gradient of the logits in one pass, for an incoming gradient
of one; ``cross_entropy_autograd`` the mean and its gradient through autograd, for an incoming
gradient that lies on the GPU. A launch of the last two returns the mean with its gradient, or the
losses of all rows with the gradient of their sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_core import arch, torch_op
from quack_norm.ops.cross_entropy import rules
from quack_norm.ops.cross_entropy.config import STATE_INTS, FwdConfig, StreamConfig
from quack_norm.ops.cross_entropy.spec import CrossEntropyFwdSpec
from quack_norm.ops.row_map.rules import fits

from .norm import dtype_of, judge, poison, row_chunks, size
from .peers import ALLOCATES, compiled_for_one_shape
from .rmsnorm import alignment
from .shapes import Case
from .timing import Launch
from .variant import Variant

FORWARD, FUSED, AUTOGRAD = (f"cross_entropy_{name}" for name in ("fwd", "fused", "autograd"))
IGNORED = -100
"""No row has this label."""
IN_PLACE = "the gradient replaces its own copies of the logits"
PER_ROW = "losses of rows, and the gradient of their sum"
T = TypeVar("T")


@dataclass(frozen=True)
class Buffers:
    x: Tensor  # (M, V)
    target: Tensor  # (M,) int64
    dloss: Tensor | None = None  # (), of the mean


class CrossEntropy:
    """Rows of (M, V) logits with random labels; the operation is the case's ``op``."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self._data: Buffers | None = None
        meta = self._empty(torch.device("meta"))
        rows, classes = case.shape
        itemsize = dtype_of(case).itemsize
        self.read_bytes = size(meta.x, meta.target, meta.dloss)
        if case.op == FORWARD:
            self.write_bytes = rows * (itemsize + torch.float32.itemsize)  # loss, lse
        else:
            self.write_bytes = rows * classes * itemsize + itemsize  # dx, the mean
        self.set_bytes = self.read_bytes + self.write_bytes

    def _empty(self, device: torch.device) -> Buffers:
        x = torch.empty(self.case.shape, dtype=dtype_of(self.case), device=device)
        target = torch.empty(self.case.shape[0], dtype=torch.int64, device=device)
        return Buffers(x, target, x.new_empty(()) if self.case.op == AUTOGRAD else None)

    def make(self) -> Buffers:
        data = self._empty(torch.device(self.device))
        data.x.normal_()
        data.target.random_(0, self.case.shape[1])
        if data.dloss is not None:
            data.dloss.fill_(float(self.case.opt("grad") or 1))
            data.x.requires_grad_()
        return data

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        data = self._data
        # where outputs are allocated next
        poison(*(data.x.new_empty(shape) for shape in (data.x.shape, data.target.shape, ())))
        loss, *rest = launch(data)
        with torch.no_grad():
            right = self._rows(data, torch.float64)
            if self.case.op == FORWARD:
                named = zip(right, (loss, *rest), strict=False)  # not all have an lse
                return max(self._judge(data, name, found, right) for name, found in named)
            worst = self._judge(data, "loss", loss, right)
            (dx,) = rest
            factor = 1.0 if loss.dim() else 1 / len(data.target)
            factor *= 1.0 if data.dloss is None else float(data.dloss)
            chunks = row_chunks(data.x)
            return max(worst, *(self._judge_dx(data, dx, factor, rows) for rows in chunks))

    def _rows(self, data: Buffers, dtype: torch.dtype) -> dict[str, Tensor]:
        """Torch's loss and lse of each row, in a dtype."""
        parts: dict[str, list[Tensor]] = {"loss": [], "lse": []}
        for rows in row_chunks(data.x):
            x = data.x[rows].to(dtype)
            parts["loss"].append(F.cross_entropy(x, data.target[rows], reduction="none"))
            parts["lse"].append(torch.logsumexp(x, -1))
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    def _judge(
        self, data: Buffers, name: str, found: Tensor, references: dict[str, Tensor]
    ) -> float:
        """Values of all rows, or their mean, beside torch's in the dtype found."""
        right = references[name]
        if found.dim():
            return judge(name, found, right, self._rows(data, found.dtype)[name], None)
        base = F.cross_entropy(data.x.to(found.dtype), data.target)
        return judge(name, found, right.mean(), base, right.abs().mean())

    def _judge_dx(self, data: Buffers, dx: Tensor, factor: float, rows: slice) -> float:
        x, target = data.x[rows], data.target[rows]
        right, base = (gradient(x.to(d), target, factor) for d in (torch.float64, x.dtype))
        return judge("dx", dx[rows], right, base, gradient_terms(x.double(), target) * factor)


def gradient_terms(x: Tensor, target: Tensor) -> Tensor:
    """Sizes of the terms p and -1 of the gradient; p errs as much as the argument of exp does."""
    argument = x.abs() + (x.amax(-1, keepdim=True) - x)
    label = target.unsqueeze(1)
    return ((2 + argument) * x.softmax(-1)).scatter_add(1, label, x.new_full(label.shape, 2.0))


def gradient(x: Tensor, target: Tensor, factor: float) -> Tensor:
    """Of the sum of all losses by x, times a factor: as torch computes it in the dtype of x."""
    logs = torch.log_softmax(x, -1)
    dlogs = torch.zeros_like(x).scatter_(1, target.unsqueeze(1), -factor)
    return torch.ops.aten._log_softmax_backward_data(dlogs, logs, -1, x.dtype)  # type: ignore[no-any-return]


def problem(case: Case, device: str = "cuda") -> CrossEntropy:
    """The problem of a case."""
    return CrossEntropy(case, device)


class Kept(Generic[T]):
    """What a launch derives from a set of buffers, once: when it is checked or warms up."""

    def __init__(self, make: Callable[[Buffers], T]):
        self._make = make
        self._made: dict[int, tuple[Buffers, T]] = {}

    def __call__(self, b: Buffers) -> T:
        if id(b) not in self._made:
            self._made[id(b)] = b, self._make(b)  # b is held: its id stays its own
        return self._made[id(b)][1]


def through_autograd(loss_of: Callable[[Buffers], tuple[Tensor, Tensor]]) -> Launch:
    """A launch from a function that gives the mean and the leaf it depends on."""

    def converted(b: Buffers) -> Tensor:
        assert b.dloss is not None
        return b.dloss.float()

    as_float32 = Kept(converted)

    def launch(b: Buffers) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            loss, leaf = loss_of(b)
        dloss = b.dloss
        if loss.dtype == torch.float32:  # some losses are, whatever the logits are
            dloss = as_float32(b)
        (dx,) = torch.autograd.grad(loss, leaf, dloss)
        return loss.detach(), dx

    return launch


# --- ours


def spec_of(case: Case) -> CrossEntropyFwdSpec:
    """The spec that the public function makes for fresh contiguous operands; of its forward."""
    dx = case.op != FORWARD
    return CrossEntropyFwdSpec(
        n=case.shape[-1],
        x=torch_op.dtype_name(dtype_of(case)),
        target="int64",
        dx=dx,
        reduction="mean" if dx else "none",
        align=alignment(case),
    )


def default_config(case: Case) -> FwdConfig | StreamConfig:
    """The configuration that the rule chooses here."""
    return rules.default_fwd(spec_of(case), arch.detect())


def candidates(case: Case) -> list[Any]:
    """Configurations to compare it with: more or fewer CTAs on an SM, and larger slices."""
    chosen = default_config(case)
    others: list[Any] = [replace(chosen, ctas_per_sm=n) for n in (2, 3, 4, 6)]
    if isinstance(chosen, FwdConfig):
        others += [replace(chosen, cluster=n, ctas_per_sm=2) for n in (1, 2, 4, 8, 16)]
        others = [c for c in others if fits(c, spec_of(case), arch.detect())]
    else:
        others += [replace(chosen, threads=n, ctas_per_sm=1024 // n) for n in (128, 256)]
    return list(dict.fromkeys([chosen, *others]))


def public(case: Case) -> Launch:
    """What a caller gets."""
    from quack_norm.ops.cross_entropy import api, launch

    if case.op == FORWARD:
        return lambda b: api.cross_entropy(b.x, b.target, reduction="none", return_lse=True)
    if case.op == FUSED:

        def fused(b: Buffers) -> tuple[Tensor, ...]:
            options = (None, IGNORED, "mean", 0.0, None, 0.0)
            loss, *_, dx = launch.forward(b.x, b.target, *options, want_dx=True, inplace=False)
            return loss, dx

        return fused
    return through_autograd(lambda b: (api.cross_entropy(b.x, b.target), b.x))


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """A compiled kernel as a launch on buffers: forward, or forward with gradient.

    Raises:
        NotImplementedError: of a call through autograd.
    """
    if case.op == AUTOGRAD:
        raise NotImplementedError("a configuration has no autograd: tune ce_fwd_dx")
    counters = torch.zeros(STATE_INTS, dtype=torch.int32, device="cuda")

    def results(b: Buffers) -> tuple[Tensor, ...]:
        of_rows = torch.empty(5, len(b.target), dtype=torch.float32, device=b.x.device)
        return of_rows, torch.empty_like(b.x) if case.op == FUSED else b.x.new_empty(len(b.x))

    made = Kept(results)

    def launch(b: Buffers) -> tuple[Tensor, ...]:
        of_rows, out = made(b)
        lse, known, sums = of_rows[0], of_rows[:3], of_rows[3:]
        numbers = (IGNORED, 0.0, 1.0, 0.0, groups)
        if case.op == FORWARD:
            run(b.x, b.target, None, out, *known, *(None,) * 5, *numbers)
            return out, lse
        total, loss = lse.new_empty(1), b.x.new_empty(1)
        run(b.x, b.target, None, None, *known, sums, total, loss, out, counters, *numbers)
        return loss.view(()), out

    return launch


# --- peers


def _eager(case: Case) -> Launch:
    if case.op == FORWARD:
        return lambda b: (F.cross_entropy(b.x, b.target, reduction="none"),)
    if case.op == AUTOGRAD:
        return through_autograd(lambda b: (F.cross_entropy(b.x, b.target), b.x))
    log_softmax, backward = torch.log_softmax, torch.ops.aten._log_softmax_backward_data
    nll, nll_backward = torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss_backward
    mean = 1  # the number of the reduction
    one = Kept(lambda b: b.x.new_ones(()))

    def fused(b: Buffers) -> tuple[Tensor, ...]:
        """What autograd calls, without autograd."""
        logs = log_softmax(b.x, -1)
        options = (b.target, None, mean, IGNORED)
        loss, total = nll(logs, *options)
        dlogs = nll_backward(one(b), logs, *options, total)
        return loss, backward(dlogs, logs, -1, b.x.dtype)

    return fused


def _compile(case: Case) -> Launch:
    if case.op == FORWARD:

        def forward(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            z = x.float()
            lse = torch.logsumexp(z, -1)
            return (lse - z.gather(1, target.unsqueeze(1)).squeeze(1)).to(x.dtype), lse

        rows = compiled_for_one_shape(forward)
        return lambda b: rows(b.x, b.target)
    if case.op == AUTOGRAD:

        def plain(x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(x, target)

        mean = compiled_for_one_shape(plain)
        return through_autograd(lambda b: (mean(b.x, b.target), b.x))

    def formula(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        z = x.float()
        lse = torch.logsumexp(z, -1, keepdim=True)
        label = target.unsqueeze(1)
        hot = torch.arange(z.shape[1], device=x.device) == label
        dx = ((z - lse).exp() - hot.float()) / len(target)
        return (lse - z.gather(1, label)).mean().to(x.dtype), dx.to(x.dtype)

    fused = compiled_for_one_shape(formula)
    return lambda b: fused(b.x, b.target)


def _logits(b: Buffers) -> Tensor:
    """A copy that may be overwritten: a backward in place leaves no logits behind."""
    return b.x.detach().clone().requires_grad_(b.x.requires_grad)


def _through_liger(case: Case) -> Launch:
    """The module, with the implementation that it picks."""
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    module, logits = LigerCrossEntropyLoss(), Kept(_logits)
    return through_autograd(lambda b: (module(logits(b), b.target), logits(b)))


def _liger_kernel(case: Case, run: Callable[[Tensor, Tensor, Tensor, bool, bool], None]) -> Launch:
    """A kernel by itself: the function around it waits for the GPU to count and check labels."""
    rows, logits = case.shape[0], Kept(_logits)
    if case.op == FORWARD:

        def forward(b: Buffers) -> tuple[Tensor, ...]:
            losses = b.x.new_zeros(rows)
            run(b.x, b.target, losses, False, False)
            return (losses,)

        return forward

    def fused(b: Buffers) -> tuple[Tensor, ...]:
        losses, dx = b.x.new_zeros(rows), logits(b)
        run(dx, b.target, losses, True, True)
        return losses.sum(), dx

    return fused


def _liger(case: Case) -> Launch:
    if case.op == AUTOGRAD:
        return _through_liger(case)
    import triton
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    rows, classes = case.shape
    block = min(MAX_FUSED_SIZE, triton.next_power_of_2(classes))
    extras = ("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS")
    off = dict.fromkeys((*extras, "HAS_WEIGHT", "HAS_SOFTCAPPING"), False)

    def run(x: Tensor, target: Tensor, losses: Tensor, mean: bool, gradients: bool) -> None:
        liger_cross_entropy_kernel[(rows,)](
            X_ptr=x,
            X_stride=x.stride(0),
            Y_ptr=target,
            Y_stride=1,
            weight_ptr=None,
            loss_ptr=losses,
            z_loss_ptr=None,
            loss_stride=1,
            token_accuracy_ptr=None,
            token_accuracy_stride=0,
            predicted_tokens_ptr=None,
            predicted_tokens_stride=0,
            n_cols=classes,
            n_non_ignore=rows,
            sum_non_ignore_weight=rows,
            weight_sum=0.0,
            ignore_index=IGNORED,
            lse_square_scale=0.0,
            label_smoothing=0.0,
            reduction="mean" if mean else "none",
            softcap=None,
            BLOCK_SIZE=block,
            HAS_GRADIENTS=gradients,
            num_warps=32,
            **off,
        )

    return _liger_kernel(case, run)


def _liger_cute(case: Case) -> Launch:
    from liger_kernel.ops.cutedsl.ops.cross_entropy import _launch_ce_fwd

    rows, classes = case.shape
    vector = 16 // dtype_of(case).itemsize
    if classes % vector:
        raise NotImplementedError(f"rows must be multiples of {vector} elements")

    def run(x: Tensor, target: Tensor, losses: Tensor, mean: bool, gradients: bool) -> None:
        _launch_ce_fwd(x, target, losses, 1 / rows if mean else 1.0, IGNORED, gradients)

    return _liger_kernel(case, run)


def _quack(case: Case) -> Launch:
    from quack.cross_entropy import cross_entropy, cross_entropy_fwd

    if case.op == FORWARD:
        return lambda b: cross_entropy_fwd(b.x, b.target, return_lse=True)  # type: ignore[no-any-return]
    if case.op == FUSED:
        return lambda b: cross_entropy_fwd(b.x, b.target, return_dx=True)  # type: ignore[no-any-return]
    return through_autograd(lambda b: (cross_entropy(b.x, b.target), b.x))


def peers(case: Case) -> list[Variant]:
    """Torch eager, torch.compile, Liger (its Triton and its CuTe kernel), quack-kernels."""
    liger, mine = "its kernel alone, without the checks of labels that wait for the GPU", ALLOCATES
    if case.op == FUSED:
        liger, mine = f"{liger}; {IN_PLACE}", f"{PER_ROW}; {ALLOCATES}"
    alone = case.op != AUTOGRAD
    found = [
        Variant("eager", _eager, "torch", note=ALLOCATES),
        Variant("compile", _compile, "torch", note=ALLOCATES),
        Variant("liger", _liger, "liger-kernel", note=liger if alone else IN_PLACE),
        Variant("quack-kernels", _quack, "quack-kernels", note=mine),
    ]
    if alone:  # the module of Liger picks one of the two
        found.append(Variant("liger-cute", _liger_cute, "liger-kernel", note=liger))
    return found
