"""The rules that choose configurations: they fit, and the bits depend on N, dtypes and GPU only."""

import dataclasses
import math

import pytest

from quack_core import arch
from quack_core.errors import UnsupportedError
from quack_norm.ops.rmsnorm import bwd_rules, config, rules
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.spec import MAX_N, RMSNormFwdSpec
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
    chosen = bwd_rules.default_bwd(spec, gpu)
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


def owners(chosen: config.FwdConfig, spec: RMSNormFwdSpec) -> list[tuple[int, int, int]]:
    """(CTA in the cluster, thread, value of the thread) of each vector of a row."""
    columns = range(0, spec.n, spec.vec)
    if not chosen.unroll:
        return [chosen.tiling(spec).owner(column) for column in columns]
    batch, found = chosen.batch(spec), []
    for column in columns:
        rank, column = divmod(column, chosen.slice_cols(spec))
        turn, column = divmod(column, batch.n)
        _, thread, value = batch.owner(column)
        found.append((rank, thread, turn * batch.values + value))
    return found


@pytest.mark.exhaustive
@by_arch
@pytest.mark.parametrize("n", [4096, 4104, 5120, 8192, 8200, 16384, 32776, 65544, MAX_N])
def test_few_rows_are_added_up_alike(n: int, gpu: arch.Arch) -> None:
    """Rows move otherwise where there are few; threads own the same elements, in the same order."""
    added = {"residual": B, "residual_out": F, "bias": F}
    specs = [forward(n, B, B), forward(n, B, F), forward(n, F, F), forward(n, B, F, **added)]
    for spec in (*specs, forward(n, B, F, centred=True)):
        chosen = rules.default_fwd(spec, gpu)
        few = chosen.for_few(spec)
        if few is not None:
            assert not (few.persistent or few.unroll or few.shifted or few.ctas_per_sm)
            assert few.threads_per_row == chosen.threads_per_row and few.rows_per_cta == 1
            assert few.cluster == chosen.cluster and few.num_threads <= gpu.max_threads
            assert owners(few, spec) == owners(chosen, spec)
        crowd = chosen.crowded(spec, gpu)
        if crowd is not None:
            assert crowd.unroll and crowd.ctas_per_sm * crowd.num_threads <= gpu.max_threads_per_sm
            assert owners(crowd, spec) == owners(chosen, spec)


def test_which_rows_move_otherwise_where_they_are_few() -> None:
    """Those that threads hold while they move; not those read in batches, nor odd ones."""
    expected = {4096: False, 8192: True, 16384: False, 65536: False, 131072: True, 16383: False}
    found = {}
    for n in expected:
        spec = forward(n, B, F)
        found[n] = rules.default_fwd(spec, arch.SM90).for_few(spec) is not None
    assert found == expected


def test_rows_of_which_all_would_be_on_the_gpu_at_once() -> None:
    """16-bit rows of 4096 of one tensor, whose results are not float32."""
    plain = [forward(4096, B, B), forward(4096, B, F)]
    others = [
        forward(4096, F, F),
        dataclasses.replace(forward(4096, B, B), out=F),
        forward(4096, B, B, centred=True),
    ]
    others += [forward(4096, B, B, residual=B, residual_out=B), forward(2048, B, B)]
    others += [forward(8192, B, B), forward(4096, B, B, rank=3, per_head=True)]
    for specs, has in ((plain, True), (others, False)):
        for spec in specs:
            chosen = rules.default_fwd(spec, arch.SM90)
            assert (chosen.crowded(spec, arch.SM90) is not None) == has, spec


def test_groups_are_what_is_resident_or_the_rows() -> None:
    spec = forward(16384, B, B)
    ring = config.FwdConfig(512, stages=1)
    assert [ring.groups(spec, rows, 1, 132) for rows in (1, 100, 132, 9999)] == [1, 100, 132, 132]


@by_arch
@pytest.mark.parametrize("n", [128, 4096, 4095, 16384, 65536])
def test_candidates_fit_and_begin_with_the_default(n: int, gpu: arch.Arch) -> None:
    spec, other = forward(n, B, F), backward(n, B, F)
    ahead, back = rules.candidates(spec, gpu), bwd_rules.candidates(other, gpu)
    assert ahead[0] == rules.default_fwd(spec, gpu) and back[0] == bwd_rules.default_bwd(other, gpu)
    assert len(set(ahead)) == len(ahead) > 1 and len(set(back)) == len(back) > 1
    assert all(row_rules.fits(each, spec, gpu) for each in ahead)
    assert all(bwd_rules.fits_bwd(each, other, gpu) for each in back)


@pytest.mark.parametrize("n", [131080, 262139, MAX_N])
def test_what_no_configuration_serves_says_so(n: int) -> None:
    spec = backward(n, F, F, dbias=F)
    assert bwd_rules.default_bwd(spec, arch.SM90).split == 16
    with pytest.raises(UnsupportedError, match=f"n={n} on sm120"):
        bwd_rules.default_bwd(spec, arch.SM120)


@pytest.mark.parametrize(
    "fields", [{"n": 0}, {"n": MAX_N + 1}, {"rank": 4}, {"per_head": True}, {"align": 3}], ids=str
)
def test_specs_refuse(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be|have 1 to|needs rank"):
        RMSNormFwdSpec(**{"n": 8, "x": B, "out": B, **fields})  # type: ignore[arg-type]


def test_float32_columns_are_read_for_two_rows_at_once() -> None:
    def rows(**fields: object) -> int:
        base = RMSNormFwdSpec(8192, "bfloat16", "bfloat16", "float32", bias="float32", centred=True)
        return rules.default_fwd(dataclasses.replace(base, **fields), arch.SM90).rows_per_thread

    assert rows() == 2
    assert rows(weight="bfloat16", bias="bfloat16") == 1
    assert rows(bias=None) == 1
    assert rows(n=8191, align=2) == 1
    assert rows(per_head=True, rank=3) == 1  # neighbouring rows have other columns
