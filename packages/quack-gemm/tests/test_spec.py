"""Specs: what no kernel computes, and what follows from the epilogue."""

import dataclasses
import pickle

import pytest

from quack_core.errors import DTypeError
from quack_core.gemm.epilogue import (
    Activation,
    ActivationGrad,
    AddC,
    AddVector,
    ColumnReduce,
    Gate,
    GateGrad,
    Kind,
    Mirror,
    Op,
    RowReduce,
    Scale,
    StoreAux,
    Vector,
)
from quack_gemm.spec import GemmSpec

B, H, F = "bfloat16", "float16", "float32"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
GATE, GATE_GRAD = Gate("silu"), GateGrad("silu", "bfloat16")


def fused(*ops: Op, **fields: object) -> GemmSpec:
    return GemmSpec(B, B, B, epilogue=ops, **fields)  # type: ignore[arg-type]


# --- what is refused


def test_operands_of_two_sizes() -> None:
    with pytest.raises(ValueError, match=f"a is {B}, b is {E4M3}: both must"):
        GemmSpec(B, E4M3, B)
    for same in ((B, H), (F, F)):
        with pytest.raises(ValueError, match="both must have 8 bits, or be the same of 16 bits"):
            GemmSpec(*same, B)
    assert GemmSpec(E4M3, E5M2, B).a == E4M3  # two dtypes of 8 bits are no fault


def test_a_dtype_that_does_not_exist() -> None:
    with pytest.raises(DTypeError, match="'int7'"):
        GemmSpec("int7", B, B)


@pytest.mark.parametrize("majors", [("row", "row"), ("column", "column"), ("column", "row")])
def test_8_bit_operands_in_another_order(majors: tuple[str, str]) -> None:
    a_major, b_major = majors
    orders = {"a_major": a_major, "b_major": b_major}
    with pytest.raises(ValueError, match="a must be row-major, b column-major"):
        GemmSpec(E4M3, E4M3, B, **orders)  # type: ignore[arg-type]
    GemmSpec(H, H, H, **orders)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [GATE, GATE_GRAD], ids=["takes", "gives"])
def test_pairs_twice(other: Op) -> None:
    with pytest.raises(ValueError, match="2 ops of an epilogue take or give pairs: one can"):
        fused(GATE, other)


@pytest.mark.parametrize("epilogue", [(), (Activation("silu"),)], ids=["none", "activation"])
def test_concat_without_pairs(epilogue: tuple[Op, ...]) -> None:
    with pytest.raises(ValueError, match="concat needs"):
        fused(*epilogue, concat=True)


@pytest.mark.parametrize(
    ("op", "fields", "needed"),
    [
        (GATE, {"b_major": "row"}, "b must be column-major"),
        (GATE, {"d_major": "column"}, "D must be row-major"),
        (GATE_GRAD, {"d_major": "column"}, "D must be row-major"),
    ],
    ids=["b", "D", "D doubled"],
)
def test_pairs_in_another_order(op: Op, fields: dict, needed: str) -> None:
    with pytest.raises(ValueError, match=needed):
        fused(op, **fields)
    fused(Activation("silu"), **fields)


@pytest.mark.parametrize("op", [GATE, GATE_GRAD], ids=["takes", "gives"])
def test_pairs_and_reductions(op: Op) -> None:
    for reduce in (RowReduce("sum"), ColumnReduce("sum")):
        with pytest.raises(ValueError, match="with pairs reduces nothing"):
            fused(reduce, op)


def test_reductions() -> None:
    found = fused(RowReduce("sum"), ColumnReduce("max")).reductions
    assert found == (Vector("sum", Kind.COLUMN), Vector("max", Kind.ROW))
    for reduce in (RowReduce, ColumnReduce):
        with pytest.raises(ValueError, match="name='mean': must be one of sum, sum_squares"):
            reduce("mean")


