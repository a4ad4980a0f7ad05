"""Programs of the ranks in tests on arrays in the memory of a fake GPU."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.lookalikes import CUDA, Producer
from support.raising import raises
from support.ranks import TIMEOUT_S, OneCard, get, put

import r2ccl
from r2ccl import factory
from r2ccl.dtypes import CODES
from r2ccl.errors import (
    CommunicatorRevoked,
    ConcurrentCalls,
    InvalidArgument,
    PeerLost,
    TransportError,
)
from r2ccl.gpu.plan_selector import PlanSelector
from r2ccl.testing import fail_at
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.types import CallSignature, Collective

WINDOWS = 32 << 10


class Card:
    """A rank's GPU, which `r2ccl.init` finds."""

    def __init__(self, seed: int) -> None:
        self.device = FakeDevice(FakeGpu(seed), f"process {os.getpid()}")
        self.stream = self.device.make_stream()
        kernels: Any = None  # not needed between GPUs
        self.hardware = OneCard(self.device, kernels)
        factory.CudaHardware = lambda: self.hardware

    def array(self, values: Any) -> tuple[Producer, int]:
        """Copy int64 values into device memory; return the array and its address."""
        address = put(self.device, self.stream, values)
        return Producer(address, (len(values),), dtype=(0, 64, 1), device=(CUDA, 0)), address

    def get(self, address: int, count: int) -> Any:
        return get(self.device, self.stream, address, count)


def values_of(rank: int, count: int) -> Any:
    return np.random.default_rng((rank, count)).integers(-99, 99, count)


def collectives(counts: tuple[int, ...]) -> list[str]:
    """Run every collective on device memory, from zero bytes to many windows; return the errors."""
    card, wrong = Card(int(os.environ["RANK"])), []
    with r2ccl.init(staging_nbytes=WINDOWS) as comm:
        rank, nranks = comm.rank, comm.nranks
        for count in counts:
            xs = [values_of(each, count * nranks) for each in range(nranks)]
            total = np.sum(xs, axis=0)
            own = slice(rank * count, (rank + 1) * count)
            mean = np.trunc(total / nranks).astype(np.int64)
            cases = [
                ("allreduce", (r2ccl.SUM,), xs[rank], total),
                ("allreduce", (r2ccl.AVG,), xs[rank], mean),
                ("allreduce", (r2ccl.user_op(np.gcd),), xs[rank], functools.reduce(np.gcd, xs)),
                ("allreduce", (r2ccl.BXOR,), xs[rank], np.bitwise_xor.reduce(xs)),
                ("reduce_scatter", (r2ccl.SUM,), xs[rank], total[own]),
                ("allgather", (), xs[rank][:count], np.concatenate([x[:count] for x in xs])),
                ("broadcast", (nranks - 1,), xs[rank], xs[-1]),
                (
                    "reduce",
                    (r2ccl.SUM, nranks - 1),
                    xs[rank],
                    total if rank == nranks - 1 else None,
                ),
            ]
            for name, arguments, mine, meant in cases:
                for is_async in (False, True):
                    x, at = card.array(mine)
                    out, target = card.array(
                        np.full(count * nranks if meant is None else len(meant), -1)
                    )
                    given = getattr(comm, name)(
                        x, out, *arguments, stream=card.stream, async_op=is_async
                    )
                    if is_async:
                        given.order()
                        given = given.wait(TIMEOUT_S)
                    if given is not (None if meant is None else out):
                        wrong.append(f"{name} of {count} returned {given}")
                    if meant is not None and not np.array_equal(
                        card.get(target, len(meant)), meant
                    ):
                        wrong.append(f"{name} of {count}, {is_async=}")
                    if not np.array_equal(card.get(at, len(mine)), mine):
                        wrong.append(f"{name} of {count} changed its input")
            x, at = card.array(xs[rank])
            comm.allreduce(x, stream=card.stream)
            if not np.array_equal(card.get(at, len(total)), total):
                wrong.append(f"allreduce of {count} in place")
    return wrong


