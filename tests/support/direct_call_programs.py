"""Programs of ranks that exchange messages over TCP in direct calls, which compiled code runs."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import get_ident
from typing import Any

import numpy as np
from support.compiled_programs import (
    compiled_of,
    count_results,
    counted_repeats,
    cut_first_rail,
)

import r2ccl
from r2ccl import ANY_TAG, Communicator, Message
from r2ccl.config import Config
from r2ccl.runtime.compiled import program
from r2ccl.runtime.compiled.layout import PAUSED
from r2ccl.runtime.messages.outcome import NOT_RUN

#: Numbers of elements: none, staged with the header, one fragment, and too many for an envelope.
COUNTS = (0, 1, 77, 500, 3_000, 20_001)
EAGER_NBYTES = Config().eager_nbytes


def data(seed: int, source: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng((seed, source)).integers(-99, 99, count).astype(np.float32)


def mixture(limit: int, nrounds: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Exchange messages in many ways; return the number of wrong ones, and of calls in and out.

    These are the calls that ended in compiled code, and those that left it: after `limit` events,
    unless that is 0, or for another reason.
    """
    with r2ccl.init(shm="0", compiled="1", **settings) as comm, comm.dup() as other:
        compiled = compiled_of(comm)
        compiled.limit = limit
        chance = random.Random(limit)  # equal on all ranks
        nwrong = 0
        for number in range(nrounds):
            if chance.randrange(20) == comm.rank:
                time.sleep(0.012)
            nwrong += not _WAYS[chance.randrange(len(_WAYS))](comm, number, chance)
            if chance.random() < 0.1:
                nwrong += not np.array_equal(other.allreduce(np.ones(3)), np.full(3, comm.nranks))
            if chance.random() < 0.05:
                comm.health()
        comm.barrier()
        return nwrong, compiled.nfinished, compiled.nleft


