"""Top-k as a problem: data, an exact check; and what it is compared with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quack_core import torch_op

from .norm import dtype_of, poison, size
from .peers import ALLOCATES, compiled_for_one_shape
from .rmsnorm import alignment
from .shapes import Case
from .timing import Launch
from .variant import Variant, Wrong


@dataclass(frozen=True)
class Buffers:
    x: Tensor  # (M, N)


def k_of(case: Case) -> int:
    return int(case.opt("k") or 1)


class TopK:
    """The k largest of each row of (M, N), largest first, and where they are."""

    flop = 0

    def __init__(self, case: Case, device: str = "cuda"):
        self.case, self.device = case, device
        self._data: Buffers | None = None
        rows = case.shape[0]
        itemsize = dtype_of(case).itemsize
        meta = torch.empty(case.shape, dtype=dtype_of(case), device="meta")
        self.read_bytes = size(meta)
        self.write_bytes = rows * k_of(case) * (itemsize + torch.int64.itemsize)
        self.set_bytes = self.read_bytes + self.write_bytes

    def make(self) -> Buffers:
        x = torch.empty(self.case.shape, dtype=dtype_of(self.case), device=self.device)
        return Buffers(x.normal_())

    def check(self, launch: Launch) -> float:
        if self._data is None:
            self._data = self.make()
        x, k = self._data.x, k_of(self.case)
        poison(x.new_empty(x.shape[0], k))
        values, indices = launch(self._data)
        wanted = torch.sort(x, dim=-1, descending=True, stable=True).values[:, :k]
        if values.shape != wanted.shape or not torch.equal(values, wanted):
            raise Wrong(f"values are not the {k} largest, in order")
        # libraries order equal values as they like, but no element counts twice
        places = indices.long()
        if bool((places.sort(-1).values.diff(dim=-1) <= 0).any()):
            raise Wrong("an index occurs twice in a row")
        if bool(((places < 0) | (places >= x.shape[1])).any()):
            raise Wrong(f"an index is outside of 0 to {x.shape[1] - 1}")
        if not torch.equal(x.gather(-1, places), values):
            raise Wrong("indices do not lead to the values")
        return 0.0


def problem(case: Case, device: str = "cuda") -> TopK:
    """The problem of a case."""
    return TopK(case, device)


# --- ours


def spec_of(case: Case) -> Any:
    """The spec that the public function makes for fresh contiguous operands."""
    from quack_norm.ops.topk.spec import TopKFwdSpec

    name = torch_op.dtype_name(dtype_of(case))
    return TopKFwdSpec(case.shape[1], k_of(case), name, align=alignment(case))


def default_config(case: Case) -> Any:
    """The configuration that the rule chooses here."""
    from quack_norm.ops.topk.config import default_fwd

    return default_fwd(spec_of(case))


def candidates(case: Case) -> list[Any]:
    """Configurations to compare it with: none."""
    return [default_config(case)]


def public(case: Case) -> Launch:
    """What a caller gets."""
    from quack_norm.ops.topk import api

    k = k_of(case)
    return lambda b: api.topk(b.x, k)


def explicit(case: Case, config: Any, run: Any, state: Tensor | None, groups: int) -> Launch:
    """A compiled kernel as a launch on buffers."""
    raise NotImplementedError("topk has no configurations to compare")


# --- peers


def _eager(case: Case) -> Launch:
    k = k_of(case)
    return lambda b: torch.topk(b.x, k)  # type: ignore[no-any-return]


def _compile(case: Case) -> Launch:
    k = k_of(case)
    compiled = compiled_for_one_shape(lambda x: torch.topk(x, k))
    return lambda b: compiled(b.x)  # type: ignore[no-any-return]


def _liger(case: Case) -> Launch:
    raise NotImplementedError("Liger has no top-k")


def _quack(case: Case) -> Launch:
    from quack.topk import topk_fwd

    k = k_of(case)
    return lambda b: topk_fwd(b.x, k)  # type: ignore[no-any-return]


def peers(case: Case) -> list[Variant]:
    """Torch eager, torch.compile, quack-kernels; a row says that Liger has none."""
    return [
        Variant("eager", _eager, "torch", note=ALLOCATES),
        Variant("compile", _compile, "torch", note=ALLOCATES),
        Variant("liger", _liger, "liger-kernel"),
        Variant("quack-kernels", _quack, "quack-kernels", note=f"int32 indices; {ALLOCATES}"),
    ]
