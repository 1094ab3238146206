"""Every environment variable of the project: the one table, which the packages read through."""

import os
from typing import Literal, NamedTuple, overload

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


class Variable(NamedTuple):
    """One variable.

    Args:
        name: as it stands in the environment.
        type: ``str``, ``bool`` or ``int``.
        default: the value when it is unset or empty; ``None`` if ``shown`` tells what happens then.
        meaning: one sentence.
        shown: how the documentation describes the default, if not by its value.
        choices: the values that it can have, in lower case; empty if there are others.
    """

    name: str
    type: type
    default: str | bool | int | None
    meaning: str
    shown: str = ""
    choices: tuple[str, ...] = ()

    def parse(self, text: str) -> str | bool | int | None:
        """The value that ``text`` stands for.

        Raises:
            ValueError: ``text`` is no value of this type.
        """
        if not text:
            return self.default
        if self.type is bool:
            return self._parse_bool(text)
        if self.type is int:
            return self._parse_int(text)
        return text

    def _parse_bool(self, text: str) -> bool:
        lower = text.lower()
        if lower not in _TRUE + _FALSE:
            raise ValueError(f"{self.name}={text!r}: expected 1 or 0")
        return lower in _TRUE

    def _parse_int(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r}: expected a whole number") from None


VARIABLES = (
    Variable(
        "QUACK_ARCH",
        str,
        None,
        "Architecture to choose and compile kernels for (`sm90`, `sm_90a` or `9.0`), in place of "
        "the one of the GPU; needed on a machine without a GPU; it counts at the first call of a "
        "kind, whose kernel later calls keep.",
        "the GPU's",
    ),
    Variable(
        "QUACK_CACHE_DIR",
        str,
        None,
        "Folder of compiled kernels.",
        "the user's cache folder",
    ),
    Variable(
        "QUACK_CACHE_MAX_MB",
        int,
        2048,
        "Size that compiled kernels may take on disk, in MiB; those not used for longest go first; "
        "0 means any size.",
    ),
    Variable(
        "QUACK_COMPILE_ARCH",
        str,
        "sm90",
        "Tests only: the architecture that the compile tests compile for.",
    ),
    Variable(
        "QUACK_JIT",
        str,
        "allow",
        "What happens when a kernel has to be compiled: `allow`, `warn` (and compile) or `error`.",
        choices=("allow", "warn", "error"),
    ),
    Variable(
        "QUACK_LOG",
        str,
        None,
        "Level of the logger `quack`, written to stderr: `DEBUG`, `INFO`, `WARNING` or `ERROR`.",
        "as the application configures logging",
        choices=("debug", "info", "warning", "error"),
    ),
    Variable(
        "QUACK_REQUIRE_GPU",
        bool,
        False,
        "Tests only: a missing GPU is a failure, not a reason to skip.",
    ),
    Variable(
        "QUACK_TORCH",
        str,
        None,
        "`nox` only: the requirement, such as `torch==2.13.0`, that replaces the locked CUDA "
        "build of torch in test environments.",
        "the locked build",
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


@overload
def get(name: Literal["QUACK_REQUIRE_GPU"]) -> bool: ...
@overload
def get(name: Literal["QUACK_CACHE_MAX_MB"]) -> int: ...
@overload
def get(name: Literal["QUACK_COMPILE_ARCH", "QUACK_JIT"]) -> str: ...
@overload
def get(
    name: Literal["QUACK_ARCH", "QUACK_CACHE_DIR", "QUACK_LOG", "QUACK_TORCH"],
) -> str | None: ...
def get(name: str) -> str | bool | int | None:
    """The value of a variable now; the environment is read at each call.

    Args:
        name: one of `VARIABLES`.

    Raises:
        KeyError: there is no such variable.
        ValueError: its text is no value of its type.
    """
    try:
        variable = _BY_NAME[name]
    except KeyError:
        raise KeyError(f"{name}: not in quack_core.env.VARIABLES") from None
    return variable.parse(os.environ.get(name, ""))


def table() -> str:
    """All variables as a Markdown table, one row each, in alphabetical order."""
    rows = ["| Variable | Type | Default | Meaning |", "|---|---|---|---|"]
    for variable in sorted(VARIABLES, key=lambda item: item.name):
        default = variable.shown or f"`{_spell(variable.default)}`"
        kind = variable.type.__name__
        rows.append(f"| `{variable.name}` | {kind} | {default} | {variable.meaning} |")
    return "\n".join(rows) + "\n"


def _spell(value: str | bool | int | None) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
