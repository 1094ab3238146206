"""The script behind `nox -s layers` finds what it is there for, and finds nothing here."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def layers(root):
    spec = importlib.util.spec_from_file_location("layers", root / "tools" / "layers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["layers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["layers"]


def breaches(layers, folder: Path, sources: dict[str, str]) -> list[str]:
    for name, code in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return [line.replace(f"{folder}/", "") for line in layers.check(list(layers.read(folder)))]


CORE = {"quack_core/__init__.py": "", "quack_core/errors.py": "", "quack_core/jit.py": ""}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        pytest.param(
            {"quack_core/env.py": "import torch"},
            [
                "quack_core/env.py:1: a pure module imports torch",
                "quack_core/env.py:1: quack_core imports torch at module level here",
            ],
            id="pure module imports torch",
        ),
        pytest.param(
            {"quack_core/env.py": "from quack_core import jit"},
            ["quack_core/env.py:1: a pure module imports quack_core"],
            id="pure module imports an impure one",
        ),
        pytest.param(
            {"quack_norm/spec.py": "from .kernel import x", "quack_norm/kernel.py": ""},
            ["quack_norm/spec.py:1: a pure module imports quack_norm.kernel"],
            id="relative import",
        ),
        pytest.param(
            {"quack_core/cache.py": "try:\n    import torch\nexcept ImportError: pass"},
            ["quack_core/cache.py:2: quack_core imports torch at module level here"],
            id="guarded import is one too",
        ),
        pytest.param(
            {"quack_norm/api.py": "from quack_core.jit import _compile"},
            ["quack_norm/api.py:1: _compile is private to another module"],
            id="private name imported",
        ),
        pytest.param(
            {"quack_norm/api.py": "from quack_core import jit\njit._compile()"},
            ["quack_norm/api.py:2: _compile is private to another module"],
            id="private name through the module",
        ),
        pytest.param(
            {"quack_norm/__init__.py": "__all__ = ['rmsnorm']", "quack_norm/rmsnorm.py": ""},
            ["quack_norm/__init__.py: the module quack_norm.rmsnorm bears a public name"],
            id="module bears a public name",
        ),
        pytest.param(
            {"quack_norm/utils.py": ""},
            ["quack_norm/utils.py: a module is named by what is inside"],
            id="vague name",
        ),
    ],
)
def test_breach_is_found(layers, tmp_path, sources, expected):
    assert breaches(layers, tmp_path, CORE | sources) == expected


@pytest.mark.parametrize(
    "sources",
    [
        {"quack_core/env.py": "import os\nfrom quack_core import errors\nfrom .errors import X"},
        {"quack_core/cache.py": "def load():\n    import torch\n    return torch"},
        {
            "quack_core/env.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
        },
        {"quack_core/torch_op.py": "import torch\nfrom torch import Tensor"},
        {"quack_norm/api.py": "from quack_core.__about__ import __version__\nself._own = 1"},
        {"quack_norm/__init__.py": "__all__ = ['rmsnorm']", "quack_norm/ops/rmsnorm.py": ""},
    ],
)
def test_what_is_allowed_passes(layers, tmp_path, sources):
    assert breaches(layers, tmp_path, CORE | sources) == []


def test_the_repository_keeps_its_layers(layers, root):
    modules = [each for src in sorted(root.glob("packages/*/src")) for each in layers.read(src)]
    assert len(modules) > 20
    assert layers.check(modules) == []
