"""Compile RMSNorm kernels for three architectures and say what they use; needs no GPU."""

import itertools
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from quack_core import arch as arches
from quack_core.arch import Arch
from quack_core.jit import cache, store
from quack_core.jit.compile import Compiled, compile_kernel
from quack_core.testing import cubin
from quack_norm.ops.rmsnorm.bwd_config import BwdConfig
from quack_norm.ops.rmsnorm.bwd_rules import default_bwd
from quack_norm.ops.rmsnorm.bwd_spec import RMSNormBwdSpec
from quack_norm.ops.rmsnorm.config import FwdConfig
from quack_norm.ops.rmsnorm.rules import default_fwd
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec

Spec = RMSNormFwdSpec | RMSNormBwdSpec
SPECS: list[Spec] = [
    RMSNormFwdSpec(4096, "bfloat16", "bfloat16", weight="float32"),
    RMSNormFwdSpec(8192, "bfloat16", "bfloat16", weight="bfloat16", residual="float32"),
    RMSNormFwdSpec(65536, "bfloat16", "bfloat16", weight="float32"),
    RMSNormBwdSpec(4096, "bfloat16", "bfloat16", "bfloat16", weight="float32", dweight=True),
    RMSNormBwdSpec(65536, "bfloat16", "bfloat16", "bfloat16", weight="float32", dweight=True),
]


def config_of(spec: Spec, arch: Arch) -> FwdConfig | BwdConfig:
    """What the operator chooses for a spec."""
    return default_fwd(spec, arch) if isinstance(spec, RMSNormFwdSpec) else default_bwd(spec, arch)


def inspect() -> bool:
    """Print what each kernel uses; tell whether none spills and all move whole vectors."""
    columns = ("target", "threads", "cluster", "registers", "spilled", "loads", "stores")
    print("\nCompiled: registers and spilled bytes of a thread, bits of global loads and stores\n")
    print(f"  {'':28}" + "".join(f"{name:>10}" for name in columns))
    passed = True
    for name, spec in itertools.product(("sm90", "sm100", "sm120"), SPECS):
        arch = arches.get(name)
        config = config_of(spec, arch)
        with tempfile.TemporaryDirectory() as folder:
            kernel = compile_kernel(config.module, spec, config, arch, dump_dir=Path(folder))
        fine, facts = read(kernel)
        cells = "".join(f"{x!s:>10}" for x in (config.num_threads, config.cluster, *facts))
        print(f"  {spec.name:28}{arch.target:>10}{cells}{'' if fine else '  WRONG'}", flush=True)
        passed = passed and fine
    if cubin.nvdisasm() is None:
        print("\n  ?: not read, for want of nvdisasm (pip install nvidia-cuda-nvdisasm)")
    return passed


def read(kernel: Compiled) -> tuple[bool, tuple[int | str, ...]]:
    """Whether the code is as it should be; registers, spilled bytes, widths of loads and stores."""
    code = kernel.cubin or b""
    [usage] = cubin.resource_usage(code).values()
    if cubin.nvdisasm() is None:
        return usage.frame_bytes == 0, (usage.registers, usage.frame_bytes, "?", "?")
    facts = cubin.static_facts(code)
    fine = not facts.spills and 128 in facts.load_bits & facts.store_bits
    widths = ("/".join(map(str, sorted(bits))) for bits in (facts.load_bits, facts.store_bits))
    return fine, (usage.registers, usage.frame_bytes, *widths)


def load_seconds(arch: Arch) -> float:
    """Time to get a kernel in this process, the import of the DSL aside."""
    config = config_of(SPECS[0], arch)
    started = time.perf_counter()
    cache.load(config.module, SPECS[0], config, arch)
    return time.perf_counter() - started


def restart(arch: Arch) -> None:
    """Print how long two new processes take to get the same kernel."""
    seconds = []
    for _ in range(2):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            seconds.append(process.submit(load_seconds, arch).result())
    print(f"\nCompiled kernels are kept in {store.folder() or 'memory only'}")
    print(f"  {SPECS[0].name} for {arch.target}, in this order:")
    print(f"  {seconds[0]:.3f} s in one new process, {seconds[1]:.3f} s in another")


if __name__ == "__main__":
    sys.exit(0 if inspect() else 1)
