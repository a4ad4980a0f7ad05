"""Tables on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import re

import pytest

from r2ccl.cli import forecast_output, main, tables

ROWS = [("ok", "rails", "two [of] them"), ("error", "verbs", " ".join(["word"] * 60))]
EXPLAIN = ["explain", "--nodes", "2", "--nics", "2", "--rate", "100gbit", "--no-simulate"]


def as_terminal(monkeypatch: pytest.MonkeyPatch, module: object, width: int = 80) -> None:
    console = pytest.importorskip("rich.console", reason="rich, of r2ccl[cli], is not installed")
    made = console.Console(force_terminal=True, width=width, color_system="standard")
    monkeypatch.setattr(module, "terminal", lambda: made)


@pytest.mark.parametrize("width", [40, 200])
def test_long_cells_continue_on_the_next_line(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_terminal(monkeypatch, tables, width)
    console = tables.terminal()
    assert console is not None
    styles = [tables.LEVEL_STYLES[level] for level, *_ in ROWS]
    tables.draw(console, "findings", ("", "", ""), ROWS, styles=styles)
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert plain.count("word") == 60
    assert "[of]" in plain
    assert max(map(len, plain.splitlines())) <= width


def test_a_pipe_gets_plain_lines() -> None:
    assert tables.terminal() is None  # pytest captures the output


def test_explain_draws_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(EXPLAIN) == 0
    plain = capsys.readouterr().out
    as_terminal(monkeypatch, forecast_output.tables, 120)
    assert main(EXPLAIN) == 0
    drawn = capsys.readouterr().out
    assert "\x1b[" in drawn
    assert "\x1b[" not in plain
    words = set(re.sub(r"\x1b\[[\d;]*m|\u2500", " ", drawn).split())
    assert set(plain.split()) <= words
