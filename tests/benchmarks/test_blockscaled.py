"""Quantisers and products of blocks as benchmark problems, on the CPU."""

import pytest
import torch
from benchmarks import families, ours, quantize, shapes
from benchmarks.matmul import Buffers as Operands
from benchmarks.matmul import numbers
from benchmarks.quantize import Buffers
from benchmarks.variant import Wrong

pytest.importorskip("quack_blockscaled")

QUANT = [
    shapes.Case("quant", "quantize_fwd", (256, 384), "bf16", (("format", format),))
    for format in ("fp8_block_1x128", "fp8_block_128x128", "mxfp8_e4m3")
]
PRODUCT = shapes.Case("gemm_fp8_block", "matmul_fwd", (192, 256, 384), "e4m3")


@pytest.mark.parametrize("case", QUANT, ids=lambda case: case.opt("format"))
def test_what_quantises_passes(case: shapes.Case) -> None:
    problem = families.problem(case, "cpu")
    public = families.of(case).public(case)
    assert 0.9 < problem.check(public) <= 1
    assert ours.package(case) == "quack-blockscaled"

    def off(b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = public(b)
        numbers = values.float()
        numbers[200, 300] = numbers[200, 300] * 1.25 + 0.25
        return numbers.to(values.dtype), scales

    with pytest.raises(Wrong, match="times as far off"):
        problem.check(off)


@pytest.mark.parametrize("case", QUANT, ids=lambda case: case.opt("format"))
def test_the_peer_quantises_alike(case: shapes.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "compiled_for_one_shape", lambda formula: formula)
    (peer,) = families.peers_of(case)
    assert families.problem(case, "cpu").check(peer.prepare(case)) <= 1


def test_products() -> None:
    problem = families.problem(PRODUCT, "cpu")
    assert problem.check(families.of(PRODUCT).public(PRODUCT)) <= 1

    def unscaled(b: Operands) -> tuple[torch.Tensor, ...]:
        return ((b.a.values.float() @ b.b.values.float()).bfloat16(),)

    with pytest.raises(Wrong):
        problem.check(unscaled)
    data = problem.make()
    assert torch.equal(numbers(data.a), data.a.dequantize(torch.float32))
    assert torch.equal(numbers(data.b.mT), data.b.mT.dequantize(torch.float32))


def test_bytes() -> None:
    problem = families.problem(QUANT[0], "cpu")
    assert (problem.read_bytes, problem.write_bytes) == (256 * 384 * 2, 256 * 384 + 256 * 3 * 4)
    product = families.problem(PRODUCT, "cpu")
    assert product.flop == 2 * 192 * 256 * 384
    assert product.write_bytes == 192 * 256 * 2
    assert product.read_bytes == (192 + 256) * 384 + 4 * (192 * 3 + 2 * 3)
