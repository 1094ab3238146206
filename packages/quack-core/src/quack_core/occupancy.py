"""How many clusters of CTAs run at the same time on a device, asked of its driver.

Persistent kernels launch exactly that many. The number is no division: a cluster stays within one
group of SMs (GPC), the groups differ in size, and devices of one model differ in their groups.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from quack_core import driver
from quack_core.arch import ctas_by_registers
from quack_core.errors import ShapeError

SMEM_UNIT = 128

# The driver compiles this for any GPU from SM90 on. It holds next to no registers, so threads,
# shared memory and the cluster are all that limits it.
_PROBE = b""".version 8.0
.target sm_90
.address_size 64
.visible .entry probe()
{
    ret;
}
\0"""


@functools.cache
def resident_clusters(
    device_index: int, cluster: int, threads: int, smem_bytes: int, registers: int = 0
) -> int:
    """How many clusters are resident together; kept for each set of arguments.

    Args:
        device_index: CUDA device. Its primary context is used and, if there is none, made for the
            duration of the call; the current context of the thread stays what it was.
        cluster: CTAs of a cluster; 1 means single CTAs.
        threads: threads of a CTA.
        smem_bytes: dynamic shared memory of a CTA.
        registers: registers of a thread; 0 leaves them out of account.

    Returns:
        Clusters; 0 if not even one fits.

    Raises:
        ShapeError: a number out of range for the device.
        DeviceError: no driver, no such device, or a cluster size that it refuses.
    """
    api = driver.load()
    device = driver.call(api.cuDeviceGet, device_index)
    limits = _limits(api, device)
    _check(limits, cluster, threads, smem_bytes)
    if registers:
        ctas = ctas_by_registers(limits["registers_per_sm"], threads, registers)
        if ctas == 0:
            return 0
        smem_bytes = max(smem_bytes, _smem_that_admits(ctas, limits))
    with driver.primary_context(device_index), _loaded_probe(api) as probe:
        return _count(api, probe, limits["sms"], cluster, threads, smem_bytes)


def _smem_that_admits(ctas: int, limits: dict[str, int]) -> int:
    """Shared memory with which just ``ctas`` CTAs fit on an SM: it stands in for registers.

    That way the driver places the clusters as it would place the real ones.
    """
    each = limits["smem_per_sm"] // ctas - limits["smem_reserved"]
    return max(min(each, limits["smem_per_cta"]) // SMEM_UNIT * SMEM_UNIT, 0)


def _limits(api: Any, device: Any) -> dict[str, int]:
    names = {
        "sms": "MULTIPROCESSOR_COUNT",
        "threads_per_cta": "MAX_THREADS_PER_BLOCK",
        "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
        "smem_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
        "smem_per_cta": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        "smem_reserved": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    }
    return {
        key: int(
            driver.call(
                api.cuDeviceGetAttribute,
                getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"),
                device,
            )
        )
        for key, name in names.items()
    }


def _check(limits: dict[str, int], cluster: int, threads: int, smem_bytes: int) -> None:
    if cluster < 1:
        raise ShapeError(f"cluster={cluster}: must be at least 1")
    if not 1 <= threads <= limits["threads_per_cta"]:
        raise ShapeError(f"threads={threads}: a CTA has 1 to {limits['threads_per_cta']}")
    if not 0 <= smem_bytes <= limits["smem_per_cta"]:
        raise ShapeError(
            f"smem_bytes={smem_bytes}: a CTA of this device has up to {limits['smem_per_cta']}"
        )


@contextlib.contextmanager
def _loaded_probe(api: Any) -> Iterator[Any]:
    # Loading code would break a stream capture in progress on this thread, unless it is relaxed.
    with driver.relaxed_capture():
        module = driver.call(api.cuModuleLoadData, _PROBE)
        try:
            yield driver.call(api.cuModuleGetFunction, module, b"probe")
        finally:
            driver.call(api.cuModuleUnload, module)


def _count(api: Any, probe: Any, sms: int, cluster: int, threads: int, smem_bytes: int) -> int:
    attribute = api.CUfunction_attribute
    smem_attribute = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.call(api.cuFuncSetAttribute, probe, smem_attribute, smem_bytes)
    if cluster == 1:
        per_sm = driver.call(
            api.cuOccupancyMaxActiveBlocksPerMultiprocessor, probe, threads, smem_bytes
        )
        return sms * int(per_sm)
    size_attribute = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    driver.call(api.cuFuncSetAttribute, probe, size_attribute, 1)
    config = _launch_config(api, sms, cluster, threads, smem_bytes)
    return int(driver.call(api.cuOccupancyMaxActiveClusters, probe, config))


def _launch_config(api: Any, sms: int, cluster: int, threads: int, smem_bytes: int) -> Any:
    dimension = api.CUlaunchAttribute()
    dimension.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    extent = dimension.value.clusterDim
    extent.x, extent.y, extent.z = cluster, 1, 1
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = sms * cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    config.attrs = [dimension]
    config.numAttrs = 1
    return config
