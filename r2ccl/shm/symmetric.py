"""Memory for arrays that all ranks of a group access directly: the class `SymmetricMemory`.

In each call of `allocate`, every rank makes one segment and maps the segments of its peers.
Compiled code finds the segment of an array by the array's address (`r2ccl.shm.places`), so views
and slices are found as well.

The group releases all its segments when it is closed. It releases the segments of one `allocate`
when all ranks have dropped their arrays in them; the ranks find this out in the next `allocate`. A
rank's own segment stays mapped until the group has released it and no array uses it. Therefore, the
addresses of a segment are not reused as long as the group knows the segment, and no other array can
be mistaken for an array in the segment.
"""

from __future__ import annotations

import mmap
import struct
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.bootstrap.auth import Secret
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.shm import layout
from r2ccl.shm.mapping import Mapping, bytes_of
from r2ccl.shm.passing import Place, SegmentListener, pass_segments
from r2ccl.shm.room import room_nbytes
from r2ccl.shm.segment import Segment
from r2ccl.types import AllgatherBytes, pack_text, unpack_text

#: Maximum number of segments that a rank of a group can have at a time.
MAX_NSEGMENTS = 1024
_SIZES = struct.Struct("qq")
_PROBLEM_NBYTES = 256


class _Memory:
    """Owner of the array that `allocate` returned; lives as long as this array or a view of it."""

    def __init__(self, mapping: Mapping) -> None:
        self.__array_interface__ = mapping.__array_interface__
        self._mapping = mapping


class _Shared(NamedTuple):
    """Segments of all ranks that one `allocate` made."""

    own: Segment
    peers: dict[int, Segment]
    #: Returns None after this rank has dropped its arrays.
    memory: Callable[[], _Memory | None]


