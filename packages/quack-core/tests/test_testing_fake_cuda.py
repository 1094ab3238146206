"""Tensors on a GPU that does not exist."""

import ctypes

import pytest

tvm_ffi = pytest.importorskip("tvm_ffi")

from quack_core.testing.fake_cuda import FakeCuda, fake_cuda, rejection


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "float8_e4m3fn"])
def test_a_tensor_is_what_it_says(dtype):
    x = fake_cuda([4, 8], dtype, device=1)
    assert tuple(x.shape) == (4, 8)
    assert tuple(x.strides) == (8, 1)
    assert str(x.dtype) == dtype
    assert str(x.device) == "cuda:1"


def address_of(tensor):
    """The first field of a DLTensor."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = tensor.__dlpack__()
    return ctypes.c_void_p.from_address(pointer(capsule, b"dltensor")).value


def test_strides_and_address():
    x = fake_cuda([4, 8], strides=[64, 2], address=0x7F0000000008)
    assert tuple(x.strides) == (64, 2)
    assert address_of(x) == 0x7F0000000008
    assert tuple(fake_cuda([3, 0, 5]).strides) == (5, 5, 1)


def test_mistakes():
    with pytest.raises(ValueError, match="'half' is unknown: use one of int8"):
        FakeCuda([1], "half")
    with pytest.raises(ValueError, match="1 strides for 2 dimensions"):
        FakeCuda([1, 2], strides=[1])


def test_rejection():
    def refuse(x: object) -> None:
        raise TypeError("no")

    error = rejection(refuse, fake_cuda([1]))
    assert isinstance(error, TypeError) and str(error) == "no"
    with pytest.raises(AssertionError, match="accepted arguments"):
        rejection(lambda x: x, 1)
