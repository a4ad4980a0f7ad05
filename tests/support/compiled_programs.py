"""Programs of ranks whose calls leave compiled code after some number of events."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import r2ccl
from r2ccl import Communicator
from r2ccl.runtime.compiled.call import CompiledCalls
from r2ccl.transport.base import Frame
from r2ccl.transport.tcp import transport
from r2ccl.transport.tcp.connection import DATA

#: Numbers of elements, in calls of all collectives: eager slices of two kinds, one slice, several.
COUNTS = (1, 77, 700, 40_001, 700_001)


def compiled_of(comm: Communicator) -> CompiledCalls:
    """Return what runs the calls of a communicator in compiled code."""
    found = comm._engine._loop.compiled
    assert found is not None
    return found


def beside_a_late_rank(ncalls: int) -> list[str]:
    """Reduce with one rank late, which sends the others out of compiled code; return results.

    The operations are those in which NumPy's results depend on the processor: zeros of both signs,
    and complex products.
    """
    found = []
    with r2ccl.init(shm="0", compiled="1") as comm:
        rng = np.random.default_rng(comm.rank)
        factors = (rng.normal(size=500) + 1j * rng.normal(size=500)).astype(np.complex64)
        zeros = np.where(rng.integers(0, 2, 500), 0.0, -0.0)
        for number in range(ncalls):
            for x, op in ((factors, r2ccl.PROD), (zeros, r2ccl.MIN), (zeros, r2ccl.MAX)):
                if comm.rank == number % comm.nranks:
                    time.sleep(0.015)
                found.append(comm.allreduce(x, np.empty_like(x), op=op).tobytes().hex())
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

    Return the number of programs that need scratch memory, and of those that still have some.
    """
    with r2ccl.init(shm="0", compiled="1", algo="one_shot") as comm:
        compiled = compiled_of(comm)
        transport: Any = compiled._transport
        transport.lend = lambda paths: None
        comm.allreduce(np.ones(700_001, np.float32))
        programs = [program for _, program in compiled._programs.values() if program is not None]
        kept = [program for program in programs if program.scratch is not None]
        return sum(each.layout.uses_scratch for each in programs), len(kept)


