"""The blocks of a tutorial run, one after another, as one program."""

import functools
import re
import runpy
from pathlib import Path

import pytest
import torch

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def compiles_here(device, monkeypatch):
    """The CPU may have no C++ compiler: there torch.compile runs the graph as it was traced."""
    torch._dynamo.reset()
    if device == "cpu":
        eager = functools.partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", eager)


def program(page: Path) -> str:
    """The blocks of a page, each on the lines that it has there, for the sake of tracebacks."""
    source, lines = page.read_text(), []
    for block in BLOCK.finditer(source):
        lines += [""] * (source.count("\n", 0, block.start(1)) - len(lines))
        lines += block[1].splitlines()
    return "\n".join(lines) + "\n"


def test_rmsnorm(root, compiles_here, tmp_path):
    script = tmp_path / "rmsnorm.py"
    script.write_text(program(root / "docs" / "tutorials" / "rmsnorm.md"))
    found = runpy.run_path(str(script))
    assert found["result"].shape == (4, 128, 512)
    assert found["compiled"] is not found["norm"]
    # every part of the qkv row has its gradient in place
    q, k, v = (part.abs().sum().item() for part in found["qkv"].grad.unbind(2))
    assert min(q, k, v) > 0
    assert found["message"].startswith("rmsnorm")
