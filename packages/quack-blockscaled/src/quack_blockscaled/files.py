"""Block-scaled tensors in safetensors files, beside plain ones.

A tensor ``w`` lies in a file as ``w.values``, ``w.scales`` and, where its format has one,
``w.tensor_scale``. The file's metadata say under `KEY`, as JSON, what these mean.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op
from quack_core.errors import LayoutError, UnsupportedError

from . import record
from .tensor import BlockScaledTensor

KEY = "quack_blockscaled"
VERSION = 1
PARTS = ("values", "scales", "tensor_scale")


def save_file(
    tensors: Mapping[str, BlockScaledTensor | Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a safetensors file.

    Args:
        tensors: by name; views are written as contiguous copies.
        path: of the file, which is replaced.
        metadata: more metadata.

    Raises:
        LayoutError: a name is taken twice.
        UnsupportedError: safetensors is not installed.
    """
    records: dict[str, Any] = {}
    parts: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in tensors.items():
        named = {name: tensor} if isinstance(tensor, Tensor) else _named(name, tensor)
        if isinstance(tensor, BlockScaledTensor):
            dtype = torch_op.name_of(tensor.dtype)
            records[name] = {"format": record.of(tensor.format), "dim": tensor.dim, "dtype": dtype}
        for key, part in named.items():
            if key in parts:
                raise LayoutError(f"save_file: {key!r} would be written twice: rename {name!r}")
            part = part.detach().contiguous()
            # Tensors of a file may not share memory: what was written already is copied.
            parts[key] = part.clone() if _memory(part) in written else part
            written.add(_memory(part))
    if metadata and KEY in metadata:
        raise LayoutError(f"save_file: metadata has the key {KEY!r}: it is ours; rename it")
    described = json.dumps({"version": VERSION, "tensors": records}, sort_keys=True)
    _safetensors().save_file(parts, path, metadata={**(metadata or {}), KEY: described})


def load_file(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> dict[str, BlockScaledTensor | Tensor]:
    """Read what `save_file` wrote.

    Args:
        path: of the file.
        device: where tensors go.

    Returns:
        Tensors by name.

    Raises:
        LayoutError: the file says nothing about block-scaled tensors, or what does not fit it.
        ShapeError, DTypeError: parts do not belong together.
        UnsupportedError: a later version wrote the file; safetensors is not installed.
    """
    with _safetensors().safe_open(path, framework="pt", device=str(device)) as file:
        records = _records(path, file.metadata() or {})
        parts = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    found: dict[str, BlockScaledTensor | Tensor] = {}
    for name, how in records.items():
        given = {part: parts.pop(f"{name}.{part}", None) for part in PARTS}
        for part in ("values", "scales"):
            if given[part] is None:
                raise LayoutError(f"load_file: {path} has no tensor {name}.{part}")
        try:
            format, dim = record.read(how["format"]), int(how["dim"])
            dtype = torch_op.torch_dtype(how["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                f"load_file: the metadata of {path} describe no tensor {name}: {how!r}: {error}"
            ) from None
        found[name] = BlockScaledTensor(format=format, dim=dim, dtype=dtype, **given)
    return {**parts, **found}


def _memory(part: Tensor) -> int:
    return part.untyped_storage().data_ptr()


def _named(name: str, tensor: BlockScaledTensor) -> dict[str, Tensor]:
    """The parts of a tensor under their names in a file."""
    given = zip(PARTS, (tensor.values, tensor.scales, tensor.tensor_scale), strict=True)
    return {f"{name}.{part}": value for part, value in given if value is not None}


def _records(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    """What metadata say of block-scaled tensors, by name."""
    if KEY not in metadata:
        raise LayoutError(
            f"load_file: the metadata of {path} have no key {KEY!r}: it was not written by save_file; "
            "read it with safetensors.torch.load_file"
        )
    try:
        described = json.loads(metadata[KEY])
        version, records = described["version"], described["tensors"]
        valid = isinstance(records, dict) and all(isinstance(r, dict) for r in records.values())
    except (ValueError, KeyError, TypeError):
        version, records, valid = None, {}, False
    if not valid:
        raise LayoutError(f"load_file: the metadata {KEY!r} of {path} are damaged")
    if version != VERSION:
        raise UnsupportedError(
            f"load_file: {path} is of version {version!r}",
            f"version {VERSION} is known",
            "use a later quack-blockscaled",
        )
    return records


def _safetensors() -> Any:
    """The library, with its functions for torch.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise UnsupportedError(
            "safetensors cannot be imported",
            "files are read and written with it",
            "pip install 'quack-blockscaled[safetensors]'",
        ) from None
    return safetensors.torch
