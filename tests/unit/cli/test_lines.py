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


def test_a_progress_bar_appears_at_once() -> None:
    out = io.BytesIO()
    printer = LinePrinter("always", out)
    printer.feed(0, "err", b"\r10%")
    printer.feed(0, "err", b"\r20%")
    assert out.getvalue() == b"[0] \r[0] 10%\r"
    printer.finish(0, "err")
    assert out.getvalue() == b"[0] \r[0] 10%\r[0] 20%\n"


def test_a_line_end_of_two_characters_may_come_in_two_pieces() -> None:
    out = io.BytesIO()
    printer = LinePrinter("always", out)
    for piece in (b"a\r", b"\nb\r", b"", b"\n", b"c\r", b"d\n", b"\n"):
        printer.feed(0, "out", piece)
    assert out.getvalue() == b"[0] a\r\n[0] b\r\n[0] c\r[0] d\n[0] \n"


def test_the_end_of_a_line_adds_none_to_another_rank() -> None:
    out = io.BytesIO()
    printer = LinePrinter("always", out)
    printer.feed(0, "out", b"a\r")
    printer.feed(1, "out", b"other\n")
    printer.feed(0, "out", b"\nb\n")
    assert out.getvalue() == b"[0] a\r[1] other\n[0] b\n"


def test_a_long_line_is_written_in_pieces() -> None:
    """A line that was kept whole was copied for each of its chunks: 80 MB took minutes."""
    out = io.BytesIO()
    printer = LinePrinter("auto", out)
    chunk = b"z" * (64 << 10)
    for _ in range(20):
        printer.feed(0, "out", chunk)
    assert len(out.getvalue()) > 1 << 20
    printer.feed(0, "out", b"\n")
    assert out.getvalue() == chunk * 20 + b"\n"


def test_other_ranks_do_not_write_into_a_long_line() -> None:
    out = io.BytesIO()
    printer = LinePrinter("always", out)
    piece = b"z" * ((1 << 20) + 1)
    printer.feed(0, "out", piece)
    assert printer.is_within_line
    printer.feed(1, "out", b"other\n")
    assert not printer.is_within_line
    printer.feed(0, "out", b"rest\n")
    assert out.getvalue() == b"[0] " + piece + b"\n[1] other\n[0] rest\n"


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
