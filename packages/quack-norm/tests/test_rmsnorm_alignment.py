"""Which kernel serves which addresses and strides, and what it is launched with, on any machine."""

from typing import Any

import pytest
import torch
from rmsnorm_fake import Kernel
from rmsnorm_oracle import BF16, F32

from quack_core import arch
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random
from quack_norm.ops import rows
from quack_norm.ops.rmsnorm import launch, reference
from quack_norm.ops.rmsnorm.rules import default_fwd


def test_alignment_and_offset_choose_kernels(kernel: Kernel) -> None:
    buffer = random((8 * 64 + 16,), BF16, seed=1)
    w = random((72,), F32, seed=2)
    call = (None, None, 1e-6, 0.0, None, None, False)
    for start in (0, 8, 16, 4, 2, 1, 0):
        x = buffer[start : start + 8 * 64].view(8, 64)
        y, _, _ = launch.forward(x, w[:64], *call)
        assert_bitwise(y, reference.forward(x, w[:64], *call[:-1])[0])
    assert [spec.align for spec in kernel.loaded] == [16, 8, 4, 2, 16]
    for start in (4, 2, 1):
        launch.forward(buffer[:512].view(8, 64), w[start : start + 64], *call)
    assert [spec.weight_align for spec in kernel.loaded[5:]] == [8, 4]
    launch.forward(x, w[:64], None, None, 1e-6, 1.0, None, None, False)
    assert kernel.loaded[-1].offset and len(kernel.loaded) == 8


def test_pitches_choose_kernels(kernel: Kernel) -> None:
    for pitch in (64, 72, 68, 66, 65):
        x = random((4, pitch), BF16, seed=1)[:, :64]
        dout, rstd = random((4, 64), BF16, seed=2), torch.ones(4)
        launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False)
        launch.backward(x, None, dout, rstd, None, 0.0, BF16, None, False, None, False)
    aligns = {
        type(s): [t.align for t in kernel.loaded if type(t) is type(s)] for s in kernel.loaded
    }
    assert list(aligns.values()) == [[16, 8, 4, 2]] * 2


def test_backward_counts_the_parameters_alignment_apart(kernel: Kernel) -> None:
    h, rstd = random((4, 64), BF16, seed=1), torch.ones(4)
    w = random((72,), BF16, seed=2)
    for start in (0, 4, 1):
        args = (h, w[start : start + 64], h, rstd, None, 0.0, BF16, None, True, None, False)
        for found, right in zip(launch.backward(*args), reference.backward(*args), strict=True):
            if right is not None:
                torch.testing.assert_close(found, right)
    assert [(s.align, s.weight_align) for s in kernel.loaded] == [(16, 16), (16, 8), (16, 2)]


ODD = [
    ("contiguous", 63, (BF16, None), (0, None), True),
    ("float32 and 16 bits", 63, (F32, BF16), (0, 0), True),
    ("vectors of 4", 62, (F32, F32), (0, 0), True),
    ("whole vectors of 4", 60, (F32, F32), (4, 8), True),
    ("x shifted", 63, (BF16, None), (1, None), False),
    ("x shifted by a vector", 63, (BF16, None), (8, None), True),
    ("16 bytes are no vector of float32", 63, (F32, BF16), (4, 0), False),
    ("residual shifted", 63, (BF16, BF16), (0, 3), False),
    ("all shifted alike, but out", 63, (BF16, BF16), (3, 3), False),
]


@pytest.mark.parametrize(("why", "n", "kinds", "starts", "right"), ODD, ids=[c[0] for c in ODD])
def test_phase(why: str, n: int, kinds: Any, starts: Any, right: bool, kernel: Kernel) -> None:
    x, residual = (
        None if dtype is None else random((7 * n + 8,), dtype, seed=1)[start:][: 7 * n].view(7, n)
        for dtype, start in zip(kinds, starts, strict=True)
    )
    for _ in range(2):
        launch.forward(x, None, None, residual, 1e-6, 0.0, None, x.dtype, False)
    assert [spec.in_phase for spec in kernel.loaded] == [right]


