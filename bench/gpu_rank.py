"""One rank of r2ccl or NCCL, measured on a GPU that it shares; `gpu_job` starts it.

The rank connects to the bench, opens the GPU and the library, reports that it is ready, and runs
commands until the connection ends. Between commands it sleeps in a read. It imports only the
library that it measures.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from gpu_card import Array, Bytes, Card, Memory, open_card
from gpu_inputs import Inputs, differing, named
from gpu_job import Answer, Broken, Command, Cut, Loop, Measured, Ready
from gpu_peers import torch_view

from r2ccl.failover.health.table import WHOLE

#: The only GPU: CUDA_VISIBLE_DEVICES chooses it.
_ORDINAL = 0
_MESSAGE_NBYTES = 1 << 16
#: Number of characters of an error message that are sent to the bench.
_MOST_WORDS = 8000
#: Longest time until a rail that was cut is used again, and interval of checks, in seconds.
_MENDED_S, _LOOK_S = 20.0, 0.01


class History(NamedTuple):
    """Numbers of collectives, applied faults and repaired paths since the library was opened."""

    nops: int = 0
    nfired: int = 0
    nrepairs: int = 0


class Group(NamedTuple):
    """The functions of a library's communicator that the bench needs.

    ``allreduce_of(memory)`` returns a callable that enqueues an in-place sum of the memory on the
    card's stream. ``barrier()`` returns when all ranks have called it, ``mend()`` when all rails
    are in use again.
    """

    version: str
    rank: int
    nranks: int
    barrier: Callable[[], object]
    allreduce_of: Callable[[Memory], Callable[[], object]]
    history: Callable[[], History] = History
    mend: Callable[[], object] = lambda: None


@contextmanager
def open_r2ccl(card: Card) -> Iterator[Group]:
    """Open a communicator of r2ccl from the launcher's environment.

    ``BENCH_FAULTS`` has the fault plan.
    """
    import r2ccl
    from r2ccl.testing import FaultPlan

    plan = FaultPlan.from_json(os.environ.get("BENCH_FAULTS", "[]"))
    with r2ccl.init(faults=plan if plan.faults else None) as comm:
        first = comm.ncalls
        yield Group(
            r2ccl.__version__,
            comm.rank,
            comm.nranks,
            comm.barrier,
            lambda memory: lambda: comm.allreduce(memory, stream=card.stream),
            lambda: History(comm.ncalls - first, len(plan.fired), len(comm.repairs())),
            lambda: _mend(comm),
        )


def _mend(comm: Any) -> None:
    """Wait until every rail is in use again, and all ranks have agreed to plan with it.

    Raises
    ------
    TimeoutError
        If a rail is not in use again in time.
    """
    until_s = time.monotonic() + _MENDED_S
    while not _is_whole(comm):
        if time.monotonic() > until_s:
            raise TimeoutError(f"a cut rail is not back after {_MENDED_S:g} s: {comm.health()}")
        time.sleep(_LOOK_S)


def _is_whole(comm: Any) -> bool:
    agreed = comm.known_health().health.shares
    return min(agreed) == WHOLE and all(rail.state == "up" for rail in comm.health().rails)


@contextmanager
def open_nccl(card: Card) -> Iterator[Group]:
    """Open a process group of torch with NCCL; the ranks meet through a file."""
    import torch
    from torch import distributed as dist

    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise RuntimeError(f"torch {torch.__version__} cannot use CUDA or NCCL here")
    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", card.device.ordinal)
    torch.cuda.set_device(device)
    store = dist.FileStore(os.environ["BENCH_STORE"], nranks)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=nranks, timeout=patience)

    def barrier() -> None:
        dist.barrier(device_ids=[device.index])
        card.finish()

    def allreduce_of(memory: Memory) -> Callable[[], object]:
        tensor = torch_view(torch, memory, device)
        return lambda: dist.all_reduce(tensor)

    version = ".".join(map(str, torch.cuda.nccl.version()))
    with torch.cuda.stream(torch.cuda.ExternalStream(card.stream, device=device)):
        yield Group(f"{version}, torch {torch.__version__}", rank, nranks, barrier, allreduce_of)
        dist.destroy_process_group()


_OPEN: dict[str, Callable[[Card], AbstractContextManager[Group]]] = {
    "r2ccl": open_r2ccl,
    "nccl": open_nccl,
}


class Rank:
    """Runs the commands of the bench, with memory for the largest allreduce.

    Parameters
    ----------
    card : Card
    group : Group
    nbytes : int
        Size of the largest allreduce in bytes.
    """

    def __init__(self, card: Card, group: Group, nbytes: int) -> None:
        self._card = card
        self._group = group
        self._address = card.device.allocate(nbytes)

    def connect(self) -> Ready:
        """Run a first allreduce, in which libraries connect and select their transports."""
        memory = Memory(self._address, 1, named("float32"))
        self._group.allreduce_of(memory)()
        self._card.finish()
        self._group.barrier()
        return Ready(self._group.version, self._group.history().nops)

    def do(self, command: Command) -> Measured:
        """Run a command and return its measurements."""
        dtype = named(command.dtype)
        count = command.nbytes // dtype.itemsize
        inputs = Inputs(
            dtype, self._group.nranks, count, (command.seed, command.nbytes),
            self._card.block_nbytes, is_exact=command.is_exact,
        )  # fmt: skip
        call = self._group.allreduce_of(Memory(self._address, count, dtype))
        if isinstance(command, Loop):
            return self._loop(command, inputs, call)
        return self._cut(command, inputs, call)

    def _loop(self, command: Loop, inputs: Inputs, call: Callable[[], object]) -> Measured:
        """Time calls after a verified one. They add up sums, which takes the same time."""
        nops, nwrong = self._verify(command, inputs, call)
        seconds = self._time(call, command.ncalls) / command.ncalls
        return Measured(seconds, nwrong, nops=nops)

    def _cut(self, command: Cut, inputs: Inputs, call: Callable[[], object]) -> Measured:
        """Time a call during which a rail is cut; compare its result with a verified one."""
        self._group.mend()
        self._group.barrier()
        _, nwrong = self._verify(command, inputs, call)
        whole = self._read(inputs)
        inputs.place(self._card, self._group.rank, self._address)
        before = self._group.history()
        seconds = self._time(call, 1)
        after = self._group.history()
        return Measured(
            seconds,
            nwrong,
            differing(whole, self._read(inputs)),
            nfired=after.nfired - before.nfired,
            nrepairs=after.nrepairs - before.nrepairs,
        )

    def _verify(
        self, command: Command, inputs: Inputs, call: Callable[[], object]
    ) -> tuple[int, int]:
        """Call once; return the number of collectives that ran, and of wrong elements."""
        inputs.place(self._card, self._group.rank, self._address)
        before = self._group.history().nops
        call()
        self._card.finish()
        nops = self._group.history().nops - before
        nwrong = inputs.count_wrong_sums(self._card, self._address, is_exact=command.is_exact)
        return nops, nwrong

    def _time(self, call: Callable[[], object], ncalls: int) -> float:
        """Return the seconds of `ncalls` calls back to back, measured from a barrier."""
        self._group.barrier()
        begun_s = time.perf_counter()
        for _ in range(ncalls):
            call()
        self._card.finish()
        return time.perf_counter() - begun_s

    def _read(self, inputs: Inputs) -> Array:
        """Return a host copy of the result."""
        result = np.empty(inputs.nbytes, np.uint8)
        nbytes = self._card.block_nbytes

        def keep(number: int, block: Bytes) -> int:
            result[number * nbytes : number * nbytes + block.size] = block
            return 0

        self._card.examine(self._address, inputs.nbytes, keep)
        return result.view(inputs.dtype)


def serve(bench: socket.socket, rank: Rank) -> None:
    """Run commands until the bench closes the connection; answer `Broken` to one that fails."""
    decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
    while said := bench.recv(_MESSAGE_NBYTES):
        try:
            answer: Answer = rank.do(decoder.decode(said))
        except Exception as exc:
            answer = _broken(exc)
        bench.send(msgspec.json.encode(answer))


def _broken(exc: Exception) -> Broken:
    return Broken(f"{type(exc).__name__}: {exc}"[:_MOST_WORDS])


def main() -> None:
    """Run the commands of the bench with the library that the command line names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bench:
        bench.connect(os.environ["BENCH_ADDRESS"])
        try:
            with open_card(_ORDINAL) as card, _OPEN[sys.argv[1]](card) as group:
                rank = Rank(card, group, int(os.environ["BENCH_NBYTES"]))
                bench.send(msgspec.json.encode(rank.connect()))
                serve(bench, rank)
        except Exception as exc:
            with suppress(OSError):  # the bench may have ended
                bench.send(msgspec.json.encode(_broken(exc)))
            raise


if __name__ == "__main__":
    main()
