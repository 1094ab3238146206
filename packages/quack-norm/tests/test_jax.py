"""Softmax of JAX arrays: values, gradients, transformations, and what XLA is told to call."""

import functools
import math
import os
import subprocess
import sys
import types
import uuid
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_core import arch
from quack_core.errors import ArchError, DTypeError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_accurate, assert_bitwise
from quack_core.testing.inputs import random

# JAX would take most of a GPU's memory, which tests of torch in the same process need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax", reason="needs jax: pip install 'quack-norm[jax]'")

import numpy as np
from jax import numpy as jnp

import quack_norm.jax as ours
from quack_norm.ops.softmax import reference
from quack_norm.ops.softmax.spec import SoftmaxFwdSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan
both = pytest.mark.parametrize("function", [ours.softmax, ours.log_softmax])

SHAPES = [(3, 1), (5, 3), (17, 31), (7, 1001), (3, 4095), (5, 4096), (300, 4096), (2, 3, 5, 264)]
SHAPES += [(3, 16384), (2, 50257), (1, 262144)]


def need_jax_tvm_ffi() -> None:
    """Skip where XLA cannot call kernels."""
    pytest.importorskip("jax_tvm_ffi", reason="needs jax-tvm-ffi: pip install 'quack-norm[jax]'")
    if jax.__version_info__ < (0, 9, 1):
        pytest.skip(f"jax {jax.__version__} is too old for jax-tvm-ffi: needs 0.9.1")


@pytest.fixture
def place(device: str) -> Any:
    """The JAX device that operands lie on; skips where JAX cannot reach the GPU."""
    if device == "cuda":
        need_jax_tvm_ffi()
    try:
        return jax.devices(device)[0]
    except RuntimeError as error:
        pytest.skip(f"jax {jax.__version__} has no platform {device}: {error}")


def to_jax(x: Tensor, place: Any) -> Any:
    """The same values; torch gives NumPy no bfloat16, but float32 holds it."""
    dtype = jnp.dtype(str(x.dtype).removeprefix("torch."))
    return jax.device_put(x.float().numpy().astype(dtype), place)


def to_torch(x: Any) -> Tensor:
    return torch.from_numpy(np.asarray(x).astype(np.float32)).to(getattr(torch, x.dtype.name))


def check_values(function: Any, x: Tensor, out: Tensor, place: Any, scale: float = 1.0) -> None:
    """The result within the bound, over the last axis.

    The baseline of a kernel is torch, as for calls from there. On the CPU the arithmetic is XLA's.
    """
    torchs = torch.log_softmax if function is ours.log_softmax else torch.softmax
    jaxs = jax.nn.log_softmax if function is ours.log_softmax else jax.nn.softmax
    baseline = torchs(x.float() * scale, -1)
    if place.platform == "cpu":
        baseline = to_torch(jaxs(to_jax(x.float() * scale, place)))
    assert_accurate(out, torchs(x.double() * scale, -1), baseline.to(out.dtype), name="out")


def check_gradient(
    function: Any, out: Tensor, dout: Tensor, dx: Tensor, scale: float = 1.0
) -> None:
    """The gradient, which is taken from the rounded result: one rounding, and those of a sum."""
    saved, dy = out.double(), dout.double()
    if function is ours.log_softmax:
        expected = (dy - saved.exp() * dy.sum(-1, keepdim=True)) * scale
    else:
        expected = saved * (dy - (dy * saved).sum(-1, keepdim=True)) * scale
    size = expected.abs().amax(-1, keepdim=True) + dy.abs().amax(-1, keepdim=True) * abs(scale)
    eps, tiny = torch.finfo(dx.dtype).eps, torch.finfo(dx.dtype).tiny
    bound = eps * expected.abs() + 16 * torch.finfo(F32).eps * size + tiny
    error = (dx.double() - expected).abs()
    assert (error <= bound).all(), float((error / bound).max())


def check(function: Any, x: Tensor, dout: Tensor, place: Any, **how: Any) -> None:
    out, pull = jax.vjp(functools.partial(function, **how), to_jax(x, place))
    (dx,) = pull(to_jax(dout, place))
    assert out.devices() == dx.devices() == {place}
    out, dx = to_torch(out), to_torch(dx)
    assert dx.dtype == x.dtype and out.dtype == dout.dtype
    check_values(function, x, out, place, how.get("scale", 1.0))
    check_gradient(function, out, dout, dx, how.get("scale", 1.0))


