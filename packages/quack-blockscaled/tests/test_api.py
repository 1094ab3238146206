"""The public functions: what they take, what is built, what torch sees of them."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quack_blockscaled import (
    FP8_BLOCK_1X128,
    FP8_BLOCK_128X128,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    dequantize,
    operators,
    quantize,
    quantize_both,
    record,
    reference,
    supports,
)
from quack_blockscaled.api import OPERATORS
from quack_blockscaled.formats import E2M1, FLOAT32, FORMATS, UE4M3
from quack_core import arch
from quack_core.errors import ArchError, DeviceError, DTypeError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MINE = BlockFormat("mine", E2M1, UE4M3, (4, 8), per_tensor=True)
ALL = [*FORMATS.values(), MINE]
NAME = {"ids": lambda each: each.name}

# --- numbers are the reference's


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("format", ALL, **NAME)
def test_they_are_the_reference(format: BlockFormat, dim: int, dtype: torch.dtype) -> None:
    x = random((128, 256), dtype, "cpu", seed=1)
    scale = torch.tensor(0.75) if format.per_tensor else None
    for how in ({}, {"element_rounding": "stochastic", "seed": 3}):
        found = quantize(x, format, dim=dim, per_tensor_scale=scale, **how)
        wanted = reference.quantize(x, format, dim=dim, per_tensor_scale=scale, **how)
        assert_bitwise(found.values, wanted[0])
        assert_bitwise(found.scales, wanted[1])
        for out in (None, F32):
            numbers = reference.dequantize(
                *wanted[:2], format, dim=dim, per_tensor_scale=scale, dtype=out or dtype
            )
            assert_bitwise(dequantize(found, out), numbers)


@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
def test_rules_reach_the_reference(rule: str) -> None:
    x = random((16, 64), BF16, "cpu", seed=1)
    found = quantize(x, MXFP4, scale_rounding=rule)
    assert_bitwise(found.scales, reference.quantize(x, MXFP4, scale_rounding=rule)[1])


def test_dimensions_count_from_either_end() -> None:
    x = random((32, 64, 32), BF16, "cpu", seed=1)
    for dim in range(3):
        one, other = (quantize(x, MXFP8_E4M3, dim=each) for each in (dim, dim - 3))
        assert one.dim == other.dim == dim - 3
        assert_bitwise(one.values, other.values)
        assert_bitwise(one.scales, other.scales)


def test_operands_of_any_strides() -> None:
    x = random((64, 6, 128), BF16, "cpu", seed=1)
    for view in (x.transpose(0, 2), x[:, ::2, 32:96], x[:, :1].expand(-1, 4, -1)):
        found, wanted = quantize(view, MXFP4), quantize(view.contiguous(), MXFP4)
        assert_bitwise(found.values, wanted.values)
        assert_bitwise(found.scales, wanted.scales)


# --- the scale of the whole tensor


def test_absent_means_exactly_one_KQ_11() -> None:
    x = random((4, 32), BF16, "cpu", seed=1)
    absent, one = quantize(x, NVFP4), quantize(x, NVFP4, per_tensor_scale=1.0)
    assert absent.tensor_scale is not None
    assert (absent.tensor_scale.dtype, absent.tensor_scale.item()) == (F32, 1.0)
    assert_bitwise(absent.values, one.values)
    assert_bitwise(absent.scales, one.scales)


@pytest.mark.parametrize("value", [2.0**-20, 0.1, 3e38])
def test_given_it_is_stored_as_it_is_KQ_11(value: float) -> None:
    x = random((4, 32), BF16, "cpu", seed=1)
    tensors = [torch.tensor(value), torch.tensor([value]), torch.tensor([[value]])]
    found = [quantize(x, NVFP4, per_tensor_scale=each) for each in (value, *tensors)]
    for each in found:
        assert_bitwise(each.tensor_scale, torch.tensor(value))
        assert_bitwise(each.values, found[0].values)
        assert_bitwise(each.dequantize(), found[0].dequantize())


@pytest.mark.parametrize(
    ("format", "scale", "error", "message"),
    [
        (MXFP4, 1.0, UnsupportedError, "per_tensor_scale was given; mxfp4 has none"),
        (NVFP4, 0.0, UnsupportedError, "per_tensor_scale is 0.0; it must be a positive number"),
        (NVFP4, -1, UnsupportedError, "per_tensor_scale is -1.0; it must be a positive number"),
        (NVFP4, math.inf, UnsupportedError, "per_tensor_scale is inf; it must be a positive"),
        (NVFP4, math.nan, UnsupportedError, "per_tensor_scale is nan; it must be a positive"),
        (NVFP4, torch.ones(2), ShapeError, r"has the shape \(2,\): it must be \(\)"),
        (NVFP4, torch.ones((), dtype=F16), DTypeError, "is float16: it must be float32"),
        (NVFP4, torch.ones((), device="meta"), DeviceError, "is on meta, the values on cpu"),
    ],
)
def test_what_it_may_not_be_KQ_11(
    format: BlockFormat, scale: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantize(torch.zeros(4, 32), format, per_tensor_scale=scale)


# --- what is refused


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("format", "shape", "dim", "message"),
    [
        (MXFP4, (4, 16), -1, r"x.shape\[-1\] is 16: with mxfp4 .* of 32; pad it with zeros to 32"),
        (MXFP4, (4, 48), -1, r"x.shape\[-1\] is 48: with mxfp4 .* of 32; pad it with zeros to 64"),
        (NVFP4, (4, 40), 1, r"x.shape\[-1\] is 40: with nvfp4 .* of 16; pad it with zeros to 48"),
        (MXFP4, (33, 4), 0, r"x.shape\[-2\] is 33: with mxfp4 .* of 32; pad it with zeros to 64"),
        (FP8_BLOCK_1X128, (4, 64), -1, r"x.shape\[-1\] is 64: .* of 128; pad it with zeros to 128"),
        (FP8_BLOCK_128X128, (4, 128), -1, r"x.shape\[-2\] is 4: .* of 128; pad it with zeros"),
        (MXFP4, (4, 32), 2, r"dim is 2: x has 2 dimensions"),
        (MXFP4, (4, 32), -3, r"dim is -3: x has 2 dimensions"),
        (MXFP4, (), -1, r"dim is -1: x has 0 dimensions"),
    ],
)
def test_blocks_that_are_not_whole_KQ_10(
    format: BlockFormat, shape: tuple[int, ...], dim: int, message: str, where: str
) -> None:
    with pytest.raises(ShapeError, match=f"quantize: {message}"):
        quantize(torch.zeros(shape, device=where), format, dim=dim)


@pytest.mark.parametrize(
    ("x", "format", "how", "error", "message"),
    [
        ([1.0], MXFP4, {}, DTypeError, "x is list: it must be a tensor"),
        (torch.zeros(32, dtype=torch.int8), MXFP4, {}, DTypeError, "x is int8: it must be one of"),
        (torch.zeros(32).double(), MXFP4, {}, DTypeError, "x is float64: .* convert with .to()"),
        (torch.zeros(32), "mxfp4", {}, DTypeError, "format is str: it must be a BlockFormat"),
        (
            torch.zeros(32),
            MXFP4,
            {"scale_rounding": "up"},
            UnsupportedError,
            "scale_rounding is 'up'; it must be one of rceil, floor, ceil, even",
        ),
        (
            torch.zeros(32),
            NVFP4,
            {"scale_rounding": "floor"},
            UnsupportedError,
            "scale_rounding is 'floor', scales of nvfp4 are ue4m3",
        ),
        (
            torch.zeros(32),
            MXFP4,
            {"element_rounding": "nearest"},
            UnsupportedError,
            "element_rounding is 'nearest'; it must be one of nearest-even, stochastic",
        ),
        (
            torch.zeros(32),
            MXFP4,
            {"element_rounding": "stochastic"},
            UnsupportedError,
            "element_rounding is 'stochastic', seed is None; 'stochastic' needs a seed",
        ),
        (
            torch.zeros(32),
            MXFP4,
            {"seed": 3},
            UnsupportedError,
            "element_rounding is 'nearest-even', seed is 3; .*'nearest-even' has none",
        ),
        (
            torch.zeros(32),
            MXFP4,
            {"element_rounding": "stochastic", "seed": -1},
            UnsupportedError,
            r"seed is -1; it must be 0 to 2\*\*63 - 1",
        ),
    ],
)
def test_what_is_refused(
    x: Any, format: Any, how: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"quantize: {message}"):
        quantize(x, format, **how)
    if isinstance(x, Tensor):
        with pytest.raises(error, match=f"quantize: {message}"):
            quantize(x.to("meta"), format, **how)


def test_dequantize_takes_a_record_and_dtypes_of_numbers() -> None:
    x = quantize(torch.zeros(32), MXFP4)
    with pytest.raises(DTypeError, match="x is Tensor: it must be a BlockScaledTensor"):
        dequantize(x.values)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="dequantize: dtype is float64: it must be one of"):
        dequantize(x, torch.float64)


def test_a_gradient_is_refused_not_lost() -> None:
    x = torch.ones(4, 128, requires_grad=True)
    for format in (MXFP8_E4M3, FP8_BLOCK_1X128):
        numbers = quantize(x, format).dequantize()
        with pytest.raises(UnsupportedError, match="a gradient was asked for.*no_grad"):
            numbers.sum().backward()
        with torch.no_grad():
            assert not quantize(x, format).dequantize().requires_grad


# --- what is built


@pytest.mark.parametrize("format", ALL, **NAME)
def test_what_is_built(format: BlockFormat) -> None:
    built = {
        (op, where): supports(op, where, format)
        for op in OPERATORS
        for where in ("cpu", "sm90", "sm_100a", "10.3", arch.SM120)
    }
    wanted = {("quantize", "cpu"), ("dequantize", "cpu")}
    if format != MINE:
        kernels = ("sm90", "sm_100a", "10.3", arch.SM120)
        wanted |= {(op, where) for op in ("quantize", "dequantize") for where in kernels}
    if format == FP8_BLOCK_1X128:
        products = ("matmul", "matmul_grouped", "linear")
        wanted |= {(op, where) for op in products for where in ("cpu", "sm90")}
    assert {key for key, found in built.items() if found} == wanted


def test_questions_that_make_no_sense() -> None:
    with pytest.raises(UnsupportedError, match="'divide' is unknown; known: quantize, dequantize"):
        supports("divide", "cpu", MXFP4)
    with pytest.raises(ArchError, match="'sm80' is unknown"):
        supports("quantize", "sm80", MXFP4)
    with pytest.raises(DTypeError, match="format is str: it must be a BlockFormat"):
        supports("quantize", "cpu", "mxfp4")  # type: ignore[arg-type]


def test_gpus_have_implementations() -> None:
    for name in ("quantize_fwd", "quantize_both_fwd", "dequantize_fwd"):
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has(f"quack_blockscaled::{name}", "CUDA")


def test_a_gpu_has_no_kernel_and_says_so(cuda: str) -> None:
    x = torch.zeros(4, 32, device=cuda)
    with pytest.raises(UnsupportedError, match=r"quantize: there is no kernel for mine.*\.cpu\(\)"):
        quantize(x, MINE)
    q = quantize(torch.zeros(4, 32), MINE).to(cuda)
    with pytest.raises(UnsupportedError, match=r"dequantize: .* no kernel for mine.*\.cpu\(\)"):
        q.dequantize()


# --- both directions


@pytest.mark.parametrize("format", ALL, **NAME)
def test_both_are_two_calls(format: BlockFormat) -> None:
    x = random((2, 128, 256), BF16, "cpu", seed=1)
    scale = 0.75 if format.per_tensor else None
    found = quantize_both(x, format, per_tensor_scale=scale)
    for each, dim in zip(found, (-1, -2), strict=True):
        wanted = quantize(x, format, dim=dim, per_tensor_scale=scale)
        assert (each.dim, each.dtype, each.shape) == (dim, BF16, x.shape)
        assert_bitwise(each.values, wanted.values)
        assert_bitwise(each.scales, wanted.scales)
    turned = found[1].mT
    assert turned.values.is_contiguous() and turned.scales.is_contiguous()
    fake = quantize_both(x.to("meta"), format, per_tensor_scale=scale)
    for each, other in zip(found, fake, strict=True):
        assert each.values.stride() == other.values.stride()
        assert each.scales.stride() == other.scales.stride()


def test_both_follow_the_rule() -> None:
    x = random((32, 64), BF16, "cpu", seed=1)
    rows, columns = quantize_both(x, MXFP4, scale_rounding="floor")
    assert_bitwise(rows.scales, quantize(x, MXFP4, scale_rounding="floor").scales)
    assert_bitwise(columns.scales, quantize(x, MXFP4, dim=0, scale_rounding="floor").scales)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32,), r"quantize_both: x has 1 dimension: it must have 2"),
        ((33, 32), r"quantize_both: x.shape\[-2\] is 33: with mxfp4 .* pad it with zeros to 64"),
        ((32, 33), r"quantize_both: x.shape\[-1\] is 33: with mxfp4 .* pad it with zeros to 64"),
    ],
)
def test_both_take_whole_blocks_KQ_10(shape: tuple[int, ...], message: str, where: str) -> None:
    with pytest.raises(ShapeError, match=message):
        quantize_both(torch.zeros(shape, device=where), MXFP4)


# --- torch


# torch's own comparisons know no arithmetic on 8-bit floats: they see a format without them.
PLAIN = BlockFormat("plain", E2M1, FLOAT32, (4, 8), per_tensor=True)
NO_COMPARISON = ("test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("format", [PLAIN, *ALL], **NAME)
def test_opcheck(format: BlockFormat) -> None:
    which = {} if format == PLAIN else {"test_utils": NO_COMPARISON}
    check = functools.partial(torch.library.opcheck, **which)
    x = random((128, 256), BF16, "cpu", seed=1)
    scale = torch.tensor(0.5) if format.per_tensor else None
    text = record.text(format)
    for how in (("nearest-even", None), ("stochastic", 5)):
        check(operators.quantize_fwd, (x, scale, text, -2, "rceil", *how))
    values, scales, _ = reference.quantize(x, format, dim=-2, per_tensor_scale=scale)
    check(operators.quantize_both_fwd, (x, scale, text, "rceil"))
    check(operators.dequantize_fwd, (values, scales, scale, text, -2, BF16))


@pytest.mark.parametrize("format", ALL, **NAME)
def test_a_format_survives_as_text(format: BlockFormat) -> None:
    assert record.parse(record.text(format)) == format
    assert record.read(record.of(format)) == format


def test_compiled_once_for_all_sizes_and_seeds() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(x: Tensor, seed: int) -> Tensor:
        return quantize(x, NVFP4, element_rounding="stochastic", seed=seed).dequantize()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows, seed in ((8, 3), (24, 5), (40, 7)):
        x = random((rows, 64), BF16, "cpu", seed=rows)
        assert_bitwise(compiled(x, seed), step(x, seed))
    assert len(graphs) == 1


def test_fake_tensors_on_a_gpu_that_is_not_there() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 64, device="cuda", dtype=F16)
        found = quantize(x, NVFP4)
        assert (found.device.type, tuple(found.scales.shape)) == ("cuda", (4, 4))
        assert (found.dequantize().device.type, found.dequantize().dtype) == ("cuda", F16)
