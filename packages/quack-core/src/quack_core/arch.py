"""GPU architectures as frozen records: what a config may use, known without a GPU."""

import functools
from typing import NamedTuple

from quack_core import driver, env
from quack_core.errors import ArchError, DeviceError, ShapeError

WARP = 32
SM_PARTITIONS = 4
REGISTER_UNIT = 256


class Arch(NamedTuple):
    """Limits and features of an architecture. Sizes in bytes; counts per SM or per CTA.

    Args:
        name: family that kernels and configs are chosen by.
        target: what the compiler is told.
        capability: compute capability of the device.
        smem_bytes: most dynamic shared memory of one CTA.
        smem_per_sm: shared memory of one SM.
        max_threads_per_sm: resident threads of one SM.
        max_cluster: most CTAs of a cluster; above 8 it is not portable and launches opt in.
        tma: has the tensor memory accelerator and mbarriers.
        tensor_memory: has tensor memory and tcgen05.
        wgmma: has the warpgroup matrix instructions, which exist on SM90 only.
        max_ctas_per_sm: resident CTAs of one SM.
        registers_per_sm: 32-bit registers of one SM.
        max_threads: most threads of one CTA.
        max_registers: most registers of one thread.
        smem_reserved: bytes that the system takes from the SM for each CTA.
    """

    name: str
    target: str
    capability: tuple[int, int]
    smem_bytes: int
    smem_per_sm: int
    max_threads_per_sm: int
    max_cluster: int
    tma: bool = True
    tensor_memory: bool = False
    wgmma: bool = False
    max_ctas_per_sm: int = 32
    registers_per_sm: int = 65536
    max_threads: int = 1024
    max_registers: int = 255
    smem_reserved: int = 1024


# CUDA C++ Programming Guide, compute capabilities, technical specifications.
SM90 = Arch("sm90", "sm_90a", (9, 0), 232448, 233472, 2048, 16, wgmma=True)
SM100 = Arch("sm100", "sm_100a", (10, 0), 232448, 233472, 2048, 16, tensor_memory=True)
SM103 = Arch("sm103", "sm_103a", (10, 3), 232448, 233472, 2048, 16, tensor_memory=True)
SM120 = Arch("sm120", "sm_120a", (12, 0), 101376, 102400, 1536, 8, max_ctas_per_sm=24)
# The same kernels and configs as 12.0, but code for sm_120a does not load on it.
SM121 = Arch("sm120", "sm_121a", (12, 1), 101376, 102400, 1536, 8, max_ctas_per_sm=24)

ARCHS = (SM90, SM100, SM103, SM120, SM121)

_KNOWN = "known: sm90, sm100, sm103, sm120 (compute capabilities 9.0, 10.0, 10.3, 12.0, 12.1)"


def get(text: str) -> Arch:
    """The architecture that ``text`` names.

    Args:
        text: a name (``"sm90"``), a target (``"sm_90a"``) or a compute capability (``"9.0"``).

    Raises:
        ArchError: no such architecture.
    """
    wanted = text.strip().lower()
    for arch in ARCHS:
        major, minor = arch.capability
        if wanted in (arch.name, arch.target, f"{major}.{minor}"):
            return arch
    raise ArchError(f"architecture {text!r} is unknown", _KNOWN)


def from_capability(capability: tuple[int, int]) -> Arch:
    """The architecture of a device of this compute capability.

    Args:
        capability: ``(major, minor)``.

    Raises:
        ArchError: there are no kernels for it.
    """
    for arch in ARCHS:
        if arch.capability == tuple(capability):
            return arch
    major, minor = capability
    raise ArchError(
        f"compute capability {major}.{minor} is not supported",
        _KNOWN,
        "use a CPU tensor for the reference",
    )


def detect(device_index: int | None = None) -> Arch:
    """The architecture to choose kernels for: ``QUACK_ARCH`` if it is set, else the device's.

    Reads the driver without creating a context and without torch; answers are kept per device.

    Args:
        device_index: CUDA device; ``None`` is the device of the current context, or device 0.

    Raises:
        DeviceError: no driver, or no such device, and ``QUACK_ARCH`` is not set.
        ArchError: there are no kernels for this architecture.
    """
    override = env.get("QUACK_ARCH")
    if override:
        return _override(override)
    try:
        return _of_device(driver.current_device() if device_index is None else device_index)
    except DeviceError as error:
        raise DeviceError(
            f"cannot tell the GPU architecture: {error}; "
            "set QUACK_ARCH (such as QUACK_ARCH=sm90) to choose one without a GPU"
        ) from error


@functools.cache
def _override(text: str) -> Arch:
    try:
        return get(text)
    except ArchError as error:
        raise ArchError(f"QUACK_ARCH={text}: {error.what}", error.limit) from None


@functools.cache
def _of_device(device_index: int) -> Arch:
    return from_capability(driver.capability(device_index))


def ctas_by_registers(registers_per_sm: int, threads: int, registers: int) -> int:
    """CTAs that the registers of one SM hold.

    Registers go to whole warps in units of 256, each warp in one of four partitions. A CTA by
    itself must fit as if it had a multiple of four warps; several share the partitions evenly.

    Args:
        registers_per_sm: 32-bit registers of the SM.
        threads: threads of a CTA.
        registers: registers of a thread, at least 1.

    Source: the occupancy calculator of the CUDA toolkit.
    """
    warps = -(-threads // WARP)
    warp_registers = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    warps_per_partition = registers_per_sm // SM_PARTITIONS // warp_registers
    if warps_per_partition < -(-warps // SM_PARTITIONS):
        return 0
    return warps_per_partition * SM_PARTITIONS // warps


def most_registers(registers_per_sm: int, threads: int, ctas: int) -> int:
    """Registers that a thread may have so that ``ctas`` CTAs fit on an SM; at most 255.

    Raises:
        ShapeError: so many threads fit with no number of registers.
    """
    unit = REGISTER_UNIT // WARP
    for registers in (255, *range(256 - unit, 0, -unit)):
        if ctas_by_registers(registers_per_sm, threads, registers) >= ctas:
            return registers
    raise ShapeError(f"threads={threads}, ctas={ctas}: an SM does not hold them")
