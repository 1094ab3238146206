"""What every config must keep to, over all that can be made."""

import itertools

import pytest

from quack_core.gemm.epilogue import Activation, AddVector, Gate, Kind, Scale, StoreAux
from quack_gemm.config import ATOM_M, SMEM_BYTES, WARPGROUP, GemmConfig
from quack_gemm.spec import GemmSpec

BF16, FP32, FP8 = "bfloat16", "float32", "float8_e4m3fn"
SPECS = {
    "bfloat16": GemmSpec(BF16, BF16, BF16),
    "float32 out": GemmSpec(BF16, BF16, FP32),
    "copy": GemmSpec(BF16, BF16, BF16, epilogue=(StoreAux(BF16), Activation("silu"))),
    "gate": GemmSpec(BF16, BF16, BF16, epilogue=(Gate("silu"),)),
    "bias, gate": GemmSpec(BF16, BF16, FP32, epilogue=(AddVector(BF16), Gate("silu"))),
    "fp8": GemmSpec(FP8, FP8, BF16, epilogue=(Scale(Kind.ROW, "b"), Scale(Kind.COLUMN, "a"))),
}


def configs(spec):
    """All that the kernel of a spec can be built with, and the errors of the others."""
    fields = (64, 128, 192, 256), range(16, 257, 16), (1, 2, 4), (1, 2, 4), (False, True)
    accepted, errors = [], []
    for tile_m, tile_n, cluster_m, cluster_n, pingpong in itertools.product(*fields):
        try:
            config = GemmConfig(tile_m, tile_n, cluster_m, cluster_n, pingpong)
            config.check(spec)
        except ValueError as error:
            errors.append(str(error))
        else:
            accepted.append(config)
    return accepted, errors


@pytest.mark.parametrize("name", SPECS)
def test_invariants_of_all_configs(name):
    spec = SPECS[name]
    accepted, _ = configs(spec)
    assert len(accepted) > 150
    for config in accepted:
        few, many = config.registers  # setmaxnreg takes multiples of 8; an SM has 65536
        assert few % 8 == many % 8 == 0 and 24 <= few <= many <= 256
        assert WARPGROUP * (few + config.groups * many) <= 65536
        assert config.accumulators < many
        assert config.tile_m == ATOM_M * config.atoms * config.sharing
        assert config.buffers(spec) == min(2, config.pieces(spec) // config.shares(spec))
        cols = config.piece_cols(spec)
        assert config.tile_n % cols == 0
        for i in range(len(spec.outputs)):
            assert spec.cols(i, cols) in (16, 32, 64, 128)  # whole stmatrix
        assert config.smem_bytes(spec) <= SMEM_BYTES
        assert config.stage_bytes(spec) < 2**20  # what an mbarrier counts
        assert WARPGROUP * (1 + config.groups) <= 512


def test_ctas_of_a_cluster_divide_the_pairs_of_a_tile():
    """Else the copies of a tile, of 16 columns of pairs at least, come to more than the tile."""
    accepted, errors = configs(SPECS["gate"])
    for config in accepted:
        blocks = config.tile_n // 16
        taken = -(-blocks // config.cluster_m) * 16  # in whole blocks, or halves of one
        taken = taken // (config.cluster_m // blocks) if config.cluster_m > blocks else taken
        assert taken * config.cluster_m == config.tile_n
    assert any("4 CTAs cannot share 6 blocks of 16 columns of pairs" in error for error in errors)
