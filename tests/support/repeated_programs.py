"""Programs of ranks that repeat a call over TCP, and do something unusual beside it."""

from __future__ import annotations

import gc
import itertools
import signal
import time
import weakref
from typing import Any

import numpy as np
from support import interrupted
from support.compiled_programs import compiled_of, count_results, counted_repeats

import r2ccl
from r2ccl.algos import ring

#: Time after which a signal arrives in a call, and time after which the peer makes the call.
_SIGNAL_S, _LATE_S = 0.004, 0.1


def handler_calls(what: str) -> tuple[str, bool, int]:
    """Call a method in a signal handler that interrupts a repeated call of rank 0.

    Return the error of the method, whether the result of the call is exact, and the number of
    repetitions.
    """
    said = ""
    with r2ccl.init(shm="0", compiled="1") as comm, counted_repeats(comm) as repeats:
        x, out = np.ones(100, np.float32), np.zeros(100, np.float32)
        does = {
            "empty": lambda: comm.empty(10, np.float32),
            "exclude": lambda: comm.exclude(0, 0),
            "send": lambda: comm.send(np.ones(3), 1, async_op=True),
        }[what]

        def handle(*_: object) -> None:
            nonlocal said
            try:
                does()
            except Exception as exc:
                said = type(exc).__name__

        for _ in range(5):
            comm.allreduce(x, out)
        signal.signal(signal.SIGALRM, handle)
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, _SIGNAL_S)
        else:
            time.sleep(_LATE_S)
        comm.allreduce(x, out)
        return said, bool((out == comm.nranks).all()), len(repeats)


def overflows() -> tuple[float, int]:
    """Repeat sums that overflow where NumPy raises; return one, and how many left the code."""
    np.seterr(all="raise")
    with r2ccl.init(shm="0", compiled="1") as comm:
        compiled = compiled_of(comm)
        compiled.limit = 1
        x, out = np.full(500, 3e38, np.float32), np.empty(500, np.float32)
        for number in range(20):
            if number % 5 == comm.rank:
                time.sleep(0.02)
            comm.allreduce(x, out)
        return float(out[0]), compiled.nleft


def times_out() -> list[bool]:
    """Let a repeated call fail; return whether its arrays are still referred to."""
    comm = r2ccl.init(shm="0", compiled="1", timeout_s=0.5)
    for _ in range(5):
        comm.allreduce(np.ones(300_000, np.float32), np.empty(300_000, np.float32))
    x, out = np.ones(300_000, np.float32), np.empty(300_000, np.float32)
    kept = [weakref.ref(x), weakref.ref(out)]
    if comm.rank:
        time.sleep(1.0)
    else:
        try:
            comm.allreduce(x, out)
        except r2ccl.TransportTimeout:
            pass
        else:
            raise AssertionError("the call did not fail")
    del x, out
    gc.collect()
    found = [each() is not None for each in kept]
    comm.abort()
    return found


def held_until_close(nlocal: int) -> list[tuple[int, int]]:
    """Close communicators in shared memory with a held call, and `nlocal` further calls.

    Return the number of the last call as each communicator reports it, and as it is passed on.
    """
    found = []
    with r2ccl.init(shm="1", compiled="1") as comm:
        for _ in range(4):
            other = comm.dup()
            other.run_schedule(ring.allreduce(other.nranks), np.ones(10, np.float32))
            for _ in range(nlocal):
                other.barrier()
            engine: Any = other._engine
            op = engine.op
            other.close()
            found.append((op, engine._calls.op))
            comm.allreduce(np.ones(3))
    return found


def calls_ahead(ncalls: int) -> bool:
    """Repeat `ncalls` small reductions before the root, rank 0, calls; return if all are exact."""
    with r2ccl.init(shm="0", compiled="1", timeout_s=10.0) as comm:
        x, out, told = np.arange(50), np.zeros(50, np.int64), np.zeros(1)

        def reduce() -> bool:
            comm.reduce(x, out if comm.rank == 0 else None, root=0)
            return bool(comm.rank or (out == comm.nranks * x).all())

        is_exact = all(reduce() for _ in range(5))
        comm.barrier()
        if comm.rank == 0:
            comm.recv(told, 1)
        is_exact = all(reduce() for _ in range(ncalls)) and is_exact
        if comm.rank == 1:
            comm.send(told, 0)
        return is_exact


