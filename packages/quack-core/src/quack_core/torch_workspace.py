"""Counters for kernels, owned so that launches that can overlap never share any.

A kernel that draws work from a counter, or finds out which CTA arrives last, needs integers that
are zero when it starts. It leaves them zero, so that the next launch on the same stream, which
cannot start earlier, finds them ready, and nothing has to clear them in between.

* Outside of graph capture they belong to one stream of one device; the default stream of each
  thread, which has one handle for all, counts as one per thread.
* Inside they belong to one stream of one capture: graphs whose replays overlap share nothing, nor
  do the branches of a graph, nor does a replay with an eager launch. When the graph and what was
  instantiated from it are gone, and their last replay is done, the next capture may have them.

Two cases are not told apart; whoever makes them must not let their work overlap:

* A captured graph that is instantiated twice: both replay with the counters of the one capture.
* A stream of another library that is destroyed while its work is pending: the next stream may get
  its handle, and with it its counters.

Their memory comes from the driver: torch's allocator would take it from the pool of the graph, and
clear it by a node of the graph.

Needs torch.
"""

import contextlib
import ctypes
import functools
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quack_core import driver
from quack_core.errors import DeviceError

CAPTURING = "a CUDA graph is being captured, which would stall for seconds"
"""Why no kernel is compiled then."""
LINE = 32
"""Integers of 128 bytes: what different owners count in lies in different lines of the cache."""
PER_THREAD = 2
"""Handle that stands for the calling thread's own default stream (``CU_STREAM_PER_THREAD``)."""
SEMAPHORE_BYTES = 64
"""More than a ``sem_t`` has on any platform."""

# Builds of torch without CUDA lack them.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class _Block(NamedTuple):
    """Zeroed integers of a device, and the address of the semaphore that says when a graph is gone.

    CUDA raises it by calling ``sem_post`` from a thread of its own, which needs neither Python's
    lock nor a living interpreter. Semaphores are never freed: CUDA may still hold them at exit.
    """

    ints: Tensor
    gone: int


# Device, stream, thread (0 unless the stream is its own), capture (0 outside), number of counters.
_Key = tuple[int, int, int, int, int]

_owned: dict[_Key, Tensor] = {}
_blocks: dict[_Key, _Block] = {}
_free: defaultdict[tuple[int, int], list[_Block]] = defaultdict(list)
_lock = threading.Lock()


def counters(device: int, count: int) -> Tensor:
    """Zeroed counters for one launch on the current stream of ``device``.

    Args:
        device: index of the CUDA device; it must be the current one.
        count: how many, as the kernel was compiled for.

    Returns:
        int32, ``(count,)``. The kernel must leave zeros behind.

    Raises:
        DeviceError: no memory, or the capture in progress is no longer valid.
    """
    stream = _current_stream(device)
    thread = threading.get_ident() if stream == PER_THREAD else 0
    if _is_capturing():
        return _captured(device, stream, thread, count)
    key = (device, stream, thread, 0, count)
    state = _owned.get(key)
    return state if state is not None else _new(key, None)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """``driver.relaxed_capture``; and where this stream is the one that records, a kernel that would
    have to be compiled raises JitForbiddenError instead, before anything of the capture is lost.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(driver.relaxed_capture())
        if _is_capturing is not None and _is_capturing():
            from quack_core.jit import policy

            stack.enter_context(policy.forbidden(CAPTURING))
        yield


def release() -> None:
    """Give back the memory of all counters, except of those that belong to a graph.

    Call it only when no launch is in flight, for instance after ``torch.cuda.synchronize()``.
    """
    with _lock:
        _reclaim(streams=True)
        blocks = [block for blocks in _free.values() for block in blocks]
        _free.clear()
        for block in blocks:
            with relaxed_capture(), driver.primary_context(block.ints.get_device()):
                driver.call(driver.load().cuMemFree, block.ints.data_ptr())


def _captured(device: int, stream: int, thread: int, count: int) -> Tensor:
    """The counters of a stream that records a graph."""
    cuda = driver.load()
    status, capture, graph, *_ = driver.call(cuda.cuStreamGetCaptureInfo, stream)
    if status != cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise DeviceError(
            "the stream records a graph, but an earlier error has ended that: capture it again"
        )
    key = (device, stream, thread, int(capture), count)
    state = _owned.get(key)
    return state if state is not None else _new(key, graph)


def _new(key: _Key, graph: Any) -> Tensor:
    device, *_, count = key
    ints = -(-count // LINE) * LINE
    with _lock:  # two threads on one stream must agree on its counters
        state = _owned.get(key)
        if state is None:
            _reclaim(streams=False)
            free = _free[device, ints]
            block = free.pop() if free else _Block(_zeros(device, ints), _semaphore())
            if graph is not None:
                _give(block, graph)
            _blocks[key] = block
            state = _owned[key] = block.ints[:count]  # last: others look without the lock
    return state


def _reclaim(streams: bool) -> None:
    """Take back what belonged to graphs that are gone and, if wanted, what streams have."""
    for key, block in list(_blocks.items()):
        of_stream = key[3] == 0
        if streams if of_stream else _libc().sem_trywait(block.gone) == 0:
            del _owned[key], _blocks[key]
            _free[key[0], block.ints.numel()].append(block)


def _give(block: _Block, graph: Any) -> None:
    """Make the graph the owner: it raises the semaphore at its end."""
    cuda = driver.load()
    post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
    no_sync = int(cuda.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    move = int(cuda.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
    owner = driver.call(cuda.cuUserObjectCreate, block.gone, cuda.CUhostFn(post), 1, no_sync)
    driver.call(cuda.cuGraphRetainUserObject, graph, owner, 1, move)


def _zeros(device: int, ints: int) -> Tensor:
    """Memory that is zero when this returns, whatever any stream does or records."""
    cuda = driver.load()
    with torch.inference_mode(False), relaxed_capture(), driver.primary_context(device):
        address = int(driver.call(cuda.cuMemAlloc, 4 * ints))
        stream = driver.call(cuda.cuStreamCreate, int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        try:
            driver.call(cuda.cuMemsetD32Async, address, 0, ints, stream)
            driver.call(cuda.cuStreamSynchronize, stream)
        finally:
            driver.call(cuda.cuStreamDestroy, stream)
        return _view(device, address, ints)


class _Memory:
    """What ``torch.as_tensor`` takes for int32 at an address of a device."""

    def __init__(self, address: int, ints: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (ints,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }


def _view(device: int, address: int, ints: int) -> Tensor:
    return torch.as_tensor(_Memory(address, ints), device=torch.device("cuda", device))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    for function in (libc.sem_init, libc.sem_post, libc.sem_trywait):
        function.argtypes = [ctypes.c_void_p]
    return libc


def _semaphore() -> int:
    """The address of a new semaphore; it is down."""
    address = _libc().calloc(1, SEMAPHORE_BYTES)
    if not address or _libc().sem_init(address, 0, 0):
        raise MemoryError("no memory for a semaphore")
    return int(address)
