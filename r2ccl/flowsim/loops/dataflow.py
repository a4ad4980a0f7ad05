"""Dependencies between slices: which slices become ready when others land or are reduced.

`r2ccl.flowsim.loops.state` defines the terms. A model of port sharing takes from ``starting`` the
links whose next slice may be sent, and calls `goes_on_a_wire` for each. If the result is True, the
model calls `sent` when the slice is sent completely; for a slice that takes no time to send,
`land_and_reduce` calls `sent`. A waiter is in at most one queue: the queue of the first op from
which the waiter needs more slices, or the queue of its lane. The waiter is woken when enough slices
of that op are done, or when the lane is free to reduce.

The rules are those of `r2ccl.schedule.ir`: if an op and its dependency work on the same chunk
index, slice k of the op waits for slice k of the dependency; otherwise every slice waits for the
whole dependency. A slice for a RECV can be sent only when the dependencies of the RECV are done. A
slice for a RECV_REDUCE can land at once, in separate memory, and is reduced when the dependencies
of the RECV_REDUCE are done. When a slice has landed, the same slice of its SEND is done.
"""

from __future__ import annotations

from typing import Any

from r2ccl.flowsim.loops.heaps import drop_first, push
from r2ccl.flowsim.loops.jit import called, inlined
from r2ccl.flowsim.loops.state import (
    BEGUN,
    FREE,
    INSTANT,
    NOWHERE,
    PARKED,
    REDUCING,
    SLICES,
    STARTING,
    WOKEN,
    FlowState,
)


@inlined
def slice_nbytes(s: FlowState, chunk: int, number: int) -> int:
    """Return the number of bytes of slice `number` of a chunk."""
    me = s.chunks[chunk]
    if number < me.nslices - 1:
        size: int = me.slice_nbytes
    else:
        size = me.nbytes - (me.nslices - 1) * me.slice_nbytes
    return size


@inlined
def _is_ready(s: FlowState, row: int, me: Any, number: int, waiter: int) -> bool:
    """Return True if the dependencies of slice `number` of op `row` are done; else queue `waiter`.

    `me` is the record of the link or local op that waits; it identifies the channel.
    """
    chunk = s.rows[row].chunk
    for i in range(s.rows[row].after, s.rows[row + 1].after):
        before = s.after[i]
        need = number + 1
        if s.rows[before].chunk != chunk:
            need = s.chunks[me.chunk_base + s.rows[before].chunk].nslices
        done = s.done[me.op_base + before]
        if done.slices < need:
            s.waiters[waiter].next = done.waiter
            s.waiters[waiter].need = need
            done.waiter = waiter
            return False
    return True


@inlined
def _finish_slice(s: FlowState, op: int) -> None:
    """Mark one more slice of an op as done; wake the waiters that now have enough slices."""
    done = s.done[op]
    done.slices += 1
    waiter = done.waiter
    done.waiter = -1
    while waiter >= 0:
        me = s.waiters[waiter]
        following = me.next
        if me.need <= done.slices:
            s.woken[s.counts[WOKEN]] = waiter
            s.counts[WOKEN] += 1
        else:
            me.next = done.waiter
            done.waiter = waiter
        waiter = following


@inlined
def _advance(s: FlowState, link: int) -> None:
    """Add a link to ``starting`` if its next slice is ready to be sent."""
    me = s.links[link]
    if me.message == me.end:
        return
    message = s.messages[me.message]
    if not _is_ready(s, message.send, me, me.slice, link):
        return
    if s.rows[message.recv].is_direct and not _is_ready(s, message.recv, me, me.slice, link):
        return
    s.starting[s.counts[STARTING]] = link
    s.counts[STARTING] += 1


@inlined
def _act(s: FlowState, row: int, me: Any, number: int, waiter: int) -> bool:
    """Finish an op's slice, or start its reduction; return True.

    If the lane is busy with another reduction, queue `waiter` at the lane and return False.
    """
    op = me.op_base + row
    if s.reduction_rate == 0 or not s.rows[row].is_reducing:
        _finish_slice(s, op)
        return True
    lane = s.reducers[me.lane]
    if lane.op < 0:
        lane.op = op
        nbytes = slice_nbytes(s, me.chunk_base + s.rows[row].chunk, number)
        end = s.clock[0] + nbytes / s.reduction_rate
        push(s.reducing_key, s.reducing, s.counts[REDUCING], end, me.lane)
        s.counts[REDUCING] += 1
        return True
    s.waiters[waiter].next = -1
    if lane.head < 0:
        lane.head = waiter
    else:
        s.waiters[lane.tail].next = waiter
    lane.tail = waiter
    return False


@inlined
def _deliver(s: FlowState, link: int) -> None:
    """Deliver landed slices to their ops, in the link's order, until a slice must wait."""
    me = s.links[link]
    waiter = s.links.size + link
    me.is_held = True
    while me.backlog > 0:
        row = s.messages[me.delivery].recv
        chunk = me.chunk_base + s.rows[row].chunk
        if not _is_ready(s, row, me, me.delivery_slice, waiter):
            return
        if not _act(s, row, me, me.delivery_slice, waiter):
            return
        me.backlog -= 1
        me.delivery_slice += 1
        if me.delivery_slice == s.chunks[chunk].nslices:
            me.delivery_slice = 0
            me.delivery += 1
    me.is_held = False


