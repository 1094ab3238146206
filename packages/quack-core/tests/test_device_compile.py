"""What the device functions become on each architecture: instructions, widths, no spills.

The unit kernels of ``device_probe`` are compiled for the architecture that ``QUACK_COMPILE_ARCH``
names; those for sm_90a are disassembled.
"""

import enum
import functools
import re
import sys
from pathlib import Path

import pytest

from quack_core import arch, env
from quack_core.errors import CompileError
from quack_core.testing import cubin

PROBE = Path(__file__).parent / "device_probe"
sys.path.insert(0, str(PROBE))
try:
    from quack_device_probe.specs import PROBES, BulkSpec, Probe, ProbeConfig
finally:
    sys.path.remove(str(PROBE))

ARCH = arch.get(env.get("QUACK_COMPILE_ARCH"))

MBARRIER = (
    r"mbarrier\.init\.",
    r"fence\.mbarrier_init",
    r"mbarrier\.arrive\.expect_tx\.",
    r"mbarrier\.try_wait\.parity\.",
)
BULK_LOAD = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes \["
BULK_STORE = r"cp\.async\.bulk\.global\.shared::cta\.bulk_group \["
GROUPS = (r"cp\.async\.bulk\.commit_group", r"cp\.async\.bulk\.wait_group")
TILE_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared::(cta|cluster)\.global\.tile\.mbarrier"
TILE_STORE = r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.tile\.bulk_group"
RING = (
    *MBARRIER,
    r"prefetch\.tensormap",
    r"fence\.proxy\.async\.shared::cta",
    r"bar\.sync\s+1, 128",
)
EXCHANGE = r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.b32"
SHUFFLE = r"shfl\.sync\.bfly"

# Path of a probe: patterns in its PTX, and instructions in its SASS for sm_90a.
EXPECTED = {
    ("bulk", "store"): (
        (*MBARRIER, BULK_LOAD, BULK_STORE, *GROUPS, r"fence\.proxy\.async\.shared::cta"),
        ("UBLKCP.S.G", "UBLKCP.G.S"),
    ),
    ("bulk", "add"): (
        (r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32 \[", *GROUPS),
        ("UBLKRED.G.S.ADD.F32",),
    ),
    ("bulk", "send"): (
        (r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier", r"mapa\.shared::cluster"),
        ("UBLKCP.S.S",),
    ),
    ("bulk", "multicast"): (
        (r"complete_tx::bytes\.multicast::cluster \[[^\]]*\], \[[^\]]*\], 2048, \[[^\]]*\], 15;",),
        ("UBLKCP.S.G.MULTICAST",),
    ),
    ("tiles", "store"): ((*RING, TILE_LOAD, TILE_STORE, *GROUPS), ("UTMALDG.2D", "UTMASTG.2D")),
    ("tiles", "add"): (
        (*RING, r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add\.tile"),
        ("UTMALDG.2D", "UTMAREDG.2D"),
    ),
    ("tiles", "multicast"): (
        (*RING, r"\.multicast::cluster", r"mbarrier\.arrive\.shared::cluster"),
        ("UTMALDG.2D.MULTICAST",),
    ),
    ("grid", "last"): ((r"atom\.global\.acq_rel\.add\.u32",), ("ATOMG", "MEMBAR.ALL.GPU")),
    ("grid", "turns"): (
        (r"ld\.acquire\.gpu\.global\.b32", r"red\.release\.gpu\.global\.add\.s32"),
        ("REDG",),
    ),
    ("grid", "groups"): (
        (r"bar\.arrive 1, 128", r"bar\.sync\s+2, 128", r"bar\.sync\s+1, 128"),
        ("BAR.ARV", "BAR.SYNC"),
    ),
}
NO_MULTICAST = "sm_120 has no multicast: the compiler calls a routine in its place"


@functools.cache
def compiled(probe: Probe, folder: Path):
    from quack_core.jit.compile import compile_kernel

    module = f"quack_device_probe.{probe.module}"
    return compile_kernel(module, probe.spec, ProbeConfig(), ARCH, dump_dir=folder)


@functools.cache
def disassembled(probe: Probe, folder: Path) -> str:
    if ARCH.name != "sm90":
        pytest.skip("instructions of the hardware are compared for sm_90a")
    return cubin.sass(compiled(probe, folder).cubin)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("device_probe")


@pytest.fixture(autouse=True)
def probe_importable(monkeypatch):
    monkeypatch.syspath_prepend(PROBE)


def of_module(*modules):
    chosen = [probe for probe in PROBES if probe.module in modules]
    return pytest.mark.parametrize("probe", chosen, ids=lambda probe: probe.id)


def unelected(ptx):
    """Copies by the tensor memory accelerator that more than one thread may issue.

    A copy must follow an election with no label, where other threads would come in, between.
    Stores of tiles are left out: the DSL elects nobody for them and they may be repeated.
    """
    found, elected = [], False
    for line in ptx.splitlines():
        if "elect.sync" in line:
            elected = True
        elif re.match(r"\$\w+:", line.strip()):
            elected = False
        elif re.match(r"\s*(?:@\S+ )?cp(?:\.reduce)?\.async\.bulk\.(?!commit|wait)", line):
            if not elected and not re.search(TILE_STORE, line):
                found.append(line.strip())
    return found


@of_module("vectors", "unaligned", "bulk", "tiles", "reduction", "grid", "maths")
def test_compiles_without_spills(probe, folder):
    if ARCH.name == "sm120" and getattr(probe.spec, "path", "") == "multicast":
        pytest.skip(NO_MULTICAST)
    result = compiled(probe, folder)
    assert f".target {ARCH.target}\n" in result.ptx
    ((kernel, usage),) = cubin.resource_usage(result.cubin).items()
    assert kernel == f"{probe.spec.name}_0"
    assert usage.frame_bytes == 0
    assert not re.search(r"\b(?:ld|st)\.local\b", result.ptx)


@of_module("bulk", "tiles", "grid")
def test_instructions_are_there(probe, folder):
    patterns, _ = EXPECTED[probe.module, probe.spec.path]
    ptx = compiled(probe, folder).ptx
    assert [pattern for pattern in patterns if not re.search(pattern, ptx)] == []


@of_module("bulk", "tiles", "grid")
def test_hardware_has_the_instructions(probe, folder):
    _, instructions = EXPECTED[probe.module, probe.spec.path]
    sass = disassembled(probe, folder)
    assert [name for name in instructions if not cubin.has(sass, name)] == []


@of_module("bulk", "tiles")
def test_one_elected_thread_issues_each_copy(probe, folder):
    ptx = compiled(probe, folder).ptx
    assert "elect.sync" in ptx
    assert unelected(ptx) == []


def test_an_unelected_copy_is_noticed():
    copy = "\tcp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;"
    elect = "\telect.sync \t%r7|%p3, -1;"
    assert unelected(f"{elect}\n{copy}") == []
    assert unelected(f"{elect}\n$L__BB0_4:\n{copy}") == [copy.strip()]
    assert unelected(f"{copy}\n\tcp.async.bulk.commit_group;") == [copy.strip()]


@pytest.mark.exhaustive
@of_module("vectors")
def test_accesses_are_as_wide_as_the_alignment(probe, folder):
    """The number of accesses follows from the vectors of a thread."""
    spec = probe.spec
    bits = min(8 * spec.align, 128)
    element = {"float32": 32, "bfloat16": 16, "float16": 16}[spec.dtype]
    passes = -(-spec.n // (spec.vec * spec.threads_per_row))
    count = passes * spec.vec * element // bits
    found = cubin.accesses(disassembled(probe, folder))
    load = "LDG" if spec.path == "registers" else "LDGSTS"
    assert found[load] == {bits: count}
    assert found["STG"] == {bits: count}
    if spec.path == "fetch":
        assert "LDG" not in found
        assert found["LDS"][128] == passes


@of_module("vectors")
def test_cp_async_bypasses_l1_where_it_can(probe, folder):
    """Only accesses of 16 bytes can (.cg)."""
    ptx = compiled(probe, folder).ptx
    found = set(
        re.findall(r"cp\.async\.(c[ag])\.shared\.global \[[^\]]*\], \[[^\]]*\], (\d+)", ptx)
    )
    kind = "cg" if probe.spec.align == 16 else "ca"
    expected = {(kind, str(probe.spec.align))} if probe.spec.path == "fetch" else set()
    assert found == expected


@pytest.mark.exhaustive
@of_module("unaligned")
def test_unaligned_rows_move_in_16_bytes(probe, folder):
    """Single elements only at the ends of a row, and where the store's alignment is unknown."""
    found = cubin.accesses(disassembled(probe, folder))
    assert set(found["LDG"]) == {128}
    element = 32 if probe.spec.dtype == "float32" else 16
    passes = probe.spec.tiling.passes
    assert found["STG"][128] == passes
    assert set(found["STG"]) == {128, element}


@of_module("reduction")
def test_levels_of_a_reduction(probe, folder):
    spec, ptx = probe.spec, compiled(probe, folder).ptx
    width = spec.width
    assert len(re.findall(EXCHANGE, ptx)) == (width * spec.rounds if spec.cluster > 1 else 0)
    barriers = spec.rounds if spec.threads_per_row > 32 or spec.cluster > 1 else 0
    assert len(re.findall(r"bar\.sync\s+0;", ptx)) == barriers
    shuffles = min(5, spec.threads_per_row.bit_length() - 1)
    if spec.threads_per_row == 1024:
        shuffles += 5  # over 32 partial results
    if spec.reduction == "compensated":  # over any number
        shuffles += max(0, spec.threads_per_row.bit_length() - 6) + spec.cluster.bit_length() - 1
    assert len(re.findall(SHUFFLE, ptx)) == shuffles * width * spec.rounds


@of_module("reduction")
def test_a_maximum_passes_nan_on_at_every_level(probe, folder):
    """``max.f32`` would drop a NaN between threads that ``max.NaN.f32`` has kept within one.

    Beside a sum of exponentials it may: the sum has the NaN.
    """
    found = set(re.findall(r"\bmax\.\S*f32", compiled(probe, folder).ptx))
    expected = {"max": {"max.NaN.f32"}}
    expected |= {name: {"max.NaN.f32", "max.f32"} for name in ("online", "softmax", "compensated")}
    assert found == expected.get(probe.spec.reduction, set())


@of_module("maths")
def test_maths_are_approximations_of_the_hardware(probe, folder):
    """None takes the slow path that the DSL chooses by default."""
    found = re.findall(r"\b(?:rsqrt|ex2|lg2|rcp|div|sqrt)\.\S+", compiled(probe, folder).ptx)
    names = sorted(instruction.removesuffix(".approx.ftz.f32") for instruction in found)
    assert names == ["ex2", "ex2", "lg2", "rcp", "rsqrt"]  # both logarithms share theirs


def test_every_probe_is_expected():
    """A new probe of copies has to say what it should become."""
    known = {(probe.module, probe.spec.path) for probe in PROBES if hasattr(probe.spec, "path")}
    assert {key for key in known if key[0] in ("bulk", "tiles", "grid")} == set(EXPECTED)


def test_named_barriers_are_numbered_from_one():
    from quack_core.device.barrier import NamedBarrier

    class Barrier(NamedBarrier):
        EPILOGUE = enum.auto()
        ROWS = enum.auto()

    assert (Barrier.EPILOGUE, Barrier.ROWS) == (1, 2)
    with pytest.raises(AttributeError):
        Barrier.ROWS = 3


@pytest.mark.parametrize("numbers", [(0,), (16,), (-1,), (3, 3)], ids=str)
def test_named_barriers_refuse_wrong_numbers(numbers):
    """0 is the barrier of sync_threads; a number with two names would join two barriers."""
    from quack_core.device.barrier import NamedBarrier

    with pytest.raises(ValueError, match="must be 1 to 15|duplicate values"):
        NamedBarrier("Wrong", {f"B{i}": number for i, number in enumerate(numbers)})


@pytest.mark.parametrize("function", ["sync_group", "arrive_group"])
@pytest.mark.parametrize("threads", [0, 16, 100, 1056])
def test_groups_are_whole_warps(function, threads):
    from quack_core.device import barrier

    with pytest.raises(ValueError, match=f"num_threads={threads}: must be a multiple of 32"):
        getattr(barrier, function)(1, threads)


def test_only_float32_is_added(folder):
    spec = BulkSpec("add", 512, dtype="bfloat16")
    with pytest.raises(CompileError, match="bulk_add takes float32, found"):
        compiled(Probe("bulk", spec), folder)


@pytest.mark.parametrize("path", ["store", "add"])
def test_bulk_sizes_are_multiples_of_16_bytes(path, folder):
    with pytest.raises(CompileError, match="num_bytes=2040: bulk copies take multiples of 16"):
        compiled(Probe("bulk", BulkSpec(path, 510)), folder)


@pytest.mark.parametrize(
    ("vec", "width", "align", "elements"),
    [
        (8, 16, 16, 8),
        (8, 16, 8, 4),
        (8, 16, 4, 2),
        (8, 16, 2, 1),
        (1, 16, 16, 1),
        (2, 16, 16, 2),
        (1, 32, 4, 1),
        (8, 32, 16, 4),
        (4, 32, 128, 4),
    ],
)
def test_access_width(vec, width, align, elements):
    """The widest access that vector and alignment allow, at most 16 bytes."""
    from quack_core.device import copy

    assert copy.access_elements(vec, width, align) == elements
