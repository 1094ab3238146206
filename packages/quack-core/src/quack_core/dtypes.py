"""Dtype names, spelt as torch spells them, so that specs need neither torch nor cutlass."""

from quack_core.errors import DTypeError

# name: (bits, short name for kernel names)
_TABLE = {
    "float32": (32, "fp32"),
    "bfloat16": (16, "bf16"),
    "float16": (16, "fp16"),
    "float8_e4m3fn": (8, "e4m3"),
    "float8_e5m2": (8, "e5m2"),
}

SUPPORTED = ("float32", "bfloat16", "float16")
"""Dtypes of operands of row operators, widest first."""


def width(name: str) -> int:
    """Size of one element in bits.

    Raises:
        DTypeError: no such dtype.
    """
    return _entry(name)[0]


def short(name: str) -> str:
    """Abbreviation for kernel names: ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        DTypeError: ``name`` is not one of `SUPPORTED`.
    """
    return _entry(name)[1]


def _entry(name: str) -> tuple[int, str]:
    try:
        return _TABLE[name]
    except (KeyError, TypeError):
        raise DTypeError(
            f"dtype {name!r} is not supported: expected one of {', '.join(SUPPORTED)}"
        ) from None
