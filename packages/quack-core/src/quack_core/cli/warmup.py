"""``quack warmup``: fill the cache with the kernels of a model, of operators or of given calls.

It needs no GPU, so that it can run when a container image is built.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quack_core import arch as arches
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError
from quack_core.jit import operators, store
from quack_core.jit.keys import Kernel
from quack_core.jit.models import MODELS, Model
from quack_core.jit.pool import Pool

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "i32": "int32", "i64": "int64"}
"""Short names of dtypes; torch's own are understood as well."""

_TENSOR = re.compile(r"(\w+)\[([\d,\s]*)\]")


@dataclass(frozen=True)
class Result:
    """What was done.

    Args:
        folder: where the kernels lie.
        compiled: how many were compiled.
        present: how many were there already.
        failed: names of the others, with what went wrong.
        seconds: how long it took.
    """

    folder: str
    compiled: int
    present: int
    failed: tuple[tuple[str, str], ...]
    seconds: float


def model(name: str) -> Model:
    """A model by its name.

    Raises:
        UnsupportedError: it is unknown.
    """
    if name not in MODELS:
        raise UnsupportedError(
            f"model {name!r} is unknown",
            f"known: {', '.join(MODELS)}",
            "describe its calls in a file for --shapes",
        )
    return MODELS[name]


def calls_of_model(what: Model, arch: Arch) -> list[dict[str, Any]]:
    """The calls of a step of a model, of all installed packages that have kernels for it."""
    modules = filter(None, map(operators.listing, operators.PACKAGES))
    return [call for module in modules for call in module.model_calls(what, arch)]


def calls_of_file(path: Path) -> list[dict[str, Any]]:
    """The calls that a file describes: a JSON object a line, such as

        {"op": "rmsnorm", "x": "bf16[8192, 4096]", "weight": "bf16[4096]", "grad": true}

    ``op`` names the operator, ``grad`` asks for the backward as well, the rest are its arguments:
    ``dtype[sizes]`` stands for a tensor.

    Raises:
        ValueError: a line is no such object; the message says which.
    """
    calls = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        try:
            call = json.loads(text)
            known = isinstance(call, dict) and isinstance(call.get("op"), str)
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"{path}:{number}: expected a JSON object with 'op', found {text!r}")
        calls.append(call)
    return calls


def kernels_of(calls: Iterable[dict[str, Any]], arch: Arch) -> list[Kernel]:
    """The kernels that calls need, each once.

    Raises:
        UnsupportedError: no installed package has an operator of that name.
        TypeError, ValueError: arguments that the operator does not take.
    """
    found: dict[Kernel, None] = {}
    for call in calls:
        arguments = {name: value for name, value in call.items() if name not in ("op", "grad")}
        operands = {name: _value(each, call.get("grad")) for name, each in arguments.items()}
        try:
            kernels = _operator(call["op"])(**operands, arch=arch)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{json.dumps(call)}: {error}") from error
        found.update(dict.fromkeys(kernels))
    return list(found)


def fill(kernels: list[Kernel], workers: int, done: Callable[[Kernel, str | None], None]) -> Result:
    """Have kernels on disk.

    Args:
        workers: how many to compile at a time.
        done: called with each kernel that is ready, and with what went wrong or None.

    Raises:
        OSError: there is no folder that can be used.
    """
    started = time.perf_counter()
    place = store.make_folder()
    missing = [kernel for kernel in kernels if not store.has(place, kernel.key())]
    for kernel in kernels:
        if kernel not in missing:
            done(kernel, None)
    failed: list[tuple[str, str]] = []

    def note(kernel: Kernel, error: str | None) -> None:
        if error is None and not store.has(place, kernel.key()):
            error = f"it was compiled but not kept in {place}"
        if error is not None:
            failed.append((kernel.name, error.strip().splitlines()[-1]))
        done(kernel, error)

    if missing:
        with Pool(min(workers, len(missing))) as pool:
            pool.compile(missing, note)
    compiled = len(missing) - len(failed)
    present = len(kernels) - len(missing)
    seconds = round(time.perf_counter() - started, 3)
    return Result(str(place), compiled, present, tuple(failed), seconds)


def detect(text: str | None) -> Arch:
    """The architecture that an option names, else that of ``QUACK_ARCH`` or the GPU."""
    return arches.detect() if text is None else arches.get(text)


def operator_names() -> Iterator[str]:
    """Of all installed packages."""
    for package in operators.PACKAGES:
        module = operators.listing(package)
        if module is not None:
            yield from module.OPERATORS


def _operator(name: str) -> Callable[..., tuple[Kernel, ...]]:
    for package in operators.PACKAGES:
        module = operators.listing(package)
        if module is not None and name in module.OPERATORS:
            found: Callable[..., tuple[Kernel, ...]] = getattr(module, name)
            return found
    raise UnsupportedError(
        f"operator {name!r} is unknown", f"known: {', '.join(operator_names()) or 'none'}"
    )


def _value(value: Any, grad: object) -> Any:
    """An argument: a tensor without memory for ``bf16[8192, 4096]``, a dtype for its name."""
    if not isinstance(value, str):
        return value
    import torch  # packages of operators bring it

    match = _TENSOR.fullmatch(value.strip())
    name = match[1] if match else value
    dtype = getattr(torch, SHORT.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        if match:
            raise ValueError(f"{value!r}: {name} is no dtype; such as {', '.join(SHORT)}")
        return value
    if not match:
        return dtype
    shape = [int(each) for each in match[2].split(",") if each.strip()]
    return torch.empty(
        shape, dtype=dtype, device="meta", requires_grad=bool(grad) and dtype.is_floating_point
    )
