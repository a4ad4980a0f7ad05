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


def test_a_long_line_takes_no_long_time(capsys) -> None:
    """A search that began anew at each byte took minutes."""
    output = RankOutput(1)
    [[theirs, _]] = output.theirs
    nbytes = 3 << 20
    writer = threading.Thread(target=os.write, args=(theirs, b"z" * nbytes + b"\nrest"))
    writer.start()
    while writer.is_alive():
        for descriptor in list(output.descriptors()):
            output.forward(descriptor)
    output.close_theirs()
    output.flush()
    output.close()
    said = capsys.readouterr().out
    assert said.replace("\n", "") == "z" * nbytes + "rest"
