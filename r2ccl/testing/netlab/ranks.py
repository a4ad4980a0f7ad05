"""Processes of one job in a lab: `spawn` starts them, `LabJob` reads their output and ends them.

No rank runs after `LabJob.close`, unless `close` raises an error. Background processes that a rank
left behind end with the lab.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.testing.netlab.fabric import LabShape, nic_name
from r2ccl.testing.netlab.namespaces import LabError
from r2ccl.testing.programs import find_program

#: Seconds between SIGTERM and SIGKILL.
TERM_GRACE_S = 2.0

#: Seconds to wait for a process after SIGKILL, which only the kernel can delay.
_KILL_TIMEOUT_S = 10.0

#: Number of 64 KiB reads that empty a pipe of up to 1 MiB. A pipe holds 64 KiB unless a process
#: enlarges it, and without privileges a process can enlarge it to 1 MiB at most (pipe(7)).
_PIPE_READS = 16

_READ_NBYTES = 1 << 16

#: Ports in the environment variables ``MASTER_PORT`` and ``R2CC_PORT`` of the ranks. All labs use
#: the same ports, because each network namespace has its own port space.
MASTER_PORT = 29500
R2CC_PORT = 29501


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Exit status and output of a rank.

    Attributes
    ----------
    rank, node : int
        Number of the rank, and of its node.
    returncode : int
        Exit status; the negative signal number if a signal ended the rank, as in `subprocess`.
    is_timed_out : bool
        True if the rank was ended because it ran longer than the time limit.
    output : str
        Output of the rank that `LabJob.stream` read: stdout, and stderr too unless the rank was
        started by `Lab.start`. `LabJob.wait` leaves it empty.
    """

    rank: int
    node: int
    returncode: int
    is_timed_out: bool = False
    output: str = ""


class RankProcess(msgspec.Struct, eq=False):
    """Process of a rank; after `Lab.start`, `popen` has pipes to its stdin and stdout."""

    rank: int
    node: int
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self.popen.pid


class LabJob:
    """Ranks of one run; a context manager that ends them on exit.

    Parameters
    ----------
    on_close : callable
        Called once, at the end of `close`, even if a rank could not be ended.

    Attributes
    ----------
    ranks : list of RankProcess
        In order of rank.
    """

    def __init__(self, on_close: Callable[[], None]) -> None:
        self.ranks: list[RankProcess] = []
        self._on_close = on_close
        self._is_closed = False

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank; do nothing if the rank has ended."""
        self.ranks[rank].popen.send_signal(number)

    def wait(self, timeout_s: float) -> list[RankResult]:
        """Wait for all ranks; after `timeout_s` seconds, end those that still run.

        Return the results of all ranks, in order of rank. Afterwards the job and its pipes are
        closed. If the ranks have pipes, another thread must read them, because a rank blocks when
        its stdout is full.

        Raises
        ------
        LabError
            If a process does not end in time after SIGKILL, or the thread that applies the lab's
            faults does not answer in time.
        """
        return self._watch(timeout_s, None)

    def stream(self, timeout_s: float, sink: Callable[[int, str], None]) -> list[RankResult]:
        """Wait as `wait` does, and call ``sink(rank, line)`` for each line of output.

        The calling thread reads the ranks' pipes and calls `sink` as soon as a line arrives.

        Raises
        ------
        LabError
            If a process does not end in time after SIGKILL, or the thread that applies the lab's
            faults does not answer in time.
        """
        return self._watch(timeout_s, sink)

    def close(self) -> None:
        """End the ranks that still run, and close the pipes of all ranks.

        A rank that still runs gets SIGTERM and, if it has not ended after `TERM_GRACE_S`, SIGKILL.
        A second call does nothing.

        Raises
        ------
        LabError
            If a process does not end in time after SIGKILL, or the thread that applies the lab's
            faults does not answer in time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._end_ranks()
        finally:
            self._on_close()

    def _end_ranks(self) -> None:
        alive = [each.popen for each in self.ranks if each.popen.poll() is None]
        for popen in alive:
            _terminate(popen)
        alive = _wait_for(alive, TERM_GRACE_S)
        for popen in alive:
            _signal_group(popen, signal.SIGKILL)
        alive = _wait_for(alive, _KILL_TIMEOUT_S)
        for each in self.ranks:
            for pipe in (each.popen.stdin, each.popen.stdout):
                if pipe is not None:
                    # Closing flushes the pipe, which fails if the process has ended.
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        if alive:
            raise LabError(
                f"processes {[popen.pid for popen in alive]} did not end within "
                f"{_KILL_TIMEOUT_S:g} s of SIGKILL: look at /proc/PID/stack, they may hang in the "
                "kernel"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _watch(self, timeout_s: float, sink: Callable[[int, str], None] | None) -> list[RankResult]:
        deadline = time.monotonic() + timeout_s
        readers = [_LineReader(each, sink) for each in self.ranks] if sink else []
        late: set[int] = set()
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            for reader in readers:
                selector.register(reader.fileno(), selectors.EVENT_READ, reader)
            running = [each for each in self.ranks if each.popen.poll() is None]
            for each in running:
                pidfd = os.pidfd_open(each.pid)
                stack.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ, each)
            nrunning = _read_until(deadline, selector, len(running))
            if nrunning:
                late = {each.rank for each in self.ranks if each.popen.poll() is None}
                # Read on: a rank may write when it gets SIGTERM, and blocks if its pipe is full.
                for each in self.ranks:
                    _terminate(each.popen)
                nrunning = _read_until(time.monotonic() + TERM_GRACE_S, selector, nrunning)
                for each in self.ranks:
                    _signal_group(each.popen, signal.SIGKILL)
                _read_until(time.monotonic() + _KILL_TIMEOUT_S, selector, nrunning)
        for reader in readers:
            reader.finish()
        self.close()
        outputs = {reader.rank: reader.text() for reader in readers}
        return [
            RankResult(
                rank=each.rank,
                node=each.node,
                returncode=each.popen.returncode,
                is_timed_out=each.rank in late,
                output=outputs.get(each.rank, ""),
            )
            for each in self.ranks
        ]


