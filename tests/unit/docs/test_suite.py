"""The rules of the tests: names that fit a line of output, folders that mirror the packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "tests/unit"
MAX_NAME = 60
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
#: Folders of unit tests that are for a folder of the repository, not for a package.
BESIDE = {Path("docs")}


def too_long(source: str) -> list[str]:
    # Parsing all tests takes 2 s.
    names = re.findall(r"^[ \t]*(?:async[ \t]+)?def[ \t]+(test\w*)", source, re.MULTILINE)
    return [name for name in names if len(name) > MAX_NAME]


def test_names_of_tests_are_short() -> None:
    assert [name for file in FILES for name in too_long(file.read_text(encoding="utf-8"))] == []


def test_a_long_name_is_found_in_classes_too() -> None:
    fits, long = "test_".ljust(MAX_NAME, "x"), "test_".ljust(MAX_NAME + 1, "x")
    source = f"class TestIt:\n    def {long}(self): ...\n    def {fits}(self): ...\n"
    assert too_long(source) == [long]
    assert too_long(f"async def {long}(): ...\n") == [long]


def test_folders_of_unit_tests_mirror_the_packages() -> None:
    folders = {file.relative_to(UNIT).parent for file in FILES if file.is_relative_to(UNIT)}
    packages = {file.relative_to(ROOT / "r2ccl").parent for file in ROOT.glob("r2ccl/**/*.py")}
    assert folders - packages == BESIDE


@pytest.mark.parametrize("folder", ["unit", "contract"])
def test_a_slow_case_of_a_unit_or_contract_test_has_a_quick_one(folder: str) -> None:
    """Whole tests, and files, are marked elsewhere only."""
    for file in FILES:
        if file.is_relative_to(ROOT / "tests" / folder):
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            assert "@pytest.mark.slow" not in lines, file
            assert "pytestmark = pytest.mark.slow" not in lines, file
