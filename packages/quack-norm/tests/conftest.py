"""Tests of this folder share modules that importlib mode does not find."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in behind launches on CPU tensors."""
    import rmsnorm_fake

    return rmsnorm_fake.install(monkeypatch)
