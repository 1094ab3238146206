"""Inside PyTorch: torch.compile, opcheck, autocast, fake and meta tensors, modes, DDP."""

import socket

import pytest
import torch
import torch._dynamo.testing
from rmsnorm_oracle import BF16, F32, Case, operands, ours
from torch import Tensor

from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import Layout, random
from quack_norm.nn import RMSNorm
from quack_norm.ops.rmsnorm.api import rmsnorm
from quack_norm.ops.rmsnorm.autograd import rmsnorm_bwd, rmsnorm_fwd


@pytest.fixture
def backend(device: str) -> str:
    """The CPU may have no C++ compiler: there the graph runs as it was traced."""
    torch._dynamo.reset()
    return "inductor" if device == "cuda" else "aot_eager"


def block(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y, h = rmsnorm(x * 2, w, residual=r, prenorm=True)
    return rmsnorm(y, weight_offset=1.0) + 1, h


def test_kl_07_compile_whole_graph_with_dynamic_rows(backend: str, device: str) -> None:
    compilations = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=compilations)
    w = random((256,), F32, device, seed=2).requires_grad_()
    counts = set()
    for rows in (4, 5, 17, 64):
        x = random((rows, 256), BF16, device, seed=rows).requires_grad_()
        r = random((rows, 256), BF16, device, seed=rows + 100).requires_grad_()
        dout = random((rows, 256), BF16, device, seed=rows + 200)
        found, expected = compiled(x, w, r), block(x, w, r)
        for a, b in zip(found, expected, strict=True):
            assert_bitwise(a, b)
        for a, b in zip(
            torch.autograd.grad(found, (x, w, r), (dout, dout)),
            torch.autograd.grad(expected, (x, w, r), (dout, dout)),
            strict=True,
        ):
            assert_bitwise(a, b)
        counts.add(compilations.frame_count)
    assert len(counts) == 1  # nothing was compiled after the first call


def test_kl_07_compile_with_out(backend: str, device: str) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def step(x: Tensor, out: Tensor) -> Tensor:
        rmsnorm(x, out=out)
        return out + x

    x = random((5, 64), F32, device, seed=1)
    out = torch.zeros_like(x)
    found = step(x, out)
    assert_bitwise(out, rmsnorm(x))
    assert_bitwise(found, rmsnorm(x) + x)


def test_kl_07_compile_in_place(backend: str, device: str) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def step(x: Tensor) -> Tensor:
        before = x + 1
        rmsnorm(x, out=x)
        return before * x

    x = random((5, 64), F32, device, seed=1)
    expected = (x + 1) * rmsnorm(x)
    assert_bitwise(step(x), expected)


@pytest.mark.parametrize("layout", [Layout.ROW_STRIDED, Layout.TRANSPOSED], ids=str)
def test_compile_with_strides(layout: Layout, backend: str, device: str) -> None:
    compiled = torch.compile(rmsnorm, fullgraph=True, backend=backend)
    x = random((3, 5, 64), BF16, device, seed=1, layout=layout)
    assert_bitwise(compiled(x), rmsnorm(x))


def test_compile_a_module(backend: str, device: str) -> None:
    module = RMSNorm(64, device=device, bias=True)
    x = random((5, 64), BF16, device, seed=1)
    assert_bitwise(torch.compile(module, fullgraph=True, backend=backend)(x), module(x))


def test_export(device: str) -> None:
    module = RMSNorm(64, device=device)
    x = random((5, 64), F32, device, seed=1)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: rows}})
    longer = random((9, 64), F32, device, seed=2)
    assert_bitwise(program.module()(longer), module(longer))


FORWARDS = {
    "everything": ((5, 64), True, True, True, BF16, F32),
    "x only": ((2, 3, 64), False, False, False, None, None),
    "h without residual": ((5, 64), True, False, False, None, F32),
    "residual without h": ((5, 64), True, True, True, None, None),
}


