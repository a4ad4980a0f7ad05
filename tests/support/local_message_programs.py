"""Programs of ranks whose messages go through shared memory."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
from support.raising import raises
from support.stopping import stop_for_a_second

import r2ccl
from r2ccl import ANY_SOURCE, ANY_TAG, Communicator, Message
from r2ccl.errors import R2cclError
from r2ccl.runtime.messages.local import LocalMessages
from r2ccl.runtime.messages.outcome import Delayed
from r2ccl.shm import message_layout as layout
from r2ccl.shm.rings import Rings

#: Around the largest short message, a piece, half a ring, and several rings.
COUNTS = (0, 1, 3, 100, 1000, 4095, 8192, 8193, 20_000, 32_761, 200_001)


def data(source: int, to: int, number: int, count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.float64) * (source + 1) + 1000 * to + number


def way() -> list[bool]:
    """Return whether the messages of each communicator go through shared memory."""
    with r2ccl.init() as comm:
        half = comm.split(comm.rank // 2)
        assert half is not None
        out = np.empty(3)
        comm.sendrecv(np.ones(3), (comm.rank + 1) % comm.nranks, out, ANY_SOURCE)
        assert (out == 1).all()
        ways = [each._engine.messenger.way for each in (comm, comm.dup(), half)]
        return [isinstance(each, LocalMessages) for each in ways]


def mixed(nmessages: int, seed: int) -> tuple[list[str], int, int]:
    """Send random messages in random ways; return what is wrong, and memory at half-time and later.

    All ranks draw the same messages. Messages of one pair are numbered; their tags repeat.
    """
    wrong: list[str] = []
    held = []
    with r2ccl.init() as comm:
        choice = random.Random(seed)
        at = 0
        while at < nmessages:
            if len(held) == 0 and at > nmessages // 2:
                held.append(_resident())
            batch = [
                (
                    choice.randrange(comm.nranks), choice.randrange(comm.nranks),
                    choice.randrange(3), choice.choice(COUNTS), choice.random() < 0.1,
                )
                for _ in range(choice.randrange(1, 40))
            ]  # fmt: skip
            kind = choice.randrange(4)
            _exchange_batch(comm, batch, at, kind, wrong)
            at += len(batch)
            if kind >= 2:  # a receive from any source must not take a message of the next batch
                comm.barrier()
            if choice.random() < 0.1:
                total = comm.allreduce(np.ones(3))[0]
                if total != comm.nranks:
                    wrong.append(f"rank {comm.rank}: a sum of {total}")
        held.append(_resident())
    return wrong, held[0], held[1]


def mixed_and_read(nmessages: int, seed: int) -> tuple[list[str], int]:
    """As `mixed`, but read two of three readable messages that Python receives.

    Return what is wrong, and how many messages Python chose to read.
    """
    nread = nreadable = 0

    def choose(rings: Rings, peer: int, readable_at: int, nbytes: int) -> int:
        nonlocal nread, nreadable
        nreadable += readable_at != 0
        chosen = readable_at if nreadable % 3 else 0
        nread += chosen != 0
        return chosen

    Rings.choose = choose  # type: ignore[method-assign]
    wrong, _, _ = mixed(nmessages, seed)
    return wrong, nread


def _exchange_batch(
    comm: Communicator,
    batch: list[tuple[int, int, int, int, bool]],
    first: int,
    kind: int,
    wrong: list[str],
) -> None:
    """Exchange messages (source, to, tag, count, whether synchronous).

    By `kind`, receives name source and tag, only the source, or neither. Of those that a receive
    could take, the messages of a source must come in the order of sending.
    """
    rank, own_choice = comm.rank, random.Random(first + comm.rank)
    mine = [(at, each) for at, each in enumerate(batch) if each[1] == rank]
    most = max(count for *_, count, _ in batch)
    outs = [np.full(most + 1, -1.0) for _ in mine]
    posted = [
        comm.recv(
            out,
            source if kind < 2 else ANY_SOURCE,
            tag if kind in (0, 2) else ANY_TAG,
            async_op=True,
        )
        for out, (_, (source, _, tag, _, _)) in zip(outs, mine, strict=True)
    ]
    sends = []
    for at, (source, to, tag, count, is_synchronous) in enumerate(batch):
        if source == rank:
            x = data(source, to, first + at, count)
            is_async = to == rank or own_choice.random() < 0.5 or is_synchronous or count > 8000
            sends.append(comm.send(x, to, tag, is_synchronous=is_synchronous, async_op=is_async))
    expected: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at, (source, _, tag, count, _) in mine:
        expected.setdefault((source, tag), []).append((first + at, count))
    found = [each.wait() for each in posted]
    for out, message in zip(outs, found, strict=True):
        number, count = expected[message.source, message.tag].pop(0)
        if message.count != count or not np.array_equal(
            out[:count], data(message.source, rank, number, count)
        ):
            wrong.append(f"rank {rank}: message {number} of {count} came as {message}")
        elif out[count] != -1.0:
            wrong.append(f"rank {rank}: message {number} is too long")
    for each in sends:
        if each is not None:
            each.wait()


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def while_computing(count: int) -> float:
    """Send to a rank that computes, with its receive posted; return how long the send took."""
    with r2ccl.init() as comm:
        out = np.zeros(count)
        if comm.rank == 0:
            comm.barrier()
            began_s = time.monotonic()
            comm.send(np.ones(count), 1)
            took_s = time.monotonic() - began_s
        else:
            receive = comm.recv(out, 0, async_op=True)
            comm.barrier()
            until_s = time.monotonic() + 3.0
            while time.monotonic() < until_s:
                sum(range(1000))
            is_done = receive.is_done()
            receive.wait()
            took_s = 0.0 if is_done and (out == 1).all() else 9.0
        comm.barrier()
        return took_s


def beside_a_fast_pair(nmessages: int) -> float:
    """Two ranks exchange for seconds; a third sends more than a ring holds to the first of them.

    The short messages stay below the limit for those that no receive has taken.

    Return when the exchanges, or the sends, have ended.
    """
    with r2ccl.init() as comm:
        x, out = np.zeros(1000), np.empty(8000)
        comm.barrier()
        if comm.rank == 2:
            for at in range(nmessages):
                comm.send(np.full(8000, float(at)), 0, tag=7)
            ended_s = time.monotonic()
        else:
            until_s = time.monotonic() + 3.0
            out[0] = 0.0
            while not out[0]:
                x[0] = comm.rank == 0 and time.monotonic() > until_s
                comm.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)
                out[0] = max(out[0], x[0])
            ended_s = time.monotonic()
        for at in range(nmessages if comm.rank == 0 else 0):
            comm.recv(out, 2, 7)
            assert (out == at).all()
        comm.barrier()
        return ended_s


def from_two_threads(ntimes: int) -> list[bool]:
    """Receive in two threads at once, while a third exchanges."""
    with r2ccl.init() as comm:
        peer = 1 - comm.rank
        found: list[bool] = []

        def exchange(tag: int) -> None:
            out = np.empty(20_000)
            for at in range(ntimes):
                count = 20_000 if at % 3 == 0 else 100
                send = comm.send(data(comm.rank, tag, at, count), peer, tag, async_op=True)
                message = comm.recv(out, peer, tag)
                assert send is not None
                send.wait()
                found.append(
                    message == Message(peer, tag, count)
                    and np.array_equal(out[:count], data(peer, tag, at, count))
                )

        threads = [threading.Thread(target=exchange, args=(tag,)) for tag in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [len(found) == 3 * ntimes, all(found)]


def stopped() -> int:
    """Stop a rank for a second amid messages; return how many exchanges were made."""
    with r2ccl.init() as comm:
        x, out, peer = np.ones(100_000), np.empty(100_000), 1 - comm.rank
        comm.barrier()
        is_over = stop_for_a_second() if comm.rank else lambda: True
        nexchanges, goes_on = 0, np.ones(1)
        while goes_on[0]:
            comm.sendrecv(x, peer, out, peer)
            nexchanges += 1
            goes_on[0] = not is_over()
            comm.allreduce(goes_on, op=r2ccl.ReduceOp.MAX)
        for _ in range(3):
            comm.sendrecv(x, peer, out, peer)
            nexchanges += 1
        return nexchanges


#: Calls that wait for a peer for ever: they get the communicator and its other rank.
WAITS: dict[str, Callable[[Communicator, int], Any]] = {
    "recv": lambda comm, peer: comm.recv(np.empty(3), peer),
    "recv any": lambda comm, peer: comm.recv(np.empty(3)),
    "send": lambda comm, peer: comm.send(np.ones(1 << 20), peer),
    "sendrecv": lambda comm, peer: comm.sendrecv(np.ones(3), peer, np.empty(3), peer),
    "long sendrecv": lambda comm, peer: comm.sendrecv(
        np.ones(1 << 20), peer, np.empty(1 << 20), peer
    ),
    "probe": lambda comm, peer: comm.probe(peer),
    "wait": lambda comm, peer: comm.recv(np.empty(3), peer, async_op=True).wait(),
}


def lost_peer(name: str) -> tuple[str, float]:
    """Kill the peer of a call that waits; return the error, and when the peer died and it came."""
    comm = r2ccl.init()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
        with open(os.environ["DIED_AT"], "w") as file:
            file.write(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        WAITS[name](comm, 1)
    except R2cclError as exc:
        raised_s = time.monotonic()
        comm.abort()
        with open(os.environ["DIED_AT"]) as file:
            return f"{type(exc).__name__} of rank {getattr(exc, 'peer', None)}", (
                raised_s - float(file.read())
            )
    return "no error", 0.0


def late(name: str) -> str:
    """Wait longer than a call may take; return the error."""
    with r2ccl.init(timeout_s=0.5) as comm:
        if comm.rank == 1:
            while comm._engine.error is None:
                time.sleep(0.01)
            comm.abort()
            return ""
        try:
            WAITS[name](comm, 1)
        except R2cclError as exc:
            comm.abort()
            return f"{type(exc).__name__}: {exc}"
    return "no error"


def ended_by(how: str, name: str) -> list[str]:
    """End a call that waits, by another thread, a signal handler or Ctrl-C; return the errors."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = r2ccl.init()
    comm.barrier()
    if comm.rank == 0:
        act = getattr(comm, how.partition(" ")[0], None)
        if how == "interrupt":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        elif how.endswith("thread"):
            threading.Timer(0.2, act).start()  # type: ignore[arg-type]
        else:
            signal.signal(signal.SIGALRM, lambda *_: act())  # type: ignore[misc]
            signal.setitimer(signal.ITIMER_REAL, 0.2)
    found = []
    began_s = time.monotonic()
    try:
        if comm.rank == 0:
            WAITS[name](comm, 1)
        else:
            comm.recv(np.empty(3), 0, tag=99)
    except (R2cclError, KeyboardInterrupt) as exc:
        found.append(type(exc).__name__)
    found.append("late" if time.monotonic() - began_s > 1.5 else "in time")
    try:
        comm.send(np.ones(3), 1 - comm.rank)
    except R2cclError as exc:
        found.append(type(exc).__name__)
    comm.abort()
    return found