@both
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_values_and_gradients(function, shape, dtype, place) -> None:
    if place.platform == "cpu" and dtype != F32 and shape not in SHAPES[:4]:
        pytest.skip("XLA converts, then computes in float32: four shapes show it")
    x = random(shape, dtype, seed=1, scale=3)
    check(function, x, random(shape, dtype, seed=2), place)


@both
@pytest.mark.parametrize("scale", [0.125, -2.0])
def test_scale(function, scale: float, place) -> None:
    x, dout = random((5, 520), F32, seed=1), random((5, 520), F32, seed=2)
    check(function, x, dout, place, scale=scale)


@both
@pytest.mark.parametrize("given", [F32, BF16, F16])
@pytest.mark.parametrize("wanted", [F32, BF16, F16])
def test_dtype_converts_first(function, given, wanted, place) -> None:
    x, dout = random((4, 96), given, seed=1, scale=4), random((4, 96), wanted, seed=2)
    name = str(wanted).removeprefix("torch.")
    out, pull = jax.vjp(functools.partial(function, dtype=name), to_jax(x, place))
    (dx,) = pull(to_jax(dout, place))
    assert out.dtype == name and to_torch(dx).dtype == given
    check_values(function, x.to(wanted), to_torch(out), place)


@both
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_every_axis(function, axis: int, place) -> None:
    x, dout = random((3, 4, 5), F32, seed=1), random((3, 4, 5), F32, seed=2)
    out, pull = jax.vjp(lambda x: function(x, axis), to_jax(x, place))
    (dx,) = pull(to_jax(dout, place))
    x, out, dout, dx = (t.movedim(axis, -1) for t in (x, to_torch(out), dout, to_torch(dx)))
    check_values(function, x, out, place)
    check_gradient(function, out, dout, dx)


@both
def test_rows_that_are_not_finite(function, place) -> None:
    rows = [[1.0, NAN, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF], [-INF, 1.0, 2.0]]
    x = torch.tensor(rows).repeat(1, 40)
    check_values(function, x, to_torch(function(to_jax(x, place))), place)


@both
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4)])
def test_no_elements(function, shape, place) -> None:
    x = to_jax(torch.empty(shape, dtype=BF16), place)
    out, pull = jax.vjp(functools.partial(function, dtype=jnp.float32), x)
    (dx,) = pull(out)
    assert out.shape == dx.shape == shape
    assert (out.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16)


# --- Transformations ----------------------------------------------------------------------------


@both
def test_jit_and_vmap(function, place) -> None:
    """Kernels give the same bits: a row does not depend on those that come with it."""
    values = random((2, 3, 4096), BF16, seed=1)
    x = to_jax(values, place)
    results = [
        function(x),
        jax.jit(function)(x),
        jax.vmap(function)(x),
        jax.vmap(function, in_axes=1, out_axes=1)(x),
        jnp.stack([function(row) for row in x.reshape(-1, 4096)]).reshape(x.shape),
    ]
    with jax.disable_jit():
        results.append(function(x))
    for result in results:
        check_values(function, values, to_torch(result), place)
        if place.platform != "cpu":
            assert_bitwise(to_torch(result), to_torch(results[0]))


@both
def test_vmap_of_gradients(function, place) -> None:
    """Only one operand of the backward is mapped."""
    x = random((5, 300), F32, seed=1)
    douts = random((4, 5, 300), F32, seed=2)
    out, pull = jax.vjp(function, to_jax(x, place))
    (mapped,) = jax.vmap(pull, in_axes=1, out_axes=1)(to_jax(douts.transpose(0, 1), place))
    mapped = to_torch(mapped).transpose(0, 1)
    for dout, dx in zip(douts, mapped, strict=True):
        check_gradient(function, to_torch(out), dout, dx)
        if place.platform != "cpu":
            assert_bitwise(to_torch(pull(to_jax(dout, place))[0]), dx)


@both
def test_shapes_without_arrays(function) -> None:
    x = jax.ShapeDtypeStruct((3, 5, 7), jnp.float16)
    found = jax.eval_shape(functools.partial(function, dtype=jnp.float32), x)
    assert (found.shape, found.dtype) == ((3, 5, 7), jnp.float32)
    gradient = jax.grad(lambda x: function(x, 1).astype(jnp.float32).sum())
    found = jax.eval_shape(gradient, x)
    assert (found.shape, found.dtype) == ((3, 5, 7), jnp.float16)


