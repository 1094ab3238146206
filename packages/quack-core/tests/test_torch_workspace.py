"""Who owns counters: streams, captures and graphs, on a driver made of host memory."""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from quack_core import arch, driver, torch_workspace
from quack_core.errors import DeviceError, JitForbiddenError
from quack_core.jit import policy
from quack_core.jit.keys import Kernel, Key

GLOBAL = 0


class Capture(IntEnum):
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1
    INVALIDATED = 2


class FakeDriver:
    """Streams that record graphs, and graphs that own what raises a semaphore at their end.

    It refuses what a strict mode of capture forbids.
    """

    CUstreamCaptureStatus = Capture
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUuserObject_flags = SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1)
    CUuserObjectRetain_flags = SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=1)
    CUhostFn = int
    OWN_STREAM = 99

    def __init__(self) -> None:
        self.current, self.captures = 7, {}  # stream: capture
        self.status = Capture.CU_STREAM_CAPTURE_STATUS_ACTIVE
        self.mode, self.contexts, self.retained = GLOBAL, [], 0
        self.memory: dict[int, Any] = {}
        self.cleared: list[int] = []
        self.owned: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def end(self, graph: str) -> None:
        """Destroy a graph: call what it owns, as CUDA does, from another thread."""
        for function, argument in self.owned.pop(graph, []):
            post = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
            thread = threading.Thread(target=post, args=(argument,))
            thread.start()
            thread.join()

    def _unsafe(self) -> Any:
        if self.captures and self.mode != driver.RELAXED:
            return SimpleNamespace(value=900, name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        if not self.contexts:
            return SimpleNamespace(value=201, name="CUDA_ERROR_INVALID_CONTEXT")
        return SimpleNamespace(value=0)

    OK = SimpleNamespace(value=0)

    def exchange(self, mode: int) -> int:
        before, self.mode = self.mode, mode
        return before

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.retained += 1
        return self.OK, f"context {device}"

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.retained -= 1
        return (self.OK,)

    def cuCtxPushCurrent(self, context: str) -> Any:
        self.contexts.append(context)
        return (self.OK,)

    def cuCtxPopCurrent(self) -> Any:
        return self.OK, self.contexts.pop()

    def cuMemAlloc(self, size: int) -> Any:
        buffer = (ctypes.c_int32 * (size // 4))(*[-1] * (size // 4))
        self.memory[ctypes.addressof(buffer)] = buffer
        return self._unsafe(), ctypes.addressof(buffer)

    def cuMemFree(self, address: int) -> Any:
        del self.memory[address]
        return (self._unsafe(),)

    def cuStreamCreate(self, flags: int) -> Any:
        return self._unsafe(), self.OWN_STREAM

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> Any:
        assert stream == self.OWN_STREAM
        ctypes.memset(address, value, 4 * count)
        return (self._unsafe(),)

    def cuStreamSynchronize(self, stream: int) -> Any:
        self.cleared.append(stream)
        return (self._unsafe(),)

    def cuStreamDestroy(self, stream: int) -> Any:
        return (self.OK,)

    def cuStreamGetCaptureInfo(self, stream: int) -> Any:
        capture = self.captures[stream]
        return self.OK, self.status, capture, f"graph {capture}", [], [], 0

    def cuUserObjectCreate(self, argument: int, function: int, count: int, flags: int) -> Any:
        assert (count, flags) == (1, 1)
        return self.OK, (function, argument)

    def cuGraphRetainUserObject(self, graph: str, owner: Any, count: int, flags: int) -> Any:
        assert (count, flags) == (1, 1)
        self.owned[graph].append(owner)
        return (self.OK,)


def view(device: int, address: int, ints: int) -> Tensor:
    return torch.frombuffer((ctypes.c_int32 * ints).from_address(address), dtype=torch.int32)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    monkeypatch.setattr(driver, "load", lambda: made)
    monkeypatch.setattr(driver, "exchange_capture_mode", made.exchange)
    monkeypatch.setattr(torch_workspace, "_current_stream", lambda device: made.current)
    monkeypatch.setattr(torch_workspace, "_is_capturing", lambda: made.current in made.captures)
    monkeypatch.setattr(torch_workspace, "_view", view)
    for name in ("_owned", "_blocks"):
        monkeypatch.setattr(torch_workspace, name, {})
    monkeypatch.setattr(torch_workspace, "_free", defaultdict(list))
    yield made
    assert (made.mode, made.contexts, made.retained) == (GLOBAL, [], 0)


def place(state: Tensor) -> int:
    return state.data_ptr()


def test_a_stream_keeps_its_counters(fake: FakeDriver) -> None:
    first = torch_workspace.counters(0, 2)
    assert first.dtype == torch.int32 and first.tolist() == [0, 0]
    assert torch_workspace.counters(0, 2) is first
    assert len(fake.memory) == 1


def test_owners_share_nothing(fake: FakeDriver) -> None:
    """Devices, streams, captures, streams of a capture, and numbers of counters."""
    places = []
    for device, stream, capture in [
        (0, 7, 0),
        (1, 7, 0),
        (0, 8, 0),
        (0, 7, 5),
        (0, 8, 5),
        (0, 7, 6),
    ]:
        fake.current, fake.captures = stream, {stream: capture} if capture else {}
        for count in (2, 8, 33):
            state = torch_workspace.counters(device, count)
            assert state.tolist() == [0] * count
            places.append(place(state))
            assert place(torch_workspace.counters(device, count)) == places[-1]
    assert len(set(places)) == len(places) == len(fake.memory) == 18
    assert {len(memory) for memory in fake.memory.values()} == {32, 64}  # whole lines


def test_a_cold_capture_allocates_and_clears_beside_it(fake: FakeDriver) -> None:
    fake.captures = {7: 5}
    assert torch_workspace.counters(0, 2).tolist() == [0, 0]
    assert fake.cleared == [FakeDriver.OWN_STREAM]


def test_an_eager_stream_allocates_while_another_records(fake: FakeDriver) -> None:
    fake.captures = {8: 5}
    assert torch_workspace.counters(0, 2).tolist() == [0, 0]
    assert not fake.owned


def test_memory_returns_with_the_graph(fake: FakeDriver) -> None:
    fake.captures = {7: 5}
    state = torch_workspace.counters(0, 2)
    fake.captures = {7: 6}
    other = torch_workspace.counters(0, 2)
    fake.end("graph 5")
    fake.captures = {7: 7}
    third = torch_workspace.counters(0, 2)
    assert place(third) == place(state) != place(other)
    fake.captures = {7: 8}
    assert place(torch_workspace.counters(0, 2)) not in (place(third), place(other))
    fake.end("graph 7")  # the same block, for the second time
    fake.captures = {7: 9}
    assert place(torch_workspace.counters(0, 2)) == place(third)
    assert len(fake.memory) == 3
    assert {key[3] for key in torch_workspace._owned} == {6, 8, 9}


def test_a_smaller_block_is_no_substitute(fake: FakeDriver) -> None:
    fake.captures = {7: 5}
    torch_workspace.counters(0, 32)
    fake.end("graph 5")
    fake.captures = {7: 6}
    torch_workspace.counters(0, 33)
    torch_workspace.counters(1, 32)
    assert len(fake.memory) == 3


def test_an_invalid_capture_raises(fake: FakeDriver) -> None:
    fake.captures, fake.status = {7: 5}, Capture.INVALIDATED
    with pytest.raises(DeviceError, match="an earlier error has ended that: capture it again"):
        torch_workspace.counters(0, 2)
    assert not fake.memory


def test_failed_calls_raise_and_restore(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(value=2, name="CUDA_ERROR_OUT_OF_MEMORY")
    monkeypatch.setattr(fake, "cuMemAlloc", lambda size: (full, 0))
    monkeypatch.setattr(driver, "call", named_call)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        torch_workspace.counters(0, 2)
    assert not torch_workspace._owned


def named_call(function: Any, *args: Any) -> Any:
    """As the real one, for functions that need no name."""
    status, *values = function(*args)
    if status.value:
        raise DeviceError(status.name)
    return values[0] if len(values) == 1 else tuple(values)


def test_release_gives_back_what_no_graph_holds(fake: FakeDriver) -> None:
    eager = place(torch_workspace.counters(0, 2))
    fake.captures = {7: 5}
    dead = place(torch_workspace.counters(0, 2))
    fake.captures = {7: 6}
    alive = place(torch_workspace.counters(0, 2))
    fake.captures = {8: 7}  # some thread records: freeing is no less unsafe than allocating
    fake.end("graph 5")
    torch_workspace.release()
    assert eager not in fake.memory and dead not in fake.memory
    assert list(fake.memory) == [alive]
    fake.captures = {7: 6}
    assert place(torch_workspace.counters(0, 2)) == alive
    fake.captures = {}
    assert torch_workspace.counters(0, 2).tolist() == [0, 0]
    torch_workspace.release()
    torch_workspace.release()
    assert list(fake.memory) == [alive]


def ask_from_threads() -> set[int]:
    """Where the counters of eight threads that live at once lie."""
    barrier, found = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(place(torch_workspace.counters(0, 2)))
        barrier.wait()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    return set(found)


def test_threads_on_one_stream_agree(fake: FakeDriver) -> None:
    assert len(ask_from_threads()) == len(fake.memory) == 1


@pytest.mark.parametrize("captures", [{}, {2: 5}], ids=["eager", "captured"])
def test_threads_on_their_own_default_streams_share_nothing(
    fake: FakeDriver, captures: dict[int, int]
) -> None:
    """One handle stands for all of these streams."""
    fake.current, fake.captures = 2, captures
    assert len(ask_from_threads()) == len(fake.memory) == 8


def test_counters_do_not_remember_inference_mode(fake: FakeDriver) -> None:
    with torch.inference_mode():
        state = torch_workspace.counters(0, 2)
    assert not state.is_inference()


@pytest.mark.parametrize("captures", [{}, {8: 5}, {7: 5}], ids=["eager", "another", "captured"])
def test_compiling_is_refused_while_this_stream_records(
    fake: FakeDriver, captures: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the capture is lost: nothing of the driver was asked for, and its mode is back."""
    monkeypatch.delenv("QUACK_JIT", raising=False)
    fake.captures = captures
    kernel = Kernel("module", SimpleNamespace(name="rmsnorm"), None, arch.get("sm90"))
    with torch_workspace.relaxed_capture():
        assert fake.mode == driver.RELAXED  # loading from disk is allowed
        if captures == {7: 5}:
            with pytest.raises(JitForbiddenError, match="CUDA graph is being captured"):
                policy.check(kernel, Key("0" * 64, {}))
        else:
            policy.check(kernel, Key("0" * 64, {}))
    assert fake.mode == GLOBAL
    policy.check(kernel, Key("0" * 64, {}))
