"""Exception types. Each is also the builtin type that fits, so callers need not know ours."""


class QuackError(Exception):
    """Base of every error that the quack packages raise on purpose."""


class ShapeError(QuackError, ValueError):
    """A size, rank or divisibility does not fit."""


class LayoutError(QuackError, ValueError):
    """Strides, alignment or the form of a layout do not fit."""


class DTypeError(QuackError, TypeError):
    """An operand has a dtype that the operation does not take."""


class DeviceError(QuackError, ValueError):
    """Operands are on the wrong device, or no usable device or driver was found."""


class UnsupportedError(QuackError, NotImplementedError):
    """The request is well formed, but beyond what is implemented.

    Args:
        what: what was asked for, with its value.
        limit: what is possible.
        way_out: what the caller can do instead.
    """

    def __init__(self, what: str, limit: str = "", way_out: str = "") -> None:
        super().__init__(what, limit, way_out)
        self.what = what
        self.limit = limit
        self.way_out = way_out

    def __str__(self) -> str:
        return "; ".join(part for part in (self.what, self.limit, self.way_out) if part)


class ArchError(UnsupportedError):
    """The GPU architecture is unknown, or lacks what the kernel needs."""


class CompileError(QuackError, RuntimeError):
    """A kernel could not be compiled."""


class JitForbiddenError(QuackError, RuntimeError):
    """A kernel would have to be compiled where that may not happen."""


class StaleSourceError(QuackError, RuntimeError):
    """A module's file changed after it was imported, so a cache key would describe other code."""
