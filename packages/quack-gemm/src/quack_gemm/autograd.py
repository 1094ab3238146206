"""GEMM as a registered operator: what torch.compile, export, fake tensors and the CPU see.

An epilogue crosses torch's dispatcher as a text, by which it is looked up again, and so do the
dtypes of the results: torch's own type for a list of them comes back as numbers while tracing.
"""

import ast
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import UnsupportedError
from quack_core.gemm.epilogue import Kind, Op

from . import check, launch, reference
from .config import GemmConfig
from .reference import Step

_LIBRARY = torch.library.Library("quack_gemm", "FRAGMENT")


def call(
    a: Tensor,
    b: Tensor,
    steps: Sequence[Step],
    out_dtypes: Sequence[torch.dtype],
    concat: bool,
    config: GemmConfig | int | None = None,
) -> list[Tensor]:
    """Through the dispatcher; arguments as of ``launch.forward``."""
    found: list[Tensor] = gemm_fwd(*arguments(a, b, steps, out_dtypes, concat, config))
    return found


def arguments(
    a: Tensor,
    b: Tensor,
    steps: Sequence[Step],
    out_dtypes: Sequence[torch.dtype],
    concat: bool,
    config: GemmConfig | int | None = None,
) -> tuple[Any, ...]:
    """The operator's; parameters as of ``launch.forward``."""
    ops = tuple(op for op, _ in steps)
    text = "\n".join([_text(op) for op in ops])
    given = [operand for _, operands in steps for operand in operands]
    tensors = [one for one in given if isinstance(one, Tensor)]
    numbers = [float(one) for one in given if not isinstance(one, Tensor)]
    how = "" if config is None else str(config) if isinstance(config, int) else _fields(config)
    dtypes = " ".join([torch_op.name_of(dtype) for dtype in out_dtypes])
    return a, b, tensors, numbers, text, dtypes, concat, how


def config_of(text: str) -> GemmConfig | int | None:
    """What ``call`` was given."""
    value = ast.literal_eval(text) if text else None
    return GemmConfig(**value) if isinstance(value, dict) else value


def _text(op: Op) -> str:
    """Class and fields of an op, in words that torch.compile can follow."""
    return f"{type(op).__module__}:{type(op).__qualname__}:{_fields(op)}"


def _fields(record: Any) -> str:
    """Fields of a dataclass, as a literal."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return f"{{{', '.join([f'{name!r}: {_literal(value)}' for name, value in fields.items()])}}}"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return repr(str(value))  # of an enum, the text that its repr is not
    if isinstance(value, float) and value in (math.inf, -math.inf):
        return "1e999" if value > 0 else "-1e999"  # too large for a float
    return repr(value)


@functools.cache
def _ops(text: str) -> tuple[Op, ...]:
    """The inverse, for a whole epilogue.

    Raises:
        UnsupportedError: an op's class cannot be imported.
    """
    found = []
    for line in text.splitlines():
        module, name, fields = line.split(":", 2)
        kind: Any = importlib.import_module(module)
        if "<locals>" in name:
            raise UnsupportedError(
                f"gemm: {name} of an epilogue is defined inside a function",
                "torch.compile, CPU and meta tensors import an op by its name",
                "define it at the top of a module",
            )
        for part in name.split("."):
            kind = getattr(kind, part)
        found.append(kind(**ast.literal_eval(fields)))
    return tuple(found)


def steps_of(text: str, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Step]:
    """The epilogue with its operands again."""
    left, rest, found = list(tensors), list(numbers), []
    for op in _ops(text):
        operands = tuple(
            rest.pop(0) if what.kind == Kind.SCALAR else left.pop(0) for what in op.operands
        )
        found.append((op, operands))
    return found


def _unpacked(run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """An implementation of the operator from one that takes arguments as of ``call``, checked."""

    def forward(
        a: Tensor,
        b: Tensor,
        tensors: list[Tensor],
        numbers: list[float],
        text: str,
        out_dtypes: str,
        concat: bool,
        config: str,
    ) -> list[Tensor]:
        steps = steps_of(text, tensors, numbers)
        dtypes = [getattr(torch, name) for name in out_dtypes.split()]
        check.product(a, b, steps, dtypes)
        return run(a, b, steps, dtypes, concat, config_of(config))

    return forward


@_unpacked
def _forward_cpu(
    a: Tensor,
    b: Tensor,
    steps: list[Step],
    out_dtypes: list[torch.dtype],
    concat: bool,
    config: GemmConfig | int | None,
) -> list[Tensor]:
    with torch.autocast("cpu", enabled=False):  # it would multiply in 16 bits
        return reference.forward(a, b, steps, out_dtypes, concat)


@_unpacked
def _forward_cuda(
    a: Tensor,
    b: Tensor,
    steps: list[Step],
    out_dtypes: list[torch.dtype],
    concat: bool,
    config: GemmConfig | int | None,
) -> list[Tensor]:
    # Where this was traced, nothing knew the addresses.
    a, b = (launch.readable(x) if check.misaligned(x) else x for x in (a, b))
    return launch.forward(a, b, steps, out_dtypes, concat, config=config)


@_unpacked
def _forward_fake(
    a: Tensor,
    b: Tensor,
    steps: list[Step],
    out_dtypes: list[torch.dtype],
    concat: bool,
    config: GemmConfig | int | None,
) -> list[Tensor]:
    batch, m, n = launch.batch_of(a, b), a.shape[-2], b.shape[-1]
    spec = launch.shape_of(tuple(op for op, _ in steps))
    lengths = {Kind.COLUMN: m, Kind.ROW: n}
    return [
        launch.empty(a, (*batch, m, spec.cols(i, n)), dtype) for i, dtype in enumerate(out_dtypes)
    ] + [a.new_empty((*batch, lengths[one.kind]), dtype=torch.float32) for one in spec.reductions]


def _no_gradient(ctx: Any, *_: Any) -> None:
    raise UnsupportedError(
        "gemm: a gradient was asked for",
        "the function with an epilogue has none",
        "use quack_gemm.linear and its relatives, or torch.no_grad()",
    )


gemm_fwd = torch_op.register(
    _LIBRARY,
    "gemm_fwd(Tensor a, Tensor b, Tensor[] tensors, float[] numbers, str epilogue, "
    "str out_dtypes, bool concat, str config) -> Tensor[]",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    backward=_no_gradient,
)
