"""The site has every page and every public name, and its links hold; no MkDocs is needed."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support import browser
from support.pages import DOCS, ROOT, all_blocks, text_of
from support.slow import slow_but

import r2ccl

SITE = ROOT / "docs/site"
CONFIG = text_of("mkdocs.yml")
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
#: Modules whose ``__all__`` is public, besides r2ccl itself, which semantic versioning covers.
PUBLIC = (
    "r2ccl.testing", "r2ccl.testing.netlab", "r2ccl.testing.rdmalab", "r2ccl.testing.simulation",
    "r2ccl.torch", "r2ccl.interop.mpi", "r2ccl.interop.cupy",
    "r2ccl.interop.ray", "r2ccl.interop.dask",
)  # fmt: skip
#: Names that a page describes in words: constants, a union, and another name of a class.
IN_WORDS = {"Fault", "Intracomm", "PAIRS", "SCHEDULES"}


def load(name: str) -> ModuleType:
    """Import a module of docs/site, which is no package."""
    sys.path.insert(0, str(SITE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SITE))


HOOKS, COMMANDS = load("hooks"), load("commands")


def listed(module: str) -> set[str]:
    """Return ``__all__`` of a module without importing it, as torch may be missing."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = re.search(r"^__all__(?:: .*)? = (\[.*?\])", file.read_text("utf-8"), re.M | re.S)
    assert found, module
    return set(re.findall(r'"(\w+)"', found[1]))


def documented() -> set[str]:
    """Return the dotted names whose docstrings the reference shows."""
    return {
        name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    }


# Pages


def test_every_page_is_in_the_navigation_once() -> None:
    nav = CONFIG.split("\nnav:\n")[1]
    shown = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    there = [page.relative_to(ROOT / "docs").as_posix() for page in DOCS]
    assert sorted(shown) == sorted([*there, *HOOKS.COPIES.values()])


def test_the_site_needs_no_other_host() -> None:
    settings = CONFIG.split("\nnav:\n")[0]
    assert "font: false" in settings
    assert "enable_inventory: false" in settings
    assert re.findall(r"https?://", settings) == []
    assert re.findall(r"url\(|@import", (SITE / "style.css").read_text()) == []