def _read_until(deadline: float, selector: selectors.BaseSelector, running: int) -> int:
    """Read output and reap ranks until all `running` ranks have ended, or until `deadline`.

    Return the number of ranks that still run.
    """
    while running and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            if isinstance(key.data, RankProcess):
                key.data.popen.wait()
                running -= 1
                selector.unregister(key.fd)
            elif not key.data.read():
                selector.unregister(key.fd)
    return running


class _LineReader:
    """Reader of a rank's output that does not block and passes whole lines to a sink."""

    def __init__(self, process: RankProcess, sink: Callable[[int, str], None]) -> None:
        assert process.popen.stdout is not None
        self.rank = process.rank
        self._sink = sink
        self._pipe = process.popen.stdout
        self._tail = b""
        self._all = io.BytesIO()
        os.set_blocking(self.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self) -> bool:
        """Read one piece of output; return False at the end of the output, or if none is ready."""
        try:
            data = os.read(self.fileno(), _READ_NBYTES)
        except BlockingIOError:
            return False
        self._all.write(data)
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            self._sink(self.rank, line.decode(errors="replace"))
        return bool(data)

    def finish(self) -> None:
        """Read the rest of the pipe, and pass on the last line even if it has no newline.

        The number of reads is limited, because a child process of the rank may write forever.
        """
        for _ in range(_PIPE_READS):
            if not self.read():
                break
        if self._tail:
            self._sink(self.rank, self._tail.decode(errors="replace"))
            self._tail = b""

    def text(self) -> str:
        return self._all.getvalue().decode(errors="replace")


def check_argv(argv: Sequence[str]) -> None:
    """Raise InvalidArgument if `argv` is a string instead of a list."""
    if isinstance(argv, str):
        raise InvalidArgument(f"argv={argv!r}: pass a list, [sys.executable, {argv!r}]")


def spawn(
    namespace: str, argv: Sequence[str], env: Mapping[str, str], *, is_interactive: bool
) -> subprocess.Popen[bytes]:
    """Start a program in a namespace; the result has the pid of the program itself.

    If `is_interactive`, the program has pipes for stdin and stdout, and the stderr of this process.
    Otherwise it has one pipe for both stdout and stderr, and an empty stdin.
    """
    return subprocess.Popen(
        [find_program("ip") or "ip", "netns", "exec", namespace, *argv],
        env=dict(env),
        stdin=subprocess.PIPE if is_interactive else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if is_interactive else subprocess.STDOUT,
        # Keep Ctrl-C from the ranks, which the lab's process ends itself. The session also makes
        # a rank and its children a process group that can be signaled together.
        start_new_session=True,
    )


def _terminate(popen: subprocess.Popen[bytes]) -> None:
    _signal_group(popen, signal.SIGTERM)
    # A stopped process handles SIGTERM only after SIGCONT.
    _signal_group(popen, signal.SIGCONT)


def _wait_for(
    processes: Sequence[subprocess.Popen[bytes]], timeout_s: float
) -> list[subprocess.Popen[bytes]]:
    """Wait up to `timeout_s` for all processes; return the processes that have not ended."""
    deadline = time.monotonic() + timeout_s
    for popen in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(max(0.0, deadline - time.monotonic()))
    return [popen for popen in processes if popen.returncode is None]


def _signal_group(popen: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a rank and its children, unless the rank was reaped: its pid may be reused."""
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, number)


def rank_environment(shape: LabShape, node: int, local_rank: int, secret: Path) -> dict[str, str]:
    """Return the environment variables of one rank.

    Parameters
    ----------
    shape : LabShape
    node, local_rank : int
    secret : Path
        File with the job's secret, which only its owner can read.
    """
    rails = ",".join(nic_name(rail) for rail in range(shape.rails))
    return {
        "RANK": str(node * shape.ranks_per_node + local_rank),
        "WORLD_SIZE": str(shape.nranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(shape.ranks_per_node),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": shape.management_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "R2CC_PORT": str(R2CC_PORT),
        "R2CC_SECRET_FILE": str(secret),
        "R2CC_CONTROL_ADDRESS": shape.management_address(node),
        # NCCL's syntax: after a leading "=" all names of the list must match exactly.
        "R2CC_SOCKET_IFNAME": f"={rails}",
    }


__all__ = [
    "MASTER_PORT",
    "R2CC_PORT",
    "TERM_GRACE_S",
    "LabJob",
    "RankProcess",
    "RankResult",
    "check_argv",
    "rank_environment",
    "spawn",
]
