"""The tutorial and the how-to pages are followed: files written, commands run, output compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fresh.walkthroughs import requirements
from support.pages import NEEDS, ROOT, all_blocks, assert_shows, follow
from support.slow import slow_but

NAMES = ["index.md", "tutorial.md"]
NAMES += [f"howto/{page.name}" for page in sorted((ROOT / "docs/howto").glob("*.md"))]
#: Languages of blocks that are shown, and not run: changes to the reader's own files, and a shell
#: whose prompt is shown.
SHOWN = {"diff", "console"}


# A busy machine takes many seconds to start the ranks of each command.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", slow_but(["howto/cupy.md"], NAMES))
def test_what_a_page_says_happens(name: str, tmp_path: Path) -> None:
    left_out = set(follow(ROOT / "docs" / name, tmp_path)) - {"cluster"}
    if left_out:
        pytest.skip(f"followed, except for what needs {', '.join(sorted(left_out))}")


@pytest.mark.parametrize("name", NAMES)
def test_every_block_of_a_page_is_run_or_shown_on_purpose(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    found = list(all_blocks(text))
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE))
    for before, block in zip([None, *found], found, strict=False):
        assert block.needs <= NEEDS.keys()
        if block.language == "text":
            assert before is not None
            assert before.language == "sh", "what writes this?"
        elif not block.title:
            assert block.language in {"sh", *SHOWN}, block.text


def test_shown_lines_are_those_that_are_written() -> None:
    written = "[1] b\n[0] a 12 ms\n"
    assert_shows("[0] a … ms\n[1] b\n", written)
    assert_shows("[1] b\n…\n", written)
    for wrong in ("[0] a … ms\n", "[1] b\n[1] b\n…\n", "[0] a … s\n…\n", "[01] b\n…\n"):
        with pytest.raises(AssertionError):
            assert_shows(wrong, written)


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```python title="a.py"\nprint(1)\n```\n```sh\npython a.py\n```\n```text\n2\n```\n'
    )
    with pytest.raises(AssertionError, match="the page shows '2'"):
        follow(page, tmp_path)
    page.write_text("<!-- needs: cluster -->\n```sh\nfalse\n```\n")
    assert follow(page, tmp_path) == ["cluster"]


def test_install_commands_of_pages_are_read() -> None:
    assert requirements("Nothing.") == ("compiled", ())
    text = 'Run `pip install ".[compiled,torch]" "torch==2.13.*"` in a checkout.'
    assert requirements(text) == ("compiled,torch", ("torch==2.13.*",))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_installs_the_packages_it_needs(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    extras, others = requirements(text)
    installed = {*extras.split(","), *(re.split(r"\W", each)[0] for each in others)}
    needed = {each for block in all_blocks(text) for each in block.needs}
    packages = {"torch": "torch", "mpi4py": "mpi", "ray": "ray", "dask": "dask", "jax": "jax"}
    assert {packages[each] for each in needed & packages.keys()} <= installed
