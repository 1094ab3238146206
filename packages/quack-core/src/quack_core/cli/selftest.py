"""One kernel of a package, compiled, and on a GPU run and checked: a process of ``quack doctor``.

python -m quack_core.cli.selftest PACKAGE
"""

import importlib
import sys
import time

from quack_core import arch as arches
from quack_core.errors import DeviceError, UnsupportedError
from quack_core.jit.compile import compile_kernel
from quack_core.jit.keys import Kernel


def main(package: str) -> None:
    """Print what was done; raises what goes wrong."""
    try:
        arch, here = arches.detect(), True
    except DeviceError:
        arch, here = arches.SM90, False
    started = time.perf_counter()
    if package == "quack_core":
        from quack_core.jit import blank

        kernel = Kernel(blank.__name__, blank.BlankSpec(), blank.BlankConfig(), arch)
    else:
        try:
            kernel = importlib.import_module(f"{package}.kernels").selftest_kernel(arch)
        except UnsupportedError as error:  # such as one that has no kernels for this GPU yet
            print(f"nothing to compile for {arch.target}: {error}")
            return
    compiled = compile_kernel(kernel.module, kernel.spec, kernel.config, arch)
    _ = compiled.function  # loads
    text = f"{kernel.name} compiled for {arch.target} in {time.perf_counter() - started:.1f} s"
    if here and runs():
        if package == "quack_core":
            check_blank(compiled.function)
        else:
            importlib.import_module(f"{package}.kernels").selftest()
        text += ", run and right"
    print(text)


def runs() -> bool:
    """Whether torch is there and sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def check_blank(function: object) -> None:
    """Run the blank kernel.

    Raises:
        RuntimeError: its result is wrong.
    """
    import torch

    x = torch.zeros(1000, dtype=torch.int32, device="cuda")
    assert callable(function)
    function(x)
    if not bool((x == 1).all()):
        raise RuntimeError(f"the blank kernel left {int((x != 1).sum())} of 1000 elements wrong")


if __name__ == "__main__":
    main(sys.argv[1])
