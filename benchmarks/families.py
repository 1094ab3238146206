"""Problems and peers of a case, by the family of operators it belongs to."""

from . import norm, peers, softmax
from .shapes import Case
from .variant import Problem, Variant


def is_softmax(case: Case) -> bool:
    return case.op.startswith("softmax")


def problem(case: Case, device: str = "cuda") -> Problem:
    """The problem of a case."""
    return softmax.Softmax(case, device) if is_softmax(case) else norm.problem(case, device)


def peers_of(case: Case) -> list[Variant]:
    """What ours is compared with."""
    return softmax.peers(case) if is_softmax(case) else peers.variants(case)
