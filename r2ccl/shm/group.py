"""Collectives among ranks of one host, through shared memory: the class `LocalGroup`."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, Secret
from r2ccl.bootstrap.logs import progress
from r2ccl.clock import monotonic
from r2ccl.dtypes import dtype_name, dtype_of
from r2ccl.errors import InvalidArgument, TransportError, describe_os_error
from r2ccl.kernels.arrays import DATA, data_of
from r2ccl.kernels.fold import fold_kernel
from r2ccl.kernels.native import callable_of, must_compile
from r2ccl.shm import layout
from r2ccl.shm.layout import (
    AWAITED,
    CHANGED,
    DIFFERS_IN_SIZE,
    EXCLUSIVE,
    FROM_ROOT,
    MAX_NRANKS,
    NEVER,
    SHARED,
    SLOT_NBYTES,
    TO_ROOT,
    UNREADABLE,
    WAITING,
)
from r2ccl.shm.local_call import LocalCall
from r2ccl.shm.machine import UNSUPPORTED, allowed_cpus, assign_cpu
from r2ccl.shm.passing import (
    LISTENER_NAME_NBYTES,
    RESULT_NBYTES,
    Place,
    SegmentListener,
    pass_segments,
)
from r2ccl.shm.reading import offer_word
from r2ccl.shm.repeat import Repeat, Role, preload_repeat, repeat_of
from r2ccl.shm.rings import Rings, preload_rings
from r2ccl.shm.robust_mutex import ExitWatch
from r2ccl.shm.segment import Segment
from r2ccl.shm.symmetric import SymmetricMemory
from r2ccl.types import (
    PREFIXES,
    REDUCTIONS,
    ROOTED,
    AllgatherBytes,
    CallSignature,
    Collective,
    ReduceOp,
    pack_text,
    signed_word,
    unpack_text,
)

_log = logging.getLogger(__name__)

#: C-contiguous array.
Array: TypeAlias = npt.NDArray[Any]
#: Function that waits for a late peer: ``attend(resume, call)`` calls ``resume()`` until the result
#: is True; to give up, it raises an error. ``call`` is the packed signature of the call.
Attend: TypeAlias = Callable[[Callable[[], bool], int], None]
#: Part of each rank in an array: first element, end (exclusive).
Ranges: TypeAlias = tuple[tuple[int, int], ...]

#: Makers of the compiled functions, for `callable_of`.
_EXCHANGE = "r2ccl.shm.exchange:make_exchange"
_PIPELINE = "r2ccl.shm.allreduce:make_allreduce"
_SCAN = "r2ccl.shm.scan:make_scan"
_TRY_TO_READ = "r2ccl.shm.reading:make_try_to_read"
_WAKE_ALL = "r2ccl.shm.waiting:make_wake_all"

#: Allreduces whose bytes times ranks are at most this number exchange whole inputs, which takes one
#: step instead of two.
FLAT_NBYTES = 1 << 15
#: Smallest parts, in bytes, that peers read directly from arrays in memory that all ranks map. For
#: smaller parts, waiting for the readers takes longer than a copy. SHARE_NBYTES is for the shares
#: of an allreduce. ROOTED_NBYTES, for collectives with a root, is multiplied by the number of
#: ranks: with slots, the root can run ahead, which saves context switches if there are more ranks
#: than cores.
REACHED_NBYTES, SHARE_NBYTES, ROOTED_NBYTES = 1 << 12, 1 << 11, 1 << 14
#: Smallest parts, in bytes, that peers read from arrays in memory that only their owner maps
#: (`r2ccl.shm.reading`), for the collectives that do so. Those without a root find out whether this
#: is faster (`r2ccl.shm.transfer`). Without it, the root of a scatter would copy all parts.
_LEAST_READ = dict.fromkeys(
    (Collective.ALLGATHER, Collective.ALLTOALL, Collective.ALLTOALLV), 1 << 17
) | dict.fromkeys((Collective.SCATTER, Collective.SCATTERV), 1 << 20)
#: Minimum number of chunks of an allreduce, and, per rank, of pieces of a scan, so that their steps
#: overlap; there are fewer if chunks or pieces would have less than `_CHUNK_NBYTES`.
_NCHUNKS = 4
_CHUNK_NBYTES = 1 << 16
#: File in which the kernel reports the size of the last-level cache, unless the hypervisor hides
#: it; and the size in bytes that is assumed without this file.
_L3_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_L3_NBYTES = 32 << 20
#: Initial, smallest and largest number of pauses of a wait; True: more ranks than cores.
_SPINS = {False: (500, 20, 2000), True: (20, 5, 20)}
#: Number of calls of sched_yield(2) before a wait sleeps; True: more ranks than cores.
_YIELDS = {False: 0, True: 20}
#: Longest sleep within compiled code, in nanoseconds. Python handles signals and failures after
#: each sleep.
_SLEEP_NS = 4_000_000

#: If the memory of a process cannot be read for this time in seconds, but the process has not
#: ended, the call fails.
_READABLE_S = 1.0

#: Largest number of prepared calls that a group keeps.
_NPREPARED = 64
_WORD = 1 << 64
_ALLOWED = slice(layout.ALLOWED, layout.ALLOWED + layout.CPU_SET_NBYTES)


class CallsDiffer(Exception):
    """Difference between the calls of two ranks, or between the sizes of one part in these calls.

    Parameters
    ----------
    index : int
        Index of the other rank in the group.
    own, call : int
        Packed signatures of this rank's call and of the other rank's call.
    sent_nbytes, wanted_nbytes : int
        If the signatures are equal: bytes that the other rank sends to this rank, and bytes that
        this rank expects from it; otherwise 0.
    is_earlier : bool
        True if this rank has begun further calls after the call that differs.
    """

    def __init__(
        self,
        index: int,
        own: int,
        call: int,
        sent_nbytes: int = 0,
        wanted_nbytes: int = 0,
        *,
        is_earlier: bool = False,
    ) -> None:
        super().__init__(index, own, call, sent_nbytes, wanted_nbytes)
        self.index = index
        self.own = own
        self.call = call
        self.sent_nbytes = sent_nbytes
        self.wanted_nbytes = wanted_nbytes
        self.is_earlier = is_earlier


class LocalGroup:
    """Group of ranks of one host that share memory; made by `connect`.

    ``prepare(call, parts=None)`` returns a prepared call (see `_prepare`) and caches the latest
    prepared calls. `run` runs a prepared call on C-contiguous arrays. The caller of `run` must have
    checked that the arrays have the dtype of the call and that their sizes fit. *Collective*: all
    ranks must run the same calls in the same order, one at a time.

    If a peer does not arrive soon, `run` passes a function to `attend`, which calls this function
    until it returns True. Then the call has finished, or `run` raises `CallsDiffer`. `attend` may
    raise an error to abandon the call. After `run` has raised an error, the contents of outputs are
    undefined, and no further call may be made.
    """

    def __init__(
        self,
        own: Segment,
        peers: dict[int, Segment],
        place: Place,
        attend: Attend,
        on_exit: Callable[[int], None],
        make_symmetric: Callable[[npt.NDArray[np.int64]], SymmetricMemory],
        offered: npt.NDArray[np.int64],
    ) -> None:
        self._place = place
        #: Word that peers try to read, see `offer_word`.
        self._offered = offered
        self.rank = place.index
        self._nranks = len(place.ranks)
        self._own = own
        self._peers = peers
        self._attend = attend
        mutexes = {index: peer.address + layout.MUTEX for index, peer in peers.items()}
        self._exits = ExitWatch(mutexes, on_exit)
        self.prepare = functools.lru_cache(_NPREPARED)(self._prepare)
        self._memory = self._make_state()
        #: Memory for arrays that all ranks map.
        self.symmetric = make_symmetric(self._memory)
        self._state = int(self._memory.ctypes.data)
        self._wake_all = callable_of(_WAKE_ALL)
        callable_of(_TRY_TO_READ)(self._state)
        #: Held by `wake`, so that `close` waits for it; re-entrant for signal handlers.
        self._wakes = RLock()
        self._is_closed = False
        #: Rings of the messages between the ranks.
        self.rings = Rings(self.rank, own, peers, self._memory.copy(), self._exits)

    @classmethod
    def connect(
        cls,
        ranks: Sequence[int],
        index: int,
        exchange: AllgatherBytes,
        secret: Secret,
        *,
        attend: Attend,
        on_exit: Callable[[int], None],
        has_ended: Callable[[], bool],
        obstacle: str = "",
        connect_timeout_s: float = 20.0,
        communicator: bytes = bytes(COMMUNICATOR_ID_NBYTES),
    ) -> LocalGroup:
        """Share memory with other ranks of this host; return the group.

        Parameters
        ----------
        ranks : sequence of int
            Ranks of the group, as numbered in the job. All must be on this host.
        index : int
            Index of this rank in `ranks`.
        exchange : callable
            Allgathers bytes between `ranks`, in the order of `ranks`; see `AllgatherBytes`.
        secret : Secret
            Secret of the job.
        attend : callable
            Waits for peers, see `Attend`.
        on_exit : callable
            ``on_exit(index)`` is called, by a thread that waits in shared memory, if the process of
            rank ``ranks[index]`` has ended without closing its group. It must not raise.
        has_ended : callable
            ``has_ended()`` returns True if the communicator has ended.
        obstacle : str
            Reason why this rank cannot share memory; empty if the caller knows none.
        connect_timeout_s : float
            Time limit in seconds of `r2ccl.shm.passing.pass_segments`.
        communicator : bytes
            `ControlPlane.communicator_id`, equal on all ranks of the job.

        Raises
        ------
        TransportError
            If any two of the ranks cannot share memory, or one of them cannot load the compiled
            code, or memory or descriptors are exhausted; then no rank has a group.
        R2cclError
            If `exchange` raises it.

        Notes
        -----
        *Collective*: all ranks of `ranks`. *Cost*: 3 MiB of memory per rank, and up to 32 MiB for
        messages, allocated per peer when messages with that peer begin; a thread that sleeps; a few
        descriptors until the method returns. The first group on a host takes some seconds to
        compile code.
        """
        place = Place(tuple(ranks), index, communicator)
        problem, own, host = obstacle or UNSUPPORTED, None, bytes(_HOST_NBYTES)
        offered = np.empty(0, np.int64)
        if len(ranks) > MAX_NRANKS:
            problem = (
                f"there are {len(ranks)} ranks on one host, but at most {MAX_NRANKS} can share "
                "memory"
            )
        if not problem:
            try:
                if index == 0:
                    announce_compilation()
                preload()
            except (ImportError, OSError, TransportError) as exc:
                problem = f"compiled code cannot be used: {exc}"
        if not problem:
            try:
                host, own = _host_of_process(), Segment.create_of_group(len(ranks))
                offered = offer_word(own)
                own.data[_ALLOWED] = np.frombuffer(
                    allowed_cpus().to_bytes(layout.CPU_SET_NBYTES, "little"), np.uint8
                )
            except OSError as exc:
                problem = f"/proc/self/ns: {describe_os_error(exc)}"
            except TransportError as exc:
                problem = str(exc)

        def make_symmetric(state: npt.NDArray[np.int64]) -> SymmetricMemory:
            return SymmetricMemory(state, place, secret, connect_timeout_s, has_ended)

        with ExitStack() as on_error, closing(SegmentListener(len(ranks))) as listener:
            if own is not None:
                on_error.callback(own.close)
            # Ranks that cannot share memory tell the others, which would wait for them otherwise.
            offer = _Offer(host, listener.name, problem or listener.problem)
            offers = list(map(_Offer.unpack, exchange(offer.pack())))
            _check(offers, ranks, index)
            assert own is not None, "this rank has told its problem, and `_check` raises"
            names = [each.name for each in offers]
            peers = pass_segments(
                own, place, listener, names, exchange, secret, connect_timeout_s, has_ended
            )
            for peer in peers.values():
                on_error.callback(peer.close)
            own.close_descriptor()
            group = cls(own, peers, place, attend, on_exit, make_symmetric, offered)
            on_error.pop_all()
            return group

    @property
    def ncalls(self) -> int:
        """Number of calls that this rank has begun; a call that began again counts once."""
        return int(self._memory[layout.NCALLS] - self._memory[layout.NREPEATED])

    @property
    def awaited(self) -> int:
        """Index of the rank that this rank waits for, or whose call differs from this rank's."""
        return int(self._memory[AWAITED])

    def absent(self) -> list[int]:
        """Return the indices of the ranks that have not begun the current call yet."""
        return [index for index, ncalls in self.positions().items() if ncalls < 0]

    def positions(self) -> dict[int, int]:
        """Return how many calls each other rank is ahead of this rank, by the index of the rank.

        The number is negative for a rank that has begun fewer calls.
        """
        first = int(self._memory[layout.NCALLS]) << layout.ROUND_BITS
        at, step = layout.HEADERS // 8, layout.LINE_NBYTES // 8
        found = {}
        for index, peer in self._peers.items():
            headers = peer.words[at::step][: layout.NHEADERS].tolist()
            distances = [(each - first + _WORD // 2) % _WORD - _WORD // 2 for each in headers]
            found[index] = max(distances) >> layout.ROUND_BITS
        return found

    # Collectives

    def _prepare(
        self, call: CallSignature, parts: tuple[Ranges, Ranges] | None = None
    ) -> LocalCall:
        """Prepare a call, so that `run` can run it any number of times.

        Parameters
        ----------
        call : CallSignature
            Signature of the call, equal on all ranks.
        parts : tuple of Ranges, optional
            For parts that differ in size: the parts of the input that this rank sends to each rank,
            and the parts of the output that it receives from each rank. In an allgather, the part
            that this rank sends to itself is sent to all ranks, and the other parts of the input
            are ignored. In a reduce_scatter, all parts that a rank receives are the same range of
            the output, because they are reduced to one part.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op, or there is no kernel for them; see `has_kernel`.
        ImportError, TransportError
            If `r2ccl.kernels.native.address_of` raises it.

        Notes
        -----
        The result of a reduction has the same bits on all ranks: elements are combined in rank
        order.
        """
        n, itemsize = self._nranks, dtype_of(call.dtype).itemsize
        kernel = self._kernel(call) if call.collective in REDUCTIONS else 0
        nbytes = call.count * itemsize
        words = {
            layout.LOOP_SIGNATURE: signed_word(call.pack()),
            layout.LOOP_KERNEL: kernel,
            layout.LOOP_NBYTES: nbytes,
        }
        if call.collective in PREFIXES:
            is_exclusive = call.collective == Collective.EXSCAN
            words[layout.LOOP_FLAGS] = EXCLUSIVE if is_exclusive else 0
            words[layout.LOOP_MOST] = _most(nbytes, _NCHUNKS * n)
            return LocalCall.make(_SCAN, words)
        if call.collective == Collective.ALLREDUCE and nbytes * n > FLAT_NBYTES:
            words[layout.LOOP_MOST] = _most(nbytes, _NCHUNKS)
            return LocalCall.make(_PIPELINE, words)
        flags, source_parts, target_parts = _FORMS[call.collective]
        tables = None
        if parts is not None:
            rows = np.array(parts, np.int64).transpose(0, 2, 1) * itemsize
            rows[:, 1] -= rows[:, 0]
            tables = np.ascontiguousarray(rows)
            nbytes = int(rows[1, 1].sum()) // n
            words[layout.LOOP_TABLES] = data_of(tables)
        elif source_parts or target_parts:
            nbytes //= n
        words |= {
            layout.LOOP_FLAGS: flags,
            layout.LOOP_NBYTES: nbytes,
            layout.LOOP_SOURCE_STEP: source_parts * nbytes,
            layout.LOOP_TARGET_STEP: target_parts * nbytes,
            layout.LOOP_ROOT: call.root,
            layout.LOOP_LEAST_REACHED: _least_reached(call.collective, n),
            layout.LOOP_LEAST_READ: _LEAST_READ.get(Collective(call.collective), NEVER),
        }
        return LocalCall.make(_EXCHANGE, words, tables)

    def run(self, call: LocalCall, source: Array, output: Array) -> bool:
        """Run a call on the input `source` and the array `output`, and wait until it has finished.

        Both may be the same array. One array may also be a part of the other: the part of this rank
        in the collective. Pass an array without elements for an array that this rank does not use.

        Returns
        -------
        bool
            False if the arrays do not have the form of the call (`LocalCall.of_form`); then nothing
            was done. Otherwise True.

        Raises
        ------
        CallsDiffer
            If another rank makes a different call, or sends a part of another size than this rank
            expects.
        TransportError
            If the memory of another rank's process can no longer be read.
        Exception
            Any error that `attend` raises.
        """
        try:
            result = call.run(self._state, id(source) + DATA, id(output) + DATA, call.at, 0)
            if result == CHANGED:
                return False
            if result:
                self.proceed(call, source, output, result)
        except BaseException:
            signature = CallSignature.unpack(int(call.words[layout.LOOP_SIGNATURE]) % _WORD)
            self.leave(output if signature.collective == Collective.ALLREDUCE else None)
            raise
        return True

    def proceed(self, call: LocalCall, source: Array, output: Array, result: int) -> None:
        """Continue a call whose loop returned `result`, until it has finished.

        `result` is neither FINISHED nor CHANGED. Raises the errors of `run`; the caller must then
        call `leave`.
        """
        signature = int(call.words[layout.LOOP_SIGNATURE]) % _WORD
        until_s = math.inf

        def resume() -> bool:
            nonlocal result, until_s
            result = call.run(self._state, id(source) + DATA, id(output) + DATA, call.at, 1)
            if result in (WAITING, UNREADABLE):
                self._exits.look(self._memory)
            if result == UNREADABLE:  # `attend` knows sooner if the process has ended
                until_s = min(until_s, monotonic() + _READABLE_S)
                return monotonic() >= until_s
            return result != WAITING

        if result in (WAITING, UNREADABLE):
            self._attend(resume, signature)
        if result == UNREADABLE:
            own, rank = (self._place.ranks[index] for index in (self.rank, self.awaited))
            raise TransportError(
                f"rank {own}: process_vm_readv(2) can no longer read the memory of rank {rank}'s "
                "process: do not change the user of a process, its PR_SET_DUMPABLE, or "
                "kernel.yama.ptrace_scope while a communicator is in use"
            )
        if result:
            raise self._differs(call, result, signature)

    def repeat_of(
        self,
        call: LocalCall,
        source: Array,
        output: Array,
        *,
        rest: tuple[Any, ...],
        uses_input: bool,
        role: Role,
        proceed: Callable[[LocalCall, Array, Array, int], None],
    ) -> Repeat:
        """Return a function that runs a call again on arrays of the form of `source` and `output`.

        For the other parameters, and errors, see `r2ccl.shm.repeat.repeat_of`, where `role` is
        named ``output``. The function `proceed` gets the arguments of the method `proceed`, and
        must call this method.
        """
        formed = call.of_form(source, output)
        return repeat_of(
            formed.loop,
            self._state,
            formed.at,
            rest,
            uses_input=uses_input,
            output=role,
            proceed=functools.partial(proceed, formed),
            kept=formed,
        )

    def has_kernel(self, code: int, op: int) -> bool:
        """Return whether reductions with `op` on dtype number `code` can use shared memory.

        Raises
        ------
        InvalidArgument
            If the dtype does not support the op.
        ImportError, TransportError
            If `r2ccl.kernels.native.address_of` raises it.
        """
        return fold_kernel(code, op) != 0

    # The end of the group

    def wake(self) -> None:
        """Make every call that waits in compiled code, on any rank, return to `attend`.

        Any thread may call this method. Does nothing after `close`.
        """
        with self._wakes:
            if not self._is_closed:
                self._wake_all(self._state)

    def close(self) -> None:
        """Free the memory of the group. Not collective.

        No other method may run during or after this one, except `wake`.
        """
        with self._wakes:
            self._is_closed = True
        self.rings.close()
        self.symmetric.close()
        for peer in self._peers.values():
            peer.close()
        self._own.close()

    def leave(self, output: Array | None) -> None:
        """Withdraw this rank's arrays from the peers, because this rank's call raises an error.

        A peer that reads one of these arrays directly, and has not yet checked that the array has
        stayed unchanged (`have_stayed`), does not finish its call. `output` is the output of an
        allreduce, or None for other calls. After this method, writes of peers do not reach
        `output`, unless a warning was logged.
        """
        self._own.words[layout.LEFT // 8] = 1
        self.wake()
        if output is None:
            return
        try:
            self.symmetric.withdraw(output)
        except OSError as exc:
            _log.warning(
                "rank %d: other ranks may still write to the output of a failed call, because the "
                "memory of this output cannot be replaced (%s): do not use that array again",
                self._place.ranks[self.rank], describe_os_error(exc),
            )  # fmt: skip

    def find_difference(self) -> CallsDiffer | None:
        """Compare the headers that peers have announced and that this rank has not compared yet.

        Return the first difference, or None if there is none.
        """
        ncalls, positions = int(self._memory[layout.NCALLS]), self.positions()
        for index, peer in self._peers.items():
            last = ncalls + min(0, positions[index])
            for number in range(self._met(index) + 1, last + 1):
                own, theirs = (_signature(each, number) for each in (self._own, peer))
                if own != theirs:
                    return CallsDiffer(index, own, theirs, is_earlier=number < ncalls)
        return None

    # State

    def _met(self, index: int) -> int:
        """Return the number of the last call for which rank `index`'s header has been compared."""
        ncalls = int(self._memory[layout.NCALLS])
        met = int(self._memory[layout.BASES + 2 * self._nranks + index])
        return ncalls - (((ncalls << layout.ROUND_BITS) - met) % _WORD >> layout.ROUND_BITS)

    def _make_state(self) -> npt.NDArray[np.int64]:
        state = np.zeros(layout.state_size(self._nranks), np.int64)
        state[layout.RANK], state[layout.NRANKS] = self.rank, self._nranks
        layout.set_sleep(state, _SLEEP_NS)
        # Inputs and outputs of all ranks that do not fit into the cache together.
        state[layout.STREAM_NBYTES] = _cache_nbytes() // (2 * self._nranks)
        cpu, nsharers = assign_cpu(self.rank, [_allowed(each) for each in self._segments()])
        state[layout.HOME], state[layout.SHARERS] = cpu, nsharers
        is_crowded = nsharers > 1
        state[[layout.SPIN, layout.SPIN_MIN, layout.SPIN_MAX]] = _SPINS[is_crowded]
        state[layout.YIELDS] = _YIELDS[is_crowded]
        state[layout.BASES : layout.BASES + self._nranks] = [
            each.address for each in self._segments()
        ]
        return state

    def _segments(self) -> list[Segment]:
        """Return the segments of all ranks, in the order of the ranks."""
        own = {self.rank: self._own}
        return [(self._peers | own)[index] for index in range(self._nranks)]

    def _kernel(self, call: CallSignature) -> int:
        kernel = fold_kernel(call.dtype, call.op)
        if not kernel:
            raise InvalidArgument(
                f"op={ReduceOp(call.op).name} for dtype {dtype_name(call.dtype)}: there is no "
                "kernel for shared memory; use a communicator, which reduces over the network"
            )
        return kernel

    def _differs(self, call: LocalCall, result: int, signature: int) -> CallsDiffer:
        index, ncalls = self.awaited, int(self._memory[layout.NCALLS])
        segment = self._own if index == self.rank else self._peers[index]
        if result == DIFFERS_IN_SIZE:
            assert call.tables is not None
            is_shared = call.words[layout.LOOP_FLAGS] & SHARED
            row = layout.PARTS + 2 * layout.ROW_NBYTES * (ncalls % layout.NHEADERS)
            sent = int(segment.words[row // 8 + (index if is_shared else self.rank)])
            wanted = int(call.tables[1, 1, index])
            return CallsDiffer(index, signature, signature, sent, wanted)
        met = self._met(index)
        signatures = [_signature(each, met + 1) for each in (self._own, segment)]
        return CallsDiffer(index, *signatures, is_earlier=met + 1 < ncalls)


def _allowed(segment: Segment) -> int:
    """Return the CPUs on which a segment's owner is allowed to run, as a set of bits."""
    return int.from_bytes(segment.data[_ALLOWED].tobytes(), "little")


def _signature(segment: Segment, ncalls: int) -> int:
    """Return the packed signature of call number `ncalls` of a segment's owner, from its header."""
    header = layout.HEADERS + layout.LINE_NBYTES * (ncalls % layout.NHEADERS)
    return int(segment.words[(header + layout.SIGNATURE) // 8]) % _WORD


@functools.cache
def _cache_nbytes() -> int:
    """Return the size of the last-level cache in bytes, or `_L3_NBYTES` if it is not known."""
    with suppress(OSError, ValueError):
        return int(_L3_FILE.read_text().strip().removesuffix("K")) << 10
    return _L3_NBYTES


def _most(nbytes: int, npieces: int) -> int:
    """Return the maximum size in bytes of the pieces of a call.

    `nbytes` bytes are cut into about `npieces` pieces, as far as the limits of the size allow it.
    """
    return min(SLOT_NBYTES, max(_CHUNK_NBYTES, (nbytes // npieces + 63) & -64))


def _least_reached(collective: int, nranks: int) -> int:
    """Return the smallest size in bytes at which peers read directly from the sender's array.

    The size is that of one part or, for an allreduce, of the whole input.
    """
    if collective == Collective.ALLREDUCE:
        return SHARE_NBYTES * nranks
    return ROOTED_NBYTES * nranks if collective in ROOTED else REACHED_NBYTES


def announce_compilation() -> None:
    """Log that the code that every group needs will be compiled, unless the code is cached."""
    if not UNSUPPORTED and must_compile(_EXCHANGE):
        progress(
            _log, "compiling code for shared memory; once for this user on this host, about 10 s"
        )


def preload() -> None:
    """Load the compiled code that every group needs; compile it if it is not cached.

    Do nothing if this machine cannot run the code (`UNSUPPORTED`).

    Raises
    ------
    ImportError, TransportError
        If `r2ccl.kernels.native.callable_of` raises it.
    """
    if not UNSUPPORTED:
        for maker in (_EXCHANGE, _PIPELINE, _TRY_TO_READ, _WAKE_ALL):
            callable_of(maker)
        preload_repeat()
        preload_rings()


#: For each collective that ``exchange`` runs: its flags; True if its input has a part for each
#: rank; True if its output has one.
_FORMS: dict[int, tuple[int, bool, bool]] = {
    Collective.BARRIER: (SHARED, False, False),
    Collective.ALLREDUCE: (SHARED, False, False),
    Collective.REDUCE: (TO_ROOT, False, False),
    Collective.BROADCAST: (SHARED | FROM_ROOT, False, False),
    Collective.ALLGATHER: (SHARED, False, True),
    Collective.REDUCE_SCATTER: (0, True, False),
    Collective.GATHER: (TO_ROOT, False, True),
    Collective.GATHERV: (TO_ROOT, False, True),
    Collective.SCATTER: (FROM_ROOT, True, False),
    Collective.SCATTERV: (FROM_ROOT, True, False),
    Collective.ALLTOALL: (0, True, True),
    Collective.ALLTOALLV: (0, True, True),
}


def _host_of_process() -> bytes:
    """Return a digest of the user and the namespaces of this process.

    Two processes of one host share memory only if their digests are equal.

    Raises
    ------
    OSError
        If the namespaces of this process cannot be read.
    """
    spaces = [os.stat(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    places = [(each.st_dev, each.st_ino) for each in spaces]
    return hashlib.sha256(repr((os.geteuid(), places)).encode()).digest()[:_HOST_NBYTES]


_HOST_NBYTES = 16
#: Size in bytes of the problem in an `_Offer`. The offer then has as many bytes as a result of
#: `pass_segments`, so that the allgathers of both have the same plan.
_PROBLEM_NBYTES = RESULT_NBYTES - _HOST_NBYTES - LISTENER_NAME_NBYTES


class _Offer(NamedTuple):
    """Message that each rank sends to the other ranks when they make a group.

    ``host`` is the result of `_host_of_process`, and ``name`` the name of the rank's
    `SegmentListener`. ``problem`` is the reason why the rank cannot share memory; empty if it can.
    """

    host: bytes
    name: bytes
    problem: str

    def pack(self) -> bytes:
        """Return the encoded message, which has `RESULT_NBYTES` bytes."""
        return self.host + self.name + pack_text(self.problem, _PROBLEM_NBYTES)

    @classmethod
    def unpack(cls, packed: bytes) -> _Offer:
        """Return the message that `pack` encoded."""
        end = _HOST_NBYTES + LISTENER_NAME_NBYTES
        return cls(packed[:_HOST_NBYTES], packed[_HOST_NBYTES:end], unpack_text(packed[end:]))


def _check(offers: Sequence[_Offer], ranks: Sequence[int], index: int) -> None:
    """Raise TransportError if an offer has a problem, or its ``host`` differs from this rank's.

    `offers` has the offer of each rank in `ranks`; `index` is the index of this rank.
    """
    for rank, each in zip(ranks, offers, strict=True):
        if each.problem:
            raise TransportError(f"no shared memory: rank {rank}: {each.problem}")
    host = offers[index].host
    unable = [rank for rank, each in zip(ranks, offers, strict=True) if each.host != host]
    if unable:
        raise TransportError(
            f"no shared memory: ranks {unable} run as a different user or in different "
            f"namespaces than rank {ranks[index]}; run all ranks of a host as one user in one "
            "container"
        )


__all__ = ["Attend", "CallsDiffer", "LocalGroup", "announce_compilation", "preload"]
