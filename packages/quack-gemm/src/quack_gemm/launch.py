"""GEMM on CUDA tensors: allocate, find the kernel, launch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quack_core import arch, occupancy, torch_op, torch_workspace
from quack_core.gemm.epilogue import Kind, Op, Vector
from quack_core.jit import cache
from quack_core.jit.keys import Kernel

from . import check, heuristic, reference
from .config import GemmConfig, SplitK, SumConfig
from .heuristic import Problem
from .reference import Step
from .spec import GemmSpec, Major, SumSpec

MODULE, SUM_MODULE = f"{__package__}.sm90.kernel", f"{__package__}.part_sums"
F32 = torch.float32

Launch = Callable[[Tensor, Tensor, tuple[Tensor, ...], Any], tuple[Tensor, ...] | None]

# Keys hold shapes: a serving process has a few hundred.
_launchers: dict[tuple[Any, ...], Launch] = {}
MOST_LAUNCHERS = 4096


def forward(
    a: Tensor,
    b: Tensor,
    steps: Sequence[Step],
    out_dtypes: Sequence[torch.dtype],
    concat: bool = False,
    out: Tensor | None = None,
    config: GemmConfig | int | None = None,
) -> list[Tensor]:
    """As `reference.forward`, on CUDA tensors.

    Args:
        out: where D goes; None: it is allocated.
        config: how to compute it; a number is only that of parts of K.
    """
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    batch = batch_of(a, b)
    if is_single(a, b, steps):
        single = None if out is None else out[0]
        found = forward(*unbatched(a, b, steps), out_dtypes, concat, single, config)
        return [x.unsqueeze(0) for x in found]
    ops = tuple(op for op, _ in steps)
    spec = shape_of(ops)
    outputs = [
        out if out is not None and i == 0 else empty(a, (*batch, m, spec.cols(i, n)), dtype)
        for i, dtype in enumerate(out_dtypes)
    ]
    if 0 in (m, n, *batch):
        nothing = a.new_empty(*batch, m, n, dtype=torch.float32)
        return outputs + [
            reference.reduce(one.name, nothing, reference.dim(one)) for one in spec.reductions
        ]
    if k == 0:  # nothing to multiply
        found = reference.forward(a, b, steps, out_dtypes, concat)
        for target, source in zip(outputs, found, strict=False):
            target.copy_(source)
        return outputs + found[len(outputs) :]
    launch = launcher(a, b, outputs, steps, concat, config)
    operands = tuple(operand for _, given in steps for operand in given)
    try:
        partials = launch(a, b, tuple(outputs), operands or None)
    except (TypeError, ValueError):  # what the kernel checks and the key leaves out, by name
        check.layouts(a, b, outputs[0], steps)
        raise
    if partials is None:
        return outputs
    summed = ("sum_squares", "select")
    ways = ["sum" if one.name in summed else one.name for one in spec.reductions]
    return outputs + [reference.reduce(w, x) for w, x in zip(ways, partials, strict=True)]


def launcher(
    a: Tensor,
    b: Tensor,
    outputs: Sequence[Tensor],
    steps: Sequence[Step],
    concat: bool,
    config: GemmConfig | int | None,
) -> Launch:
    """What launches the kernel of a product like this one, with no result empty and K not zero.

    It takes ``a``, ``b``, a tuple of outputs, and one of the epilogue's operands or None; it gives
    what reductions have found in each tile, or None where there are none.

    Raises:
        As `plan`.
    """
    ops, index = tuple([op for op, _ in steps]), a.get_device()
    key = (
        a.shape, b.shape, a.dtype, b.dtype, *[x.dtype for x in outputs], a.stride(), b.stride(),
        outputs[0].stride(), ops, concat, config, index,
    )  # fmt: skip
    found = _launchers.get(key)
    if found is None:
        if len(_launchers) >= MOST_LAUNCHERS:
            _launchers.clear()
        found = _launchers[key] = _prepare(a, b, outputs, steps, concat, config, index)
    return found


@functools.cache
def shape_of(ops: tuple[Op, ...]) -> GemmSpec:
    """A spec with these ops: how many columns each output has."""
    return GemmSpec("bfloat16", "bfloat16", "bfloat16", a_batched=True, epilogue=ops)


def batch_of(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The batch dimension of D, or none."""
    sizes = [x.shape[0] for x in (a, b) if x.dim() == 3]
    if not sizes:
        return ()
    return (0,) if 0 in sizes else (max(sizes),)