@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("name", FORWARDS)
def test_kl_07_opcheck_forward(name: str, centred: bool, device: str) -> None:
    shape, weight, bias, residual, out_dtype, stored = FORWARDS[name]
    make = [
        random(size, F32, device, seed=seed).requires_grad_() if wanted else None
        for seed, (wanted, size) in enumerate(
            [(True, shape), (weight, shape[-1:]), (bias, shape[-1:]), (residual, shape)]
        )
    ]
    torch.library.opcheck(rmsnorm_fwd, (*make, 1e-6, 0.5, out_dtype, stored, centred))


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("everything", [False, True], ids=["dx", "everything"])
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
def test_kl_07_opcheck_backward(
    centred: bool, everything: bool, per_head: bool, device: str
) -> None:
    h, dout, dh = (random((5, 3, 64), F32, device, seed=seed) for seed in range(3))
    w = random((3, 64) if per_head else (64,), F32, device, seed=3)
    rstd = torch.rsqrt(h.square().mean(-1))
    wanted = (BF16, True, BF16) if everything else (None, False, None)
    if centred:
        mean = h.mean(-1)
        rstd = torch.stack((torch.rsqrt(h.var(-1, correction=0)), mean, mean * 0), -1)
    args = (h, w, dout, rstd, dh if everything else None, 0.5, F32, *wanted, per_head, centred)
    torch.library.opcheck(rmsnorm_bwd, args)


def test_operator_agrees_with_the_function(device: str) -> None:
    """Eager calls skip the dispatcher; the registered operator gives the same bits."""
    case = Case("", (5, 256), residual=BF16, prenorm=True, bias=F32)
    data = operands(case, device)
    direct = ours(case, data)
    y, h, rstd = rmsnorm_fwd(
        data.x, data.weight, data.bias, data.residual, 1e-6, 0.0, None, BF16, False
    )
    grads = torch.autograd.grad(
        (y, h), tuple(data.leaves().values()), (data.dout, data.dresidual_out)
    )
    found = {"out": y, "h": h, "rstd": rstd}
    found |= {f"d{name}": g for name, g in zip(data.leaves(), grads, strict=True)}
    for name, tensor in direct.items():
        assert_bitwise(found[name], tensor, name)


def test_dispatch_modes_see_the_call(device: str) -> None:
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = random((5, 64), F32, device, seed=1)
    with Watch():
        rmsnorm(x)
    assert rmsnorm_fwd in seen


@pytest.mark.filterwarnings("error")
def test_kn_07_autocast(device: str) -> None:
    x = random((5, 64), BF16, device, seed=1).requires_grad_()
    w = random((64,), F32, device, seed=2).requires_grad_()
    with torch.autocast(device, dtype=BF16):
        y = rmsnorm(x, w)
    assert y.dtype == BF16
    assert_bitwise(y, rmsnorm(x, w))
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert (dx.dtype, dw.dtype) == (BF16, F32)


@pytest.mark.parametrize("prenorm", [False, True])
def test_meta_and_fake_tensors_give_shapes(prenorm: bool, device: str) -> None:
    case = Case("", (2, 5, 256), residual=F32, bias=F32, prenorm=prenorm, out=F32)
    real = ours(case, operands(case, device))

    def shapes(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> dict[str, tuple]:
        results = rmsnorm(x, w, b, residual=r, prenorm=prenorm, out_dtype=F32, return_rstd=True)
        names = ("out", "h", "rstd") if prenorm else ("out", "rstd")
        return {
            name: (tensor.shape, tensor.dtype, tensor.stride(), tensor.device.type)
            for name, tensor in zip(names, results, strict=True)
        }

    data = operands(case, device)
    leaves = [data.leaves()[name].detach() for name in ("x", "weight", "bias", "residual")]
    expected = {
        name: (real[name].shape, real[name].dtype, real[name].stride()) for name in real
        if not name.startswith("d")
    }  # fmt: skip
    meta = shapes(*(t.to("meta") for t in leaves))
    assert {k: v[:3] for k, v in meta.items()} == expected
    assert {v[3] for v in meta.values()} == {"meta"}
    with torch._subclasses.FakeTensorMode() as mode:
        fake = shapes(*(mode.from_tensor(t) for t in leaves))
    assert fake == {name: (*rest, device) for name, rest in expected.items()}


def test_ddp(device: str) -> None:
    """One process: the reducer's hooks and buckets run as with many."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True)
    kind = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(kind, store=store, rank=0, world_size=1)
    try:
        module = RMSNorm(64, device=device, bias=True)
        wrapped = torch.nn.parallel.DistributedDataParallel(module)
        x = random((5, 64), BF16, device, seed=1)
        wrapped(x).float().square().sum().backward()
        found = module.weight.grad.clone(), module.bias.grad.clone()
        module.zero_grad()
        module(x).float().square().sum().backward()
        assert_bitwise(found[0], module.weight.grad)
        assert_bitwise(found[1], module.bias.grad)
    finally:
        torch.distributed.destroy_process_group()
