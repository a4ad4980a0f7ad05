"""Extension of griffe: docstring sections that NumPy's style does not define, as Markdown lists.

griffe passes the text of such a section to Markdown, which joins the lines of its entries.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

#: Titles of the sections that griffe reads itself.
_READ = (
    "Attributes",
    "Examples",
    "Notes",
    "Parameters",
    "Raises",
    "References",
    "Returns",
    "Yields",
)
_TITLE = re.compile(r"^([A-Z][\w ]+)\n-{3,}$", re.MULTILINE)
_ENTRY = re.compile(r"^(\S[^\n]*)\n((?:[ ]{4}[^\n]*\n|\n(?=[ ]{4}))+)", re.MULTILINE)


class ListSections(Extension):  # type: ignore[misc]
    """Makes list items of the entries of sections that griffe does not read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """Return a docstring whose own sections have list items, and no colons of literal blocks."""
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    begins = [*_TITLE.finditer(text)]
    if not begins:
        return text
    ends = [*(each.start() for each in begins[1:]), len(text)]
    parts = [text[: begins[0].start()]]
    for title, end in zip(begins, ends, strict=True):
        body = text[title.end() : end]
        if title[1] not in _READ:
            body = _ENTRY.sub(_item, f"{body.rstrip()}\n") + "\n"
        parts.append(text[title.start() : title.end()] + body)
    return "".join(parts).rstrip()


def _item(entry: re.Match[str]) -> str:
    name, _, kind = entry[1].partition(" : ")
    meaning = " ".join(entry[2].split())
    return f"- **{name}**{f' ({kind})' if kind else ''}: {meaning}\n"


__all__ = ["ListSections", "listed"]