@both
def test_control_flow_and_checkpoint(function, place) -> None:
    """A scan over rematerialised steps against a loop; only XLA on the CPU may round otherwise."""
    values = random((6, 512), F32, seed=1)

    def scanned(x: Any) -> Any:
        step = jax.checkpoint(lambda c, _: (function(c) + x, None))
        return (jax.lax.scan(step, x, length=3)[0] ** 2).sum()

    def looped(x: Any, function: Any = function) -> Any:
        c = x
        for _ in range(3):
            c = function(c) + x
        return (c**2).sum()

    x = to_jax(values, place)
    found, loop = (to_torch(jax.jit(jax.grad(f))(x)) for f in (scanned, looped))
    torchs = torch.log_softmax if function is ours.log_softmax else torch.softmax
    exact = values.double().requires_grad_()
    (right,) = torch.autograd.grad(looped(exact, lambda c: torchs(c, -1)), exact)
    assert_accurate(found, right, loop)
    if place.platform != "cpu":
        assert_bitwise(found, loop)


@both
def test_shard_map(function, place) -> None:
    """Each device has its rows."""
    devices = np.array(jax.devices(place.platform))
    rows = jax.sharding.PartitionSpec("rows")
    mesh = jax.sharding.Mesh(devices, ("rows",))
    x = random((3 * len(devices), 264), F32, seed=1)
    run = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows)
    found = jax.jit(run)(to_jax(x, jax.sharding.NamedSharding(mesh, rows)))
    assert found.devices() == set(devices)
    check_values(function, x, to_torch(found), place)


def test_a_symbolic_number_of_rows() -> None:
    """Exported for the CPU, where no kernel has to be registered."""
    from jax import export

    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 24), jnp.float32)
    exported = export.export(jax.jit(ours.softmax), platforms=["cpu"])(x)
    assert exported.out_avals[0].shape == (rows, 24)


@pytest.mark.usefixtures("cuda")
def test_many_calls_in_one_program(place) -> None:
    """Enough of them that XLA records them into a CUDA graph; replays see new values."""

    def chain(x: Any) -> Any:
        for step in range(8):  # sums alone: nothing that XLA could round otherwise when it fuses
            x = ours.softmax(x, scale=step + 1) + x
        return x

    program = jax.jit(chain)
    for seed in range(5):
        x = to_jax(random((33, 4096), F32, seed=seed), place)
        expected = to_torch(chain(x))
        for _ in range(2):
            assert_bitwise(to_torch(program(x)), expected)


@pytest.mark.usefixtures("cuda")
def test_the_bits_are_those_of_torch(place) -> None:
    """The same kernels, whichever framework calls them."""
    from quack_norm.ops.softmax.api import softmax

    for shape in ((5, 264), (70, 1001), (300, 4096), (9, 50257)):
        x, dout = random(shape, BF16, seed=1), random(shape, BF16, seed=2)
        leaf = x.cuda().requires_grad_()
        y = softmax(leaf)
        y.backward(dout.cuda())
        out, pull = jax.vjp(ours.softmax, to_jax(x, place))
        assert_bitwise(to_torch(out), y.detach().cpu(), name=f"out of {shape}")
        assert_bitwise(to_torch(pull(to_jax(dout, place))[0]), leaf.grad.cpu(), name="dx")


@pytest.mark.usefixtures("cuda")
def test_every_gpu(place) -> None:
    """A kernel runs on whichever device its operands lie on."""
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    x = random((70, 4096), BF16, seed=1)
    expected = to_torch(ours.softmax(to_jax(x, devices[0])))
    for each in devices[1:]:
        found = ours.softmax(to_jax(x, each))
        assert found.devices() == {each}
        assert_bitwise(to_torch(found), expected)


# --- Errors -------------------------------------------------------------------------------------


