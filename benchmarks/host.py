"""Host time of a call: tiny tensors, an idle GPU, one CPU."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from . import device, gemm, judge, norm, record
from .progress import Progress, table
from .shapes import Case
from .variant import Failure, attempt

CASE = Case("host", "rmsnorm_host", (16, 1024), "bf16", (("w", "bf16"),))
GEMM = Case("host", "gemm_host", (16, 1024, 1024), "bf16", (("layout", "nt"),))
CALLS = 5000
BATCHES = 10

Call = Callable[[], Any]


def per_call(
    call: Call, calls: int = CALLS, synchronize: Callable[[], None] = lambda: None
) -> list:
    """Microseconds per call, one sample per batch; the queue is empty when a batch begins."""
    for _ in range(max(3, calls // 50)):
        call()
    samples = []
    for _ in range(BATCHES):
        synchronize()
        count = max(1, calls // BATCHES)
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        samples.append((time.perf_counter_ns() - start) / count * 1e-3)
    return samples


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """This thread stays on one CPU; gradients are on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        with torch.enable_grad():
            yield
    finally:
        os.sched_setaffinity(0, before)


def makers() -> Mapping[str, tuple[str, Callable[[norm.FwdBuffers], Call]]]:
    """By name: the package, and what makes a call on buffers."""
    return {
        "ours raw": ("quack-norm", _raw),
        "ours out=": ("quack-norm", _out),
        "ours allocating": ("quack-norm", lambda b: _ours(b.x, b.w)),
        "torch.empty_like": ("torch", lambda b: lambda: torch.empty_like(b.x)),
        "torch.add": ("torch", lambda b: lambda: torch.add(b.x, b.x)),
        "F.rms_norm": ("torch", lambda b: _torch(b.x, b.w)),
        "F.rms_norm autograd": ("torch", lambda b: _autograd(_torch, b)),
        "ours autograd": ("quack-norm", lambda b: _autograd(_ours, b)),
        "quack-kernels allocating": ("quack-kernels", _quack),
        "quack-kernels autograd": ("quack-kernels", _quack_autograd),
        "ours compiled": ("quack-norm", lambda b: _compiled(_ours, b)),  # last: it takes long
    }


def gemm_makers() -> Mapping[str, tuple[str, Callable[[gemm.Buffers], Call]]]:
    """Likewise."""
    return {
        "ours raw": ("quack-gemm", _gemm_raw),
        "ours out=": ("quack-gemm", _gemm_out),
        "ours allocating": ("quack-gemm", _gemm),
        "torch.mm out=": ("torch", lambda b: lambda: torch.mm(b.a, b.b, out=b.out)),
        "torch.mm": ("torch", lambda b: lambda: torch.mm(b.a, b.b)),
        "quack-kernels out=": ("quack-kernels", _quack_gemm),
    }


def _gemm_raw(b: gemm.Buffers) -> Call:
    from quack_gemm import launch

    run = launch.launcher(b.a, b.b, [b.out], [], False, None)
    return lambda: run(b.a, b.b, (b.out,), None)


def _gemm_out(b: gemm.Buffers) -> Call:
    from quack_gemm import gemm as ours

    return lambda: ours(b.a, b.b, out=b.out)


def _gemm(b: gemm.Buffers) -> Call:
    from quack_gemm import gemm as ours

    return lambda: ours(b.a, b.b)


def _quack_gemm(b: gemm.Buffers) -> Call:
    from quack.gemm_interface import gemm as theirs

    return lambda: theirs(b.a, b.b, out=b.out, tuned=False)


def _raw(b: norm.FwdBuffers) -> Call:
    from . import ours

    launch = ours.with_config(ours.default_config(CASE), CASE)
    return lambda: launch(b)


def _out(b: norm.FwdBuffers) -> Call:
    from quack_norm import rmsnorm

    return lambda: rmsnorm(b.x, b.w, out=b.out)


def _ours(x: torch.Tensor, w: torch.Tensor) -> Call:
    from quack_norm import rmsnorm

    return lambda: rmsnorm(x, w)


def _torch(x: torch.Tensor, w: torch.Tensor) -> Call:
    shape = (x.shape[-1],)
    return lambda: F.rms_norm(x, shape, w, norm.EPS)


def _quack(b: norm.FwdBuffers) -> Call:
    from quack.rmsnorm import rmsnorm_fwd

    return lambda: rmsnorm_fwd(b.x, b.w, eps=norm.EPS)


def _quack_autograd(b: norm.FwdBuffers) -> Call:
    from quack.rmsnorm import rmsnorm

    return _autograd(lambda x, w: lambda: rmsnorm(x, w), b)


def _autograd(make: Callable[..., Call], b: norm.FwdBuffers) -> Call:
    """Forward and backward; gradients are returned, not accumulated."""
    x, w = b.x.detach().requires_grad_(), b.w.detach().requires_grad_()
    forward, dout = make(x, w), torch.randn_like(b.x)
    return lambda: torch.autograd.grad(forward(), (x, w), dout)


def _compiled(make: Callable[..., Call], b: norm.FwdBuffers) -> Call:
    """The allocating call under torch.compile."""
    from .peers import compiled_for_one_shape

    compiled = compiled_for_one_shape(lambda x, w: make(x, w)())
    return lambda: compiled(b.x, b.w)


def run(base: record.Record, calls: int = CALLS) -> list[record.Record]:
    """One record per kind of call; a kind that fails is a record too."""
    with torch.no_grad():
        kinds = [
            (case, name, package, make, buffers)
            for case, found, buffers in (
                (CASE, makers(), norm.NormFwd(CASE).make()),
                (GEMM, gemm_makers(), gemm.problem(GEMM).make()),
            )
            for name, (package, make) in found.items()
        ]
    records = []
    with pinned(), Progress("host", len(kinds)) as progress:
        for case, name, package, make, buffers in kinds:
            one = replace(
                base,
                suite=case.suite,
                op=case.op,
                shape=list(case.shape),
                dtype=case.dtype,
                opts=dict(case.opts),
                variant=name,
                method="host",
                rounds=BATCHES,
                launches=calls,
                rate_unit="",
                versions=device.versions(package),
            )
            samples = attempt(
                lambda m=make, b=buffers: per_call(m(b), calls, torch.cuda.synchronize)  # type: ignore[misc]
            )
            if isinstance(samples, Failure):
                one.status, one.note = samples.status, samples.note
            else:
                one.us = judge.summarise(samples).rounded()
            records.append(one)
            progress.step(f"{case.op} {name}: {one.median if one.median else one.status}")
    return records


def text(records: list[record.Record]) -> str:
    """All kinds, beside the raw launch of the same operator and run."""
    launches = {r.op: r.median for r in records if r.variant == "ours raw"}
    rows = []
    for one in records:
        name, raw = f"{one.op} {one.variant}", launches.get(one.op)
        if one.median is None:
            rows.append((name, one.status, one.note[:60]))
        else:
            rows.append((name, f"{one.median:.2f}", f"{one.median - raw:+.2f}" if raw else "-"))
    return table(("call", "us", "beyond raw"), rows)
