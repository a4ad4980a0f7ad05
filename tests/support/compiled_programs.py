"""Programs of ranks whose calls leave compiled code after some number of events."""

from __future__ import annotations

import ctypes
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import r2ccl
from r2ccl import Communicator
from r2ccl.runtime.compiled.call import CompiledCalls

#: Numbers of elements, in calls of all collectives: eager slices of two kinds, one slice, several.
COUNTS = (1, 77, 700, 40_001, 700_001)


def compiled_of(comm: Communicator) -> CompiledCalls:
    """Return what runs the calls of a communicator in compiled code."""
    found = comm._engine._loop.compiled
    assert found is not None
    return found


def mixture(limit: int, ncalls: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Run collectives; return the number of wrong ones, and of calls that ended in and left it.

    Calls leave compiled code after `limit` events; 0: not for that reason.
    """
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1", **settings) as comm:
        compiled = compiled_of(comm)
        compiled.limit = limit
        n, rank = comm.nranks, comm.rank
        for number in range(ncalls):
            count = COUNTS[number % len(COUNTS)]
            parts = [_data(number, each, count * n) for each in range(n)]
            heads = [each[:count] for each in parts]
            root = number % n
            mine = heads[rank].copy()
            comm.broadcast(mine, root=root)
            gathered = comm.allgather(heads[rank].copy()).reshape(n, -1)
            exchanged = comm.alltoall(parts[rank].copy()).reshape(n, -1)
            scattered = comm.reduce_scatter(parts[rank].copy()).reshape(-1)
            in_place = heads[rank].copy()
            comm.allreduce(in_place)
            prefix = comm.scan(heads[rank].copy())
            own = [each.reshape(n, -1)[rank] for each in parts]
            nwrong += not np.array_equal(mine, heads[root])
            nwrong += not np.array_equal(gathered, np.array(heads))
            nwrong += not np.array_equal(exchanged, np.array(own))
            nwrong += not np.array_equal(scattered, sum(own))
            nwrong += not np.array_equal(in_place, sum(heads))
            nwrong += not np.array_equal(prefix, sum(heads[: rank + 1]))
            comm.barrier()
        return nwrong, compiled.nfinished, compiled.nleft


def _data(number: int, rank: int, count: int) -> np.ndarray[Any, Any]:
    """Return small integers, whose sums are exact in every order."""
    return np.random.default_rng((number, rank)).integers(-99, 99, count).astype(np.float32)


def unread(ncalls: int) -> int:
    """Broadcast eager slices to a rank that is late; return the number of wrong results.

    The sockets take only a part of each slice, so calls of the root end before their data is sent.
    """
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1") as comm:
        for conn in comm._engine._loop._transport._by_path.values():
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        comm.barrier()
        if comm.rank:
            time.sleep(0.3)
        for number in range(ncalls):
            expected = _data(number, 0, 15_000)
            x = expected.copy() if comm.rank == 0 else np.zeros_like(expected)
            comm.broadcast(x, root=0)
            nwrong += not np.array_equal(x, expected)
        return nwrong


def refused() -> tuple[int, int]:
    """Reduce while no connection can be lent to compiled code.

    Return the number of programs that needed scratch memory, and of those that refer to arrays.
    """
    with r2ccl.init(shm="0", compiled="1", algo="one_shot") as comm:
        compiled = compiled_of(comm)
        transport: Any = compiled._transport
        transport.lend = lambda paths: None
        comm.allreduce(np.ones(700_001, np.float32))
        programs = [program for _, program in compiled._programs.values() if program is not None]
        kept = [program for program in programs if program.call is not None]
        return sum(each.layout.uses_scratch for each in programs), len(kept)


def repeated(limit: int, ncalls: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Repeat calls; return the number of wrong ones, of repetitions, and of calls that left it.

    Each call is repeated some times in succession, with other data, other arrays of the same form,
    late ranks, and, now and then, reports of the status and calls of another communicator between.
    """
    nwrong = 0
    with (
        r2ccl.init(shm="0", compiled="1", **settings) as comm,
        comm.dup() as other,
        counted_repeats(comm) as repeats,
    ):
        compiled = compiled_of(comm)
        compiled.limit = limit
        n, rank = comm.nranks, comm.rank
        chance = random.Random(limit)  # equal on all ranks
        for number in range(ncalls):
            count = COUNTS[number % (len(COUNTS) - 1)]
            for again in range(chance.randrange(3, 25)):
                parts = [_data(again + 25 * number, each, count) for each in range(n)]
                late, root = chance.randrange(40), chance.randrange(n)
                if late == rank:
                    time.sleep(0.01)
                x, out = parts[rank].copy(), np.empty(count, np.float32)
                if number % 3 == 0:
                    result = comm.allreduce(x, out)
                    nwrong += result is not out or not np.array_equal(x, parts[rank])
                    expected = sum(parts)
                elif number % 3 == 1:
                    result, expected = comm.allreduce(x, op=r2ccl.MAX), np.max(parts, axis=0)
                else:
                    root = number % n
                    result, expected = comm.broadcast(x, root=root), parts[root]
                nwrong += not np.array_equal(result, expected)
                if chance.random() < 0.05:
                    nwrong += not np.array_equal(other.allreduce(np.ones(3)), np.full(3, n))
                if chance.random() < 0.05:
                    comm.health()
        return nwrong, len(repeats), compiled.nleft


def reset(fd: int) -> None:
    """Reset a connection; what the kernel has received and not passed on is lost."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.connect(fd, bytes(16), 16):  # address family AF_UNSPEC
        raise OSError(ctypes.get_errno(), "connect")


def cut_first_rail(comm: Communicator, pick: float) -> None:
    """Wait until the peers have sent slices, then reset a connection of rail 0, which loses them.

    `pick`, from 0 to 1, chooses the connection.
    """
    time.sleep(0.005)
    paths = comm._engine._loop._transport._by_path
    used = [conn for path, conn in paths.items() if path.rail == 0]
    reset(used[int(pick * len(used))].fd)


def repeated_beside_a_cut(seed: int, ncalls: int) -> tuple[int, int, int]:
    """Repeat calls while a path fails; return the number of wrong ones, repetitions and repairs.

    Before one of the calls, a rank waits until its peers have sent slices, and then resets a
    connection, so that these slices are lost.
    """
    chance = random.Random(seed)  # equal on all ranks
    is_broadcast, count = chance.random() < 0.5, chance.choice(COUNTS[:4])
    cut, pick = chance.randrange(10, ncalls - 10), chance.random()
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1", rails=2) as comm, counted_repeats(comm) as repeats:
        n, rank = comm.nranks, comm.rank
        parts = [_data(seed, each, count) for each in range(n)]
        expected = parts[0] if is_broadcast else sum(parts)
        for number in range(ncalls):
            if number == cut and rank == n - 1:
                cut_first_rail(comm, pick)
            x = parts[rank] + np.float32(number % 7)
            if is_broadcast:
                nwrong += not np.array_equal(comm.broadcast(x), expected + number % 7)
            else:
                nwrong += not np.array_equal(comm.allreduce(x), expected + n * (number % 7))
        comm.barrier()
        return nwrong, len(repeats), len(comm.repairs())


@contextmanager
def counted_repeats(comm: Communicator) -> Iterator[list[object]]:
    """Yield a list to which each repeated call adds its result."""
    loop: Any = comm._engine._loop
    run, results = loop.repeat, []

    def counted(*given: Any) -> Any:
        result = run(*given)
        if result is not NotImplemented:
            results.append(None)
        return result

    loop.repeat = counted
    yield results
