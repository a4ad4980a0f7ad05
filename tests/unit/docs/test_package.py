"""The package: what wheel and sdist contain, and that one file has the version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import r2ccl

ROOT = Path(__file__).parents[3]
for needed in ("hatchling", "hatch_fancy_pypi_readme"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install --group test")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "hatchling", "build", "-d", str(folder))
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(build, cwd=ROOT, env=env, check=True, capture_output=True, timeout=60)
    return folder


def test_the_wheel_has_the_modules_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if name.startswith("r2ccl/")}
    here = {str(file.relative_to(ROOT)) for file in (ROOT / "r2ccl").rglob("*.py")}
    assert {name for name in code if name.endswith(".py")} == here
    kernels = "r2ccl/kernels/cuda/prebuilt.zip"
    assert {"r2ccl/py.typed", kernels, "r2ccl_pytest.py"} <= names
    info = f"r2ccl-{r2ccl.__version__}.dist-info/"
    rest = {name.removeprefix(info) for name in names - code - {"r2ccl_pytest.py"}}
    assert rest == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def test_the_description_has_no_link_to_a_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    name = f"r2ccl-{r2ccl.__version__}.dist-info/METADATA"
    with zipfile.ZipFile(wheel).open(name) as file:
        _, _, description = file.read().decode().partition("\n\n")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?://)", readme) != []
    assert re.findall(r"\]\((?!https?://)", description) == []
    assert description.count("```") == readme.count("```")


def test_the_sdist_has_what_tests_and_documentation_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    top = f"r2ccl-{r2ccl.__version__}/"
    with tarfile.open(sdist) as opened:
        names = {name.removeprefix(top) for name in opened.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"} <= names
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert {"r2ccl", "tests", "docs", "bench", "examples"} <= folders
    assert folders <= {"r2ccl", "tests", "docs", "bench", "deploy", "examples", ".ci"}
    assert not [name for name in names if name.endswith((".pyc", ".so"))]
