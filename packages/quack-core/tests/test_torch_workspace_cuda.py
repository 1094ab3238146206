"""Who owns counters on a GPU: streams, captures and graphs as CUDA sees them."""

import gc
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from quack_core import driver, torch_workspace

pytestmark = pytest.mark.usefixtures("cuda", "nothing_owned")

SECOND = 2_000_000_000
"""Clock cycles, about."""


def collect() -> int:
    """Take back what belonged to graphs; returns how many blocks still have owners."""
    with torch_workspace._lock:
        torch_workspace._reclaim(streams=False)
        return len(torch_workspace._blocks)


def eventually(owned: int) -> bool:
    """Whether the number of owned blocks becomes that: CUDA tells it a little later."""
    deadline = time.monotonic() + 10
    while collect() != owned and time.monotonic() < deadline:
        time.sleep(0.01)
    return collect() == owned


def record(*work: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in work:
            step()
    return graph


@pytest.fixture
def nothing_owned() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch_workspace.release()
    assert eventually(0)


def test_zeroed_memory_that_torch_does_not_know() -> None:
    device = torch.cuda.current_device()
    before = torch.cuda.memory_allocated()
    state = torch_workspace.counters(device, 40)
    assert (state.device.index, state.dtype, state.shape) == (device, torch.int32, (40,))
    assert not state.any()
    assert torch.cuda.memory_allocated() <= before + 1024  # the result of any()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch_workspace.counters(device, 40).data_ptr() != state.data_ptr()


def test_a_cold_capture_records_nothing() -> None:
    device, found = torch.cuda.current_device(), []

    def nodes() -> int:
        cuda = driver.load()
        info = driver.call(cuda.cuStreamGetCaptureInfo, torch.cuda.current_stream().cuda_stream)
        return int(driver.call(cuda.cuGraphGetNodes, info[2], 0)[1])

    def ask() -> None:
        before = nodes()
        state = torch_workspace.counters(device, 8)
        assert torch_workspace.counters(device, 8) is state
        assert nodes() == before
        state.add_(1)
        assert nodes() == before + 1
        found.append(state)

    graph = record(ask)
    assert not found[0].any()
    graph.replay()
    assert found[0].tolist() == [1] * 8


def test_branches_and_graphs_share_nothing() -> None:
    device, places = torch.cuda.current_device(), []
    side = torch.cuda.Stream()

    def ask() -> None:
        places.append(torch_workspace.counters(device, 2).data_ptr())

    def branch() -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            ask()
        here.wait_stream(side)

    graphs = [record(ask, branch, ask), record(ask, branch)]
    ask()
    main, other, again, *others = places
    assert main == again
    assert len({main, other, *others}) == 5
    assert collect() == 5
    del graphs[0]
    gc.collect()
    assert eventually(3)


def test_a_deleted_graph_keeps_its_counters_until_its_replay_ends() -> None:
    device, done = torch.cuda.current_device(), torch.cuda.Event()
    graph = record(
        lambda: torch.cuda._sleep(SECOND), lambda: torch_workspace.counters(device, 2).add_(1)
    )
    graph.replay()
    done.record()
    del graph
    gc.collect()
    while not done.query():
        owned = collect()
        assert owned == 1 or done.query()
        time.sleep(0.01)
    assert eventually(0)
