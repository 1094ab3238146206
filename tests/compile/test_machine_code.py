"""Kernels disassembled together read as each of them does; none is left out by all sessions."""

from pathlib import Path

import kernel_faults
import machine_code
import pytest

from quack_core import arch, env
from quack_core.errors import UnsupportedError
from quack_core.jit import blank
from quack_core.jit.compile import Compiled, compile_kernel
from quack_core.testing import cubin
from quack_norm.ops.softmax import config as softmax
from quack_norm.ops.softmax.spec import SoftmaxFwdSpec

ARCH = arch.get(env.get("QUACK_COMPILE_ARCH"))


@pytest.fixture
def kernels(tmp_path: Path) -> list[Compiled]:
    spec = SoftmaxFwdSpec(64, "bfloat16", "bfloat16")
    config = softmax.FwdConfig(128)
    return [
        compile_kernel(config.module, spec, config, ARCH, dump_dir=tmp_path),
        compile_kernel(
            blank.__name__, blank.BlankSpec(), blank.BlankConfig(), ARCH, dump_dir=tmp_path
        ),
    ]


def read(text: str) -> list[list[str]]:
    """Instructions, without places and operands, where labels would stand."""
    lines = machine_code.LINE.finditer(text)
    return [line[0].partition("*/")[2].split()[:1] for line in lines]


def test_the_text_of_each_is_its_own(kernels: list[Compiled], tmp_path: Path) -> None:
    cubins = [kernel.cubin or b"" for kernel in kernels]
    found = machine_code.disassembled(cubins, ARCH, tmp_path)
    for text, code in zip(found, cubins, strict=True):
        assert len(read(text)) > 8
        assert read(text) == read(cubin.sass(code))
        assert cubin.accesses(text) == cubin.accesses(cubin.sass(code))


def test_faults_are_told_with_the_name_of_the_kernel(
    kernels: list[Compiled], tmp_path: Path
) -> None:
    code = machine_code.MachineCode(ARCH, tmp_path)
    assert list(code.faults()) == []
    for kernel in kernels:
        code.later(kernel, "first", lambda text: [])
        code.later(kernel, "second", lambda text: ["no EXIT"] * ("EXIT" in text))
    assert list(code.faults()) == [f"{kernel.name}, second: no EXIT" for kernel in kernels]


def test_sm100_and_sm120_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where configurations differ, or one has none, both compile; sm90 compiles all."""

    def config_of(case: int, own: arch.Arch) -> int:
        if case == 7 and own.name == "sm120":
            raise UnsupportedError("case", "too long", "none")
        return own.max_cluster if case == 3 else 0

    found = {}
    for name in ("sm90", *kernel_faults.TURNS):
        monkeypatch.setenv("QUACK_COMPILE_ARCH", name)
        cases = kernel_faults.in_turn(range(10), config_of)
        assert [case.values for case in cases] == [(i,) for i in range(10)]
        found[name] = {case.values[0] for case in cases if not case.marks}
    assert found["sm90"] == found["sm100"] | found["sm120"] == set(range(10))
    assert found["sm100"] & found["sm120"] == {3, 7}
    assert len(found["sm100"]) == len(found["sm120"]) == 6