def counts_of_early_slices() -> tuple[int, int]:
    """Repeat broadcasts for which rank 1 is late; return slices sent and received by this rank."""
    with r2ccl.init(shm="0", compiled="1") as comm:
        x = np.zeros(50, np.int64)

        def counts() -> tuple[int, int]:
            rails = comm.health().rails
            paths = [path for rail in rails for path in rail.paths]
            found = sum(p.nslices_sent for p in paths), sum(p.nslices_received for p in paths)
            # Rank 0 sends nothing before rank 1 has counted.
            comm.send(x, 0) if comm.rank else comm.recv(np.empty_like(x), 1)
            return found

        comm.barrier()
        time.sleep(_LATE_S)
        sent, received = counts()
        for _ in range(3):
            if comm.rank:
                time.sleep(2 * _LATE_S)  # slices arrive before their calls
            for _ in range(10):
                comm.broadcast(x)
        comm.barrier()
        time.sleep(_LATE_S)
        now = counts()
        return now[0] - sent, now[1] - received


def counts_despite_ctrl_c(nlines: int) -> tuple[list[int], list[int], int, int]:
    """Repeat calls, `nlines` times three; on rank 0 settle them with Ctrl-C before a later line.

    Return the numbers of slices and bytes sent, and received; how many calls ended in compiled code
    or left it; and how often Ctrl-C came.
    """
    x = np.ones(50)
    with r2ccl.init(shm="0", compiled="1") as comm:
        compiled, ncame = compiled_of(comm), 0
        for line in range(1, nlines + 1):
            for _ in range(3):
                comm.allreduce(x)
            with comm._engine._loop.owner:
                if comm.rank == 0 and compiled.held is not None:
                    ncame += interrupted.at_line(line, compiled.settle)
                compiled.settle()
        ncalls = compiled.nfinished + compiled.nleft
        comm.barrier()
        with comm._engine._loop.owner:
            compiled.settle()
            paths = comm._engine._links.paths.values()
            sent = [
                sum(path.nslices_sent for path in paths),
                sum(path.nbytes_sent for path in paths),
            ]
            received = [
                sum(path.nslices_received for path in paths),
                sum(path.nbytes_received for path in paths),
            ]
        return sent, received, ncalls, ncame


def repeats_after_another_form() -> tuple[int, int]:
    """Return how many calls are repeated, without and with earlier calls of another form."""
    with r2ccl.init(shm="0", compiled="1") as comm, counted_repeats(comm) as repeats:
        out = np.empty(40, np.float32)
        for _ in range(100):
            comm.allreduce(np.ones(40, np.float32), out)
        usual = len(repeats)
        x, out = np.ones(41, np.float32), np.empty(41, np.float32)
        for _ in range(5):
            comm.allreduce(x, x)
        before = len(repeats)
        for _ in range(100):
            comm.allreduce(x, out)
        return usual, len(repeats) - before


def timers_between_repetitions() -> tuple[int, int, int, int]:
    """Make repeated gathers, before some of which timers are due.

    Return how often they were due, how often they ran, how many calls left compiled code, and how
    often the data loop has read frames of calls that are later than all that it had read before.
    """
    with r2ccl.init(shm="0", compiled="1") as comm:
        x, out = np.ones(50, np.float32), np.empty((comm.nranks, 50), np.float32)
        engine: Any = comm._engine
        loop, compiled, nread, latest = engine._loop, compiled_of(comm), 0, 0
        loop.tick = lambda now: None  # the control thread runs none meanwhile
        for _ in range(5):
            comm.gather(x, out)
        before = compiled.nleft
        ticks = count_results(loop.failover, "tick", NotImplemented)
        for _ in range(20):
            if comm.rank == 0:
                time.sleep(0.002)  # the other rank is ahead
            loop.is_tick_due = True
            comm.gather(x, out)
            if (read := max(engine._calls.ahead, default=0)) > latest:
                nread, latest = nread + 1, read
            comm.gather(x, out)
        return 20, len(ticks), compiled.nleft - before, nread


def timers_before_other_calls() -> tuple[int, int, int]:
    """Make calls that are not held, before each of which timers are due.

    The transport has other events before every second call. Return the number of calls, how often
    the timers ran, and how often the data loop ran before the timers.
    """
    with r2ccl.init(shm="0", compiled="1") as comm:
        x, ncalls = np.ones(50, np.float32), 10
        engine: Any = comm._engine
        compiled: Any = compiled_of(comm)
        loop, seen = engine._loop, []
        loop.tick = lambda now: None  # the control thread runs none meanwhile
        compiled._may_hold = lambda program, calls: False
        comm.allreduce(x)
        tick, step = loop._tick, loop.progress.step
        loop._tick = lambda now: (seen.append("timers"), tick(now))
        loop.progress.step = lambda *given: (seen.append("step"), step(*given))[1]
        for number in range(ncalls):
            loop.is_tick_due = True
            compiled.has_other_events = lambda plan, number=number: number % 2 == 1
            comm.allreduce(x)
        nafter = sum(pair == ("step", "timers") for pair in itertools.pairwise(seen))
        return ncalls, seen.count("timers"), nafter