def test_phase_of_pitches_and_of_out(kernel: Kernel) -> None:
    found = []
    for pitch, start in ((71, 0), (72, 0), (79, 8), (71, 1)):
        x = random((4 * pitch + 8,), BF16, seed=1)[start:][: 4 * pitch].view(4, pitch)[:, :63]
        launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False)
        memory = torch.zeros(4 * pitch + 8, dtype=BF16)[start:][: 4 * pitch].view(4, pitch)[:, :63]
        launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False, memory)
        assert_bitwise(memory, reference.forward(x, None, None, None, 1e-6, 0.0, None, None)[0])
        found.append({spec.in_phase for spec in kernel.loaded})
        kernel.loaded.clear()
        launch._forward.clear()
    assert found == [{True}, {False, True}, {True}, {False, True}]


@pytest.mark.parametrize("n", [2048, 4096, 16384, 65536, 131072])
def test_groups_state_and_scratch(n: int, kernel: Kernel) -> None:
    for count in (1, 3, 40, 3):
        x = random((count, n), BF16, seed=1)
        y, _, rstd = launch.forward(x, None, None, None, 1e-6, 0.0, None, None, True)
        w = random((n,), F32, seed=2)
        launch.backward(x, w, y, rstd, None, 0.0, BF16, None, True, F32, False)
        launch.backward(x, w, y, rstd, None, 0.0, BF16, None, False, None, False)
    # few rows have a kernel of their own if it gives the same bits; else one serves any number
    spec = kernel.loaded[0]
    alone = default_fwd(spec, arch.get("sm90")).for_few(spec) is not None
    assert alone == (n == 131072)
    assert len(kernel.launched) == 12 and len(kernel.loaded) == 3 + alone
    assert all((state is None) == (i % 3 == 2) for i, state in enumerate(kernel.states) if i % 3)


@pytest.mark.parametrize(
    ("start", "pitch", "align"),
    [(0, 64, 16), (16, 64, 16), (4, 64, 8), (12, 64, 8), (2, 64, 4), (3, 64, 2), (0, 70, 4)],
)
def test_alignment(start: int, pitch: int, align: int) -> None:
    buffer = torch.zeros(4 * pitch + 16, dtype=BF16)
    tensor = buffer.as_strided((4, 64), (pitch, 1), start)
    assert rows.alignment(None, buffer, tensor) == align


def test_strides_of_single_rows_do_not_count() -> None:
    buffer = torch.zeros(256, dtype=BF16)
    single = buffer.as_strided((1, 3, 64), (7, 64, 1))
    assert rows.alignment(single) == 16
    assert rows.alignment(buffer.as_strided((2, 3, 64), (7, 64, 1))) == 2
    assert rows.in_phase(
        8, buffer.as_strided((1, 63), (63, 1)), buffer.as_strided((1, 63), (64, 1))
    )
    several = [buffer.as_strided((2, 63), (pitch, 1)) for pitch in (63, 64)]
    assert not rows.in_phase(8, *several)


def test_a_batch_of_one_with_any_stride_has_the_best_kernel(kernel: Kernel) -> None:
    x = random((3 * 128,), BF16, seed=1).as_strided((1, 3, 64), (7, 128, 1))
    dout, rstd = random((1, 3, 64), BF16, seed=2), torch.ones(1, 3)
    for _ in range(2):
        y, _, _ = launch.forward(x, None, None, None, 1e-6, 0.0, None, None, False)
        assert_bitwise(y, reference.forward(x, None, None, None, 1e-6, 0.0, None, None)[0])
        launch.backward(x, None, dout, rstd, None, 0.0, BF16, None, False, None, False)
    assert [spec.align for spec in kernel.loaded] == [16, 16]
