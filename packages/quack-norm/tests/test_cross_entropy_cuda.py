"""What only a GPU can show: the gradient from the forward, memory, streams, graphs, many elements."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cross_entropy_oracle import BF16, F16, Options, judge, labels
from torch import Tensor

from quack_core import torch_workspace
from quack_core.errors import UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_norm.ops.cross_entropy.api import cross_entropy

pytestmark = pytest.mark.usefixtures("cuda")


def ours(x: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> tuple[Tensor, Tensor]:
    return cross_entropy(x, target, weight, **vars(o), return_lse=True)  # type: ignore[return-value]


def problem(
    rows: int, classes: int, dtype: torch.dtype = BF16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    x = random((rows, classes), dtype, "cuda", seed=seed + 1)
    return x.requires_grad_(), labels((rows,), classes, seed + 2, -100).cuda()


def step(x: Tensor, target: Tensor, dloss: float | None = None) -> tuple[Tensor, ...]:
    loss, lse = cross_entropy(x, target, label_smoothing=0.1, return_lse=True)
    incoming = None if dloss is None else torch.full_like(loss, dloss)
    (dx,) = torch.autograd.grad(loss, x, incoming)
    return loss.detach(), lse, dx


def assert_same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("loss", "lse", "dx"), found, right, strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ks_09_a_second_backward_of_a_mean_is_right_or_raises(reduction: str, cuda: str) -> None:
    x, target = problem(9, 1000)
    loss = cross_entropy(x, target, reduction=reduction)
    (first,) = torch.autograd.grad(loss, x, 2 * torch.ones_like(loss), retain_graph=True)
    kept = first.clone()
    with pytest.raises(UnsupportedError, match='second backward.*reduction="none"'):
        torch.autograd.grad(loss, x, torch.ones_like(loss))
    assert_bitwise(first, kept)


def test_float16_has_as_many_backwards_as_wanted(cuda: str) -> None:
    x, target = problem(9, 1000, F16)
    loss = cross_entropy(x, target)
    scale = torch.full_like(loss, 1024.0)
    first, second = (torch.autograd.grad(loss, x, scale, retain_graph=True)[0] for _ in range(2))
    assert_bitwise(first, second)


def test_float16_gradients_below_its_range_survive_a_loss_scale(cuda: str) -> None:
    """Probabilities near 2^-13 over 4096 rows are zero in float16 before the scale lifts them."""
    x = torch.zeros(4096, 8192, dtype=F16, device=cuda).requires_grad_()
    target = torch.zeros(4096, dtype=torch.int64, device=cuda)
    loss = cross_entropy(x, target)
    (dx,) = torch.autograd.grad(loss, x, torch.full_like(loss, 2.0**12))
    assert_bitwise(dx[:, 1:], torch.full_like(dx[:, 1:], 2.0**-13))


def test_logits_are_freed_after_the_forward(cuda: str) -> None:
    leaf, target = problem(64, 32768)
    logits = leaf * 2
    before = torch.cuda.memory_allocated()
    loss = cross_entropy(logits, target)
    del logits
    assert torch.cuda.memory_allocated() <= before + 64 * 1024  # the gradient took their place
    loss.backward()


SMALL = 256 * 1024
"""Bytes for what is as long as the batch, rounded up to the allocator's blocks."""


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("classes", [32768, 50257])
def test_memory_of_a_step(classes: int, inplace: bool, cuda: str) -> None:
    """One buffer of the size of the logits; none in place."""
    x, target = problem(1024, classes)
    step(x, target)  # compiled, and counters are there
    logits = x.detach().clone().requires_grad_() * 1  # neither a leaf nor anybody's input
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, size = torch.cuda.memory_allocated(), x.numel() * x.element_size()
    loss = cross_entropy(logits, target, label_smoothing=0.1, inplace_backward=inplace)
    (dx,) = torch.autograd.grad(loss, logits, torch.full_like(loss, 0.5))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= (0 if inplace else size + 512) + SMALL
    assert (dx.data_ptr() == logits.data_ptr()) == inplace


def test_memory_of_losses_of_rows_in_place(cuda: str) -> None:
    x, target = problem(1024, 32768)
    logits, dloss = x * 1, random((1024,), BF16, cuda, seed=3)
    (right,) = torch.autograd.grad(cross_entropy(x, target, reduction="none"), x, dloss)
    loss = cross_entropy(logits, target, reduction="none", inplace_backward=True)
    assert_bitwise(logits.detach(), x.detach())  # until the backward
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (dx,) = torch.autograd.grad(loss, logits, dloss, retain_graph=True)
    assert torch.cuda.max_memory_allocated() <= before + SMALL
    assert dx.data_ptr() == logits.data_ptr()
    assert_bitwise(dx, right)
    with pytest.raises(UnsupportedError, match="second backward"):
        torch.autograd.grad(loss, logits, dloss)


