"""Stand-ins for compiled kernels, which compute on the CPU what they are handed.

They insist on what the kernels' signatures promise: one rank, unit strides, the alignment and the
phase that the spec names, and the state that the configuration asks for.
"""

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_core import torch_workspace
from quack_norm.ops.rmsnorm import launch, prepare, reference
from quack_norm.ops.rmsnorm.spec import STATISTICS, RMSNormFwdSpec
from quack_norm.ops.row_map import launch as row_launch


class Kernel:
    """Stands in for all kernels: counts those loaded, keeps the rows that each launch was handed."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.launched: list[tuple[Tensor | None, ...]] = []
        self.states: list[Tensor | None] = []

    def load(self, module: str, spec: Any, config: Any, target: Any) -> Any:
        self.loaded.append(spec)

        def forward(*operands: Any) -> None:
            x, weight, bias, residual, out, h, rstd, state, eps, offset, groups = operands
            self._take(spec, (x, residual, out, h), (weight, bias), spec.full_vector)
            self._take_state(state, config, config.state_ints, groups, x)
            stored = None if h is None else h.dtype
            args = (x, weight, bias, residual, eps, offset, out.dtype, stored)
            found = reference.forward(*args, spec.centred)
            write((out, h, rstd), found)

        def backward(*operands: Any) -> None:
            h, weight, dout, rstd, dh, dx, dresidual, dw, db, work, state, offset, groups = operands
            self._take(spec, (h, dout, dh, dx, dresidual), (weight, dw, db), 1)
            heads = h.shape[1] if spec.per_head else 1
            self._take_state(
                state, config, bool(work is not None) * config.state_ints * heads, groups, h
            )
            shape = (*h.shape[:-1], STATISTICS) if spec.centred else h.shape[:-1]
            if rstd.shape != shape or not rstd.is_contiguous():
                raise ValueError("rstd")
            needed = config.work_elements(spec, groups, heads)
            if needed != (0 if work is None else work.numel()):
                raise ValueError("work")
            wanted = [None if t is None else t.dtype for t in (dresidual, db)]
            args = (h, weight, dout, rstd, dh, offset, dx.dtype, wanted[0], dw is not None)
            found = reference.backward(*args, wanted[1], spec.per_head, spec.centred)
            write((dx, dresidual, dw, db), found)

        return forward if isinstance(spec, RMSNormFwdSpec) else backward

    def _take(self, spec: Any, moved: tuple, parameters: tuple, vector: int) -> None:
        """Refuse, as a launcher does, what a kernel cannot read."""
        present = [t for t in moved if t is not None]
        shape = present[0].shape
        if len(shape) != spec.rank or any(t.shape != shape for t in present):
            raise ValueError(f"shapes {[tuple(t.shape) for t in present]}")
        given = [t for t in parameters if t is not None]
        if any(t.shape != (shape[-2:] if spec.per_head else shape[-1:]) for t in given):
            raise ValueError("shape of a parameter")
        for tensor, align in [(t, spec.align) for t in present] + [
            (t, spec.weight_align) for t in given
        ]:
            if tensor.stride(-1) != 1 and shape[-1] > 1:
                raise ValueError("stride of the last dimension")
            steps = [
                step * tensor.element_size()
                for step, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
                if extent > 1
            ]
            if any(number % align for number in (tensor.data_ptr(), *steps)):
                raise ValueError("misaligned address or stride")
        if getattr(spec, "in_phase", True) and shape[-1] % vector:  # the kernels cannot see this
            assert len({phases(t, vector) for t in present}) == 1
        self.launched.append(moved)

    def _take_state(self, state: Any, config: Any, ints: int, groups: int, x: Tensor) -> None:
        self.states.append(state)
        if ints != (0 if state is None else state.numel()):
            raise ValueError("state")
        if config.persistent:
            assert 1 <= groups <= RESIDENT


def phases(tensor: Tensor, vector: int) -> tuple[int, ...]:
    """Where rows begin, modulo a vector: the remainders of all rows in order."""
    first = tensor.data_ptr() // tensor.element_size()
    starts = [first]
    for extent, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        starts = [start + i * step for start in starts for i in range(extent)]
    return tuple(start % vector for start in starts)


def write(targets: tuple, values: tuple) -> None:
    for target, value in zip(targets, values, strict=True):
        if target is not None:
            target.copy_(value)


RESIDENT = 13
"""Clusters that the device holds."""
SURELY = 2
"""SMs."""


def install(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Let CPU tensors go where CUDA tensors go, up to the stand-ins."""
    fake = Kernel()
    monkeypatch.setattr(prepare.arch, "detect", lambda _: prepare.arch.get("sm90"))
    monkeypatch.setattr(prepare.cache, "load", fake.load)
    monkeypatch.setattr(row_launch.driver, "multiprocessors", lambda _: SURELY)
    monkeypatch.setattr(row_launch.occupancy, "resident_clusters", lambda *_, registers: RESIDENT)
    zeros = functools.partial(torch.zeros, dtype=torch.int32)
    monkeypatch.setattr(torch_workspace, "counters", lambda _, count: zeros(count))
    monkeypatch.setattr(torch_workspace, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(launch, "_forward", {})
    monkeypatch.setattr(launch, "_backward", {})
    return fake
