"""Collectives among ranks of one host, through shared memory: the class `LocalGroup`."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, Secret
from r2ccl.clock import monotonic
from r2ccl.dtypes import dtype_name
from r2ccl.errors import (
    CommunicatorRevoked,
    ConcurrentCalls,
    InternalError,
    InvalidArgument,
    PeerLost,
    R2cclError,
    TransportError,
    TransportTimeout,
)
from r2ccl.kernels.fold import fold_kernel
from r2ccl.shm import layout
from r2ccl.shm.allreduce import Allreduce, compiled_allreduce
from r2ccl.shm.atomics import UNSUPPORTED
from r2ccl.shm.exchange import Exchange, compiled_exchange
from r2ccl.shm.layout import (
    AWAITED,
    CLOSED,
    DIFFERS_IN_SIZE,
    ENDED,
    FROM_ROOT,
    MAX_NRANKS,
    REASON,
    REASON_NBYTES,
    RESUME,
    SHARED,
    SLOT_NBYTES,
    TABLES,
    TO_ROOT,
    WAITING,
)
from r2ccl.shm.passing import MappedPeer, Place, pass_segments
from r2ccl.shm.segment import Segment
from r2ccl.shm.waiting import wake_all
from r2ccl.types import AllgatherBytes, CallSignature, Collective, ReduceOp

#: Flat, C-contiguous array.
Array: TypeAlias = npt.NDArray[Any]
#: Place of the part of each rank in an array: first element and number of elements.
Ranges: TypeAlias = Sequence[tuple[int, int]]

#: Allreduces of at most this many bytes times ranks exchange whole inputs: one step instead of two.
FLAT_NBYTES = 1 << 15
#: An allreduce has at least this many chunks, of at least `_CHUNK_NBYTES`, so that its steps
#: overlap.
_NCHUNKS = 4
_CHUNK_NBYTES = 1 << 16
#: Outputs of at least this many bytes are written past the caches.
_STREAM_NBYTES = 8 << 20
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


class LocalGroup:
    """Ranks of one host that share memory; made by `connect`.

    All methods for collectives take flat C-contiguous arrays, which the caller has checked: the
    dtypes are equal, the sizes fit, and arrays do not overlap unless they are equal. ``code`` is
    the number of their dtype. *Collective*: all ranks, in the same order. A call that fails ends
    the group, on all ranks; the contents of outputs are then undefined.

    Every collective raises:

    - InvalidArgument: the calls of two ranks differ, or the sizes that they pass to each other;
    - PeerLost: a peer's process has ended, or has closed its group;
    - CommunicatorRevoked: `revoke` was called, by any rank, or the group was closed;
    - TransportTimeout: a peer did not make the call within the timeout;
    - ConcurrentCalls: another thread is in a call.
    """

    def __init__(
        self, own: Segment, peers: dict[int, MappedPeer], place: Place, *, timeout_s: float
    ) -> None:
        self._place = place
        self._rank = place.index
        self._nranks = len(place.ranks)
        self._timeout_s = timeout_s
        self._own = own
        self._peers = peers
        #: Held while a call runs, and while the memory is unmapped.
        self._turn = Lock()
        self._take_turn, self._end_turn = self._turn.acquire, self._turn.release
        self._error: Callable[[], R2cclError] | None = None
        #: Indices of ranks whose process has ended.
        self._dead: set[int] = set()
        self._kernels: dict[int, int] = {}
        self._heads: dict[int, int] = {}
        self._memory = self._make_state()
        self._state = int(self._memory.ctypes.data)
        self._run_exchange: Exchange = compiled_exchange()
        self._run_allreduce: Allreduce | None = None
        self._wake_all = wake_all()
        self._end_watch, self._watch_end = os.pipe2(os.O_CLOEXEC)
        self._watcher = Thread(target=self._watch, name="r2ccl-shm-watch", daemon=True)
        self._watcher.start()

    @classmethod
    def connect(
        cls,
        ranks: Sequence[int],
        index: int,
        exchange: AllgatherBytes,
        secret: Secret,
        *,
        timeout_s: float,
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
        timeout_s : float
            Seconds that a call waits for a peer.
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
        peer and one thread, which sleeps; the first group of a host compiles for some seconds.
        """
        place = Place(tuple(ranks), index, communicator)
        problem, own = UNSUPPORTED, None
        if len(ranks) > MAX_NRANKS:
            problem = f"{len(ranks)} ranks on one host: at most {MAX_NRANKS}"
        if not problem:
            try:
                own = Segment.create()
            except TransportError as exc:
                problem = str(exc)
        # Ranks that cannot share memory tell the others, which would wait for them otherwise.
        ready = exchange(bytes([not problem]))
        if own is None or not all(each[0] for each in ready):
            if own is not None:
                own.close()
            unable = [rank for rank, each in zip(ranks, ready, strict=True) if not each[0]]
            raise TransportError(
                f"rank {ranks[index]} cannot share memory: {problem or f'ranks {unable} cannot'}"
            )
        try:
            peers = pass_segments(own, place, exchange, secret, connect_timeout_s)
        except BaseException:
            own.close()
            raise
        own.close_descriptor()
        return cls(own, peers, place, timeout_s=timeout_s)

    # Collectives

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`."""
        nothing = _NOTHING
        self._exchange(Collective.BARRIER, 1, 0, 0, nothing, 0, nothing, 0, 0, 0, SHARED)

    def allreduce(self, source: Array, output: Array, code: int, op: int) -> None:
        """Reduce `source` of all ranks to `output` on all ranks; they may be equal.

        The result has the same bits on all ranks, and those of a reduction in rank order.

        Raises
        ------
        InvalidArgument
            If there is no kernel for the dtype and op (see `has_kernel`), or as for every call.
        """
        key = (code << 4) | op
        kernel = self._kernels.get(key) or self._kernel(code, op)
        call = self._heads.get(key)  # ALLREDUCE is 0
        if call is None:
            call = self._head(_ALLREDUCE, code, op)
        call |= source.size & _COUNT_MASK
        nbytes, given = source.nbytes, (id(source) + _DATA, id(output) + _DATA)
        if nbytes * self._nranks <= FLAT_NBYTES:
            source_at, output_at = given
            self._call(
                self._run_exchange,
                (self._state, source_at, 0, output_at, 0, nbytes, 0, kernel, call, SHARED),
            )
            return
        run = self._run_allreduce
        if run is None:
            run = self._run_allreduce = compiled_allreduce()
        most = min(SLOT_NBYTES, max(_CHUNK_NBYTES, (nbytes // _NCHUNKS + 63) & -64))
        self._call(run, (self._state, *given, nbytes, most, kernel, call, 0))

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
            Collective.GATHER, code, 0, source.size, source, 0, output, nbytes, nbytes, 0, TO_ROOT,
            root,
        )  # fmt: skip

    def scatter(self, source: Array, output: Array, code: int, root: int) -> None:
        """Copy part r of `source` of `root` to `output` of rank r."""
        nbytes = output.nbytes
        self._exchange(
            Collective.SCATTER, code, 0, output.size, source, nbytes, output, 0, nbytes, 0,
            FROM_ROOT, root,
        )  # fmt: skip

    def alltoall(self, source: Array, output: Array, code: int) -> None:
        """Copy part d of `source` of rank s to part s of `output` of rank d; they may be equal."""
        nbytes = source.nbytes // self._nranks
        self._exchange(
            Collective.ALLTOALL, code, 0, source.size, source, nbytes, output, nbytes, nbytes, 0, 0
        )

    def allgatherv(self, source: Array, output: Array, code: int, places: Ranges) -> None:
        """Copy `source` of rank r to range ``places[r]`` of `output`, on all ranks."""
        own = [(0, 0)] * self._nranks
        own[self._rank] = (0, source.size)
        total = sum(size for _, size in places)
        self._exchange_parts(
            Collective.ALLGATHER, code, total, source, own, output, places, SHARED, 0
        )

    def gatherv(
        self, source: Array, output: Array, code: int, places: Ranges | None, root: int
    ) -> None:
        """Copy `source` of rank r to range ``places[r]`` of `output` of `root`."""
        sent, put = self._no_parts(), places if places is not None else self._no_parts()
        sent[root] = (0, source.size)
        self._exchange_parts(Collective.GATHERV, code, 0, source, sent, output, put, TO_ROOT, root)

    def scatterv(
        self, source: Array, output: Array, code: int, places: Ranges | None, root: int
    ) -> None:
        """Copy range ``places[r]`` of `source` of `root` to `output` of rank r."""
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
        """Return whether there is a kernel for a dtype and op; others raise `InvalidArgument`.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op.
        """
        return fold_kernel(code, op) != 0

    # The end of the group

    def revoke(self, reason: str) -> None:
        """End the group on all ranks: calls in progress and later ones raise, with `reason`.

        May be called from any thread, at any time.
        """
        text = f"rank {self._place.ranks[self._rank]}: the group was revoked: {reason}"
        self._end(lambda: CommunicatorRevoked(text), reason)

    def close(self) -> None:
        """Free the memory. A call of another thread ends first, with `CommunicatorRevoked`.

        Peers that still wait for this rank raise `PeerLost`. Not collective.
        """
        self._own.words[CLOSED // 8] = 1
        rank = self._place.ranks[self._rank]
        if self._error is None:
            self._error = lambda: CommunicatorRevoked(f"rank {rank}: the group was closed")
        self._wake_all(self._state)
        with self._turn:
            if self._watch_end < 0:
                return
            os.write(self._watch_end, b"x")
            self._watcher.join()
            for descriptor in (self._watch_end, self._end_watch):
                os.close(descriptor)
            self._watch_end = -1
            for peer in self._peers.values():
                os.close(peer.pidfd)
                peer.segment.close()
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
        if not self._take_turn(False):
            raise self._concurrent()
        try:
            if self._error is not None:
                raise self._error()
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
            result = self._run_exchange(*given)
            if result:
                self._continue(self._run_exchange, given, result)
        finally:
            self._end_turn()

    def _call(self, run: Callable[..., int], given: tuple[int, ...]) -> None:
        """Run a compiled call to its end; its last arguments are the signature and the flags."""
        if not self._take_turn(False):
            raise self._concurrent()
        try:
            if self._error is not None:
                raise self._error()
            result = run(*given)
            if result:
                self._continue(run, given, result)
        finally:
            self._end_turn()

    def _continue(self, run: Callable[..., int], given: tuple[int, ...], result: int) -> None:
        """Continue a call that waits, until it has finished, failed or timed out."""
        began_s = monotonic()
        *rest, flags = given
        try:
            while result == WAITING:
                lost = self._find_end()
                # The awaited rank may have acted before it ended.
                result = run(*rest, flags | RESUME)
                if result == WAITING:
                    if lost is not None:
                        raise lost
                    if monotonic() - began_s > self._timeout_s:
                        raise self._timed_out()
            if result:
                ended = self._find_end() if result == ENDED else None
                raise ended or self._differs(result, rest[-1])
        except BaseException as exc:
            self._fail(exc)
            raise

    def _find_end(self) -> R2cclError | None:
        """Return the error that ends the call, unless the call can finish at once."""
        if self._error is not None:
            return self._error()
        for index, peer in self._peers.items():
            nbytes, kind = (int(each) for each in peer.segment.words[REASON // 8 :][:2])
            if nbytes:
                begin = REASON + 16
                data = peer.segment.data[begin : begin + min(nbytes, REASON_NBYTES)]
                text = data.tobytes().decode(errors="replace")
                if 0 < kind <= self._nranks and kind - 1 != self._rank:
                    return self._lost(kind - 1, text)
                here, there = self._place.ranks[self._rank], self._place.ranks[index]
                make = InvalidArgument if kind == _INVALID else CommunicatorRevoked
                return make(f"rank {here}: rank {there} ended the group: {text}")
        awaited = int(self._memory[AWAITED])
        for index, peer in self._peers.items():
            is_closed = peer.segment.words[CLOSED // 8] == 1
            if index in self._dead and (not is_closed or index == awaited):
                return self._lost(index, "its process has ended")
            if is_closed and index == awaited:
                return self._lost(index, "it has closed its communicator")
        return None

    def _fail(self, error: BaseException) -> None:
        """End the group because a call failed."""
        rank, text = self._place.ranks[self._rank], f"{type(error).__name__}: {error}"
        told = text
        kind = _INVALID if isinstance(error, InvalidArgument) else 0
        if isinstance(error, PeerLost):
            kind, told = 1 + self._place.ranks.index(error.peer), error.why
        reason = error if isinstance(error, R2cclError) else None
        self._end(
            lambda: CommunicatorRevoked(f"rank {rank}: the group has ended: {text}", reason=reason),
            told,
            kind,
        )

    def _end(self, make: Callable[[], R2cclError], text: str, kind: int = 0) -> None:
        if self._error is not None:
            return
        self._error = make
        data = text.encode()[:REASON_NBYTES] or b"?"
        begin = REASON + 16
        self._own.data[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        self._own.words[REASON // 8 + 1] = kind
        self._own.words[REASON // 8] = len(data)
        self._wake_all(self._state)

    def _watch(self) -> None:
        """Find out when a peer's process ends: the main loop of the watcher's thread."""
        poll = select.poll()
        poll.register(self._end_watch, select.POLLIN)
        indices = {peer.pidfd: index for index, peer in self._peers.items()}
        for pidfd in indices:
            poll.register(pidfd, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._end_watch:
                    return
                poll.unregister(descriptor)
                self._dead.add(indices[descriptor])
            self._wake_all(self._state)

    # State

    def _make_state(self) -> npt.NDArray[np.int64]:
        state = np.zeros(layout.state_size(self._nranks), np.int64)
        state[layout.RANK], state[layout.NRANKS] = self._rank, self._nranks
        state[layout.SLEEP_NS] = _SLEEP_NS
        state[layout.STREAM_NBYTES] = _STREAM_NBYTES
        cpus = sorted(os.sched_getaffinity(0))
        is_crowded = self._nranks > len(cpus)
        is_known = not is_crowded and cpus[-1] < 8 * layout.CPU_SET_NBYTES
        state[layout.HOME] = cpus[self._rank] if is_known else -1
        state[[layout.SPIN, layout.SPIN_MIN, layout.SPIN_MAX]] = _SPINS[is_crowded]
        state[layout.YIELDS] = _YIELDS[is_crowded]
        for index in range(self._nranks):
            segment = self._own if index == self._rank else self._peers[index].segment
            state[layout.BASES + index] = segment.address
        return state

    def _kernel(self, code: int, op: int) -> int:
        kernel = fold_kernel(code, op)
        if not kernel:
            raise InvalidArgument(
                f"op={ReduceOp(op).name} for dtype {dtype_name(code)}: there is no kernel for "
                "shared memory"
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

    # Errors

    def _lost(self, index: int, why: str) -> PeerLost:
        ranks = self._place.ranks
        return PeerLost(rank=ranks[self._rank], peer=ranks[index], last_heard_s=None, why=why)

    def _timed_out(self) -> TransportTimeout:
        ranks, awaited = self._place.ranks, int(self._memory[AWAITED])
        return TransportTimeout(
            f"rank {ranks[self._rank]}: waited {self._timeout_s:g} s for rank {ranks[awaited]} in "
            "shared memory: look at what that rank does, or raise R2CC_TIMEOUT_S",
            rank=ranks[self._rank],
            peer=ranks[awaited],
            status="TIMEOUT",
        )

    def _differs(self, result: int, call: int) -> InvalidArgument:
        ranks, index = self._place.ranks, int(self._memory[AWAITED])
        here, there = ranks[self._rank], ranks[index]
        if result == DIFFERS_IN_SIZE:
            return InvalidArgument(
                f"rank {here}: rank {there} sends another number of elements than this rank "
                "expects from it: pass matching counts on both"
            )
        words = self._peers[index].segment.words
        row = int(self._memory[layout.NCALLS]) & 1
        theirs = int(words[layout.SIGNATURES // 8 + row]) % _WORD
        mine = call % _WORD
        return InvalidArgument(
            f"rank {here} called {_text(mine)}, rank {there} called {_text(theirs)}: all ranks "
            "must make the same calls in the same order"
        )

    def _concurrent(self) -> ConcurrentCalls:
        return ConcurrentCalls(
            f"rank {self._place.ranks[self._rank]}: a call was made while another call is in "
            "progress, in another thread, or in this thread below a signal handler: calls are "
            "allowed from one thread at a time"
        )


_ALLREDUCE = int(Collective.ALLREDUCE)
_NOTHING = np.empty(0, np.uint8)
#: In the second word of REASON: the calls of two ranks differ.
_INVALID = -1


def _text(packed: int) -> str:
    """Return a call for messages."""
    call = CallSignature.unpack(packed)
    return (
        f"{Collective(call.collective).name.lower()} of {call.count} elements of "
        f"{dtype_name(call.dtype)} (op {ReduceOp(call.op).name}, root {call.root})"
    )


__all__ = ["LocalGroup"]
