"""Executor: runs a schedule; the only room where schedule, links and kernels meet.

One `LaneRun` per channel of the call walks the lane's steps slice by slice: it posts a send when
what it reads is there, names a landing place when what it overwrites is released, and reduces a
slice as soon as it has landed. Nothing here waits; `LaneRun.advance` posts whatever has become
possible and returns.

A slice that is to be reduced lands beside the user's memory and is reduced only when whole: a torn
slice can be sent again without having been added twice.

Must not import sockets, threads or the clock. Invariant: memory is overwritten only after every
step that reads it is done, and for a send that means released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.lowering import Lane, Layout, Step
from r2ccl.progress import Progress
from r2ccl.resilience.link import Landing, RecvLink, SendLink
from r2ccl.schedule.ir import Kind

Array = npt.NDArray[Any]
Reducer = Callable[[Array, Array, Array], object]
Divider = Callable[[Array], object]


class Call:
    """One collective's memory and arithmetic.

    Parameters
    ----------
    layout : Layout
    source, output : ndarray
        Flat, contiguous; the same memory when in place.
    reduce : callable
        ``reduce(left, right, out)``.
    finish : callable or None
        Applied to every finished slice of the result (AVG).
    is_gauge : bool
        Whether its slices show what the rails carry: no other peer sends where one of them goes.
    """

    __slots__ = ("finish", "is_gauge", "layout", "output", "reduce", "spaces", "views")

    def __init__(
        self,
        layout: Layout,
        source: Array,
        output: Array,
        reduce: Reducer,
        finish: Divider | None,
        *,
        is_gauge: bool = True,
    ) -> None:
        self.layout = layout
        self.is_gauge = is_gauge
        self.output = output
        self.reduce = reduce
        self.finish = finish
        scratch = np.empty_like(output) if layout.uses_scratch else output[:0]
        self.spaces = (source, output, scratch)
        self.views = tuple(memoryview(space.view(np.uint8)) for space in self.spaces)  # type: ignore[arg-type]


class LandingPool:
    """Landing places for slices that are reduced, kept from call to call.

    Bounded by the largest number in use at once: landing depth times links that receive.
    `allocate` gives memory the transport lands slices in without another copy.
    """

    def __init__(self, allocate: Callable[[int], Array]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[Array]] = {}

    def take(self, nbytes: int) -> Array:
        """Return a place of `nbytes` bytes, cache-warm if one was used before."""
        free = self._free.get(nbytes)
        return free.pop() if free else self._allocate(nbytes)

    def give(self, place: Array) -> None:
        """Return a place for the next taker."""
        self._free.setdefault(place.nbytes, []).append(place)


class _Cursor:
    """Where one link's ops stand: op ``order[at]``, slice ``k``."""

    __slots__ = ("at", "k", "link", "order")

    def __init__(self, link: Any, order: tuple[int, ...]) -> None:
        self.link = link
        self.order = order
        self.at = 0
        self.k = 0


class _Inbound(_Cursor):
    """A receiving link's cursor, with its landing places and the slices that must wait."""

    __slots__ = ("depth", "held", "places", "under_way")

    def __init__(self, link: RecvLink, order: tuple[int, ...], depth: int) -> None:
        super().__init__(link, order)
        #: Slices asked for ahead, at most.
        self.depth = depth
        #: Slices asked for and not used yet.
        self.under_way = 0
        self.places: deque[Array] = deque()
        self.held: deque[tuple[int, Any]] = deque()


