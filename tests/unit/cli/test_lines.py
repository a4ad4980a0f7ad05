"""Lines of several ranks stay whole, and say whose they are."""

from __future__ import annotations

import io

import pytest

from r2ccl.cli.lines import LinePrinter, wants_colour


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_whole_and_tagged_once_a_second_rank_writes() -> None:
    out = io.BytesIO()
    printer = LinePrinter("auto", out)
    printer.feed(0, "out", b"alone\npart")
    printer.feed(1, "out", b"other\n")
    printer.feed(0, "out", b"ial\n")
    printer.feed(1, "err", b"no newline")
    printer.finish(1, "err")
    assert out.getvalue() == b"alone\n[1] other\n[0] partial\n[1] no newline\n"


def test_ranks_have_colours_of_their_own() -> None:
    out = io.BytesIO()
    printer = LinePrinter("always", out, is_coloured=True)
    for rank in range(2):
        printer.feed(rank, "out", b"x\n")
    assert out.getvalue() == b"\x1b[36m[0]\x1b[0m x\n\x1b[33m[1]\x1b[0m x\n"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_a_terminal_has_colours_unless_it_is_told(env: dict[str, str], expected: bool) -> None:
    assert wants_colour(Terminal(), env) is expected
    assert not wants_colour(io.BytesIO(), env)