class SymmetricMemory:
    """Segments of one group for arrays that all ranks access directly.

    Parameters
    ----------
    state : ndarray of int64
        State of compiled code, see `r2ccl.shm.layout`, into which the addresses of the tables of
        segments are written; borrowed.
    place : Place
    secret : Secret
        Secret of the job.
    timeout_s : float
        Time limit in seconds of `r2ccl.shm.passing.pass_segments`, which `allocate` calls.
    has_ended : callable
        ``has_ended()`` returns True if the communicator has ended.
    """

    def __init__(
        self,
        state: npt.NDArray[np.int64],
        place: Place,
        secret: Secret,
        timeout_s: float,
        has_ended: Callable[[], bool],
    ) -> None:
        self._state = state
        self._place = place
        self._secret = secret
        self._timeout_s = timeout_s
        self._has_ended = has_ended
        self._shared: dict[int, _Shared] = {}
        self._publish()

    def allocate(
        self, nbytes: int, exchange: AllgatherBytes, in_turn: Callable[[Callable[[], None]], None]
    ) -> npt.NDArray[np.uint8]:
        """Return an array of bytes, all zero, in new memory that all ranks map.

        Parameters
        ----------
        nbytes : int
            Minimum size of the array in bytes, equal on all ranks; it is rounded up to whole pages.
        exchange : callable
            Allgathers bytes between the ranks of the group; see `AllgatherBytes`.
        in_turn : callable
            ``in_turn(fn)`` calls ``fn()`` at a time when no call runs in the group.

        Returns
        -------
        ndarray of uint8
            Begins at the beginning of a page. After the array and all its views were deleted on all
            ranks, its memory is freed in the next call of this method, or when the group is closed.

        Raises
        ------
        InvalidArgument
            If the ranks ask for different numbers of pages; then no rank has an array.
        TransportError
            If memory, descriptors or segments are exhausted on any rank, or two ranks cannot pass
            their segments to each other; then no rank has an array.
        R2cclError
            If `exchange` raises it.

        Notes
        -----
        *Collective*: all ranks.
        """
        size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._free_dropped(exchange, in_turn)
        self._check(size, exchange)
        with ExitStack() as on_error, closing(SegmentListener(len(self._place.ranks))) as listener:
            own = self._create(size, exchange, listener)
            on_error.callback(own.close)
            names = exchange(listener.name)
            peers = pass_segments(
                own,
                self._place,
                listener,
                names,
                exchange,
                self._secret,
                self._timeout_s,
                self._has_ended,
            )
            on_error.pop_all()
        own.release()
        memory = _Memory(own.mapping)
        in_turn(partial(self._add, _Shared(own, peers, weakref.ref(memory))))
        return bytes_of(memory)

    def withdraw(self, output: npt.NDArray[Any]) -> None:
        """Make an output private after a failed call, because peers may still write to it.

        The elements of the output are zero afterwards. An output outside of the segments is not
        changed. The group must not be used afterwards.

        Raises
        ------
        OSError
            If memory is exhausted.
        """
        start = int(output.ctypes.data)
        for each in self._shared.values():
            first = each.own.address
            if output.nbytes and first <= start < first + each.own.nbytes:
                each.own.mapping.withdraw(start, start + output.nbytes)

    def close(self) -> None:
        """Unmap the peers' segments; this rank's segments stay mapped while arrays use them."""
        self._free(frozenset(self._shared))

    def _free_dropped(
        self, exchange: AllgatherBytes, in_turn: Callable[[Callable[[], None]], None]
    ) -> None:
        """Free the segments in which all ranks have dropped their arrays."""
        dropped = np.zeros(MAX_NSEGMENTS, np.uint8)
        dropped[[number for number, each in self._shared.items() if each.memory() is None]] = 1
        told = [np.frombuffer(each, np.uint8) for each in exchange(np.packbits(dropped).tobytes())]
        common = np.unpackbits(np.bitwise_and.reduce(told))
        if common.any():
            in_turn(partial(self._free, frozenset(map(int, np.flatnonzero(common)))))

    def _check(self, size: int, exchange: AllgatherBytes) -> None:
        """Raise an error on all ranks if sizes differ, or memory or segments do not suffice."""
        told = [_SIZES.unpack(each) for each in exchange(_SIZES.pack(size, room_nbytes()))]
        sizes, room = [each[0] for each in told], min(each[1] for each in told)
        ranks = self._place.ranks
        if len(set(sizes)) > 1:
            raise InvalidArgument(
                "empty() was called with different sizes, in bytes of whole pages: rank "
                + ", rank ".join(f"{rank}: {each}" for rank, each in zip(ranks, sizes, strict=True))
                + "; pass an equal shape and dtype on all ranks"
            )
        if sum(sizes) > room:
            raise TransportError(
                f"ranks {list(ranks)} cannot share {size} bytes each: their host, or one of their "
                f"cgroups, has {room} bytes left; free memory, or raise the limit of the cgroup",
                status="ENOMEM",
            )
        if len(self._shared) == MAX_NSEGMENTS:
            raise TransportError(
                f"rank {ranks[self._place.index]} has {MAX_NSEGMENTS} segments of shared memory "
                "in use, one for each call of empty(): on all ranks, delete arrays that are not "
                "needed, or use slices of larger arrays",
                status="ENOMEM",
            )

    def _create(self, size: int, exchange: AllgatherBytes, listener: SegmentListener) -> Segment:
        """Create this rank's segment.

        Raise an error on all ranks if any rank cannot create its segment or use its `listener`.
        """
        own, problem = None, ""
        try:
            if listener.problem:
                raise TransportError(
                    f"cannot pass {size} bytes of shared memory: {listener.problem}",
                    status=listener.status,
                )
            own = Segment.create(size)
        except TransportError as exc:
            rank = self._place.ranks[self._place.index]
            problem = f"{exc.status or 'ENOMEM'} rank {rank}: {exc}"
        try:
            problems = list(map(unpack_text, exchange(pack_text(problem, _PROBLEM_NBYTES))))
            if any(problems):
                status, _, text = next(filter(None, problems)).partition(" ")
                raise TransportError(text, status=status)
        except BaseException:
            if own is not None:
                own.close()
            raise
        assert own is not None  # otherwise this rank has a problem
        return own

    def _add(self, shared: _Shared) -> None:
        # All ranks have the same numbers in use, so they choose the same one.
        number = next(each for each in range(MAX_NSEGMENTS) if each not in self._shared)
        self._shared[number] = shared
        self._publish()

    def _free(self, numbers: frozenset[int]) -> None:
        freed = [self._shared.pop(each) for each in numbers]
        self._publish()
        for each in freed:
            for peer in each.peers.values():
                peer.close()

    def _publish(self) -> None:
        """Write the tables of the segments, for compiled code; no call may run meanwhile."""
        nranks = len(self._place.ranks)
        rows = sorted(
            (each.own.address, each.own.address + each.own.nbytes, number)
            for number, each in self._shared.items()
        )
        addresses = np.zeros((1 + max(self._shared, default=0), nranks), np.int64)
        for number, each in self._shared.items():
            for index in range(nranks):
                segment = each.own if index == self._place.index else each.peers[index]
                addresses[number, index] = segment.address
        self._tables = np.array(rows, np.int64).reshape(-1, layout.ROW_NWORDS), addresses
        self._state[layout.OWN_SYMMETRIC] = self._tables[0].ctypes.data
        self._state[layout.NSYMMETRIC] = len(rows)
        self._state[layout.SYMMETRIC] = addresses.ctypes.data


__all__ = ["MAX_NSEGMENTS", "SymmetricMemory"]
