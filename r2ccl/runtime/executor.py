"""Executor: runs the steps of a plan over links, with the kernels of its reductions.

The steps of one channel of a call are a *lane*. One `LaneRun` per lane runs these steps slice by
slice. It posts a send when the data to send is complete, announces a landing place when the memory
to overwrite is free, and reduces a slice that has arrived once the step's dependencies allow it.
Nothing here waits: `LaneRun.advance` posts every send and receive that is possible now and returns.

A slice to be reduced lands in separate memory and is reduced only when it is complete. A slice that
was received in part can therefore be sent again without being added twice.

The call's `Operands` hold its memory and its arithmetic. Operands in host memory (`HostCall`)
compute at once. Operands in device memory defer the work to a stream
(`r2ccl.gpu.device_reduction`), which runs the work in order. A step that only computes may begin
while the work of the steps that it depends on is still deferred. A step whose memory the transport
reads or writes must wait until this work is done.

Invariant: memory is overwritten only after every step that reads it is done. A send is done when
all its slices are: an eager slice when it is copied, a cleared slice when it is released. The link
(`r2ccl.failover.migration.link`) releases a cleared slice when the transport no longer reads its
memory and, if `Config.is_resilient`, the peer has confirmed it. A receive with `Op.is_proof` may
overwrite the memory of slices that the transport no longer reads but the peer has not confirmed,
because the data to be received is sent only after these slices were received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from r2ccl.failover.migration.calls import Calls
from r2ccl.failover.migration.link import Landing, RecvLink, SendLink
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.planning.lowering import Lane, Layout, Step
from r2ccl.planning.plan_cache import Plan
from r2ccl.schedule.ir import OpKind
from r2ccl.transport.aligned import aligned_memory

Array = npt.NDArray[Any]
Place = npt.NDArray[np.uint8] | memoryview
Reducer = Callable[[Array, Array, Array], object]
Divider = Callable[[Array], object]


class Operands(Protocol):
    """Memory and arithmetic of one collective."""

    @property
    def layout(self) -> Layout:
        """Steps of this rank, cut into slices."""
        ...

    @property
    def views(self) -> Sequence[memoryview]:
        """Bytes of each `Space`, for the transport."""
        ...

    @property
    def is_bandwidth_sample(self) -> bool:
        """True if the slices of this collective are used to measure the bandwidth of the rails."""
        ...

    @property
    def computed(self) -> int:
        """Sequence number of the last deferred work known to be done; earlier work is done too."""
        ...

    def apply(self, step: Step, lo: int, hi: int, received: Any) -> int:
        """Compute elements `lo` (inclusive) to `hi` (exclusive) of the output of `step`.

        Parameters
        ----------
        step : Step
            Any step except a send. It reads its source from element ``lo + step.shift`` on.
        lo, hi : int
        received : ndarray, buffer or None
            Landing place of a slice to be reduced, or payload of an eager slice. None if the slice
            was received directly into its destination, or the step is local.

        Returns
        -------
        int
            0 if the work is done. Otherwise the sequence number of the deferred work, higher than
            all earlier ones; the work is done when `computed` has reached this number.

        Raises
        ------
        TransportError
            If the device failed.
        Exception
            As raised by a user-defined operation.
        """
        ...


class HostCall:
    """`Operands` in host memory, which compute at once.

    Parameters
    ----------
    layout : Layout
    source, output : ndarray
        Flat and contiguous; the same memory if the collective is in place.
    reduce : callable
        ``reduce(left, right, out)``, on arrays of equal size; `out` may be `left` or `right`.
    finish : callable or None
        Applied in place to every finished slice of the result; divides by the number of ranks for
        AVG.
    is_bandwidth_sample : bool
        True if the slices are used to measure the bandwidth of the rails. This requires that no two
        peers send to the same port.
    scratch : ndarray of uint8, optional
        Scratch memory for ``layout.count`` elements, if the layout uses any. Default: new memory.
    """

    __slots__ = ("finish", "is_bandwidth_sample", "layout", "output", "reduce", "spaces", "views")

    #: No work is deferred, so no number is ever awaited.
    computed = 0

    def __init__(
        self,
        layout: Layout,
        source: Array,
        output: Array,
        reduce: Reducer,
        finish: Divider | None,
        *,
        is_bandwidth_sample: bool = True,
        scratch: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.layout = layout
        self.is_bandwidth_sample = is_bandwidth_sample
        self.output = output
        self.reduce = reduce
        self.finish = finish
        space: Array = output[:0]
        if layout.uses_scratch:
            if scratch is None:
                scratch = aligned_memory(layout.count * layout.itemsize)
            space = scratch.view(output.dtype)
        self.spaces = (source, output, space)
        view = _bytes_of(source)
        self.views = (
            view,
            view if output is source else _bytes_of(output),
            _bytes_of(space) if layout.uses_scratch else _NO_BYTES,
        )

    def apply(self, step: Step, lo: int, hi: int, received: Any) -> int:
        """Implement `Operands.apply`; return 0, because no work is deferred."""
        out = self.spaces[step.dst_space][lo:hi]
        kind = step.kind
        if kind is OpKind.RECV_REDUCE:
            if hi > lo:
                mine = self.spaces[step.src_space][lo + step.shift : hi + step.shift]
                if step.is_eager:
                    theirs = np.frombuffer(received, out.dtype)
                else:
                    theirs = received[: out.nbytes].view(out.dtype)
                if step.is_left:
                    self.reduce(theirs, mine, out)
                else:
                    self.reduce(mine, theirs, out)
        elif kind is OpKind.RECV:
            if received is not None and hi > lo:
                out[:] = np.frombuffer(received, out.dtype)
        elif kind is OpKind.REDUCE:
            self.reduce(out, self._read(step, lo, hi), out)
        elif step.src_space != step.dst_space:
            np.copyto(out, self._read(step, lo, hi))
        if step.is_final and self.finish is not None:
            self.finish(out)
        return 0

    def _read(self, step: Step, lo: int, hi: int) -> Array:
        return self.spaces[step.src_space][lo + step.shift : hi + step.shift]


class LandingPool:
    """Pool of landing places for slices to be reduced; all calls use the same places.

    Sizes of places are powers of two, so that calls of many different sizes share them. For each
    size, the pool grows to the largest number of places in use at once: at most `depth` per
    receiving link.

    Parameters
    ----------
    allocate : callable
        ``allocate(nbytes)`` returns memory into which the transport receives slices without another
        copy: an array, or a memoryview if this process cannot access the memory.
    depth : int
        Maximum number of landing places that a link announces ahead.
    """

    def __init__(self, allocate: Callable[[int], Place], depth: int) -> None:
        self._allocate = allocate
        self.depth = depth
        #: Size in bytes of all places, free or in use.
        self.nbytes = 0
        self._free: dict[int, list[Place]] = {}

    def take(self, nbytes: int) -> Place:
        """Return a landing place of at least `nbytes` bytes: a free one of this pool, or a new one.

        If several places of the needed size are free, the most recently returned one is taken.
        """
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.get(size)
        if free:
            return free.pop()
        self.nbytes += size
        return self._allocate(size)

    def give(self, place: Place) -> None:
        """Return the landing place `place` to the pool."""
        self._free.setdefault(place.nbytes, []).append(place)


class _Cursor:
    """Position in the ops of one link: slice ``k`` of op ``order[at]`` is next."""

    __slots__ = ("at", "k", "link", "order")

    def __init__(self, link: Any, order: tuple[int, ...]) -> None:
        self.link = link
        self.order = order
        self.at = 0
        self.k = 0


class _Inbound(_Cursor):
    """Position in the ops of a receiving link, with its landing places and unused slices."""

    __slots__ = ("depth", "held", "places", "under_way")

    def __init__(self, link: RecvLink, order: tuple[int, ...], depth: int) -> None:
        # Repeated from `_Cursor`: calling its __init__ takes 0.3 % of a small collective's time.
        self.link = link
        self.order = order
        self.at = 0
        self.k = 0
        #: No landing place is announced while this many posted receives are under way.
        self.depth = depth
        #: Number of posted receives whose slices are not done yet.
        self.under_way = 0
        self.places: deque[Place] = deque()
        self.held: deque[tuple[int, Any]] = deque()


class _Computing(NamedTuple):
    """Deferred work number ``number``; when it is done, ``nslices`` slices of op ``op`` are done.

    ``cursor`` is the position of the link that the slice came from; None for a local op. ``place``
    is the landing place that the work reads; None if it reads none.
    """

    number: int
    op: int
    nslices: int
    cursor: _Inbound | None
    place: Place | None


class LaneRun:
    """Execution of the steps of one channel in one call; the `Consumer` of its slices."""

    __slots__ = (
        "_begun", "_call", "_computing", "_done", "_inbound", "_links", "_local", "_outbound",
        "_pool", "_receivers", "_retired", "_steps", "_used", "channels", "is_bandwidth_sample",
        "remaining",
    )  # fmt: skip

    def __init__(self, lane: Lane, call: Operands, links: Links, pool: LandingPool) -> None:
        self._call = call
        self.is_bandwidth_sample = call.is_bandwidth_sample
        self._links = links
        self._pool = pool
        self._steps = lane.steps
        #: Number of slices done, per op; see the module for the slices of a send.
        self._done = [0] * len(lane.steps)
        #: As `_done`, but a slice of a send counts when the transport no longer reads it.
        self._retired = [0] * len(lane.steps)
        #: Number of slices whose work was deferred, per op. Work runs in the order of its deferral.
        self._begun = [0] * len(lane.steps)
        self._computing: deque[_Computing] = deque()
        #: Number of slices used, per receiving op: the index of the next slice.
        self._used = [0] * len(lane.steps)
        #: Number of slices that are not done, of all ops.
        self.remaining = lane.nslices
        #: Channels of the links whose events this run handles.
        self.channels = lane.channels
        # Existing links are looked up here, which saves one call of `Links.sender` per link.
        senders, receivers = links.senders, links.receivers
        self._outbound = []
        for way in lane.sends:
            sender = senders.get((way.peer, way.channel)) or links.sender(way.peer, way.channel)
            self._outbound.append(_Cursor(sender, way.steps))
        self._inbound = []
        self._receivers = {}
        for way in lane.recvs:
            link = receivers.get((way.peer, way.channel)) or links.receiver(way.peer, way.channel)
            inbound = _Inbound(link, way.steps, min(pool.depth, way.depth))
            self._inbound.append(inbound)
            self._receivers[way.peer] = inbound
        self._local = deque(lane.locals)

    # Called by Links and Progress

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Copy or reduce a slice that has arrived, if its op may run; else keep it for `advance`.

        If an earlier slice of the same link is still kept, keep this slice, too.
        """
        index = landing.index
        step = self._steps[index]
        cursor = self._receivers[step.peer]
        if payload is None:
            # Confirm before the reduction: the data is in this rank's memory, so the peer's memory
            # is free. Two ranks that exchange a chunk and reduce it in place would otherwise
            # deadlock.
            self._links.consume(cursor.link, False)
            data: Any = cursor.places.popleft() if step.kind == OpKind.RECV_REDUCE else None
        else:
            data = payload
        if not cursor.held and self._is_ready(step, self._used[index]):
            self._use(cursor, index, step, data)
        else:
            cursor.held.append((index, data if payload is None else bytes(payload)))

    def on_released(self, index: int) -> None:
        """Count one more released slice of send op `index` as done."""
        self._finish_slice(index)

    def on_retired(self, index: int) -> None:
        """Count one more slice of send op `index` that the transport no longer reads."""
        self._retired[index] += 1

    def _finish_slice(self, index: int) -> None:
        done = self._done[index] = self._done[index] + 1
        if done > self._retired[index]:
            self._retired[index] = done
        self.remaining -= 1

    def advance(self) -> None:
        """Post sends and receives, and run local steps, until no more are possible."""
        if self._computing:
            self._take_computed()
        moved = self.remaining > 0
        while moved:
            moved = False
            for outbound in self._outbound:
                if outbound.at < len(outbound.order):
                    moved |= self._post(outbound)
            for inbound in self._inbound:
                if inbound.held:
                    moved |= self._use_held(inbound)
                if inbound.at < len(inbound.order):
                    self._ask(inbound)
            if self._local:
                moved |= self._run_local()

    def stalled(self) -> list[tuple[SendLink, bool]]:
        """Return (link, is_eager) of each send link whose next slice is ready but must wait.

        The slice waits for a landing place from the peer or, if ``is_eager``, for a free slot.
        """
        found = []
        for cursor in self._outbound:
            at = cursor.at
            if at < len(cursor.order):
                step = self._steps[cursor.order[at]]
                if self._is_ready(step, cursor.k) and not cursor.link.can_post(step.is_eager):
                    found.append((cursor.link, step.is_eager))
        return found

    # Sending

    def _post(self, cursor: _Cursor) -> bool:
        link: SendLink = cursor.link
        has_moved = False
        while cursor.at < len(cursor.order):
            index = cursor.order[cursor.at]
            step = self._steps[index]
            if not link.can_post(step.is_eager) or not self._is_ready(step, cursor.k):
                break
            self._send_slice(link, index, step, cursor.k)
            has_moved = True
            cursor.k += 1
            if cursor.k == step.nslices:
                cursor.at += 1
                cursor.k = 0
        return has_moved

    def _send_slice(self, link: SendLink, index: int, step: Step, k: int) -> None:
        size = self._call.layout.itemsize
        view = self._call.views[step.src_space][step.cuts[k] * size : step.cuts[k + 1] * size]
        if step.is_eager:
            # The copy frees the caller's memory at once, and a replay reads the copy.
            view = memoryview(bytes(view))
            self._finish_slice(index)
        self._links.send(link, view, step.is_eager, self, index)

    # Receiving

    def _ask(self, cursor: _Inbound) -> None:
        """Post as many receives of a link as its depth and the dependencies allow."""
        while cursor.at < len(cursor.order):
            index = cursor.order[cursor.at]
            step = self._steps[index]
            if step.is_eager:
                region = None
            elif cursor.under_way >= cursor.depth:
                return
            elif step.kind == OpKind.RECV_REDUCE:
                region = self._place(cursor, step, cursor.k)
            elif self._is_ready(step, cursor.k):
                size = self._call.layout.itemsize
                lo, hi = step.cuts[cursor.k] * size, step.cuts[cursor.k + 1] * size
                region = self._call.views[step.dst_space][lo:hi]
            else:
                return
            cursor.under_way += 1
            cursor.k += 1
            if cursor.k == step.nslices:
                cursor.at += 1
                cursor.k = 0
            is_last = cursor.at == len(cursor.order)
            self._links.recv(cursor.link, region, self, index, is_last)

    def _place(self, cursor: _Inbound, step: Step, k: int) -> memoryview:
        place = self._pool.take(self._call.layout.slice_nbytes)
        cursor.places.append(place)
        nbytes = (step.cuts[k + 1] - step.cuts[k]) * self._call.layout.itemsize
        return memoryview(place)[:nbytes]  # type: ignore[arg-type]

    def _use_held(self, cursor: _Inbound) -> bool:
        has_moved = False
        while cursor.held:
            index, data = cursor.held[0]
            step = self._steps[index]
            if not self._is_ready(step, self._used[index]):
                break
            cursor.held.popleft()
            self._use(cursor, index, step, data)
            has_moved = True
        return has_moved

    def _use(self, cursor: _Inbound, index: int, step: Step, data: Any) -> None:
        """Reduce or copy `data`, the next slice of op `index`.

        If `data` is None, the slice is already in its destination.
        """
        k = self._used[index]
        self._used[index] = k + 1
        number = 0
        if data is not None or step.is_final:
            number = self._call.apply(step, step.cuts[k], step.cuts[k + 1], data)
        if step.is_eager:
            self._links.consume(cursor.link, True)
            data = None
        if number:
            self._begun[index] = k + 1
            self._computing.append(_Computing(number, index, 1, cursor, data))
            return
        cursor.under_way -= 1
        if data is not None:
            self._pool.give(data)
        self._finish_slice(index)

    def _take_computed(self) -> None:
        """Finish the slices whose deferred work is done."""
        while self._computing and self._computing[0].number <= self._call.computed:
            _, index, nslices, cursor, place = self._computing.popleft()
            if cursor is not None:
                cursor.under_way -= 1
            if place is not None:
                self._pool.give(place)
            for _ in range(nslices):
                self._finish_slice(index)

    # Local steps

    def _run_local(self) -> bool:
        """Run the COPY and REDUCE ops whose dependencies are done, or deferred to the stream."""
        has_moved = False
        for index in list(self._local):
            step = self._steps[index]
            # A dependency by slice is on an op of the same chunk, so its last slice is this op's
            # last slice.
            if self._is_ready(step, step.nslices - 1):
                self._do_local(index, step)
                self._local.remove(index)
                has_moved = True
        return has_moved

    def _do_local(self, index: int, step: Step) -> None:
        number = self._call.apply(step, step.cuts[0], step.cuts[-1], None)
        if number:
            self._begun[index] = step.nslices
            self._computing.append(_Computing(number, index, step.nslices, None, None))
            return
        for _ in range(step.nslices):
            self._finish_slice(index)

    def _is_ready(self, step: Step, k: int) -> bool:
        for index, is_by_slice, is_proved in step.after:
            needed = k + 1 if is_by_slice else self._steps[index].nslices
            if (self._retired if is_proved else self._done)[index] < needed and (
                self._begun[index] < needed or step.kind in _MOVES
            ):
                return False
        return True