@pytest.mark.parametrize(
    ("ops", "found"),
    [
        ((Mirror(), Scale()), "Scale behind an op that mirrors D"),
        ((Mirror(), Mirror()), "Mirror behind an op that mirrors D"),
        ((AddVector(B), Mirror()), "AddVector beside"),
        ((Scale(Kind.COLUMN), Mirror()), "Scale beside"),
        ((GATE, Mirror()), "Gate beside"),
        ((GATE_GRAD, Mirror()), "GateGrad beside"),
        ((StoreAux(B), Mirror()), "StoreAux beside"),
        ((RowReduce("sum"), Mirror()), "RowReduce beside"),
    ],
)
def test_halves_that_would_differ(ops: tuple[Op, ...], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        fused(*ops)


def test_a_symmetric_product_is_stored_twice() -> None:
    spec = fused(Scale(), AddC(B, Kind.SCALAR), Activation("relu"), Mirror())
    assert spec.symmetric and spec.sinks == ((0, "plain"), (0, "mirror"))
    assert spec.outputs == (B,)
    assert not fused(Scale()).symmetric


def test_doubled_columns_take_any_b() -> None:
    assert fused(GATE_GRAD, b_major="row").doubled


@pytest.mark.parametrize(
    ("ops", "name"),
    [
        ((AddC(B), GATE), "AddC"),
        ((GATE, AddC(B)), "AddC"),
        ((GATE, AddVector(B)), "AddVector"),
        ((GATE, Scale(Kind.ROW)), "Scale"),
    ],
    ids=["matrix before", "matrix behind", "bias behind", "scale behind"],
)
def test_operands_beside_pairs(ops: tuple[Op, ...], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        fused(*ops)


def test_operands_that_do_go_beside_pairs() -> None:
    columns = Scale(Kind.COLUMN), AddVector(B, Kind.COLUMN)
    assert fused(AddVector(B), Scale(Kind.ROW), *columns, GATE, *columns, Scale()).gated


# --- what follows


@pytest.mark.parametrize(
    ("ops", "outputs", "cols", "paired"),
    [
        ((), (B,), (64,), (False,)),
        ((Activation("silu"),), (B,), (64,), (False,)),
        ((ActivationGrad("silu", B),), (B,), (64,), (False,)),
        ((GATE,), (B,), (32,), (False,)),
        ((GATE_GRAD,), (B,), (128,), (True,)),
        ((StoreAux(F), Activation("gelu")), (B, F), (64, 64), (False, False)),
        ((StoreAux(F), GATE), (B, F), (32, 64), (False, True)),
        ((GATE, StoreAux(F)), (B, F), (32, 32), (False, False)),
        ((StoreAux(H), GATE, StoreAux(F)), (B, H, F), (32, 64, 32), (False, True, False)),
        ((StoreAux(F), GATE_GRAD), (B, F), (128, 64), (True, False)),
    ],
)
def test_outputs(
    ops: tuple[Op, ...], outputs: tuple[str, ...], cols: tuple[int, ...], paired: tuple[bool, ...]
) -> None:
    """Dtype, columns of 64 of the product, and whether those are gates and what they gate."""
    spec = fused(*ops)
    assert spec.outputs == outputs
    assert tuple(spec.cols(i, 64) for i in range(len(outputs))) == cols
    assert spec.paired == paired
    assert spec.gated == (cols[0] == 32)
    assert spec.doubled == (cols[0] == 128)


@pytest.mark.parametrize(
    ("a_batched", "b_batched", "batched"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_batches(a_batched: bool, b_batched: bool, batched: bool) -> None:
    assert fused(a_batched=a_batched, b_batched=b_batched).batched == batched


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (GemmSpec(B, B, B), "gemm_bf16_bf16_rcr"),
        (GemmSpec(H, H, F, "column", "row", "column"), "gemm_fp16_fp32_crc"),
        (GemmSpec(E4M3, E5M2, B), "gemm_e4m3_e5m2_bf16_rcr"),
        (fused(AddVector(B), GATE), "gemm_bf16_bf16_rcr_addvector_gate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_name(spec: GemmSpec, name: str) -> None:
    assert spec.name == name


def test_a_spec_is_a_key() -> None:
    spec = fused(Scale(), Activation("relu"))
    assert spec == fused(Scale(), Activation("relu"))
    assert hash(spec) == hash(fused(Scale(), Activation("relu")))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec != fused(Scale(), Activation("gelu"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.a = H  # type: ignore[misc]
