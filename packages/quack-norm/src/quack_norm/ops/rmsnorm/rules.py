"""Which configuration a forward kernel gets: by the rules of all maps of rows."""

from dataclasses import replace

from quack_core.arch import Arch
from quack_core.errors import UnsupportedError
from quack_norm.ops.row_map import rules

from .config import CentredFwdConfig, FwdConfig
from .spec import RMSNormFwdSpec


def default_fwd(spec: RMSNormFwdSpec, arch: Arch) -> FwdConfig:
    """The configuration for a spec on an architecture.

    Raises:
        UnsupportedError: no configuration fits the architecture.
    """
    best = replace(spec, align=16, weight_align=16, in_phase=True)
    config = rules.choose(CentredFwdConfig if spec.centred else FwdConfig, best, arch)
    if config is None:
        raise unsupported("forward", spec.n, arch)
    return config


def unsupported(direction: str, n: int, arch: Arch) -> UnsupportedError:
    """What to raise where no configuration fits."""
    return UnsupportedError(
        f"rmsnorm {direction}, n={n} on {arch.name}",
        f"a cluster of {arch.max_cluster} CTAs cannot hold such a row and its sums",
        "use shorter rows, or call it on the CPU",
    )


def candidates(spec: RMSNormFwdSpec, arch: Arch) -> list[FwdConfig]:
    """Configurations worth timing against the default, which comes first; all fit ``arch``."""
    kind = CentredFwdConfig if spec.centred else FwdConfig
    return list(dict.fromkeys([default_fwd(spec, arch), *rules.tries(kind, spec, arch)]))
