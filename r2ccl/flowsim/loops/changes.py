"""Changes of port bandwidth during a simulation: failure, recovery, degradation.

After a change no link uses a port without bandwidth, and all rates and end times follow from the
new bandwidths.

A slice in flight on a port that fails is sent again from its start, as in a replay after a
migration. If a link moves to other ports although its old ports are alive, for example back to its
home port, its slice in flight continues on the new ports with the remaining bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from r2ccl.flowsim.loops.fair_queue import lift as leave_queues
from r2ccl.flowsim.loops.fair_queue import place as join_queues
from r2ccl.flowsim.loops.fair_queue import requeue, settle
from r2ccl.flowsim.loops.jit import STAMP, called, compiled
from r2ccl.flowsim.loops.max_min import lift, mark_dirty, place
from r2ccl.flowsim.loops.state import BUSY, IDLE, NOWHERE, PARKED, STARTING, FlowState

Ports = npt.NDArray[np.int64]
Rates = npt.NDArray[np.float64]


@called
def _take_off(s: FlowState, link: int, bandwidths: Rates, is_fair: bool) -> None:
    """Remove a link from its ports; set ``left`` to the bytes to send over the new ports.

    Also add the bytes that the old ports have carried to their ``nbytes``.
    """
    me = s.links[link]
    if is_fair:
        leave_queues(s, link)
    else:
        lift(s, link)
    gone = max(0.0, me.charge - me.left)
    s.ports[me.egress].nbytes += gone
    s.ports[me.ingress].nbytes += gone
    if bandwidths[me.egress] == 0 or bandwidths[me.ingress] == 0:
        me.left = me.size
    me.charge = me.left


@called
def _move(s: FlowState, bandwidths: Rates, ports: Ports, is_fair: bool) -> int:
    """Set the new ports of all links.

    If a link's ports change, list the link in ``rested`` if it is busy, and in ``starting`` if it
    is parked. Return the number of links in ``rested``.
    """
    count = 0
    for link in range(s.links.size):
        me = s.links[link]
        if me.egress == ports[0, link] and me.ingress == ports[1, link]:
            continue
        if me.state == BUSY:
            _take_off(s, link, bandwidths, is_fair)
            s.rested[count] = link
            count += 1
        elif me.state == PARKED:
            me.state = IDLE
            s.starting[s.counts[STARTING]] = link
            s.counts[STARTING] += 1
        me.egress, me.ingress = ports[0, link], ports[1, link]
    return count


@called
def _set_bandwidths(s: FlowState, bandwidths: Rates, is_fair: bool) -> None:
    for port in range(s.ports.size):
        if not is_fair and s.ports[port].bandwidth != bandwidths[port]:
            mark_dirty(s, port)
        s.ports[port].bandwidth = bandwidths[port]


@called
def _reroute(s: FlowState, bandwidths: Rates, ports: Ports, is_fair: bool) -> None:
    if is_fair:  # before the change: advances the virtual time with the old bandwidths
        for port in range(s.ports.size):
            settle(s, port)
    moved = _move(s, bandwidths, ports, is_fair)
    _set_bandwidths(s, bandwidths, is_fair)
    for i in range(moved):
        link = s.rested[i]
        if s.links[link].egress == NOWHERE:
            s.links[link].state = PARKED
            s.links[link].left = 0.0
        elif is_fair:
            join_queues(s, link)
        else:
            place(s, link)
    if is_fair:
        for port in range(s.ports.size):
            requeue(s, port)


def _entry(stamp: int) -> Callable[..., Any]:
    def reroute(s: FlowState, time: float, bandwidths: Rates, ports: Ports, is_fair: bool) -> None:
        _ = stamp
        s.clock[0] = time
        _reroute(s, bandwidths, ports, is_fair)

    return reroute


#: ``reroute(state, time, bandwidths, ports, is_fair)`` sets, from `time` on (in seconds), the
#: bandwidth of every port in bytes/s, and the egress and ingress port of every link: `ports`, of
#: shape (2, nlinks). `is_fair` is True for port sharing by fair queues, False for max-min.
reroute: Callable[[FlowState, float, Rates, Ports, bool], None] = compiled(_entry(STAMP))

__all__ = ["reroute"]
