"""The ranks of one library on one GPU, alive for many readings; and what is said to them.

As `jobs`, of which several are alive at once and one is measured at a time: between commands every
rank sleeps in a read of its socket. Sees no GPU: only the ranks (`gpu_rank.py`) open it.

Invariants: a rank ends when its socket closes, so also when the bench is killed; what a rank that
fails says reaches the bench in its own words.
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
#: torch takes some seconds to import, NCCL some more to connect.
_START_TIMEOUT_S, _READING_TIMEOUT_S = 60.0, 60.0
_LAST_LINES = 8


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


class Job(Ranks):
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

    def _commands(self) -> list[ToStart]:
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
