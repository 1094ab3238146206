"""LayerNorm as benchmark problems, on the CPU: what is right passes, what is wrong does not."""

import pytest
import torch
import torch.nn.functional as F
from benchmarks import families, layernorm, ours, shapes
from benchmarks.layernorm import Bwd, Fwd
from benchmarks.variant import Wrong

from quack_norm.ops.rmsnorm import reference

OPTS = (("w", "fp32"),)
FORWARD = shapes.Case("layernorm", "layernorm_fwd", (6, 40), "bf16", OPTS)
BACKWARD = shapes.Case("layernorm_bwd", "layernorm_bwd", (6, 40), "bf16", OPTS)


def right(b: Fwd | Bwd) -> tuple[torch.Tensor, ...]:
    """By torch's own formula and autograd."""
    leaves = [t.detach().float().requires_grad_() for t in (b.x, b.w, b.b)]
    out = F.layer_norm(leaves[0], (leaves[0].shape[-1],), *leaves[1:], layernorm.EPS)
    if isinstance(b, Fwd):
        b.out.copy_(out.detach())
        return (b.out,)
    gradients = torch.autograd.grad(out, leaves, b.dout.float())
    for result, gradient in zip((b.dx, b.dw, b.db), gradients, strict=True):
        result.copy_(gradient)
    return b.dx, b.dw, b.db


@pytest.mark.parametrize("case", [FORWARD, BACKWARD], ids=lambda case: case.op)
def test_a_right_launch_passes_and_a_wrong_one_does_not(case: shapes.Case) -> None:
    problem = families.problem(case, "cpu")
    assert problem.check(right) <= 1
    for index, name in enumerate(("dx", "dw", "db") if case is BACKWARD else ("out",)):

        def wrong(b: Fwd | Bwd, index: int = index) -> tuple[torch.Tensor, ...]:
            results = right(b)
            results[index].view(-1)[7] += 0.1
            return results

        with pytest.raises(Wrong, match=f"{name}.*1 of"):
            problem.check(wrong)


def test_ours_passes_on_the_cpu() -> None:
    """The public function, and the reference of the kernels from the statistics that are saved."""

    def backward(b: Bwd) -> tuple[torch.Tensor, ...]:
        options = (b.x.dtype, None, True, b.w.dtype, False, True)
        dx, _, dw, db = reference.backward(b.x, b.w, b.dout, b.rows, None, 0.0, *options)
        assert dw is not None and db is not None
        return dx, dw, db

    assert families.problem(FORWARD, "cpu").check(layernorm.public(FORWARD)) <= 1
    assert families.problem(BACKWARD, "cpu").check(backward) <= 1


def test_reference_saves_what_our_backward_reads() -> None:
    """rstd, mean, and what float32 lacks of the mean."""
    data = layernorm.LayerNormBwd(BACKWARD, "cpu").make()
    mean = data.x.double().mean(-1)
    torch.testing.assert_close(data.mean.double(), mean, rtol=2**-23, atol=2**-30)
    torch.testing.assert_close(data.rows[:, 1:].double().sum(-1), mean, rtol=2**-46, atol=2**-50)
    found = torch.rsqrt(data.x.double().var(-1, correction=0) + layernorm.EPS)
    torch.testing.assert_close(data.rstd.double(), found, rtol=2**-23, atol=0)


def test_bytes_are_what_must_move() -> None:
    ahead, back = families.problem(FORWARD, "cpu"), families.problem(BACKWARD, "cpu")
    assert (ahead.read_bytes, ahead.write_bytes) == (480 + 2 * 160, 480)
    assert (back.read_bytes, back.write_bytes) == (2 * 480 + 160 + 2 * 24, 480 + 2 * 160)


def test_suites_and_peers() -> None:
    assert len(shapes.cases("layernorm")) == 26 and len(shapes.cases("layernorm_bwd")) == 12
    names = [variant.name for variant in families.peers_of(FORWARD)]
    assert names == ["eager", "compile", "liger", "quack-kernels"]


@pytest.mark.parametrize("suite", ["layernorm", "layernorm_bwd"])
def test_candidates_are_of_the_kind_of_the_default(suite: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("QUACK_ARCH", "sm90")
    (case,) = (c for c in shapes.cases(suite, "8192x4096") if c.opt("w") == "bf16")
    default = ours.default_config(case)
    found = layernorm.candidates(case)
    assert len(found) > 3 and {type(config) for config in found} == {type(default)}
    assert layernorm.spec_of(case).centred
