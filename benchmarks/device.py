"""The GPU as records describe it: name, driver, clock, power. All of it may be missing."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from . import record


def gpu_name() -> str:
    """Such as "H200"; empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_name().removeprefix("NVIDIA").strip()


def available() -> bool:
    """Whether there is a GPU; says so if not."""
    if torch.cuda.is_available():
        return True
    print("no CUDA device: --list and --dry-run work without one", file=sys.stderr)
    return False


def try_out() -> None:
    """Run something: an error if the context is lost, or torch's random numbers are, to a graph
    whose recording has failed."""
    torch.rand(1, device="cuda")
    torch.cuda.synchronize()


def folder(name: str) -> str:
    """The results folder of a GPU: lower case, words joined by hyphens."""
    return "-".join(name.lower().split()) or "none"


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver() -> str:
    try:
        with _nvml() as nvml:
            version = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001  no NVML, or one that refuses
        return ""
    return version if isinstance(version, str) else version.decode()


def clock_and_power() -> tuple[int, float]:
    """SM clock in MHz and power in W at this moment; zeros if they cannot be read."""
    try:
        with _nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(
                f"GPU-{torch.cuda.get_device_properties().uuid}"
            )
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            return int(clock), nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    except Exception:  # noqa: BLE001  as above
        return 0, 0.0


def versions(package: str = "") -> dict[str, str]:
    """Software that decides about a time; `package` is the distribution of the variant."""
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "driver": driver(),
        "dsl": record.version("nvidia-cutlass-dsl"),
        "peer": f"{package} {record.version(package)}".strip() if package else "",
    }
