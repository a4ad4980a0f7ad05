"""Start of ranks on several hosts by agents: the launcher's side of `r2ccl.cli.agentlink`.

A start has four steps:

1. The launcher starts the agents of all hosts and waits for their greetings.
2. If there is a second host, its agent resolves the name by which the hosts reach the first host,
   because a host often has a loopback address for its own name.
3. The agent of the first host opens the socket of the rendezvous.
4. All agents start their ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from r2ccl.bootstrap.auth import SECRET_NBYTES
from r2ccl.bootstrap.launch import JobShare, describe_exit
from r2ccl.bootstrap.orphans import end_with
from r2ccl.cli.agentlink import (
    GREETING,
    AgentLink,
    FromAgent,
    Input,
    InputTaken,
    LinkEnded,
    Listen,
    Listening,
    Output,
    RankEnded,
    Refused,
    Resolve,
    Resolved,
    SendSignal,
    Start,
    Started,
    ToAgent,
)
from r2ccl.cli.hosts import JobHost
from r2ccl.cli.rankprocs import TERMINATION_GRACE_S, JobCommand
from r2ccl.cli.supervisor import Supervisor
from r2ccl.config import VERSION
from r2ccl.errors import InvalidArgument, R2cclError

_T = TypeVar("_T")

#: Time limit in seconds for the agent of a host to answer; it includes the login.
_LOGIN_S = 60.0
#: Time limit in seconds for the process of an agent, usually ssh, to end after its link was closed.
_CLOSE_S = TERMINATION_GRACE_S + 1.0


class RemoteRanks:
    """Ranks of a job on one host, started and watched by the agent there; a `RankGroup`.

    Parameters
    ----------
    host : JobHost
    first, count : int
        First rank of the host, and number of its ranks.
    supervisor : Supervisor
        Receives the output and the exit statuses.
    """

    def __init__(self, host: JobHost, first: int, count: int, supervisor: Supervisor) -> None:
        self.host = host
        self.first = first
        self.count = count
        self._supervisor = supervisor
        self._process: Process | None = None
        self._link: AgentLink[FromAgent] | None = None
        self._left = set(range(first, first + count))
        self._input_taken = asyncio.Event()

    async def open(self, ssh: Sequence[str], python: str) -> None:
        """Start the agent and wait for its greeting; print the lines before it on standard error.

        Raises
        ------
        InvalidArgument
            If the first word of `ssh` is not a command that can be run.
        R2cclError
            If the agent does not answer within `_LOGIN_S`, ends, or is of another version.
        """
        agent = ("-m", "r2ccl", "launch", "--agent")
        if self.host.is_here:
            command: tuple[str, ...] = (sys.executable, *agent)
        else:
            command = (*ssh, self.host.name, shlex.join((python, *agent)))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                preexec_fn=partial(end_with, os.getpid()),
                start_new_session=True,  # no Ctrl-C reaches ssh, and ssh cannot ask
            )
        except OSError as exc:
            raise InvalidArgument(f"cannot run {command[0]!r}: {exc.strerror}") from exc
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_LOGIN_S):
                await self._greet(process.stdout)
        except TimeoutError:
            raise R2cclError(
                f"host {self.host.name}: no agent answered within {_LOGIN_S:g} s: try "
                f"`{shlex.join(command)}`, which must print {GREETING.decode().strip()!r}"
            ) from None
        except EOFError:
            with contextlib.suppress(TimeoutError):  # the agent may run on after its output ended
                await asyncio.wait_for(process.wait(), _CLOSE_S)
            status = describe_exit(process.returncode)
            self._kill()
            raise R2cclError(
                f"host {self.host.name}: the agent did not start ({command[0]}: {status}): try "
                f"`{shlex.join(command)}`, which must print {GREETING.decode().strip()!r}; r2ccl "
                "must be installed there for the Python that --python names, and ssh must not ask "
                "for a password"
            ) from None
        self._link = AgentLink(FromAgent, process.stdout, process.stdin)

    async def _greet(self, stream: asyncio.StreamReader) -> None:
        name, _, _ = GREETING.rpartition(b" ")
        while line := await self._line(stream):
            if line == GREETING:
                return
            if line.startswith(name):
                raise R2cclError(
                    f"host {self.host.name} has {line.decode(errors='replace').strip()}, this host "
                    f"has version {VERSION}: install the same version of r2ccl on all hosts"
                )
            # The login shell of some hosts prints something.
            text = line.decode(errors="replace").rstrip()
            print(f"r2ccl launch: host {self.host.name}: {text}", file=sys.stderr)
        raise EOFError

    async def _line(self, stream: asyncio.StreamReader) -> bytes:
        try:
            return await stream.readline()
        except ValueError as exc:  # longer than the buffer
            raise EOFError from exc

    async def ask(self, question: ToAgent, kind: type[_T]) -> _T:
        """Send a request and return the answer, whose type is `kind`.

        Raises
        ------
        InvalidArgument
            If the agent refuses.
        R2cclError
            If the connection to the agent ends.
        """
        assert self._link is not None
        await self._link.send(question)
        try:
            answer = await self._link.receive()
        except LinkEnded as exc:
            raise R2cclError(
                f"host {self.host.name}: the connection to its agent ended during the start "
                f"({exc}): look at the messages above"
            ) from exc
        if isinstance(answer, Refused):
            raise InvalidArgument(f"host {self.host.name}: {answer.text}")
        assert isinstance(answer, kind), answer
        return answer

    async def attend(self) -> None:
        """Pass the ranks' output and exit statuses to the supervisor until the link ends.

        Then report the ranks whose exit status has not arrived as lost.
        """
        assert self._link is not None
        try:
            while True:
                message = await self._link.receive()
                if isinstance(message, Output):
                    await self._supervisor.output(message.rank, message.stream, message.data)
                elif isinstance(message, RankEnded):
                    self._left.discard(message.rank)
                    await self._supervisor.ended(message.rank, message.status)
                elif isinstance(message, InputTaken):
                    self._input_taken.set()
        except LinkEnded as exc:
            self._input_taken.set()
            if self._left:
                self._supervisor.lost(sorted(self._left), self.host.name, f"its agent: {exc}")

    async def feed(self, data: bytes) -> None:
        """Send standard input for rank 0; wait until the agent is ready for more, or is lost."""
        assert self._link is not None
        self._input_taken.clear()
        await self._link.send(Input(data))
        await self._input_taken.wait()

    def signal(self, number: int) -> None:
        """Have the agent send a signal to its ranks.

        After SIGKILL, also kill the process that `open` started (ssh or, if the ranks are on this
        host, the agent itself) if that process has not ended within `TERMINATION_GRACE_S`.
        """
        if self._link is not None:
            self._link.post(SendSignal(number))
        if number == signal.SIGKILL and self._process is not None:
            asyncio.get_running_loop().call_later(TERMINATION_GRACE_S, self._kill)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Close the link, so that the agent ends its remaining ranks, and wait for its process.

        The process, which `open` started, is killed if it does not end within `_CLOSE_S`, and at
        once if the agent has not answered.
        """
        if self._link is not None:
            await self._link.close()
        if self._process is None:
            return
        if self._link is None:
            self._kill()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        except TimeoutError:
            self._kill()
            await self._process.wait()


