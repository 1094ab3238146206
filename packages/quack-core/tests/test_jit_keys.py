"""The key of a compiled kernel: everything counts, and only plain values get in."""

import dataclasses
import enum
import itertools
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quack_core import arch
from quack_core.errors import StaleSourceError
from quack_core.jit import keys, sources, versions
from quack_core.jit.options import Options
from quack_core.reduction.tiling import RowTiling

MODULE = "quack_core.jit.compile"  # any module with sources will do: keys import nothing
SM90 = arch.get("sm90")


@dataclasses.dataclass(frozen=True)
class Spec:
    n: object
    dtype: object = "float32"
    ops: object = ()


@dataclasses.dataclass(frozen=True)
class Config:
    threads: int = 128


BASE = {
    "module": MODULE,
    "spec": Spec(64),
    "config": Config(),
    "arch": SM90,
    "options": Options(),
}
BASE_DIGEST = keys.key(**BASE).digest


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("module", "quack_core.jit.dsl"),
        ("spec", Spec(65)),
        ("spec", Spec(64, "bfloat16")),
        ("spec", Spec(64, ops=(1,))),
        ("spec", Config()),
        ("config", Config(256)),
        ("config", None),
        ("arch", SM90._replace(target="sm_90")),
        ("arch", SM90._replace(name="sm91")),
        ("arch", arch.get("sm100")),
        ("options", Options(opt_level=2)),
        ("options", Options(line_info=True)),
    ],
)
def test_every_argument_changes_the_key_KC_11(argument, value):
    assert keys.key(**BASE | {argument: value}).digest != BASE_DIGEST
    assert keys.key(**BASE).digest == BASE_DIGEST


def test_every_option_changes_the_key_KC_11():
    """A new field of Options must not be left out; no two of these texts are equal either."""
    flipped = [Options(**{name: not value}) for name, value in Options()._asdict().items()]
    texts = {option.text("sm_90a") for option in [Options(), *flipped]}
    digests = {keys.key(**BASE | {"options": option}).digest for option in [Options(), *flipped]}
    assert len(texts) == len(digests) == len(Options._fields) + 1


@pytest.mark.parametrize("function", ["dsl", "flavour", "tvm_ffi", "python", "host"])
def test_every_version_changes_the_key_KC_11(function, monkeypatch):
    monkeypatch.setattr(versions, function, lambda: "another")
    assert keys.key(**BASE).digest != BASE_DIGEST


def test_variables_of_the_dsl_change_the_key_KC_11(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert keys.key(**BASE).digest != BASE_DIGEST
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")  # the target is always given
    assert keys.key(**BASE).digest == BASE_DIGEST


def test_sources_change_the_key_KC_11(monkeypatch):
    real = sources.fingerprint
    monkeypatch.setattr(sources, "fingerprint", lambda roots: real(roots) | {"quack_core.arch": ""})
    assert keys.key(**BASE).digest != BASE_DIGEST


def test_module_that_defines_a_field_is_a_root():
    """The code of an operation that a spec carries belongs to the kernel."""
    owner = "quack_core.reduction.tiling"
    assert owner in keys.roots(MODULE, Spec(64, ops=(RowTiling(64, 1, 32),)), Config())


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | inner.map(Spec),
    max_leaves=6,
)


def exact(value):
    """A form of a value that equals another only if kind, value and NaN-ness agree."""
    if isinstance(value, tuple):
        return ("tuple", *map(exact, value))
    if isinstance(value, Spec):
        return ("Spec", exact(value.n))
    return (type(value).__name__, repr(value))


@given(plain_values, plain_values)
def test_different_values_have_different_forms_KC_11(first, second):
    forms = [json.dumps(keys.plain(value, "spec")) for value in (first, second)]
    assert (forms[0] == forms[1]) == (exact(first) == exact(second))


def test_one_and_true_and_one_point_zero_differ_KC_11():
    values = (1, True, 1.0, "1", None, (), (1,), 0.0, -0.0, math.nan, math.inf)
    digests = [keys.key(**BASE | {"spec": Spec(value)}).digest for value in values]
    assert len(set(digests)) == len(values)


class Mode(enum.IntEnum):
    FAST = 1


class Kind(enum.StrEnum):
    ROW = "row"


def test_a_named_text_is_its_text_KC_11():
    """They are equal and hash alike: a spec with one finds the kernel of the other."""
    assert Spec(Kind.ROW) == Spec("row")
    digests = {keys.key(**BASE | {"spec": Spec(kind)}).digest for kind in (Kind.ROW, "row")}
    assert len(digests) == 1


@dataclasses.dataclass
class Mutable:
    n: int = 1


def numpy_int():
    return pytest.importorskip("numpy").int64(64)


def zero_dim_tensor():
    return pytest.importorskip("torch").tensor(64)


def symbolic_int():
    return pytest.importorskip("torch").SymInt(None)


@pytest.mark.parametrize(
    "make",
    [numpy_int, zero_dim_tensor, symbolic_int, lambda: [1], lambda: Mode.FAST, Mutable, dict],
    ids=["numpy", "tensor", "SymInt", "list", "enum", "mutable", "dict"],
)
def test_only_plain_values_KC_07(make):
    with pytest.raises(TypeError, match=r"^spec\.ops\[1\]\.n is a "):
        keys.key(**BASE | {"spec": Spec(64, ops=(1, Spec(make())))})


def test_equal_sizes_make_one_key_KC_07():
    digests = {
        keys.key(**BASE | {"spec": Spec(int(size))}).digest for size in itertools.repeat(64, 50)
    }
    assert digests == {BASE_DIGEST}


def test_key_loads_no_cutlass():
    code = f"""
import sys
from quack_core import arch
from quack_core.jit import cache
cache.key({MODULE!r}, None, None, arch.get("sm90"))
heavy = {{"cutlass", "torch", "tvm_ffi", "cuda"}} & set(sys.modules)
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_key_of_a_stale_module_KC_06(tmp_path, monkeypatch):
    path = tmp_path / "quack_stale.py"
    path.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    keys.key(**BASE | {"module": "quack_stale"})
    monkeypatch.setitem(sys.modules, "quack_stale", __import__("quack_stale"))
    path.write_text("x = 2")
    with pytest.raises(StaleSourceError, match="quack_stale"):
        keys.key(**BASE | {"module": "quack_stale"})


@pytest.mark.parametrize(
    ("installed", "driver", "expected"),
    [
        (("12", "13"), None, "cu13 4.8"),
        (("12", "13"), 13, "cu13 4.8"),
        (("12", "13"), 12, "cu12 4.8"),
        (("12",), 13, "cu12 4.8"),
        (("13",), 12, "none"),
        ((), None, "none"),
    ],
)
def test_flavour(installed, driver, expected, monkeypatch):
    packages = {f"nvidia-cutlass-dsl-libs-cu{major}" for major in installed}
    monkeypatch.setattr(versions, "_installed", lambda name: "4.8" if name in packages else None)
    monkeypatch.setattr(versions, "driver_major", lambda: driver)
    versions.flavour.cache_clear()
    assert versions.flavour() == expected
    versions.flavour.cache_clear()


def test_flavour_is_the_one_that_the_dsl_chooses():
    cutlass = pytest.importorskip("cutlass")
    assert versions.flavour().startswith(f"cu{cutlass.CUDA_VERSION.major} ")
