"""Compiling kernels and keeping what was compiled."""

from .operators import compile_keys as compile_keys
from .policy import jit_policy as jit_policy
from .stats import JitStats as JitStats
from .stats import jit_stats as jit_stats

__all__ = ["JitStats", "compile_keys", "jit_policy", "jit_stats"]
