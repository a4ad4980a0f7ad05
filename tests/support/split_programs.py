"""Programs of ranks that use several communicators of one job."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

import r2ccl
from r2ccl import Communicator, InvalidArgument
from r2ccl.errors import CommunicatorRevoked, R2cclError
from r2ccl.runtime import splitting
from r2ccl.testing import Action, Fault, FaultPlan

TIMEOUT_S = 60.0


def split_in_halves() -> list[Any]:
    """Split by parity with reversed keys; return the ranks as each communicator sees them."""
    with r2ccl.init() as comm:
        half = comm.split(comm.rank % 2, -comm.rank)
        assert half is not None
        x = np.full(70_000, float(comm.rank + 1))
        half.allreduce(x)
        ranks = half.allgather(np.array([comm.rank]))
        part = half.reduce_scatter(np.arange(half.nranks * 10.0))
        root = half.broadcast(np.array([comm.rank]), root=half.nranks - 1)
        half.barrier()
        return [half.rank, half.members, x[0], x[-1], ranks.ravel().tolist(), part.sum(), root[0]]


def created() -> list[Any]:
    """Make communicators of some ranks only; return what each rank got."""
    with r2ccl.init() as comm:
        pair = comm.create([2, 0])
        none = comm.split(None if comm.rank == 1 else 5)
        nested = None if none is None else none.split(0, none.rank)
        found: list[Any] = [pair is None, none is None]
        if pair is not None:
            found.append(pair.allgather(np.array([comm.rank])).ravel().tolist())
        if nested is not None:
            found.append(nested.allgather(np.array([comm.rank])).ravel().tolist())
            found.append(nested.members)
        return found


def created_among() -> list[Any]:
    """Make a communicator of ranks 2 and 0, in which rank 1 takes no part."""
    with r2ccl.init() as comm:
        if comm.rank == 1:
            return []
        peer = 2 - comm.rank

        def exchange(mine: bytes) -> list[bytes]:
            theirs = np.empty(len(mine), np.uint8)
            comm.sendrecv(np.frombuffer(mine, np.uint8), peer, theirs, peer)
            rows = {comm.rank: mine, peer: theirs.tobytes()}
            return [rows[2], rows[0]]

        made = comm.create_among([2, 0], exchange)
        ranks = made.allgather(np.array([comm.rank])).ravel().tolist()
        made.close()
        return [made.rank, made.members, ranks]


def in_threads(ncalls: int, counts: tuple[int, ...], nfaults: int) -> tuple[list[str], int]:
    """Call four communicators from four threads, in other orders on each rank, while rails fail.

    Return the errors, and the number of repairs.
    """
    faults = [
        Fault(action=Action.NIC_DOWN, node=0, rail=at % 2, rank=0, at_op=2 + 3 * at, at_step=at)
        for at in range(nfaults)
    ]
    with r2ccl.init(faults=FaultPlan(faults)) as comm:
        half = comm.split(comm.rank % 2)
        assert half is not None
        group = [comm, comm.dup(), comm.create(range(comm.nranks)[::-1]), half]
        errors: list[str] = []

        def call(each: Communicator, first: int) -> None:
            for at in range(ncalls):
                x = np.full(counts[(at + first) % len(counts)], float(each.rank + at))
                each.allreduce(x)
                whole = sum(range(each.nranks)) + each.nranks * at
                if not (x == whole).all():
                    errors.append(f"rank {comm.rank}, call {at}: {x[0]} is not {whole}")

        threads = [
            threading.Thread(target=call, args=(each, at)) for at, each in enumerate(group) if each
        ]
        for thread in threads[:: 1 if comm.rank % 2 else -1]:
            thread.start()
        for thread in threads:
            thread.join()
        return errors, len(comm.repairs())


def many(ncommunicators: int, nrounds: int) -> list[int]:
    """Count descriptors and threads, first, and in each round while many communicators are open."""
    with r2ccl.init() as comm:
        comm.barrier()
        found = [_count_descriptors_and_threads()]
        for _ in range(nrounds):
            opened = [comm.dup() for _ in range(ncommunicators)]
            for each in opened:
                assert each.allreduce(np.ones(3))[0] == comm.nranks
            found.append(_count_descriptors_and_threads())
            for each in opened[::-1]:
                each.close()
        return found


def _count_descriptors_and_threads() -> int:
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


def misused() -> list[str]:
    """Misuse communicators; return the errors."""
    found = []

    def refused(fn: Any, *given: Any) -> None:
        try:
            fn(*given)
        except R2cclError as exc:
            found.append(f"{type(exc).__name__}: {exc}")

    with r2ccl.init() as comm:
        child = comm.dup()
        for fn, *given in (
            (comm.split, 1 << 70), (comm.create, [0, 0]), (comm.create, [7]), (child.shrink,),
            (comm.create_among, [1 - comm.rank], None), (comm.create_among, [comm.rank], None),
            (comm.create, None), (comm.create, 3), (comm.create_among, None, None),
            (comm.explain, 1.5), (comm.explain, "x"), (comm.explain, -1), (comm.exclude, 0, None),
            (comm.dump_on_signal, "USR1"), (comm.dump_on_signal, None), (child.abort, None),
            (comm.abort, ValueError("x")), (comm.revoke, 3),
            *((comm.create_among, [comm.rank], lambda data, rows=rows: rows)
              for rows in (None, "x", ["x"], [], b"x")),
        ):  # fmt: skip
            refused(fn, *given)
        child.allreduce(np.ones(2))
        child.close()
        child.close()
        refused(child.allreduce, np.ones(2))
        refused(child.split, 0)
        other = comm.dup()
        comm.allreduce(np.ones(2))
    refused(other.allreduce, np.ones(2))
    return found


def numbered() -> list[str]:
    """Make a child of rank 1 alone; return the rank that its report and its errors name."""
    with r2ccl.init() as comm:
        child = comm.create([1])
        if child is None:
            return []
        found = [str(child.health())]
        engine = child._engine

        def below_a_call() -> None:
            child._collectives.in_turn(lambda: child.allreduce(np.ones(1)))

        def too_long() -> None:
            child.send(np.ones(2), 0)
            child.recv(np.ones(1), 0)

        def too_late() -> None:
            splitting.agree(engine, lambda mine: [mine], 0, 0, 0.0)

        def not_drained() -> None:
            with patch.object(child._participant.worker, "drain", lambda timeout_s: False):
                child._participant.drain()

        for fail in (below_a_call, too_long, too_late, not_drained):
            try:
                fail()
            except R2cclError as exc:
                found.append(str(exc))
        return [text[: len("rank 1")] for text in found]


def late(kind: str) -> str:
    """Make a call that rank 1 does not make, on a child of ranks 2 and 1; return rank 2's error."""
    comm = r2ccl.init(timeout_s=1.0)
    child = comm.create([2, 1])
    try:
        if child is not None and child.rank == 0:
            child.recv(np.ones(1), 1) if kind == "recv" else child.allreduce(np.ones(4))
        while True:
            comm._engine.check()
            time.sleep(0.01)
    except R2cclError as exc:
        return str(exc)
    finally:
        comm.abort("the program has ended")