class HostLanes(msgspec.Struct):
    """Operands of a collective in host memory; calling the object creates the lanes of a plan.

    Attributes
    ----------
    pool : LandingPool
    source, output : ndarray
        Input and output, as for `HostCall`.
    scratch : ndarray of uint8 or None
        Scratch memory for compiled code; None: new memory, if the plan uses any. Lanes that are
        created by calling this object always get new scratch memory.
    """

    pool: LandingPool
    source: Array
    output: Array
    scratch: npt.NDArray[np.uint8] | None = None

    def call(self, plan: Plan, scratch: npt.NDArray[np.uint8] | None = None) -> HostCall:
        """Return the operands of a planned collective; `scratch` as for `HostCall`."""
        return HostCall(
            plan.layout, self.source, self.output, plan.reduce, plan.finish,
            is_bandwidth_sample=plan.is_bandwidth_sample, scratch=scratch,
        )  # fmt: skip

    def __call__(self, plan: Plan, links: Links) -> list[LaneRun]:
        """Create the lanes of a planned collective."""
        call = self.call(plan)
        return [LaneRun(lane, call, links, self.pool) for lane in plan.layout.lanes]


def begin_lanes(runs: Sequence[LaneRun], calls: Calls[Consumer]) -> None:
    """Register `runs`, the lanes of the current call, as consumers of its slices; start them.

    To start a lane is to post the sends and receives that are possible now.
    """
    consumers: dict[int, Consumer] = {}
    for run in runs:
        for channel in run.channels:
            consumers[channel] = run
    calls.consumers = consumers
    for run in runs:
        run.advance()


def are_done(runs: Sequence[LaneRun]) -> bool:
    """Return whether all slices of all lanes are done."""
    for run in runs:  # noqa: SIM110 - `all` would make a generator per call
        if run.remaining:
            return False
    return True


def _bytes_of(array: Array) -> memoryview:
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]


_NO_BYTES = memoryview(b"")
#: Kinds of the steps whose memory the transport reads or writes.
_MOVES = frozenset((OpKind.SEND, OpKind.RECV))

__all__ = [
    "HostCall",
    "HostLanes",
    "LandingPool",
    "LaneRun",
    "Operands",
    "Place",
    "are_done",
    "begin_lanes",
]
