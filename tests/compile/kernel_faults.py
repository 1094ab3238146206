"""What can be wrong with a compiled kernel of an operator on rows, whichever the operator."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from machine_code import MachineCode

from quack_core import arch as arches
from quack_core import dtypes, env
from quack_core.arch import Arch
from quack_core.errors import UnsupportedError
from quack_core.jit.compile import Compiled
from quack_core.testing import cubin, ptx
from quack_norm.ops.row_map.config import RowConfig

TURNS = ("sm100", "sm120")


def in_turn(cases: Iterable[Any], config_of: Callable[[Any, Arch], Any]) -> list[Any]:
    """Cases as parameters of a test, of which sm100 and sm120 have some in turn.

    Where both have the same configuration, both compile the same program, and it is the last stage of
    the compiler alone that differs. Of such cases each has every other one; the rest is marked
    ``elsewhere``, which the sessions leave out: ``nox -s compile-sm120 -- -m ""`` compiles all.

    Args:
        config_of: the configuration for a case and an architecture.
    """
    own, found = arches.get(env.get("QUACK_COMPILE_ARCH")).name, []
    turn = 0
    for case in cases:
        configs = [_config_or_none(config_of, case, arches.get(name)) for name in TURNS]
        alike = configs[0] is not None and configs[0] == configs[1]
        turn += alike
        elsewhere = alike and own in TURNS and own != TURNS[turn % 2]
        found.append(pytest.param(case, marks=pytest.mark.elsewhere if elsewhere else ()))
    return found


def _config_or_none(config_of: Callable[[Any, Arch], Any], case: Any, arch: Arch) -> Any:
    try:
        return config_of(case, arch)
    except UnsupportedError:
        return None


def check(
    spec: Any,
    config: Any,
    arch: Arch,
    compiled: Compiled,
    faults: Callable[[cubin.StaticFacts], Iterable[str]],
    code: MachineCode,
) -> None:
    """Assert that a compiled kernel has no faults.

    Every kernel is disassembled in one session at least: there its machine code must access memory as
    its PTX does, on which the others rely.

    Args:
        faults: what is wrong, one line each, given what is known of the kernel.
        code: checks of machine code, to be made later.
    """
    facts = cubin.static_facts(compiled.cubin or b"", compiled.ptx or "")
    assert list(faults(facts)) == [], config

    def faults_of_code(text: str) -> Iterator[str]:
        accesses = cubin.accesses(text)
        seen = cubin.StaticFacts(facts.usage, accesses, cubin.has(text, "STAS"))
        yield from faults(seen)
        # Of shorter rows the compiler loads no more than it needs.
        if getattr(spec, "n", 0) >= 64 and widths(seen) != widths(facts):
            yield f"machine code and PTX access global memory by {widths(seen)} and {widths(facts)}"
        if seen.exchanges != facts.exchanges:
            yield f"st.async in machine code: {seen.exchanges}, in PTX: {facts.exchanges}"

    # A third of them where all are compiled; the others by those of which each compiles a half.
    if (zlib.crc32(repr(spec).encode()) % 3 == 0) == (arch.name not in TURNS):
        code.later(compiled, config, faults_of_code)


def widths(facts: cubin.StaticFacts) -> tuple[list[int], list[int]]:
    """Bits of loads from global memory and of stores there."""
    return sorted(facts.load_bits), sorted(facts.store_bits)


def is_aligned(spec: Any, narrowest: str) -> bool:
    """Whether every vector of every operand is a whole number of 16-byte accesses."""
    return spec.align == spec.weight_align == 16 and spec.vec * dtypes.width(narrowest) >= 128


def faults(
    spec: Any, narrowest: str, config: Any, arch: Arch, compiled: Compiled, facts: cubin.StaticFacts
) -> Iterator[str]:
    """What is wrong with a compiled kernel, one line each.

    Args:
        narrowest: dtype of its narrowest operand.
        facts: what is known of the kernel.
    """
    yield from resource_faults(spec, config, arch, facts)
    yield from access_faults(spec, narrowest, config, facts)
    shared_by = config.tiling(spec).cluster
    if facts.exchanges != (shared_by > 1):
        yield f"a row is shared by {shared_by} CTAs, but st.async present: {facts.exchanges}"
    if f".target {arch.target}\n" not in (compiled.ptx or ""):
        yield f"not compiled for {arch.target}"
    rows = config.rows_per_cta * getattr(config, "peers", 1)
    for instruction in ptx.wrapping_offsets(compiled.ptx or "", max(2, spec.n), rows):
        yield f"row offset in 32 bits: {instruction}"


def resource_faults(spec: Any, config: Any, arch: Arch, facts: cubin.StaticFacts) -> Iterator[str]:
    if facts.spills:
        yield f"spills: a frame of {facts.usage.frame_bytes} bytes, {facts.accesses}"
    if facts.usage.registers > config.registers:
        yield f"{facts.usage.registers} registers; {config.registers} let the CTAs on an SM"
    registers = facts.usage.registers_per_cta(config.num_threads)
    if registers > arch.registers_per_sm:
        used = f"{config.num_threads} threads of {facts.usage.registers} registers"
        yield f"{used} take {registers}; an SM has {arch.registers_per_sm}"
    smem_bytes = config.smem_bytes(spec)
    if smem_bytes > arch.smem_bytes:
        yield f"{smem_bytes} bytes of shared memory; a CTA has {arch.smem_bytes}"
    if config.cluster > arch.max_cluster:
        yield f"a cluster of {config.cluster} CTAs; {arch.name} has at most {arch.max_cluster}"


def access_faults(
    spec: Any, narrowest: str, config: Any, facts: cubin.StaticFacts
) -> Iterator[str]:
    loads, stores = sorted(facts.load_bits), sorted(facts.store_bits)
    if is_aligned(spec, narrowest):
        if min(loads) < 32:
            yield f"narrow loads from global memory of aligned rows: {loads}"
        # dweight and dbias are written once a launch, in their own dtype and element by element
        if min(stores) < 32 and not getattr(spec, "column_sums", 0):
            yield f"narrow stores to global memory of aligned rows: {stores}"
    # Rows of rings and those that wait in shared memory move in whole chunks from any address, so
    # do pieces of memory; the others as their address allows.
    whole_chunks = isinstance(config, RowConfig) and (
        config.persistent or config.unroll > 0 or (config.shifted and spec.in_phase)
    )
    wanted = 128 if whole_chunks else min(8 * spec.align, spec.vec * dtypes.width(spec.x))
    for kind, found in (("loads from", loads), ("stores to", stores)):
        if wanted not in found:
            yield f"no {wanted}-bit {kind} global memory: {found}"