def differing() -> list[str]:
    """Make different calls on a communicator; return the errors on it and on the job's first."""
    found = []
    with r2ccl.init() as comm:
        child = comm.dup()
        for each in (child, comm):
            try:
                each.allreduce(np.ones(3 if comm.rank else 4))
            except (InvalidArgument, CommunicatorRevoked) as exc:
                found.append(f"{type(exc).__name__}: {exc}")
    return found


def exchanged_in_halves() -> bool:
    """Exchange parts of all sizes within the halves of a job, beside the other half."""
    with r2ccl.init() as comm:
        half = comm.split(comm.rank % 2, -comm.rank)
        assert half is not None
        n, rank = half.nranks, half.rank
        sent = [10 * rank + to for to in range(n)]
        got = [10 * source + rank for source in range(n)]
        x = np.concatenate([np.full(count, 100.0 * rank + to) for to, count in enumerate(sent)])
        out = half.alltoallv(x, sendcounts=sent, recvcounts=got)
        wanted = np.concatenate(
            [np.full(count, 100.0 * source + rank) for source, count in enumerate(got)]
        )
        sizes = [sum(10 * source + to for to in range(n)) for source in range(n)]
        gathered = half.gatherv(x, root=0, counts=sizes)
        is_whole = gathered is None if rank else gathered.size == sum(sizes)
        return np.array_equal(out, wanted) and is_whole


def closed_early() -> float:
    """Close a child on rank 1 whose last calls rank 0 makes after a NIC was excluded."""
    with r2ccl.init() as comm:
        child = comm.dup()
        x = np.ones(3)
        if comm.rank == 1:
            for _ in range(3):
                child.reduce(x.copy(), root=0)
            child.close()
        comm.barrier()
        if comm.rank == 0:
            comm.exclude(1, 0)
            while child.known_health().health.version == 0:
                pass
            for _ in range(3):
                x = child.reduce(np.ones(3), root=0)
            child.close()
        comm.barrier()
        return float(x[0])


