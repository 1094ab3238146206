"""Which files a kernel is made of, and that edits under a running process are noticed."""

import ast
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest

from quack_core.errors import StaleSourceError
from quack_core.jit import sources

FILES = {
    "__init__.py": "from .api import everything",
    "kernel.py": (
        "import json, quack_core.dtypes\n"
        "from . import near\n"
        "from .folder import VALUE\n"
        "from .near import *\n"
        "def late():\n"
        "    from .folder.deep import thing\n"
        "    import not_ours, quack_absent\n"
    ),
    "near.py": "from .chain import x",
    "chain.py": "from . import kernel",
    "folder/__init__.py": "from .reexported import VALUE",
    "folder/reexported.py": "VALUE = 1",
    "folder/deep.py": "from ..up import y\nfrom ..folder import deep",
    "up.py": "y = 2",
    "api.py": "everything = 0",
}
names = (f"quack_tree{i}" for i in itertools.count())


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package that imports in every way; its name."""
    name = next(names)
    for file, text in FILES.items():
        path = tmp_path / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (0, 0))  # written long before this process began
    monkeypatch.syspath_prepend(tmp_path)
    yield name, tmp_path / name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_follows_every_kind_of_import(tree):
    name, _ = tree
    found = sources.fingerprint([f"{name}.kernel"])
    inside = {module.removeprefix(name).lstrip(".") for module in found if module.startswith(name)}
    wanted = {"", "kernel", "near", "chain", "folder", "folder.reexported", "folder.deep", "up"}
    assert inside == wanted
    assert {"quack_core", "quack_core.dtypes", "quack_core.errors"} <= set(found)
    assert not {"json", "not_ours", "quack_absent"} & set(found)


def test_reads_without_importing(tree):
    name, _ = tree
    sources.fingerprint([f"{name}.kernel"])
    assert [module for module in sys.modules if module.startswith(name)] == []


@pytest.mark.parametrize("file", sorted(set(FILES) - {"api.py"}))
def test_edit_changes_the_fingerprint_KC_06(tree, file):
    name, folder = tree
    before = sources.fingerprint([f"{name}.kernel"])
    (folder / file).write_text(FILES[file] + "\n# edited\n")
    after = sources.fingerprint([f"{name}.kernel"])
    assert len([module for module in before if before[module] != after[module]]) == 1


def test_module_that_the_kernel_does_not_import_does_not_count(tree):
    name, folder = tree
    before = sources.fingerprint([f"{name}.kernel"])
    (folder / "api.py").write_text("everything = 1")
    assert sources.fingerprint([f"{name}.kernel"]) == before


def test_package_of_the_kernel_is_first_party(tmp_path, monkeypatch):
    (tmp_path / "users_own").mkdir()
    (tmp_path / "users_own" / "kernel.py").write_text("from .part import x")
    (tmp_path / "users_own" / "part.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    found = sources.fingerprint(["users_own.kernel"])
    assert set(found) == {"users_own.kernel", "users_own.part"}


def test_syntax_error_is_left_to_the_import(tree):
    name, folder = tree
    (folder / "near.py").write_text("def (")
    assert f"{name}.near" in sources.fingerprint([f"{name}.kernel"])


def test_missing_root():
    with pytest.raises(ModuleNotFoundError, match=r"quack_core\.nothing"):
        sources.fingerprint(["quack_core.nothing"])


def test_edit_after_the_first_key_KC_06(tree):
    name, folder = tree
    importlib.import_module(f"{name}.up")
    sources.fingerprint([f"{name}.up"])
    (folder / "up.py").write_text("y = 3")
    with pytest.raises(StaleSourceError, match=rf"{name}\.up.*Restart the process"):
        sources.fingerprint([f"{name}.up"])
    (folder / "up.py").write_text(FILES["up.py"])
    assert f"{name}.up" in sources.fingerprint([f"{name}.up"])


def test_edit_between_a_key_and_the_import_is_no_error(tmp_path, monkeypatch):
    """What was imported is the new text; further edits are noticed."""
    module, path = "users_edited.kernel", tmp_path / "users_edited" / "kernel.py"
    path.parent.mkdir()
    path.write_text("y = 2")
    monkeypatch.syspath_prepend(tmp_path)
    before = sources.fingerprint([module])
    path.write_text("y = 33")
    assert importlib.import_module(module).y == 33
    after = sources.fingerprint([module])
    assert after[module] != before[module]
    path.write_text("y = 4")
    with pytest.raises(StaleSourceError, match=module):
        sources.fingerprint([module])


def test_edit_before_a_key_and_the_import_is_no_error(tree):
    """Although the file is younger than the process."""
    name, folder = tree
    (folder / "up.py").write_text("y = 33")
    before = sources.fingerprint([f"{name}.up"])
    importlib.import_module(f"{name}.up")
    assert sources.fingerprint([f"{name}.up"]) == before


def test_edit_between_the_import_and_the_second_key_KC_06(tree):
    name, folder = tree
    before = sources.fingerprint([f"{name}.up"])
    importlib.import_module(f"{name}.up")
    sources.imported(before)
    (folder / "up.py").write_text("y = 3")
    for _ in range(2):
        with pytest.raises(StaleSourceError, match=rf"{name}\.up"):
            sources.fingerprint([f"{name}.up"])
    (folder / "up.py").write_text(FILES["up.py"])
    assert sources.fingerprint([f"{name}.up"]) == before


def test_edit_before_the_first_key_KC_06(tree):
    name, folder = tree
    importlib.import_module(f"{name}.up")
    (folder / "up.py").write_text("y = 3")
    with pytest.raises(StaleSourceError, match=rf"{name}\.up"):
        sources.fingerprint([f"{name}.up"])


def test_file_from_the_future_is_no_edit(tree):
    """A clock that was set back, or the clock of a file server."""
    name, folder = tree
    importlib.import_module(f"{name}.up")
    os.utime(folder / "up.py", (time.time() + 3600,) * 2)
    assert f"{name}.up" in sources.fingerprint([f"{name}.up"])


def test_removed_package_KC_06(tree):
    name, folder = tree
    importlib.import_module(f"{name}.up")
    (folder / "up.py").unlink()
    with pytest.raises(StaleSourceError, match="gone"):
        sources.fingerprint([f"{name}.up"])


def test_edit_of_a_module_that_is_not_loaded_is_no_error(tree):
    name, folder = tree
    before = sources.fingerprint([f"{name}.up"])
    (folder / "up.py").write_text("y = 3")
    assert sources.fingerprint([f"{name}.up"]) != before


def parsed(text):
    """The same as the pattern finds, by Python's own parser."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = ("" if alias.name == "*" else alias.name for alias in node.names)
            found |= {(node.level, node.module or "", name) for name in names}
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import a, b.c as d ,e",
        "import a; import b",
        "if x: import a",
        "try: from a import b\nexcept ImportError: pass",
        "from a import (b, c as d,\n  e)",
        "from a import (  # the first (one\n  b,  # comment, with: import q)\n  c)",
        "from .a import b",
        "from.import b",
        "from ... import(a)",
        "from . a . b import c",
        "from a import \\\n  b, \\\n  c",
        "from a import \\\r\n  b\r\nimport c\r\n",
        "import \\\n a",
        "from a import *",
        "def f():\n\timport a\n\tfrom .b import c",
        "x = '#'; import a",
        'def f():\n    """Words before an import\n    """\n    from a import b',
        "'''import (see\n'''\nfrom a import b\nx = ')'",
        "raise E from e; from a import b",
        "async def f():\n    yield a\n    from b import c",
        "import größe",
    ],
)
def test_no_import_statement_is_missed(text):
    wanted = parsed(text)
    assert wanted
    assert wanted <= sources._imports(text.encode())


def test_no_import_statement_of_real_packages_is_missed():
    import quack_core

    folders = [Path(package.__file__).parent for package in (importlib, json, pytest, quack_core)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    missed = {file: parsed(text) - sources._imports(text) for file in files if (text := read(file))}
    assert len(missed) > 60
    assert {file: names for file, names in missed.items() if names} == {}


def read(file):
    text = file.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError:  # a test of the parser itself
        return b""
    return text
