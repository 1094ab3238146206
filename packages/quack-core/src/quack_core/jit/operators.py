"""Which kernels a call of an operator needs, without making the call.

A package of operators has a module ``kernels`` with a function for each operator, of the same name,
which takes the operator's arguments and ``arch`` and returns a tuple of
:class:`quack_core.jit.keys.Kernel`. Packages are found by their names, not imported here.
"""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from quack_core import arch as arches
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError

from .keys import Kernel

PACKAGES = ("quack_norm", "quack_gemm", "quack_blockscaled")


def compile_keys(
    op: Callable[..., Any], *args: Any, arch: Arch | None = None, **kwargs: Any
) -> tuple[Kernel, ...]:
    """The kernels that ``op(*args, **kwargs)`` needs, and its backward if an operand has a gradient.

        x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
        [kernel.key().digest for kernel in compile_keys(quack_norm.softmax, x)]

    Nothing is compiled. ``quack_core.jit.cache.ensure(kernel)`` compiles one, for later processes.

    Args:
        op: a public operator of a quack package.
        args, kwargs: its arguments; tensors may lie on any device, such as ``"meta"``, and are
            taken to begin at multiples of 16 bytes.
        arch: what to compile for; by default as `quack_core.arch.detect`.

    Raises:
        UnsupportedError: the operator's package does not list its kernels.
        DeviceError: there is no GPU, and neither ``arch`` nor ``QUACK_ARCH`` names an architecture.
        TypeError, ShapeError: arguments that the operator does not take.
    """
    package = op.__module__.partition(".")[0]
    module = listing(package)
    list_kernels = getattr(module, op.__name__, None)
    if list_kernels is None:
        raise UnsupportedError(
            f"the kernels of {op.__module__}.{op.__name__} are not listed",
            f"operators with lists: those of {', '.join(PACKAGES)} as far as installed",
            "call it once to compile what it needs",
        )
    found: tuple[Kernel, ...] = list_kernels(*args, arch=arch or arches.detect(), **kwargs)
    return tuple(dict.fromkeys(found))


def listing(package: str) -> ModuleType | None:
    """The module ``kernels`` of a package of operators; None if there is none."""
    name = f"{package}.kernels"
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # no such package
        return None
    return None if found is None else importlib.import_module(name)