def closed_with_messages(count: int) -> list[str]:
    """Close a child while a message arrives and others wait; use the handles afterwards."""
    found = []
    with r2ccl.init() as comm:
        for _ in range(5):
            child = comm.dup()
            out, at = np.zeros(count), comm.rank
            sent = child.send(np.full(count, 1.0 + at), 1 - at, async_op=True)
            child.send(np.zeros(5), 1 - at, tag=2)
            child.probe(1 - at, 0)
            arriving = child.recv(out, 1 - at, 0, async_op=True)
            waiting = child.recv(np.empty(1), 1 - at, 3, async_op=True)
            child.close()
            found.append(f"{arriving.is_done()} {(out == 2.0 - at).all()} {sent.is_done()}")
        for fn in (arriving.wait, waiting.wait, lambda: child.probe(is_blocking=False)):
            try:
                found.append(type(fn()).__name__)
            except CommunicatorRevoked as exc:
                found.append(str(exc))
        comm.barrier()
    return found


def closed_below_a_call() -> str:
    """Close the job while another thread waits in a collective on a child; return its error."""
    found = []
    with r2ccl.init() as comm:

        def call(child: r2ccl.Communicator) -> None:
            try:
                child.barrier()
            except R2cclError as exc:
                found.append(type(exc).__name__)

        if comm.rank == 0:
            child = comm.dup()
            thread = threading.Thread(target=call, args=(child,))
            thread.start()
            while not child._collectives.is_blocking:
                pass
            comm.close()
            thread.join(TIMEOUT_S)
        else:
            try:
                comm.dup()
                comm.barrier()
            except R2cclError as exc:  # in dup() if rank 0 has left it already
                found.append(type(exc).__name__)
            comm.abort()
    return found[0]


def closed_before_a_late_rank(shm: str) -> tuple[str, bool, bool]:
    """Close a child on rank 0 below a call that rank 1 makes later.

    Return the error, whether the worker thread of the child still runs, and whether an array has
    changed since.
    """
    comm = r2ccl.init(shm=shm)
    child = comm.dup()
    try:
        if comm.rank:
            deadline = time.monotonic() + TIMEOUT_S / 2
            while comm._engine.error is None and time.monotonic() < deadline:
                time.sleep(0.01)
            child.allreduce(np.ones(100_000))
            return "no error", False, False
        participant = child._participant
        threads = set(threading.enumerate())
        x = np.ones(100_000)
        child.allreduce(x, async_op=True)
        (worker,) = set(threading.enumerate()) - threads
        # A short timeout for close() only: init() may be slow on a busy machine.
        participant._config = msgspec.structs.replace(participant._config, init_timeout_s=0.2)
        child.close()
        return "no error", False, False
    except R2cclError as exc:
        if comm.rank:
            return type(exc).__name__, False, False
        before = x.copy()
        is_alive = worker.is_alive()
        worker.join(TIMEOUT_S)
        return type(exc).__name__, is_alive, not np.array_equal(x, before)
    finally:
        comm.abort("the program has ended")


def made_and_closed(nrounds: int) -> int:
    """Make and close many communicators; return the highest context id seen."""
    with r2ccl.init() as comm:
        highest = 0
        for _ in range(nrounds):
            child = comm.dup()
            highest = max(highest, child._engine.context.context_id)
            child.close()
        return highest


def made_in_other_orders() -> int:
    """Split two communicators, on rank 0 in two threads, on rank 1 one after the other."""
    with r2ccl.init() as comm:
        child = comm.dup()
        if comm.rank:
            return len([child.dup(), comm.dup()])
        made: list[Communicator] = []
        first = threading.Thread(target=lambda: made.append(comm.dup()))
        first.start()
        while not comm._collectives.is_blocking:
            pass
        made.append(child.dup())
        first.join(TIMEOUT_S)
        return len(made)


def closed_below_a_receive() -> list[Any]:
    """Close a child while another thread waits for a message on it; the job goes on."""
    with r2ccl.init() as comm:
        child = comm.dup()
        found: list[Any] = []

        def receive() -> None:
            try:
                child.recv(np.empty(3))
            except R2cclError as exc:
                found.append(type(exc).__name__)

        thread = threading.Thread(target=receive)
        thread.start()
        while not child._engine.messenger.waits:
            pass
        child.close()
        thread.join(TIMEOUT_S)
        return [*found, float(comm.allreduce(np.ones(1))[0])]


