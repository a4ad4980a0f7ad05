"""Programs of ranks that send messages to each other."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
from support.raising import raises

import r2ccl
from r2ccl import Communicator, Message
from r2ccl.errors import CommunicatorRevoked, R2cclError
from r2ccl.runtime.messages.network import NetworkMessages
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.types import MOST_UNTAKEN, MOST_UNTAKEN_ON_LINKS

TIMEOUT_S = 60.0
#: Around the largest short message, of one slice, of several slices.
COUNTS = (0, 1, 100, 8180, 8192, 8193, 131_072, 131_073, 1_000_003)


def data(rank: int, to: int, tag: int, count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.float64) + 1000 * rank + 10 * to + tag


def of_all_sizes() -> list[str]:
    """Exchange messages of all sizes with all ranks, also with itself; return what is wrong."""
    wrong = []
    with r2ccl.init() as comm:
        for tag, count in enumerate(COUNTS):
            sends = [
                comm.send(data(comm.rank, to, tag, count), to, tag, async_op=True)
                for to in range(comm.nranks)
            ]
            for source in range(comm.nranks):
                out = np.full(count + 3, -1.0)
                found = comm.recv(out, source, tag)
                expected = data(source, comm.rank, tag, count)
                if found != Message(source, tag, count) or not np.array_equal(
                    out, [*expected, -1.0, -1.0, -1.0]
                ):
                    wrong.append(f"rank {comm.rank} of {source}, {count}: {found}")
            for send in sends:
                send.wait()
    return wrong


def in_a_ring(count: int) -> bool:
    """Pass an array around a ring by blocking calls."""
    with r2ccl.init() as comm:
        x = np.full(count, float(comm.rank))
        for _ in range(comm.nranks):
            out = np.empty(count)
            before = (comm.rank - 1) % comm.nranks
            comm.sendrecv(x, (comm.rank + 1) % comm.nranks, out, before)
            x = out
        return bool((x == comm.rank).all())


def in_order() -> list[Any]:
    """Receive by tag and from any source, out of the order of sending."""
    with r2ccl.init() as comm:
        if comm.rank:
            for tag in (1, 2, 1):
                for count in (10, 50_000):
                    comm.send(np.full(count, 10.0 * comm.rank + tag), 0, tag, async_op=True)
            comm.barrier()
            comm.barrier()
            return []
        comm.barrier()
        found: list[Any] = [comm.probe(1, 2), comm.probe(2, 7, is_blocking=False)]
        out = np.empty(50_000)
        for source in (2, 1):
            for tag in (2, 1, 1):
                for count in (10, 50_000):
                    got = comm.recv(out, source, tag)
                    assert got == Message(source, tag, count), got
                    assert (out[:count] == 10.0 * source + tag).all()
        found.append(comm.probe(is_blocking=False))
        waiting = comm.recv(out, async_op=True)
        found += [waiting.is_done(), waiting.cancel(), waiting.cancel()]
        comm.barrier()
        return found


def synchronous() -> list[tuple[bool, Message | None]]:
    """Send synchronous messages, also to this rank; return whether each was done too early."""
    found = []
    with r2ccl.init() as comm:
        for tag, count in enumerate((0, 1, 100_000)):
            for to in (0, 1):
                out = np.full(count, -1.0)
                if comm.rank == 0:
                    x = data(0, to, tag, count)
                    sent = comm.send(x, to, tag, is_synchronous=True, async_op=True)
                    assert sent is not None
                    comm.barrier()  # now it has arrived
                    was_done = sent.is_done()
                    comm.barrier()
                    got = comm.recv(out, 0, tag) if to == 0 else None
                    found.append((was_done, got))
                    sent.wait()
                else:
                    if to:
                        comm.probe(0, tag)
                    comm.barrier()
                    comm.barrier()
                    found.append((False, comm.recv(out, 0, tag) if to else None))
                if to == comm.rank:
                    assert np.array_equal(out, data(0, to, tag, count))
    return found


def not_fitting() -> list[str]:
    """Receive into arrays that are too small, or of another dtype; return the errors."""
    found: list[str] = []

    def tried(fn: Any, *given: Any, **named: Any) -> None:
        try:
            fn(*given, **named)
        except R2cclError as exc:
            found.append(f"{type(exc).__name__}: {exc}")

    with r2ccl.init() as comm:
        if comm.rank:
            tried(comm.send, np.ones(10), 0)
            tried(comm.send, np.ones(100_000), 0)
            comm.send(np.ones(100_000), 0)
            tried(comm.send, np.ones(10), 0, is_synchronous=True)
        else:
            tried(comm.recv, np.ones(9))
            tried(comm.recv, np.ones(10, np.float32))
            comm.recv(np.ones(10))
            tried(comm.recv, np.ones(99_999))
            comm.recv(np.ones(100_000))
            tried(comm.recv, np.ones(9))
        for given in ((np.ones(2), 5), (np.ones(2), 0, -1), (np.ones(2), 0, 0.5), ("x", 0)):
            tried(comm.send, *given)
        tried(comm.recv, np.ones(2), -7)
        comm.barrier()
    return found


def many_unexpected(nmessages: int, count: int) -> tuple[bool, float]:
    """Send many short messages before any is received.

    Return also the size of those that are kept here, as a fraction of the size that may be.
    """
    with r2ccl.init() as comm:
        if comm.rank:
            sends = [
                comm.send(np.full(count, float(at)), 0, at, async_op=True)
                for at in range(nmessages)
            ]
            comm.barrier()
            for send in sends:
                send.wait()
            comm.barrier()
            return True, 0
        comm.probe(1, nmessages - 1)
        comm.barrier()
        way = comm._engine.messenger.way
        most = MOST_UNTAKEN_ON_LINKS if isinstance(way, NetworkMessages) else MOST_UNTAKEN
        kept = way.driver.matching.kept_nbytes / most
        is_right = True
        for at in reversed(range(nmessages)):
            out = np.empty(count)
            comm.recv(out, 1, at)
            is_right &= bool((out == at).all())
        comm.barrier()
        return is_right, kept


def beside_collectives(nrounds: int, nfaults: int, seed: int) -> tuple[list[str], int]:
    """Mix messages, collectives and communicators at random while rails fail."""
    faults = [
        Fault(action=Action.NIC_DOWN, node=0, rail=at % 2, rank=0, at_op=3 + 4 * at, at_step=at)
        for at in range(nfaults)
    ]
    wrong: list[str] = []
    with r2ccl.init(faults=FaultPlan(faults)) as comm:
        group = [comm, comm.dup()]

        def exchange(each: Communicator) -> None:
            choice = random.Random(seed)  # the same on all ranks
            n, rank = each.nranks, each.rank
            for at in range(nrounds):
                shift, count = choice.randrange(n), choice.choice((1, 3000, 70_000, 400_000))
                if choice.random() < 0.4:
                    x = np.full(count, float(rank + at))
                    each.allreduce(x)
                    if not (x == sum(range(n)) + n * at).all():
                        wrong.append(f"rank {rank}, allreduce {at}: {x[0]}")
                    continue
                out = np.empty(count)
                source = (rank - shift) % n
                each.sendrecv(data(rank, 0, at, count), (rank + shift) % n, out, source, tag=at)
                if not np.array_equal(out, data(source, 0, at, count)):
                    wrong.append(f"rank {rank}, message {at} of {source}")

        threads = [threading.Thread(target=exchange, args=(each,)) for each in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return wrong, len(comm.repairs())


def blocked() -> list[str]:
    """Return what `pending` says of a receive that waits, on both communicators of a job."""
    with r2ccl.init() as comm:
        child = comm.dup()
        if comm.rank:
            comm.barrier()
            child.send(np.ones(3), 0, tag=4)
            return []
        thread = threading.Thread(target=child.recv, args=(np.empty(3), 1, 4))
        thread.start()
        found = ["", ""]
        until_s = time.monotonic() + 30
        while not all("recv() from rank 1 with tag 4" in each for each in found):
            found = [str(comm.pending()), str(child.pending())]
            assert time.monotonic() < until_s, found
        comm.barrier()
        thread.join()
        return found


def before_any_receive(nmessages: int) -> bool:
    """Send short messages to a rank that has not used messages yet, then call a collective."""
    with r2ccl.init() as comm:
        if comm.rank == 0:
            for at in range(nmessages):
                comm.send(np.full(3, float(at)), 1, at)
        comm.barrier()
        out = np.empty(3)
        is_right = True
        for at in range(nmessages if comm.rank == 1 else 0):
            comm.recv(out, 0, at)
            is_right &= bool((out == at).all())
        return is_right


def never_received() -> float:
    """Close the job while short messages wait, one of them on a communicator closed before."""
    with r2ccl.init() as comm:
        child = comm.dup()
        if comm.rank == 1:
            child.close()
        comm.barrier()
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
            child.send(np.ones(3), 1)
        return float(comm.allreduce(np.ones(1))[0])


def refused_to_the_first() -> list[str]:
    """Send to two receives that wait, of which the first is of another dtype."""
    with r2ccl.init() as comm:
        if comm.rank == 0:
            comm.barrier()
            comm.send(np.ones(3), 1)
            comm.send(np.full(3, 2.0), 1, tag=1)
            comm.barrier()
            return []
        other, right = np.empty(3, np.float32), np.empty(3)
        begun = [comm.recv(each, async_op=True) for each in (other, right, right, other)]
        comm.barrier()
        found = []
        for each in begun[:3]:
            try:
                found.append(str(each.wait(TIMEOUT_S)))
            except R2cclError as exc:
                found.append(type(exc).__name__)
        found += [str(begun[3].cancel()), str(begun[3].wait()), str(begun[3].is_done())]
        comm.barrier()
        return found


def order_after_a_refusal() -> list[float]:
    """Refuse the second of two messages, then receive both."""
    with r2ccl.init() as comm:
        if comm.rank == 0:
            for tag in (1, 2):
                comm.send(np.full(3, float(tag)), 1, tag)
        comm.barrier()
        found: list[float] = []
        if comm.rank == 1:
            comm.probe(0, 2)
            try:
                comm.recv(np.empty(3, np.int8), 0, 2)
            except r2ccl.InvalidArgument:
                found.append(-1.0)
            out = np.empty(3)
            for _ in range(2):
                comm.recv(out, 0)
                found.append(float(out[0]))
        return found


def waited_for_a_while() -> list[str]:
    """Wait for a message longer than the time that a call may take."""
    with r2ccl.init() as comm:
        found = []
        waiting = comm.recv(np.empty(3), async_op=True)
        try:
            waiting.wait(comm.config.timeout_s + 0.5)
        except r2ccl.TransportTimeout as exc:
            found.append(str(exc.status))
        comm.send(np.ones(3), comm.rank, 4)
        return [*found, str(waiting.wait())]


def resized_after_a_wait() -> list[int]:
    """Send and receive arrays, wait, and resize them while the requests are kept.

    Return the sizes of the arrays, and that of one whose message was refused.
    """
    with r2ccl.init() as comm:
        other, kept, arrays = 1 - comm.rank, [], []
        for nbytes in (24, 1_000_000):
            x, out = bytearray(nbytes), bytearray(nbytes)
            kept += [comm.recv(out, other, async_op=True), comm.send(x, other, async_op=True)]
            for each in kept[-2:]:
                each.wait()
            arrays += [x, out]
        small = bytearray(3)
        kept.append(comm.recv(small, other, async_op=True))
        comm.send(bytes(4), other)
        with suppress(R2cclError):
            kept[-1].wait()
        arrays.append(small)
        comm.recv(bytearray(4), other)
        for array in arrays:
            array.append(1)
        return [len(array) for array in arrays]


def without_eager_calls() -> list[tuple[int, float]]:
    """Exchange messages of all kinds where no call is eager."""
    with r2ccl.init() as comm:
        found = []
        for to in range(comm.nranks):
            for count in (0, 3, 100_000):
                out = np.empty(count)
                after, before = (comm.rank + to) % comm.nranks, (comm.rank - to) % comm.nranks
                comm.sendrecv(np.ones(count), after, out, before)
                found.append((count, float(out.sum())))
        comm.barrier()
        return found


def two_waits() -> list[str]:
    """Wait for a message in two threads; after one wait has ended, return what the rank waits for.

    Return the descriptions while both wait, and while the first alone waits.
    """
    with r2ccl.init() as comm:
        found: list[str] = []

        def receive() -> None:
            comm.recv(np.empty(3), 1, tag=2)

        def look() -> None:
            until_s = time.monotonic() + TIMEOUT_S / 4
            messenger = comm._engine.messenger
            for nwaits in (2, 1):
                while len(messenger.waits) != nwaits and time.monotonic() < until_s:
                    time.sleep(0.01)
                found.append(f"{comm.pending()}")
                found.append(f"{sorted(peer for each in messenger.waits for peer in each.peers)}")
                comm.send(np.ones(3), 1, tag=nwaits)

        threads = [threading.Thread(target=each) for each in (receive, look)]
        if comm.rank == 0:
            for thread in threads:
                thread.start()
            comm.recv(np.empty(3), 1, tag=1)
            for thread in threads:
                thread.join()
        else:
            for tag in (2, 1):
                comm.recv(np.empty(3), 0, tag=tag)
                comm.send(np.ones(3), 0, tag=tag)
        comm.barrier()
        return found


def closed_in_a_handler(has_others: bool) -> list[str]:
    """Close the job in a signal handler that interrupts a receive; return how both ended.

    If `has_others`, other threads have begun and ended a receive, and are in one, meanwhile.
    """
    found: list[str] = []
    comm = r2ccl.init()

    def close(signum: int, frame: Any) -> None:
        if not has_others:  # the interrupted thread owns the data loop
            with raises(r2ccl.ConcurrentCalls, match="signal handler"):
                comm.exclude(0, 0)
        comm.close()
        found.append("closed")

    def receive(tag: int) -> None:
        with suppress(R2cclError):
            comm.recv(np.empty(3), tag=tag)

    signal.signal(signal.SIGALRM, close)
    threads = [threading.Thread(target=receive, args=(tag,)) for tag in (1, 2)]
    if comm.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        for thread in threads if has_others else []:
            thread.start()
    elif has_others:
        comm.send(np.ones(3), 0, tag=1)
    try:
        comm.recv(np.empty(3))
    except R2cclError as exc:
        found.append(type(exc).__name__)
    comm.abort()
    return found


def closed_by_the_sender(is_awaited: bool) -> str:
    """Receive a long message on a communicator that its sender closes; tell what was received.

    If `is_awaited`, the receive is posted before the message is sent. The sender changes its array
    after the close.
    """
    with r2ccl.init() as comm:
        child, count = comm.dup(), 4_000_000
        if comm.rank == 0:
            comm.recv(np.empty(1), 1)
            x = np.ones(count)
            sent = child.send(x, 1, async_op=True)
            while is_awaited and child._engine.messenger.way.driver._announced:
                sent.is_done()
            child.close()
            x[:] = 2
            comm.send(np.empty(1), 1)
            return ""
        out = np.zeros(count)
        receive = child.recv(out, 0, async_op=True) if is_awaited else None
        comm.send(np.empty(1), 0)
        if receive is None:
            child.probe(0)
            comm.recv(np.empty(1), 0)
            receive = child.recv(out, 0, async_op=True)
        try:
            receive.wait()
        except CommunicatorRevoked as exc:
            return str(exc)
        finally:
            child.close()
        return f"{out.min():g} to {out.max():g}"


def _ends(request: r2ccl.MessageRequest) -> list[str]:
    """Return whether a request tells that it is done, and the error of its wait."""
    is_done = str(request.is_done())
    try:
        return [is_done, str(request.wait())]
    except R2cclError as exc:
        return [is_done, type(exc).__name__]


def unfinished_after_the_close() -> list[list[str]]:
    """Close the job's communicator with unfinished messages, for one of which a thread waits."""
    comm = r2ccl.init()
    peer, found = 1 - comm.rank, []
    sent = [comm.send(np.ones(300_000), peer, 1, async_op=True) for _ in range(2)]
    received = comm.recv(np.ones(3), peer, 2, async_op=True)
    waiting = threading.Thread(target=lambda: found.append(_ends(sent[0])[1:]))
    waiting.start()
    comm.close()
    waiting.join(TIMEOUT_S)
    return [*found, _ends(sent[1]), _ends(received)]


def unfinished_in_a_forked_child() -> list[str]:
    """Return how unfinished messages end in a forked child; they continue in the parent."""
    with r2ccl.init() as comm:
        peer, x, out = 1 - comm.rank, np.full(300_000, comm.rank + 1.0), np.zeros(300_000)
        sent = comm.send(x, peer, async_op=True)
        received = comm.recv(np.ones(3), peer, 2, async_op=True)
        reader, writer = os.pipe()
        if not os.fork():
            os.write(writer, " ".join(_ends(sent) + _ends(received)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            said = file.read().split()
        comm.recv(out, peer)
        sent.wait()
        return [*said, f"{out.min():g} to {out.max():g}", str(received.cancel())]