@both
def test_wrong_operands(function) -> None:
    x = jnp.ones((3, 4))
    with pytest.raises(DTypeError, match=r"x is ndarray: it must be a jax\.Array"):
        function(np.ones(4))
    with pytest.raises(DTypeError, match=r"x is int32: it must be one of float32, "):
        function(x.astype(jnp.int32))
    with pytest.raises(DTypeError, match="dtype is int8: it must be one of float32, "):
        function(x, dtype=jnp.int8)
    with pytest.raises(DTypeError, match="axis is tuple: it must be an int"):
        function(x, (0, 1))
    with pytest.raises(DTypeError, match="scale is .*: it must be a Python number"):
        jax.jit(lambda x, scale: function(x, scale=scale))(x, 2.0)
    with pytest.raises(ShapeError, match="axis is 2, x has 2 dimensions: it must be -2 to 1"):
        function(x, 2)
    with pytest.raises(ShapeError, match="x has no dimensions"):
        function(jnp.float32(1))
    with pytest.raises(UnsupportedError, match=r"x\.shape\[0\] is 262145; rows have at most"):
        jax.eval_shape(function, jax.ShapeDtypeStruct((262145,), jnp.float32))
    with pytest.raises(UnsupportedError, match=r"x has 2147483648 rows; kernels count at most"):
        jax.eval_shape(function, jax.ShapeDtypeStruct((2**31, 2), jnp.float32))


@both
def test_other_derivatives_raise(function) -> None:
    x = jnp.ones((3, 4))
    inner = jax.grad(lambda x: (function(x) ** 2).sum())
    with pytest.raises(UnsupportedError, match="second derivative"):
        jax.grad(lambda x: inner(x).sum())(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(function, (x,), (x,))


def test_other_platforms_are_refused() -> None:
    """No slower code in place of a kernel."""
    traced = jax.jit(ours.softmax).trace(jax.ShapeDtypeStruct((3, 4), jnp.float32))
    with pytest.raises(NotImplementedError, match="quack_norm_softmax_fwd"):
        traced.lower(lowering_platforms=("rocm",))


# --- What XLA is told to call -------------------------------------------------------------------


def lowered(function: Any, x: Any) -> str:
    return jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def cross(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Lower for a GPU that is not here."""
    need_jax_tvm_ffi()
    if device != "cpu":
        pytest.skip("stand-ins are for the CPU")
    monkeypatch.setenv("QUACK_ARCH", "sm90")


@pytest.mark.usefixtures("cross")
def test_a_program_for_cuda_calls_the_kernels() -> None:
    x = jax.ShapeDtypeStruct((2, 8, 264), jnp.bfloat16)
    text = lowered(jax.grad(lambda x: (ours.softmax(x, scale=0.5) ** 2).sum()), x)
    for name in ("quack_norm.softmax_fwd_bf16_n264.", "quack_norm.softmax_bwd_bf16_n264."):
        assert text.count(f"custom_call @{name}") == 1
    assert text.count("scale = 5.000000e-01") == 2 and "tensor<16x264xbf16>" in text
    assert text == lowered(jax.grad(lambda x: (ours.softmax(x, scale=0.5) ** 2).sum()), x)


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACK_ARCH", "sm80")
    with pytest.raises(ArchError, match="sm80"):
        lowered(ours.softmax, jax.ShapeDtypeStruct((3, 4), jnp.float32))


@pytest.mark.usefixtures("cross")
def test_jax_tvm_ffi_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", None)
    with pytest.raises(ImportError, match=r"pip install 'quack-norm\[jax\]'"):
        lowered(ours.softmax, jax.ShapeDtypeStruct((3, 44), jnp.float32))


class Kernels:
    """Stand-ins for compiled kernels, called by XLA on the CPU as kernels are on CUDA."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, Any]] = []

    def load(self, module: str, spec: Any, config: Any, target: Any) -> Any:
        import tvm_ffi

        self.loaded.append((spec, config))

        def forward(x: Any, out: Any, scale: float) -> None:
            x, out = self._take(spec, x, out)
            out.copy_(reference.forward(x, spec.log, scale, out.dtype))

        def backward(out: Any, dout: Any, dx: Any, scale: float) -> None:
            out, dout, dx = self._take(spec, out, dout, dx)
            dx.copy_(reference.backward(out, dout, spec.log, scale, dx.dtype))

        return tvm_ffi.convert(forward if isinstance(spec, SoftmaxFwdSpec) else backward)

    def _take(self, spec: Any, *operands: Any) -> list[Tensor]:
        tensors = [torch.from_dlpack(operand) for operand in operands]
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.dim() == spec.rank == 2
            assert tensor.shape == tensors[0].shape and tensor.shape[1] == spec.n
            steps = [tensor.stride(0) * tensor.element_size()] if len(tensor) > 1 else []
            assert all(each % spec.align == 0 for each in (tensor.data_ptr(), *steps))
        assert spec.in_phase == (len({tensor.dtype for tensor in tensors}) == 1)
        assert [str(t.dtype).removeprefix("torch.") for t in tensors] == (
            [spec.x, spec.out]
            if isinstance(spec, SoftmaxFwdSpec)
            else [spec.out, spec.dout, spec.dx]
        )
        return tensors


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, cross: None) -> Kernels:
    import jax_tvm_ffi

    made = Kernels()
    register = functools.partial(jax_tvm_ffi.register_ffi_target, pass_owned_tensor=True)
    monkeypatch.setattr(jax_tvm_ffi, "register_ffi_target", register)
    monkeypatch.setattr(ours, "PLATFORM", "cpu")
    monkeypatch.setattr(ours.cache, "load", made.load)
    # XLA takes a name once a process, and each test has stand-ins of its own.
    monkeypatch.setattr(
        ours.cache, "key", lambda *_: types.SimpleNamespace(digest=uuid.uuid4().hex)
    )
    monkeypatch.setattr(ours, "_register", functools.cache(ours._register.__wrapped__))
    return made


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(40,), (6, 40), (2, 3, 33), (3, 4096)])
def test_what_kernels_are_handed(kernels: Kernels, shape, out_dtype, log: bool) -> None:
    cpu = jax.devices("cpu")[0]
    x, dout = random(shape, BF16, seed=1), random(shape, out_dtype, seed=2)
    call = ours.Call(log, 0.5, "bfloat16", str(out_dtype).removeprefix("torch."))
    out = jax.jit(functools.partial(ours._forward_kernel, call=call))(to_jax(x, cpu))
    expected = reference.forward(x, log, 0.5, out_dtype)
    assert_bitwise(to_torch(out), expected)
    backward = jax.jit(functools.partial(ours._backward_kernel, call=call))
    dx = backward(out, to_jax(dout, cpu))
    assert_bitwise(to_torch(dx), reference.backward(expected, dout, log, 0.5, BF16))
    assert [spec.scaled for spec, _ in kernels.loaded] == [True, True]