def with_own_timeouts() -> list[str]:
    """Call late on communicators with a longer and a shorter timeout; return the errors."""
    found = []
    with r2ccl.init(timeout_s=1.5) as comm:
        longer = comm.dup(timeout_s=60.0)
        assert (comm.config.timeout_s, longer.config.timeout_s) == (1.5, 60.0)
        time.sleep(2.5 * comm.rank)
        longer.allreduce(np.ones(3))
        shorter = longer.split(0, timeout_s=0.5)
        assert shorter is not None
        for timeout_s in (0, "3"):
            with pytest.raises(InvalidArgument, match="timeout_s="):
                comm.dup(timeout_s=timeout_s)  # type: ignore[arg-type]
        time.sleep(2.0 * comm.rank)
        try:
            shorter.allreduce(np.ones(3))
        except R2cclError as exc:
            found.append(f"{type(exc).__name__}: {exc}")
    return found


class _ClosedWhenRead:
    """Array that closes a communicator, in another thread, when a call looks at it."""

    def __init__(self, closed: Communicator) -> None:
        self._array = np.ones(3)
        self._closed = closed

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **given: Any) -> Any:
        thread = threading.Thread(target=self._closed.close)
        thread.start()
        thread.join(TIMEOUT_S)
        return self._array.__dlpack__(**given)


def closed_as_a_call_begins(is_child: bool, is_async: bool) -> list[Any]:
    """Close a communicator in another thread while a call looks at its arguments."""
    with r2ccl.init() as comm:
        closed = comm.dup() if is_child else comm
        try:
            closed.allreduce(_ClosedWhenRead(closed), async_op=is_async)
        except R2cclError as exc:
            found = [f"{type(exc).__name__}: {exc}"]
        if is_child:
            found.append(float(comm.allreduce(np.ones(2))[0]))
        return found


class _ClosesFirst:
    """Lock of a turn that closes `closed` in another thread before it is first acquired."""

    def __init__(self, closed: Communicator) -> None:
        calls = closed._collectives
        self._lock: Any = calls._turn.lock
        self._closed: Communicator | None = closed
        calls._turn.lock = self
        calls.start = calls._start  # compiled code looks for a close as it takes the turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def acquire(self, *given: Any, **named: Any) -> bool:
        if (closed := self._closed) is not None:
            self._closed = None
            closing = threading.Thread(target=closed.close)
            closing.start()
            closing.join()
        return bool(self._lock.acquire(*given, **named))


def closed_before_the_turn(nbefore: int, is_grouped: bool) -> list[Any]:
    """Close a communicator after a call has found it open, and before the call has the turn.

    Before, the communicator makes `nbefore` such calls. Return the error of the call, and the
    result of the same call on a new communicator, which may have the same context id.
    """
    with r2ccl.init() as comm:
        closed, x, found = comm.dup(), np.full(2, 100.0), [""]
        for _ in range(nbefore):
            closed.allreduce(x)
        _ClosesFirst(closed)
        try:
            with closed.group() if is_grouped else nullcontext():
                closed.allreduce(x)
        except R2cclError as exc:
            found = [f"{type(exc).__name__}: {exc}"]
        return [*found, float(comm.dup().allreduce(np.ones(2))[0])]


def interrupted_making(kind: str) -> str:
    """Press Ctrl-C while rank 0 makes a communicator; return the error of this rank."""
    comm = r2ccl.init()
    try:
        if comm.rank:
            return _error_of(partial(_make, comm, kind))
        with patch.object(splitting, "_entry_of", _press_ctrl_c):
            found = _error_of(partial(_make, comm, kind))
        while comm._engine.error is None:
            time.sleep(0.001)
        return found
    finally:
        comm.abort("the program has ended")


def _make(comm: Communicator, kind: str) -> None:
    ranks = range(comm.nranks)
    if kind == "create_among":
        comm.create_among(ranks, comm._collectives.allgather_bytes)
    else:
        getattr(comm, kind)(*{"split": (0,), "create": (ranks,)}.get(kind, ()))


def _press_ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def _error_of(fn: Callable[[], object]) -> str:
    try:
        fn()
    except (R2cclError, KeyboardInterrupt) as exc:
        return type(exc).__name__
    return "no error"
