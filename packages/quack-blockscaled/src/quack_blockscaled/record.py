"""Formats as plain records and as text: what lies in files and crosses torch's dispatcher."""

import ast
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from quack_core.errors import DTypeError

from .formats import SCALES, BlockFormat, ElementFormat

_ELEMENT = tuple(field.name for field in dataclasses.fields(ElementFormat))


def of(format: BlockFormat) -> dict[str, Any]:
    """A format as JSON takes it."""
    return {
        "name": format.name,
        "element": {name: getattr(format.element, name) for name in _ELEMENT},
        "scale": format.scale.name,
        "block": list(format.block),
        "per_tensor": format.per_tensor,
    }


def text(format: BlockFormat) -> str:
    """As a literal, made in ways that torch.compile can follow."""
    return str(of(format))


def read(found: Mapping[str, Any]) -> BlockFormat:
    """The inverse of `of`.

    Raises:
        DTypeError: names the field that is missing, unknown or wrong.
    """
    try:
        fields = dict(found)
        scale, rows_cols = fields.pop("scale"), tuple(fields.pop("block"))
        element = ElementFormat(**fields.pop("element"))
        known = {each.name: each for each in SCALES}
        return BlockFormat(element=element, scale=known[scale], block=rows_cols, **fields)
    except (KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DTypeError):
            raise
        raise DTypeError(f"this describes no block-scaled format ({error}): {found!r}") from None


@functools.cache
def parse(literal: str) -> BlockFormat:
    """The inverse of `text`."""
    return read(ast.literal_eval(literal))
