"""What the compiled launcher checks before CUDA is touched: tuples of operands included."""

import re
from typing import Any

import pytest

from quack_core import arch
from quack_core.gemm.epilogue import AddC, AddVector, RowReduce, Scale
from quack_core.jit.compile import compile_kernel
from quack_core.testing.fake_cuda import fake_cuda, rejection
from quack_gemm.config import GemmConfig
from quack_gemm.spec import GemmSpec

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