def _counts(n: int, count: int) -> list[int]:
    """Return sizes of parts that differ, and one that is empty."""
    return [count * each // n**2 for each in range(n)]


def one_call(comm: Communicator, kind: str, parts: list[Any], number: int) -> bool:
    """Make a call of a collective with the inputs `parts` of all ranks; return if it is right.

    ``len(parts[0])`` is a multiple of the number of ranks. `number` chooses the root.
    """
    n, rank = comm.nranks, comm.rank
    root, count, x = number % n, len(parts[0]), parts[rank].copy()
    out, is_root = np.full(count, -1, np.float32), rank == root
    each, sums = count // n, np.sum(parts, axis=0, dtype=np.float32)
    counts = _counts(n, count)
    total, first, own = sum(counts), sum(counts[:rank]), counts[rank]
    whole, mine = np.full(n * count, -1, np.float32), slice(rank * each, (rank + 1) * each)
    unequal = np.concatenate([part[:size] for part, size in zip(parts, counts, strict=True)])
    columns = np.concatenate([part[mine] for part in parts])
    if kind == "allreduce":
        result, expected = comm.allreduce(x, out), sums
        if result is not out:
            return False
    elif kind == "largest":
        result, expected = comm.allreduce(x, op=r2ccl.MAX), np.max(parts, axis=0)
    elif kind == "broadcast":
        result, expected = comm.broadcast(x, root=root), parts[root]
    elif kind == "allgather":
        result, expected = comm.allgather(x), np.concatenate(parts)
    elif kind == "allgather in place":
        whole[rank * count :][:count] = x
        result, expected = comm.allgather(whole[rank * count :][:count], whole), parts
    elif kind == "allgatherv":
        result = comm.allgatherv(x[:own], out[:total], counts=counts)
        expected = unequal
    elif kind == "reduce_scatter":
        result, expected = comm.reduce_scatter(x, out[:each]), sums[mine]
    elif kind == "reduce_scatterv":
        result = comm.reduce_scatterv(x[:total], counts=counts)
        expected = sums[first : first + own]
    elif kind == "reduce":
        result = comm.reduce(x, root=root)
        expected = sums if is_root else result
    elif kind == "gather":
        result = comm.gather(x, whole if is_root else None, root=root)
        expected = np.concatenate(parts) if is_root else result
    elif kind == "gatherv":
        result = comm.gatherv(x[:own], root=root, counts=counts if is_root else None)
        expected = unequal if is_root else result
    elif kind == "scatter":
        result = comm.scatter(x if is_root else None, out[:each], root=root)
        expected = parts[root][mine]
    elif kind == "scatterv":
        given = counts if is_root else None
        result = comm.scatterv(x if is_root else None, out[:own], root=root, counts=given)
        expected = parts[root][first : first + own]
    elif kind == "alltoall":
        result, expected = comm.alltoall(x, out), columns
    elif kind == "alltoall in place":
        result, expected = comm.alltoall(x, x), columns
        return result is x and np.array_equal(result, expected)
    elif kind == "alltoallv":
        back = [counts[rank]] * n
        result = comm.alltoallv(x[:total], sendcounts=counts, recvcounts=back)
        expected = np.concatenate([part[first : first + own] for part in parts])
    elif kind == "scan":
        result, expected = comm.scan(x, out), np.sum(parts[: rank + 1], axis=0)
    elif kind == "shift":
        comm.sendrecv(x, (rank + 1) % n, out, (rank - 1) % n)
        return np.array_equal(out, parts[rank - 1])
    elif kind == "exscan in place":
        result = comm.exscan(x)
        return not rank or np.array_equal(result, np.sum(parts[:rank], axis=0))
    elif kind == "allgatherv in places":
        places = [each * (n - 1 - rank) for rank in range(n)]
        result = comm.allgatherv(x[:each], out, counts=[each] * n, displs=places)
        expected = np.concatenate([part[:each] for part in reversed(parts)])
    elif kind == "alltoallv in place":
        back = [own] * n
        result = comm.alltoallv(x, x, sendcounts=counts, recvcounts=back)
        columns = np.concatenate([part[first : first + own] for part in parts])
        return result is x and np.array_equal(result[: own * n], columns)
    else:
        comm.barrier()
        return True
    is_in_place = kind in ("largest", "broadcast", "reduce")
    if not is_in_place and not np.array_equal(x, parts[rank]):
        return False
    return result is expected or np.array_equal(np.ravel(result), np.ravel(expected))


KINDS = (
    "allreduce", "largest", "broadcast", "allgather", "allgather in place", "allgatherv",
    "reduce_scatter", "reduce_scatterv", "reduce", "gather", "gatherv", "scatter", "scatterv",
    "alltoall", "alltoall in place", "alltoallv", "scan", "exscan in place", "barrier",
    "allgatherv in places", "alltoallv in place",
)  # fmt: skip


def repetitions_of(kind: str) -> tuple[int, int]:
    """Repeat a call of a collective; return the number of wrong ones and of repetitions."""
    with r2ccl.init(shm="0", compiled="1") as comm, counted_repeats(comm) as repeats:
        parts = [_data(0, each, 12 * comm.nranks) for each in range(comm.nranks)]
        nright = sum(one_call(comm, kind, parts, 0) for _ in range(20))
        return 20 - nright, len(repeats)


@contextmanager
def _two_communicators(
    **settings: Any,
) -> Iterator[tuple[Communicator, Communicator, list[object]]]:
    """Yield two communicators of the same ranks, and the list of `counted_repeats`."""
    with (
        r2ccl.init(shm="0", compiled="1", **settings) as comm,
        comm.dup() as other,
        counted_repeats(comm) as repeats,
    ):
        yield comm, other, repeats


def repeated(limit: int, ncalls: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Repeat calls; return the number of wrong ones, of repetitions, and of calls that left it.

    Each call is repeated some times in succession, with other data, other arrays of the same form,
    late ranks, and, now and then, reports of the status and calls of another communicator between.
    """
    nwrong = 0
    with _two_communicators(**settings) as (comm, other, repeats):
        compiled = compiled_of(comm)
        compiled.limit = limit
        n, rank = comm.nranks, comm.rank
        chance = random.Random(limit)  # equal on all ranks
        for number, kind in enumerate(KINDS * (ncalls // 5)):
            count = n * COUNTS[(number + number // len(KINDS)) % (len(COUNTS) - 1)]
            for again in range(chance.randrange(3, 25)):
                parts = [_data(again + 25 * number, each, count) for each in range(n)]
                if chance.randrange(40) == rank:  # this rank is late
                    time.sleep(0.01)
                nwrong += not one_call(comm, kind, parts, number)
                if chance.random() < 0.05:
                    nwrong += not np.array_equal(other.allreduce(np.ones(3)), np.full(3, n))
                if chance.random() < 0.05:
                    comm.health()
        return nwrong, len(repeats), compiled.nleft


def alternating(limit: int, ncalls: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Make calls of several forms in turn; return what `repeated` returns, for repetitions.

    Rows of calls have four forms each, which follow each other at random: collectives of two
    communicators, and exchanges of messages. A rank may be late, or ask for the status.
    """
    nwrong = 0
    with _two_communicators(**settings) as (comm, other, repeats):
        compiled = compiled_of(comm)
        compiled.limit = limit
        n, rank = comm.nranks, comm.rank
        chance = random.Random(limit)  # equal on all ranks
        for row in range(ncalls):
            forms = [random_form(chance, n) for _ in range(4)]
            for number in range(60):
                kind, count, root = chance.choice(forms)
                parts = [_data(100 * row + number % 7, each, count) for each in range(n)]
                if chance.randrange(40) == rank:
                    time.sleep(0.01)
                nwrong += not one_call(other if root % 2 else comm, kind, parts, root)
                if chance.random() < 0.02:
                    comm.health()
        return nwrong, len(repeats), compiled.nleft


def random_form(chance: random.Random, nranks: int) -> tuple[str, int, int]:
    """Return a kind of call, a count for `one_call`, and the root."""
    kind = chance.choice((*KINDS, "shift", "shift"))
    return kind, nranks * chance.choice(COUNTS[:4]), chance.randrange(nranks)


def switches() -> tuple[int, int, int]:
    """Make calls in turn; return wrong results, repetitions, and changes of programs.

    The calls are collectives of two communicators, and exchanges of messages.
    """
    with _two_communicators() as (comm, other, repeats):
        changes = count_results(comm._engine._loop.compiled, "switch", False)
        parts = [_data(0, each, 12 * comm.nranks) for each in range(comm.nranks)]
        halves = [each[: each.size // 2] for each in parts]
        calls = [
            (comm, "allreduce", parts), (comm, "shift", parts), (comm, "broadcast", parts),
            (comm, "allreduce", halves), (other, "allreduce", parts), (other, "shift", parts),
        ]  # fmt: skip
        nwrong = sum(not one_call(*calls[number % len(calls)], 0) for number in range(180))
        return nwrong, len(repeats), len(changes)


def needed_first(nrounds: int) -> tuple[int, int]:
    """Repeat barriers that rank 1 joins after it has sent a message that rank 0 awaits meanwhile.

    Return the number of wrong messages, and of repetitions.
    """
    with r2ccl.init(shm="0", compiled="1") as comm, counted_repeats(comm) as repeats:
        x, out, nwrong = np.arange(50_000.0), np.zeros(50_000), 0
        for number in range(nrounds):
            if comm.rank == 0:
                request = comm.recv(out, 1, async_op=True)
                comm.barrier()
                request.wait()
                nwrong += not np.array_equal(out, x + number)
            else:
                if comm.rank == 1:
                    comm.send(x + number, 0)
                comm.barrier()
            for _ in range(4):
                comm.barrier()
        return nwrong, len(repeats)


def queued(nrounds: int, nsends: int) -> int:
    """Send many messages, of which a peer takes a part before a barrier; return the wrong ones.

    The sender's last messages wait for confirmations, some of which come during the barrier.
    """
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1") as comm:
        for number in range(nrounds):
            comm.barrier()
            data, out = [np.full(4, each + number) for each in range(nsends)], np.zeros(4, np.int64)
            if comm.rank == 0:
                requests = [comm.send(x, 1, async_op=True) for x in data]
            for at, x in enumerate(data if comm.rank == 1 else ()):
                if at == nsends // 3:
                    time.sleep(0.03)  # the others leave compiled code
                    comm.barrier()
                comm.recv(out, 0)
                nwrong += not np.array_equal(out, x)
            if comm.rank != 1:
                comm.barrier()
            if comm.rank == 0:
                for request in requests:
                    request.wait()
    return nwrong


def overtaken(nrounds: int) -> int:
    """Receive messages of one rank, the last first; return the number of wrong results.

    The first receive ends while a slice of another communicator waits in a buffer. One message
    stays unread, so that the call is not held.
    """
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1") as comm, comm.split(comm.rank // 2) as pair:
        last, first, second, other = (np.zeros(4) for _ in range(4))
        if comm.rank == 2:
            comm.send(np.ones(4), 0, tag=9)
        for number in range(nrounds):
            comm.barrier()
            comm.barrier()
            if comm.rank == 1:
                pair.broadcast(np.full(4, number, float), root=1)
                comm.recv(other, 0, tag=3)
            elif comm.rank == 2:
                for value, tag in ((1, 7), (2, 7), (3, 5)):
                    comm.send(np.full(4, value + 10.0 * number), 0, tag=tag)
            else:
                until_s = time.perf_counter() + 0.004
                while time.perf_counter() < until_s:
                    pass
                comm.sendrecv(first, 1, last, 2, tag=3, recv_tag=5)
                pair.broadcast(other, root=1)
                comm.recv(first, 2, tag=7)
                comm.recv(second, 2, tag=7)
                found = [*(each[0] - 10 * number for each in (first, second, last)), other[0]]
                nwrong += found != [1, 2, 3, number]
        if comm.rank == 0:
            comm.recv(other, 2, tag=9)
    return nwrong


def awaited_elsewhere(folder: str, nrounds: int) -> int:
    """Send rank 0 a long message while it makes calls with rank 1 only; return the late ones.

    The message may arrive in a call of all ranks that waits for rank 1. A message is late if the
    send has not ended after 200 calls, which take a second.
    """
    nlate, x, out = 0, np.arange(200_000.0), np.zeros(200_000)
    one, total, flag = np.ones(4), np.zeros(4), np.zeros(1)
    with r2ccl.init(shm="0", compiled="1") as comm, comm.split(comm.rank // 2) as pair:
        target = total if comm.rank == 0 else None
        for number in range(nrounds):
            path = Path(folder, str(number))
            request = comm.recv(out, 2, async_op=True) if comm.rank == 0 else None
            for _ in range(3):
                comm.barrier()
            for _ in range(3):
                comm.reduce(one, target, root=0)
            comm.barrier()
            if comm.rank == 1:
                begin_s = time.perf_counter()
                while time.perf_counter() < begin_s + 0.0004:
                    pass
            comm.reduce(one, target, root=0)
            if comm.rank == 2:
                comm.send(x + number, 0)
                path.touch()
                continue
            ncalls, flag[0] = 0, 0
            while not flag.any():
                for _ in range(20):
                    if comm.rank == 1:
                        time.sleep(0.005)
                    pair.barrier()
                    ncalls += 1
                flag[0] = comm.rank == 0 and path.exists()
                pair.allreduce(flag)
            nlate += ncalls > 200
            if request is not None:
                request.wait()
                assert np.array_equal(out, x + number)
    return nlate


def crossed(nrounds: int) -> int:
    """Reduce with two communicators, each in a thread of its own; return the wrong results."""
    with _two_communicators() as (comm, other, _), ThreadPoolExecutor(1) as pool:
        n = comm.nranks

        def reduce(each: Communicator, factor: int) -> int:
            nwrong, out = 0, np.zeros(64)
            for number in range(nrounds):
                each.allreduce(np.full(64, 1.0 * factor * number), out)
                nwrong += not np.array_equal(out, np.full(64, n * factor * number))
            return nwrong

        found = pool.submit(reduce, other, 3)
        return reduce(comm, 2) + found.result()


def wrong_fragment(nbytes: int) -> tuple[bool, list[str]]:
    """Broadcast from rank 1, which names `nbytes` as the size of the first fragment that it sends.

    Return whether the result is right, and why paths failed.
    """
    rank, pack, sizes = int(os.environ["RANK"]), transport.pack, [nbytes]

    def pack_wrongly(kind: int, frame: Frame, nbytes: int) -> bytes:
        is_first = rank == 1 and kind == DATA and nbytes > 1 << 17 and sizes
        return pack(kind, frame, sizes.pop() if is_first else nbytes)

    transport.pack = pack_wrongly
    with r2ccl.init(shm="0", compiled="0" if rank else "1") as comm:
        x = np.arange(1 << 19, dtype=np.float32) * rank
        comm.broadcast(x, root=1)
        return np.array_equal(x, np.arange(1 << 19)), [each.cause for each in comm.repairs()]


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
    conns = comm._engine._loop._transport._by_path
    first = sorted((path for path in conns if path.rail == 0), key=lambda path: path.peer)
    reset(conns[first[int(pick * len(first))]].fd)


def repeated_beside_a_cut(seed: int, ncalls: int, nforms: int) -> tuple[int, int, int]:
    """Repeat calls while a path fails; return the number of wrong ones, repetitions and repairs.

    Calls of `nforms` forms follow each other at random. Before one of them, a rank waits until its
    peers have sent slices, and then resets a connection, so that these slices are lost.
    """
    chance = random.Random(seed)  # equal on all ranks
    kinds = KINDS if nforms == 1 else (*KINDS, "shift")
    forms = [(chance.choice(kinds), chance.choice(COUNTS[:4])) for _ in range(nforms)]
    cut, pick = chance.randrange(10, ncalls - 10), chance.random()
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1", rails=2) as comm, counted_repeats(comm) as repeats:
        n, rank = comm.nranks, comm.rank
        data = [_data(seed, each, n * COUNTS[3]) for each in range(n)]
        for number in range(ncalls):
            kind, count = chance.choice(forms)
            parts = [each[: n * count] for each in data]
            if number == cut and rank == n - 1:
                cut_first_rail(comm, pick)
            nwrong += not one_call(comm, kind, [part + number % 7 for part in parts], 0)
        comm.barrier()
        return nwrong, len(repeats), len(comm.repairs())


@contextmanager
def counted_repeats(comm: Communicator) -> Iterator[list[object]]:
    """Yield a list to which each repeated call adds None."""
    yield count_results(comm._engine._loop, "repeat", NotImplemented)


def count_results(owner: Any, name: str, missed: object) -> list[object]:
    """Return a list to which each call of the method `name` adds None, unless it returns `missed`.

    The results themselves would keep arrays alive.
    """
    run, results = getattr(owner, name), []

    def counted(*given: Any) -> Any:
        result = run(*given)
        if result is not missed:
            results.append(None)
        return result

    setattr(owner, name, counted)
    return results
