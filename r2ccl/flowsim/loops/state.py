"""Everything a simulation knows while it runs: records in flat arrays, for compiled loops.

Imports NumPy. Invariant: once a simulation has begun only the loops of this package write here, and
they resize nothing: whatever could grow has room for the worst case, or the loop returns to be
given more.

A *row* is an op of the program; all channels of one shape run the same rows, so an op that happens
is numbered ``op_base + row``, where ``op_base`` is its channel's. A *link* is a directed one of one
channel; its slices go one at a time. A *seat* is a link's place at a port: link ``i`` sits at its
egress port in seat ``2 i`` and at its ingress port in seat ``2 i + 1``. A *lane* is one rank's
channel. A *waiter* is whatever may wait for an op: link ``i`` before it sends is waiter ``i``,
before it delivers ``nlinks + i``; local op ``j`` is ``2 nlinks + j``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

#: A structured array; compiled loops read its fields as attributes of its records.
Records: TypeAlias = npt.NDArray[Any]

#: An op, of every channel that runs it.
ROW_DTYPE = np.dtype(
    [
        ("after", np.int32),  # first place in `FlowState.after`; the next row's is behind the last
        ("chunk", np.int32),
        ("kind", np.uint8),  # a Kind, not for loops
        ("is_direct", np.bool_),  # lands in memory that must have been released
        ("is_reducing", np.bool_),
        ("is_local", np.bool_),
    ],
    align=True,
)

#: Rows of the two ends.
MESSAGE_DTYPE = np.dtype([("send", np.int32), ("recv", np.int32)])

#: Bytes of a chunk, of each of its slices but the last, and their number.
CHUNK_DTYPE = np.dtype([("nbytes", np.int64), ("slice_nbytes", np.int64), ("nslices", np.int32)])

#: Slices of an op that are done, and the first waiter in its queue; -1: none.
DONE_DTYPE = np.dtype([("slices", np.int32), ("waiter", np.int32)])

#: The next waiter in the same queue, and how many slices this one waits for.
WAITER_DTYPE = np.dtype([("next", np.int32), ("need", np.int32)])

LINK_DTYPE = np.dtype(
    [
        ("op_base", np.int64),  # number of an op less its row
        ("chunk_base", np.int32),  # first chunk of the channel
        ("lane", np.int32),  # the receiver's
        ("egress", np.int32),  # port; `FREE` or `NOWHERE`
        ("ingress", np.int32),
        ("end", np.int32),  # the message behind the last
        ("message", np.int32),  # to be sent next, or under way, and its slice
        ("slice", np.int32),
        ("landing", np.int32),  # to land next
        ("landing_slice", np.int32),
        ("delivery", np.int32),  # to be given to its op next
        ("delivery_slice", np.int32),
        ("backlog", np.int32),  # slices landed and not delivered
        ("parts", np.int32),  # fair queues: ports that have not carried the slice yet
        ("is_inside", np.bool_),  # a node
        ("is_held", np.bool_),  # its first landed slice waits
        ("state", np.uint8),
        ("size", np.float64),  # bytes of the slice under way
        ("charge", np.float64),  # of them, those its ports have not been charged for
        ("left", np.float64),  # of them, those not sent at `since`
        ("since", np.float64),
        ("rate", np.float64),
        ("share", np.float64),  # the rate it is about to get; negative: not known yet
        ("stamp", np.int64),  # the last sharing it took part in
    ],
    align=True,
)

LOCAL_DTYPE = np.dtype(
    [
        ("op_base", np.int64),
        ("row", np.int32),
        ("chunk_base", np.int32),
        ("lane", np.int32),
        ("slice", np.int32),  # to be done next
        ("nslices", np.int32),
    ],
    align=True,
)

#: What a lane is reducing; -1: nothing. Others that want to reduce, first and last; -1: none.
REDUCER_DTYPE = np.dtype([("op", np.int64), ("head", np.int32), ("tail", np.int32)])

PORT_DTYPE = np.dtype(
    [
        ("bandwidth", np.float64),
        ("nbytes", np.float64),  # carried
        ("busy_s", np.float64),  # until `since`
        ("since", np.float64),  # it became busy
        ("head", np.int32),  # seats, -1: none
        ("tail", np.int32),
        ("count", np.int32),
        ("is_dirty", np.bool_),  # who sits here has changed
        ("open", np.int32),  # max-min: links without a share yet
        ("residual", np.float64),  # bandwidth not handed out yet
        ("stamp", np.int64),  # the last sharing it took part in
        ("virtual", np.float64),  # fair queues: bytes every seat has been served,
        ("settled", np.float64),  # at this time
    ],
    align=True,
)

#: Neighbours at the port, -1: none, and `AWAY` in ``next`` of who does not sit. Fair queues: the
#: port's virtual time at which its slice is served.
SEAT_DTYPE = np.dtype([("next", np.int32), ("previous", np.int32), ("mark", np.float64)])

#: A slice that has left the wire.
LANDING_DTYPE = np.dtype([("time", np.float64), ("link", np.int64)])

#: Of a link: nothing to send; a slice on the wire; between two slices; no port to send it by.
IDLE, BUSY, RESTING, PARKED = range(4)

#: Instead of a port: a way that takes no time; no way.
FREE, NOWHERE = -2, -1

#: Instead of a seat's neighbour.
AWAY = -2

#: Places in `FlowState.counts`: lengths of the lists of that name, of the two heaps, and numbers.
STARTING, RESTED, INSTANT, WOKEN, DIRTY, HEAP, REDUCING, SHARINGS, BATCHES, SLICES, BEGUN = range(
    11
)
NCOUNTS = 11


class FlowState(NamedTuple):
    """State of a simulation: the schedule, the network, and the progress so far.

    A heap is two parallel arrays: keys, and the indices of the items. In ``alpha_s``, ``landings``,
    ``landing_first`` and ``landing_count``, index 0 of the first axis is for links over the
    network, index 1 for links inside a node. Each row of ``landings`` is a circular buffer.
    """

    rows: Records
    after: npt.NDArray[np.int32]
    messages: Records
    chunks: Records
    done: Records
    waiters: Records
    links: Records
    locals: Records
    reducers: Records
    reducing_key: npt.NDArray[np.float64]
    reducing: npt.NDArray[np.int32]
    ports: Records
    seats: Records
    heap_key: npt.NDArray[np.float64]  # when the next thing happens to
    heap: npt.NDArray[np.int32]  # a link, or a port
    heap_at: npt.NDArray[np.int32]  # where in the heap a number is; -1: nowhere
    landings: Records
    landing_first: npt.NDArray[np.int64]
    landing_count: npt.NDArray[np.int64]
    starting: npt.NDArray[np.int32]  # links whose next slice may go
    rested: npt.NDArray[np.int32]  # links whose slice has just gone
    instant: npt.NDArray[np.int32]  # links whose slice takes no time
    woken: npt.NDArray[np.int32]  # waiters that may go on
    dirty: npt.NDArray[np.int32]  # ports
    part_ports: npt.NDArray[np.int32]  # max-min: ports and links that share anew
    part_links: npt.NDArray[np.int32]
    fill_key: npt.NDArray[np.float64]  # max-min: heap of ports by the share they could give
    fill: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    clock: npt.NDArray[np.float64]  # one entry: seconds
    alpha_s: npt.NDArray[np.float64]
    reduction_rate: float
    tolerance: float


__all__ = [
    "AWAY",
    "BATCHES",
    "BEGUN",
    "BUSY",
    "CHUNK_DTYPE",
    "DIRTY",
    "DONE_DTYPE",
    "FREE",
    "HEAP",
    "IDLE",
    "INSTANT",
    "LANDING_DTYPE",
    "LINK_DTYPE",
    "LOCAL_DTYPE",
    "MESSAGE_DTYPE",
    "NCOUNTS",
    "NOWHERE",
    "PARKED",
    "PORT_DTYPE",
    "REDUCER_DTYPE",
    "REDUCING",
    "RESTED",
    "RESTING",
    "ROW_DTYPE",
    "SEAT_DTYPE",
    "SHARINGS",
    "SLICES",
    "STARTING",
    "WAITER_DTYPE",
    "WOKEN",
    "FlowState",
    "Records",
]  # fmt: skip
