"""What the compiled launcher checks before CUDA is touched: tuples of operands included."""

import re
from typing import Any

import pytest

from quack_core import arch
from quack_core.gemm.epilogue import AddC, AddVector, RowReduce, Scale
from quack_core.jit.compile import compile_kernel
from quack_core.testing.fake_cuda import fake_cuda, rejection
from quack_gemm.config import GemmConfig, SplitK, SumConfig
from quack_gemm.spec import GemmSpec, SumSpec

B = "bfloat16"


@pytest.fixture(scope="module")
def launcher() -> Any:
    spec = GemmSpec(B, B, B, epilogue=(Scale(), AddVector(B), AddC(B), RowReduce("max")))
    config = GemmConfig(128, 128, 1, 1)
    return compile_kernel("quack_gemm.sm90.kernel", spec, config, arch.SM90).function


def operands(**changed: Any) -> tuple[Any, ...]:
    """Arguments that fit, but for what is changed."""
    given = {
        "a": fake_cuda((64, 72), B),
        "b": fake_cuda((72, 128), B, strides=(1, 72)),
        "d": fake_cuda((64, 128), B),
        "bias": fake_cuda((128,), B),
        "c": fake_cuda((64, 128), B, strides=(131, 1)),
        "alpha": 1.0,
        "maxima": fake_cuda((64, 1), "float32"),
        "resident": 132,
    } | changed
    epilogue = (given["alpha"], given["bias"], given["c"])
    first = (given["a"], given["b"], (given["d"],), epilogue, (given["maxima"],))
    return *first, given["resident"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": fake_cuda((64, 64), B)}, r"a.shape\[1\]|b.shape\[0\]"),
        ({"b": fake_cuda((72, 128), B)}, r"b.strides\[0\]"),
        ({"d": fake_cuda((64, 120), B)}, r"outputs\[0\].shape\[1\]"),
        ({"d": fake_cuda((60, 128), B)}, r"outputs\[0\].shape\[0\]"),
        ({"d": fake_cuda((64, 128), "float32")}, r"outputs\[0\].*expected dtype=bfloat16"),
        ({"d": fake_cuda((64, 128), B, strides=(132, 1))}, r"outputs\[0\].strides\[0\]"),
        ({"bias": fake_cuda((120,), B)}, r"operands\[1\].shape\[0\]"),
        ({"c": fake_cuda((64, 128), "float32")}, r"operands\[2\].*expected dtype=bfloat16"),
        ({"c": fake_cuda((128, 64), B, strides=(1, 128))}, r"operands\[2\]"),
        ({"alpha": None}, r"operands\[0\]|argument #3"),
        ({"maxima": fake_cuda((60, 1), "float32")}, r"reduced\[0\].shape\[0\]"),
        ({"a": fake_cuda((64, 72), B, address=0x7F0000000008)}, r"a.*align|align.*a"),
        ({"resident": None}, r"argument #5"),  # last: all that comes before was accepted
    ],
)
def test_what_is_refused(launcher: Any, changed: dict[str, Any], message: str) -> None:
    error = rejection(launcher, *operands(**changed))
    assert isinstance(error, (ValueError, TypeError))
    assert re.search(message, str(error), re.DOTALL), str(error)


@pytest.fixture(scope="module")
def of_parts() -> tuple[Any, Any]:
    """Of a product whose parts go to memory, and of what adds them."""
    spec = GemmSpec(B, B, B, epilogue=(AddVector(B),))
    config = GemmConfig(128, 128, 1, 1, split_k=5, split_mode=SplitK.SEPARATE)
    kernels = (
        ("quack_gemm.sm90.kernel", config.product(spec), config),
        ("quack_gemm.part_sums", SumSpec(spec), SumConfig()),
    )
    product, behind = (compile_kernel(*one, arch.SM90).function for one in kernels)
    return product, behind


def test_what_is_refused_of_parts(of_parts: tuple[Any, Any]) -> None:
    product, behind = of_parts
    a, b = fake_cuda((64, 72), B), fake_cuda((72, 130), B, strides=(1, 72))
    parts, bias = fake_cuda((5, 64, 132), "float32"), fake_cuda((130,), B)
    d = fake_cuda((64, 130), B, strides=(136, 1))
    for memory, message in (
        (fake_cuda((5, 64, 132), B), "expected dtype=float32"),
        (fake_cuda((5, 64, 130), "float32"), r"strides\[1\]"),
        (parts, "argument #5"),  # accepted, and then there is no number of clusters
    ):
        error = rejection(product, a, b, (memory,), None, None, None)
        assert re.search(message, str(error), re.DOTALL), str(error)
    for given, message in (
        ((fake_cuda((5, 64, 130), "float32"), (d,), (bias,)), r"parts.strides\[1\]"),
        ((parts, (d,), (fake_cuda((132,), B),)), r"operands\[0\].shape\[0\]"),
        ((parts, (fake_cuda((64, 130), B),), (bias,)), r"outputs\[0\].strides\[0\]"),
        ((parts, (d,), None), r"operands|argument #2"),
    ):
        error = rejection(behind, *given)
        assert re.search(message, str(error), re.DOTALL), str(error)
