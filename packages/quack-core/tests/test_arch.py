import types

import pytest

from quack_core import arch, driver
from quack_core.errors import ArchError, DeviceError, ShapeError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("QUACK_ARCH", raising=False)
    arch._of_device.cache_clear()
    yield
    arch._of_device.cache_clear()


@pytest.mark.parametrize(
    ("capability", "name", "target"),
    [
        ((9, 0), "sm90", "sm_90a"),
        ((10, 0), "sm100", "sm_100a"),
        ((10, 3), "sm103", "sm_103a"),
        ((12, 0), "sm120", "sm_120a"),
        ((12, 1), "sm120", "sm_121a"),
    ],
)
def test_each_capability_has_an_architecture(capability, name, target):
    found = arch.from_capability(capability)
    assert (found.name, found.target, found.capability) == (name, target, capability)
    assert arch.get(target) is found
    assert arch.get(f"{capability[0]}.{capability[1]}") is found


def test_a_name_means_the_first_of_its_family():
    assert [arch.get(name) for name in ("sm90", "sm100", "sm103", " SM120 ")] == [
        arch.SM90,
        arch.SM100,
        arch.SM103,
        arch.SM120,
    ]


def test_limits():
    assert arch.SM90.smem_bytes == 227 * 1024
    assert arch.SM120.smem_bytes == 99 * 1024
    assert (arch.SM90.max_cluster, arch.SM120.max_cluster) == (16, 8)
    assert [a.name for a in arch.ARCHS if a.tensor_memory] == ["sm100", "sm103"]
    assert [a.name for a in arch.ARCHS if a.wgmma] == ["sm90"]


@pytest.mark.parametrize("known", arch.ARCHS, ids=lambda known: known.target)
def test_one_cta_takes_the_whole_sm_but_the_reserved_bytes(known):
    assert known.smem_per_sm - known.smem_reserved == known.smem_bytes
    assert known.max_threads_per_sm % known.max_threads in (0, 512)


def test_records_are_frozen_and_hashable():
    assert hash(arch.SM90) == hash(arch.SM90._replace())
    with pytest.raises(AttributeError):
        arch.SM90.smem_bytes = 0


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 1), (11, 0), (13, 0)])
def test_other_capabilities_raise_and_say_what_works(capability):
    major, minor = capability
    with pytest.raises(ArchError, match=rf"{major}\.{minor} is not supported.*sm90.*12\.1"):
        arch.from_capability(capability)


@pytest.mark.parametrize("text", ["sm80", "90a", "", "9"])
def test_other_names_raise_and_say_what_works(text):
    with pytest.raises(ArchError, match=r"unknown.*sm90, sm100, sm103, sm120"):
        arch.get(text)


def test_the_override_comes_first_and_needs_no_driver(monkeypatch):
    def no_driver():
        raise DeviceError("no CUDA driver found")

    monkeypatch.setattr(driver, "load", no_driver)
    monkeypatch.setattr(driver, "library", no_driver)
    monkeypatch.setenv("QUACK_ARCH", "sm100")
    assert arch.detect() is arch.SM100
    assert arch.detect(3) is arch.SM100
    monkeypatch.setenv("QUACK_ARCH", "12.0")
    assert arch.detect() is arch.SM120


def test_a_bad_override_names_the_variable(monkeypatch):
    monkeypatch.setenv("QUACK_ARCH", "hopper")
    with pytest.raises(ArchError, match="QUACK_ARCH=hopper.*unknown.*sm90"):
        arch.detect()


@pytest.mark.parametrize("device_index", [None, 0])
def test_without_a_driver_the_error_names_the_way_out(monkeypatch, device_index):
    def no_driver():
        raise DeviceError("no CUDA driver found")

    monkeypatch.setattr(driver, "load", no_driver)
    monkeypatch.setattr(driver, "library", no_driver)
    with pytest.raises(DeviceError, match="no CUDA driver found; set QUACK_ARCH"):
        arch.detect(device_index)


class FakeDriver:
    """Two devices: 0 is a 9.0, 1 is a 12.0. ``context`` is the device of the current context."""

    success = types.SimpleNamespace(value=0, name="CUDA_SUCCESS")

    def __init__(self):
        self.context = None
        self.queries = 0

    def cuCtxGetCurrent(self):
        return self.success, 0 if self.context is None else 1

    def cuCtxGetDevice(self):
        return self.success, self.context

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0 if index < 2 else 101

    def cuDeviceGetAttribute(self, number, name, device):
        self.queries += 1
        number._obj.value = {75: (9, 12)[device.value], 76: 0}[name]
        return 0

    def cuGetErrorName(self, status, text):
        assert status == 101
        text._obj.value = b"CUDA_ERROR_INVALID_DEVICE"


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "load", lambda: fake)
    monkeypatch.setattr(driver, "library", lambda: fake)
    return fake


def test_the_device_of_the_current_context_is_asked_once(fake):
    assert arch.detect() is arch.SM90
    assert arch.detect(0) is arch.SM90
    assert fake.queries == 2
    fake.context = 1
    assert arch.detect() is arch.SM120
    assert arch.detect(1) is arch.SM120
    assert fake.queries == 4


def test_a_device_that_does_not_exist(fake):
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_DEVICE; set QUACK_ARCH"):
        arch.detect(2)


# (threads, registers): CTAs, from 64 warps of 32 registers x 32 threads per SM in four partitions.
@pytest.mark.parametrize(
    ("threads", "registers", "ctas"),
    [
        (1024, 32, 2),
        (1024, 64, 1),
        (1024, 65, 0),
        (256, 128, 2),
        (256, 129, 1),
        (256, 255, 1),
        (128, 255, 2),
        (32, 255, 8),  # two in each partition
        (512, 40, 3),
        (544, 96, 1),  # alone, 17 warps count as 20
        (544, 97, 0),
        (544, 56, 2),  # together, 34 warps share the partitions
        (544, 57, 1),
        (288, 72, 3),
        (288, 73, 2),
    ],
)
def test_ctas_by_registers(threads, registers, ctas):
    assert arch.ctas_by_registers(65536, threads, registers) == ctas


@pytest.mark.parametrize(
    ("threads", "ctas", "most"),
    [(512, 1, 128), (544, 1, 96), (544, 2, 56), (288, 3, 72), (256, 2, 128), (128, 1, 255)],
)
def test_most_registers(threads, ctas, most):
    assert arch.most_registers(65536, threads, ctas) == most


def test_most_registers_of_too_many_threads():
    with pytest.raises(ShapeError, match="threads=1024, ctas=9"):
        arch.most_registers(65536, 1024, 9)
