"""What tracked files may not contain, and what Python files may not read."""

import ast
import re
from pathlib import Path

import pytest

from quack_core import env

# Spelled so that this file does not match itself.
FORBIDDEN = {
    "a package index": r"index[-]url|tool\.uv[.]index|pypi[.]org|python[h]osted|UV_[I]NDEX",
    "a path of somebody's machine": r"/(?:wo[r]k|fa[r]m|ro[o]t|ho[m]e/\w+)/",
    "a marker of a conflict": r"^(?:<{7}|>{7}) ",
    "a key": r"-----BEGI[N] [A-Z ]*PRIVATE KEY-----",
}
LARGEST = 1 << 20  # bytes; wheels, cubins and traces do not belong in a repository


def text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(root, files, what):
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = [
        f"{path.relative_to(root)}: {match[0]}"
        for path in files
        for match in pattern.finditer(text(path))
    ]
    assert found == []


def test_the_lock_names_no_host(root):
    assert re.findall(r"https?://\S+", (root / "uv.lock").read_text()) == []


def test_files_are_small(root, files):
    large = {str(path.relative_to(root)) for path in files if path.stat().st_size > LARGEST}
    assert large == set()


def test_text_files_end_with_one_newline(root, files):
    wrong = []
    for path in files:
        content = text(path)
        if content and (not content.endswith("\n") or content.endswith("\n\n")):
            wrong.append(str(path.relative_to(root)))
    assert wrong == []


def test_every_variable_read_is_in_the_table(root, files):
    """Each QUACK_ name in code is declared, whoever reads it."""
    declared = {variable.name for variable in env.VARIABLES}
    unknown = []
    for path in files:
        if path.suffix != ".py" or "tests" in path.relative_to(root).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = str(node.value) if isinstance(node, ast.Constant) else ""
            if re.fullmatch("QUACK_[A-Z_]+", name) and name not in declared:
                unknown.append(f"{path.relative_to(root)}:{node.lineno}: {name}")
    assert unknown == []


def test_only_the_table_reads_our_variables(root):
    """In the packages, QUACK_ variables are read through quack_core.env."""
    readers = {"environ", "getenv"}
    found = []
    for path in (root / "packages").glob("*/src/**/*.py"):
        if path.name == "env.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = isinstance(node, ast.Call | ast.Subscript) and ast.unparse(node)
            if call and any(reader in call for reader in readers) and "QUACK_" in call:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {call}")
    assert found == []
