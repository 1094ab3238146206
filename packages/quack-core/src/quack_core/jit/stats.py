"""What this process did to get its kernels."""

import operator
import threading
from typing import NamedTuple

_lock = threading.Lock()


class JitStats(NamedTuple):
    """Counts since the process started.

    Args:
        compiled: kernels compiled by this process.
        loaded: kernels loaded from disk.
        deferred: calls put off until a worker has compiled their kernel.
        compile_seconds: time spent compiling, linking and storing, in seconds.
        load_seconds: time spent loading from disk, in seconds.
    """

    compiled: int = 0
    loaded: int = 0
    deferred: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0

    def __sub__(self, before: "JitStats") -> "JitStats":
        """What happened since ``before``."""
        return JitStats(*map(operator.sub, self, before))


_now = JitStats()


def jit_stats() -> JitStats:
    """What this process compiled and loaded so far; subtract an earlier answer to count a part."""
    return _now


def count(*, compiled: int = 0, loaded: int = 0, deferred: int = 0, seconds: float = 0.0) -> None:
    """Add to the counts; ``seconds`` belong to what is compiled or loaded."""
    global _now
    with _lock:
        _now = JitStats(
            _now.compiled + compiled,
            _now.loaded + loaded,
            _now.deferred + deferred,
            _now.compile_seconds + (seconds if compiled else 0.0),
            _now.load_seconds + (seconds if loaded else 0.0),
        )
