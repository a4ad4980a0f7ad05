"""Layout of the tables of a compiled call: arrays of 64-bit words.

The state begins with the words below. Tables of records follow, and then tables of words, whose
addresses the state and the records contain. A *pair* is the two links of one peer and channel. A
slice of a link is identified by its *ordinal*: its number among those of the call on that link.
"""

from __future__ import annotations

# State.

(
    NPAIRS, NCONNS, NSTEPS, NLOCALS,
    #: Addresses of the tables of pairs, connections and steps, and of the indices of local steps.
    PAIRS, CONNS, STEPS, LOCALS,
    #: Number of the call in the frames, and the communicator's context id.
    OP, CONTEXT,
    #: Slices of all steps that are not done.
    REMAINING,
    #: Address of the kernel of the reduction, and size of an element.
    KERNEL, ITEMSIZE,
    #: Addresses of the memory of each `Space`.
    SPACES, _OUTPUT, _SCRATCH,
    #: Limits of eager slices and of their confirmations; whether slices await confirmations.
    SLOTS, CONFIRM_AFTER, IS_RESILIENT,
    #: Size of a place in the ring of landing places.
    PLACE_NBYTES,
    #: Longest times of a wait that yields, of one that sleeps, and between returns to Python.
    SPIN_NS, SLEEP_NS, BUSY_NS,
    #: Rows of the log, their number, and how many there may be.
    LOG, NLOGGED, MOST_LOGGED,
    #: Number of events after which the call stops (for tests).
    LIMIT,
    #: Addresses of an array of ``struct pollfd``, whose last one is that of the wake-up, of a
    #: ``struct msghdr``, of a ``struct timespec``, and of space for two operands of a kernel.
    POLLS, MESSAGE, TIME, OPERANDS,
    #: Connection that failed, and its errno; 0: the peer closed it.
    FAILED_CONN, ERRNO,
    #: Time of the last event, or 0, and time at which the call was entered.
    IDLE_SINCE, ENTERED,
    #: Address of the memory for copies of eager slices and for landing places.
    ARENA,
    #: Number of confirmations for links that are not of the call.
    NFOREIGN,
    #: 1 if the log has the times at which cleared slices are posted and released.
    IS_MEASURED,
) = range(38)  # fmt: skip
STATE_NWORDS = 40

# Connection.

(
    FD,
    #: Receive buffer: address, size, and the range of bytes that are not parsed.
    BUFFER, BUFFER_NBYTES, PARSED, FILLED,
    #: Rest of the fragment that is being read into a landing place, and its slice.
    TARGET, TARGET_LEFT, TARGET_PAIR, TARGET_ORDINAL,
    #: A frame of a later call is next: nothing more is read.
    IS_STALLED,
    #: Landing places named whose slices are not complete.
    NPLACES,
    #: Frames being written: address, size, and bytes written. Then those that follow.
    NOW, NOW_NBYTES, NOW_DONE, NEXT, NEXT_NBYTES,
    #: Ring of cleared slices to send, and of eager ones: address, numbers taken and added.
    BULK, BULK_TAKEN, BULK_ADDED, EAGER, EAGER_TAKEN, EAGER_ADDED,
    #: Slice being sent: pair, ordinal, and its bytes not yet in a fragment.
    SENDING_PAIR, SENDING_ORDINAL, REST, REST_NBYTES,
    #: Rest of the fragment being written; 1 if its slice is reported as sent afterwards.
    FRAGMENT, FRAGMENT_NBYTES, IS_CLEARED,
    FRAGMENT_MOST,
    #: 1 if the socket accepted less than it was given.
    IS_FULL,
    #: 1 if the socket may have data.
    IS_READABLE,
) = range(32)  # fmt: skip
CONN_NWORDS = 40

# Pair.

(
    CONN, CHANNEL,
    #: Packed signatures of the slices to and from the peer.
    SENT_SIGNATURE, RECEIVED_SIGNATURE,
    #: Slices to send in the call, and the table of their steps: ``step << 32 | slice of the step``.
    NSENDS, SENDS,
    #: Number of the first slice, as the link counts, and how many are posted.
    FIRST_SENT, POSTED,
    #: Slices that the peer consumed, as the link counts.
    CONFIRMED,
    #: Ordinals below which slices are cleared, retired, and released.
    CLEARED, RETIRED, RELEASED,
    #: Table of the offsets in the arena at which eager slices are copied; -1: cleared.
    COPIES,
    #: Slices to receive in the call, and the table of their steps.
    NRECEIVES, RECEIVES,
    FIRST_RECEIVED,
    #: Ordinals below which slices are expected, delivered, and used.
    ASKED, DELIVERED, USED,
    #: As the link counts.
    CONSUMED, ACKED,
    IS_UNCONFIRMED,
    #: Most slices expected whose work is not done.
    DEPTH,
    #: Table of the bytes of each slice that arrived; -1: all, and the slice is complete.
    ARRIVED,
    #: Table of the offsets in the arena at which slices are received; -1: in their destination.
    PLACES,
    #: Ordinal of a slice that was confirmed before it was complete, + 1.
    EARLY,
    #: Number of the pair.
    NUMBER,
) = range(27)  # fmt: skip
PAIR_NWORDS = 28

# Step.

(
    KIND, SOURCE, DESTINATION, IS_EAGER, IS_LEFT, SHIFT,
    #: Table of the slice boundaries, and number of slices.
    CUTS, NSLICES,
    #: Table of the steps to wait for, ``step << 2 | is_proof << 1 | is_by_slice``; their number.
    AFTER, NAFTER,
    #: Slices that are done; as for a send whose slices the transport no longer reads.
    DONE, PASSED,
) = range(12)  # fmt: skip
STEP_NWORDS = 12

# Log: an event as the data loop reports it.

(EVENT, EVENT_CONN, EVENT_CHANNEL, EVENT_SEQ, EVENT_ACK, EVENT_NBYTES, EVENT_PAIR, EVENT_NS) = (
    range(8)
)
EVENT_NWORDS = 8
#: Kinds of events. The last two serve to measure bandwidth, see `r2ccl.failover.bandwidth`.
ARRIVED_EAGER, ARRIVED_PLACED, ARRIVED_CONFIRMED = 0, 1, 2
CLEARED_EVENT, CONFIRMED_EVENT, SENT_EVENT = 3, 4, 5
POSTED_EVENT, RELEASED_EVENT = 6, 7

# Results.

#: The call is complete.
FINISHED = 0
#: The caller has to look for signals and events; the call continues when it is called again.
PAUSED = 1
#: Something happened that compiled code does not handle, or nothing happened for long.
LEFT = 2
#: A connection failed.
FAILED = 3

# Frames.

HEADER_NBYTES = 44
DATA_FRAME, CLEAR_FRAME, CONFIRM_FRAME = 1, 2, 3
#: Space for frames to write, and the largest eager payload that is copied there.
STAGE_NBYTES = 1 << 16
SMALL_NBYTES = 2048
#: Most bytes per system call, and most to read where a header is expected and slices are in flight.
CALL_NBYTES = 256 << 10
PEEK_NBYTES = 1024
