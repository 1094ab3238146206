"""The correctness gate, on the CPU: right results pass, wrong ones do not."""

import pytest
import torch
import torch.nn.functional as F
from benchmarks import copies, norm, shapes
from benchmarks.variant import Failure, Wrong, attempt

CASES = [
    shapes.Case("norm_fwd", "rmsnorm_fwd", (6, 40), "bf16", (("w", "bf16"),)),
    shapes.Case("norm_fwd", "rmsnorm_fwd", (6, 40), "bf16", (("w", "fp32"),)),
    shapes.Case("norm_fwd", "rmsnorm_fwd", (6, 40), "fp32", (("w", "fp32"),)),
    shapes.Case("norm_fwd", "rmsnorm_fwd", (6, 40), "bf16", (("w", "bf16"), ("residual", "bf16"))),
]
BACKWARD = shapes.Case("norm_bwd", "rmsnorm_bwd", (70, 40), "bf16", (("w", "bf16"),))


def forward(b: norm.FwdBuffers) -> tuple[torch.Tensor, ...]:
    h = b.x.float() if b.residual is None else b.x.float() + b.residual.float()
    b.out.copy_(F.rms_norm(h, (h.shape[-1],), b.w.float(), norm.EPS))
    return (b.out,) if b.residual is None else (b.out, h.to(b.residual.dtype))


def backward(b: norm.BwdBuffers) -> tuple[torch.Tensor, ...]:
    x, w = b.x.float().requires_grad_(), b.w.float().requires_grad_()
    with torch.enable_grad():
        y = F.rms_norm(x, (x.shape[-1],), w, norm.EPS)
    dx, dw = torch.autograd.grad(y, (x, w), b.dout.float())
    return dx.to(b.x.dtype), dw.to(b.w.dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_forward_gate(case: shapes.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "CHUNK", 80)  # several chunks
    problem = norm.NormFwd(case, "cpu")
    assert 0 < problem.check(forward) <= 1

    def one_wrong(b: norm.FwdBuffers) -> tuple[torch.Tensor, ...]:
        outputs = forward(b)
        outputs[0][5, 39] += 1
        return outputs

    with pytest.raises(Wrong, match="out"):
        problem.check(one_wrong)


def test_an_output_that_is_not_written_is_wrong() -> None:
    with pytest.raises(Wrong, match="nan"):
        norm.NormFwd(CASES[0], "cpu").check(lambda b: (b.out,))


def test_a_result_of_another_dtype_is_wrong() -> None:
    with pytest.raises(Wrong, match="float32"):
        norm.NormFwd(CASES[0], "cpu").check(lambda b: (forward(b)[0].float(),))


def test_backward_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "CHUNK", 400)
    problem = norm.NormBwd(BACKWARD, "cpu")
    assert 0 < problem.check(backward) <= 1

    def wrong_sum(b: norm.BwdBuffers) -> tuple[torch.Tensor, ...]:
        dx, dw = backward(b)
        return dx, dw + dw.abs().max()

    with pytest.raises(Wrong, match="dw"):
        problem.check(wrong_sum)


def test_bytes_count_each_operand_once() -> None:
    plain, *_, fused = (norm.NormFwd(case, "cpu") for case in CASES)
    assert (plain.read_bytes, plain.write_bytes) == (2 * 240 + 80, 2 * 240)
    assert (fused.read_bytes, fused.write_bytes) == (4 * 240 + 80, 4 * 240)
    back = norm.NormBwd(BACKWARD, "cpu")
    assert (back.read_bytes, back.write_bytes) == (4 * 2800 + 80 + 4 * 70, 2 * 2800 + 80)


@pytest.mark.parametrize("inputs", [1, 2])
def test_copies_move_the_bytes_asked_for(inputs: int) -> None:
    buffers = copies.make(16 * 1024 * (inputs + 1), inputs, "cpu")
    moved = sum(t.nbytes for t in (buffers.a, buffers.b, buffers.out) if t is not None)
    assert moved == 16 * 1024 * (inputs + 1)
    copies.check(copies._torch, buffers)
    with pytest.raises(Wrong, match="copy"):
        copies.check(lambda b: (b.out,), buffers)


def test_inputs_follow_the_mix_of_reads_and_writes() -> None:
    assert copies.inputs_for(100, 100) == 1
    assert copies.inputs_for(200, 100) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Wrong("out"), "wrong"),
        (NotImplementedError("no"), "unsupported"),
        (ImportError("no"), "unsupported"),
        (RuntimeError("this does not support N"), "unsupported"),
        (RuntimeError("ptxas failed"), "compile-error"),
        (torch.cuda.OutOfMemoryError("full"), "oom"),
    ],
)
def test_failures_become_a_status(error: Exception, status: str) -> None:
    def call() -> None:
        raise error

    found = attempt(call)
    assert isinstance(found, Failure)
    assert found.status == status
    assert found.note.startswith(type(error).__name__)