def repeated(limit: int, nforms: int, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Repeat exchanges; return the number of wrong ones, of repetitions, and of calls that left.

    In between, ranks are late, other threads exchange messages, and reports settle the held call.
    """
    with (
        r2ccl.init(shm="0", compiled="1", **settings) as comm,
        counted_repeats(comm) as repeats,
        ThreadPoolExecutor(1) as pool,
    ):
        compiled = compiled_of(comm)
        compiled.limit = limit
        chance = random.Random(limit)  # equal on all ranks
        nwrong = 0
        for number in range(nforms):
            way = chance.choice((_ring, _chain, _halo, _pairs))
            form = chance.random()
            for again in range(chance.randrange(5, 90)):
                if chance.randrange(60) == comm.rank:
                    time.sleep(0.012)
                nwrong += not way(comm, 100 * number + again, random.Random(form))
                if chance.random() < 0.03:
                    nwrong += not pool.submit(_ring, comm, number, random.Random(number)).result()
                if chance.random() < 0.03:
                    comm.health()
        comm.barrier()
        return nwrong, len(repeats), compiled.nleft


def beside_a_cut(seed: int, nrounds: int) -> tuple[int, int, int]:
    """Exchange messages while a path fails; return the number of wrong ones, repetitions, repairs.

    Before one of the rounds, a rank waits until its peers have sent messages, and then resets a
    connection, so that these messages are lost.
    """
    chance = random.Random(seed)  # equal on all ranks
    cut, pick, way = chance.randrange(10, nrounds - 10), chance.random(), chance.choice(_USUAL)
    is_same, form, nwrong = chance.random() < 0.9, chance.random(), 0
    with r2ccl.init(shm="0", compiled="1", rails=2) as comm, counted_repeats(comm) as repeats:
        for number in range(nrounds):
            if number == cut and comm.rank == comm.nranks - 1:
                cut_first_rail(comm, pick)
            nwrong += not way(comm, number, random.Random(form if is_same else number))
        comm.barrier()
        return nwrong, len(repeats), len(comm.repairs())


def with_any_source(nrounds: int) -> int:
    """Repeat a send, then send so and receive nothing from any rank; return the faults."""
    x, out, nothing = np.arange(4.0), np.zeros(4), np.empty(0)
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1") as comm:
        for number in range(nrounds):
            comm.barrier()
            if comm.rank == 0:
                for _ in range(4):
                    comm.send(x + number, 1, 3)
                found = comm.sendrecv(x + number, 1, nothing, tag=3, recv_tag=5)
                nwrong += found != Message(1, 5, 0)
            else:
                comm.send(nothing, 0, 5)
                for _ in range(5):
                    comm.recv(out, 0, 3)
                    nwrong += not np.array_equal(out, x + number)
        return nwrong


def surprises(seed: int, nrounds: int, count: int) -> tuple[int, int, int]:
    """Send messages that a repeated receive does not expect; return faults and repeated exchanges.

    The messages have `count` elements. On a busy machine, few exchanges are repeated: rounds are
    added until each rank has repeated more than 20, up to ten times `nrounds`.

    The last result is the number of bytes of short messages that rank 0 counts as sent, and rank 1
    as taken.
    """
    chance, nwrong = random.Random(seed), 0  # equal on both ranks
    with r2ccl.init(shm="0", compiled="1") as comm:
        way = comm._engine.messenger.way
        repeats = count_results(way._calls, "repeat_exchange", NOT_RUN)
        out = np.empty(count, np.float32)

        def move(number: int, tag: int, wanted: int) -> None:
            nonlocal nwrong
            if comm.rank == 0:
                comm.send(data(number, 0, count), 1, tag)
                return
            found = comm.recv(out, 0, wanted)
            nwrong += found != Message(0, tag, count)
            nwrong += not np.array_equal(out, data(number, 0, count))

        for number in range(10 * nrounds):
            if number >= nrounds and number % nrounds == 0:
                least = comm.allreduce(np.array([len(repeats)]), op=r2ccl.MIN)
                if least[0] > 20:
                    break
            kind = chance.randrange(20)
            if kind == 0:
                move(number, 4, ANY_TAG)
            elif kind == 1 and (comm.rank == 0 or 4 * count > EAGER_NBYTES):
                move(number, 9, 9)
                move(number + 1, 3, 3)
            elif kind == 1:  # in another order, for which a long message would wait
                move(number + 1, 3, 3)
                move(number, 9, 9)
            elif kind == 2:  # more than the receiver may buffer
                if comm.rank == 1:
                    time.sleep(0.05)
                for again in range(120):
                    move(again, 3, ANY_TAG)
            else:
                move(number, 3, ANY_TAG)
        comm.barrier()
        driver: Any = way.driver
        nbytes = driver._took.get(0, 0) if comm.rank else driver._sent.get(1, 0)
        return nwrong, len(repeats), nbytes


def many_sizes(nsizes: int, nrounds: int, nenough: int) -> tuple[int, int]:
    """Exchange messages of many sizes; return the number of wrong ones, and of direct calls.

    On a busy machine few calls are direct, because ranks wait too long for each other: rounds are
    added until each rank has made `nenough` direct calls, up to ten times `nrounds`.
    """
    nwrong = ndirect = 0
    with r2ccl.init(shm="0", compiled="1") as comm:
        compiled = compiled_of(comm)
        for number in range(10 * nrounds):
            nbefore = compiled.nfinished
            for count in range(nsizes):
                out, peer = np.empty(count, np.float32), 1 - comm.rank
                comm.sendrecv(data(number, comm.rank, count), peer, out, peer)
                nwrong += not np.array_equal(out, data(number, peer, count))
            ndirect += compiled.nfinished - nbefore
            least = comm.allreduce(np.array([ndirect]), op=r2ccl.MIN)
            if number + 1 >= nrounds and least[0] >= nenough:
                break
        return nwrong, ndirect


def unread(nrounds: int) -> tuple[int, int]:
    """Send more than the sockets take at once, to a rank that is late.

    Return how often data waited after a repeated send, and how often nothing was to send it soon.
    """
    x, out = np.arange(125, dtype=np.float32), np.empty(125, np.float32)
    nunsent = nforgotten = 0
    with r2ccl.init(shm="0", compiled="1") as comm, counted_repeats(comm) as repeats:
        loop = comm._engine._loop
        for conn in loop._transport._by_path.values():
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        for _ in range(nrounds):
            comm.barrier()
            if comm.rank:
                time.sleep(0.02)
            for _ in range(7):
                if comm.rank:
                    comm.recv(out, 0, 3)
                    continue
                nbefore = len(repeats)
                comm.send(x, 1, 3)
                if len(repeats) > nbefore and loop._transport.has_unsent():
                    nunsent += 1
                    nforgotten += not loop._is_sending_rest
        return nunsent, nforgotten


def settled_after_an_interrupt(ncalls: int) -> tuple[int, int]:
    """Interrupt the settling of a repeated exchange; return the driver's counts.

    These are the number of messages that this rank has sent, and of their bytes.
    """
    x, out = np.arange(4.0), np.empty(4)
    with r2ccl.init(shm="0", compiled="1") as comm:
        driver: Any = comm._engine.messenger.way.driver
        for _ in range(ncalls):
            comm.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)
        take_counts = driver.import_counts

        def interrupt(*given: Any) -> None:
            driver.import_counts = take_counts
            if get_ident() == own:
                raise KeyboardInterrupt
            take_counts(*given)  # the control thread settles the exchange

        own, driver.import_counts = get_ident(), interrupt
        with suppress(KeyboardInterrupt):
            comm._engine._loop.settle_if_free()
        comm.barrier()
        return driver._next_ident, driver._sent[1 - comm.rank]


def taken_beside_long_ones(nshort: int) -> tuple[int, int]:
    """Take short messages of rank 0 between long ones to rank 0, which repeats their receive.

    Return the number of repetitions, and of bytes that rank 1 has taken, as rank 0 knows.
    """
    long, short = np.empty(50_000, np.float32), np.empty(1_000, np.float32)
    with r2ccl.init(shm="0", compiled="1") as comm, counted_repeats(comm) as repeats:
        driver: Any = comm._engine.messenger.way.driver
        if comm.rank == 0:
            for _ in range(nshort):
                comm.send(short, 1, 4)
            for _ in range(20):
                comm.recv(long, 1, 5)
        else:
            for number in range(20):
                if number == 10:
                    for _ in range(nshort):
                        comm.recv(short, 0, 4)
                comm.send(long, 0, 5)
        comm.barrier()
        return len(repeats), driver._taken.get(1 - comm.rank, 0)


def before_it_is_made(makes_collective: bool) -> int:
    """Send on a communicator that a rank has not made yet; return the number of wrong messages.

    The rank's next call waits for another rank, so it leaves compiled code. The sender has fewer
    slots than it sends messages, so it needs the confirmations of the first ones.
    """
    x, out = np.arange(4, dtype=np.float32), np.empty(4, np.float32)
    nwrong = 0
    with r2ccl.init(shm="0", compiled="1", eager_slots=2, timeout_s=20.0) as comm:
        for _ in range(4):
            comm.sendrecv(x, (comm.rank + 1) % 3, out, (comm.rank - 1) % 3, tag=1)
        comm.barrier()
        if comm.rank == 0:
            links, make = comm._engine._loop.links, Communicator._made_of

            def wait(self: Communicator, *args: Any) -> Communicator:
                deadline = time.monotonic() + 10
                while not any(len(link.arrivals) == 2 for link in links.receivers.values()):
                    assert time.monotonic() < deadline, "no messages came"
                    time.sleep(0.01)
                return make(self, *args)

            Communicator._made_of = wait  # type: ignore[method-assign]
        other = comm.dup()
        if comm.rank == 2:
            for number in range(4):
                other.send(x + number, 0, 5, async_op=True).wait()
        if comm.rank == 1:
            time.sleep(0.3)
            comm.send(x, 0, 6)
        if makes_collective:
            comm.allreduce(x.copy())
        if comm.rank == 0:
            comm.recv(out, 1, 6)
            for number in range(4):
                other.recv(out, 2, 5)
                nwrong += not np.array_equal(out, x + number)
        comm.barrier()
        return nwrong


def beside_later_ones(nrounds: int) -> tuple[int, int, list[float]]:
    """Receive long messages, the next of which is announced already.

    Return the number of wrong ones and of calls that left compiled code, and the times of all
    pairs. Compiled code waits for 0.9 s before it leaves a call that has nothing to do.
    """
    program._SLEEP_NS = 900_000_000
    count, nwrong = 50_000, 0
    times_s: list[float] = []
    with r2ccl.init(shm="0", compiled="1") as comm:
        compiled = compiled_of(comm)
        loop: Any = comm._engine._loop

        def run_compiled(caller: object, patience: object, run: Any) -> int:
            """Ignore other work of the data loop, for which it would end the call."""
            while (result := int(run())) == PAUSED:
                pass
            return result

        for number in range(nrounds):
            comm.barrier()
            if comm.rank == 0:
                time.sleep(0.03)  # the first receive waits
                x = [data(number + each, 0, count) for each in range(2)]
                for send in [comm.send(each, 1, 5, async_op=True) for each in x]:
                    send.wait()
            else:
                loop.run_compiled = run_compiled
                start_s = time.monotonic()
                for each in range(2):
                    out = np.empty(count, np.float32)
                    comm.recv(out, 0, 5)
                    nwrong += not np.array_equal(out, data(number + each, 0, count))
                times_s.append(time.monotonic() - start_s)
                del loop.run_compiled
        return nwrong, compiled.nleft, times_s


def before_the_grant(nrounds: int) -> tuple[int, int]:
    """Send a long message to a rank whose own message comes first; return faults and repairs.

    That message has the size of the grant, and takes the only slot, so that the landing places are
    announced before the grant.
    """
    count, nwrong = 17_000, 0
    with r2ccl.init(shm="0", compiled="1", eager_slots=1) as comm:
        out, small = np.empty(count, np.float32), np.empty(1)
        for number in range(nrounds):
            if comm.rank == 1:
                waiting = comm.recv(out, 0, number, async_op=True)
            x = data(number, 0, count)
            comm.barrier()
            if comm.rank == 0:
                comm.send(x, 1, number)  # as for any new tag, in compiled code
                comm.recv(small, 1, 99)
                nwrong += small[0] != number
            else:
                time.sleep(0.004)  # the request has arrived
                sending = comm.send(np.full(1, float(number)), 0, 99, async_op=True)
                waiting.wait()
                sending.wait()
                nwrong += not np.array_equal(out, x)
        comm.barrier()
        return nwrong, len(comm.repairs())


def loses_its_program() -> tuple[bool, bool]:
    """Repeat an exchange while another thread makes the same one, which leaves compiled code.

    Return whether the other exchange came in between, and whether the result is exact.
    """
    with r2ccl.init(shm="0", compiled="1") as comm, ThreadPoolExecutor(1) as pool:
        compiled, peer = compiled_of(comm), 1 - comm.rank
        forms = [(np.full(count, comm.rank), np.empty(count, np.int64)) for count in (10, 20)]

        def exchange(number: int) -> None:
            x, out = forms[number]
            comm.sendrecv(x, peer, out, peer, tag=number, recv_tag=number)

        def beside() -> None:
            comm.health()  # settles, so that the exchange is not a repetition
            compiled.limit = -1
            exchange(0)
            compiled.limit = 0
            exchange(1)

        for number in (0, 0, 0, 0, 1, 1, 1, 1):
            exchange(number)
        loop: Any = comm._engine._loop
        came: list[None] = []
        repeat = loop.repeat

        def repeat_late(*given: Any) -> Any:
            loop.repeat = repeat
            pool.submit(beside).result()
            came.append(None)
            return repeat(*given)

        loop.repeat = repeat_late
        exchange(0)
        is_exact = bool((forms[0][1] == peer).all())
        if not came:  # the other rank, where they came, waits for these
            exchange(1)
            exchange(0)
        return bool(came), is_exact


def _ring(comm: Communicator, number: int, chance: random.Random) -> bool:
    """Send to the next rank and receive from the previous one, which may be the same rank."""
    count, tag = chance.choice(COUNTS), chance.randrange(3)
    before, after = (comm.rank - 1) % comm.nranks, (comm.rank + 1) % comm.nranks
    out = np.full(count, -1, np.float32)
    wanted = chance.choice((tag, ANY_TAG))
    x = data(number, comm.rank, count)
    found = comm.sendrecv(x, after, out, before, tag=tag, recv_tag=wanted)
    return found == Message(before, tag, count) and np.array_equal(out, data(number, before, count))


def _chain(comm: Communicator, number: int, chance: random.Random) -> bool:
    """Pass a message from the first rank to the last one; each may have a larger array for it."""
    count, more = chance.choice(COUNTS), chance.choice((0, 0, 5))
    x, is_good = data(number, 0, count), True
    if comm.rank:
        x = np.full(count + more, -1, np.float32)
        found = comm.recv(x, comm.rank - 1, 7)
        is_good = found == Message(comm.rank - 1, 7, count) and bool((x[count:] == -1).all())
        x = x[:count]
    if comm.rank + 1 < comm.nranks:
        comm.send(x, comm.rank + 1, 7)
    return is_good and np.array_equal(x, data(number, 0, count))


def _halo(comm: Communicator, number: int, chance: random.Random) -> bool:
    """Exchange with both neighbors, as in a stencil."""
    count, is_good = chance.choice(COUNTS), True
    for step in (1, -1):
        to, source = (comm.rank + step) % comm.nranks, (comm.rank - step) % comm.nranks
        out = np.full(count, -1, np.float32)
        comm.sendrecv(data(number, comm.rank, count), to, out, source, tag=step + 1)
        is_good = is_good and np.array_equal(out, data(number, source, count))
    return is_good


def _pairs(comm: Communicator, number: int, chance: random.Random) -> bool:
    """Pass a message to and fro between two neighbors, as in a test of latency."""
    count, peer = chance.choice(COUNTS), comm.rank ^ 1
    if peer >= comm.nranks:
        return True
    out = np.full(count, -1, np.float32)
    if comm.rank < peer:
        comm.send(data(number, comm.rank, count), peer, 3)
        found = comm.recv(out, peer, 3)
    else:
        found = comm.recv(out, peer, 3)
        comm.send(data(number, comm.rank, count), peer, 3)
    return found == Message(peer, 3, count) and np.array_equal(out, data(number, peer, count))


def _crossed(comm: Communicator, number: int, chance: random.Random) -> bool:
    """Receive two messages in another order than that in which they were sent."""
    counts = chance.choice(COUNTS), chance.choice(COUNTS)
    before, after = (comm.rank - 1) % comm.nranks, (comm.rank + 1) % comm.nranks
    sends = [
        comm.send(data(number + tag, comm.rank, counts[tag]), after, tag=tag, async_op=True)
        for tag in (0, 1)
    ]
    is_good = True
    for tag in (1, 0):
        out = np.full(counts[tag], -1, np.float32)
        comm.recv(out, before, tag)
        is_good = is_good and np.array_equal(out, data(number + tag, before, counts[tag]))
    for send in sends:
        send.wait()
    return is_good


def _beside(comm: Communicator, number: int, chance: random.Random) -> bool:
    """Exchange short messages while a receive waits for a message of another rank."""
    count = chance.choice(COUNTS)
    before = (comm.rank - 1) % comm.nranks
    out = np.full(count, -1, np.float32)
    waiting = comm.recv(out, before, 9, async_op=True)
    is_good = _ring(comm, number, chance)
    comm.send(data(number, comm.rank, count), (comm.rank + 1) % comm.nranks, 9)
    waiting.wait()
    return is_good and np.array_equal(out, data(number, before, count))


_USUAL = (_ring, _ring, _chain, _pairs, _halo, _crossed)
_WAYS = (_ring, _chain, _halo, _pairs, _crossed, _beside)
