"""Collectives among ranks of one host, through shared memory: the class `LocalGroup`."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, Secret
from r2ccl.dtypes import dtype_name
from r2ccl.errors import InternalError, InvalidArgument, TransportError, describe_os_error
from r2ccl.kernels.fold import fold_kernel
from r2ccl.kernels.native import callable_of
from r2ccl.shm import layout
from r2ccl.shm.layout import (
    AWAITED,
    DIFFERS_IN_SIZE,
    FROM_ROOT,
    MAX_NRANKS,
    RESUME,
    SHARED,
    SLOT_NBYTES,
    TABLES,
    TO_ROOT,
    WAITING,
)
from r2ccl.shm.machine import UNSUPPORTED
from r2ccl.shm.passing import Place, pass_segments
from r2ccl.shm.segment import Segment
from r2ccl.types import AllgatherBytes, CallSignature, Collective, ReduceOp

#: Flat, C-contiguous array.
Array: TypeAlias = npt.NDArray[Any]
#: Function that waits for a late peer: ``attend(resume, call)`` calls ``resume()`` until it returns
#: True, or raises to give up. ``call`` is the packed signature of the call.
Attend: TypeAlias = Callable[[Callable[[], bool], int], None]
#: Place of the part of each rank in an array: first element and number of elements.
Ranges: TypeAlias = Sequence[tuple[int, int]]

#: Makers of the compiled functions, for `callable_of`.
_EXCHANGE = "r2ccl.shm.exchange:make_exchange"
_PIPELINE = "r2ccl.shm.allreduce:make_allreduce"
_WAKE_ALL = "r2ccl.shm.waiting:make_wake_all"

#: Allreduces of at most this many bytes times ranks exchange whole inputs: one step instead of two.
FLAT_NBYTES = 1 << 15
#: An allreduce has at least this many chunks, of at least `_CHUNK_NBYTES`, so that its steps
#: overlap.
_NCHUNKS = 4
_CHUNK_NBYTES = 1 << 16
#: Size of the last-level cache, which the kernel reports here unless the hypervisor hides it.
_L3_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_L3_NBYTES = 32 << 20
#: Number of pauses of a wait, by whether there are more ranks than cores: first, least, most.
_SPINS = {False: (500, 20, 2000), True: (20, 5, 20)}
_YIELDS = {False: 0, True: 20}
#: Longest sleep within compiled code, in nanoseconds. After it, Python handles signals and
#: failures.
_SLEEP_NS = 4_000_000

_COUNT_MASK = (1 << 38) - 1
_WORD = 1 << 64


def _data_offset() -> int:
    """Return the offset of the data pointer in NumPy's array objects.

    ``PyArrayObject`` begins with the object header, which is followed by the pointer
    (ndarraytypes.h); its layout is part of NumPy's ABI. Reading it in compiled code costs 1 ns, and
    `ctypes.data` 800.
    """
    probe = np.empty(1)
    offset = object.__basicsize__
    if ctypes.c_int64.from_address(id(probe) + offset).value != probe.ctypes.data:
        raise InternalError("NumPy's arrays have another layout than its ABI says")
    return offset


_DATA = _data_offset()


class CallsDiffer(Exception):
    """The calls of two ranks differ, or the size that one sends from that the other expects.

    Parameters
    ----------
    index : int
        Index of the other rank.
    own, call : int
        Packed signatures of this rank's call and of the other's.
    sent_nbytes, wanted_nbytes : int
        If the signatures are equal: bytes that the other rank sends to this rank, and bytes that
        this rank expects from it; otherwise 0.
    """

    def __init__(
        self, index: int, own: int, call: int, sent_nbytes: int = 0, wanted_nbytes: int = 0
    ) -> None:
        super().__init__(index, own, call, sent_nbytes, wanted_nbytes)
        self.index = index
        self.own = own
        self.call = call
        self.sent_nbytes = sent_nbytes
        self.wanted_nbytes = wanted_nbytes


class LocalGroup:
    """Ranks of one host that share memory; made by `connect`.

    All methods for collectives take flat C-contiguous arrays, which the caller has checked: the
    dtypes are equal, the sizes fit, and arrays do not overlap unless they are equal. ``code`` is
    the number of their dtype. *Collective*: all ranks, in the same order, one call at a time.

    If a peer does not arrive soon, a call passes a function to `attend`, which calls it until it
    returns True, that is, until the call has finished. `attend` may raise to give the call up; then
    no further call may be made, as after any error, and the contents of outputs are undefined.
    Every collective raises `CallsDiffer` and the errors of `attend`; every reduction raises
    `InvalidArgument` if there is no kernel for its dtype and op (see `has_kernel`).
    """

    def __init__(
        self, own: Segment, peers: dict[int, Segment], place: Place, attend: Attend
    ) -> None:
        self._place = place
        self.rank = place.index
        self._nranks = len(place.ranks)
        self._own = own
        self._peers = peers
        self._attend = attend
        self._kernels: dict[int, int] = {}
        self._heads: dict[int, int] = {}
        self._memory = self._make_state()
        self._state = int(self._memory.ctypes.data)
        self._run_exchange = callable_of(_EXCHANGE)
        self._run_allreduce = callable_of(_PIPELINE)
        self._wake_all = callable_of(_WAKE_ALL)

    @classmethod
    def connect(
        cls,
        ranks: Sequence[int],
        index: int,
        exchange: AllgatherBytes,
        secret: Secret,
        *,
        attend: Attend,
        obstacle: str = "",
        connect_timeout_s: float = 20.0,
        communicator: bytes = bytes(COMMUNICATOR_ID_NBYTES),
    ) -> LocalGroup:
        """Share memory with other ranks of this host.

        Parameters
        ----------
        ranks : sequence of int
            Numbers of the ranks, which must be on this host.
        index : int
            Place of this rank in `ranks`.
        exchange : callable
            Allgathers bytes between `ranks`, in that order.
        secret : Secret
            Secret of the job.
        attend : callable
            Waits for peers, see `Attend`.
        obstacle : str
            Reason why this rank cannot share memory; empty: the caller knows none.
        connect_timeout_s : float
            Seconds that this call waits for a peer.
        communicator : bytes
            Id of the communicator, 16 bytes.

        Raises
        ------
        TransportError
            If any two of the ranks cannot share memory, or memory or descriptors are exhausted;
            then no rank has a group.

        Notes
        -----
        *Collective*: all ranks of `ranks`. *Cost*: 0.8 MiB of memory per rank, one descriptor per
        peer while it connects; the first group of a host compiles for some seconds.
        """
        place = Place(tuple(ranks), index, communicator)
        problem, own, host = obstacle or UNSUPPORTED, None, b""
        if len(ranks) > MAX_NRANKS:
            problem = f"{len(ranks)} ranks on one host: at most {MAX_NRANKS}"
        if not problem:
            try:
                host, own = _host_of_process(), Segment.create()
            except OSError as exc:
                problem = f"/proc/self/ns: {describe_os_error(exc)}"
            except TransportError as exc:
                problem = str(exc)
        # Ranks that cannot share memory tell the others, which would wait for them otherwise.
        told = exchange(host if own is not None else bytes(_HOST_NBYTES))
        if own is None or set(told) != {host}:
            if own is not None:
                own.close()
                unable = [rank for rank, each in zip(ranks, told, strict=True) if each != host]
                problem = (
                    f"ranks {unable} cannot, or run as another user or in other namespaces: run "
                    "all ranks of a host as one user in one container"
                )
            raise TransportError(f"rank {ranks[index]} cannot share memory: {problem}")
        try:
            peers = pass_segments(own, place, exchange, secret, connect_timeout_s)
        except BaseException:
            own.close()
            raise
        own.close_descriptor()
        return cls(own, peers, place, attend)

    @staticmethod
    def are_apart(one: Array, other: Array) -> bool:
        """Return whether two C-contiguous arrays of equal size do not overlap."""
        first, second = (
            ctypes.c_int64.from_address(id(one) + _DATA).value,
            ctypes.c_int64.from_address(id(other) + _DATA).value,
        )
        return abs(first - second) >= one.nbytes

    @property
    def ncalls(self) -> int:
        """Number of calls begun."""
        return int(self._memory[layout.NCALLS])

    @property
    def awaited(self) -> int:
        """Index of the rank that a late call waits for, or with which it disagrees."""
        return int(self._memory[AWAITED])

    def absent(self) -> list[int]:
        """Return the indices of ranks that have not made the current call."""
        first = int(self._memory[layout.LAST]) + 1
        return [
            index
            for index, peer in self._peers.items()
            if int(peer.words[layout.POSTED // 8]) < first
        ]

    # Collectives

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`."""
        nothing = _NOTHING
        self._exchange(Collective.BARRIER, 1, 0, 0, nothing, 0, nothing, 0, 0, 0, SHARED)

    def allreduce(self, source: Array, output: Array, code: int, op: int, digest: int = 0) -> None:
        """Reduce `source` of all ranks to `output` on all ranks; they may be equal.

        `digest`, a number of 12 bits, must be equal on all ranks; the call compares it as it does
        the dtype. The result has the same bits on all ranks, and those of a reduction in rank
        order.
        """
        key = (code << 4) | op
        kernel = self._kernels.get(key) or self._kernel(code, op)
        call = self._heads.get(key)  # ALLREDUCE is 0
        if call is None:
            call = self._head(_ALLREDUCE, code, op)
        call |= (digest << 38) | (source.size & _COUNT_MASK)
        nbytes, given = source.nbytes, (id(source) + _DATA, id(output) + _DATA)
        if nbytes * self._nranks <= FLAT_NBYTES:
            source_at, output_at = given
            self._call(
                self._run_exchange,
                (self._state, source_at, 0, output_at, 0, nbytes, 0, kernel, call, SHARED),
            )
            return
        most = min(SLOT_NBYTES, max(_CHUNK_NBYTES, (nbytes // _NCHUNKS + 63) & -64))
        self._call(self._run_allreduce, (self._state, *given, nbytes, most, kernel, call, 0))

    def reduce_scatter(self, source: Array, output: Array, code: int, op: int) -> None:
        """Reduce `source` of all ranks; rank r gets part r of the result in `output`.

        `output` may be this rank's part of `source`.
        """
        kernel, nbytes = self._kernel(code, op), output.nbytes
        self._exchange(
            Collective.REDUCE_SCATTER, code, op, source.size, source, nbytes, output, 0, nbytes,
            kernel, 0,
        )  # fmt: skip

    def reduce(self, source: Array, output: Array, code: int, op: int, root: int) -> None:
        """Reduce `source` of all ranks to `output` on `root`; other ranks' `output` is not used."""
        kernel, nbytes = self._kernel(code, op), source.nbytes
        self._exchange(
            Collective.REDUCE, code, op, source.size, source, 0, output, 0, nbytes, kernel, TO_ROOT,
            root,
        )  # fmt: skip

    def broadcast(self, source: Array, output: Array, code: int, root: int) -> None:
        """Copy `source` of `root` to `output` of all ranks; other ranks' `source` is not used."""
        self._exchange(
            Collective.BROADCAST, code, 0, output.size, source, 0, output, 0, output.nbytes, 0,
            SHARED | FROM_ROOT, root,
        )  # fmt: skip

    def allgather(self, source: Array, output: Array, code: int) -> None:
        """Copy `source` of all ranks to `output`, in rank order; it may be a part of `output`."""
        nbytes = source.nbytes
        self._exchange(
            Collective.ALLGATHER, code, 0, output.size, source, 0, output, nbytes, nbytes, 0, SHARED
        )

    def gather(self, source: Array, output: Array, code: int, root: int) -> None:
        """Copy `source` of all ranks to `output` of `root`, in rank order."""
        nbytes = source.nbytes
        self._exchange(
            Collective.GATHER, code, 0, source.size * self._nranks, source, 0, output, nbytes,
            nbytes, 0, TO_ROOT, root,
        )  # fmt: skip

    def scatter(self, source: Array, output: Array, code: int, root: int) -> None:
        """Copy part r of `source` of `root` to `output` of rank r."""
        nbytes = output.nbytes
        self._exchange(
            Collective.SCATTER, code, 0, output.size * self._nranks, source, nbytes, output, 0,
            nbytes, 0, FROM_ROOT, root,
        )  # fmt: skip

    def alltoall(self, source: Array, output: Array, code: int) -> None:
        """Copy part d of `source` of rank s to part s of `output` of rank d; they may be equal."""
        nbytes = source.nbytes // self._nranks
        self._exchange(
            Collective.ALLTOALL, code, 0, source.size, source, nbytes, output, nbytes, nbytes, 0, 0
        )

    def allgatherv(
        self, source: Array, output: Array, code: int, places: Ranges, digest: int = 0
    ) -> None:
        """Copy `source` of rank r to range ``places[r]`` of `output`, on all ranks.

        `digest` is as for `allreduce`.
        """
        own = [(0, 0)] * self._nranks
        own[self.rank] = (0, source.size)
        total = sum(size for _, size in places)
        self._exchange_parts(
            Collective.ALLGATHER, code, total, source, own, output, places, SHARED, digest
        )

    def gatherv(
        self, source: Array, output: Array, code: int, places: Ranges | None, root: int
    ) -> None:
        """Copy `source` of rank r to range ``places[r]`` of `output` of `root`.

        On other ranks, `places` is None.
        """
        sent, put = self._no_parts(), places if places is not None else self._no_parts()
        sent[root] = (0, source.size)
        self._exchange_parts(Collective.GATHERV, code, 0, source, sent, output, put, TO_ROOT, root)

    def scatterv(
        self, source: Array, output: Array, code: int, places: Ranges | None, root: int
    ) -> None:
        """Copy range ``places[r]`` of `source` of `root` to `output` of rank r.

        On other ranks, `places` is None.
        """
        put, sent = self._no_parts(), places if places is not None else self._no_parts()
        put[root] = (0, output.size)
        self._exchange_parts(
            Collective.SCATTERV, code, 0, source, sent, output, put, FROM_ROOT, root
        )

    def alltoallv(self, source: Array, output: Array, code: int, sent: Ranges, put: Ranges) -> None:
        """Copy range ``sent[d]`` of `source` of rank s to range ``put[s]`` of `output` of rank d.

        `source` and `output` must not overlap.
        """
        self._exchange_parts(Collective.ALLTOALLV, code, 0, source, sent, output, put, 0, 0)

    def has_kernel(self, code: int, op: int) -> bool:
        """Return whether reductions support a dtype and op.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op.
        """
        return fold_kernel(code, op) != 0

    # The end of the group

    def wake(self) -> None:
        """Make a call that waits in compiled code return to `attend`; any thread may call it."""
        self._wake_all(self._state)

    def close(self) -> None:
        """Free the memory; no call may run or follow. Not collective."""
        for peer in self._peers.values():
            peer.close()
        self._own.close()

    # Calls

    def _exchange(
        self, collective: int, code: int, op: int, count: int,
        source: Array, source_step: int, output: Array, output_step: int, nbytes: int,
        kernel: int, flags: int, root: int = 0,
    ) -> None:  # fmt: skip
        head = self._heads.get((collective << 10) | (code << 4) | op)
        if head is None:
            head = self._head(collective, code, op)
        given = (
            self._state,
            id(source) + _DATA,
            source_step,
            id(output) + _DATA,
            output_step,
            nbytes,
            root,
            kernel,
            head | (root << 38) | (count & _COUNT_MASK),
            flags,
        )
        self._call(self._run_exchange, given)

    def _exchange_parts(
        self, collective: int, code: int, count: int, source: Array, sent: Ranges,
        output: Array, put: Ranges, flags: int, root: int,
    ) -> None:  # fmt: skip
        head = self._heads.get((collective << 10) | (code << 4)) or self._head(collective, code, 0)
        itemsize = output.itemsize
        first = layout.BASES + 2 * self._nranks
        tables = self._memory[first : first + 4 * self._nranks].reshape(4, self._nranks)
        for row, array, ranges in ((0, source, sent), (2, output, put)):
            table = np.array(ranges, np.int64).T * itemsize
            tables[row] = table[0] + array.ctypes.data
            tables[row + 1] = table[1]
        given = (
            self._state,
            id(source) + _DATA,
            0,
            id(output) + _DATA,
            0,
            int(tables[3].sum()) // self._nranks,
            root,
            0,
            head | (root << 38) | (count & _COUNT_MASK),
            flags | TABLES,
        )
        self._call(self._run_exchange, given)

    def _call(self, run: Callable[..., int], given: tuple[int, ...]) -> None:
        """Run a compiled call to its end; its last arguments are the signature and the flags."""
        result = run(*given)
        if result:
            self._continue(run, given, result)

    def _continue(self, run: Callable[..., int], given: tuple[int, ...], result: int) -> None:
        """Continue a call that waits until it has finished; raise if it cannot."""
        *rest, flags = given

        def resume() -> bool:
            nonlocal result
            result = run(*rest, flags | RESUME)
            return result != WAITING

        if result == WAITING:
            self._attend(resume, rest[-1] % _WORD)
        if result:
            raise self._differs(result, rest[-1])

    # State

    def _make_state(self) -> npt.NDArray[np.int64]:
        state = np.zeros(layout.state_size(self._nranks), np.int64)
        state[layout.RANK], state[layout.NRANKS] = self.rank, self._nranks
        state[layout.SLEEP_NS] = _SLEEP_NS
        # Inputs and outputs of all ranks that do not fit into the cache together.
        state[layout.STREAM_NBYTES] = _cache_nbytes() // (2 * self._nranks)
        cpus = sorted(os.sched_getaffinity(0))
        is_crowded = self._nranks > len(cpus)
        is_known = not is_crowded and cpus[-1] < 8 * layout.CPU_SET_NBYTES
        state[layout.HOME] = cpus[self.rank] if is_known else -1
        state[[layout.SPIN, layout.SPIN_MIN, layout.SPIN_MAX]] = _SPINS[is_crowded]
        state[layout.YIELDS] = _YIELDS[is_crowded]
        for index in range(self._nranks):
            segment = self._own if index == self.rank else self._peers[index]
            state[layout.BASES + index] = segment.address
        return state

    def _kernel(self, code: int, op: int) -> int:
        kernel = fold_kernel(code, op)
        if not kernel:
            raise InvalidArgument(
                f"op={ReduceOp(op).name} for dtype {dtype_name(code)}: there is no kernel for "
                "shared memory; use a communicator, which reduces it over the network"
            )
        self._kernels[(code << 4) | op] = kernel
        return kernel

    def _head(self, collective: int, code: int, op: int) -> int:
        """Return the packed signature of a call without count and root, as a signed number."""
        head = CallSignature(collective, code, op, 0).pack()
        head -= _WORD if head >= _WORD // 2 else 0
        self._heads[(collective << 10) | (code << 4) | op] = head
        return head

    def _no_parts(self) -> list[tuple[int, int]]:
        return [(0, 0)] * self._nranks

    def _differs(self, result: int, call: int) -> CallsDiffer:
        index = self.awaited
        row = int(self._memory[layout.NCALLS]) & 1
        words = (self._own if index == self.rank else self._peers[index]).words
        if result == DIFFERS_IN_SIZE:
            is_shared = CallSignature.unpack(call % _WORD).collective == Collective.ALLGATHER
            at = layout.LENGTHS // 8 + layout.MAX_NRANKS * row
            sent = int(words[at + (index if is_shared else self.rank)])
            wanted = int(self._memory[layout.BASES + 5 * self._nranks + index])
            return CallsDiffer(index, call % _WORD, call % _WORD, sent, wanted)
        return CallsDiffer(index, call % _WORD, int(words[layout.SIGNATURES // 8 + row]) % _WORD)


@functools.cache
def _cache_nbytes() -> int:
    """Return the size of the last-level cache in bytes, or `_L3_NBYTES` if it is not known."""
    with suppress(OSError, ValueError):
        return int(_L3_FILE.read_text().strip().removesuffix("K")) << 10
    return _L3_NBYTES


def preload() -> None:
    """Load the compiled code that every group needs; compile it if this host has none yet.

    Raises
    ------
    ImportError, TransportError
        As for `r2ccl.kernels.native.callable_of`.
    """
    if not UNSUPPORTED:
        for maker in (_EXCHANGE, _PIPELINE, _WAKE_ALL):
            callable_of(maker)


_ALLREDUCE = int(Collective.ALLREDUCE)
_NOTHING = np.empty(0, np.uint8)


def _host_of_process() -> bytes:
    """Return a digest that only processes which may share memory have in common.

    Raises
    ------
    OSError
        If the namespaces of this process cannot be read.
    """
    spaces = [os.stat(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    places = [(each.st_dev, each.st_ino) for each in spaces]
    return hashlib.sha256(repr((os.geteuid(), places)).encode()).digest()[:_HOST_NBYTES]


_HOST_NBYTES = 16


__all__ = ["Attend", "CallsDiffer", "LocalGroup", "preload"]
