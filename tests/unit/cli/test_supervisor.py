"""Messages of the launcher beside the lines of its ranks."""

from __future__ import annotations

import io
import os

import pytest

from r2ccl.cli.lines import LinePrinter
from r2ccl.cli.supervisor import Supervisor


@pytest.mark.parametrize(("is_same", "start"), [(True, "\n"), (False, "")])
def test_a_message_during_a_write_begins_a_line(
    is_same: bool, start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(io.BytesIO):
        def flush(self) -> None:
            supervisor._note_failure("rank 1: exit status 3", 3)

    printer = LinePrinter("never", Slow())
    supervisor = Supervisor(printer, keeps_going=True, has_stdin=False)
    monkeypatch.setattr(os.path, "sameopenfile", lambda first, second: is_same)
    printer.feed(0, "out", b"line\n")
    assert capsys.readouterr().err == f"{start}r2ccl launch: rank 1: exit status 3\n"
    supervisor._note_failure("rank 2: exit status 3", 3)
    assert capsys.readouterr().err == "r2ccl launch: rank 2: exit status 3\n"
