"""CUDA tensors without CUDA: argument checks of compiled kernels on a machine that has no GPU.

A compiled function checks dtypes, shapes, strides, alignment and devices before it calls CUDA.
:func:`fake_cuda` describes, through DLPack, memory on a GPU that need not exist. Only make calls
that must be rejected, through :func:`rejection`: an accepted one launches on an invented address.
"""

import contextlib
import ctypes
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_CUDA = 2
_PAGE = 0x7F0000000000
"""An address divisible by every alignment that a kernel may ask for."""

# DLPack's type code and the bits of one element.
_TYPES = {
    "int8": (0, 8),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "bool": (6, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
    "float8_e8m0fnu": (14, 8),
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Managed(ctypes.Structure):
    """DLManagedTensor: a DLTensor, a context and a deleter."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_alive: list["FakeCuda"] = []
"""There is no deleter: a consumer may keep a description for as long as it likes."""


class FakeCuda:
    """Implements the DLPack protocol for memory that does not exist.

    Args:
        shape: extents.
        dtype: torch's name, such as ``"bfloat16"``.
        strides: in elements; row-major by default.
        address: of the first element.
        device: index of the GPU.

    Raises:
        ValueError: the dtype is unknown, or there are more or fewer strides than extents.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str = "bfloat16",
        *,
        strides: Sequence[int] | None = None,
        address: int = _PAGE,
        device: int = 0,
    ) -> None:
        if dtype not in _TYPES:
            raise ValueError(f"dtype {dtype!r} is unknown: use one of {', '.join(_TYPES)}")
        strides = _row_major(shape) if strides is None else strides
        if len(strides) != len(shape):
            raise ValueError(f"{len(strides)} strides for {len(shape)} dimensions")
        code, bits = _TYPES[dtype]
        int64s = ctypes.c_int64 * len(shape)
        self.shape, self.strides = int64s(*shape), int64s(*strides)
        self.managed = _Managed(
            address,
            _Device(_CUDA, device),
            len(shape),
            _DataType(code, bits, 1),
            self.shape,
            self.strides,
            0,
        )
        _alive.append(self)

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, int(self.managed.device.index)


def fake_cuda(shape: Sequence[int], dtype: str = "bfloat16", **layout: Any) -> Any:
    """A tvm_ffi tensor on an invented GPU; the arguments are those of :class:`FakeCuda`."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(FakeCuda(shape, dtype, **layout))


def rejection(function: Callable[..., object], *args: object) -> Exception:
    """The exception of a call that must fail.

    Raises:
        AssertionError: the call was accepted.
    """
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - whichever it is, it is the answer
        return error
    raise AssertionError(f"{function!r} accepted arguments that it must reject")


def _row_major(shape: Sequence[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= max(1, extent)
    return strides


def stand_in(monkeypatch: "pytest.MonkeyPatch", load: Callable[..., Any]) -> None:
    """An H200 in place of what launchers ask of a GPU, and of finding kernels. Needs torch.

    Args:
        load: in place of ``quack_core.jit.cache.load``; what it returns is launched.
    """
    import torch

    from quack_core import arch, driver, occupancy, torch_workspace
    from quack_core.jit import cache

    gpu = types.SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(arch, "detect", lambda *_: arch.SM90)
    monkeypatch.setattr(driver, "multiprocessors", lambda *_: 132)
    monkeypatch.setattr(occupancy, "resident_clusters", lambda *_: 66)
    monkeypatch.setattr(torch_workspace, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(cache, "load", load)
