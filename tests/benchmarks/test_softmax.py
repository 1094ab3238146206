"""Softmax as benchmark problems, on the CPU: what is right passes, what is wrong does not."""

import pytest
import torch
from benchmarks import families, shapes, softmax
from benchmarks.variant import Wrong

FORWARD = shapes.Case("softmax", "softmax_fwd", (6, 40), "bf16")
BACKWARD = shapes.Case("softmax_bwd", "softmax_bwd", (6, 40), "bf16")


def right(b: softmax.Buffers) -> tuple[torch.Tensor, ...]:
    if b.x is not None:
        b.out.copy_(torch.softmax(b.x.float(), -1))
        return (b.out,)
    assert b.dx is not None and b.dout is not None
    b.dx.copy_(softmax.gradient(b.out.float(), b.dout.float()))
    return (b.dx,)


@pytest.mark.parametrize("case", [FORWARD, BACKWARD], ids=lambda case: case.op)
def test_a_right_launch_passes_and_a_wrong_one_does_not(case: shapes.Case) -> None:
    problem = families.problem(case, "cpu")
    assert problem.check(right) <= 1

    def wrong(b: softmax.Buffers) -> tuple[torch.Tensor, ...]:
        (result,) = right(b)
        result[3, 7] += 0.1
        return (result,)

    with pytest.raises(Wrong, match="1 of 240 elements"):
        problem.check(wrong)
    with pytest.raises(Wrong):
        problem.check(lambda b: ((b.out if b.dx is None else b.dx),))  # left as it was: NaN


def test_bytes_are_what_must_move() -> None:
    ahead, back = families.problem(FORWARD, "cpu"), families.problem(BACKWARD, "cpu")
    assert (ahead.read_bytes, ahead.write_bytes) == (480, 480)
    assert (back.read_bytes, back.write_bytes) == (960, 480)


def test_suites_and_peers() -> None:
    assert len(shapes.cases("softmax")) == 17 and len(shapes.cases("softmax_bwd")) == 7
    names = [variant.name for variant in families.peers_of(FORWARD)]
    assert names == ["eager", "compile", "liger", "quack-kernels"]


def test_specs_name_the_alignment_of_contiguous_rows() -> None:
    odd = shapes.Case("softmax", "softmax_fwd", (4, 4095), "bf16")
    assert (softmax.spec_of(FORWARD).align, softmax.spec_of(odd).align) == (16, 2)
