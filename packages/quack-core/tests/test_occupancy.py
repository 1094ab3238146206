"""The arithmetic and the dialogue with the driver, on a fake one; the numbers on a real one."""

import types

import pytest

from quack_core import driver, env, occupancy
from quack_core.errors import DeviceError, ShapeError

SMS = 132
H200_LIMITS = {
    "MULTIPROCESSOR_COUNT": SMS,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
}


class Names:
    """Any attribute is its own name."""

    def __getattr__(self, name):
        return name


class FakeDriver:
    """One device; CTAs per SM follow from shared memory, clusters take whole multiples of SMs."""

    CUdevice_attribute = Names()
    CUfunction_attribute = Names()
    CUlaunchAttributeID = Names()
    success = types.SimpleNamespace(value=0, name="CUDA_SUCCESS")
    refused = types.SimpleNamespace(value=912, name="CUDA_ERROR_INVALID_CLUSTER_SIZE")

    def __init__(self):
        self.contexts = ["other"]
        self.retained = self.loaded = self.queries = 0
        self.mode = "global"
        self.attributes = {}
        self.config = None

    @staticmethod
    def CUlaunchAttribute():
        extent = types.SimpleNamespace()
        return types.SimpleNamespace(id=None, value=types.SimpleNamespace(clusterDim=extent))

    CUlaunchConfig = types.SimpleNamespace

    def cuDeviceGet(self, index):
        return self.success, index

    def cuDeviceGetAttribute(self, name, device):
        return self.success, H200_LIMITS[name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuDevicePrimaryCtxRetain(self, device):
        self.retained += 1
        return self.success, f"primary {device}"

    def cuDevicePrimaryCtxRelease(self, device):
        self.retained -= 1
        return (self.success,)

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (self.success,)

    def cuCtxPopCurrent(self):
        return self.success, self.contexts.pop()

    def exchange(self, mode):
        before, self.mode = self.mode, mode
        return before

    def cuModuleLoadData(self, image):
        assert self.contexts[-1] == "primary 0"
        assert self.mode == driver.RELAXED
        assert image.endswith(b"\0")
        self.loaded += 1
        return self.success, "module"

    def cuModuleUnload(self, module):
        self.loaded -= 1
        return (self.success,)

    def cuModuleGetFunction(self, module, name):
        assert b"probe" in name
        return self.success, "probe"

    def cuFuncSetAttribute(self, function, name, value):
        self.attributes[name.removeprefix("CU_FUNC_ATTRIBUTE_")] = value
        return (self.success,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, smem_bytes):
        self.queries += 1
        return self.success, min(233472 // (smem_bytes + 1024), 2048 // threads)

    def cuOccupancyMaxActiveClusters(self, function, config):
        self.queries += 1
        self.config = config
        cluster = config.attrs[0].value.clusterDim.x
        if cluster > 16:
            return self.refused, 0
        per_sm = min(233472 // (config.sharedMemBytes + 1024), 2048 // config.blockDimX)
        return self.success, SMS * per_sm // cluster


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "load", lambda: fake)
    monkeypatch.setattr(driver, "exchange_capture_mode", fake.exchange)
    occupancy.resident_clusters.cache_clear()
    yield fake
    occupancy.resident_clusters.cache_clear()
    assert (fake.contexts, fake.retained, fake.loaded) == (["other"], 0, 0)
    assert fake.mode == "global"


def test_single_ctas_are_counted_per_sm(fake):
    assert occupancy.resident_clusters(0, 1, 256, 120000) == SMS
    assert occupancy.resident_clusters(0, 1, 256, 0) == 8 * SMS
    assert fake.attributes == {"MAX_DYNAMIC_SHARED_SIZE_BYTES": 0}


def test_clusters_are_asked_for_with_their_size(fake):
    assert occupancy.resident_clusters(0, 16, 512, 200000) == SMS // 16
    assert fake.attributes == {
        "MAX_DYNAMIC_SHARED_SIZE_BYTES": 200000,
        "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 1,
    }
    config, extent = fake.config, fake.config.attrs[0].value.clusterDim
    assert (extent.x, extent.y, extent.z) == (16, 1, 1)
    assert fake.config.attrs[0].id == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    assert (config.blockDimX, config.sharedMemBytes, config.numAttrs) == (512, 200000, 1)
    assert config.gridDimX % 16 == 0


def test_answers_are_kept(fake):
    for _ in range(3):
        occupancy.resident_clusters(0, 4, 256, 1000)
    assert fake.queries == 1


def test_a_refusal_is_raised_and_leaves_no_context_behind(fake):
    with pytest.raises(DeviceError, match="cuOccupancyMaxActiveClusters.*INVALID_CLUSTER_SIZE"):
        occupancy.resident_clusters(0, 32, 256, 1000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 256, 0), "cluster=0"),
        ((1, 0, 0), "threads=0: a CTA has 1 to 1024"),
        ((1, 1025, 0), "threads=1025"),
        ((1, 256, 232449), "smem_bytes=232449: .* up to 232448"),
        ((1, 256, -1), "smem_bytes=-1"),
    ],
)
def test_numbers_out_of_range(fake, arguments, words):
    with pytest.raises(ShapeError, match=words):
        occupancy.resident_clusters(0, *arguments)


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(
    ("threads", "registers", "smem_bytes", "ctas"),
    [
        (256, 0, 0, 8),
        (256, 32, 0, 8),
        (256, 64, 0, 4),
        (256, 80, 0, 3),
        (256, 128, 0, 2),
        (256, 168, 0, 1),
        (256, 128, 200000, 1),  # shared memory limits more than registers do
        (1024, 65, 0, 0),
    ],
)
def test_registers_lower_the_answer(fake, cluster, threads, registers, smem_bytes, ctas):
    found = occupancy.resident_clusters(0, cluster, threads, smem_bytes, registers)
    assert found == SMS * ctas // cluster


