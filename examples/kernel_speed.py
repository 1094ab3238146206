"""Time RMSNorm, forward and backward, beside torch and a copy of the same bytes; needs a GPU."""

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quack_norm import rmsnorm

ROWS, N = 16384, 4096
SETS = 4  # of operands that take turns: more bytes than a cache holds
REPLAYS = 20


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return rmsnorm(x, weight, eps=1e-6)


def theirs(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def forward(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, _: Tensor) -> object:
    with torch.no_grad():
        return norm(x, weight)


def both(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, dout: Tensor) -> object:
    out = norm(x, weight)
    return out, torch.autograd.grad(out, (x, weight), dout)


def call_us(call: Callable[..., object], sets: Sequence[tuple[Tensor, ...]]) -> float:
    """Microseconds of a call on the GPU, in a CUDA graph that goes through all sets."""
    for operands in sets:
        call(*operands)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _held = [call(*operands) for operands in sets]  # so no result takes another's memory
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    return 1e3 * statistics.median(times) / len(sets)


def measure() -> None:
    """Print times beside those of torch and of a copy."""
    weight = torch.rand(N, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    rows = [torch.randn(2, ROWS, N, dtype=torch.bfloat16, device="cuda") for _ in range(SETS)]
    sets = [(x.requires_grad_(), weight, dout) for x, dout in rows]
    print(f"\nMicroseconds for {ROWS} x {N} in bfloat16, nothing cached\n")
    print(f"  {'':38}" + "".join(f"{name:>12}" for name in ("quack", "torch", "copy", "of copy")))
    for call, tensors in ((forward, 2), (both, 5)):
        # A copy of half the bytes that the call has to move reads them once and writes them once.
        half = torch.empty(SETS, tensors * ROWS * N, dtype=torch.uint8, device="cuda")
        us = [call_us(functools.partial(call, norm), sets) for norm in (ours, theirs)]
        us.append(call_us(torch.clone, [(each,) for each in half]))
        what = "forward" if call is forward else "forward and backward"
        print(f"  {what:38}" + "".join(f"{t:>12.1f}" for t in us) + f"{us[2] / us[0]:>12.0%}")


if __name__ == "__main__":
    measure()
