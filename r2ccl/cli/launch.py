"""``r2ccl launch -n 4 -- python script.py``: run a command as n ranks on this machine.

Every rank gets torchrun's environment variables plus R2CC_PORT and R2CC_SECRET. The launcher prints
the ranks' standard output and standard error line by line on its own standard output.

The exit status is that of the first rank that failed; if a signal ended this rank, the status is
128 + the signal number. If the launcher gets SIGINT or SIGTERM before any failure, the status is
128 + the number of that signal. Otherwise it is 0.

After a failure the other ranks have some time to exit by themselves and are then terminated; with
``--keep-going`` they run on and can continue without the failed rank (``comm.shrink()``). SIGINT
and SIGTERM are forwarded to the ranks, which then have the same time to exit. A SIGINT or SIGTERM
that arrives while ranks have this time, also after a failure, kills them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.launch import LocalJob, describe_exit
from r2ccl.bootstrap.orphans import end_with
from r2ccl.errors import InvalidArgument

#: Seconds in which the other ranks can exit by themselves after a failure; their calls raise
#: PeerLost.
_FAILURE_GRACE_S = 10.0
_TERMINATION_GRACE_S = 5.0
_CHUNK_NBYTES = 64 << 10


def add_parser(subparsers: Any) -> None:
    """Add the ``launch`` command to those of ``r2ccl``; its parsed arguments go to `run`."""
    parser = subparsers.add_parser(
        "launch",
        help="run a command as several ranks on this machine",
        description="Run a command as several ranks on this machine.",
    )
    parser.add_argument("-n", "--nranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--env", action="append", default=[], metavar="K=V", help="set a variable for every rank"
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="let the other ranks run on after a rank failed, for a job that shrinks; each failed "
        "rank is reported, and the exit status is that of the first. Default: the other ranks are "
        f"terminated after {_FAILURE_GRACE_S:g} s",
    )
    parser.add_argument(
        "--tag",
        choices=("auto", "always", "never"),
        default="auto",
        help="prefix output lines with [rank]; auto: once a second rank has written",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the parsed command; return the exit status, as the module's docstring describes it.

    Raises
    ------
    InvalidArgument
        If an argument is wrong, or the command cannot be run.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise InvalidArgument("no command given: r2ccl launch -n 4 -- python script.py")
    env = dict(_parse_assignment(text) for text in args.env)
    printer = LinePrinter(args.tag, sys.stdout.buffer)
    launcher = _Launcher(args.nranks, command, env, printer, keeps_going=args.keep_going)
    return asyncio.run(launcher.run())


def _parse_assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise InvalidArgument(f"--env {text!r}: allowed is NAME=VALUE")
    return name, value


class LinePrinter:
    """Printer that writes the complete lines of several ranks to one stream.

    Parameters
    ----------
    tag : {"auto", "always", "never"}
        When to prefix lines with ``[rank]``; ``auto``: from the first line of a second rank on.
    out : binary file
        The stream; it stays open.
    """

    def __init__(self, tag: str, out: BinaryIO) -> None:
        self._tag = tag
        self._out = out
        self._writers: set[int] = set()
        self._unfinished: dict[tuple[int, str], bytes] = {}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Add output of `rank`; write the lines that it completes.

        `stream` distinguishes the streams of a rank, so that their lines do not mix.
        """
        *lines, rest = (self._unfinished.get((rank, stream), b"") + data).split(b"\n")
        self._unfinished[rank, stream] = rest
        self._write(rank, lines)

    def finish(self, rank: int, stream: str) -> None:
        """End a stream of `rank`: write its last line even if it has no line end."""
        rest = self._unfinished.pop((rank, stream), b"")
        if rest:
            self._write(rank, [rest])

    def _write(self, rank: int, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        self._writers.add(rank)
        is_tagged = self._tag == "always" or (self._tag == "auto" and len(self._writers) > 1)
        tag = b"[%d] " % rank if is_tagged else b""
        self._out.write(b"".join(tag + line + b"\n" for line in lines))
        self._out.flush()


class _Launcher:
    def __init__(
        self,
        nranks: int,
        command: Sequence[str],
        env: Mapping[str, str],
        printer: LinePrinter,
        *,
        keeps_going: bool,
    ) -> None:
        self._nranks = nranks
        self._command = command
        self._env = env
        self._printer = printer
        self._keeps_going = keeps_going
        self._ranks: list[Process] = []
        self._status = 0
        self._is_ending = asyncio.Event()

    async def run(self) -> int:
        """Start all ranks and wait until all have ended.

        Return the exit status, as the module's docstring describes it.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._forward, number)
        ender = loop.create_task(self._end_when_told())
        try:
            with LocalJob(self._nranks) as job:
                for rank in range(self._nranks):
                    self._ranks.append(await self._start(job, rank))
            await asyncio.gather(*map(self._attend, range(self._nranks)))
        finally:
            ender.cancel()
            self._signal_all(signal.SIGKILL)
        return self._status

    async def _start(self, job: LocalJob, rank: int) -> Process:
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **self._env, **job.environment(rank)}
        passed = [job.listener.fileno()] if rank == 0 else []
        if passed:
            env[LISTEN_FD_VARIABLE] = str(passed[0])
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                env=env,
                pass_fds=passed,
                preexec_fn=partial(end_with, os.getpid()),
                process_group=0,  # else Ctrl-C in a terminal would reach the ranks twice
            )
        except OSError as exc:
            raise InvalidArgument(f"cannot run {self._command[0]!r}: {exc.strerror}") from exc

    async def _attend(self, rank: int) -> None:
        process = self._ranks[rank]
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = asyncio.gather(
            self._pump(rank, "out", process.stdout), self._pump(rank, "err", process.stderr)
        )
        status = await process.wait()
        if status != 0:
            self._note_failure(rank, status)
        # A grandchild may hold the pipes open forever.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pumps, _TERMINATION_GRACE_S)

    def _note_failure(self, rank: int, status: int) -> None:
        is_first = self._status == 0
        if is_first:
            self._status = status if status > 0 else 128 - status
        # Report only the first failure, which causes the others, unless these may continue.
        if is_first or self._keeps_going:
            print(f"r2ccl launch: rank {rank}: {describe_exit(status)}", file=sys.stderr)
        if not self._keeps_going:
            self._is_ending.set()

    async def _pump(self, rank: int, stream: str, source: asyncio.StreamReader) -> None:
        try:
            while data := await source.read(_CHUNK_NBYTES):
                self._printer.feed(rank, stream, data)
        finally:
            self._printer.finish(rank, stream)

    def _forward(self, number: int) -> None:
        """Forward a signal to all ranks; kill them if they are being ended already."""
        if self._is_ending.is_set():
            self._signal_all(signal.SIGKILL)
            return
        self._signal_all(number)
        self._status = self._status or 128 + number
        self._is_ending.set()

    async def _end_when_told(self) -> None:
        await self._is_ending.wait()
        for number, grace_s in (
            (signal.SIGTERM, _FAILURE_GRACE_S),
            (signal.SIGKILL, _TERMINATION_GRACE_S),
        ):
            await asyncio.sleep(grace_s)
            self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for process in self._ranks:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)


__all__ = ["LinePrinter", "add_parser", "run"]
