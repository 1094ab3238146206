"""Versions and requirements agree wherever they are written."""

import importlib
import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

OPERATORS = ("quack-blockscaled", "quack-gemm", "quack-norm")
PACKAGES = ("quack-core", *OPERATORS)


def project(root: Path, package: str) -> dict:
    return tomllib.loads((root / "packages" / package / "pyproject.toml").read_text())["project"]


def requirements(root: Path, package: str) -> dict[str, Requirement]:
    needs = [Requirement(text) for text in project(root, package)["dependencies"]]
    return {need.name: need for need in needs}


@pytest.mark.parametrize("package", PACKAGES)
def test_version_is_the_installed_one(package):
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is on the path but not installed")
    assert importlib.import_module(package.replace("-", "_")).__version__ == installed


@pytest.mark.parametrize("package", OPERATORS)
def test_operators_admit_this_core(root, package):
    import quack_core

    needed = requirements(root, package)["quack-core"]
    assert needed.specifier.contains(quack_core.__version__)
    assert not needed.specifier.contains("1.0")


def test_packages_agree_on_the_dsl_and_on_python(root):
    needs = [requirements(root, each).get("nvidia-cutlass-dsl") for each in PACKAGES]
    ranges = {str(need.specifier) for need in needs if need}  # of those that import it themselves
    assert len(ranges) == 1
    pythons = {project(root, each)["requires-python"] for each in PACKAGES}
    assert pythons == {">=3.11"}


def test_core_requires_no_torch(root):
    assert "torch" not in requirements(root, "quack-core")
    assert all("torch" in requirements(root, package) for package in OPERATORS)


def test_installed_dependencies_are_in_range(root):
    needs = [need for package in PACKAGES for need in requirements(root, package).values()]
    outside = []
    for need in needs:
        try:
            found = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not SpecifierSet(str(need.specifier)).contains(found, prereleases=True):
            outside.append(f"{need.name} {found}: needs {need.specifier}")
    assert outside == []


def test_every_package_is_in_the_tools_lists(root):
    folders = {path.parent.name for path in (root / "packages").glob("*/pyproject.toml")}
    config = tomllib.loads((root / "pyproject.toml").read_text())
    modules = {name.replace("-", "_") for name in folders}
    assert folders == set(PACKAGES)
    assert set(config["tool"]["uv"]["sources"]) == folders
    assert set(config["tool"]["mypy"]["packages"]) == modules
    assert set(config["tool"]["importlinter"]["root_packages"]) == modules
