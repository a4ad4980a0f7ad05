"""Supervision of a job: its output, its exit status, and its end after a failure or a signal.

The ranks are in groups, one for each host. The supervisor does not know where the groups run.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol

from r2ccl.bootstrap.launch import describe_exit
from r2ccl.cli.lines import LinePrinter, discard_output
from r2ccl.cli.rankprocs import TERMINATION_GRACE_S
from r2ccl.cli.values import FAILURE_GRACE_S
from r2ccl.errors import format_ranks

#: Exit status of a job that lost a host.
_LOST_STATUS = 1
_STDIN_FD = 0
_STDIN_NBYTES = 64 << 10


class RankGroup(Protocol):
    """Ranks of a job on one host, which may be this host or another one."""

    async def attend(self) -> None:
        """Wait until all ranks have ended and their output was passed on, or the host is lost."""

    async def feed(self, data: bytes) -> None:
        """Write to standard input of rank 0, waiting if rank 0 is slow; empty `data` closes it."""

    def signal(self, number: int) -> None:
        """Send a signal to all ranks of the group that have not ended."""

    async def close(self) -> None:
        """End the remaining ranks of the group."""


class Supervisor:
    """Supervisor of the ranks of a job; as a `Sink`, receives their output and exit statuses.

    Parameters
    ----------
    printer : LinePrinter
    keeps_going : bool
        Let the other ranks run on after a failure.
    has_stdin : bool
        Pass the standard input of this process to rank 0.

    Attributes
    ----------
    statuses : dict of int to int
        Exit status of each rank that has ended; ``-n`` if signal n ended it.
    failure : str
        Description of the first failure; empty if there was none.
    """

    def __init__(self, printer: LinePrinter, *, keeps_going: bool, has_stdin: bool) -> None:
        self._printer = printer
        self._keeps_going = keeps_going
        self._has_stdin = has_stdin
        self.statuses: dict[int, int] = {}
        self.failure = ""
        self._status = 0
        self._groups: Sequence[RankGroup] = ()
        self._is_ending = asyncio.Event()
        self._is_interrupted = asyncio.Event()
        self._printing = asyncio.Lock()
        self._has_lost_output = False

    async def run(
        self, groups: Sequence[RankGroup], start: Callable[[], Coroutine[Any, Any, None]]
    ) -> int:
        """Start the ranks, wait until all have ended, and return the exit status of the job.

        An interrupt (SIGINT or SIGTERM) during the start ends the ranks that were started.

        Parameters
        ----------
        groups : sequence of RankGroup
            Rank 0 is in the first one.
        start : callable
            Starts the ranks of all groups; an interrupt cancels it.

        Raises
        ------
        R2cclError
            If `start` raises it.
        """
        self._groups = groups
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._forward, number)
        ender = loop.create_task(self._end_when_told())
        try:
            if await self._start(start):
                if self._has_stdin:
                    threading.Thread(target=self._read_stdin, args=[loop], daemon=True).start()
                await asyncio.gather(*(group.attend() for group in groups))
        finally:
            ender.cancel()
            await asyncio.gather(*(group.close() for group in groups))
        return self._status

    async def _start(self, start: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Call `start`; return True if it started all ranks, False if an interrupt came first."""
        starting = asyncio.create_task(start())
        interrupted = asyncio.create_task(self._is_interrupted.wait())
        await asyncio.wait([starting, interrupted], return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.wait([starting])
        return False

    async def output(self, rank: int, stream: str, data: bytes) -> None:
        """Print output of a rank; empty bytes end the stream.

        If the output cannot be written, end all ranks and drop further output.
        """
        # A thread writes, because a slow reader of this output must not block the event loop.
        async with self._printing:
            if self._has_lost_output:
                return
            try:
                if data:
                    await asyncio.to_thread(self._printer.feed, rank, stream, data)
                else:
                    await asyncio.to_thread(self._printer.finish, rank, stream)
            except OSError as exc:
                self._lose_output(exc)

    def _lose_output(self, exc: OSError) -> None:
        """End the ranks after output could not be written, for example because its reader ended."""
        self._has_lost_output = True
        discard_output()
        is_pipe = isinstance(exc, BrokenPipeError)
        self._status = self._status or (128 + signal.SIGPIPE if is_pipe else 1)
        if not is_pipe:
            print(f"r2ccl launch: cannot write output: {exc.strerror}", file=sys.stderr)
        self._signal_all(signal.SIGTERM)
        self._is_ending.set()

    async def ended(self, rank: int, status: int) -> None:
        """Record the exit status of a rank; a status other than 0 is a failure of the job.

        Unless `keeps_going` was given, the other ranks have `FAILURE_GRACE_S` after a failure to
        exit by themselves, and are then ended.
        """
        self.statuses[rank] = status
        if status != 0:
            what = f"rank {rank}: {describe_exit(status)}"
            self._note_failure(what, status if status > 0 else 128 - status)

    def lost(self, ranks: Sequence[int], host: str, why: str) -> None:
        """Record that `host` was lost, so that the exit statuses of `ranks` stay unknown.

        This is a failure of the job, as in `ended`.
        """
        what = f"host {host} was lost with ranks {format_ranks(ranks)}: {why}"
        self._note_failure(what, _LOST_STATUS)

    def _note_failure(self, what: str, status: int) -> None:
        is_first = self._status == 0
        self._status = self._status or status
        self.failure = self.failure or what
        # Report only the first failure, which causes the others, unless the other ranks run on.
        if is_first or self._keeps_going:
            # A thread may be writing a line of a rank to the same terminal or pipe.
            is_within_line = self._printer.is_within_line and _is_output_shared()
            print("\n" * is_within_line + f"r2ccl launch: {what}", file=sys.stderr)
        if not self._keeps_going:
            self._is_ending.set()

    def _forward(self, number: int) -> None:
        """Forward a signal to the ranks and end the job; kill them if the job is ending already."""
        if self._is_ending.is_set():
            self._signal_all(signal.SIGKILL)
            return
        self._signal_all(number)
        self._status = self._status or 128 + number
        self._is_interrupted.set()
        self._is_ending.set()

    async def _end_when_told(self) -> None:
        await self._is_ending.wait()
        for number, grace_s in (
            (signal.SIGTERM, FAILURE_GRACE_S),
            (signal.SIGKILL, TERMINATION_GRACE_S),
        ):
            await asyncio.sleep(grace_s)
            self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for group in self._groups:
            group.signal(number)

    def _read_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Pass standard input to rank 0; runs in a thread, since a read may block forever."""
        while True:
            try:
                data = os.read(_STDIN_FD, _STDIN_NBYTES)
            except BlockingIOError:
                select.select([_STDIN_FD], [], [])
                continue
            except OSError:  # closed: rank 0 finds the end of its input
                data = b""
            feeding = self._groups[0].feed(data)
            try:
                asyncio.run_coroutine_threadsafe(feeding, loop).result()
            except (RuntimeError, CancelledError):  # all ranks and the event loop have ended
                feeding.close()
                return
            if not data:
                return


def _is_output_shared() -> bool:
    """Return whether standard output and standard error are one terminal, pipe or file."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one of them is closed
        return False


__all__ = ["RankGroup", "Supervisor"]
