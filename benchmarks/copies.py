"""Copies of a row's bytes by several kernels; the fastest is what the row is judged by."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .variant import Wrong

VECTOR = 16
"""Bytes of one access."""
CTA_THREADS_PER_SM = 2048


@dataclass(frozen=True)
class CopyBuffers:
    """``out = a``, or ``a ^ b``: contiguous int32 (vectors, 4)."""

    a: Tensor
    b: Tensor | None
    out: Tensor


CopyLaunch = Callable[[CopyBuffers], tuple[Tensor, ...]]


def inputs_for(read_bytes: int, write_bytes: int) -> int:
    """One input where about as much is written as read, two where half as much is."""
    return 1 if read_bytes < 1.5 * write_bytes else 2


def make(total_bytes: int, inputs: int, device: str = "cuda") -> CopyBuffers:
    """Buffers that move `total_bytes`, rounded to whole accesses."""
    vectors = max(1, round(total_bytes / (inputs + 1) / VECTOR))
    shape = (vectors, VECTOR // 4)
    a, b = (torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device) for _ in "ab")
    return CopyBuffers(a, b if inputs == 2 else None, torch.empty_like(a))


def check(launch: CopyLaunch, buffers: CopyBuffers) -> None:
    """Run once into a poisoned output and compare.

    Raises:
        Wrong: the output differs.
    """
    buffers.out.fill_(-1)
    launch(buffers)
    wanted = buffers.a if buffers.b is None else buffers.a ^ buffers.b
    if not torch.equal(buffers.out, wanted):
        raise Wrong("copy: output differs from its input")


@functools.cache
def launches(inputs: int) -> dict[str, Callable[[], CopyLaunch]]:
    """By name, functions that compile and return a launch."""
    from .copy_kernel import CONFIGS

    makers: dict[str, Callable[[], CopyLaunch]] = {
        f"copy-{config.name}": functools.cache(functools.partial(_ours, config, inputs))
        for config in CONFIGS
    }
    makers["copy-torch"] = lambda: _torch
    makers["copy-triton"] = _triton
    return makers


def _ours(config, inputs: int) -> CopyLaunch:  # type: ignore[no-untyped-def]
    from .copy_kernel import compile_copy

    run = compile_copy(config, inputs)
    sms = torch.cuda.get_device_properties().multi_processor_count
    resident = sms * CTA_THREADS_PER_SM // config.threads

    def launch(b: CopyBuffers) -> tuple[Tensor, ...]:
        tiles = -(-b.out.shape[0] // config.tile)
        run(b.a, b.b, b.out, min(tiles, resident) if config.persistent else tiles)
        return (b.out,)

    return launch


def _torch(b: CopyBuffers) -> tuple[Tensor, ...]:
    if b.b is None:
        b.out.copy_(b.a)
    else:
        torch.bitwise_xor(b.a, b.b, out=b.out)
    return (b.out,)


def _triton() -> CopyLaunch:
    from . import triton_copy

    def launch(b: CopyBuffers) -> tuple[Tensor, ...]:
        triton_copy.copy(b.a, b.b, b.out)
        return (b.out,)

    return launch
