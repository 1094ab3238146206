"""Families of operators: a module each, with the functions that `Family` names."""

from typing import Any, Protocol, cast

from torch import Tensor

from . import cross_entropy, gemm, layernorm, matmul, quantize, rmsnorm, softmax, topk
from .shapes import Case
from .timing import Launch
from .variant import Problem, Variant


class Family(Protocol):
    """What the module of a family offers."""

    def problem(self, case: Case, device: str = "cuda") -> Problem:
        """Data and checks."""
        ...

    def peers(self, case: Case) -> list[Variant]:
        """What ours is compared with."""
        ...

    def spec_of(self, case: Case) -> Any:
        """The spec that the public function makes for fresh contiguous operands."""
        ...

    def default_config(self, case: Case) -> Any:
        """The configuration that the rule chooses here."""
        ...

    def candidates(self, case: Case) -> list[Any]:
        """Configurations to compare it with."""
        ...

    def public(self, case: Case) -> Launch:
        """What a caller gets."""
        ...

    def explicit(
        self, case: Case, config: Any, run: Any, state: Tensor | None, groups: int
    ) -> Launch:
        """A compiled kernel as a launch on buffers."""
        ...


FAMILIES = {
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "softmax": softmax,
    "cross_entropy": cross_entropy,
    "topk": topk,
    "gemm": gemm,
    "quantize": quantize,
    "matmul": matmul,
}


def name_of(case: Case) -> str:
    """The name of a case's family, from its ``op``."""
    return case.op.rpartition("_")[0]


def of(case: Case) -> Family:
    """The family of a case."""
    return cast(Family, FAMILIES[name_of(case)])


def problem(case: Case, device: str = "cuda") -> Problem:
    """The problem of a case."""
    return of(case).problem(case, device)


def peers_of(case: Case) -> list[Variant]:
    """What ours is compared with."""
    return of(case).peers(case)
