"""Port sharing by fair queues: every port serves all its slices at equal rates.

A slice is queued at its egress port and at its ingress port at the same time, and is sent
completely when both have served it. A port that is not the bottleneck of a slice serves it early
and then has more bandwidth for its other slices. Over several slices a link therefore gets about
its max-min fair share. An event costs a few operations on the heap and on the sorted queues of the
ports involved; rates of other links are not computed. The time of a single slice may be inaccurate.
Compared with `r2ccl.flowsim.loops.max_min`, rings take the same simulated time, double binary trees
and packed trees over 8 nodes take from 2.1 % less to 0.7 % more, and 28 packed trees with 16 slices
per chunk over 1,024 nodes take 2.8 % less.

Between two events, `FlowState.heap` holds for each busy port the time at which it finishes its next
slice.

Serving n slices at equal rates is fair queueing in the limit of small packets. A port's virtual
time advances at bandwidth / n bytes/s; a slice of b bytes that arrives at virtual time v has been
served at v + b. The entry of a link in the queue of a port is a *seat*, see
`r2ccl.flowsim.loops.state`.

References
----------
Demers, Keshav and Shenker, "Analysis and simulation of a fair queueing algorithm", SIGCOMM 1989.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from r2ccl.flowsim.loops.dataflow import (
    begin,
    goes_on_a_wire,
    has_room,
    land_and_reduce,
    next_time,
    sent,
    wake,
)
from r2ccl.flowsim.loops.heaps import clear_time, set_time
from r2ccl.flowsim.loops.jit import STAMP, Loop, called, compiled, inlined
from r2ccl.flowsim.loops.seats import leave, sit
from r2ccl.flowsim.loops.state import AWAY, BATCHES, BUSY, HEAP, IDLE, STARTING, FlowState


@inlined
def settle(s: FlowState, port: int) -> None:
    """Advance the port's virtual time to the current time; for an idle port, set it to 0."""
    here = s.ports[port]
    if here.count == 0:
        here.virtual = 0.0
    else:
        here.virtual += (s.clock[0] - here.settled) * here.bandwidth / here.count
    here.settled = s.clock[0]


@inlined
def requeue(s: FlowState, port: int) -> None:
    """Set the port's heap entry to the time at which the port next finishes a slice.

    An idle port has no entry.
    """
    here = s.ports[port]
    if here.count == 0:
        clear_time(s, port)
    else:
        left = max(0.0, s.seats[here.head].mark - here.virtual)
        set_time(s, port, here.settled + left * here.count / here.bandwidth)


@inlined
def _join(s: FlowState, seat: int, port: int, nbytes: float) -> None:
    settle(s, port)
    mark = s.ports[port].virtual + nbytes
    s.seats[seat].mark = mark
    previous = s.ports[port].tail
    while previous >= 0 and s.seats[previous].mark > mark:
        previous = s.seats[previous].previous
    sit(s, seat, port, previous)
    requeue(s, port)


@inlined
def place(s: FlowState, link: int) -> None:
    """Queue a link at its two ports, with ``left`` bytes to send."""
    me = s.links[link]
    me.state = BUSY
    me.parts = 2
    _join(s, 2 * link, me.egress, me.left)
    _join(s, 2 * link + 1, me.ingress, me.left)


@inlined
def _part_left(s: FlowState, seat: int, port: int) -> float:
    """Remove a link's seat from the port's queue; return the bytes of its slice not yet served.

    Return 0 if the port has already served the slice, and the seat is therefore in no queue.
    """
    if s.seats[seat].next == AWAY:
        return 0.0
    settle(s, port)
    left: float = max(0.0, s.seats[seat].mark - s.ports[port].virtual)
    leave(s, seat, port)
    requeue(s, port)
    return left


@inlined
def lift(s: FlowState, link: int) -> None:
    """Remove a link from its two ports; set ``left`` to the bytes not yet sent."""
    me = s.links[link]
    me.state = IDLE
    sent_less = _part_left(s, 2 * link, me.egress)
    me.left = max(sent_less, _part_left(s, 2 * link + 1, me.ingress))


@called
def _start(s: FlowState) -> None:
    """Start the slices that are ready to be sent."""
    for i in range(s.counts[STARTING]):
        link = s.starting[i]
        if goes_on_a_wire(s, link):
            s.links[link].left = s.links[link].size
            place(s, link)
    s.counts[STARTING] = 0


@inlined
def _serve(s: FlowState, port: int) -> None:
    """Remove the slices that the port has served; finish each slice that both ports have served."""
    settle(s, port)
    here = s.ports[port]
    here.virtual = s.seats[here.head].mark  # removes the rounding error of `settle`
    while here.head >= 0 and s.seats[here.head].mark <= here.virtual:
        seat = here.head
        leave(s, seat, port)
        me = s.links[seat >> 1]
        me.parts -= 1
        if me.parts == 0:
            me.state = IDLE
            sent(s, seat >> 1)
    requeue(s, port)


@called
def _run(s: FlowState, until: float) -> bool:
    begin(s)
    while True:
        _start(s)
        if not has_room(s):
            return False
        now = next_time(s, s.heap_key[0] if s.counts[HEAP] > 0 else math.inf)
        if now > until or now == math.inf:
            return True
        s.clock[0] = now
        s.counts[BATCHES] += 1
        land_and_reduce(s)
        while s.counts[HEAP] > 0 and s.heap_key[0] <= now:
            _serve(s, s.heap[0])
        wake(s)


def _entry(stamp: int) -> Callable[..., Any]:
    def run_fair_queue(s: FlowState, until: float) -> bool:
        _ = stamp
        done: bool = _run(s, until)
        return done

    return run_fair_queue


run: Loop = compiled(_entry(STAMP))

__all__ = ["lift", "place", "requeue", "run", "settle"]
