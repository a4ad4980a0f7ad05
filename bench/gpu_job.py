"""The ranks of one library on one GPU, alive for many readings; and what is said to them.

As `jobs`, of which several are alive at once and one is measured at a time: between commands every
rank sleeps in a read of its socket. Sees no GPU: only the ranks (`gpu_rank.py`) open it.

Invariants: a rank ends when its socket closes, so also when the bench is killed; what a rank that
fails says reaches the bench in its own words.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import msgspec
from jobs import Unavailable

_RANK = str(Path(__file__).with_name("gpu_rank.py"))
_MESSAGE_NBYTES = 1 << 16
#: torch takes some seconds to import, NCCL some more to connect.
_START_TIMEOUT_S, _READING_TIMEOUT_S = 60.0, 60.0
#: How soon a rank that ended is noticed.
_LOOK_S = 0.5
_LAST_LINES = 8


class Hung(Unavailable):
    """A rank does not answer."""


class Loop(msgspec.Struct, frozen=True, tag=True):
    """Verify one allreduce of fresh inputs, then time `ncalls` of them back to back, in place.

    ``is_exact`` is that of `gpu_inputs.Inputs`.
    """

    dtype: str
    nbytes: int
    ncalls: int
    seed: int
    is_exact: bool


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Verify one allreduce, then time another one of the same inputs, in which a rail is cut.

    The plan of faults, which every rank got at its start, says when.
    """

    dtype: str
    nbytes: int
    seed: int
    is_exact: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank is: its library's version, and how many collectives it has counted already."""

    version: str
    nops: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on."""

    why: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank.

    Attributes
    ----------
    seconds : float
        Of one allreduce.
    nwrong : int
        Elements that are no sum of the inputs.
    ndiffering : int
        Elements whose bits a cut rail changed.
    nops : int
        Collectives the library counts one allreduce of this size as; 0: it does not count.
    nfired, nrepairs : int
        Faults this rank applied meanwhile, and paths it repaired.
    """

    seconds: float
    nwrong: int
    ndiffering: int = 0
    nops: int = 0
    nfired: int = 0
    nrepairs: int = 0


Command = Loop | Cut
Answer = Ready | Broken | Measured
Expected = TypeVar("Expected", Ready, Measured)


class Way(NamedTuple):
    """A library, and how its bytes travel: what is compared.

    ``env`` are the variables of its ranks, ``program`` is what they run.
    """

    name: str
    library: str
    env: Mapping[str, str]
    program: str = _RANK


