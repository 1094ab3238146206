"""Counters for kernels, owned so that launches that can overlap never share one.

A kernel that draws work from a counter, or finds out which CTA arrives last, needs integers that
are zero when it starts. It leaves them zero, so that the next launch on the same stream, which
cannot start earlier, finds them ready.

* Outside of graph capture they belong to one stream of one device.
* Inside, every launch gets its own from the graph's memory pool, which the graph clears at each
  replay: graphs whose replays overlap share nothing, nor does a replay with an eager launch, and
  the memory returns with the graph.

Needs torch.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quack_core import driver

# Builds of torch without CUDA lack them.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_owned: dict[tuple[int, int, int], Tensor] = {}
_lock = threading.Lock()


def counters(device: int, count: int) -> Tensor:
    """Zeroed counters for one launch on the current stream of ``device``.

    Args:
        device: index of the CUDA device; it must be the current one.
        count: how many, as the kernel was compiled for.

    Returns:
        int32, ``(count,)``. The kernel must leave zeros behind.
    """
    if _is_capturing():
        return _zeros(device, count)
    key = (device, _current_stream(device), count)
    state = _owned.get(key)
    return state if state is not None else _new(key)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load modules while its stream records a graph; does nothing otherwise.

    Loading allocates memory, which the strict modes of capture forbid. Nothing of it is recorded.
    """
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    cuda = driver.load()
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = driver.call(cuda.cuThreadExchangeStreamCaptureMode, relaxed)
    try:
        yield
    finally:
        driver.call(cuda.cuThreadExchangeStreamCaptureMode, before)


def release() -> None:
    """Forget the counters of all streams; their memory returns to torch's allocator.

    Call it only when no launch is in flight, for instance after ``torch.cuda.synchronize()``.
    """
    with _lock:
        _owned.clear()


def _new(key: tuple[int, int, int]) -> Tensor:
    device, _, count = key
    with _lock:  # two threads on one stream must agree on its counters
        state = _owned.get(key)
        if state is None:
            state = _owned[key] = _zeros(device, count)
    return state


def _zeros(device: int, count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", device))