@inlined
def _land(s: FlowState, link: int) -> None:
    """Process the landing of the link's next slice: finish it for its SEND, and deliver it.

    If an earlier slice of the link waits for delivery, this slice is delivered after that slice.
    """
    me = s.links[link]
    row = s.messages[me.landing].send
    me.landing_slice += 1
    if me.landing_slice == s.chunks[me.chunk_base + s.rows[row].chunk].nslices:
        me.landing_slice = 0
        me.landing += 1
    _finish_slice(s, me.op_base + row)
    me.backlog += 1
    if not me.is_held:
        _deliver(s, link)


@inlined
def sent(s: FlowState, link: int) -> None:
    """Record that the link's current slice is sent completely, and schedule its landing.

    If the link has no latency, the slice lands at once. Add the link to ``starting`` if its next
    slice is ready.
    """
    me = s.links[link]
    s.counts[SLICES] += 1
    if me.egress >= 0:
        s.ports[me.egress].nbytes += me.charge
        s.ports[me.ingress].nbytes += me.charge
    row = s.messages[me.message].send
    me.slice += 1
    if me.slice == s.chunks[me.chunk_base + s.rows[row].chunk].nslices:
        me.slice = 0
        me.message += 1
    way = 1 if me.is_inside else 0
    if s.alpha_s[way] > 0:
        at = (s.landing_first[way] + s.landing_count[way]) % s.landings.shape[1]
        s.landings[way, at].time = s.clock[0] + s.alpha_s[way]
        s.landings[way, at].link = link
        s.landing_count[way] += 1
    else:
        _land(s, link)
    _advance(s, link)


@inlined
def _work(s: FlowState, number: int) -> None:
    """Run the remaining slices of local op `number` until a slice must wait."""
    me = s.locals[number]
    waiter = 2 * s.links.size + number
    while me.slice < me.nslices:
        if not _is_ready(s, me.row, me, me.slice, waiter):
            return
        if not _act(s, me.row, me, me.slice, waiter):
            return
        me.slice += 1


@inlined
def _resume(s: FlowState, waiter: int) -> None:
    """Check the dependencies of a woken waiter again, and continue its work if they are done."""
    nlinks = s.links.size
    if waiter < nlinks:
        _advance(s, waiter)
    elif waiter < 2 * nlinks:
        _deliver(s, waiter - nlinks)
    else:
        _work(s, waiter - 2 * nlinks)


@called
def wake(s: FlowState) -> None:
    """Continue woken waiters until none is left."""
    while s.counts[WOKEN] > 0:
        s.counts[WOKEN] -= 1
        _resume(s, s.woken[s.counts[WOKEN]])


@called
def begin(s: FlowState) -> None:
    """Start the links and local ops that depend on nothing, and queue all others as waiters.

    Later calls do nothing.
    """
    if s.counts[BEGUN] > 0:
        return
    s.counts[BEGUN] = 1
    for link in range(s.links.size):
        _advance(s, link)
    for number in range(s.locals.size):
        _work(s, number)
    wake(s)


@inlined
def has_room(s: FlowState) -> bool:
    """Return True if ``landings`` has room for one more slice of every link."""
    return bool(max(s.landing_count[0], s.landing_count[1]) + s.links.size <= s.landings.shape[1])


@inlined
def next_time(s: FlowState, transmission: float) -> float:
    """Return the time of the next event in seconds; infinity if there is none.

    `transmission` is the time at which a port or link next finishes a slice, or infinity.
    """
    if s.counts[INSTANT] > 0:
        now: float = s.clock[0]
        return now
    time = transmission
    for way in range(2):
        if s.landing_count[way] > 0:
            time = min(time, s.landings[way, s.landing_first[way]].time)
    if s.counts[REDUCING] > 0:
        time = min(time, s.reducing_key[0])
    return time


@called
def land_and_reduce(s: FlowState) -> None:
    """Process due landings, due reductions, and the slices that take no time to send."""
    now = s.clock[0]
    for way in range(2):
        while s.landing_count[way] > 0 and s.landings[way, s.landing_first[way]].time <= now:
            link = s.landings[way, s.landing_first[way]].link
            s.landing_first[way] = (s.landing_first[way] + 1) % s.landings.shape[1]
            s.landing_count[way] -= 1
            _land(s, link)
    while s.counts[REDUCING] > 0 and s.reducing_key[0] <= now:
        me = s.reducers[s.reducing[0]]
        drop_first(s.reducing_key, s.reducing, s.counts[REDUCING])
        s.counts[REDUCING] -= 1
        op = me.op
        me.op = -1
        if me.head >= 0:  # the lane's queue comes before waiters that this slice wakes
            waiter = me.head
            me.head = s.waiters[waiter].next
            _resume(s, waiter)
        _finish_slice(s, op)
    ninstant = s.counts[INSTANT]
    s.counts[INSTANT] = 0
    for i in range(ninstant):
        sent(s, s.instant[i])


@inlined
def goes_on_a_wire(s: FlowState, link: int) -> bool:
    """Set the size of a link's next slice; return True if the slice can now be sent over ports.

    If the slice is empty, or the link sends in no time (`FREE`), list the link in ``instant``.
    Otherwise, if the link has no port, park it.
    """
    me = s.links[link]
    chunk = me.chunk_base + s.rows[s.messages[me.message].send].chunk
    me.size = slice_nbytes(s, chunk, me.slice)
    me.charge = me.size
    if me.size == 0 or me.egress == FREE:
        me.charge = 0
        s.instant[s.counts[INSTANT]] = link
        s.counts[INSTANT] += 1
        return False
    if me.egress == NOWHERE:
        me.state = PARKED
        return False
    return True


__all__ = [
    "begin",
    "goes_on_a_wire",
    "has_room",
    "land_and_reduce",
    "next_time",
    "sent",
    "wake",
]