def test_a_kernel_is_registered_once(kernels: Kernels) -> None:
    call = ours.Call(False, 1.0, "float32", "float32")
    for rows in (1, 2, 3):
        jax.jit(functools.partial(ours._forward_kernel, call=call))(jnp.ones((rows, 52)))
    assert len(kernels.loaded) == 1


def test_few_rows_get_the_kernel_of_one_tile(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours.driver, "current_device", lambda: 0)
    monkeypatch.setattr(ours.occupancy, "resident_clusters", lambda *a, **k: 3)
    call = ours.Call(False, 1.0, "bfloat16", "bfloat16")
    for rows in (3, 4):
        x = jnp.ones((rows, 4096), jnp.bfloat16)
        jax.jit(functools.partial(ours._forward_kernel, call=call))(x)
    assert [config.unroll > 0 for _, config in kernels.loaded] == [False, True]
    assert len({config.tiling(spec) for spec, config in kernels.loaded}) == 1


@pytest.mark.usefixtures("cross")
def test_the_compiled_kernel_takes_what_xla_hands_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks reject the one thing that is wrong here: the operands are not on a GPU."""
    monkeypatch.setattr(ours, "PLATFORM", "cpu")
    monkeypatch.setattr(ours, "_register", functools.cache(ours._register.__wrapped__))
    call = ours.Call(False, 1.0, "bfloat16", "float32")
    run = jax.jit(functools.partial(ours._forward_kernel, call=call))
    with pytest.raises(Exception, match="cuda") as caught:
        jax.block_until_ready(run(jnp.ones((3, 136), jnp.bfloat16)))
    assert "input" in str(caught.value) and "device" in str(caught.value)


# --- Importing ----------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """Which of these modules a new interpreter has after running some code."""
    heavy = ("jax", "torch", "cutlass", "tvm_ffi")
    script = f"import sys\n{code}\nprint(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_torch_and_jax_do_without_each_other() -> None:
    assert "jax" not in loaded_by("from quack_norm import softmax, RMSNorm")
    on_the_cpu = (
        "import os; os.environ['JAX_PLATFORMS'] = 'cpu'\n"
        "import jax, quack_norm.jax as ours\n"
        "jax.grad(lambda x: ours.softmax(x)[0])(jax.numpy.ones(8))"
    )
    assert loaded_by(on_the_cpu) == {"jax"}


def test_the_architecture_is_that_of_the_gpu(cuda: str, place) -> None:
    found = "".join(place.compute_capability.split("."))
    assert arch.detect().capability == (int(found[:-1]), int(found[-1]))
