"""GEMM with fused epilogues, one kernel family per architecture."""

import importlib
from typing import TYPE_CHECKING

from quack_gemm.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from quack_gemm.api import gemm as gemm

# Each public name and its module, imported on first use: those who want only a spec, on a machine
# without torch, do not pay for the rest.
_HOME = {"gemm": "quack_gemm.api"}

__all__ = ["__version__", "gemm"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next look-up finds it without a call
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
