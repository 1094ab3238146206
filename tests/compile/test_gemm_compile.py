"""GEMM kernels, compiled for one architecture: what holds before they ever run.

Needs no GPU. ``QUACK_COMPILE_ARCH`` names the architecture.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kernel_faults
import pytest
from machine_code import MachineCode

from quack_core import arch as arches
from quack_core import dtypes, env
from quack_core.gemm.epilogue import (
    Activation,
    ActivationGrad,
    AddC,
    AddVector,
    ColumnReduce,
    Gate,
    GateGrad,
    Kind,
    Mirror,
    Op,
    RowReduce,
    Scale,
    SelectColumn,
    SelectRow,
    StoreAux,
)
from quack_core.jit.compile import Compiled, compile_kernel
from quack_core.testing import cubin
from quack_gemm.config import PARTS, GemmConfig, SplitK, SumConfig
from quack_gemm.spec import GemmSpec, SumSpec

F32, BF16, F16, E4M3, E5M2 = "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
ARCH = arches.get(env.get("QUACK_COMPILE_ARCH"))

WIDE = GemmConfig(128, 256, 2, 1)
PINGPONG = GemmConfig(128, 128, 1, 1, pingpong=True)
NARROW = GemmConfig(64, 192, 1, 1, pingpong=True)
FEW_ROWS = GemmConfig(128, 64, 1, 1, swap=True)
APART = GemmConfig(128, 256, 1, 1, split_k=48, split_mode=SplitK.SEPARATE)
ADDED = GemmConfig(128, 128, 2, 1, split_k=6, split_mode=SplitK.PARALLEL)


def plain(**fields: object) -> GemmSpec:
    return GemmSpec(BF16, BF16, BF16, **fields)  # type: ignore[arg-type]


def fused(*ops: Op, **fields: object) -> GemmSpec:
    return plain(epilogue=ops, **fields)


PRODUCTS = [  # tiles and clusters, then memory orders, batches and dtypes
    (plain(), PINGPONG),
    (plain(), GemmConfig(64, 256, 1, 2, pingpong=True)),
    (plain(), GemmConfig(256, 128, 2, 1)),
    (plain(), GemmConfig(192, 160, 1, 1)),
    (plain(), GemmConfig(128, 128, 2, 2)),
    (plain(), GemmConfig(64, 64, 1, 1)),
    (plain(), FEW_ROWS),
    (plain(), GemmConfig(128, 16, 1, 1, swap=True, prefetch=True)),
    (plain(a_major="column", b_major="row"), WIDE),
    (plain(), GemmConfig(128, 256, 2, 1, split_k=4)),
    (plain().sums, APART),
    (plain(d_major="column", a_batched=True).sums, replace(APART, tile_m=256, tile_n=128)),
    (plain().sums, replace(APART, tile_n=32, swap=True, prefetch=True)),
    (GemmSpec(BF16, BF16, F32), ADDED),
    (GemmSpec(E4M3, E4M3, F32), ADDED),
    (plain(d_major="column"), WIDE),
    (plain(a_batched=True, b_batched=True), WIDE),
    (plain(a_batched=True), WIDE),
    (GemmSpec(BF16, BF16, F32), WIDE),
    (GemmSpec(F16, F16, F16), WIDE),
    (GemmSpec(E4M3, E4M3, BF16), GemmConfig(128, 128, 2, 1)),
    (GemmSpec(E4M3, E5M2, BF16), GemmConfig(64, 128, 1, 1, pingpong=True)),
]
SUMS = [
    plain(),
    plain(d_major="column"),
    fused(Scale(Kind.COLUMN), AddC(BF16, Kind.DEVICE_SCALAR), AddVector(BF16), a_batched=True),
    fused(AddVector(BF16), AddC(F32), Activation("gelu_tanh"), d_major="column"),
    fused(AddVector(BF16), StoreAux(BF16), Gate("silu")),
    fused(AddVector(BF16), StoreAux(F32), Gate("silu"), concat=True),
    fused(GateGrad("silu", BF16)),
    fused(GateGrad("silu", BF16), concat=True),
]
SCALES = (Scale(Kind.COLUMN, "scale_a"), Scale(Kind.ROW, "scale_b"))
EPILOGUES = [
    (fused(Scale(), AddVector(BF16), Activation("gelu_tanh")), WIDE),
    (fused(AddC(BF16, beta=Kind.DEVICE_SCALAR), AddVector(F32, Kind.COLUMN)), WIDE),
    (fused(AddVector(BF16), AddC(BF16)), FEW_ROWS),
    (GemmSpec(BF16, BF16, F32, "column", "row", epilogue=(AddC(F32),)), WIDE),
    (fused(StoreAux(BF16), Activation("silu")), WIDE),
    (fused(Gate("silu")), WIDE),
    (fused(Gate("silu"), concat=True), WIDE),
    (fused(AddVector(BF16), StoreAux(BF16), Gate("silu")), WIDE),
    (fused(AddVector(BF16), StoreAux(BF16), Gate("silu"), concat=True), PINGPONG),
    (fused(ActivationGrad("gelu_tanh", BF16)), WIDE),
    (fused(RowReduce("sum_squares"), Scale(Kind.ROW)), WIDE),
    (fused(RowReduce("lse")), NARROW),
    (fused(RowReduce("max")), FEW_ROWS),
    (fused(ActivationGrad("gelu_tanh", BF16), ColumnReduce("sum")), WIDE),
    (fused(ColumnReduce("lse"), RowReduce("lse"), a_batched=True), NARROW),
    (fused(ColumnReduce("lse")), GemmConfig(128, 64, 1, 1, pingpong=True)),
    (fused(ColumnReduce("max")), FEW_ROWS),
    (fused(RowReduce("lse"), SelectColumn()), GemmConfig(128, 224, 2, 1)),
    (fused(SelectColumn("int32"), SelectRow()), FEW_ROWS),
    (fused(SelectRow("int32"), AddVector(BF16)), WIDE),
    (fused(ColumnReduce("sum_squares"), d_major="column"), GemmConfig(192, 144, 1, 1)),
    (fused(GateGrad("silu", BF16)), WIDE),
    (fused(Mirror()), WIDE),
    (fused(Scale(), AddC(BF16, Kind.SCALAR), Mirror(), a_batched=True, b_batched=True), WIDE),
    (GemmSpec(BF16, BF16, F32, "column", "row", epilogue=(Mirror(),)), PINGPONG),
    (fused(Mirror()), GemmConfig(128, 128, 1, 1, split_k=2)),
    (GemmSpec(E4M3, E4M3, BF16, epilogue=SCALES), GemmConfig(128, 160, 2, 1)),
]
CASES = [*PRODUCTS, *EPILOGUES]

OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
BEGIN, WAIT = "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR"
MULTIPLY = ("HGMMA", "QGMMA")


def faults(spec: GemmSpec, config: GemmConfig, compiled: Compiled) -> Iterator[str]:
    """What is wrong with a compiled kernel, its machine code aside, one line each."""
    facts = cubin.static_facts(compiled.cubin or b"", compiled.ptx)
    yield from resource_faults(spec, config, facts)
    if f".target {ARCH.target}\n" not in (compiled.ptx or ""):
        yield f"not compiled for {ARCH.target}"
    if ("griddepcontrol" in (compiled.ptx or "")) != config.prefetch:
        yield f"prefetch is {config.prefetch}, but the kernel before is waited for, or is not"


def resource_faults(spec: GemmSpec, config: GemmConfig, facts: cubin.StaticFacts) -> Iterator[str]:
    if facts.spills:
        yield f"spills: a frame of {facts.usage.frame_bytes} bytes, {facts.accesses}"
    registers = facts.usage.registers_per_cta(config.num_threads)
    if registers > ARCH.registers_per_sm:
        yield f"{registers} registers; an SM has {ARCH.registers_per_sm}"
    # A warpgroup that asks for more registers waits until the CTA has as many to give.
    few, many = config.registers
    if few + config.groups * many > (1 + config.groups) * facts.usage.registers:
        yield f"{few} and {many} registers are more than {facts.usage.registers} for each thread"
    smem_bytes = config.smem_bytes(spec)
    if smem_bytes > ARCH.smem_bytes:
        yield f"{smem_bytes} bytes of shared memory; a CTA has {ARCH.smem_bytes}"


def faults_of_code(spec: GemmSpec, config: GemmConfig, text: str) -> Iterator[str]:
    found = Counter(OPCODE.findall(text))
    if local := [name for name in found if name.startswith(("LDL", "STL"))]:
        yield f"spills: {local}"
    yield from multiply_faults(spec, config, text)
    yield from copy_faults(spec, config, found)


def multiply_faults(spec: GemmSpec, config: GemmConfig, text: str) -> Iterator[str]:
    """The instructions of a stage are issued one after the other, before a thread waits for any."""
    promoted = dtypes.width(spec.a) == 8
    name = MULTIPLY[promoted]
    groups = text.split(BEGIN)[1:]
    stage = [group.partition(WAIT)[0] for group in groups]
    issued = [Counter(each.partition(".")[0] for each in OPCODE.findall(part)) for part in stage]
    # Each has 32 bytes along K, and a stage 128; the columns of 8-bit operands are multiplied in parts.
    wanted = [4 * config.atoms] * (PARTS if promoted else 1)
    if [found[name] for found in issued] != wanted or any(WAIT in part for part in groups[:-1]):
        yield f"groups of {[found[name] for found in issued]} {name} in a stage, not {wanted}"
    if len(re.findall(r"\b[HQ]GMMA\b", text)) != sum(wanted):
        yield f"matrix instructions beside the {name} of a stage"
    # Descriptors that each thread computes pass through R2UR, for every instruction.
    if moved := sum(found["R2UR"] for found in issued):
        yield f"{moved} R2UR between the {name} of a stage"


def copy_faults(spec: GemmSpec, config: GemmConfig, found: Counter[str]) -> Iterator[str]:
    loads = {name for name in found if name.startswith("UTMALDG")}
    multicast = {name for name in loads if name.endswith(".MULTICAST")}
    # Beside the tensor cores it costs half of the speed.
    if found["MEMBAR.ALL.GPU"]:
        yield f"{found['MEMBAR.ALL.GPU']} fences of the GPU: no data pass through its memory"
    shared = (config.cluster_m > 1) + (config.cluster_n > 1)
    if not loads or bool(multicast) != (shared > 0) or (shared == 2 and loads != multicast):
        yield f"tiles come by {sorted(loads)}, and {shared} operands are shared"
    adds = config.split_mode == SplitK.PARALLEL
    name = "UTMAREDG" if adds else "UTMASTG"
    stores = sum(count for each, count in found.items() if each.startswith(name))
    pieces = config.pieces(spec) // config.shares(spec)
    if stores < pieces * len(spec.sinks):
        yield f"{stores} {name} for {pieces} parts, each stored as {spec.sinks}"
    # Two for each store, of its buffer and its place, and one for the number of the warpgroup.
    if found["R2UR"] > 2 * stores + 1:
        yield f"{found['R2UR']} R2UR, and {stores} {name}"
    matrices = sum(count for name, count in found.items() if name.startswith("STSM"))
    # A gate and what it gates, side by side, are no part of such a matrix.
    narrow = [
        i for i, form in spec.sinks if form != "pairs" and dtypes.width(spec.outputs[i]) == 16
    ]
    if bool(matrices) != bool(narrow):
        yield f"{matrices} STSM for outputs {spec.outputs}"


def named(case: tuple[GemmSpec, GemmConfig]) -> str:
    """The kernel's name and what sets it apart."""
    spec, config = case
    flags = [flag for flag in ("a_batched", "b_batched", "concat") if getattr(spec, flag)]
    flags += [flag for flag in ("pingpong", "swap", "prefetch") if getattr(config, flag)]
    flags += [f"{config.split_mode}{config.split_k}"] if config.split_k > 1 else []
    tile = f"{config.tile_m}x{config.tile_n}x{config.cluster_m}x{config.cluster_n}"
    return "-".join([spec.name, *flags, tile])


