"""Compiling kernels and keeping what was compiled."""

from .policy import jit_policy as jit_policy
from .stats import JitStats as JitStats
from .stats import jit_stats as jit_stats

__all__ = ["JitStats", "jit_policy", "jit_stats"]