def copied_collectives(counts: tuple[int, ...]) -> list[str]:
    """Run every collective with parts, and scans, as on host memory; return the differences."""
    card, wrong = Card(int(os.environ["RANK"])), []
    with r2ccl.init(staging_nbytes=WINDOWS) as comm:
        rank, n = comm.rank, comm.nranks
        root = n - 1
        for count in counts:
            sizes = [count + each for each in range(n)]
            gaps = [2 * sum(sizes[:each]) + each for each in range(n)]
            room = gaps[-1] + sizes[-1] + 3 * (n > 1)
            row = [count + (rank + each) % n for each in range(n)]
            places = [at + each for each, at in enumerate(np.cumsum([0, *row[:-1]]))]
            # No gaps on rank 0; on the others, as many elements before each part as its rank.
            own = [(count + rank) * each for each in range(n)]
            cases: list[tuple[str, int, int | None, dict[str, Any]]] = [
                ("gather", count, n * count, {"root": root}),
                ("gatherv", sizes[rank], room, {"root": root, "counts": sizes, "displs": gaps}),
                ("scatter", n * count, count, {"root": root}),
                ("scatterv", room, sizes[rank], {"root": root, "counts": sizes, "displs": gaps}),
                ("alltoall", n * count, n * count, {}),
                ("alltoallv", sum(row), sum(row) + n,
                 {"sendcounts": row, "recvcounts": row, "recvdispls": places}),
                ("allgatherv", sizes[rank], room, {"counts": sizes, "displs": gaps}),
                ("allgatherv", count, own[-1] + count, {"counts": [count] * n, "displs": own}),
                ("allgatherv", count, n * count + rank, {"counts": [count] * n}),
                ("reduce_scatterv", sum(sizes), sizes[rank], {"counts": sizes}),
                ("scan", count, count, {}),
                ("exscan", count, count, {"op": r2ccl.MAX}),
                ("scan", count, None, {"op": r2ccl.user_op(np.gcd)}),
                ("alltoall", n * count, None, {}),
                ("exscan", count, None, {}),
            ]  # fmt: skip
            for (name, given, taken, named), is_async in itertools.product(cases, (False, True)):
                # Without an output of its own, the call is in place.
                x = out = values_of(rank, given)
                target, to = place, at = card.array(x)
                if taken is not None:
                    out = np.full(taken, -1)
                    target, to = card.array(out)
                call = getattr(comm, name)
                meant = call(x, out, **named)
                got = call(place, target, stream=card.stream, async_op=is_async, **named)
                if is_async:
                    got.order()
                    got = got.wait(TIMEOUT_S)
                if got is not (None if meant is None else target):
                    wrong.append(f"{name} of {count} returned {got}")
                for array, address in ((x, at), (out, to)):
                    if not np.array_equal(card.get(address, array.size), array):
                        wrong.append(f"{name} of {count}, {taken=}, {is_async=}")
    return wrong


def losing_a_rail(count: int) -> tuple[bool, int]:
    """Run allreduces while a rail is cut; return whether the sum is exact, and the repairs."""
    card = Card(3)
    with (
        fail_at(rank=1, rail=0, op=5, step=1) as plan,
        r2ccl.init(faults=plan, staging_nbytes=WINDOWS, slice_nbytes=4096, eager_nbytes=0) as comm,
    ):
        x, at = card.array(values_of(comm.rank, count))
        comm.allreduce(x, stream=card.stream)
        total = np.sum([values_of(rank, count) for rank in range(comm.nranks)], axis=0)
        return np.array_equal(card.get(at, count), total), len(comm.repairs())


def dying(victim: int, room: str) -> str:
    """Kill one rank while the others' calls are in progress; return the error text of this rank.

    Each surviving rank leaves a file in `room` after its calls.
    """
    card = Card(4)
    comm = r2ccl.init(staging_nbytes=WINDOWS)
    x, _ = card.array(values_of(comm.rank, 100_000))
    comm.allreduce(x, stream=card.stream)
    if comm.rank == victim:
        while len(os.listdir(room)) < comm.nranks - 1:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [comm.allreduce(x, stream=card.stream, async_op=True) for _ in range(3)]
    for work in works:
        work.order(card.stream)
    Path(room, str(comm.rank)).touch()
    with raises((PeerLost, CommunicatorRevoked)) as caught:
        works[0].wait(TIMEOUT_S)
    # The stream reaches work that was enqueued after the calls.
    done = card.device.make_event()
    card.device.record(done, card.stream)
    assert card.device.synchronize(done, TIMEOUT_S)
    with raises(CommunicatorRevoked):
        comm.allreduce(x, stream=card.stream)
    comm.abort()
    return str(caught.value)