def test_without_a_driver_the_error_is_clear(monkeypatch):
    def no_driver():
        raise DeviceError("no CUDA driver found")

    monkeypatch.setattr(driver, "load", no_driver)
    occupancy.resident_clusters.cache_clear()
    with pytest.raises(DeviceError, match="no CUDA driver found"):
        occupancy.resident_clusters(0, 1, 256, 0)


# The real driver.


@pytest.fixture
def sms():
    """Number of SMs of device 0; skips without one, unless ``QUACK_REQUIRE_GPU`` forbids that."""
    occupancy.resident_clusters.cache_clear()
    try:
        api = driver.load()
    except DeviceError as error:
        if env.get("QUACK_REQUIRE_GPU"):
            raise
        pytest.skip(str(error))
    attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(driver.call(api.cuDeviceGetAttribute, attribute, driver.call(api.cuDeviceGet, 0)))


def test_large_ctas_on_the_device(sms):
    smem_bytes = 64 * 1024  # at most one CTA per SM of 100 KiB, at most three of 228 KiB
    singles = occupancy.resident_clusters(0, 1, 512, smem_bytes)
    assert singles in (sms, 3 * sms)
    for cluster in (2, 4, 8):
        found = occupancy.resident_clusters(0, cluster, 512, smem_bytes)
        assert 1 <= found <= singles // cluster


def test_the_counts_of_an_h200(sms):
    if sms != SMS:
        pytest.skip(f"the device has {sms} SMs, not {SMS}")
    found = [occupancy.resident_clusters(0, size, 256, 120 * 1024) for size in (1, 2, 4, 8, 16)]
    assert found[:2] == [132, 66]
    assert found == sorted(found, reverse=True)
    assert all(0 < count * size <= SMS for count, size in zip(found, (1, 2, 4, 8, 16), strict=True))


def test_registers_on_the_device(sms):
    assert occupancy.resident_clusters(0, 1, 256, 0, 168) == sms
    assert occupancy.resident_clusters(0, 1, 256, 0, 128) == 2 * sms
    assert occupancy.resident_clusters(0, 1, 1024, 0, 65) == 0
