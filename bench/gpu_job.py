"""Starts the ranks of one library on one GPU, and exchanges commands and answers with them.

A job stays alive for many measurements. Several jobs are alive at once, and one is measured at a
time: between commands every rank sleeps in a read of its socket. Only the ranks (`gpu_rank.py`)
open the GPU.

Invariants: a rank ends when its socket closes, and thus also when the bench is killed; the error
message of a rank that fails reaches the bench unchanged.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from jobs import Hung, Ranks, ToStart, Unavailable

_RANK = str(Path(__file__).with_name("gpu_rank.py"))
_MESSAGE_NBYTES = 1 << 16
#: Time limits in seconds. The import of torch takes some seconds, NCCL's connecting some more.
_START_TIMEOUT_S, _READING_TIMEOUT_S = 60.0, 60.0
_LAST_LINES = 8


class Loop(msgspec.Struct, frozen=True, tag=True):
    """Command to verify one allreduce of fresh inputs, then time `ncalls` in-place allreduces.

    ``is_exact`` is an argument of `gpu_inputs.Inputs`.
    """

    dtype: str
    nbytes: int
    ncalls: int
    seed: int
    is_exact: bool


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Command to verify one allreduce, then time another of the same inputs while a rail is cut.

    The fault plan, which every rank receives at its start, defines the moment of the cut.
    """

    dtype: str
    nbytes: int
    seed: int
    is_exact: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Message that a rank is ready: its library's version, and its number of collectives so far."""

    version: str
    nops: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Message that a command failed, or that a rank cannot start."""

    why: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank to a command.

    Attributes
    ----------
    seconds : float
        Time of one allreduce.
    nwrong : int
        Number of elements that are not a sum of the inputs.
    ndiffering : int
        Number of elements whose bits a cut rail changed.
    nops : int
        Number of collectives that the library counts for one allreduce of this size; 0 if it does
        not count them.
    nfired, nrepairs : int
        Number of faults that this rank applied, and of paths that it repaired, in the timed call.
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
    """A configuration to compare: a library, and the transport that it uses.

    ``env`` has the environment variables of the ranks; ``program`` is the script that they run.
    """

    name: str
    library: str
    env: Mapping[str, str]
    program: str = _RANK


class Job(Ranks):
    """The ranks of a `Way`, started and waiting for commands.

    Parameters
    ----------
    way : Way
    nranks : int
    **env : str
        Additional environment variables of the ranks.

    Attributes
    ----------
    ready : Ready
        Message with which rank 0 reported that it was ready.

    Raises
    ------
    Unavailable
        If the ranks did not start, with the error message of the first rank that failed.
    """

    def __init__(self, way: Way, nranks: int, **env: str) -> None:
        super().__init__(nranks, _LAST_LINES)
        self.way = way
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
        try:
            self._start(self._commands(), {**way.env, **env})
            self.ready = self._hear(Ready, _START_TIMEOUT_S)[0]
        except BaseException:
            self.close()
            raise

    def run(self, command: Command) -> list[Measured]:
        """Run a command on every rank; return their measurements in the order of ranks.

        Raises
        ------
        Unavailable
            If a rank failed or did not answer in time.
        """
        said = msgspec.json.encode(command)
        try:
            for rank in self._ranks:
                rank.send(said)
        except OSError as exc:
            raise self._failed(f"a rank ended ({exc})") from exc
        return self._hear(Measured, _READING_TIMEOUT_S)

    def _commands(self) -> list[ToStart]:
        """List the processes to start, each with its environment variables."""
        rank = [sys.executable, self.way.program, self.way.library]
        if self.way.library == "r2ccl":
            launch = [sys.executable, "-m", "r2ccl", "launch", "-n", str(self.nranks), "--"]
            return [([*launch, *rank], {})]
        store = str(Path(self._folder.name, "store"))
        common = {"WORLD_SIZE": str(self.nranks), "BENCH_STORE": store}
        return [
            # NCCL lets ranks share a GPU only if it takes them to be on different hosts.
            (rank, {**common, "RANK": str(number), "NCCL_HOSTID": f"r2ccl-bench-{number}"})
            for number in range(self.nranks)
        ]

    def _hear(self, kind: type[Expected], timeout_s: float) -> list[Expected]:
        """Return the answers of all ranks, or raise the error of the first rank that fails."""
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
        except ConnectionResetError:  # the rank ended without reading the command
            said = b""
        if not said:
            raise self._failed("a rank ended")
        answer = self._decoder.decode(said)
        if isinstance(answer, Broken):
            raise Unavailable(answer.why)
        if not isinstance(answer, kind):
            raise self._failed(f"a rank answered {answer}")
        return answer


__all__ = [
    "Answer",
    "Broken",
    "Command",
    "Cut",
    "Job",
    "Loop",
    "Measured",
    "Ready",
    "Way",
]