class Job:
    """The ranks of a `Way`, started and waiting for commands.

    Parameters
    ----------
    way : Way
    nranks : int
    **env : str
        More variables of the ranks.

    Attributes
    ----------
    ready : Ready
        What a rank said.

    Raises
    ------
    Unavailable
        They did not come up; says why, in the words of the first rank that failed.
    """

    def __init__(self, way: Way, nranks: int, **env: str) -> None:
        self.way = way
        self.nranks = nranks
        self.ready = Ready("", 0)
        self._folder = tempfile.TemporaryDirectory(prefix="r2ccl-bench-")
        self._log = Path(self._folder.name, "log")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[socket.socket] = []
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
        try:
            self._start({**way.env, **env})
        except BaseException:
            self.close()
            raise

    def run(self, command: Command) -> list[Measured]:
        """Have every rank do a command; return what each measured.

        Raises
        ------
        Unavailable
            A rank failed or did not answer in time.
        """
        said = msgspec.json.encode(command)
        try:
            for rank in self._ranks:
                rank.send(said)
        except OSError as exc:
            raise self._failed(f"a rank ended ({exc})") from exc
        return self._hear(Measured, _READING_TIMEOUT_S)

    def close(self) -> None:
        """End the ranks: by closing their sockets, else by SIGTERM, else by SIGKILL."""
        for rank in self._ranks:
            rank.close()
        steps = ((10.0 if self._ranks else 0.0, 0), (5.0, signal.SIGTERM), (5.0, signal.SIGKILL))
        for patience_s, number in steps:
            alive = [process for process in self._processes if process.poll() is None]
            for process in alive if number else ():
                os.killpg(process.pid, number)
            until_s = time.monotonic() + patience_s
            for process in alive:
                with suppress(subprocess.TimeoutExpired):  # the next step is harder
                    process.wait(max(0.0, until_s - time.monotonic()))
        self._folder.cleanup()

    def __enter__(self) -> Job:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        self.close()

    def _start(self, env: dict[str, str]) -> None:
        address = str(Path(self._folder.name, "socket"))
        common = {**os.environ, **env, "BENCH_ADDRESS": address}
        # SOCK_SEQPACKET keeps messages apart and tells of a peer's end.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(self.nranks)
            with self._log.open("wb") as log:
                for arguments, extra in self._commands():
                    self._processes.append(
                        subprocess.Popen(
                            arguments,
                            env={**common, **extra},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            self._accept(listener)
        self.ready = self._hear(Ready, _START_TIMEOUT_S)[0]

    def _commands(self) -> list[tuple[list[str], dict[str, str]]]:
        """List the processes to start, each with its own variables."""
        rank = [sys.executable, self.way.program, self.way.library]
        if self.way.library == "r2ccl":
            launch = [sys.executable, "-m", "r2ccl", "launch", "-n", str(self.nranks), "--"]
            return [([*launch, *rank], {})]
        store = str(Path(self._folder.name, "store"))
        common = {"WORLD_SIZE": str(self.nranks), "BENCH_STORE": store}
        return [
            # With another host of its own, a rank may share a GPU with others.
            (rank, {**common, "RANK": str(number), "NCCL_HOSTID": f"r2ccl-bench-{number}"})
            for number in range(self.nranks)
        ]

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_LOOK_S)
        until_s = time.monotonic() + _START_TIMEOUT_S
        while len(self._ranks) < self.nranks:
            try:
                self._ranks.append(listener.accept()[0])
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise self._failed("a rank ended while starting") from None
                if time.monotonic() > until_s:
                    why = self._failed(f"not started after {_START_TIMEOUT_S:g} s")
                    raise Hung(str(why)) from None

    def _hear(self, kind: type[Expected], timeout_s: float) -> list[Expected]:
        """Return the answers of all ranks, or raise what the first that fails says."""
        answers: dict[int, Expected] = {}
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as waiting:
            for number, rank in enumerate(self._ranks):
                waiting.register(rank, selectors.EVENT_READ, number)
            while len(answers) < self.nranks:
                ready = waiting.select(max(0.0, until_s - time.monotonic()))
                if not ready:
                    raise Hung(str(self._failed(f"a rank did not answer in {timeout_s:g} s")))
                for key, _ in ready:
                    rank = self._ranks[key.data]
                    answers[key.data] = self._read(rank, kind)
                    waiting.unregister(rank)
        return [answers[number] for number in range(self.nranks)]

    def _read(self, rank: socket.socket, kind: type[Expected]) -> Expected:
        try:
            said = rank.recv(_MESSAGE_NBYTES)
        except ConnectionResetError:  # it ended without reading what it was told
            said = b""
        if not said:
            raise self._failed("a rank ended")
        answer = self._decoder.decode(said)
        if isinstance(answer, Broken):
            raise Unavailable(answer.why)
        if not isinstance(answer, kind):
            raise self._failed(f"a rank answered {answer}")
        return answer

    def _failed(self, what: str) -> Unavailable:
        said = self._log.read_text(errors="replace").strip().splitlines()
        return Unavailable(f"{what}; its last words: {' / '.join(said[-_LAST_LINES:]) or '(none)'}")


__all__ = [
    "Answer",
    "Broken",
    "Command",
    "Cut",
    "Hung",
    "Job",
    "Loop",
    "Measured",
    "Ready",
    "Way",
]
