"""What a GEMM kernel computes: a frozen record that names every property the code depends on."""

import functools
from dataclasses import dataclass, replace
from typing import Literal

from quack_core import dtypes
from quack_core.gemm import epilogue as epi
from quack_core.gemm.epilogue import AddC, Kind, Op, Scale, Vector

Major = Literal["row", "column"]
"""Which dimension of a matrix has stride 1: the second or the first, of the last two."""


@dataclass(frozen=True)
class GemmSpec:
    """``D = epilogue(A B)``: A of shape (M, K) or (L, M, K), B of (K, N) or (L, K, N).

    Sizes and strides are free. Dtypes are torch's names.

    Args:
        a, b, d: dtypes.
        a_major, b_major, d_major: memory orders, of the shapes above.
        a_batched, b_batched: has a dimension L; without one, all matrices of a batch share it.
        epilogue: ops, in order.
        concat: where there are pairs, gate columns come first, then those of up; else they alternate.
    """

    a: str
    b: str
    d: str
    a_major: Major = "row"
    b_major: Major = "column"
    d_major: Major = "row"
    a_batched: bool = False
    b_batched: bool = False
    epilogue: tuple[Op, ...] = ()
    concat: bool = False

    def __post_init__(self) -> None:
        widths = {dtypes.width(self.a), dtypes.width(self.b)}
        if widths != {8} and not (widths == {16} and self.a == self.b):
            raise ValueError(
                f"a is {self.a}, b is {self.b}: both must have 8 bits, or be the same of 16 bits"
            )
        if dtypes.width(self.a) == 8 and (self.a_major, self.b_major) != ("row", "column"):
            raise ValueError("8-bit operands: a must be row-major, b column-major")
        epi.halves(self.epilogue)
        epi.mirrors(self.epilogue)
        if self.concat and not (self.gated or self.doubled):
            raise ValueError("concat needs an epilogue that takes or gives pairs")
        if self.gated and self.b_major != "column":
            raise ValueError("an epilogue that takes pairs: b must be column-major")
        if (self.gated or self.doubled) and self.d_major != "row":
            raise ValueError("an epilogue with pairs: D must be row-major")
        if self.reductions and (self.gated or self.doubled):
            raise ValueError("an epilogue with pairs reduces nothing")
        behind = False
        for op in self.epilogue:
            kinds = [operand.kind for operand in op.operands]
            for one in op.operands:
                if one.batched and (one.kind == Kind.DEVICE_SCALAR or not self.batched):
                    raise ValueError(
                        f"{one.name} of {type(op).__name__} has a batch: scalars have none, nor have "
                        "other operands where A and B have none"
                    )
            if self.gated and (Kind.TILE in kinds or (behind and Kind.ROW in kinds)):
                raise ValueError(
                    f"{type(op).__name__}: beside an op that takes pairs there are no operands of D's "
                    "shape, and behind it no row operands"
                )
            behind = behind or op.pairs

    @property
    def batched(self) -> bool:
        """Whether D has a dimension L."""
        return self.a_batched or self.b_batched

    @property
    def gated(self) -> bool:
        """Whether D has half as many columns as B."""
        return epi.halves(self.epilogue)

    @property
    def symmetric(self) -> bool:
        """Whether D is stored twice, also with rows and columns exchanged, and half of it computed."""
        return epi.mirrors(self.epilogue)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Dtypes of what is stored: D, then copies."""
        return (self.d, *(op.aux for op in self.epilogue if op.aux))

    @property
    def doubled(self) -> bool:
        """Whether D has twice as many columns as B."""
        return epi.doubles(self.epilogue)

    def cols(self, which: int, product: int) -> int:
        """Columns of output number ``which``, of so many of the product."""
        numerator, denominator = self.ratios[which]
        return product * numerator // denominator

    @property
    def ratios(self) -> tuple[tuple[int, int], ...]:
        """Columns of each output, as a share of the product's."""
        found, ratio = [], (1, 1)
        for op in self.epilogue:
            ratio = (1, 2) if op.pairs else (2, 1) if op.splits else ratio
            if op.aux:
                found.append(ratio)
        return (ratio, *found)

    @property
    def paired(self) -> tuple[bool, ...]:
        """Which outputs have gates and what they gate in turn."""
        return tuple(ratio == (2, 1) or (self.gated and ratio == (1, 1)) for ratio in self.ratios)

    @property
    def reductions(self) -> tuple[Vector, ...]:
        """What ops reduce, in order."""
        return tuple(op.reduces for op in self.epilogue if op.reduces)

    @property
    def sinks(self) -> tuple[tuple[int, str], ...]:
        """What is stored: number of an output, and which of its columns (``store.Form``)."""
        found: list[tuple[int, str]] = []
        for i, paired in enumerate(self.paired):
            forms = ("gates", "ups") if self.concat else ("pairs",)
            found += [(i, form) for form in (forms if paired else ("plain",))]
        if self.symmetric:
            found.append((0, "mirror"))
        return tuple(found)

    @functools.cached_property
    def sums(self) -> "GemmSpec":
        """The product alone, in float32."""
        return replace(self, d="float32", epilogue=(), concat=False)

    @functools.cached_property
    def into_c(self) -> "GemmSpec":
        """The same where D holds ``beta c`` before, and the product is added to it."""
        last = self.epilogue[-1:]
        return replace(self, epilogue=self.epilogue[:-1]) if _adds_c(last) else self

    def check_linear(self, config: str) -> None:
        """Raise unless parts of the product can be added to D one by one.

        Args:
            config: what wants to, for the message.

        Raises:
            ValueError: names what was found and is needed.
        """
        way_out = "; with split_mode=separate there are no such limits"
        if self.d != "float32":
            raise ValueError(f"{config}: D is {self.d}, parts are added to float32 only{way_out}")
        others = [type(op).__name__ for op in self.into_c.epilogue if not isinstance(op, Scale)]
        if others:
            raise ValueError(
                f"{config}: the epilogue holds {others[0]}; of parts that are added one by one it is any "
                f"number of Scale, then at most one AddC{way_out}"
            )

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        ops = "".join("_" + type(op).__name__.lower() for op in self.epilogue)
        majors = "".join(m[0] for m in (self.a_major, self.b_major, self.d_major))
        other = "" if self.a == self.b else f"_{dtypes.short(self.b)}"
        batch = "_batched" if self.batched else ""
        concat = "_concat" if self.concat else ""
        kinds = f"{dtypes.short(self.a)}{other}_{dtypes.short(self.d)}_{majors}"
        return f"gemm_{kinds}{batch}{ops}{concat}"


def _adds_c(ops: tuple[Op, ...]) -> bool:
    return any(isinstance(op, AddC) for op in ops)


@dataclass(frozen=True)
class SumSpec:
    """``D = epilogue(sum of parts)``, where parts of a product's K lie in memory.

    Args:
        product: what is computed of A and B; what they are does not matter here.
    """

    product: GemmSpec

    @property
    def name(self) -> str:
        """Kernel name, as profilers show it."""
        return f"sum_of_parts_{self.product.name}"