def is_single(a: Tensor, b: Tensor, steps: Sequence[Step]) -> bool:
    """Whether this is a batch of one product, whose ops can be made ones without a batch."""
    return batch_of(a, b) == (1,) and all(
        hasattr(op, "batched") or not any(what.batched for what in op.operands) for op, _ in steps
    )


def unbatched(a: Tensor, b: Tensor, steps: Sequence[Step]) -> tuple[Tensor, Tensor, list[Step]]:
    """A batch of one product, as the product."""
    found = []
    for op, operands in steps:
        batched = [what.batched for what in op.operands]
        given = tuple(x[0] if b else x for x, b in zip(operands, batched, strict=True))
        found.append((replace(op, batched=False) if any(batched) else op, given))  # type: ignore[type-var]
    a, b = (x[0] if x.dim() == 3 else x for x in (a, b))
    return a, b, found


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """(M, N) or (L, M, N); its rows begin at multiples of 16 bytes, but for the CPU."""
    m, n = shape[-2:]
    step = 1 if like.device.type == "cpu" else check.ALIGN // dtype.itemsize
    row = -(-n // step) * step
    return like.new_empty_strided(shape, (m * row, row, 1)[-len(shape) :], dtype=dtype)


def readable(x: Tensor, order: Major | None = None) -> Tensor:
    """A matrix as kernels can read it: itself, or a copy whose rows begin at multiples of 16 bytes.

    Args:
        order: the memory order that it has to have; None: any.
    """
    if x.device.type == "cpu":
        return x
    found = check.order(x)
    if found is not None and (order is None or found == order):
        return x
    if order is None:
        order = "column" if x.stride(-2) == 1 else "row"
    if order == "column":
        return readable(x.mT, "row").mT
    return empty(x, tuple(x.shape), x.dtype).copy_(x)


def plan(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    steps: Sequence[Step],
    concat: bool,
    config: GemmConfig | int | None,
    target: arch.Arch,
    sms: int,
) -> tuple[Problem, GemmConfig]:
    """What there is to do, and how; of tensors without memory too.

    Args:
        d: the first output.
        sms: how many SMs the GPU has.

    Raises:
        LayoutError: an operand cannot be read.
        ShapeError, UnsupportedError: as `heuristic.default`.
        ValueError: the configuration does not fit.
    """
    heuristic.check_arch(target)
    check.layouts(a, b, d, steps)
    spec = GemmSpec(
        a=torch_op.name_of(a.dtype),
        b=torch_op.name_of(b.dtype),
        d=torch_op.name_of(d.dtype),
        a_major=check.major("a", a),
        b_major=check.major("b", b),
        d_major=check.major("out", d),
        a_batched=a.dim() == 3 and d.shape[0] == a.shape[0],
        b_batched=b.dim() == 3 and d.shape[0] == b.shape[0],
        epilogue=tuple(op for op, _ in steps),
        concat=concat,
    )
    batches = d.shape[0] if d.dim() == 3 else 1
    problem = Problem(a.shape[-2], b.shape[-1], a.shape[-1], batches, spec, sms)
    if not isinstance(config, GemmConfig):
        config = heuristic.default(problem, target, split_k=config)
    config.check(spec)
    return problem, config


def _prepare(
    a: Tensor,
    b: Tensor,
    outputs: Sequence[Tensor],
    steps: Sequence[Step],
    concat: bool,
    config: GemmConfig | int | None,
    device: int,
) -> Launch:
    """As `launcher`, for the first time."""
    target = arch.detect(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    problem, chosen = plan(a, b, outputs[0], steps, concat, config, target, sms)
    spec, batches = problem.spec, problem.batches
    resident = occupancy.resident_clusters(
        device, chosen.cluster, chosen.num_threads, chosen.smem_bytes(chosen.product(spec))
    )
    with torch_workspace.relaxed_capture():
        kernel, *behind = [_kernel(one) for one in kernels(spec, chosen, target)]
    squeeze_a, squeeze_b = a.dim() == 3 and not spec.a_batched, b.dim() == 3 and not spec.b_batched
    batch = (batches,) if spec.batched else ()
    empties = [_empty_partials(problem, chosen, one, batch) for one in spec.reductions]
    allocate = _scratch(problem, chosen)

    def launch(
        a: Tensor, b: Tensor, outputs: tuple[Tensor, ...], operands: Any
    ) -> tuple[Tensor, ...] | None:
        if squeeze_a:
            a = a[0]
        if squeeze_b:
            b = b[0]
        partials = None
        if spec.reductions:
            partials = tuple([empty(a.device) for empty in empties])
        if chosen.split_mode == SplitK.SEPARATE:
            parts = allocate(a.device)
            kernel(a, b, (parts,), None, None, resident)
            behind[0](parts, outputs, operands)
            return None
        if chosen.split_mode == SplitK.PARALLEL:
            check.layouts(a, b, outputs[0], ())  # what would be refused after D has been changed
            operands = _begin(outputs[0], spec, operands)
        kernel(a, b, outputs, operands, partials, resident)
        return partials

    return torch_op.on_device(launch, device)


def _empty_partials(
    problem: Problem, config: GemmConfig, vector: Vector, batch: tuple[int, ...]
) -> Callable[[torch.device], Tensor]:
    """What allocates (rows or columns of D, numbers for each), neighbours as the kernel writes them."""
    length = problem.m if vector.kind == Kind.COLUMN else problem.n
    count = config.partials(vector, problem.m, problem.n)
    if config.down(vector):
        return lambda device: torch.empty(*batch, count, length, device=device, dtype=F32).mT
    return lambda device: torch.empty(*batch, length, count, device=device, dtype=F32)


def kernels(spec: GemmSpec, config: GemmConfig, target: arch.Arch) -> tuple[Kernel, ...]:
    """Those that a launch takes, in order."""
    product = Kernel(MODULE, config.product(spec), config, target)
    if config.split_mode != SplitK.SEPARATE:
        return (product,)
    return product, Kernel(SUM_MODULE, SumSpec(spec), SumConfig.of(config.split_k), target)


@functools.cache
def _kernel(kernel: Kernel) -> Any:
    """Many shapes share a kernel, and finding it reads source files."""
    return cache.load(kernel.module, kernel.spec, kernel.config, kernel.arch)


def _scratch(problem: Problem, config: GemmConfig) -> Callable[[torch.device], Tensor]:
    """What allocates the parts of a product in D's memory order, each row a multiple of 16 bytes.

    Each launch has its own; a graph that is captured keeps it in its pool.
    """
    turned = problem.spec.d_major == "column"
    rows, cols = (problem.n, problem.m) if turned else (problem.m, problem.n)
    step = check.ALIGN // torch.float32.itemsize
    shape = problem.batches * config.ranges, rows, -(-cols // step) * step

    def allocate(device: torch.device) -> Tensor:
        found = torch.empty(shape, dtype=torch.float32, device=device)
        return found.mT if turned else found

    return allocate


def _begin(d: Tensor, spec: GemmSpec, operands: Any) -> Any:
    """What D holds before parts are added to it: ``beta c``, or zeros.

    Returns:
        The operands of the ops before.
    """
    if spec.into_c is spec:
        d.zero_()
        return operands
    count = len(spec.epilogue[-1].operands)
    c, *beta = operands[-count:]
    if not torch_op.identical(d, c):
        d.copy_(c)
    if beta:
        d.mul_(beta[0])
    return operands[:-count] or None


def scale_kind(name: str, scale: Any, m: int, n: int) -> tuple[Kind, Any]:
    """What a factor is, by its shape: one number, or one for each row of A or column of B."""
    if not isinstance(scale, Tensor):
        return Kind.SCALAR, float(scale)
    if scale.numel() == 1:
        return Kind.DEVICE_SCALAR, scale.reshape(1)
    if name == "scale_a" and tuple(scale.shape) in ((m, 1), (m,)):
        return Kind.COLUMN, scale.reshape(m)
    if name == "scale_b" and tuple(scale.shape) in ((1, n), (n,)):
        return Kind.ROW, scale.reshape(n)
    also = {"scale_a": f", or ({m}, 1)", "scale_b": f", or (1, {n})"}.get(name, "")
    raise check.ShapeError(
        f"gemm: {name} has the shape {tuple(scale.shape)}: it must have one element{also}"
    )
