"""The rules that choose configurations: they fit, and the bits depend on N, dtypes and GPU only."""

import dataclasses
import math

import pytest

from quack_core import arch
from quack_core.errors import UnsupportedError
from quack_norm.ops.rmsnorm import config, rules
from quack_norm.ops.rmsnorm.spec import MAX_N, RMSNormBwdSpec, RMSNormFwdSpec
from quack_norm.ops.row_map import rules as row_rules

B, F = "bfloat16", "float32"
LENGTHS = [1, 2, 7, 8, 64, 127, 128, 255, 257, 512, 1000, 1001, 2048, 4095, 4096, 4098, 5120, 8192]
LENGTHS += [8200, 16383, 16384, 32768, 49160, 50257, 65536, 131072, 131080, 262139, MAX_N]
ARCHES = [arch.SM90, arch.SM100, arch.SM120]
by_arch = pytest.mark.parametrize("gpu", ARCHES, ids=lambda gpu: gpu.name)


def align(n: int, *names: str) -> int:
    return math.gcd(16, *(n * (2 if name == B else 4) for name in names))


def forward(n: int, x: str, weight: str, **fields: object) -> RMSNormFwdSpec:
    return RMSNormFwdSpec(n, x, x, weight=weight, align=align(n, x), **fields)  # type: ignore[arg-type]


def backward(n: int, x: str, weight: str, **fields: object) -> RMSNormBwdSpec:
    spec = RMSNormBwdSpec(n, x, x, x, weight=weight, dweight=True, align=align(n, x))
    return dataclasses.replace(spec, **fields)  # type: ignore[arg-type]


@by_arch
@pytest.mark.parametrize("dtypes", [(B, B), (B, F), (F, F)], ids="-".join)
@pytest.mark.parametrize("n", LENGTHS)
def test_defaults_fit(n: int, dtypes: tuple[str, str], gpu: arch.Arch) -> None:
    for spec in (forward(n, *dtypes), forward(n, *dtypes, residual=F, residual_out=F, bias=F)):
        chosen = rules.default_fwd(spec, gpu)
        assert chosen.cluster <= gpu.max_cluster
        assert chosen.smem_bytes(spec) <= gpu.smem_bytes
        assert chosen.num_threads * chosen.registers <= gpu.registers_per_sm
        assert chosen.tiling(spec).cols * chosen.cluster >= n
    spec = backward(n, *dtypes)
    if gpu is arch.SM120 and n > 131072:
        return  # see below
    chosen = rules.default_bwd(spec, gpu)
    assert chosen.cluster <= gpu.max_cluster
    assert chosen.ctas_per_sm * (chosen.smem_bytes(spec) + 1024) <= gpu.smem_per_sm
    assert chosen.tiling(spec).cols * chosen.split >= n
    assert chosen.tiling(spec).cols % (4 * chosen.peers) == 0  # what column sums need


@by_arch
@pytest.mark.parametrize("n", LENGTHS)
def test_address_and_stride_do_not_change_the_tiling(n: int, gpu: arch.Arch) -> None:
    """Batch invariance: a row has the same bits wherever it lies (contracts: the reduction tree)."""
    added = {"residual": B, "residual_out": F, "bias": F}
    for spec in (forward(n, B, B), forward(n, B, F), forward(n, F, F), forward(n, B, F, **added)):
        tiling = rules.default_fwd(spec, gpu).tiling(spec)
        for other in (2, 4, 8, 16):
            for in_phase in (True, False):
                moved = dataclasses.replace(
                    spec, align=other, weight_align=other, in_phase=in_phase
                )
                assert rules.default_fwd(moved, gpu).tiling(moved) == tiling


@pytest.mark.parametrize("n", [8192, 16384, 65536, MAX_N])
def test_few_rows_take_the_same_tiling(n: int) -> None:
    spec = forward(n, B, F)
    chosen = rules.default_fwd(spec, arch.SM90)
    assert chosen.persistent and not chosen.one_tile().persistent
    assert chosen.one_tile().tiling(spec) == chosen.tiling(spec)


def test_groups_are_what_is_resident_or_the_rows() -> None:
    spec = forward(16384, B, B)
    ring = config.FwdConfig(512, stages=1)
    assert [ring.groups(spec, rows, 1, 132) for rows in (1, 100, 132, 9999)] == [1, 100, 132, 132]


@by_arch
@pytest.mark.parametrize("n", [128, 4096, 4095, 16384, 65536])
def test_candidates_fit_and_begin_with_the_default(n: int, gpu: arch.Arch) -> None:
    spec, other = forward(n, B, F), backward(n, B, F)
    ahead, back = rules.candidates(spec, gpu), rules.candidates(other, gpu)
    assert ahead[0] == rules.default_fwd(spec, gpu) and back[0] == rules.default_bwd(other, gpu)
    assert len(set(ahead)) == len(ahead) > 1 and len(set(back)) == len(back) > 1
    assert all(row_rules.fits(each, spec, gpu) for each in ahead)
    assert all(rules.fits_bwd(each, other, gpu) for each in back)


@pytest.mark.parametrize("n", [131080, 262139, MAX_N])
def test_what_no_configuration_serves_says_so(n: int) -> None:
    spec = backward(n, F, F, dbias=F)
    assert rules.default_bwd(spec, arch.SM90).split == 16
    with pytest.raises(UnsupportedError, match=f"n={n} on sm120"):
        rules.default_bwd(spec, arch.SM120)


@pytest.mark.parametrize(
    "fields", [{"n": 0}, {"n": MAX_N + 1}, {"rank": 4}, {"per_head": True}, {"align": 3}], ids=str
)
def test_specs_refuse(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be|have 1 to|needs rank"):
        RMSNormFwdSpec(**{"n": 8, "x": B, "out": B, **fields})  # type: ignore[arg-type]
