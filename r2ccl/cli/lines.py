"""Standard output of commands: the lines of several ranks, and output that has lost its reader.

`launch_printing` runs a program as several ranks; rank 0 prints.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, TextIO, TypeVar

from r2ccl.errors import R2cclError

_T = TypeVar("_T")

#: Foreground colors of the prefixes, by rank: the six that are readable on black and on white.
_COLOURS = (36, 33, 32, 35, 34, 31)
#: Longest line in bytes that is kept until it is complete. Each further piece of output copies the
#: kept part again.
_MOST_UNFINISHED = 1 << 20

#: Rank and name of a stream.
_Source = tuple[int, str]


class LinePrinter:
    """Printer that writes the complete lines of several ranks to one stream.

    A carriage return ends a line, too, so that a progress bar appears at once. A line longer than
    1 MiB is written in pieces; output of another rank or stream then begins on a line of its own.

    Parameters
    ----------
    tag : {"auto", "always", "never"}
        When to prefix lines with ``[rank]``; ``auto``: from the first line of a second rank on.
    out : binary file
        The stream; it stays open.
    is_coloured : bool
        Write each rank's prefix in a color, by ANSI escape sequences.

    Attributes
    ----------
    is_within_line : bool
        True if the output so far may end within a line: during a write, and after a piece of a long
        line.
    """

    def __init__(self, tag: str, out: BinaryIO, *, is_coloured: bool = False) -> None:
        self._tag = tag
        self._out = out
        self._is_coloured = is_coloured
        self._writers: set[int] = set()
        self._unfinished: dict[_Source, bytes] = {}
        #: Stream whose line is incomplete in the output so far; None after a complete line.
        self._begun: _Source | None = None
        #: Stream that was written last, and those whose output so far ends with a carriage return.
        self._last: _Source | None = None
        self._returned: set[_Source] = set()
        self.is_within_line = False

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Add output of `rank`; write the lines that it completes.

        `stream` distinguishes the streams of a rank, so that their lines do not mix.
        """
        source = rank, stream
        data = self._unfinished.pop(source, b"") + data
        if data and source in self._returned:
            self._returned.remove(source)
            if data.startswith(b"\n"):
                # The line feed belongs to the carriage return that was written before.
                data = data[1:]
                if source == self._last:
                    self._put(b"\n")
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _MOST_UNFINISHED:
            end = len(data)
        self._unfinished[source] = data[end:]
        self._write(source, data[:end].splitlines(keepends=True))

    def finish(self, rank: int, stream: str) -> None:
        """End a stream of `rank`: write its last line even if it has no line end."""
        rest = self._unfinished.pop((rank, stream), b"")
        self._returned.discard((rank, stream))
        if rest:
            self._write((rank, stream), [rest + b"\n"])

    def _write(self, source: _Source, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        rank, _ = source
        self._writers.add(rank)
        is_tagged = self._tag == "always" or (self._tag == "auto" and len(self._writers) > 1)
        tag = self._prefix(rank) if is_tagged else b""
        text = b"".join(tag + line for line in lines)
        if self._begun == source:
            text = text.removeprefix(tag)
        elif self._begun is not None:
            text = b"\n" + text
        self._begun = None if lines[-1].endswith((b"\n", b"\r")) else source
        self._last = source
        if lines[-1].endswith(b"\r"):
            self._returned.add(source)
        self._put(text)

    def _put(self, text: bytes) -> None:
        self.is_within_line = True
        try:
            self._out.write(text)
            self._out.flush()
        finally:
            self.is_within_line = self._begun is not None

    def _prefix(self, rank: int) -> bytes:
        if not self._is_coloured:
            return b"[%d] " % rank
        return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)


def wants_colour(out: BinaryIO, env: Mapping[str, str]) -> bool:
    """Return True if `out` is a terminal that shows colors, and ``NO_COLOR`` is not set.

    An empty ``NO_COLOR`` counts as not set (https://no-color.org).
    """
    return out.isatty() and not env.get("NO_COLOR") and env.get("TERM", "dumb") != "dumb"


def has_lost_reader(out: TextIO) -> bool:
    """Return True if `out` is a pipe or a socket whose reader has closed it."""
    poll = select.poll()
    poll.register(out, 0)  # errors are reported in any case
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def is_full(exc: OSError) -> bool:
    """Return True if a write failed because the disk is full or a quota is exhausted.

    An error with a file name does not count, because it is not from a write to an open file.
    """
    return exc.errno in (errno.ENOSPC, errno.EDQUOT) and exc.filename is None


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that Python can write the rest when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def launch_printing(program: Callable[[], _T], nranks: int, **options: Any) -> list[_T]:
    """Run `program`, whose rank 0 prints, as `nranks` processes on this machine.

    The options and the result are those of `r2ccl.bootstrap.launch.launch`.

    Raises
    ------
    BrokenPipeError
        If a rank fails because the reader of standard output has closed it.
    OSError
        If a rank cannot print because no space is left; see `is_full`.
    Exception
        If `r2ccl.bootstrap.launch.launch` raises it, for example because a rank failed.
    """
    from r2ccl.bootstrap.launch import launch

    try:
        results: list[_T] = launch(partial(_run_rank, program), nranks, **options)
    except R2cclError as exc:
        if has_lost_reader(sys.stdout):
            raise BrokenPipeError from exc  # rank 0 could not print and failed first
        raise
    return results


def _run_rank(program: Callable[[], _T]) -> _T:
    try:
        return program()
    except OSError as exc:
        if has_lost_reader(sys.stdout) or is_full(exc):
            discard_output()
        raise


__all__ = [
    "LinePrinter",
    "discard_output",
    "has_lost_reader",
    "is_full",
    "launch_printing",
    "wants_colour",
]
