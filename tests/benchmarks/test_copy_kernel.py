"""The reference copy compiles without a GPU, with 128-bit accesses and 64-bit addresses."""

import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from benchmarks.copy_kernel import CONFIGS, CopyConfig, compile_copy, compile_empty


def ptx_of(dump: Path, config: CopyConfig, inputs: int) -> str:
    target = f"sm_90a --keep-ptx --dump-dir {dump}"
    return compile_copy(config, inputs, target).artifacts.PTX  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_copy_moves_128_bits_at_a_time(config: CopyConfig, inputs: int, tmp_path: Path) -> None:
    ptx = ptx_of(tmp_path, config, inputs)
    loads = re.findall(r"ld\.global\S*", ptx)
    stores = re.findall(r"st\.global\S*", ptx)
    # a full tile and a ragged one
    assert len(loads) == 2 * inputs * config.unroll
    assert len(stores) == 2 * config.unroll
    assert all(".v4." in access or ".v2.b64" in access for access in [*loads, *stores])
    first_store = ptx.index("st.global")
    assert ptx[:first_store].count("ld.global") >= inputs * config.unroll  # loads are in flight
    assert ".local" not in ptx


def test_dependent_launch_is_in_the_code(tmp_path: Path) -> None:
    for dependent in (False, True):
        target = f"sm_90a --keep-ptx --dump-dir {tmp_path}"
        ptx = compile_empty(dependent, target).artifacts.PTX  # type: ignore[attr-defined]
        assert ("griddepcontrol" in ptx) is dependent


def test_a_copy_reads_one_or_two() -> None:
    with pytest.raises(ValueError, match="inputs=3"):
        compile_copy(CONFIGS[0], 3)
