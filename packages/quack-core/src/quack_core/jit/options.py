"""Compile options: the one place that decides how the DSL compiles, and so a part of every cache key."""

from pathlib import Path
from typing import NamedTuple


class Options(NamedTuple):
    """What changes the generated code beside spec, config and architecture.

    Args:
        opt_level: optimisation level of the DSL, 0 to 3.
        line_info: keep source lines, for profilers and compute-sanitizer.
    """

    opt_level: int = 3
    line_info: bool = False

    def text(self, target: str, dump_dir: Path | None = None) -> str:
        """The option string for ``cute.compile``; with ``dump_dir`` PTX and cubin are written there."""
        import shlex  # a process whose kernels are all in the cache does without

        words = ["--enable-tvm-ffi", "--gpu-arch", target, "--opt-level", str(self.opt_level)]
        if self.line_info:
            words.append("--generate-line-info")
        if dump_dir is not None:
            words += ["--keep-ptx", "--keep-cubin", "--dump-dir", str(dump_dir)]
        return shlex.join(words)


DEFAULT = Options()