def links(text: str) -> Iterator[str]:
    for is_code, block in HOOKS.blocks(text):
        if not is_code:
            yield from (target for _, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", block))


@pytest.mark.parametrize(
    "place",
    [*HOOKS.COPIES.values(), *(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)],
)
def test_links_of_the_site_lead_to_its_pages(place: str) -> None:
    sources = {page.relative_to(ROOT / "docs").as_posix(): page for page in DOCS}
    sources |= {copy: ROOT / origin for origin, copy in HOOKS.COPIES.items()}
    text = "\n".join(HOOKS._with_links(sources[place].read_text(encoding="utf-8"), place))
    for target in links(text):
        path = target.partition("#")[0]
        if path and "://" not in target:
            file = (ROOT / "docs" / place).parent / path
            page = file.resolve().relative_to(ROOT / "docs").as_posix()
            assert page in sources or file.exists(), target


def test_links_that_leave_the_docs_are_rewritten() -> None:
    def shown(text: str, place: str) -> str:
        return "".join(HOOKS._with_links(text, place))

    assert shown("[a](../bench/README.md#b)", "rdma.md") == "[a](project/benchmarks.md#b)"
    assert shown("[a](../docs/gpu.md)", "project/tests.md") == "[a](../gpu.md)"
    assert shown("[`x`](../r2ccl/types.py) y", "scale.md") == "`x` y"
    assert shown("```\n[a](../x)\n```", "scale.md") == "```\n[a](../x)\n```"


def test_lists_are_spaced_for_python_markdown() -> None:
    text = "a:\n- b\n  c\n  - d\n\ne\n    code\n```\n- f\n```"
    assert HOOKS.spaced(text) == "a:\n\n- b\n    c\n    - d\n\ne\n    code\n```\n- f\n```"


# Reference


def test_every_public_name_is_in_the_reference() -> None:
    names = documented()
    words = " ".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    constants = {name for name in r2ccl.__all__ if not callable(getattr(r2ccl, name))}
    missing = {f"r2ccl.{name}" for name in set(r2ccl.__all__) - constants} - names
    missing |= {
        f"{module}.{name}"
        for module in PUBLIC
        for name in listed(module)
        if name not in IN_WORDS or module == "r2ccl.testing"
    } - names
    assert missing == set()
    assert [
        name for name in sorted(constants | IN_WORDS) if not re.search(rf"\b{name}`", words)
    ] == []


def test_every_name_of_the_reference_exists() -> None:
    for name in documented():
        module, _, attribute = name.rpartition(".")
        path = ROOT / Path(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").exists() or attribute in listed(module), (
            name
        )


def test_the_page_of_the_commands_has_all_of_them() -> None:
    assert HOOKS.COMMANDS in text_of("docs/reference/cli.md")
    text = COMMANDS.reference()
    parsers = COMMANDS.subcommands()
    assert [each.prog for each in parsers] == re.findall(r"^## `(.+)`$", text, re.MULTILINE)
    for parser in parsers:
        shown_actions = [each for each in parser._actions if each.help != argparse.SUPPRESS]
        options = [each for action in shown_actions for each in action.option_strings]
        shown = text.split(f"## `{parser.prog}`")[1].split("\n## ")[0]
        assert [each for each in options if f"`{each}" not in shown] == ["-h", "--help"]


def test_a_cell_of_the_commands_is_no_markup() -> None:
    parser = argparse.ArgumentParser(prog="r2ccl x")
    parser.add_argument("--a", choices=("b", "c"), default="b", help="b|c,\n%(default)s")
    assert "| `--a {b,c}` | b\\|c, b |" in COMMANDS._section(parser)


def test_sections_of_docstrings_become_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    listed = load("docstrings").listed
    own = (
        "As in::\n\n    x\n\nResults of all\n--------------\na : int\n    The\n    first.\nc\n    d"
    )
    assert listed(own) == (
        "As in:\n\n    x\n\nResults of all\n--------------\n- **a** (int): The first.\n- **c**: d"
    )
    read = "Line.\n\nRaises\n------\nOSError\n    If.\n\nNotes\n-----\nText."
    assert listed(read) == read
    assert listed("No section.") == "No section."


# The picture, and the site itself


def test_the_picture_of_the_first_page_is_that_of_a_run() -> None:
    sys.path.insert(0, str(ROOT / "docs/pictures"))
    try:
        picture = importlib.import_module("nic_loss")
    finally:
        sys.path.remove(str(ROOT / "docs/pictures"))
    assert picture.FILE.read_text(encoding="utf-8") == picture.drawn(), "run `make pictures`"
    assert "](pictures/nic_loss.svg)" in text_of("docs/index.md")
    struck = picture.run()
    lost = [each for each in struck.slices if each.is_lost]
    assert lost
    assert len(lost) == sum(each.is_again for each in struck.slices)
    assert {each.rail for each in struck.slices if each.is_again} == {1 - picture.RAIL}


def test_files_of_the_pages_have_the_syntax_of_their_names() -> None:
    for page in DOCS:
        for block in all_blocks(page.read_text(encoding="utf-8")):
            if block.title.endswith(".py"):
                compile(block.text, block.title, "exec")
            elif block.title.endswith((".sh", ".sbatch")):
                done = subprocess.run(["bash", "-n"], input=block.text, text=True, check=False)
                assert done.returncode == 0, block.title


@pytest.mark.timeout(420)
@pytest.mark.parametrize("what", slow_but(["two pages"], ["two pages", "site"]))
def test_no_page_scrolls_sideways(tmp_path: Path, what: str) -> None:
    """On a telephone and on a wide screen; of the two pages, one is too wide for a telephone."""
    if shutil.which(browser.PROGRAM) is None:
        pytest.skip(f"{browser.PROGRAM} is not installed")
    folder, profile = tmp_path / "pages", tmp_path / "profile"
    folder.mkdir()
    profile.mkdir()
    expected = []
    if what == "two pages":
        for name, width in (("fits", 300), ("wide", 800)):
            text = f'<!doctype html><body><div style="width: {width}px">text</div>'
            (folder / f"{name}.html").write_text(text)
        expected = [("wide.html", 390)]
    elif find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed; `make docs` installs it")
    else:
        argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
        env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        subprocess.run(argv, cwd=ROOT, env=env, check=True, timeout=180)
    assert browser.too_wide(folder, (390, 1280), profile, 200.0) == expected
