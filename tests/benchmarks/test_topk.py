"""Top-k as a benchmark problem, on the CPU: what is right passes, what is wrong does not."""

import pytest
import torch
from benchmarks import families, shapes
from benchmarks.topk import Buffers
from benchmarks.variant import Wrong

from quack_norm.ops.topk import reference

CASE = shapes.Case("topk", "topk_fwd", (6, 40), "bf16", (("k", "5"),))


def right(b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.forward(b.x, 5, False)


def test_ours_and_torch_pass() -> None:
    problem = families.problem(CASE, "cpu")
    assert problem.check(right) == 0
    eager = families.peers_of(CASE)[0]
    assert problem.check(eager.prepare(CASE)) == 0
    assert problem.check(lambda b: (right(b)[0], right(b)[1].int())) == 0


def test_the_public_function_passes() -> None:
    pytest.importorskip("quack_norm.ops.topk.api")
    assert families.problem(CASE, "cpu").check(families.of(CASE).public(CASE)) == 0


def test_wrong_results_are_named() -> None:
    problem = families.problem(CASE, "cpu")

    def change(name: str, b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = right(b)
        if name == "largest":
            values[3] = values[3].flip(0)
        elif name == "twice":
            indices[2, 1] = indices[2, 0]
        elif name == "outside":
            indices[4, 0] = 40
        else:
            indices[5] = indices[5].flip(0)
        return values, indices

    for name in ("largest", "twice", "outside", "lead to"):
        with pytest.raises(Wrong, match=name):
            problem.check(lambda b, name=name: change(name, b))


def test_bytes_and_suite() -> None:
    problem = families.problem(CASE, "cpu")
    assert (problem.read_bytes, problem.write_bytes) == (480, 6 * 5 * (2 + 8))
    cases = shapes.cases("topk")
    assert {case.shape for case in cases} == set(shapes.parse(shapes.TOPK))
    assert all(int(case.opt("k") or 0) <= case.shape[1] for case in cases)


def test_records_name_the_configuration() -> None:
    config = pytest.importorskip("quack_norm.ops.topk.config")
    odd = shapes.Case("topk", "topk_fwd", (6, 4095), "bf16", (("k", "5"),))
    family = families.of(odd)
    assert (family.spec_of(odd).align, family.spec_of(odd).k) == (2, 5)
    assert family.default_config(odd) == config.default_fwd(family.spec_of(odd))
