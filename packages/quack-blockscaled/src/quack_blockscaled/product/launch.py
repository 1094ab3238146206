"""Products of blocks on CUDA tensors: allocate, find the kernel, launch."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quack_core import arch, occupancy, torch_op, torch_workspace
from quack_core.errors import UnsupportedError
from quack_core.jit import cache

from .spec import MatmulConfig, MatmulSpec, choose

MODULE = f"{__package__}.sm90"
ALIGN = 16


def forward(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """As `reference.matmul`, on CUDA tensors; values that TMA cannot read are copied first.

    Raises:
        UnsupportedError: there is no kernel for the GPU; names the way out.
    """
    device = a.get_device()
    target = arch.detect(device)
    if not target.wgmma:
        raise UnsupportedError(
            f"matmul on {target.name}", "there are kernels for sm90 only", "use the CPU"
        )
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    d = a.new_empty(m, n, dtype=dtype)
    if 0 in (m, n, k):
        return d.zero_()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    run, resident = _kernel(MatmulSpec(torch_op.dtype_name(dtype)), choose(m, n, sms), device)
    run(_readable(a), _readable(b), scale_a.contiguous(), scale_b.contiguous(), d, resident)
    return d


def _readable(x: Tensor) -> Tensor:
    """Rows of contiguous elements that begin at multiples of 16 bytes."""
    step = x.stride(0)
    rows = step % ALIGN == 0 and (step > 0 or x.shape[0] == 1)
    if x.stride(1) == 1 and rows and x.data_ptr() % ALIGN == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _kernel(spec: MatmulSpec, config: MatmulConfig, device: int) -> tuple[Callable[..., None], int]:
    """A kernel, and how many clusters of it run at the same time."""
    resident = occupancy.resident_clusters(
        device, config.cluster_m, config.num_threads, config.smem_bytes(spec)
    )
    with torch_workspace.relaxed_capture():
        return cache.load(MODULE, spec, config, arch.detect(device)), resident
