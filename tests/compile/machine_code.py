"""Machine code of many kernels from one process: nvdisasm takes 0.3 s to start, and then 10 ms each."""

import re
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from quack_core.arch import Arch
from quack_core.jit.compile import Compiled
from quack_core.testing import cubin

HEADERS = "<Q10xHH"  # of an ELF file, at 40: where section headers lie, their size and number
SECTION = "<8xQ8xQQ"  # a header: flags, where its bytes lie, how many they are
EXECUTABLE = 4
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/.*$", re.MULTILINE)


class MachineCode:
    """What is left to be checked of kernels: their machine code, of all of them at once.

    Args:
        arch: for which they are compiled.
        folder: for their code.
    """

    def __init__(self, arch: Arch, folder: Path) -> None:
        self.arch = arch
        self.folder = folder
        self.waiting: list[tuple[bytes, str, Callable[[str], Iterable[str]]]] = []

    def later(
        self, compiled: Compiled, name: object, faults: Callable[[str], Iterable[str]]
    ) -> None:
        """Remember a check.

        Args:
            name: of the kernel, for messages.
            faults: what is wrong with its SASS, one line each.
        """
        assert compiled.cubin
        self.waiting.append((compiled.cubin, f"{compiled.name}, {name}", faults))

    def faults(self) -> Iterator[str]:
        """What is wrong with the kernels, one line each."""
        if not self.waiting:
            return
        texts = disassembled([code for code, *_ in self.waiting], self.arch, self.folder)
        for text, (_, name, faults) in zip(texts, self.waiting, strict=True):
            yield from (f"{name}: {fault}" for fault in faults(text))


def instructions(code: bytes) -> bytes:
    """Those of a cubin: its executable sections, 16 bytes each."""
    table, size, count = struct.unpack_from(HEADERS, code, 40)
    headers = [struct.unpack_from(SECTION, code, table + i * size) for i in range(count)]
    return b"".join(code[at : at + length] for flags, at, length in headers if flags & EXECUTABLE)


def disassembled(cubins: Sequence[bytes], arch: Arch, folder: Path) -> list[str]:
    """The SASS of cubins of one kernel each, as ``cubin.sass`` writes it, but without labels.

    Raises:
        RuntimeError: there is no nvdisasm.
    """
    tool = cubin.nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm not found: install the package nvidia-cuda-nvdisasm>=13.4")
    parts = [instructions(code) for code in cubins]
    path = folder / "instructions"
    path.write_bytes(b"".join(parts))
    command = [str(tool), "--no-dataflow", "--binary", arch.target.replace("sm_", "SM"), str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = {int(match[1], 16): match[0] for match in LINE.finditer(text)}
    ends = accumulate(map(len, parts), initial=0)
    return ["\n".join(lines[at] for at in range(a, b, 16)) for a, b in pairwise(ends)]
