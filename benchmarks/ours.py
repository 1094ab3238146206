"""Our own variants: the public functions with their default configuration, and explicit ones."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quack_core import arch, occupancy
from quack_core.jit import cache

from . import families
from .shapes import Case
from .timing import Launch
from .variant import Failure, Variant, attempt

PACKAGES = {
    "gemm": "quack-gemm",
    "quantize": "quack-blockscaled",
    "matmul": "quack-blockscaled",
}
PACKAGE = "quack-norm"
"""Of all other families."""


def package(case: Case) -> str:
    """The distribution that a case's function belongs to."""
    return PACKAGES.get(families.name_of(case), PACKAGE)


def default_config(case: Case) -> Any:
    """The configuration that the rule chooses here."""
    return families.of(case).default_config(case)


def with_config(chosen: Any, case: Case) -> Launch:
    """The compiled kernel itself with an explicit configuration; scratch is allocated once."""
    family = families.of(case)
    if not hasattr(chosen, "module"):  # the public function takes configurations
        return family.explicit(case, chosen, None, None, 0)
    spec = family.spec_of(case)
    target, device = arch.detect(), torch.cuda.current_device()
    run = cache.load(chosen.module, spec, chosen, target)
    groups = 0
    if chosen.persistent:
        smem_bytes = chosen.smem_bytes(spec)
        args = (device, chosen.cluster, chosen.num_threads, smem_bytes)
        resident = occupancy.resident_clusters(*args)
        if resident == 0:
            raise ValueError(f"{chosen} does not fit on an SM: {smem_bytes} bytes of shared memory")
        groups = chosen.groups(spec, case.shape[0], 1, resident)
    state = None
    if chosen.state_ints:
        state = torch.zeros(chosen.state_ints, dtype=torch.int32, device="cuda")
    return family.explicit(case, chosen, run, state, groups)


def variants(case: Case) -> list[Variant]:
    """The public function, as it is."""
    found = attempt(lambda: str(default_config(case)))  # a failure shows again when the row runs
    text = found.note if isinstance(found, Failure) else found
    return [Variant("ours", families.of(case).public, package(case), role="ours", config=text)]


def config_variants(
    case: Case,
    tries: Sequence[Mapping[str, object]] = (),
    wanted: Sequence[str] = (),
    limit: int = 0,
) -> list[Variant]:
    """The default configuration, and those to compare it with.

    Args:
        case: what to compute.
        tries: fields to change in the default; without any, the candidates of the operator.
        wanted: keep only configurations whose text has all of these, such as ``"cluster=4"``.
        limit: at most so many; 0 is all.
    """
    default = default_config(case)
    if tries:
        found = [made for fields in tries if (made := _changed(default, fields)) is not None]
    else:
        found = families.of(case).candidates(case)
    kept = [c for c in dict.fromkeys(found) if all(piece in str(c) for piece in wanted)]
    chosen = list(dict.fromkeys([default, *kept]))[: limit or None]
    return [
        Variant(
            short(c) + (" (default)" if c == default else ""),
            functools.partial(with_config, c),
            package(case),
            role="config",
            config=str(c),
        )
        for c in chosen
    ]


def _changed(default: Any, fields: Mapping[str, object]) -> Any:
    """The default with other values, or None where the configuration itself refuses them."""
    made = attempt(lambda: dataclasses.replace(default, **fields))
    if isinstance(made, Failure):
        print(f"{dict(fields)}: {made.note}", flush=True)
        return None
    return made


def short(chosen: Any) -> str:
    """A configuration in few characters: the class name left away."""
    return str(chosen).partition("(")[2].removesuffix(")").replace(", ", " ")
