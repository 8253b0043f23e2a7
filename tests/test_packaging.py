"""The wheel holds exactly the four folders as sparseloco.<folder>, and no other top-level name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("node", "protocol", "compression", "bootstrap")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the sources, so that nothing is written into the checkout."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("copy")
    for folder in (*FOLDERS, "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
               "--wheel-dir", str(copy / "out"), str(copy)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (copy / "out").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_module_of_the_four_folders_and_nothing_else(wheel_names: set[str]):
    expected = {"sparseloco/__init__.py", "sparseloco/py.typed"}
    for folder in FOLDERS:
        expected |= {f"sparseloco/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    assert {name for name in wheel_names if ".dist-info/" not in name} == expected


def test_wheel_has_the_command_and_the_licence(wheel_names: set[str]):
    metadata = {name.split(".dist-info/")[1] for name in wheel_names if ".dist-info/" in name}
    assert {"entry_points.txt", "licenses/LICENSE"} <= metadata


def test_checkout_links_the_folders_for_editable_installs():
    for folder in FOLDERS:
        link = ROOT / "src" / "sparseloco" / folder
        assert link.is_symlink() and link.readlink() == Path("..", "..", folder)