def calls_after_one_in_python() -> int:
    """Return how many of 20 broadcasts run in compiled code, each after one that cannot."""
    with r2ccl.init(shm="0", compiled="1") as comm:
        x = np.ones(50, np.float32)
        for _ in range(5):
            comm.broadcast(x)
        transport: Any = comm._engine._loop._transport
        compiled, lend, ncompiled = compiled_of(comm), transport.lend, 0
        for _ in range(20):
            transport.lend = lambda paths: None
            comm.broadcast(x)
            transport.lend = lend
            before = compiled.nfinished + compiled.nleft
            comm.broadcast(x)
            comm.health()  # settles, which counts the call
            ncompiled += compiled.nfinished + compiled.nleft - before
        return ncompiled


def joins_despite_ctrl_c(nlines: int) -> tuple[int, int, int]:
    """On rank 0, let a call join a held message with Ctrl-C before a later line, `nlines` times.

    Return the number of wrong results, how often the message was held, and how often Ctrl-C came.
    """
    with r2ccl.init(shm="0", compiled="1") as comm:
        x, out, told = np.ones(50), np.empty(50), np.zeros(3)
        engine, compiled, nwrong, nheld, ncame = comm._engine, compiled_of(comm), 0, 0, 0
        program: Any = None
        for _ in range(20):  # on a busy machine, not every call is held
            comm.allreduce(x, out)
            program = engine.held_program or program
        for line in range(1, nlines + 1):
            for number in range(2):
                if comm.rank == 0:  # the message uses fewer connections than the call
                    comm.send(told + number, 1)
                elif comm.rank == 1:
                    comm.recv(told, 0)
                    nwrong += told[0] != number
            with engine._loop.owner:
                if comm.rank == 0 and compiled.held is not None and program is not None:
                    given = program, engine._calls, engine._note_started
                    ncame += interrupted.at_line(line, lambda given=given: compiled.switch(*given))
                    nheld += 1
                compiled.settle()
            told[:] = 0
            comm.allreduce(x, out)
            nwrong += not (out == comm.nranks).all()
        return nwrong, nheld, ncame


def scatters_in_turn(ncalls: int) -> tuple[int, int]:
    """Scatter parts of two sizes in turn; return wrong results and repetitions."""
    with r2ccl.init(shm="0", compiled="1") as comm, counted_repeats(comm) as repeats:
        wholes = [np.arange(comm.nranks * count).reshape(comm.nranks, -1) for count in (30, 70)]
        outs, nwrong = [np.empty_like(whole[0]) for whole in wholes], 0
        for _ in range(ncalls):
            for whole, out in zip(wholes, outs, strict=True):
                out[:] = -1
                comm.scatter(whole if comm.rank == 0 else None, out)
                nwrong += not np.array_equal(out, whole[comm.rank])
        return nwrong, len(repeats)


def owned_after_ctrl_c(what: str) -> tuple[list[int], int]:
    """On rank 0, press Ctrl-C as each function of a call begins, and shrink after it.

    Return the numbers of the functions after which the data loop is owned, and the number of all.
    """
    comm, owned = r2ccl.init(shm="0", compiled="1"), []
    x = np.ones(50)

    def call() -> None:
        if what == "health":
            comm.health()  # settles, so that the next call is not a repetition
        if what == "registration":
            comm.register(x).close()
        elif what != "message":
            comm.allreduce(x)
        elif comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)

    for number in range(1, 1000):
        try:
            comm.barrier()  # so that rank 1 has left init() or shrink()
            for _ in range(4):
                call()
            if comm.rank:
                call()
                comm.barrier()
                break
            if not interrupted.at_entry(number, call):
                comm.barrier()
                break
            if comm._engine._loop.owner._is_owned():  # type: ignore[attr-defined]
                owned.append(number)
        except r2ccl.R2cclError:
            assert comm.rank
        comm = comm.shrink()
    comm.close()
    return owned, number
