"""The CUDA driver, loaded on first use.

Through ``cuda.bindings``, which arrives with the DSL; what the first call of a kernel needs comes from
the driver's library itself, because importing the bindings takes 10 ms.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from quack_core.errors import DeviceError

LIBRARY = "libcuda.so.1"
MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _COMPUTE_CAPABILITY_MAJOR and its neighbour."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


# --- the library itself


@functools.cache
def library() -> Any:
    """The driver's library, initialised; creates no context.

    Raises:
        DeviceError: the driver or a GPU is missing.
    """
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(f"no CUDA driver found ({_first_line(error)})") from error
    _ask(found, "cuInit", 0)
    return found


def capability(device_index: int) -> tuple[int, int]:
    """Compute capability of a device.

    Raises:
        DeviceError: no driver, or no such device.
    """
    major, minor = _attributes(device_index, MAJOR, MINOR)
    return major, minor


@functools.cache
def multiprocessors(device_index: int) -> int:
    """SMs of a device.

    Raises:
        DeviceError: no driver, or no such device.
    """
    return _attributes(device_index, MULTIPROCESSORS)[0]


def _attributes(device_index: int, *names: int) -> list[int]:
    api, device, found = library(), ctypes.c_int(), [ctypes.c_int() for _ in names]
    _ask(api, "cuDeviceGet", ctypes.byref(device), device_index)
    for number, name in zip(found, names, strict=True):
        _ask(api, "cuDeviceGetAttribute", ctypes.byref(number), name, device)
    return [number.value for number in found]


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load modules and allocate while a graph is recorded, by it or another.

    The strict modes of capture forbid both. Nothing of it is recorded.
    """
    before = exchange_capture_mode(RELAXED)
    try:
        yield
    finally:
        exchange_capture_mode(before)


def exchange_capture_mode(mode: int) -> int:
    """Set what this thread may do while a graph is recorded; returns the mode so far."""
    value = ctypes.c_int(mode)
    _ask(library(), "cuThreadExchangeStreamCaptureMode", ctypes.byref(value))
    return value.value


def _ask(api: Any, name: str, *args: Any) -> None:
    status = getattr(api, name)(*args)
    if status:
        text = ctypes.c_char_p()
        api.cuGetErrorName(status, ctypes.byref(text))
        raise DeviceError(f"{name} returned {(text.value or str(status).encode()).decode()}")


# --- the bindings


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
