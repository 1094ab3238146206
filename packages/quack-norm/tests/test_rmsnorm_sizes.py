"""Every kind of row length and row count, forward and backward, against float64."""

import pytest
from rmsnorm_oracle import BF16, F16, F32, Case, check

pytestmark = pytest.mark.exhaustive

# With a small eps dx of a row of few elements is a difference of nearly equal numbers: its value is
# the rounding error, ours and torch's alike.
SIZES = [
    Case("one element", (3, 1), F32, eps=0.5),
    Case("one element in 16 bits", (17, 1), BF16, eps=0.5),
    Case("two elements", (17, 2), BF16, weight=BF16, eps=0.5),
    Case("odd, less than a vector", (3, 3), F16, eps=0.5),
    Case("odd, less than a vector in fp32", (5, 7), F32, eps=0.5),
    Case("one vector", (2, 8), BF16, eps=0.5),
    Case("odd, less than a warp", (17, 31), BF16),
    Case("rows share a warp", (129, 64), F32),
    Case("KN-16 no power of two", (33, 72), BF16),
    Case("odd, 127", (3, 127), F32),
    Case("rows share a CTA", (259, 128), BF16),
    Case("odd, 255", (17, 255), F16),
    Case("KN-16 256", (65, 256), BF16),
    Case("a multiple of 8, not of 16", (17, 1000), BF16, weight=BF16),
    Case("odd, 1001", (17, 1001), BF16),
    Case("odd, 1001 in fp32", (5, 1001), F32),
    Case("KN-16 1536", (9, 1536), BF16),
    Case("KN-16 3584", (9, 3584), F32),
    Case("one less than a power of two", (3, 4095), BF16),
    Case("a power of two", (67, 4096), BF16),
    Case("a power of two in fp32", (17, 4096), F32),
    Case("a power of two in fp16 without weight", (17, 4096), F16, weight=None),
    Case("two more than a power of two", (3, 4098), BF16),
    Case("KN-16 5120", (9, 5120), BF16, weight=BF16),
    Case("KN-16 7168", (9, 7168), BF16),
    Case("prime", (3, 8191), BF16),
    Case("KN-16 8200", (5, 8200), F32),
    Case("one less than 16384", (3, 16383), BF16),
    Case("KN-17 KN-18 16384", (5, 16384), BF16),
    Case("KN-17 KN-18 16384 in fp32", (3, 16384), F32),
    Case("KN-17 32768", (3, 32768), BF16, weight=BF16),
    Case("KN-17 32768 in fp32", (2, 32768), F32),
    Case("KN-17 49160", (3, 49160), BF16),
    Case("KN-17 49160 in fp32", (2, 49160), F32),
    Case("a vocabulary, prime", (3, 50257), BF16),
    Case("a vocabulary, prime, in fp32", (2, 50257), F32),
    Case("KN-17 65536", (3, 65536), BF16, weight=BF16),
    Case("KN-17 65536 in fp32", (2, 65536), F32),
    Case("KN-17 131072", (2, 131072), BF16),
    Case("KN-17 131072 in fp32", (1, 131072), F32),
    Case("KN-17 131080", (2, 131080), BF16),
    Case("KN-17 131080 in fp32", (1, 131080), F32),
    Case("odd, 262139", (2, 262139), BF16),
    Case("odd, 262139 in fp32", (1, 262139), F32),
    Case("KN-17 the longest", (2, 262144), BF16),
    Case("KN-17 the longest in fp32", (1, 262144), F32),
]

# h stored in float32: then nothing but float32 arithmetic lies between ours and float64.
FULL = {
    "weight": BF16,
    "bias": F32,
    "residual": BF16,
    "residual_out": F32,
    "prenorm": True,
    "offset": 1.0,
}
LONG = [
    Case("everything", (17, 256), BF16, **FULL),
    Case("everything, odd", (17, 1001), BF16, **FULL),
    Case("everything, a common width", (9, 4096), BF16, **FULL),
    Case("everything, a common width in fp32", (9, 4096), F32, **FULL),
    Case("everything, wide", (3, 16384), BF16, **FULL),
    Case("everything, odd and wide", (2, 50257), BF16, **FULL),
    Case("everything, h in 16 bits", (9, 4096), BF16, **(FULL | {"residual_out": BF16})),
    Case("everything, the longest", (2, 262144), BF16, **FULL),
    Case("everything, the longest in fp32", (1, 262144), F32, **(FULL | {"residual": F32})),
]

COUNTS = [
    Case("one row", (1, 256)),
    Case("two rows", (2, 256)),
    Case("three rows", (3, 256)),
    Case("more rows than CTAs", (1031, 256)),
    Case("one dimension", (256,)),
    Case("three dimensions", (3, 5, 256)),
    Case("four dimensions", (2, 3, 5, 256)),
    Case("five dimensions, some of size one", (2, 1, 3, 1, 256)),
]

HEADS = [
    Case("per head", (7, 5, 128), per_head=True),
    Case("per head, two dimensions", (5, 128), per_head=True),
    Case("per head, four dimensions", (2, 3, 5, 128), per_head=True, weight=BF16),
    Case("per head, bias, offset", (7, 5, 128), per_head=True, bias=F16, offset=1.0),
    Case("per head, bias without weight", (7, 5, 128), per_head=True, weight=None, bias=F32),
    Case("per head, odd", (7, 3, 65), per_head=True),
    Case("per head, one head", (7, 1, 64), per_head=True),
    Case("per head, wide", (3, 2, 4096), per_head=True),
    Case("per head, residual", (7, 5, 128), per_head=True, residual=BF16, prenorm=True),
]


@pytest.mark.parametrize("case", [*SIZES, *LONG, *COUNTS, *HEADS], ids=lambda case: case.id)
def test_forward_and_backward(case: Case, device: str) -> None:
    check(case, device)


def test_kn_19_row_index_beyond_16_bits(device: str) -> None:
    import torch

    from quack_norm.ops.rmsnorm.api import rmsnorm

    for rows in (65535, 65536, 65537, 2**21 if device == "cuda" else 2**17):
        x = torch.zeros(rows, 64, dtype=BF16, device=device)
        x[-3:] = torch.arange(1, 65, device=device)
        last = rmsnorm(x[-3:].clone())
        found = rmsnorm(x)
        assert torch.equal(found[-3:], last)
        assert float(found[-3:].abs().min()) > 0
        assert not found[:-3].any()
