"""Copies of a row's bytes by several kernels; the fastest is what the row is judged by.

Where next to nothing is written, the bytes are only read: a sum takes the place of the copy.
"""

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
    """``out = a``, or ``a ^ b``: contiguous int32 (vectors, 4).

    Where the bytes are only read, `a` holds the bits of float32 ones and minus ones, and `out` their
    sum, (1,) in float32.
    """

    a: Tensor
    b: Tensor | None
    out: Tensor


CopyLaunch = Callable[[CopyBuffers], tuple[Tensor, ...]]


def inputs_for(read_bytes: int, write_bytes: int) -> int:
    """One input where about as much is written as read, two where half as much is, or none.

    None means that the bytes are read and next to nothing is written.
    """
    if read_bytes < 1.5 * write_bytes:
        return 1
    return 2 if read_bytes < 8 * write_bytes else 0


def make(total_bytes: int, inputs: int, device: str = "cuda") -> CopyBuffers:
    """Buffers that move `total_bytes`, rounded to whole accesses."""
    vectors = max(1, round(total_bytes / (inputs + 1) / VECTOR))
    shape = (vectors, VECTOR // 4)
    if inputs == 0:
        ones = torch.randint(0, 2, shape, dtype=torch.float32, device=device) * 2 - 1
        return CopyBuffers(ones.view(torch.int32), None, ones.new_empty(1))
    a, b = (torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device) for _ in "ab")
    return CopyBuffers(a, b if inputs == 2 else None, torch.empty_like(a))


def check(launch: CopyLaunch, buffers: CopyBuffers) -> None:
    """Run once into a poisoned output and compare.

    Raises:
        Wrong: the output differs.
    """
    if buffers.out.is_floating_point():
        _check_sum(launch, buffers)
        return
    buffers.out.fill_(-1)
    launch(buffers)
    wanted = buffers.a if buffers.b is None else buffers.a ^ buffers.b
    if not torch.equal(buffers.out, wanted):
        raise Wrong("copy: output differs from its input")


def _check_sum(launch: CopyLaunch, buffers: CopyBuffers) -> None:
    """Sums of ones and minus ones are exact below 2**24, in any order."""
    (found,) = launch(buffers)
    wanted = buffers.a.view(torch.float32).sum(dtype=torch.float64)
    if float(found.sum()) != float(wanted):
        raise Wrong(f"sum: {float(found.sum())}, needed {float(wanted)}")


@functools.cache
def launches(inputs: int) -> dict[str, Callable[[], CopyLaunch]]:
    """By name, functions that compile and return a launch."""
    if inputs == 0:
        return {"sum-torch": lambda: _torch_sum, "sum-triton": _triton_sum}
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


def _torch_sum(b: CopyBuffers) -> tuple[Tensor, ...]:
    return (torch.sum(b.a.view(torch.float32).view(1, -1), 1, out=b.out),)


def _triton_sum() -> CopyLaunch:
    """Sums of parts of the words, one for each resident CTA: no second kernel adds them up."""
    from . import triton_copy

    sms = torch.cuda.get_device_properties().multi_processor_count
    ctas = sms * CTA_THREADS_PER_SM // triton_copy.SUM_THREADS
    parts = torch.empty(ctas, dtype=torch.float32, device="cuda")

    def launch(b: CopyBuffers) -> tuple[Tensor, ...]:
        triton_copy.sums(b.a.view(torch.float32), parts)
        return (parts,)

    return launch


def _triton() -> CopyLaunch:
    from . import triton_copy

    def launch(b: CopyBuffers) -> tuple[Tensor, ...]:
        triton_copy.copy(b.a, b.b, b.out)
        return (b.out,)

    return launch