@pytest.mark.skipif(not ARCH.wgmma, reason=f"the kernels of {ARCH.name} are not written")
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=named)
def test_kernel(case: tuple[GemmSpec, GemmConfig], tmp_path: Path, code: MachineCode) -> None:
    spec, config = case
    compiled = compile_kernel("quack_gemm.sm90.kernel", spec, config, ARCH, dump_dir=tmp_path)
    assert list(faults(spec, config, compiled)) == [], config
    code.later(compiled, config, functools.partial(faults_of_code, spec, config))


def sum_config(spec: GemmSpec, arch: arches.Arch) -> SumConfig:
    """One for all architectures."""
    return SumConfig(1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("slices", [1, 8])
@pytest.mark.parametrize("spec", kernel_faults.in_turn(SUMS, sum_config), ids=lambda s: s.name)
def test_sums_of_parts(spec: GemmSpec, slices: int, tmp_path: Path, code: MachineCode) -> None:
    """Any architecture: parts come in 16 bytes at a time, and D goes out as whole vectors."""
    module, config = "quack_gemm.part_sums", SumConfig(slices)
    compiled = compile_kernel(module, SumSpec(spec), config, ARCH, dump_dir=tmp_path)
    facts = cubin.static_facts(compiled.cubin or b"", compiled.ptx)
    assert not facts.spills, facts
    assert facts.usage.registers <= 64  # eight CTAs of an SM
    assert max(facts.load_bits) == 128
    assert max(facts.store_bits) >= 64
    code.later(compiled, config, functools.partial(faults_of_sums, spec, slices))


def faults_of_sums(spec: GemmSpec, slices: int, text: str) -> Iterator[str]:
    loads = len(re.findall(r"LDG\.E\.128", text))
    if loads < 8 * (1 + spec.gated):
        yield f"{loads} loads of 16 bytes: too few are under way"
    if ("BAR.SYNC" in text) != (slices > 1):
        yield f"{slices} groups of threads add up, and barriers present: {'BAR.SYNC' in text}"
