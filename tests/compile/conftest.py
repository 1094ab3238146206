"""Tests of this folder share modules that importlib mode does not find."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quack_core import arch, env

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Checks of machine code, which are made when the last test of a module has ended."""
    from machine_code import MachineCode

    waiting = MachineCode(arch.get(env.get("QUACK_COMPILE_ARCH")), tmp_path_factory.mktemp("code"))
    yield waiting
    if faults := list(waiting.faults()):
        pytest.fail("\n".join(faults), pytrace=False)
