"""What compiled code says about a kernel, without a GPU or a CUDA toolkit.

:func:`resource_usage` reads registers, stack and shared memory from the cubin, which is an ELF
file. :func:`sass` disassembles it; :func:`accesses` counts memory instructions by width.
:func:`wrapping_offsets` finds address arithmetic in PTX that overflows 32 bits.
"""

import collections
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import ptx

# Attributes of the section .nv.info whose value is a pair (symbol index, number).
_ATTRIBUTES = {0x2F: "registers", 0x11: "frame_bytes", 0x12: "min_stack_bytes"}
_SIZED_VALUE = 4  # form of an attribute: a 16-bit size, and that many bytes follow
_SYMBOL_BYTES = 24
_SECTION = "<IIQQQQIIQQ"  # name, type, flags, address, offset, size, link, ...

_GLOBAL_LOADS = ("LDG", "LDGSTS", "UBLKCP.S.G")
_BULK_BITS = 128  # bulk copies move 16-byte blocks
_LOCAL = ("LDL", "STL")
_ACCESS = re.compile(r"\b(LDGSTS|LDG|STG|LDS|STS|LDL|STL|ATOMG|REDG|RED)\b((?:\.\w+)*)")


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel.

    Args:
        registers: of a thread.
        frame_bytes: local memory of a thread; 0 means that nothing spills.
        min_stack_bytes: stack that the kernel itself needs.
        static_smem_bytes: shared memory fixed at compile time; dynamic memory is not in the cubin.
    """

    registers: int = 0
    frame_bytes: int = 0
    min_stack_bytes: int = 0
    static_smem_bytes: int = 0

    def registers_per_cta(self, num_threads: int) -> int:
        """Registers that a CTA takes from its SM: whole warps, 256 at a time."""
        per_warp = -(-self.registers * 32 // 256) * 256
        return per_warp * -(-num_threads // 32)


def resource_usage(cubin: bytes) -> dict[str, Usage]:
    """The resources of every kernel of a cubin, by kernel name; the compiler's own subroutines, such as
    that of a division, are left out.

    Raises:
        ValueError: `cubin` is no ELF file.
    """
    if cubin[:4] != b"\x7fELF":
        raise ValueError("not a cubin: it does not begin as an ELF file")
    sections = _sections(cubin)
    _, _, _, _, table, _, link, *_ = sections[".symtab"]
    strings = list(sections.values())[link][4]
    values: dict[str, dict[str, int]] = collections.defaultdict(dict)
    at, size = sections[".nv.info"][4:6]
    end = at + size
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != _SIZED_VALUE:
            continue  # the value was the 16 bits themselves
        if attribute in _ATTRIBUTES and size == 8:
            symbol, value = struct.unpack_from("<II", cubin, at)
            (name,) = struct.unpack_from("<I", cubin, table + _SYMBOL_BYTES * symbol)
            values[_text(cubin, strings + name)][_ATTRIBUTES[attribute]] = value
        at += size
    return {
        name: Usage(**found, static_smem_bytes=sections.get(f".nv.shared.{name}", (0,) * 6)[5])
        for name, found in values.items()
        if not name.startswith("$__internal_")
    }


def nvdisasm() -> Path | None:
    """The disassembler of the package nvidia-cuda-nvdisasm, else the one on PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            return Path(str(file.locate()))
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


def sass(cubin: bytes) -> str:
    """The machine code of a cubin as text.

    Raises:
        RuntimeError: there is no nvdisasm, or it does not know this cubin.
    """
    tool = nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm not found: install the package nvidia-cuda-nvdisasm>=13.4")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Without its analysis of branches the text is the same, and there a quarter sooner.
        command = [str(tool), "--print-code", "--no-dataflow", file.name]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"{tool} cannot read this cubin: {result.stderr.strip()}; "
            "install the package nvidia-cuda-nvdisasm>=13.4"
        )
    return result.stdout


def accesses(text: str) -> dict[str, collections.Counter[int]]:
    """Memory instructions in SASS: {instruction: {bits of one access: count}}.

    Instructions are LDG, LDGSTS, STG (global), LDS, STS (shared), LDL, STL (local), ATOMG, REDG and
    RED (atomics), and UBLKCP.S.G (bulk copies from global to shared memory).
    """
    found: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for name, suffixes in _ACCESS.findall(text):
        found[name][_access_bits(suffixes.split("."))] += 1
    if bulk := len(re.findall(r"\bUBLKCP\.S\.G\b", text)):
        found["UBLKCP.S.G"][_BULK_BITS] = bulk
    return dict(found)


def has(text: str, instruction: str) -> bool:
    """Whether SASS contains an instruction, such as ``STAS``, with any suffixes."""
    return re.search(rf"\b{re.escape(instruction)}\b", text) is not None


@dataclass(frozen=True)
class StaticFacts:
    """What can be checked of a kernel before it runs.

    Args:
        usage: its resources.
        accesses: memory instructions, as :func:`accesses` gives them.
        exchanges: sends to other CTAs of the cluster (st.async).
    """

    usage: Usage
    accesses: dict[str, collections.Counter[int]]
    exchanges: bool

    @property
    def spills(self) -> bool:
        """Whether it uses local memory."""
        local = any(self.accesses.get(name) for name in _LOCAL)
        return local or self.usage.frame_bytes > 0

    @property
    def load_bits(self) -> set[int]:
        """Widths of the loads from global memory, cp.async and bulk copies included."""
        return {bits for name in _GLOBAL_LOADS for bits in self.accesses.get(name, ())}

    @property
    def store_bits(self) -> set[int]:
        """Widths of the stores to global memory."""
        return set(self.accesses.get("STG", ()))


def static_facts(cubin: bytes, ptx_text: str | None = None) -> StaticFacts:
    """The facts of a cubin that holds one kernel.

    Args:
        ptx_text: the kernel's PTX, to read the accesses from instead of disassembling, which takes
            half a second. Registers and frame come from the cubin in any case.

    Raises:
        ValueError: it holds none, or several.
        RuntimeError: it cannot be disassembled.
    """
    found = resource_usage(cubin)
    if len(found) != 1:
        raise ValueError(f"the cubin holds {len(found)} kernels, not one: {', '.join(found)}")
    usage = next(iter(found.values()))
    if ptx_text is not None:
        seen = ptx.accesses(ptx_text)
        return StaticFacts(usage, seen, "STAS" in seen)
    text = sass(cubin)
    return StaticFacts(usage, accesses(text), has(text, "STAS"))


def _sections(cubin: bytes) -> dict[str, tuple[int, ...]]:
    """The section headers by name, in their order."""
    table, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from(_SECTION, cubin, table + i * size) for i in range(count)]
    return {_text(cubin, headers[names][4] + header[0]): header for header in headers}


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _access_bits(suffixes: list[str]) -> int:
    for suffix in suffixes:
        if suffix in ("U8", "S8"):
            return 8
        if suffix in ("U16", "S16"):
            return 16
        if suffix in ("64", "128", "256"):
            return int(suffix)
    return 32
