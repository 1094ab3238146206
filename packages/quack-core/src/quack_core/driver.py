"""The CUDA driver through ``cuda.bindings``, which arrives with the DSL: loaded on first use."""

import contextlib
from collections.abc import Iterator
from typing import Any

from quack_core.errors import DeviceError


def load() -> Any:
    """The module ``cuda.bindings.driver`` with the driver initialised; creates no context.

    Raises:
        DeviceError: the bindings, the driver or a GPU are missing.
    """
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped,import-not-found]
    except ImportError as error:
        raise DeviceError(
            f"cuda.bindings cannot be imported ({error}): install nvidia-cutlass-dsl, "
            "which brings it"
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except (RuntimeError, OSError) as error:  # cuda.pathfinder raises when libcuda is missing
        raise DeviceError(f"no CUDA driver found ({_first_line(error)})") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver does not start: cuInit returned {status.name}")
    return driver


def call(function: Any, *args: Any) -> Any:
    """What a function of the driver returns, without the status in front.

    Raises:
        DeviceError: the status is an error; the message names the function and the status.
    """
    status, *values = function(*args)
    if status.value != 0:
        raise DeviceError(f"{function.__name__} returned {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def current_device() -> int:
    """Index of the device of the current context; 0 when none is current."""
    driver = load()
    if int(call(driver.cuCtxGetCurrent)) == 0:
        return 0
    return int(call(driver.cuCtxGetDevice))


@contextlib.contextmanager
def primary_context(device: Any) -> Iterator[None]:
    """Make the context that torch uses current on this thread, which may have another or none.

    Args:
        device: index of the CUDA device.

    Raises:
        DeviceError: there is no such device, or no room for its context.
    """
    driver = load()
    context = call(driver.cuDevicePrimaryCtxRetain, device)
    try:
        call(driver.cuCtxPushCurrent, context)
        try:
            yield
        finally:
            call(driver.cuCtxPopCurrent)
    finally:
        call(driver.cuDevicePrimaryCtxRelease, device)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
