"""The key of a compiled kernel: everything that its machine code depends on, without the DSL.

A spec or config reaches the key as plain values: ``str``, ``int``, ``float``, ``bool``, ``None``,
members of a ``StrEnum``, tuples and frozen dataclasses of these, exactly these types. A NumPy integer, a 0-d tensor or a
symbolic integer is refused and not converted: converting here would leave the kernel with the
original, which hashes by identity or makes the host wait for the GPU.
"""

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from quack_core.arch import Arch

from . import sources, versions
from .options import DEFAULT, Options

FORMAT = 2
"""Changes when entries are stored differently."""

COMPILER = "quack_core.jit.compile"
"""Its sources belong to every key: they say how kernels are named and compiled."""


class Key(NamedTuple):
    """Name of a compiled kernel.

    Args:
        digest: SHA-256 of the record, in hexadecimal.
        record: what the kernel depends on, as JSON values.
    """

    digest: str
    record: dict[str, Any]

    def __hash__(self) -> int:
        return hash(self.digest)


class Kernel(NamedTuple):
    """A kernel as something to compile: the same for the cache, workers and warming up.

    Args:
        module: full name of the kernel module, with ``build(spec, config)``.
        spec: what to compute; frozen, plain values, and a ``name``.
        config: how to compute it; frozen, plain values.
        arch: what to compile for.
        options: compile options.
    """

    module: str
    spec: Any
    config: Any
    arch: Arch
    options: Options = DEFAULT

    @property
    def name(self) -> str:
        """As profilers and logs show it."""
        return str(self.spec.name)

    def key(self) -> Key:
        """Its key; see `key`."""
        return key(self.module, self.spec, self.config, self.arch, self.options)


def key(module: str, spec: Any, config: Any, arch: Arch, options: Options = DEFAULT) -> Key:
    """The key of the kernel that ``module`` builds from ``spec`` and ``config``.

    Args:
        module: full name of the kernel module; it is read, not imported.
        spec: what to compute.
        config: how to compute it.
        arch: ``arch.target`` is compiled for, ``arch.name`` chose the config.
        options: compile options.

    Raises:
        TypeError: a field of spec or config is no plain value.
        StaleSourceError: a source file changed under this process.
    """
    record = {
        "format": FORMAT,
        "module": module,
        "spec": plain(spec, "spec"),
        "config": plain(config, "config"),
        "target": arch.target,
        "arch": arch.name,
        "options": options._asdict(),
        "environment": _environment(),
        "dsl": versions.dsl(),
        "flavour": versions.flavour(),
        "tvm_ffi": versions.tvm_ffi(),
        "python": versions.python(),
        "host": versions.host(),
        "sources": sources.fingerprint(roots(module, spec, config)),
    }
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return Key(hashlib.sha256(text.encode()).hexdigest(), record)


def roots(module: str, *values: Any) -> tuple[str, ...]:
    """The modules whose sources count: the kernel's and those that define the values' classes."""
    owners = {owner for value in values for owner in _class_modules(value)}
    findable = {owner for owner in owners if sources.find(owner) is not None}
    return tuple(sorted({module, COMPILER, *findable}))


def plain(value: Any, name: str) -> Any:
    """``value`` as JSON that tells every two values apart.

    Args:
        value: plain value, see the head of this module.
        name: what to call it in an error, such as ``spec``.

    Raises:
        TypeError: it is, or contains, something else; the message names the field.
    """
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        return {"float": repr(value)}  # JSON has no NaN
    if isinstance(value, enum.StrEnum):
        return str(value)  # which it equals, also where specs are compared
    if kind is tuple:
        return [plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        fields = {f.name: plain(getattr(value, f.name), f"{name}.{f.name}") for f in _fields(value)}
        return {"class": f"{kind.__module__}.{kind.__qualname__}", "fields": fields}
    raise TypeError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}: keys of compiled kernels hold str, "
        f"int, float, bool, None, StrEnum, tuples and frozen dataclasses only; convert it, such as int(...)"
    )


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _class_modules(value: Any) -> Iterator[str]:
    if type(value) is tuple:
        for item in value:
            yield from _class_modules(item)
    elif dataclasses.is_dataclass(value):
        yield type(value).__module__
        for item in _fields(value):
            yield from _class_modules(getattr(value, item.name))


def _environment() -> dict[str, str]:
    """The DSL's own variables, some of which change code. The target never comes from one."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("CUTE_DSL_") and name != "CUTE_DSL_ARCH"
    }