@pytest.mark.parametrize("classes", [4096, 4095])
@pytest.mark.parametrize("pitch", [4096, 4101])
def test_in_place_gives_the_same_bits(pitch: int, classes: int, cuda: str) -> None:
    x, target = problem(33, pitch)
    target = torch.where(target < 0, target, target % classes)
    right = step(x[:, :classes].detach().requires_grad_(), target, 0.3)
    logits = (x * 1)[:, :classes]
    gradients: list[Tensor] = []
    logits.register_hook(gradients.append)
    options: Any = {"label_smoothing": 0.1, "return_lse": True, "inplace_backward": True}
    loss, lse = cross_entropy(logits, target, **options)
    loss.backward(torch.full_like(loss, 0.3))
    assert gradients[0].data_ptr() == logits.data_ptr()
    assert_same((loss.detach(), lse, gradients[0]), right)


def test_ks_09_in_place_whoever_kept_the_logits_notices(cuda: str) -> None:
    x, target = problem(9, 1000)
    logits = x * 1
    other = logits.square().mean()
    loss = cross_entropy(logits, target, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_nothing_waits_for_the_device(reduction: str, cuda: str) -> None:
    x, target = problem(33, 4097)
    weight = torch.rand(4097, device=cuda)

    def run() -> None:
        loss = cross_entropy(x, target, weight, reduction=reduction)
        torch.autograd.grad(loss, x, torch.full_like(loss, 0.5))

    run()  # what is loaded once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("classes", [128, 1000, 4097, 16384, 50257, 131072])
def test_a_row_has_the_same_bits_in_every_batch(classes: int, cuda: str) -> None:
    x = random((600, classes), BF16, cuda, seed=1)
    target = labels((600,), classes, 2, -100).to(cuda)
    o = Options(label_smoothing=0.1, softcap=30.0, z_loss=1e-4)

    def run(at: slice, reduction: str) -> list[Tensor]:
        leaf = x[at].detach().requires_grad_()
        loss, lse = ours(leaf, target[at], None, replace(o, reduction=reduction))
        (dx,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
        return [lse, dx] if reduction == "sum" else [loss.detach(), lse, dx]

    for reduction in ("none", "sum"):
        whole = run(slice(None), reduction)
        for at in (slice(0, 1), slice(7, 14), slice(-200, None)):
            for together, alone in zip(whole, run(at, reduction), strict=True):
                assert_bitwise(alone, together[at])


@pytest.mark.parametrize("classes", [1000, 16384, 50257])
def test_the_same_bits_100_times_under_load(classes: int, cuda: str) -> None:
    data = problem(257, classes)
    right = step(*data)
    side, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device=cuda, dtype=BF16)
    for _ in range(10):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(100):
                busy @ busy
        found = [step(*data) for _ in range(10)]
        for results in found:
            assert_same(results, right)


def test_two_streams(cuda: str) -> None:
    problems = [problem(257, 16384, seed=10 * i) for i in range(2)]
    right = [step(*data, 0.5) for data in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(step(*problems[i], 0.5))
    torch.cuda.synchronize()
    for i in range(2):
        for results in found[i]:
            assert_same(results, right[i])


@pytest.mark.parametrize("classes", [1000, 50257])
def test_replays_of_graphs_that_overlap(classes: int, cuda: str) -> None:
    problems = [problem(257, classes, seed=10 * i) for i in range(2)]
    right = [step(*data, 0.5) for data in problems]
    torch.cuda.synchronize()
    captured = []
    for data in problems:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(*data, 0.5)
        captured.append((graph, results))
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        for (graph, results), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                for each in results:
                    each.zero_()
                graph.replay()
        torch.cuda.synchronize()
        for (_, results), expected in zip(captured, right, strict=True):
            assert_same(results, expected)


def test_counters_are_zero_after_a_launch(cuda: str) -> None:
    for classes in (1000, 4097, 65536):
        step(*problem(257, classes))
        step(*problem(1, classes))
    torch.cuda.synchronize()
    owned = list(torch_workspace._owned.values())
    assert owned and not any(state.any() for state in owned)


def test_another_device_than_the_current_one(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, target = problem(33, 4096)
    right = step(x, target, 0.5)
    with torch.cuda.device(0):
        found = step(x.detach().to("cuda:1").requires_grad_(), target.to("cuda:1"), 0.5)
    assert torch.cuda.current_device() == 0
    assert {t.device.index for t in found} == {1}
    assert_same(found, right)


@pytest.mark.parametrize("classes", [50264, 50257])
def test_ks_01_more_than_2_31_elements(classes: int, cuda: str) -> None:
    """The last rows lie beyond every 32-bit offset; rows do not depend on their batch."""
    rows = 2**32 // classes + 147
    if torch.cuda.mem_get_info()[0] < 3 * rows * classes * 2:
        pytest.skip("needs 26 GB of free GPU memory")
    x = torch.empty(rows, classes, dtype=BF16, device=cuda).normal_().requires_grad_()
    target = torch.full((rows,), -100, device=cuda)
    target[-5:] = torch.arange(5, device=cuda) + classes - 5
    loss, lse, dx = step(x, target)
    last = x.detach()[-5:].clone().requires_grad_()
    expected = step(last, target[-5:])
    assert_bitwise(lse[-5:], expected[1])
    assert_bitwise(dx[-5:], expected[2])
    assert not dx[:-5].any()
    judge(ours, last, target[-5:], None, Options(), torch.ones_like(loss))
    del x, dx
    torch.cuda.empty_cache()
