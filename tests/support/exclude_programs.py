"""Programs that take NICs out of use, or declare them failed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time

import numpy as np
from support.raising import raises

import r2ccl


def _slices_on(comm: r2ccl.Communicator, rail: int) -> int:
    paths = comm.health().rails[rail].paths
    return sum(path.nslices_sent + path.nslices_received for path in paths)


def exclude_beside_a_call(count: int) -> list[str]:
    """Exclude rail 0 of rank 1 while a call runs, reduce without it, include it; return errors."""
    wrong = []

    def check(is_right: object, what: str) -> None:
        if not is_right:
            wrong.append(f"rank {comm.rank}: {what}: {comm.health()}")

    comm = r2ccl.init(rails=2)
    right = sum(range(1, comm.nranks + 1))
    x = np.full(count, comm.rank + 1)
    work = comm.allreduce(x, async_op=True)
    if comm.rank == comm.nranks - 1:
        comm.exclude(1, 0)
    check(np.all(work.wait() == right), "wrong sum of the call")
    comm.barrier()
    check(comm.known_health().health.excluded == ((1, 0),), "not excluded")
    check(json.loads(comm.dump())["health"]["excluded"] == [[1, 0]], "not in the dump")
    check("excluded: rail 0 of rank 1" in str(comm.explain(1 << 20)), "not explained")
    paths = [path for path in comm.health().rails[0].paths if 1 in (comm.rank, path.peer)]
    check(all("EXCLUDED" in path.cause and path.state != "up" for path in paths), "still up")
    check((comm.health().rails[0].state == "excluded") == (comm.rank == 1), "wrong state")
    if comm.rank == 0:
        known = r"rank 1 on .* has lo \(rail 0\), lo \(rail 1\)"
        last = rf"rank 1 would have no rail left; {known}: first include, .* another NIC$"
        with raises(r2ccl.InvalidArgument, match=last):
            comm.exclude(1, 1)
        with raises(r2ccl.InvalidArgument, match=f"{known}: .* a single rail by its number$"):
            comm.exclude(1, "lo")
        with raises(r2ccl.InvalidArgument, match="'eth99' names no NIC"):
            comm.exclude(1, "eth99")
    before = _slices_on(comm, 0)
    for _ in range(20):
        check(comm.allreduce(np.full(10_000, 1))[0] == comm.nranks, "wrong sum")
    check(comm.rank != 1 or _slices_on(comm, 0) == before, "a slice on the excluded rail")
    if comm.rank == 0:
        comm.include(1, 0)
    while not comm.allreduce(np.array(_is_whole(comm)), op=r2ccl.MIN):
        time.sleep(0.02)
    check(comm.known_health().health.excluded == (), "still excluded")
    # A rank that gets no CPU time for long may be found slow.
    failures = [str(verdict) for verdict in comm.verdicts() if verdict.is_down]
    check(not failures, f"an exclusion was diagnosed: {failures}")
    for _ in range(20):
        comm.allreduce(np.full(10_000, 1))
    comm.close()
    with raises(r2ccl.CommunicatorRevoked):
        comm.exclude(1, 0)
    return wrong


def _is_whole(comm: r2ccl.Communicator) -> int:
    is_agreed = not comm.known_health().health.degraded()
    return int(is_agreed and all(rail.state == "up" for rail in comm.health().rails))


def declared_failed(mode: str) -> list[tuple[str, int]]:
    """Declare rail 0 of this host failed on rank 1 only; return state and use of each rail."""
    declared = f"{socket.gethostname()}:0" if os.environ["RANK"] == "1" else ""
    with r2ccl.init(rails=2, mode=mode, failed_nics=declared) as comm:
        for _ in range(5):
            assert np.all(comm.allreduce(np.ones(100_000)) == comm.nranks)
        if mode == "failstop":
            with raises(r2ccl.InvalidArgument, match="R2CC_MODE=failstop"):
                comm.include(0, 0)
        return [(rail.state, _slices_on(comm, rail.rail)) for rail in comm.health().rails]


def declared_too_much() -> str:
    """Declare all rails of this host failed on rank 0 only; return the error."""
    declared = f"{socket.gethostname()}:lo" if os.environ["RANK"] == "0" else ""
    with raises(r2ccl.InvalidArgument) as caught:
        r2ccl.init(rails=2, failed_nics=declared)
    return str(caught.value)


def exclude_then_shrink() -> list[tuple[tuple[int, int], ...]]:
    """Exclude a rail of the last rank, shrink twice; return what is excluded after each."""
    comm = r2ccl.init(rails=2)
    last = comm.nranks - 1
    if comm.rank == 0:
        comm.exclude(last, 1)
    comm.barrier()
    found = []

    def shrink() -> r2ccl.Communicator:
        # A rank that has passed the barrier may have revoked the communicator.
        with contextlib.suppress(r2ccl.CommunicatorRevoked):
            comm.barrier()
        return comm.shrink()

    for _ in range(2):
        comm = shrink()
        comm.allreduce(np.ones(100_000))
        found.append(comm.known_health().health.excluded)
        assert (comm.health().rails[1].state == "excluded") == (comm.rank == last)
    comm.barrier()
    if comm.rank == 0:
        comm.include(last, 1)
    while not comm.allreduce(np.array(_is_whole(comm)), op=r2ccl.MIN):
        time.sleep(0.02)
    comm = shrink()
    comm.allreduce(np.ones(100_000))
    found.append(comm.known_health().health.excluded)
    comm.close()
    return found


def exclude_while_closing() -> tuple[int, bool]:
    """Exclude and include a rail in a thread until `close` ends that.

    Return the number of calls, and whether the thread has ended. Rank 0, which coordinates the
    agreement, closes first.
    """
    comm = r2ccl.init(rails=2)
    norders = 0

    def give_orders() -> None:
        nonlocal norders
        with contextlib.suppress(r2ccl.CommunicatorRevoked):
            while True:
                (comm.include if norders % 2 else comm.exclude)(comm.rank, 1)
                norders += 1

    if comm.rank == 0:
        comm.close()
        return norders, True
    thread = threading.Thread(target=give_orders, daemon=True)
    thread.start()
    while norders < 6 and thread.is_alive():
        time.sleep(0.02)
    comm.close()
    thread.join(20.0)
    return norders, not thread.is_alive()


def exclude_for_all_communicators() -> list[int]:
    """Exclude and include a NIC in a communicator of all ranks but 0; return the shares seen."""
    with r2ccl.init(rails=2) as comm:
        part = comm.split(None if comm.rank == 0 else 1)
        seen = []
        if part is not None:
            with raises(r2ccl.InvalidArgument, "rank 1 of this communicator is rank 2"):
                part.exclude(1, "no_such_nic")
            for order in (part.exclude, part.include):
                if part.rank == 0:
                    order(1, 1)  # rank 2 of the job
                part.barrier()
                wanted = ((1, 1),) if order == part.exclude else ()
                while not part.allreduce(
                    np.array(int(part.known_health().health.excluded == wanted)), op=r2ccl.MIN
                ):
                    time.sleep(0.02)
                while wanted == () and part.known_health().health.degraded():
                    time.sleep(0.02)
                seen.append(part.known_health().health.share(1, 1))
        comm.barrier()
        return seen
