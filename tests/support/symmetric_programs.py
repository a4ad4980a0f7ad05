"""Programs of ranks with arrays that peers reach directly, for `local_ranks`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from support import local_programs
from support.limits import no_descriptor_left
from support.local_ranks import Host

from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.shm import layout, symmetric
from r2ccl.shm.group import LocalCall, LocalGroup
from r2ccl.shm.layout import FINISHED
from r2ccl.shm.segment import Segment
from r2ccl.shm.transfer import READ
from r2ccl.types import CallSignature, Collective, ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]
_F32 = CODES[np.dtype(np.float32)]
#: Also allreduces that are reduced in one step, and are large enough to be direct.
SIZES = (*local_programs.SIZES, 1025)


def allocate(group: LocalGroup, host: Host, nbytes: int) -> Array:
    return group.symmetric.allocate(nbytes, host.exchange, lambda fn: fn())


class Moved:
    """A group whose calls run on copies of the arrays; those that `is_moved` says peers reach.

    Parameters
    ----------
    group : LocalGroup
    memory : ndarray of uint8
        Memory that peers reach, with room for the arrays of a call.
    is_moved : callable
        Called with "input" or "output".
    """

    def __init__(self, group: LocalGroup, memory: Array, is_moved: Callable[[str], bool]) -> None:
        self.prepare = group.prepare
        self.reached: list[bool] = []
        self._group, self._memory, self._is_moved = group, memory, is_moved

    def run(self, call: LocalCall, x: Array, out: Array) -> None:
        if np.may_share_memory(x, out):
            whole, part = (x, out) if x.nbytes > out.nbytes else (out, x)
            copied = self._copied(whole, 0) if self._is_moved("input") else whole.copy()
            at = part.ctypes.data - whole.ctypes.data
            view = copied.view(np.uint8)[at : at + part.nbytes].view(part.dtype)
            pair = (copied, view) if whole is x else (view, copied)
            self._run(call, *pair)
            whole[...] = copied
            return
        source = self._copied(x, 0) if self._is_moved("input") else x
        room = -(-x.nbytes // 64) * 64
        target = self._copied(out, room) if self._is_moved("output") else out
        self._run(call, source, target)
        out[...] = target

    def _run(self, call: LocalCall, x: Array, out: Array) -> None:
        self._group.run(call, x, out)
        state = self._group._memory
        is_reached = state[layout.MODE] == layout.DIRECT and state[layout.TRANSFER] != READ
        self.reached.append(bool(is_reached))

    def _copied(self, array: Array, at: int) -> Array:
        copied = self._memory[at : at + array.nbytes].view(array.dtype)
        copied[...] = array
        return copied


def check_matrix(host: Host, where: str) -> tuple[list[str], int, int]:
    """Run the matrix of collectives; return the wrong cases, direct calls, and calls begun anew.

    `where` says which arrays peers reach: all, those of even ranks, inputs alone, or none.
    """
    group = host.connect()
    nmost = host.nranks * max(SIZES) * 4
    memory = allocate(group, host, 2 * nmost + 64)
    choices: dict[str, Callable[[str], bool]] = {
        "all": lambda _: True,
        "even": lambda _: host.index % 2 == 0,
        "inputs": lambda which: which == "input",
        "none": lambda _: False,
    }
    moved: Any = Moved(group, memory, choices[where])
    wrong = [
        f"{name} of {size} elements"
        for size in SIZES
        for name, found, wanted in _cases(moved, host, size)
        if local_programs.differs(found, wanted)
    ]
    nanew = int(group._memory[layout.NREPEATED])
    del memory, moved._memory
    group.close()
    return wrong, sum(moved.reached), nanew


def _cases(moved: Any, host: Host, size: int) -> Iterator[tuple[str, Array, Array]]:
    return local_programs._cases(moved, host.index, host.nranks, size, _F32)


def mix(host: Host, ncalls: int) -> list[str]:
    """Mix calls on arrays of both kinds, at any offset, on any ranks; return the wrong ones."""
    group, n, me = host.connect(), host.nranks, host.index
    memory = allocate(group, host, 1 << 22).view(np.float32)
    wrong = []
    rng, own = np.random.default_rng(5), np.random.default_rng(me)
    for number in range(ncalls):
        size, kind = int(10 ** rng.uniform(2, 5.3)), int(rng.integers(4))
        root, at = int(rng.integers(n)), int(own.integers(100))
        is_reached = bool(own.integers(4)) if number % 2 else bool(rng.integers(2))
        x = memory[at : at + size] if is_reached else np.empty(size, np.float32)
        x[:] = number + me
        rows = [np.full(size, number + rank, np.float32) for rank in range(n)]
        out = np.zeros(size * n, np.float32)
        if kind == 0:
            local_programs.allreduce(group, x, x, _F32, ReduceOp.SUM)
            out, wanted = x, local_programs.reduced(rows, _F32, ReduceOp.SUM)
        elif kind == 1:
            local_programs.call(group, Collective.BROADCAST, x, x, _F32, size, root=root)
            out, wanted = x, rows[root]
        elif kind == 2:
            local_programs.call(group, Collective.ALLGATHER, x, out, _F32, size * n)
            wanted = np.concatenate(rows)
        else:
            local_programs.call(group, Collective.GATHER, x, out, _F32, size * n, root=root)
            wanted = np.concatenate(rows) if me == root else out
        if out.tobytes() != wanted.tobytes():
            wrong.append(f"call {number}: kind {kind}, {size} elements, root {root}")
    group.close()
    return wrong


def keep(host: Host) -> tuple[int, bool, int]:
    """Keep a view after the group has been closed; return the segments mapped then and later."""
    group = host.connect()
    view = allocate(group, host, 1 << 20)[5:100]
    view[:] = host.index + 1
    local_programs.barrier(group)
    group.close()
    mapped = _count_mapped()
    is_kept = bool((view == host.index + 1).all())
    del view
    return mapped, is_kept, _count_mapped()


def drop(host: Host) -> list[int]:
    """Return the segments mapped: at first, with two arrays, and as the ranks drop them."""
    group = host.connect()
    mapped = [_count_mapped()]
    first, second = (allocate(group, host, 5000) for _ in range(2))
    mapped.append(_count_mapped())
    if host.index == 0:
        del first
    third = allocate(group, host, 100)  # frees nothing: other ranks still have the first
    mapped.append(_count_mapped())
    if host.index:
        del first
    del third
    fourth = allocate(group, host, 100)  # frees the first and the third
    mapped.append(_count_mapped())
    second[:] = fourth[0]
    group.close()
    return mapped


def leave_nothing(host: Host) -> list[list[str]]:
    """Return the names in /dev/shm and the descriptors, before, during and after an array."""
    group = host.connect()
    found: list[list[str]] = []

    def note() -> None:
        found.append(sorted(os.listdir("/dev/shm")))
        found.append(sorted(os.listdir("/proc/self/fd")))

    note()
    x = allocate(group, host, 1 << 20)
    note()
    del x
    group.close()
    note()
    return found


def fail(host: Host, what: str) -> list[str]:
    """Let an allocation fail on one rank; return the error, and whether the group still works.

    If `what` is a number, the rank can open only as many descriptors during the allocation.
    """
    group = host.connect()
    if host.index == 1 and what == "room":
        symmetric.room_nbytes = lambda: 4096 * host.nranks
    elif host.index == 1 and what == "create":
        create = Segment.create

        def refuse(nbytes: int) -> Segment:
            if nbytes > 4096:
                raise TransportError("no memory is left, in a test", status="EMFILE")
            return create(nbytes)

        Segment.create = refuse  # type: ignore[method-assign,assignment]
    elif host.index == 2 and what == "map":
        map_peer = Segment.of_peer

        def refuse_to_map(own: Segment, descriptor: int) -> Segment:
            if own.nbytes > 4096:
                os.close(descriptor)
                raise TransportError("no address is left, in a test")
            return map_peer(own, descriptor)

        Segment.of_peer = refuse_to_map  # type: ignore[method-assign,assignment]
    mapped = _count_mapped()
    is_short = host.index == 1 and what.isdecimal()
    limit = no_descriptor_left(int(what)) if is_short else nullcontext()
    try:
        with limit:
            allocate(group, host, 4096 * (3 if what == "size" and host.index == 1 else 2))
    except (InvalidArgument, TransportError) as exc:
        said = f"{type(exc).__name__}: {exc} {getattr(exc, 'status', '')}"
    local_programs.barrier(group)
    assert _count_mapped() == mapped
    assert not allocate(group, host, 10).any()
    group.close()
    return [said]


def _count_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:r2ccl")


def leave(host: Host, which: str) -> list[str]:
    """Rank 1 leaves a call, as after an error, before rank 0 has finished it; return what they do.

    Rank 0 may have read what rank 1 has written into its array since. In an allgather, it reads the
    memory of the process of rank 1.
    """
    said = []
    if which == "ALLGATHER":
        local_programs.prefer(READ)

    def attend(resume: Callable[[], bool], call: int) -> None:
        until_s = time.monotonic() + 0.3
        while not resume():
            if time.monotonic() > until_s:
                raise TimeoutError

    group = host.connect(attend=attend)
    array = allocate(group, host, 1 << 20).view(np.float32)
    if which == "ALLGATHER":
        array = np.empty(array.size, np.float32)
    array[:] = 1
    out = np.zeros(host.nranks * array.size, np.float32)
    if which != "ALLGATHER":
        out = out[: array.size]
    host.exchange(b"x")
    if host.index == 1:
        group.leave(None)
    kind = Collective[which]
    try:
        local_programs.call(
            group, kind, array, array if which == "ALLREDUCE" else out, _F32, array.size,
            root=1 if which == "BROADCAST" else 0,
        )  # fmt: skip
    except TimeoutError:
        said.append("left")
    else:
        said.append("finished")
    host.exchange(b"x")
    group.close()
    return said


def interrupt(host: Host) -> bool:
    """Ctrl-C ends an allreduce on rank 0 in compiled code; return whether its array stays as it is.

    Rank 1 continues the call afterwards.
    """
    group = host.connect()
    array = allocate(group, host, 1 << 20).view(np.float32)
    array[:] = 1
    call = group.prepare(CallSignature(Collective.ALLREDUCE, _F32, ReduceOp.SUM, array.size))
    host.exchange(b"x")
    if host.index:
        host.exchange(b"x")
        peer = group.symmetric._shared[0].peers[0]
        peer.data[:] = 1  # as the rest of the call would
        host.exchange(b"x")
        group.close()
        return True

    def run(*given: int) -> int:
        assert call.run(*given) != FINISHED
        raise KeyboardInterrupt

    try:
        group.run(call._replace(run=run), array, array)
    except KeyboardInterrupt:
        array[:] = 7777
    host.exchange(b"x")
    host.exchange(b"x")
    group.close()
    return bool((array == 7777).all())
