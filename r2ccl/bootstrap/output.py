"""Output of ranks that must pass through the launcher: in a notebook, or if output is captured.

Ranks inherit the standard output and standard error of the launcher. In a notebook, in a test that
captures output, and within ``contextlib.redirect_stdout``, the launcher's ``sys.stdout`` or
``sys.stderr`` writes elsewhere. Text that ranks write to the descriptors would then not appear
where the launcher's own output does. `RankOutput` therefore reads this text from pipes and writes
it to ``sys.stdout`` and ``sys.stderr``.

Invariant: only the thread that waits for the ranks writes, so output appears in the cell whose call
waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

_READ_NBYTES = 1 << 16
#: Maximum number of reads to empty a pipe, which holds 64 KiB, or 1 MiB if a rank has enlarged it.
#: A process that writes without end must not block the launcher.
_MOST_READS = 16
#: Longest line in bytes that is kept until it is complete.
_MOST_UNFINISHED = 1 << 20
#: Names in `sys` of the streams of descriptors 1 and 2.
_STREAMS = ("stdout", "stderr")


class _Source(NamedTuple):
    rank: int
    stream: str


def is_forwarded() -> bool:
    """Return True if the output of ranks must be forwarded.

    This is so if ``sys.stdout`` is open but does not write to descriptor 1, or ``sys.stderr`` is
    open but does not write to descriptor 2.
    """
    return any(
        not _is_descriptor(getattr(sys, name), number)
        for number, name in enumerate(_STREAMS, start=1)
    )


def _is_descriptor(stream: Any, number: int) -> bool:
    if stream is None:  # closed: ranks write to the closed descriptor, too
        return True
    try:
        return bool(stream.fileno() == number)
    except (AttributeError, OSError, ValueError):  # io.UnsupportedOperation is both of the latter
        return False


class RankOutput:
    """Pipes from the standard output and error of each rank to ``sys.stdout`` and ``sys.stderr``.

    If there are several ranks, each line begins with the number of its rank, as in ``[2]``. Lines
    of up to 1 MiB are written whole, except a line that `flush` finds incomplete.

    Parameters
    ----------
    nranks : int

    Attributes
    ----------
    theirs : list of list of int
        Descriptors of each rank's standard output and standard error, which the caller passes to
        the ranks and then closes with `close_theirs`.
    """

    def __init__(self, nranks: int) -> None:
        self.theirs: list[list[int]] = []
        self._tagged = nranks > 1
        self._sources: dict[int, _Source] = {}
        self._unfinished: dict[_Source, bytes] = {}
        try:
            for rank in range(nranks):
                self.theirs.append([])
                for name in _STREAMS:
                    self.theirs[rank].append(self._pipe(_Source(rank, name)))
        except BaseException:
            self.close_theirs()
            self.close()
            raise

    def _pipe(self, source: _Source) -> int:
        mine, theirs = os.pipe()
        os.set_blocking(mine, False)
        self._sources[mine] = source
        return theirs

    def descriptors(self) -> Collection[int]:
        """Return the descriptors to wait for; call `forward` with those that are readable."""
        return self._sources.keys()

    def forward(self, descriptor: int) -> bool:
        """Read up to 64 KiB, and write all lines that are then complete.

        Return True if bytes were read; False if no bytes have arrived, or at the end of the output.
        At the end, close the descriptor, which `descriptors` then no longer returns.
        """
        source = self._sources[descriptor]
        try:
            data = os.read(descriptor, _READ_NBYTES)
        except BlockingIOError:
            return False
        if not data:
            del self._sources[descriptor]
            os.close(descriptor)
            return False
        data = self._unfinished.pop(source, b"") + data
        # A progress bar ends its lines with a carriage return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _MOST_UNFINISHED:
            end = len(data)
        self._unfinished[source] = data[end:]
        self._write(source, data[:end].splitlines(keepends=True))
        return True

    def flush(self) -> None:
        """Write the output that the ranks have produced so far, including an incomplete last line.

        Read each pipe at most `_MOST_READS` times.
        """
        for descriptor in list(self._sources):
            for _ in range(_MOST_READS):
                if not self.forward(descriptor):
                    break
        for source, rest in self._unfinished.items():
            if rest:
                self._write(source, [rest + b"\n"])
        self._unfinished.clear()

    def close_theirs(self) -> None:
        """Close this process's copies of the descriptors that the ranks use."""
        for descriptors in self.theirs:
            for descriptor in descriptors:
                os.close(descriptor)
        self.theirs = []

    def close(self) -> None:
        """Close this process's ends of all pipes."""
        for descriptor in self._sources:
            os.close(descriptor)
        self._sources.clear()

    def _write(self, source: _Source, lines: list[bytes]) -> None:
        tag = f"[{source.rank}] " if self._tagged else ""
        stream = getattr(sys, source.stream)
        if stream is not None and lines:
            stream.write("".join(tag + line.decode(errors="replace") for line in lines))
            with contextlib.suppress(AttributeError):  # an object with write() alone is enough
                stream.flush()


__all__ = ["RankOutput", "is_forwarded"]
