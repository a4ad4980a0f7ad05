"""State of a running simulation: records in flat arrays, for the compiled loops.

The loops never resize an array. Arrays have room for the worst case, except ``landings``: before it
can overflow, the loop returns and the caller enlarges it.

Terms:

- *row*: an op of the program. All channels of one shape run the same rows. The op of row ``row`` on
  one channel has the number ``op_base + row``, with the ``op_base`` of that channel.
- *link*: a directed link of one channel between two ranks. It sends one slice at a time.
- *seat*: the entry of a link in the list of a port. Link ``i`` has seat ``2 i`` at its egress port
  and seat ``2 i + 1`` at its ingress port.
- *lane*: one rank on one channel. It runs one reduction at a time.
- *waiter*: a link or a local op that can wait for an op or for a lane. Link ``i`` is waiter ``i``
  before it sends and waiter ``nlinks + i`` before it delivers; local op ``j`` is waiter
  ``2 nlinks + j``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

#: A structured array. Compiled loops read its fields as attributes of its records.
Records: TypeAlias = npt.NDArray[Any]

#: A row: one op, shared by all channels that run it.
ROW_DTYPE = np.dtype(
    [
        ("after", np.int32),  # first index in `FlowState.after`; the next row's `after` is the end
        ("chunk", np.int32),
        ("kind", np.uint8),  # an OpKind; the loops do not read it
        ("is_direct", np.bool_),  # a RECV: lands in memory that must have been released
        ("is_reducing", np.bool_),
        ("is_local", np.bool_),
    ],
    align=True,
)

#: A message: its send row and its receive row.
MESSAGE_DTYPE = np.dtype([("send", np.int32), ("recv", np.int32)])

#: A chunk: its bytes, the bytes of each slice except the last, and the number of slices.
CHUNK_DTYPE = np.dtype([("nbytes", np.int64), ("slice_nbytes", np.int64), ("nslices", np.int32)])

#: Progress of an op: number of slices done, and the first waiter in its queue; -1: none.
DONE_DTYPE = np.dtype([("slices", np.int32), ("waiter", np.int32)])

#: A waiter: the next one in the same queue, and the number of done slices it waits for.
WAITER_DTYPE = np.dtype([("next", np.int32), ("need", np.int32)])

#: A link. `message`, `landing` and `delivery` are indices into `FlowState.messages`.
LINK_DTYPE = np.dtype(
    [
        ("op_base", np.int64),  # of the channel: an op's number is op_base + row
        ("chunk_base", np.int32),  # first chunk of the channel
        ("lane", np.int32),  # lane of the receiver
        ("egress", np.int32),  # port, or `FREE` or `NOWHERE`
        ("ingress", np.int32),
        ("end", np.int32),  # end of the link's messages, exclusive
        ("message", np.int32),  # message in flight or to be sent next, and its slice
        ("slice", np.int32),
        ("landing", np.int32),  # message to land next, and its slice
        ("landing_slice", np.int32),
        ("delivery", np.int32),  # message to be delivered next, and its slice
        ("delivery_slice", np.int32),
        ("backlog", np.int32),  # number of slices landed but not delivered
        ("parts", np.int32),  # fair queues: number of ports that have not served the slice
        ("is_inside", np.bool_),  # both ends are on one node
        ("is_held", np.bool_),  # its first landed slice waits
        ("state", np.uint8),  # IDLE, BUSY, RESTING or PARKED
        ("size", np.float64),  # bytes of the slice in flight
        ("charge", np.float64),  # bytes of it not yet added to its ports' `nbytes`
        ("left", np.float64),  # bytes not yet sent at time `since`; max-min: also of earlier slices
        ("since", np.float64),  # seconds
        ("rate", np.float64),  # bytes/s since then
        ("share", np.float64),  # max-min: new rate during a recomputation; negative: unknown
        ("stamp", np.int64),  # number of the last recomputation that included the link
    ],
    align=True,
)

#: A local op (COPY or REDUCE) of one channel.
LOCAL_DTYPE = np.dtype(
    [
        ("op_base", np.int64),
        ("row", np.int32),
        ("chunk_base", np.int32),
        ("lane", np.int32),
        ("slice", np.int32),  # next slice
        ("nslices", np.int32),
    ],
    align=True,
)

#: Reducer of a lane: the op it is reducing, and the first and last waiter in its queue; -1: none.
REDUCER_DTYPE = np.dtype([("op", np.int64), ("head", np.int32), ("tail", np.int32)])

PORT_DTYPE = np.dtype(
    [
        ("bandwidth", np.float64),  # bytes/s
        ("nbytes", np.float64),  # bytes carried
        ("busy_s", np.float64),  # seconds of busy periods that have ended
        ("since", np.float64),  # start of the current busy period
        ("head", np.int32),  # first seat in the list; -1: none
        ("tail", np.int32),  # last seat
        ("count", np.int32),  # number of seats
        ("is_dirty", np.bool_),  # max-min: its links or its bandwidth have changed
        ("open", np.int32),  # max-min: number of links without a share yet
        ("residual", np.float64),  # max-min: bandwidth not yet assigned
        ("stamp", np.int64),  # number of the last recomputation that included the port
        ("virtual", np.float64),  # fair queues: virtual time in bytes served per seat,
        ("settled", np.float64),  # at this time in seconds
    ],
    align=True,
)

#: A seat: its neighbors in the port's list; -1: none. ``next`` is `AWAY` for a seat in no list.
#: ``mark`` (fair queues) is the virtual time of the port at which the slice has been served.
SEAT_DTYPE = np.dtype([("next", np.int32), ("previous", np.int32), ("mark", np.float64)])

#: A slice that is sent completely, and the time at which it lands.
LANDING_DTYPE = np.dtype([("time", np.float64), ("link", np.int64)])

#: States of a link: no slice ready to send; a slice on the wire; between two slices; no port to
#: use.
IDLE, BUSY, RESTING, PARKED = range(4)

#: Values in place of a port number: sending takes no time; no rail is alive at both ends.
FREE, NOWHERE = -2, -1

#: Value of ``next`` for a seat that is in no list.
AWAY = -2

#: Indices into `FlowState.counts`. STARTING to DIRTY are lengths of the lists of these names, HEAP
#: and REDUCING sizes of these heaps; SHARINGS counts recomputations of rates, BATCHES event times,
#: SLICES slices sent; BEGUN is 1 after `begin`.
STARTING, RESTED, INSTANT, WOKEN, DIRTY, HEAP, REDUCING, SHARINGS, BATCHES, SLICES, BEGUN = range(
    11
)
NCOUNTS = 11


class FlowState(NamedTuple):
    """State of a simulation: the schedule, the network, and the progress so far.

    A heap is two parallel arrays: keys, and the numbers of the items. In ``alpha_s``, ``landings``,
    ``landing_first`` and ``landing_count``, index 0 of the first axis is for links over the
    network, index 1 for links inside a node. Each row of ``landings`` is a circular buffer.
    """

    rows: Records
    after: npt.NDArray[np.int32]  # dependencies of all rows, see `ROW_DTYPE`
    messages: Records
    chunks: Records
    done: Records
    waiters: Records
    links: Records
    locals: Records
    reducers: Records
    reducing_key: npt.NDArray[np.float64]  # heap of lanes by the end of their reduction
    reducing: npt.NDArray[np.int32]
    ports: Records
    seats: Records
    heap_key: npt.NDArray[np.float64]  # time of the next event of each item
    heap: npt.NDArray[np.int32]  # items: links (max-min) or ports (fair queues)
    heap_at: npt.NDArray[np.int32]  # position of each item in the heap; -1: not in the heap
    landings: Records
    landing_first: npt.NDArray[np.int64]
    landing_count: npt.NDArray[np.int64]
    starting: npt.NDArray[np.int32]  # links whose next slice is ready to be sent
    rested: npt.NDArray[np.int32]  # links whose slice has just been sent
    instant: npt.NDArray[np.int32]  # links whose slice takes no time to send
    woken: npt.NDArray[np.int32]  # waiters that may continue
    dirty: npt.NDArray[np.int32]  # max-min: ports whose links or bandwidth have changed
    part_ports: npt.NDArray[np.int32]  # max-min: ports in the current recomputation of rates
    part_links: npt.NDArray[np.int32]  # max-min: links in it
    fill_key: npt.NDArray[np.float64]  # max-min: heap of ports by the share left per link
    fill: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]  # by the indices STARTING to BEGUN
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
