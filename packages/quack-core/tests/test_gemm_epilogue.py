"""Ops of epilogues: what ``reference`` gives, against formulas in float64; their errors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quack_core.errors import DTypeError
from quack_core.gemm import epilogue as epi
from quack_core.gemm.epilogue import (
    ACTIVATIONS,
    Activation,
    AddC,
    AddVector,
    Gate,
    Kind,
    Op,
    Operand,
    Scale,
    StoreAux,
)

M, N = 6, 8
RNG = np.random.default_rng(0)
X, C = RNG.normal(size=(2, M, N))
ROW, COLUMN = RNG.normal(size=(1, N)), RNG.normal(size=(M, 1))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


CASES = {
    "scale by a number": (Scale(), (2.5,), X * 2.5),
    "scale by a tensor of one element": (Scale(Kind.DEVICE_SCALAR), (np.array([2.5]),), X * 2.5),
    "scale of columns": (Scale(Kind.ROW), (ROW,), np.einsum("mn,n->mn", X, ROW[0])),
    "scale of rows": (Scale(Kind.COLUMN), (COLUMN,), np.einsum("mn,m->mn", X, COLUMN[:, 0])),
    "c": (AddC("float64"), (C,), X + C),
    "beta c": (AddC("float64", beta=Kind.SCALAR), (C, -0.5), X - C / 2),
    "beta c, beta in memory": (
        AddC("float64", beta=Kind.DEVICE_SCALAR),
        (C, np.array([3.0])),
        X + C * 3,
    ),
    "bias of columns": (AddVector("float64"), (ROW,), X + ROW),
    "bias of rows": (AddVector("float64", Kind.COLUMN), (COLUMN,), X + COLUMN),
    "activation": (Activation("relu_sq"), (), np.where(X > 0, X * X, 0)),
    "SwiGLU": (Gate("silu"), (), X[:, 0::2] * sigmoid(X[:, 0::2]) * X[:, 1::2]),
    "GLU": (Gate("sigmoid"), (), sigmoid(X[:, 0::2]) * X[:, 1::2]),
    "ReGLU": (Gate("relu"), (), np.maximum(X[:, 0::2], 0) * X[:, 1::2]),
    "copy": (StoreAux("bfloat16"), (), X),
}


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_formula(case):
    op, operands, expected = CASES[case]
    given = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in operands]
    found = op.reference(torch.from_numpy(X), *given)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14)
    assert len(op.operands) == len(operands)
    assert [one.kind == Kind.SCALAR for one in op.operands] == [
        not isinstance(v, np.ndarray) for v in operands
    ]


@pytest.mark.parametrize("case", ["scale by a number", "c", "beta c", "bias of rows", "copy"])
def test_a_kernel_does_the_same_to_a_number(case):
    op, operands, expected = CASES[case]
    for m, n in np.ndindex(M, N):
        given = [
            v if not isinstance(v, np.ndarray) else np.broadcast_to(v, (M, N))[m, n]
            for v in operands
        ]
        assert op.apply(X[m, n], *given) == pytest.approx(expected[m, n], rel=1e-14)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gate_multiplies_the_odd_columns_by_the_activation_of_the_even_ones(name):
    x = torch.from_numpy(X)
    up = Activation(name).reference(x[:, 0::2]) * x[:, 1::2]
    assert torch.equal(Gate(name).reference(x), up)
    swapped = Gate(name).reference(x.view(M, N // 2, 2).flip(-1).reshape(M, N))
    assert torch.equal(swapped, up) == (name == "identity")


def test_operands_and_outputs_of_an_epilogue():
    ops = (
        Scale(Kind.DEVICE_SCALAR, "scale_a"),
        AddC("bfloat16", beta=Kind.SCALAR, batched=True),
        StoreAux("float16"),
        Gate("silu"),
        AddVector("float32", Kind.COLUMN),
    )
    assert epi.operands(ops) == (
        Operand("scale_a", Kind.DEVICE_SCALAR),
        Operand("c", Kind.TILE, "bfloat16", batched=True),
        Operand("beta", Kind.SCALAR),
        Operand("bias", Kind.COLUMN, "float32"),
    )
    assert [op.aux for op in ops] == [None, None, "float16", None, None]
    assert epi.halves(ops) and not epi.halves(ops[:3])
    assert hash(ops) == hash((*ops[:3], Gate("silu"), ops[4]))  # part of a cache key


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="kind=tile: a bias is a row or a column"):
        AddVector("float32", Kind.TILE)
    for op in (Activation, Gate):
        with pytest.raises(DTypeError, match="activation 'swish' must be one of identity, relu"):
            op("swish")
    for method in (Op().apply, Op().reference):
        with pytest.raises(NotImplementedError):
            method(1.0)
