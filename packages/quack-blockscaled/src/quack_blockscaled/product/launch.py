"""Products of blocks on CUDA tensors: allocate, find the kernel, launch."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quack_core import arch, driver, torch_op, torch_workspace
from quack_core.errors import UnsupportedError
from quack_core.jit import cache

from .spec import MatmulConfig, MatmulSpec, choose

MODULE = f"{__package__}.sm90"
ALIGN = 16
"""Bytes that divide addresses and strides of what TMA reads and writes."""


def forward(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """As `reference.matmul`, on CUDA tensors; values that TMA cannot read are copied first.

    Args:
        out: to be written, or with ``accumulate`` added to; rows as of `is_readable`.

    Raises:
        UnsupportedError: there is no kernel for the GPU; names the way out.
    """
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    _check_target("matmul", a)
    d = empty(a, n, dtype) if out is None else out
    if 0 in (m, n, k):
        return d if accumulate else d.zero_()
    spec = MatmulSpec(torch_op.dtype_name(dtype), scale_b.shape[0] == n, accumulate)
    config = choose(m, n, k, driver.multiprocessors(a.get_device()))
    _run(spec, config, a, scale_a, b[None], scale_b[None], d)
    return d


def grouped(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `reference.grouped`, on CUDA tensors: one launch, for which nothing is read from the device.

    Raises:
        UnsupportedError: there is no kernel for the GPU; names the way out.
    """
    (m, k), (groups, n, _) = a.shape, b.shape
    _check_target("matmul_grouped", a)
    d = empty(a, n, dtype)
    if 0 in (m, n, k, groups):
        return d.zero_()
    spec = MatmulSpec(torch_op.dtype_name(dtype), grouped=True)
    config = choose(m, n, k, driver.multiprocessors(a.get_device()), groups)
    _run(spec, config, a, scale_a, b, scale_b, d, offsets.contiguous())
    return d


def empty(like: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """(M, N) for M rows as of ``like``; on a GPU they begin at multiples of 16 bytes."""
    step = 1 if like.device.type == "cpu" else ALIGN // dtype.itemsize
    row = -(-n // step) * step
    return like.new_empty_strided((like.shape[0], n), (row, 1), dtype=dtype)


def is_readable(x: Tensor) -> bool:
    """Whether rows are of contiguous elements and begin at multiples of 16 bytes, and lie apart."""
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    apart = all(size == 1 or step > 0 for size, step in steps)
    aligned = all(step * x.element_size() % ALIGN == 0 for step in x.stride()[:-1])
    along = x.stride(-1) == 1 or x.shape[-1] == 1
    return apart and aligned and along and x.data_ptr() % ALIGN == 0


def _readable(x: Tensor) -> Tensor:
    """Values that TMA can read: themselves, or a copy; K is a multiple of 16 bytes."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def by_columns(scales: Tensor) -> Tensor:
    """Scales (..., rows, steps) as (..., steps, rows) that TMA can read: themselves, or a copy."""
    turned = scales.mT
    if is_readable(turned):
        return turned
    per_access = ALIGN // scales.itemsize
    rows = -(-turned.shape[-1] // per_access) * per_access
    return turned.new_empty(*turned.shape[:-1], rows)[..., : turned.shape[-1]].copy_(turned)


def _check_target(op: str, a: Tensor) -> None:
    target = arch.detect(a.get_device())
    if not target.wgmma:
        raise UnsupportedError(
            f"{op} on {target.name}", "there are kernels for sm90 only", "use the CPU"
        )


def _run(
    spec: MatmulSpec,
    config: MatmulConfig,
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    d: Tensor,
    offsets: Tensor | None = None,
) -> None:
    """Launch a kernel; operands as of ``sm90.MatmulSm90``."""
    run = _kernel(spec, config, a.get_device())
    scales = by_columns(scale_a), by_columns(scale_b) if spec.rows_b else scale_b.contiguous()
    run(_readable(a), _readable(b), *scales, d, offsets, driver.multiprocessors(a.get_device()))


@functools.cache
def _kernel(spec: MatmulSpec, config: MatmulConfig, device: int) -> Callable[..., None]:
    """Finding a kernel reads source files."""
    with torch_workspace.relaxed_capture():
        found: Callable[..., None] = cache.load(MODULE, spec, config, arch.detect(device))
    return torch_op.on_device(found, device)
