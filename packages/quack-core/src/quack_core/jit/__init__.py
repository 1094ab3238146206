"""Compiling kernels and keeping what was compiled."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operators import compile_keys as compile_keys
    from .policy import jit_policy as jit_policy
    from .stats import JitStats as JitStats
    from .stats import jit_stats as jit_stats

# Each public name and its module, imported on first use: a call needs none of them.
_HOME = {
    "JitStats": "stats",
    "compile_keys": "operators",
    "jit_policy": "policy",
    "jit_stats": "stats",
}

__all__ = ["JitStats", "compile_keys", "jit_policy", "jit_stats"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next look-up finds it without a call
    return value
