"""Symbolic operands of the kernels: what may be free, and what the compiler may count on."""

from typing import Any

from cutlass import Float32, Int32

from quack_core.gemm import epilogue as epi
from quack_core.gemm.epilogue import Kind
from quack_core.jit.compile import to_cute
from quack_core.jit.dsl import make_fake_tensor, sym_int, sym_int64

from .config import GemmConfig, SplitK
from .spec import GemmSpec, SumSpec

ALIGN = 16
"""Bytes that TMA wants addresses and strides to be multiples of."""


def arguments(spec: GemmSpec, config: GemmConfig) -> tuple:
    """Symbolic operands of the launch function, all but the stream."""
    batch, m, n, k = (sym_int() for _ in range(4))
    cols = sym_int() if spec.gated or spec.doubled else n  # of D

    def matrix(dtype: str, shape: tuple, major: str, batched: bool) -> Any:
        element = to_cute(dtype)
        per_16 = ALIGN * 8 // element.width
        outer = sym_int64(divisibility=per_16)
        stride = (outer, 1) if major == "row" else (1, outer)
        if batched:
            shape, stride = (batch, *shape), (sym_int64(divisibility=per_16), *stride)
        return make_fake_tensor(element, shape, stride=stride, assumed_align=ALIGN)

    def operand(one: epi.Operand) -> Any:
        if one.kind == Kind.SCALAR:
            return Float32(0)
        element = to_cute(one.dtype)
        align = element.width // 8
        if one.kind in (Kind.TILE, Kind.PAIRS):
            stride = (sym_int64(), 1)
            shape = (m, {Kind.TILE: n, Kind.PAIRS: cols}[one.kind])
            if one.batched:
                shape, stride = (batch, *shape), (sym_int64(), *stride)
            return make_fake_tensor(element, shape, stride=stride, assumed_align=align)
        shape = {Kind.ROW: (n,), Kind.COLUMN: (m,)}.get(one.kind, (1,))
        stride = (1,)
        if one.batched:
            shape, stride = (batch, *shape), (sym_int64(), 1)
        return make_fake_tensor(element, shape, stride=stride, assumed_align=align)

    def partials(one: epi.Vector) -> Any:
        shape = (m if one.kind == Kind.COLUMN else n, sym_int())
        stride = (1, sym_int64()) if config.down(one) else (sym_int64(), 1)
        if spec.batched:
            shape, stride = (batch, *shape), (sym_int64(), *stride)
        return make_fake_tensor(Float32, shape, stride=stride, assumed_align=4)

    outputs = tuple(
        matrix(dtype, (m, n if ratio == (1, 1) else cols), spec.d_major, spec.batched)
        for dtype, ratio in zip(spec.outputs, spec.ratios, strict=True)
    )
    if config.split_mode == SplitK.SEPARATE:
        outputs = (_parts(spec),)
    return (
        matrix(spec.a, (m, k), spec.a_major, spec.a_batched),
        matrix(spec.b, (k, n), spec.b_major, spec.b_batched),
        outputs,
        tuple(operand(one) for one in epi.operands(spec.epilogue)) or None,
        tuple(partials(one) for one in spec.reductions) or None,
        Int32(0),
    )


def arguments_of_sum(spec: SumSpec) -> tuple:
    """Likewise, of the kernel that adds parts."""
    _, _, outputs, operands, *_ = arguments(spec.product, GemmConfig())
    return _parts(spec.product), outputs, operands


def _parts(spec: GemmSpec) -> Any:
    """(L * parts, M, N) in D's memory order, with rows or columns that may be longer than D's."""
    outer, matrix = (sym_int64(divisibility=ALIGN // 4) for _ in range(2))
    inner = (outer, 1) if spec.d_major == "row" else (1, outer)
    shape = tuple(sym_int() for _ in range(3))
    return make_fake_tensor(Float32, shape, stride=(matrix, *inner), assumed_align=ALIGN)