def unseen_failure() -> str:
    """Let a call on device memory fail without a wait; return the error of the next call."""
    card = Card(5)
    comm = r2ccl.init(staging_nbytes=WINDOWS)
    x, _ = card.array(values_of(comm.rank, 100))
    comm.allreduce(x, stream=card.stream)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.2)
        comm.revoke("for a test")
    else:
        comm.allreduce(x, stream=card.stream)
    with raises(CommunicatorRevoked) as caught:
        comm.barrier()
    comm.close()
    return str(caught.value)


def asked_after_close() -> list[str]:
    """Query a handle after its communicator and the GPU are closed; return the errors."""
    card, wrong = Card(int(os.environ["RANK"])), []
    with r2ccl.init(staging_nbytes=WINDOWS) as comm:
        x, at = card.array(values_of(comm.rank, 1000))
        work = comm.allreduce(x, stream=card.stream, async_op=True)
        total = np.sum([values_of(rank, 1000) for rank in range(comm.nranks)], axis=0)
        work.order()
        if not np.array_equal(card.get(at, 1000), total):
            wrong.append("the result")
    if not work.is_done():
        wrong.append("close() left a call")
    if work.wait(0.0) is not x or work.order() is not x:
        wrong.append("wait() gives the array")
    return wrong


def broken_card() -> str:
    """Fail to open rank 1's GPU; return the error that this rank raises without waiting."""
    mine = Card(7).hardware
    if os.environ["RANK"] == "1":

        def refuse(ordinal: int) -> Any:
            raise TransportError("the driver is broken, for a test", status="NO_CUDA")

        mine.open = refuse
    comm = r2ccl.init(staging_nbytes=WINDOWS)
    x = Producer(0x7000, (100,), dtype=(0, 64, 1), device=(CUDA, 0))

    def call() -> None:
        comm.barrier()  # all ranks have returned from init()
        comm.allreduce(x)

    with raises((TransportError, CommunicatorRevoked)) as caught:
        call()
    comm.abort()
    return str(caught.value)


def wrong_arguments() -> list[str]:
    """Pass wrong devices and streams; return the errors, which must not harm later calls."""
    card, said = Card(6), []
    with r2ccl.init(staging_nbytes=WINDOWS) as comm:
        x, at = card.array(values_of(comm.rank, 10))
        other = Producer(at, (10,), dtype=(0, 64, 1), device=(CUDA, 3))
        host = np.arange(10)
        comm.allreduce(x, stream=card.stream)
        for arguments, keywords in (
            ((host,), {"stream": card.stream}),
            ((x, host), {"stream": card.stream}),
            ((host, x), {}),
            ((x,), {"stream": "fast"}),
            ((other,), {"stream": card.stream}),
            ((x, None, 99), {"stream": card.stream}),
            ((x, None, r2ccl.premul_sum(2)), {"stream": card.stream}),
        ):
            with raises(InvalidArgument) as caught:
                comm.allreduce(*arguments, **keywords)
            said.append(str(caught.value))
        comm.allreduce(x, stream=card.stream)
        total = np.sum([values_of(rank, 10) for rank in range(comm.nranks)], axis=0)
        assert np.array_equal(card.get(at, 10), total * comm.nranks)
    return said


def allgather_beside_allgatherv() -> str:
    """Call allgather on rank 0, allgatherv with equal counts on the others; return the error."""
    card = Card(int(os.environ["RANK"]))
    comm = r2ccl.init(staging_nbytes=WINDOWS)
    x, _ = card.array(values_of(comm.rank, 10))
    out, _ = card.array(np.zeros(10 * comm.nranks, np.int64))
    with raises((InvalidArgument, CommunicatorRevoked)) as caught:
        if comm.rank == 0:
            comm.allgather(x, out, stream=card.stream)
        else:
            comm.allgatherv(x, out, counts=[10] * comm.nranks, stream=card.stream)
        comm.barrier()
    comm.abort()
    return str(caught.value)


