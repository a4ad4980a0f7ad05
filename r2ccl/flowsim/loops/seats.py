"""Per-port doubly linked lists of the links that are sending a slice through the port.

A link's list entry at a port is called its seat. A port is busy while its list is not empty.
"""

from __future__ import annotations

from r2ccl.flowsim.loops.jit import inlined
from r2ccl.flowsim.loops.state import AWAY, FlowState


@inlined
def sit(s: FlowState, seat: int, port: int, previous: int) -> None:
    """Insert `seat` into the list of `port`, after seat `previous` or, for -1, at the front."""
    here = s.ports[port]
    if here.count == 0:
        here.since = s.clock[0]
    here.count += 1
    following = s.seats[previous].next if previous >= 0 else here.head
    s.seats[seat].previous = previous
    s.seats[seat].next = following
    if previous >= 0:
        s.seats[previous].next = seat
    else:
        here.head = seat
    if following >= 0:
        s.seats[following].previous = seat
    else:
        here.tail = seat


@inlined
def leave(s: FlowState, seat: int, port: int) -> None:
    """Remove `seat` from the list of `port`."""
    here = s.ports[port]
    previous, following = s.seats[seat].previous, s.seats[seat].next
    if previous >= 0:
        s.seats[previous].next = following
    else:
        here.head = following
    if following >= 0:
        s.seats[following].previous = previous
    else:
        here.tail = previous
    s.seats[seat].next = AWAY
    here.count -= 1
    if here.count == 0:
        here.busy_s += s.clock[0] - here.since


__all__ = ["leave", "sit"]
