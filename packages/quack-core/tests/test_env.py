import re
from pathlib import Path

import pytest

from quack_core import env
from quack_core.env import VARIABLES, Variable

ROOT = Path(__file__).parents[3]


def test_a_variable_is_read_at_the_time_of_the_call(monkeypatch):
    monkeypatch.delenv("QUACK_ARCH", raising=False)
    assert env.get("QUACK_ARCH") is None
    monkeypatch.setenv("QUACK_ARCH", "sm100")
    assert env.get("QUACK_ARCH") == "sm100"
    monkeypatch.setenv("QUACK_ARCH", "sm120")
    assert env.get("QUACK_ARCH") == "sm120"


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("state", ["unset", "empty"])
def test_unset_and_empty_give_the_default(variable, state, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    if state == "empty":
        monkeypatch.setenv(variable.name, "")
    value = env.get(variable.name)
    assert value == variable.default
    assert value is None or type(value) is variable.type


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("False", False)],
)
def test_booleans(text, value, monkeypatch):
    monkeypatch.setenv("QUACK_REQUIRE_GPU", text)
    assert env.get("QUACK_REQUIRE_GPU") is value


def test_a_bad_boolean_names_the_variable_and_the_text(monkeypatch):
    monkeypatch.setenv("QUACK_REQUIRE_GPU", "maybe")
    with pytest.raises(ValueError, match="QUACK_REQUIRE_GPU='maybe': expected 1 or 0"):
        env.get("QUACK_REQUIRE_GPU")


def test_whole_numbers():
    variable = Variable("QUACK_N", int, 3, "A count.")
    assert (variable.parse(""), variable.parse("12")) == (3, 12)
    with pytest.raises(ValueError, match="QUACK_N='1.5': expected a whole number"):
        variable.parse("1.5")


def test_an_unknown_name_raises():
    with pytest.raises(KeyError, match="QUACK_ARHC"):
        env.get("QUACK_ARHC")


def test_names_have_the_prefix_and_meanings_are_one_sentence():
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)
    for variable in VARIABLES:
        assert variable.name.startswith("QUACK_")
        assert variable.meaning[0].isupper() or variable.meaning[0] == "`"
        assert variable.meaning.endswith(".")
        assert ". " not in variable.meaning


def test_the_table_has_one_row_per_variable():
    lines = env.table().splitlines()
    assert lines[:2] == ["| Variable | Type | Default | Meaning |", "|---|---|---|---|"]
    names = [line.split("|")[1].strip().strip("`") for line in lines[2:]]
    assert names == sorted(variable.name for variable in VARIABLES)
    row = next(line for line in lines if "QUACK_REQUIRE_GPU" in line)
    assert row.startswith("| `QUACK_REQUIRE_GPU` | bool | `0` | ")


def test_the_table_says_when_the_architecture_counts():
    row = next(line for line in env.table().splitlines() if "QUACK_ARCH`" in line)
    assert "at the first call of a kind" in row


def test_every_variable_is_read_somewhere_and_every_one_read_is_listed():
    if not (ROOT / "noxfile.py").exists():
        pytest.skip("needs the whole repository")
    # Sources are those of the repository, even if the tests run against an installed wheel.
    sources = [ROOT / "noxfile.py", *ROOT.glob("packages/*/src/**/*.py")]
    sources += ROOT.glob("tests/compile/*.py")
    sources.remove(ROOT / "packages" / "quack-core" / "src" / "quack_core" / "env.py")
    used = set()
    for source in sources:
        used |= set(re.findall(r"QUACK_[A-Z_]*[A-Z]", source.read_text(encoding="utf-8")))
    assert used == {variable.name for variable in VARIABLES}


def test_the_reference_page_holds_the_table():
    page = ROOT / "docs" / "reference" / "environment.md"
    if not page.exists() and not (ROOT / "noxfile.py").exists():
        pytest.skip("the documentation is not part of an installed package")
    assert env.table() in page.read_text(encoding="utf-8")