class LaneRun:
    """One channel of one call; a `Consumer` of `Progress`."""

    __slots__ = (
        "_call", "_done", "_inbound", "_local", "_outbound", "_pool", "_progress",
        "_receivers", "_retired", "_steps", "_used", "channels", "is_gauge", "remaining",
    )  # fmt: skip

    def __init__(self, lane: Lane, call: Call, progress: Progress, pool: LandingPool) -> None:
        self._call = call
        self.is_gauge = call.is_gauge
        self._progress = progress
        self._pool = pool
        self._steps = lane.steps
        #: Slices done per op; of a send: released.
        self._done = [0] * len(lane.steps)
        #: The same, but of a send: no longer read by the transport.
        self._retired = [0] * len(lane.steps)
        #: Slices of a receiving op already used (its next slice number).
        self._used = [0] * len(lane.steps)
        self.remaining = lane.nslices
        #: The links' channels whose events are for this run.
        self.channels = lane.channels
        self._outbound = [
            _Cursor(progress.send_link(way.peer, way.channel), way.steps) for way in lane.sends
        ]
        most = progress.config.landing_depth
        self._inbound = [
            _Inbound(progress.recv_link(way.peer, way.channel), way.steps, min(most, way.depth))
            for way in lane.recvs
        ]
        self._receivers = {cursor.link.peer: cursor for cursor in self._inbound}
        self._local = deque(lane.locals)

    # What Progress calls

    def on_slice(self, landing: Landing, payload: memoryview | bytes | None) -> None:
        """Use a slice at once if its op may run, else hold it."""
        index = landing.index
        step = self._steps[index]
        cursor = self._receivers[step.peer]
        if payload is None:
            # It is in this rank's memory, so the peer's is free: waiting for the reduction would
            # deadlock two ranks that exchange a chunk and reduce it in place.
            self._progress.consume(cursor.link, False)
            data: Any = cursor.places.popleft() if step.kind == Kind.RECV_REDUCE else None
        else:
            data = payload
        if not cursor.held and self._is_ready(step, self._used[index]):
            self._use(cursor, index, step, data)
        else:
            cursor.held.append((index, bytes(data) if isinstance(data, memoryview) else data))

    def on_released(self, index: int) -> None:
        """One more slice of send op `index` was released."""
        self._finish_slice(index)

    def on_retired(self, index: int) -> None:
        """One more slice of send op `index` was retired."""
        self._retired[index] += 1

    def _finish_slice(self, index: int) -> None:
        self._done[index] += 1
        self._retired[index] = max(self._retired[index], self._done[index])
        self.remaining -= 1

    def advance(self) -> None:
        """Post what has become possible, until nothing more is."""
        moved = self.remaining > 0
        while moved:
            moved = False
            for outbound in self._outbound:
                moved |= self._post(outbound)
            for inbound in self._inbound:
                moved |= self._use_held(inbound)
                self._ask(inbound)
            if self._local:
                moved |= self._run_local()

    def stalled(self) -> list[tuple[SendLink, bool]]:
        """Links whose next slice is ready and waits for the peer, and whether it is eager."""
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
            # The copy is the eager slot: the caller's memory is free at once, the slice replayable.
            view = memoryview(bytes(view))
            self._finish_slice(index)
        self._progress.send(link, view, step.is_eager, self, index)

    # Receiving

    def _ask(self, cursor: _Inbound) -> None:
        """Want slices ahead, as far as depth and dependencies allow."""
        while cursor.at < len(cursor.order):
            index = cursor.order[cursor.at]
            step = self._steps[index]
            if step.is_eager:
                region = None
            elif cursor.under_way >= cursor.depth:
                return
            elif step.kind == Kind.RECV_REDUCE:
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
            self._progress.recv(cursor.link, region, self, index, is_last)

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
        """Slice data becomes result: reduced, copied, or already in place (None)."""
        k = self._used[index]
        self._used[index] = k + 1
        cursor.under_way -= 1
        lo, hi = step.cuts[k], step.cuts[k + 1]
        call = self._call
        out = call.spaces[step.dst_space][lo:hi]
        if step.kind == Kind.RECV_REDUCE:
            mine = call.spaces[step.src_space][lo:hi]
            self._reduce(step, mine, data, out)
        elif data is not None and hi > lo:
            out[:] = np.frombuffer(data, out.dtype)
        if step.is_eager:
            self._progress.consume(cursor.link, True)
        if step.is_final and call.finish is not None:
            call.finish(out)
        self._finish_slice(index)

    def _reduce(self, step: Step, mine: Array, data: Any, out: Array) -> None:
        if not mine.size:
            return
        if step.is_eager:
            received = np.frombuffer(data, out.dtype)
        else:
            received = data[: out.nbytes].view(out.dtype)
        if step.is_left:
            self._call.reduce(received, mine, out)
        else:
            self._call.reduce(mine, received, out)
        if not step.is_eager:
            self._pool.give(data)

    # Local steps

    def _run_local(self) -> bool:
        """Run COPY and REDUCE ops whose dependencies hold."""
        has_moved = False
        for index in list(self._local):
            step = self._steps[index]
            if all(self._done[i] >= self._steps[i].nslices for i, _, _ in step.after):
                self._do_local(step)
                self._local.remove(index)
                for _ in range(step.nslices):
                    self._finish_slice(index)
                has_moved = True
        return has_moved

    def _do_local(self, step: Step) -> None:
        call = self._call
        lo, hi = step.cuts[0], step.cuts[-1]
        source = call.spaces[step.src_space][lo:hi]
        out = call.spaces[step.dst_space][lo:hi]
        if step.kind == Kind.REDUCE:
            call.reduce(out, source, out)
        elif step.src_space != step.dst_space:
            np.copyto(out, source)
        if step.is_final and call.finish is not None:
            call.finish(out)

    def _is_ready(self, step: Step, k: int) -> bool:
        for index, is_by_slice, is_proved in step.after:
            needed = k + 1 if is_by_slice else self._steps[index].nslices
            if (self._retired if is_proved else self._done)[index] < needed:
                return False
        return True


__all__ = ["Call", "LandingPool", "LaneRun"]