def beside_a_blocking_call(room: str) -> bool:
    """Call on device memory while a call on host memory blocks in another thread of rank 0.

    The call is refused, whether or not a call of its kind on host memory can be repeated. Returns
    whether the calls that were not refused are right.
    """
    card = Card(8)
    comm = r2ccl.init(staging_nbytes=WINDOWS)
    x, at = card.array(np.full(10, 1))
    for place in (Path(room, "new"), Path(room, "repeated")):
        comm.allreduce(x, stream=card.stream)
        comm.barrier()
        data = np.full(5, comm.rank)
        if comm.rank == 0:
            blocking = threading.Thread(target=comm.broadcast, args=(data,), kwargs={"root": 1})
            blocking.start()
            _until(lambda: comm._collectives.is_blocking)
            try:
                with raises(ConcurrentCalls):
                    comm.allreduce(x, stream=card.stream)
            except BaseException:
                comm.abort()
                raise
            place.touch()
            blocking.join(TIMEOUT_S)
        else:
            _until(place.exists)
            comm.broadcast(data, root=1)
        assert data.tolist() == [1] * 5
        for _ in range(2):
            comm.allreduce(data)
    is_right = bool((card.get(at, 10) == comm.nranks**2).all())
    comm.close()
    return is_right


def begun_by_two_threads() -> bool:
    """Call on device memory while another thread begins such a call; return whether one is made."""
    card = Card(9)
    with r2ccl.init(staging_nbytes=WINDOWS) as comm:
        x, at = card.array(np.full(10, 1))
        begin = comm._collectives._start_on_device
        has_begun, may_go_on = threading.Event(), threading.Event()

        def late(*given: Any) -> Any:
            has_begun.set()
            assert may_go_on.wait(TIMEOUT_S)
            return begin(*given)

        comm._collectives._start_on_device = late
        kwargs = {"stream": card.stream, "async_op": True}
        first = threading.Thread(target=comm.allreduce, args=(x,), kwargs=kwargs)
        first.start()
        assert has_begun.wait(TIMEOUT_S)
        for is_async in (False, True):
            with raises(ConcurrentCalls):
                comm.allreduce(x, stream=card.stream, async_op=is_async)
        may_go_on.set()
        first.join(TIMEOUT_S)
        comm.allreduce(x, stream=card.stream)
        return bool((card.get(at, 10) == comm.nranks**2).all())


def _until(is_true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def asynchronous_on_the_host(ncalls: int) -> list[str]:
    """Mix asynchronous and synchronous calls; return violations of their order."""
    wrong = []
    with r2ccl.init() as comm:
        arrays = [np.full(1000, comm.rank + at, np.float64) for at in range(ncalls)]
        works = []
        for at, array in enumerate(arrays):
            if at % 3 == 2:
                comm.allreduce(array)
            else:
                works.append(comm.allreduce(array, async_op=True))
        comm.barrier()
        for at, array in enumerate(arrays):
            meant = sum(rank + at for rank in range(comm.nranks))
            if not (array == meant).all():
                wrong.append(f"call {at}: {array[0]}, not {meant}")
        if not all(work.is_done() for work in works):
            wrong.append("not all were done after a barrier")
        begun = time.monotonic()
        if works[0].wait() is not arrays[0] or time.monotonic() - begun > TIMEOUT_S:
            wrong.append("wait() gives the array")
        works.append(comm.broadcast(arrays[0], root=0, async_op=True))
    if not works[-1].is_done():
        wrong.append("close() left a call")
    return wrong


def allreduces_among_some(count: int) -> tuple[bool, int]:
    """Reduce among even and among odd ranks at the same time while a rail is cut.

    Returns whether all sums are right, and the number of repairs.
    """
    int64, rounds = CODES[np.dtype(np.int64)], 4
    with (
        fail_at(rank=1, rail=0, op=2, step=3) as plan,
        r2ccl.init(faults=plan, slice_nbytes=4096, eager_nbytes=0) as comm,
    ):
        group = tuple(range(comm.rank % 2, comm.nranks, 2))
        enter, is_right = PlanSelector(comm._engine, comm._participant.plans).among(group), True

        def run(call: CallSignature, x: Any) -> None:
            comm._participant.on_host.run_plan(enter(call, None), x, x)

        for op in (r2ccl.SUM, r2ccl.AVG) * (rounds // 2):
            x = 1000 * values_of(comm.rank, count)
            call = CallSignature(Collective.ALLREDUCE, int64, op, count)
            comm._collectives.in_turn(functools.partial(run, call, x))
            total = np.sum([1000 * values_of(rank, count) for rank in group], axis=0)
            if op is r2ccl.AVG:
                total = np.trunc(total / comm.nranks).astype(np.int64)
            is_right &= np.array_equal(x, total)
        everything = values_of(comm.rank, count)
        comm.allreduce(everything)
        total = np.sum([values_of(rank, count) for rank in range(comm.nranks)], axis=0)
        return is_right and np.array_equal(everything, total), len(comm.repairs())
