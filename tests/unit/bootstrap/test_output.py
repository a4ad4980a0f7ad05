"""Output of ranks that passes through the launcher."""

from __future__ import annotations

import os
import threading

from r2ccl.bootstrap.output import RankOutput


def test_a_writer_without_end_does_not_hold_the_launcher(capsys) -> None:
    output = RankOutput(1)
    [(out, _)] = output.theirs
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            os.write(out, b"line\n" * 1000)

    writer = threading.Thread(target=write)
    writer.start()
    output.flush()
    is_over.set()
    output.flush()  # makes room for the last write
    writer.join()
    output.close_theirs()
    output.close()
    assert set(capsys.readouterr().out.split()) <= {"line", "l", "li", "lin", "e", "ne", "ine"}