def forked() -> list[str]:
    """Send in a forked child, which is refused, and go on in the parent."""
    with r2ccl.init() as comm:
        peer, out = 1 - comm.rank, np.empty(5)
        for _ in range(3):
            comm.sendrecv(np.ones(5), peer, out, peer)
        reader, writer = os.pipe()
        if not os.fork():
            try:
                comm.sendrecv(np.ones(5), peer, out, peer)
            except R2cclError as exc:
                os.write(writer, type(exc).__name__.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            said = file.read()
        message = comm.sendrecv(np.full(5, 7.0), peer, out, peer)
        return [said, str(message == Message(peer, 0, 5) and bool((out == 7).all()))]


def closing_a_child() -> list[bool]:
    """Close a communicator on one rank before the other has received all from it."""
    with r2ccl.init() as comm:
        peer, count = 1 - comm.rank, 500_000
        child = comm.dup()
        out = np.zeros(count)
        if comm.rank == 0:
            long = child.send(np.ones(count), peer, tag=1, async_op=True)
            child.send(np.full(3, 2.0), peer, tag=2)
            comm.recv(np.empty(1), peer)  # the long message is granted
            child.close()
            return [long is not None]
        child.probe(peer, 1)
        receive = child.recv(out, peer, 1, async_op=True)
        comm.send(np.ones(1), peer)
        receive.wait()
        is_right = bool((out == 1).all())
        child.recv(out, peer, 2)
        return [is_right and bool((out[:3] == 2).all())]


def _read_all(comm: Communicator) -> None:
    """Let this rank read all messages that may be read, apart from rare trials; none over links."""
    way = comm._engine.messenger.way
    if not isinstance(way, LocalMessages):
        return
    for words in way.driver.rings._words.values():
        classes = words[layout.CLASSES :].reshape(layout.NCLASSES, layout.CLASS_NWORDS)
        classes[:, layout.CLASS_NMESSAGES] = 1 << 20
        classes[:, layout.CLASS_NS :] = 1 << 40, 1


def _exchange_until_the_end(comm: Communicator, end: Callable[[], None]) -> list[str]:
    """Send from rank 0, where another thread calls ``end()`` meanwhile, to rank 1, which reads.

    Rank 0 changes its array as soon as a send raises. Return the wrong results.
    """
    _read_all(comm)
    wrong: list[str] = []
    x, out, number = np.zeros(300_000), np.zeros(300_000), 0
    thread = threading.Thread(target=end)
    if comm.rank == 0:
        thread.start()
    with suppress(R2cclError):
        while True:
            number += 1
            if comm.rank == 0:
                x[:] = number
                try:
                    comm.send(x, 1)
                except BaseException:
                    x[:] = -1
                    raise
            else:
                comm.recv(out, 0, async_op=True).wait(0.3)
                if not (out == number).all():
                    wrong.append(f"{out.min()} to {out.max()} instead of {number}")
    if comm.rank == 0:
        thread.join()
    return wrong


def closing_children_in_threads(nrounds: int, seed: int) -> list[str]:
    """Close communicators on which another thread sends; return wrong results of the receiver."""
    wrong = []
    choice = random.Random(seed)
    with r2ccl.init() as comm:
        for _ in range(nrounds):
            child, delay_s = comm.dup(), 0.005 * choice.random()

            def close(child: Communicator = child, delay_s: float = delay_s) -> None:
                time.sleep(delay_s)
                child.close()

            wrong += _exchange_until_the_end(child, close)
            comm.barrier()
            child.close()
    return wrong


def closing_in_a_thread() -> tuple[str, float]:
    """Close a communicator on which another thread waits for a message that nobody sends.

    Return the error of the wait, and how long it took after the close began.
    """
    found = "", math.inf
    with r2ccl.init() as comm:
        child = comm.dup()
        began_s: list[float] = []

        def close() -> None:
            time.sleep(0.1)
            began_s.append(time.monotonic())
            child.close()

        thread = threading.Thread(target=close)
        thread.start()
        try:
            child.recv(np.zeros(3), 1 - comm.rank)
        except R2cclError as exc:
            found = type(exc).__name__, time.monotonic() - began_s[0]
        thread.join()
    return found


def waiting_briefly_during_a_close() -> tuple[str, bool]:
    """Wait for a send for a short time while another thread closes, and the peer takes it later.

    Return the error of the wait, and whether the peer received the right message.
    """
    found, is_right = "", True
    with r2ccl.init() as comm:
        x, out = np.ones(300_000), np.zeros(300_000)
        comm.barrier()
        if comm.rank == 0:
            sent = comm.send(x, 1, async_op=True)
            thread = threading.Thread(target=comm.close)
            thread.start()
            time.sleep(0.2)
            try:
                sent.wait(0.01)
            except R2cclError as exc:
                found = type(exc).__name__
            if found != "TransportTimeout":  # the array is this rank's again
                x[:] = -1
            thread.join()
        else:
            time.sleep(0.5)
            comm.recv(out, 0)
            is_right = bool((out == 1).all())
    return found, is_right


def aborting_in_a_thread(delay_s: float) -> list[str]:
    """Abort while another thread sends; return wrong results of the receiver."""
    comm = r2ccl.init()

    def abort() -> None:
        time.sleep(delay_s)
        comm.abort()

    comm.barrier()
    wrong = _exchange_until_the_end(comm, abort)
    comm.abort()
    return wrong


def many_kinds() -> list[tuple[int, int]]:
    """Receive messages of other sizes after many kinds of calls; return the wrong sizes."""
    wrong = []
    with r2ccl.init() as comm:
        x, out, nothing, peer = np.ones(64), np.zeros(64), np.zeros(0), 1 - comm.rank

        def pass_on(size: int) -> None:
            if comm.rank == 0:
                comm.send(x[:size].copy(), peer, tag=7)
                comm.recv(nothing, peer, tag=8)
                return
            found = comm.recv(out, peer, tag=7)
            if found.count != size:
                wrong.append((size, found.count))
            comm.send(nothing, peer, tag=8)

        for size in (10, 20) * 5:
            pass_on(size)
        for tag in range(100, 200):  # more than are remembered
            if comm.rank == 0:
                comm.recv(nothing, peer, tag=tag)
            else:
                comm.send(nothing, peer, tag=tag)
        for size in (10, 20, 20, 30, 30, 10, 10):
            pass_on(size)
    return wrong


def repeated() -> None:
    """Repeat messages with arrays that change in every way that matters."""
    with r2ccl.init() as comm:
        n = comm.nranks
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
        x, out = np.ones(64), np.empty(64)
        for at in range(3):
            x[:] = comm.rank + at
            assert comm.sendrecv(x, right, out, left) == Message(left, 0, 64)
            assert (out == left + at).all()
        # Another size, dtype, shape, tag; not contiguous; no NumPy array; a larger output.
        assert comm.sendrecv(x[:8], right, out[:8], left) == Message(left, 0, 8)
        assert comm.sendrecv(x, right, np.empty(100), left, tag=3) == Message(left, 3, 64)
        assert comm.sendrecv(x, right, np.empty(100), left, tag=4) == Message(left, 4, 64)
        ints = np.arange(64) + comm.rank
        assert comm.sendrecv(ints, right, out.view(np.int64), left) == Message(left, 0, 64)
        assert (out.view(np.int64) == np.arange(64) + left).all()
        comm.sendrecv(x.reshape(8, 8).T, right, out.reshape(8, 8), left)
        comm.sendrecv(x[::2], right, out[:32], left)
        room = bytearray(5)
        assert comm.sendrecv(b"hello", right, room, left) == Message(left, 0, 5)
        assert bytes(room) == b"hello"
        for bad in (1.0, "1", -3, n):
            try:
                comm.sendrecv(x, bad, out, left)  # type: ignore[arg-type]
            except r2ccl.InvalidArgument:
                continue
            raise AssertionError(bad)
        x.flags.writeable = False
        comm.sendrecv(x, right, out, left)
        try:
            comm.sendrecv(out, right, x, left)
        except r2ccl.InvalidArgument:
            pass
        else:
            raise AssertionError("a read-only output")
        # Itself, and nothing at all.
        assert comm.sendrecv(x, comm.rank, out, comm.rank) == Message(comm.rank, 0, 64)
        assert comm.sendrecv(x[:0], right, out, left) == Message(left, 0, 0)
        comm.barrier()


def not_fitting_repeated() -> list[str]:
    """Receive into an array that is too small after calls that fitted; return the errors."""
    with r2ccl.init() as comm:
        found, peer = [], 1 - comm.rank
        for count in (100, 100, 200_000, 200_000):
            for room in (count, count - 1):
                try:
                    if comm.rank:
                        comm.send(np.ones(count), peer)
                    else:
                        comm.recv(np.empty(room), peer)
                except r2ccl.InvalidArgument as exc:
                    found.append(str(exc))
                    if count == 100:
                        comm.recv(np.empty(count), peer)  # a short message stays
        comm.barrier()
        return found


def interrupted_before_the_wait(is_sendrecv: bool) -> list[bool]:
    """Interrupt rank 0 between a direct call that returns `Delayed` and the wait for its message.

    Return whether the communicator has ended, and whether the array stayed as it was.
    """
    comm = r2ccl.init()
    count = 300_000
    out = np.zeros(count)

    def interrupt(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and frame.f_code.co_name == "begin" and type(value) is Delayed:
            sys.setprofile(None)
            raise KeyboardInterrupt

    if comm.rank == 0:
        sys.setprofile(interrupt)
        with raises(KeyboardInterrupt):
            comm.sendrecv(out[:9].copy(), 1, out, 1) if is_sendrecv else comm.recv(out, 1)
    else:
        time.sleep(0.2)
        with suppress(R2cclError):
            comm.send(np.ones(count), 0)
    with suppress(R2cclError):
        comm.barrier()
    has_ended = comm._engine.error is not None
    comm.abort("the test has ended")
    return [has_ended, not out.any()]
