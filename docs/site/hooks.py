"""Hooks of MkDocs: they turn the pages of this repository, which a forge shows, into a site.

The pages are written for both. A link to a page outside ``docs/`` leads to a copy of that page in
the site, and a link to any other file becomes plain text. Lists are written as CommonMark reads
them, and Python-Markdown needs more blank lines and spaces.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

#: Pages outside ``docs/`` that the site has, too, and their paths there.
COPIES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "bench/README.md": "project/benchmarks.md",
    "tests/README.md": "project/tests.md",
}
#: Page that links to the README lead to.
HOME = "index.md"
COMMANDS = "<!-- commands -->"

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"^( *)([-*]|\d+\.) ")
_FENCE = re.compile(r"^ *```")


def on_files(files: Files, config: Any) -> Files:
    """Add the copies of pages outside ``docs/``."""
    from mkdocs.structure.files import File

    for path, place in COPIES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the text of a page as Python-Markdown needs it."""
    if COMMANDS in markdown:
        sys.path.insert(0, str(Path(__file__).parent))
        from commands import reference

        markdown = markdown.replace(COMMANDS, reference())
    return spaced("\n".join(_with_links(markdown, page.file.src_uri)))


def _with_links(markdown: str, place: str) -> Iterator[str]:
    for is_code, block in blocks(markdown):
        yield block if is_code else _LINK.sub(lambda link: rewritten(link, place), block)


def rewritten(link: re.Match[str], place: str) -> str:
    """Return a link of the page at `place` as it must be in the site."""
    words, target = link[1], link[2]
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    origins = {copy: origin for origin, copy in COPIES.items()}
    origin = origins.get(place, f"docs/{place}")
    there = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    if there.startswith("docs/"):
        found = there.removeprefix("docs/")
    elif there in COPIES or there == "README.md":
        found = COPIES.get(there, HOME)
    else:
        return words
    new = posixpath.relpath(found, posixpath.dirname(place) or ".")
    return f"[{words}]({new}{'#' if anchor else ''}{anchor})"


def blocks(markdown: str) -> Iterator[tuple[bool, str]]:
    """Yield the text in order, in parts outside and inside of fenced code; True for code."""
    lines: list[str] = []
    is_code = False
    for line in markdown.split("\n"):
        is_fence = _FENCE.match(line) is not None
        if is_fence and not is_code:
            if lines:
                yield False, "\n".join(lines)
            lines = []
        lines.append(line)
        if is_fence and is_code:
            yield True, "\n".join(lines)
            lines = []
        is_code ^= is_fence
    if lines:
        yield is_code, "\n".join(lines)


def spaced(markdown: str) -> str:
    """Return the text with a blank line before each list, and nested lists indented by four."""
    found: list[str] = []
    is_code, is_list = False, False
    for line in markdown.split("\n"):
        is_fence = _FENCE.match(line) is not None
        item = None if is_code or is_fence else _ITEM.match(line)
        if item and not is_list and found and found[-1].strip():
            found.append("")
        if item:
            is_list = True
        elif line.strip() and not line.startswith(" ") and found and not found[-1].strip():
            is_list = False
        indent = len(line) - len(line.lstrip(" "))
        if is_list and indent:
            line = " " * (-(-indent // 2) * 2) + line
        found.append(line)
        is_code ^= is_fence
    return "\n".join(found)
