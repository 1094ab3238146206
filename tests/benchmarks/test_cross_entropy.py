"""Cross-entropy as benchmark problems, on the CPU: what is right passes, what is wrong does not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benchmarks import copies, cross_entropy, families, norm, shapes
from benchmarks.cross_entropy import Buffers
from benchmarks.variant import Wrong

from quack_norm.ops.cross_entropy import reference

FORWARD = shapes.Case("ce", "cross_entropy_fwd", (6, 40), "bf16")
FUSED = shapes.Case("ce_fwd_dx", "cross_entropy_fused", (6, 40), "bf16")
AUTOGRAD = shapes.Case(
    "ce_fwd_bwd", "cross_entropy_autograd", (6, 40), "bf16", (("grad", "0.375"),)
)
CASES = [FORWARD, FUSED, AUTOGRAD]


def right(b: Buffers, case: shapes.Case, reduction: str = "mean") -> tuple[torch.Tensor, ...]:
    """By torch's own formula and autograd."""
    leaf = b.x.detach().float().requires_grad_()
    if case is FORWARD:
        loss = F.cross_entropy(leaf.detach(), b.target, reduction="none")
        return loss.to(b.x.dtype), torch.logsumexp(leaf.detach(), -1)
    with torch.enable_grad():
        loss = F.cross_entropy(leaf, b.target, reduction=reduction)
    dloss = torch.ones(()) if b.dloss is None else b.dloss.float()
    (dx,) = torch.autograd.grad(loss, leaf, dloss.expand(loss.shape))
    return loss.detach().to(b.x.dtype), dx.to(b.x.dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_a_right_launch_passes_and_a_wrong_one_does_not(
    case: shapes.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "CHUNK", 80)  # several chunks
    problem = families.problem(case, "cpu")
    assert problem.check(lambda b: right(b, case)) <= 1
    for index, name in enumerate(("loss", "lse" if case is FORWARD else "dx")):

        def wrong(b: Buffers, index: int = index) -> tuple[torch.Tensor, ...]:
            results = right(b, case)
            results[index].view(-1)[-1] += results[index].abs().max()
            return results

        with pytest.raises(Wrong, match=f"{name}.*1 of"):
            problem.check(wrong)
    with pytest.raises(Wrong):  # left as it was allocated: NaN
        problem.check(lambda b: tuple(torch.empty_like(t) * torch.nan for t in right(b, case)))


@pytest.mark.parametrize("case", [FUSED, AUTOGRAD], ids=lambda case: case.op)
def test_the_gradient_is_that_of_the_loss_returned(case: shapes.Case) -> None:
    """A peer may leave the mean to others: then its gradient is that of the sum."""
    problem = families.problem(case, "cpu")
    assert problem.check(lambda b: right(b, case, "none")) <= 1
    with pytest.raises(Wrong, match="dx"):
        problem.check(lambda b: (right(b, case)[0], right(b, case, "none")[1]))


def test_a_forward_may_leave_the_lse_away() -> None:
    assert families.problem(FORWARD, "cpu").check(lambda b: right(b, FORWARD)[:1]) <= 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_the_reference_of_ours_passes(case: shapes.Case) -> None:
    options = (None, -100, "none" if case is FORWARD else "mean", 0.0, None, 0.0)

    def launch(b: Buffers) -> tuple[torch.Tensor, ...]:
        x = b.x.detach()
        loss, lse, *saved = reference.forward(x, b.target, *options)
        if case is FORWARD:
            return loss, lse
        dloss = x.new_ones(()) if b.dloss is None else b.dloss
        return loss, reference.backward(dloss, x, b.target, None, *saved, *options[1:])

    assert families.problem(case, "cpu").check(launch) <= 1


@pytest.mark.parametrize("case", [FORWARD, AUTOGRAD], ids=lambda case: case.op)
def test_the_public_function_passes(case: shapes.Case) -> None:
    pytest.importorskip("quack_norm.ops.cross_entropy.api")
    problem = families.problem(case, "cpu")
    with torch.no_grad():  # as the runner does
        assert problem.check(families.of(case).public(case)) <= 1


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_torchs_peers_pass(case: shapes.Case, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "compiled_for_one_shape", lambda function: function)
    case = replace(case, dtype=dtype)
    problem = families.problem(case, "cpu")
    with torch.no_grad():
        for peer in families.peers_of(case)[:2]:
            assert problem.check(peer.prepare(case)) <= 1


def test_losses_in_float32_get_their_gradient_in_float32() -> None:
    launch = cross_entropy.through_autograd(lambda b: (F.cross_entropy(b.x.float(), b.target), b.x))
    data = cross_entropy.CrossEntropy(AUTOGRAD, "cpu").make()
    with torch.no_grad():
        loss, dx = launch(data)
    assert (loss.dtype, loss.requires_grad, dx.dtype) == (torch.float32, False, torch.bfloat16)
    assert torch.equal(dx, right(data, AUTOGRAD)[1])


def test_copies_of_logits_are_made_once_for_each_set() -> None:
    problem = cross_entropy.CrossEntropy(AUTOGRAD, "cpu")
    first, second = problem.make(), problem.make()
    kept = cross_entropy.Kept(cross_entropy._logits)
    copy = kept(first)
    assert kept(first) is copy and kept(second) is not copy
    assert torch.equal(copy, first.x) and copy.data_ptr() != first.x.data_ptr()
    assert copy.is_leaf and copy.requires_grad


def test_bytes_are_what_must_move() -> None:
    found = [families.problem(case, "cpu") for case in CASES]
    assert [one.read_bytes for one in found] == [480 + 48, 480 + 48, 480 + 48 + 2]
    assert [one.write_bytes for one in found] == [6 * (2 + 4), 480 + 2, 480 + 2]


def test_suites_and_peers() -> None:
    count = len(shapes.parse(shapes.CE))
    assert [len(shapes.cases(s)) for s in ("ce", "ce_fwd_dx", "ce_fwd_bwd")] == [
        *(count + 1, count + 1),
        count + 3,
    ]
    names = ["eager", "compile", "liger", "quack-kernels"]
    assert [variant.name for variant in families.peers_of(AUTOGRAD)] == names
    assert [variant.name for variant in families.peers_of(FUSED)] == [*names, "liger-cute"]


def test_a_forward_is_judged_by_what_reads() -> None:
    problem = families.problem(FORWARD, "cpu")
    assert copies.inputs_for(problem.read_bytes, problem.write_bytes) == 0
    buffers = copies.make(problem.set_bytes, 0, "cpu")
    assert (problem.set_bytes, buffers.a.nbytes) == (564, 560)  # whole accesses
    copies.check(copies._torch_sum, buffers)
    with pytest.raises(Wrong, match="sum"):
        copies.check(lambda b: (b.out + 1,), buffers)
