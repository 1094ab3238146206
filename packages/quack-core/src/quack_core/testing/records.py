"""Hardware records: what a run on a GPU tested, and which sources have changed since.

A record is ``tests/records/<arch>.json``, evidence of the last run on that hardware. It holds a
fingerprint of each package's sources, so anyone without that hardware can see what it still covers.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
ARCHES = ("sm90", "sm100", "sm120")
"""The architectures that kernels are compiled for, each of which wants a record."""

_DISTRIBUTIONS = (
    "torch",
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)


@dataclass(frozen=True)
class Gpu:
    """The GPU that tests run on.

    Args:
        name: as the driver spells it.
        arch: name of the architecture, such as ``sm90``.
        driver: version of the driver.
        cuda: version of CUDA that torch was built for.
        count: visible GPUs.
    """

    name: str
    arch: str
    driver: str
    cuda: str
    count: int = 1


def find_gpu() -> Gpu:
    """The GPU of torch's current device, proved usable by one small kernel.

    Raises:
        RuntimeError: there is no torch, no usable GPU, or no kernels for it.
    """
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"torch cannot be imported: {error}") from error
    from quack_core import arch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA GPU")
    if torch.ones(2, device="cuda").sum().item() != 2:
        raise RuntimeError("the GPU adds wrongly")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        name=properties.name,
        arch=arch.from_capability((properties.major, properties.minor)).name,
        driver=_driver_version(),
        cuda=str(torch.version.cuda),
        count=torch.cuda.device_count(),
    )


def source_folders(root: Path) -> dict[str, Path]:
    """{import name: folder} of the packages below ``root/packages``."""
    found = sorted((root / "packages").glob("*/src/*/__init__.py"))
    return {path.parent.name: path.parent for path in found}


def fingerprint(folder: Path) -> str:
    """SHA-256 over the names and contents of all Python files below a package's folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        # lengths keep a name from running into a content
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def fingerprints(root: Path) -> dict[str, str]:
    """The fingerprint of every package below ``root/packages``."""
    return {name: fingerprint(folder) for name, folder in source_folders(root).items()}


def check_imports(root: Path) -> None:
    """Make sure that tests import the sources that a record of `root` would describe.

    Raises:
        RuntimeError: a package of the tree is not importable, or is imported from elsewhere.
    """
    for name, folder in source_folders(root).items():
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            way_out = f"put {folder.parent.relative_to(root)} on PYTHONPATH"
            raise RuntimeError(f"package {name} is not importable: {way_out}")
        if Path(spec.origin).resolve().parent != folder.resolve():
            raise RuntimeError(
                f"package {name} is imported from {Path(spec.origin).parent}, not from "
                f"{folder}: a record would describe sources that were not tested"
            )


def versions(root: Path) -> dict[str, str]:
    """Versions of Python, of what kernels are built with, and of the packages below `root`."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    for name, folder in source_folders(root).items():
        about = folder / "__about__.py"
        match = re.search(r'__version__ = "(.*)"', about.read_text()) if about.exists() else None
        found[name.replace("_", "-")] = match[1] if match else "unknown"
    return found


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` to `path` whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(record, indent=2) + "\n")
        os.chmod(temporary, 0o644)  # mkstemp lets nobody else read it
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check(root: Path, arches: Sequence[str] = ARCHES) -> Iterator[str]:
    """Lines that say what each record below ``root/tests/records`` still covers."""
    now = fingerprints(root)
    folder = root / "tests" / "records"
    recorded = {path.stem for path in folder.glob("*.json")}
    for arch in [*arches, *sorted(recorded - set(arches))]:
        if arch in recorded:
            yield f"{arch}: {_verdict(folder / f'{arch}.json', now)}"
        else:
            yield f"{arch}: no record: nothing is known to have run on this hardware"


def _verdict(path: Path, now: Mapping[str, str]) -> str:
    try:
        record = json.loads(path.read_text())
        then, counts = dict(record["fingerprints"]), record["counts"]
        head = f"{record['gpu']['name']}, {record['date']}, {counts['passed']} passed"
        bad = int(counts["failed"]) + int(counts["errors"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name} is unreadable ({type(error).__name__}: {error}): run it again"
    states = [
        (f"{bad} FAILED", bad > 0),
        (_named("changed since", [n for n in now if n in then and then[n] != now[n]]), True),
        (_named("never recorded", [n for n in now if n not in then]), True),
    ]
    said = [text for text, holds in states if text and holds]
    return "; ".join([head, *said]) if said else f"{head}; all sources as recorded"


def _named(what: str, names: Sequence[str]) -> str:
    return f"{what}: {', '.join(names)}" if names else ""


def _driver_version() -> str:
    tool = shutil.which("nvidia-smi")
    if tool:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, check=False, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.split()[0]
    try:  # containers may lack the tool
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else "unknown"
