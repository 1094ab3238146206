"""What only a GPU can show: streams, graphs, concurrency, devices, tensors past 2^31 elements."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rmsnorm_oracle import BF16, F32
from torch import Tensor

from quack_core import driver, torch_workspace
from quack_core.errors import JitForbiddenError
from quack_core.jit import cache
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_norm.ops.layernorm.api import layernorm
from quack_norm.ops.rmsnorm import launch
from quack_norm.ops.rmsnorm.api import rmsnorm

pytestmark = pytest.mark.usefixtures("cuda")

# Widths whose kernels keep counters: rows drawn in the forward, last arrival in the backward.
WIDTHS = [4096, 16384, 65536]

both_norms = pytest.mark.parametrize("norm", [rmsnorm, layernorm])


def problem(n: int, rows: int = 257, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x = random((rows, n), BF16, "cuda", seed=seed + 1).requires_grad_()
    w = random((n,), BF16, "cuda", seed=seed + 2).requires_grad_()
    return x, w, random((rows, n), BF16, "cuda", seed=seed + 3)


def step(
    x: Tensor, w: Tensor, dout: Tensor, norm: Callable[..., Tensor] = rmsnorm
) -> tuple[Tensor, Tensor, Tensor]:
    y = norm(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dout)
    return y.detach(), dx, dw


def assert_same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("out", "dx", "dweight"), found, right, strict=True):
        assert_bitwise(a, b, name)


class Load:
    """Keeps the GPU busy from a stream of its own."""

    def __enter__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.a = torch.randn(2048, 2048, device="cuda", dtype=BF16)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(400):
                self.a @ self.a

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()


@both_norms
@pytest.mark.parametrize("n", [1000, *WIDTHS])
def test_the_same_bits_100_times_under_load(norm: Callable[..., Tensor], n: int) -> None:
    data = (*problem(n), norm)
    right = step(*data)
    for _ in range(10):
        with Load():
            found = [step(*data) for _ in range(10)]
        for results in found:
            assert_same(results, right)


@both_norms
@pytest.mark.parametrize("n", WIDTHS)
def test_two_streams(norm: Callable[..., Tensor], n: int) -> None:
    problems = [(*problem(n, seed=10 * i), norm) for i in range(2)]
    right = [step(*data) for data in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(step(*problems[i]))
    torch.cuda.synchronize()
    for i in range(2):
        for results in found[i]:
            assert_same(results, right[i])


@pytest.mark.parametrize("n", WIDTHS)
def test_four_threads_on_their_own_streams(n: int) -> None:
    problems = [problem(n, rows=65, seed=10 * i) for i in range(4)]
    right = [step(*data) for data in problems]
    torch.cuda.synchronize()
    found: dict[int, list[tuple[Tensor, ...]]] = {}

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[i] = [step(*problems[i]) for _ in range(20)]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    for i, results in found.items():
        for result in results:
            assert_same(result, right[i])


def capture(data: tuple[Tensor, Tensor, Tensor]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*data)
    return graph, results


@pytest.mark.parametrize("n", WIDTHS)
def test_overlapping_graph_replays(n: int) -> None:
    """Each graph owns its counters: replays on two streams, an eager step on a third."""
    problems = [problem(n, seed=10 * i) for i in range(3)]
    right = [step(*data) for data in problems]
    torch.cuda.synchronize()
    graphs = [capture(data) for data in problems[:2]]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        for (graph, _), stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = step(*problems[2])
        torch.cuda.synchronize()
        for (_, results), expected in zip(graphs, right, strict=False):
            assert_same(results, expected)
        assert_same(eager, right[2])


@pytest.mark.parametrize("n", WIDTHS)
def test_branches_of_one_graph_beside_an_eager_step(n: int) -> None:
    problems = [problem(n, seed=10 * i) for i in range(3)]
    right = [step(*data) for data in problems]
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            results = [step(*problems[0])]
        results.append(step(*problems[1]))
        here.wait_stream(side)
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(other):
            eager = step(*problems[2])
        torch.cuda.synchronize()
        for found, expected in zip((*results, eager), right, strict=True):
            assert_same(found, expected)
    assert not any(state.any() for state in torch_workspace._owned.values())


@pytest.mark.parametrize("n", WIDTHS)
def test_a_captured_call_is_one_kernel(n: int) -> None:
    x, w, dout = problem(n)
    step(x, w, dout)
    torch.cuda.synchronize()
    cuda = driver.load()

    def nodes() -> int:
        info = driver.call(cuda.cuStreamGetCaptureInfo, torch.cuda.current_stream().cuda_stream)
        return int(driver.call(cuda.cuGraphGetNodes, info[2], 0)[1])

    with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
        before = nodes()
        y, _, rstd = launch.forward(x, w, None, None, 1e-6, 0.0, None, None, True)
        middle = nodes()
        launch.backward(x, w, dout, rstd, None, 0.0, BF16, None, True, None, False)
        after = nodes()
    assert y.shape == x.shape
    assert (middle - before, after - middle) == (1, 1)


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("n", WIDTHS)
def test_kl_04_capture_and_replay_with_new_data(n: int, cold: bool) -> None:
    x, w, dout = problem(n)
    right = step(x, w, dout)
    torch.cuda.synchronize()
    if cold:
        forget()
    graph, results = capture((x, w, dout))
    graph.replay()
    assert_same(results, right)
    fresh = problem(n, seed=100)
    expected = step(*fresh)
    with torch.no_grad():
        for target, source in zip((x, w, dout), fresh, strict=True):
            target.copy_(source)
    graph.replay()
    assert_same(results, expected)


def forget() -> None:
    """As in a process that never called the operator."""
    launch._forward.clear()
    launch._backward.clear()
    cache.clear_memory()


def test_a_cold_call_raises_before_the_capture_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = problem(4096)
    right = step(*data)
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))  # nothing is on disk either
    forget()
    x, w, _ = (t.detach() for t in data)
    graph, refused = torch.cuda.CUDAGraph(), None
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x + 1
        try:
            rmsnorm(x, w)
        except JitForbiddenError as error:
            refused = error
        z = y + 1
    assert "CUDA graph is being captured" in str(refused)
    graph.replay()  # what was captured besides is whole
    torch.cuda.synchronize()
    assert_bitwise(z, x + 1 + 1, "z")
    step(*data)  # as the message says
    graph, results = capture(data)
    graph.replay()
    assert_same(results, right)


def test_kl_04_memory_returns_with_the_graph() -> None:
    data = problem(16384)
    step(*data)
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left behind
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), None
    for _ in range(20):
        graph, results = capture(data)
        assert torch.cuda.memory_allocated() > before
        graph.replay()
        torch.cuda.synchronize()
        del graph, results
        for _ in range(100):  # the thread of the backward lets go of a gradient a little later
            gc.collect()
            torch.cuda.empty_cache()
            if torch.cuda.memory_allocated() == before:
                break
            time.sleep(0.01)
        assert torch.cuda.memory_allocated() == before
        time.sleep(0.05)  # CUDA says a little later that the graph is gone
        free = len(torch_workspace._blocks) if free is None else free
        assert len(torch_workspace._blocks) <= free


def test_counters_are_released() -> None:
    data = problem(16384)
    right = step(*data)
    torch.cuda.synchronize()
    torch_workspace.release()
    assert_same(step(*data), right)


def test_counters_are_zero_after_a_launch() -> None:
    for n in WIDTHS:
        step(*problem(n))
        capture(problem(n))[0].replay()
    torch.cuda.synchronize()
    owned = list(torch_workspace._owned.values())
    assert owned
    assert not any(state.any() for state in owned)


def test_a_refused_call_leaves_no_trace() -> None:
    data = problem(16384)
    right = step(*data)
    for _ in range(3):
        with pytest.raises(ValueError):
            rmsnorm(data[0], data[1][:-1])
    assert_same(step(*data), right)


def test_kl_01_work_goes_to_the_current_stream() -> None:
    """It waits for its own stream, and not for the default one, which is busy for longer."""
    x = torch.zeros(17, 4096, device="cuda", dtype=BF16)
    values = random((17, 4096), BF16, "cuda", seed=1)
    right = rmsnorm(values)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.copy_(values)
        out = rmsnorm(x)
        done.record()
    done.synchronize()
    assert not busy.query()
    torch.cuda.synchronize()
    assert_bitwise(out, right)


def test_kl_02_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    right = step(*problem(16384))
    data = [t.detach().to("cuda:1") for t in problem(16384)]
    found = step(data[0].requires_grad_(), data[1].requires_grad_(), data[2])
    assert torch.cuda.current_device() == 0
    assert {t.device.index for t in found} == {1}
    assert_same(found, right)


def test_kl_03_default_stream_after_an_asynchronous_copy() -> None:
    host = torch.randn(4096, 4096, dtype=F32).pin_memory()
    x = torch.empty(4096, 4096, device="cuda")
    right = rmsnorm(host.cuda())
    for _ in range(5):
        x.zero_()
        x.copy_(host, non_blocking=True)
        assert_bitwise(rmsnorm(x), right)


def test_kl_08_host_time_of_an_allocating_call() -> None:
    """A loose bound that catches a lost fast path; the benchmarks hold the budget itself."""
    x, w, _ = problem(1024, rows=1)
    with torch.no_grad():
        out = rmsnorm(x, w)
        raw = list(launch._forward.values())[-1]

        def host_us(call: object, count: int = 500) -> float:
            times = []
            for _ in range(7):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    call()  # type: ignore[operator]
                times.append((time.perf_counter() - start) / count * 1e6)
            return min(times)

        bare = host_us(lambda: raw(x, w, None, None, out, None, None, None, 1e-6, 0.0, 0))
        alone = host_us(lambda: torch.empty_like(x))
        whole = host_us(lambda: rmsnorm(x, w))
    assert whole <= bare + alone + 4


FIRST_USE = """
import torch
from quack_norm import rmsnorm
x = torch.empty(4, 4096, device="cuda", dtype=torch.bfloat16)
y = rmsnorm(x)
torch.cuda.synchronize()
print(y.shape)
"""


def test_kl_09_first_use_of_cuda_is_ours() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "torch.Size([4, 4096])"


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


@pytest.mark.parametrize("n", [4096, 4095])
def test_more_than_2_31_elements(n: int) -> None:
    """The last rows lie beyond every 32-bit offset; rows do not depend on their batch."""
    rows = 2**32 // n + 3
    if free_bytes() < 5 * rows * n * 2:
        pytest.skip("needs 45 GB of free GPU memory")
    x = torch.empty(rows, n, dtype=BF16, device="cuda").normal_()
    w = random((n,), F32, "cuda", seed=1).requires_grad_()
    x.requires_grad_()
    dout = torch.zeros_like(x)
    dout[-3:] = random((3, n), BF16, "cuda", seed=2)
    y, dx, dw = step(x, w, dout)
    last = x.detach()[-3:].clone().requires_grad_()
    expected = step(last, w, dout[-3:])
    assert_bitwise(y[-3:], expected[0])
    assert_bitwise(dx[-3:], expected[1])
    assert not dx[:-3].any()
    torch.testing.assert_close(dw, expected[2], rtol=1e-5, atol=1e-5)
    del x, y, dx, dout
    torch.cuda.empty_cache()


def test_strides_beyond_2_31_elements() -> None:
    rows, pitch = 2**31 // 65536 + 3, 65536
    if free_bytes() < 3 * rows * pitch * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    x = torch.empty(rows, pitch, dtype=BF16, device="cuda").normal_()[:, 128:1152]
    assert_bitwise(rmsnorm(x), rmsnorm(x.contiguous()))
    torch.cuda.empty_cache()
