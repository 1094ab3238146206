"""Files: what was saved comes back bit for bit, and what is wrong with a file is said."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from quack_blockscaled import (
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    BlockScaledTensor,
    load_file,
    quantize,
    save_file,
)
from quack_blockscaled.formats import FORMATS, UE4M3, ElementFormat, ScaleFormat
from quack_core.errors import DTypeError, LayoutError, ShapeError, UnsupportedError
from quack_core.testing.compare import assert_bitwise
from quack_core.testing.inputs import random

MINE = BlockFormat("mine", ElementFormat("e3m4", 3, 4, 4), UE4M3, (4, 8), per_tensor=True)
ALL = [*FORMATS.values(), MINE]


def made(format: BlockFormat, shape: tuple[int, ...] = (128, 256)) -> BlockScaledTensor:
    scale = 0.5 if format.per_tensor else None
    return quantize(random(shape, torch.bfloat16, "cpu", seed=1), format, per_tensor_scale=scale)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("format", ALL, ids=lambda each: each.name)
def test_back_bit_for_bit(format: BlockFormat, path: Path) -> None:
    x = made(format)
    bias = torch.arange(3.0)
    save_file({"a.w": x, "turned": x.mT, "bias": bias}, path, metadata={"author": "me"})
    found = load_file(path)
    assert sorted(found) == ["a.w", "bias", "turned"]
    assert_bitwise(found["bias"], bias)
    for name, expected in (("a.w", x), ("turned", x.mT)):
        actual = found[name]
        assert isinstance(actual, BlockScaledTensor)
        for field in ("format", "dim", "dtype", "shape"):
            assert getattr(actual, field) == getattr(expected, field)
        parts = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
        for part, other in parts:
            assert_bitwise(part, other)


def test_a_file_says_what_lies_in_it(path: Path) -> None:
    from safetensors import safe_open

    save_file({"w": made(NVFP4)}, path, metadata={"author": "me"})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        assert sorted(file.keys()) == ["w.scales", "w.tensor_scale", "w.values"]
    assert metadata["author"] == "me"
    assert json.loads(metadata["quack_blockscaled"]) == {
        "version": 1,
        "tensors": {
            "w": {
                "dim": -1,
                "dtype": "bfloat16",
                "format": {
                    "name": "nvfp4",
                    "element": {
                        "name": "e2m1",
                        "exponent_bits": 2,
                        "mantissa_bits": 1,
                        "bias": 1,
                        "has_inf": False,
                        "has_nan": False,
                        "dtype": "uint8",
                    },
                    "scale": "ue4m3",
                    "block": [1, 16],
                    "per_tensor": True,
                },
            }
        },
    }


def test_torch_loads_it_when_told_that_it_is_safe(tmp_path: Path) -> None:
    x = made(NVFP4)
    torch.save({"w": x}, tmp_path / "w.pt")
    kinds = [BlockScaledTensor, BlockFormat, ElementFormat, ScaleFormat]
    with torch.serialization.safe_globals(kinds):
        found = torch.load(tmp_path / "w.pt", weights_only=True)["w"]
    assert (found.format, found.dim, found.dtype) == (x.format, x.dim, x.dtype)
    assert_bitwise(found.dequantize(), x.dequantize())


def test_nothing_to_save(path: Path) -> None:
    save_file({}, path)
    assert load_file(path) == {}


def rewrite(path: Path, change: Any, drop: tuple[str, ...] = ()) -> None:
    """Write the file again with other metadata, and without some tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file as save

    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {key: file.get_tensor(key) for key in file.keys() if key not in drop}  # noqa: SIM118
    described = json.loads(metadata["quack_blockscaled"])
    change(described)
    save(tensors, path, metadata={"quack_blockscaled": json.dumps(described)})


def test_a_file_of_somebody_else(path: Path) -> None:
    from safetensors.torch import save_file as save

    for metadata in (None, {"format": "pt"}):
        save({"w": torch.ones(3)}, path, metadata=metadata)
        with pytest.raises(LayoutError, match="have no key 'quack_blockscaled'"):
            load_file(path)
    for text in ("", "3", "{}", '{"version": 1}', '{"version": 1, "tensors": {"w": 3}}'):
        save({"w": torch.ones(3)}, path, metadata={"quack_blockscaled": text})
        with pytest.raises(LayoutError, match="'quack_blockscaled' of .* are damaged"):
            load_file(path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.update(version=2), UnsupportedError, "is of version 2; version 1 is known"),
        (
            lambda d: d["tensors"].update(other=d["tensors"]["w"]),
            LayoutError,
            "has no tensor other.values",
        ),
        (lambda d: d["tensors"]["w"].pop("dim"), LayoutError, "describe no tensor w: .*'dim'"),
        (lambda d: d["tensors"]["w"].update(dim="x"), LayoutError, "describe no tensor w"),
        (lambda d: d["tensors"]["w"].update(dtype="int7"), LayoutError, "describe no tensor w"),
        (
            lambda d: d["tensors"]["w"]["format"].pop("element"),
            LayoutError,
            "no block-scaled format",
        ),
        (
            lambda d: d["tensors"]["w"]["format"].update(scale="e9m9"),
            LayoutError,
            "no block-scaled format .*e9m9",
        ),
        (
            lambda d: d["tensors"]["w"]["format"].update(colour="red"),
            LayoutError,
            "no block-scaled format .*colour",
        ),
        (
            lambda d: d["tensors"]["w"]["format"].update(block=[0, 16]),
            LayoutError,
            r"block is \(0, 16\): it must be two positive sizes",
        ),
        (
            lambda d: d["tensors"]["w"]["format"].update(block=[1, 32]),
            ShapeError,
            r"scales has the shape \(128, 16\)",
        ),
        (
            lambda d: d["tensors"]["w"]["format"].update(per_tensor=False),
            ShapeError,
            "tensor_scale is given: nvfp4 needs none",
        ),
        (
            lambda d: d["tensors"]["w"]["format"].update(scale="e8m0"),
            DTypeError,
            "scales is float8_e4m3fn: nvfp4 needs float8_e8m0fnu",
        ),
    ],
)
def test_metadata_that_do_not_fit(
    change: Any, error: type[Exception], message: str, path: Path
) -> None:
    save_file({"w": made(NVFP4)}, path)
    rewrite(path, change)
    with pytest.raises(error, match=message):
        load_file(path)


def test_a_part_is_missing(path: Path) -> None:
    save_file({"w": made(NVFP4)}, path)
    rewrite(path, lambda described: None, drop=("w.scales",))
    with pytest.raises(LayoutError, match="has no tensor w.scales"):
        load_file(path)
    save_file({"w": made(NVFP4)}, path)
    rewrite(path, lambda described: None, drop=("w.tensor_scale",))
    with pytest.raises(ShapeError, match="tensor_scale is None: nvfp4 needs one"):
        load_file(path)


def test_names_that_clash(path: Path) -> None:
    x = made(MXFP4)
    with pytest.raises(LayoutError, match="'w.values' would be written twice: rename 'w'"):
        save_file({"w.values": torch.ones(3), "w": x}, path)
    with pytest.raises(LayoutError, match="metadata has the key 'quack_blockscaled'"):
        save_file({"w": x}, path, metadata={"quack_blockscaled": "mine"})
    assert not path.exists()


def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'quack-blockscaled\[safetensors\]'"):
        save_file({"w": made(MXFP8_E4M3)}, tmp_path / "w")
    with pytest.raises(UnsupportedError, match=r"pip install 'quack-blockscaled\[safetensors\]'"):
        load_file(tmp_path / "w")
