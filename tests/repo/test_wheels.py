"""Wheels hold their own import package and nothing else, and ask for released versions only."""

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("quack-blockscaled", "quack-core", "quack-gemm", "quack-norm")


@pytest.fixture(scope="module")
def wheels(root, tmp_path_factory) -> dict[str, Path]:
    pytest.importorskip("hatchling", reason="hatchling builds the wheels")
    built = {}
    for package in PACKAGES:
        output = tmp_path_factory.mktemp(package)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)]
        folder = root / "packages" / package
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        [built[package]] = output.glob("*.whl")
    return built


def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("package", PACKAGES)
def test_kp_07_wheel_ships_its_own_package_only(wheels, root, package):
    module = package.replace("-", "_")
    tops = {name.partition("/")[0] for name in names(wheels[package])}
    assert tops == {module, f"{module}-{wheels[package].name.split('-')[1]}.dist-info"}
    source = root / "packages" / package / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert {name for name in names(wheels[package]) if name.endswith(".py")} == wanted


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_is_typed_and_licensed(wheels, root, package):
    module = package.replace("-", "_")
    archive = zipfile.ZipFile(wheels[package])
    assert f"{module}/py.typed" in archive.namelist()
    [licence] = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert archive.read(licence) == (root / "LICENSE").read_bytes()


def test_wheels_share_no_path(wheels):
    found = [name for package in PACKAGES for name in names(wheels[package])]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("package", PACKAGES)
def test_kp_08_metadata_asks_for_released_versions(wheels, package):
    archive = zipfile.ZipFile(wheels[package])
    [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(path))
    assert metadata["Name"] == package
    assert metadata["License-Expression"] == "Apache-2.0"
    assert [need for need in metadata.get_all("Requires-Dist") if "@" in need] == []