async def start(
    groups: Sequence[RemoteRanks],
    program: JobCommand,
    *,
    ssh: Sequence[str],
    python: str,
    address: str,
    port: int,
) -> None:
    """Start an agent on every host, and have the agents start all ranks.

    Parameters
    ----------
    groups : sequence of RemoteRanks
        In the order of their ranks.
    program : JobCommand
    ssh : sequence of str
        Command that logs in: it gets the host and a command line for the shell of that host.
    python : str
        Python interpreter on every host except the launcher's own, where it is ``sys.executable``.
    address : str
        Name or address by which the ranks of all hosts reach the first host of `groups`; not used
        if there is only one host.
    port : int
        Port of the rendezvous; 0 selects a free port.

    Raises
    ------
    InvalidArgument
        If the command in `ssh` cannot be run, or a host cannot resolve `address`, use the port, run
        the program or enter the working directory.
    R2cclError
        If the agent of a host cannot be started, or ends during the start.
    """
    await asyncio.gather(*(group.open(ssh, python) for group in groups))
    numeric = "127.0.0.1"
    if len(groups) > 1:
        numeric = (await groups[1].ask(Resolve(address), Resolved)).address
    found = await groups[0].ask(Listen(numeric, port), Listening)
    nranks, secret = sum(group.count for group in groups), secrets.token_hex(SECRET_NBYTES)
    shares = (
        JobShare(nranks, group.first, group.count, numeric, found.port, secret) for group in groups
    )
    orders = (Start.of(share, program) for share in shares)
    await asyncio.gather(
        *(group.ask(order, Started) for group, order in zip(groups, orders, strict=True))
    )


__all__ = ["RemoteRanks", "start"]
