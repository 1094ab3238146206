"""What happens when a kernel has to be compiled: nothing special, a warning, an error, or a wait.

`jit_policy` holds for the whole process, as torch runs backward passes in threads of its own. Loading
a kernel from disk is never against a policy.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from quack_core import env, log
from quack_core.errors import JitForbiddenError

from .keys import Kernel, Key

Mode = Literal["allow", "warn", "error"]
OnMiss = Callable[[Kernel, Key], None]
"""Called before a kernel is compiled; what it raises, the caller of the operator gets."""

_entered: list[tuple[int | None, OnMiss]] = []  # the thread that it is for, None for all
_lock = threading.Lock()


@contextlib.contextmanager
def jit_policy(mode: Mode) -> Iterator[None]:
    """Inside, compiling a kernel is allowed, warned about, or an error; the innermost one counts.

        with jit_policy("error"):
            serve()  # a kernel that nobody warmed up raises instead of stalling a request

    Outside of any, ``QUACK_JIT`` says which.

    Args:
        mode: ``"allow"``; ``"warn"``: compile, after a warning in the log; ``"error"``: raise
            `JitForbiddenError`, which names the kernel and how to compile it beforehand.

    Raises:
        ValueError: another word.
    """
    with during(_on_miss(mode, "jit_policy")):
        yield


@contextlib.contextmanager
def forbidden(why: str) -> Iterator[None]:
    """Inside, compiling a kernel on this thread raises JitForbiddenError.

    Args:
        why: what is going on, such as ``"a CUDA graph is being captured"``.
    """

    def refuse(kernel: Kernel, key: Key) -> None:
        raise _error(kernel, key, why)

    with during(refuse, threading.get_ident()):
        yield


@contextlib.contextmanager
def during(on_miss: OnMiss, thread: int | None = None) -> Iterator[None]:
    """Inside, ``on_miss`` is called before a kernel is compiled, by ``thread`` if it names one."""
    entry = (thread, on_miss)
    with _lock:
        _entered.append(entry)
    try:
        yield
    finally:
        with _lock:  # threads may leave in another order than they entered
            last = len(_entered) - 1 - _entered[::-1].index(entry)
            del _entered[last]


def check(kernel: Kernel, key: Key) -> None:
    """Apply the policy to a kernel that memory and disk do not hold.

    Raises:
        JitForbiddenError: it may not be compiled.
        ValueError: ``QUACK_JIT`` is no policy.
    """
    mine = (None, threading.get_ident())
    with _lock:
        entered = [on_miss for thread, on_miss in _entered if thread in mine]
    on_miss = entered[-1] if entered else _on_miss(env.get("QUACK_JIT"), "QUACK_JIT")
    on_miss(kernel, key)


def _on_miss(mode: str, origin: str) -> OnMiss:
    if mode not in get_args(Mode):
        raise ValueError(f"{origin}={mode!r}: expected one of {', '.join(get_args(Mode))}")
    return {"allow": _allow, "warn": _warn, "error": _refuse}[mode]


def _allow(kernel: Kernel, key: Key) -> None:
    """Compile."""


def _warn(kernel: Kernel, key: Key) -> None:
    log.get("quack.jit").warning(
        "%s for %s is not in the cache (key %s) and is compiled now",
        kernel.name,
        kernel.arch.target,
        key.digest[:12],
    )


def _refuse(kernel: Kernel, key: Key) -> None:
    raise _error(kernel, key, "the policy is error")


def _error(kernel: Kernel, key: Key, why: str) -> JitForbiddenError:
    return JitForbiddenError(
        f"{kernel.name} for {kernel.arch.target} is not in the cache (key {key.digest[:12]}) and "
        f"may not be compiled: {why}. Call the operator once beforehand with operands of this "
        "kind, or run `quack warmup`, with the same QUACK_CACHE_DIR and versions"
    )
