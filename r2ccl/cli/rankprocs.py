"""Processes of the ranks of this host, started by a launcher or by its agent.

Invariant: the kernel kills the ranks when this process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from functools import partial
from typing import Protocol

import msgspec

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.launch import JobShare
from r2ccl.bootstrap.orphans import end_with
from r2ccl.clock import monotonic
from r2ccl.errors import InvalidArgument

#: Seconds that ranks have to exit after the last SIGTERM, before SIGKILL. Also the longest wait for
#: more output of an ended rank, because its child processes may hold its pipes open forever.
TERMINATION_GRACE_S = 5.0
_CHUNK_NBYTES = 64 << 10
#: Limit in bytes of the output of a stream that is passed on after its rank has ended; the last
#: piece may exceed the limit. The rank's pipe and the reader's buffer hold less, so any further
#: output comes from child processes of the rank.
_MOST_LEFT_NBYTES = 2 << 20
#: Interval between checks whether a rank has ended, in seconds.
_POLL_S = 0.02


class JobCommand(msgspec.Struct, frozen=True):
    """Command that every rank runs.

    ``words`` are the command and its arguments; if ``is_module``, a module and its arguments.
    ``env`` has variables for every rank. ``folder`` is the working directory. With ``has_stdin``,
    rank 0 gets the standard input of the launcher.
    """

    words: tuple[str, ...]
    is_module: bool
    env: dict[str, str]
    folder: str
    has_stdin: bool

    def command(self) -> tuple[str, ...]:
        """Return the command line.

        A module or an existing ``.py`` file is run by this interpreter. Any other command is
        returned unchanged.
        """
        if self.is_module:
            return (sys.executable, "-m", *self.words)
        script = self.words[0]
        if script.endswith(".py") and os.path.isfile(os.path.join(self.folder, script)):
            return (sys.executable, *self.words)
        return self.words


class Sink(Protocol):
    """Receiver of the output and the exit statuses of ranks."""

    async def output(self, rank: int, stream: str, data: bytes) -> None:
        """Take output of a stream of `rank`; empty bytes end the stream."""

    async def ended(self, rank: int, status: int) -> None:
        """Take the exit status of `rank`; ``-n`` if signal n ended the rank."""


class HostRanks:
    """Ranks of a job on this host.

    Parameters
    ----------
    share : JobShare
        Ranks of this host.
    program : JobCommand
    sink : Sink
    """

    def __init__(self, share: JobShare, program: JobCommand, sink: Sink) -> None:
        self._share = share
        self._program = program
        self._sink = sink
        self._ranks: dict[int, Process] = {}
        self._is_signalled = False

    async def start(self, listener: socket.socket | None) -> None:
        """Start all ranks; after an error, `close` ends those that were started.

        Parameters
        ----------
        listener : socket or None
            Socket of the rendezvous, which rank 0 inherits; it stays open in this process.

        Raises
        ------
        InvalidArgument
            If the command cannot be run, or the working directory cannot be entered.
        """
        if not os.path.isdir(self._program.folder):
            raise InvalidArgument(
                f"the working directory {self._program.folder} is not a directory that this user "
                f"can reach on {socket.gethostname()}: name another one with --chdir"
            )
        for rank in range(self._share.first, self._share.first + self._share.count):
            self._ranks[rank] = await self._start(rank, listener if rank == 0 else None)

    async def _start(self, rank: int, listener: socket.socket | None) -> Process:
        given = self._share.environment(rank)
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **self._program.env, **given}
        env.pop(LISTEN_FD_VARIABLE, None)
        if listener is not None:
            env[LISTEN_FD_VARIABLE] = str(listener.fileno())
        command = self._program.command()
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE if rank == 0 and self._program.has_stdin else DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                env=env,
                cwd=self._program.folder,
                pass_fds=[] if listener is None else [listener.fileno()],
                preexec_fn=partial(end_with, os.getpid()),
                process_group=0,  # else Ctrl-C in a terminal would reach the ranks twice
            )
        except OSError as exc:
            why = _why_not_run(command[0], self._program.folder, exc)
            raise InvalidArgument(f"cannot run {command[0]!r}: {why}") from exc

    async def attend(self) -> None:
        """Pass the ranks' output and exit statuses to the sink until all ranks have ended."""
        await asyncio.gather(*map(self._attend, self._ranks))

    async def _attend(self, rank: int) -> None:
        process = self._ranks[rank]
        assert process.stdout is not None
        assert process.stderr is not None
        has_ended = asyncio.Event()
        pumps = asyncio.gather(
            self._pump(rank, "out", process.stdout, has_ended),
            self._pump(rank, "err", process.stderr, has_ended),
        )
        # Process.wait() also waits for the ends of the pipes, which children of the rank may hold.
        while process.returncode is None:
            await asyncio.sleep(_POLL_S)
        if self._is_signalled:  # end processes that a rank such as a shell has left behind
            _signal_group(process, signal.SIGKILL)
        has_ended.set()
        await self._sink.ended(rank, process.returncode)
        await pumps
        await _close_pipes(process)

    async def _pump(
        self, rank: int, stream: str, source: asyncio.StreamReader, has_ended: asyncio.Event
    ) -> None:
        """Pass on the output of a rank on one stream until its end.

        After the rank has ended, its children may still write to the stream. From then on, pass on
        only about `_MOST_LEFT_NBYTES`, and stop when no data arrives for `TERMINATION_GRACE_S`.
        """
        ending = asyncio.create_task(has_ended.wait())
        left_nbytes = _MOST_LEFT_NBYTES
        try:
            while left_nbytes > 0:
                reading = asyncio.create_task(source.read(_CHUNK_NBYTES))
                await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([reading], timeout=TERMINATION_GRACE_S)
                if not reading.done():
                    reading.cancel()
                    break
                if not (data := reading.result()):
                    break
                left_nbytes -= len(data) if has_ended.is_set() else 0
                await self._sink.output(rank, stream, data)
        finally:
            ending.cancel()
            await self._sink.output(rank, stream, b"")

    async def feed(self, data: bytes) -> None:
        """Write to standard input of rank 0, which must run on this host; empty `data` closes it.

        Data that the rank does not read before it ends, or closes its standard input, is dropped.
        """
        stdin = self._ranks[0].stdin
        assert stdin is not None
        if stdin.is_closing():  # asyncio would log every write
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if data:
                stdin.write(data)
                await stdin.drain()
            else:
                stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal to the process groups of all ranks that have not ended."""
        self._is_signalled = True
        for process in self._ranks.values():
            if process.returncode is None:
                _signal_group(process, number)

    async def close(self) -> None:
        """Kill the remaining ranks, wait for their end, and free the pipes of all ranks.

        The wait takes at most `TERMINATION_GRACE_S`. Call it while the event loop runs.
        """
        self.signal(signal.SIGKILL)
        until_s = monotonic() + TERMINATION_GRACE_S
        for process in self._ranks.values():
            while process.returncode is None and monotonic() < until_s:
                await asyncio.sleep(_POLL_S)
            await _close_pipes(process)


def _why_not_run(program: str, folder: str, exc: OSError) -> str:
    """Return the reason why `program` could not be started in `folder`; `exc` is the error."""
    path = os.path.join(folder, program)
    if not (isinstance(exc, FileNotFoundError | PermissionError) and os.path.isfile(path)):
        return str(exc.strerror)
    named = program if "/" in program else f"./{program}"
    if not os.access(path, os.X_OK):
        return (
            f"the file is not executable: write python {program} if it is a Python script, else "
            f"chmod +x {program} and write {named}"
        )
    return str(exc.strerror) if "/" in program else f"it is not in PATH: write {named}"


async def _close_pipes(process: Process) -> None:
    """Close the pipes of a process that has ended; drop the data that it did not read."""
    if process.stdin is not None:
        pipe = process.stdin.transport
        if not pipe.is_closing() or pipe.get_write_buffer_size():
            pipe.abort()
        # Otherwise asyncio of some versions writes that nobody has asked for the error.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await process.stdin.wait_closed()
    process._transport.close()  # type: ignore[attr-defined]


def _signal_group(process: Process, number: int) -> None:
    """Send a signal to the process group that the rank leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


__all__ = ["TERMINATION_GRACE_S", "HostRanks", "JobCommand", "Sink"]
