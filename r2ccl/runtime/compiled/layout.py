"""Layout of the tables of a compiled call: arrays of 64-bit words.

The words of the state come first. The records of connections, pairs and steps follow, then further
tables. The state and the records contain the addresses of all of these. A *pair* is the two links
of one peer and channel. The *ordinal* of a slice is its number among the slices of the call on its
link, from 0; its *number* is that of the link, which counts the slices of all calls. Times are in
nanoseconds of the monotonic clock, sizes in bytes.
"""

from __future__ import annotations

# State.

(
    NPAIRS, NCONNS, NLOCALS,
    #: Addresses of the records of pairs, connections and steps, and of the numbers of local steps.
    PAIRS, CONNS, STEPS, LOCALS,
    #: Number of the call, and the communicator's context id, as in frames.
    OP, CONTEXT,
    #: Number of slices, of all steps, that are not done.
    REMAINING,
    #: Address of the kernel of the reduction (0: none), and size of an element.
    KERNEL, ITEMSIZE,
    #: Addresses of the memory of each `r2ccl.schedule.ir.Space`.
    SPACES, _OUTPUT, _SCRATCH,
    #: `Config.eager_slots`, `Config.confirm_after` and `Config.is_resilient`.
    SLOTS, CONFIRM_AFTER, IS_RESILIENT,
    #: Idle time in which a wait yields, idle time after which the call leaves compiled code, and
    #: longest time between two returns to Python.
    SPIN_NS, SLEEP_NS, BUSY_NS,
    #: Address of the log, its number of rows, and the number above which the call leaves.
    LOG, NLOGGED, MOST_LOGGED,
    #: Number of events after which the call leaves compiled code (for tests).
    LIMIT,
    #: Addresses of an array of ``struct pollfd``, the last one for the wake-up; of a ``struct
    #: msghdr``; of a ``struct timespec``; and of two words, for the operands of a kernel.
    POLLS, MESSAGE, TIME, OPERANDS,
    #: Number of the connection that failed, and the errno; 0: the peer closed it.
    FAILED_CONN, ERRNO,
    #: Time since which no event came (0: the last round had one), and time at which Python called
    #: the loop.
    IDLE_SINCE, ENTERED,
    #: Address of the memory for copies of eager slices and for landing places.
    ARENA,
    #: Number of confirmations received for links that the call does not use.
    NFOREIGN,
    #: 1 if the log has the times at which cleared slices are posted and released.
    IS_MEASURED,
    #: Time at which the current pass of the loop began, for the log.
    PASS_NS,
) = range(37)  # fmt: skip
STATE_NWORDS = 40

# Connection.

(
    FD, PEER,
    #: Receive buffer: address, size, and the range of bytes that were read and not parsed.
    BUFFER, BUFFER_NBYTES, PARSED, FILLED,
    #: Fragment that is being read into a landing place: address and size of the rest, pair and
    #: ordinal of its slice.
    TARGET, TARGET_LEFT, TARGET_PAIR, TARGET_ORDINAL,
    #: 1 if the next frame is of a later call; then nothing more is read.
    IS_STALLED,
    #: Number of landing places that were named and whose slices are not complete.
    NPLACES,
    #: Frames being written: address, size, and bytes written. Then staged frames: address, size.
    NOW, NOW_NBYTES, NOW_DONE, NEXT, NEXT_NBYTES,
    #: Tables of cleared slices to send, and of eager ones, as ``pair << 32 | ordinal``: address,
    #: number of entries taken, number added.
    BULK, BULK_TAKEN, BULK_ADDED, EAGER, EAGER_TAKEN, EAGER_ADDED,
    #: Slice being sent: pair (-1: none), ordinal, address and size of the part not in a fragment
    #: yet.
    SENDING_PAIR, SENDING_ORDINAL, REST, REST_NBYTES,
    #: Rest of the fragment being written: address, size; 1 if its slice is cleared, not eager.
    FRAGMENT, FRAGMENT_NBYTES, IS_CLEARED,
    #: Maximum size of a fragment.
    FRAGMENT_MOST,
    #: 1 if the socket accepted less than it was given.
    IS_FULL,
    #: 1 if the socket may have data.
    IS_READABLE,
) = range(33)  # fmt: skip
CONN_NWORDS = 40

# Pair.

(
    #: Number of the connection, and link channel.
    CONN, CHANNEL, PAIR_PEER,
    #: Packed signatures of the slices to and from the peer.
    SENT_SIGNATURE, RECEIVED_SIGNATURE,
    #: Number of slices to send, and address of their table: ``step << 32 | slice of the step``.
    NSENDS, SENDS,
    #: Number of the first slice to send, and how many slices are posted.
    FIRST_SENT, POSTED,
    #: Number below which the peer has confirmed slices.
    CONFIRMED,
    #: Ordinals below which slices are cleared, retired, and released.
    CLEARED, RETIRED, RELEASED,
    #: Address of the table of offsets in the arena to which eager slices are copied; -1: cleared.
    COPIES,
    #: Number of slices to receive, and address of their table, as `SENDS`.
    NRECEIVES, RECEIVES,
    #: Number of the first slice to receive.
    FIRST_RECEIVED,
    #: Ordinals below which slices are expected, delivered, and copied or reduced.
    ASKED, DELIVERED, USED,
    #: Numbers below which slices are consumed, and confirmed to the peer.
    CONSUMED, ACKED,
    #: 1 if consumed slices have to be confirmed now.
    IS_UNCONFIRMED,
    #: Maximum number of slices that are expected and not used; applies to cleared slices.
    DEPTH,
    #: Address of the table of bytes that arrived of each slice; -1: the slice is complete.
    ARRIVED,
    #: Address of the table of offsets in the arena at which slices arrive; -1: at the destination.
    PLACES,
    #: 1 + ordinal of the slice that was confirmed before it was complete; 0: none.
    EARLY,
    #: Number of the pair.
    NUMBER,
) = range(28)  # fmt: skip
PAIR_NWORDS = 28

# Step.

(
    #: As in `r2ccl.planning.lowering.Step`.
    KIND, SOURCE, DESTINATION, IS_EAGER, IS_LEFT, SHIFT,
    #: Address of the table of slice boundaries, in elements, and number of slices.
    CUTS, NSLICES,
    #: Address of the table of steps to wait for, ``step << 2 | is_proof << 1 | is_by_slice``, and
    #: their number. With ``is_proof``, a retired send satisfies the dependency.
    AFTER, NAFTER,
    #: Number of slices that are done; and of those that are done or, in a send, retired.
    DONE, PASSED,
) = range(12)  # fmt: skip
STEP_NWORDS = 12

# Row of the log: kind of the event, connection, channel, slice, confirmation, size, pair (-1: not
# of the call), and time, for the last two kinds only.

(EVENT, EVENT_CONN, EVENT_CHANNEL, EVENT_SEQ, EVENT_ACK, EVENT_NBYTES, EVENT_PAIR, EVENT_NS) = (
    range(8)
)
EVENT_NWORDS = 8
#: Kinds of events: a slice arrived eagerly, in its landing place, or there after it was confirmed;
#: the peer named a landing place, or confirmed slices; a cleared slice was sent; a cleared slice
#: was posted, or released. The last two are for `r2ccl.failover.bandwidth`.
ARRIVED_EAGER, ARRIVED_PLACED, ARRIVED_CONFIRMED = 0, 1, 2
CLEARED_EVENT, CONFIRMED_EVENT, SENT_EVENT = 3, 4, 5
POSTED_EVENT, RELEASED_EVENT = 6, 7

# Results.

#: The call is complete.
FINISHED = 0
#: The caller has to look for signals and other events, and may then continue the call.
PAUSED = 1
#: An event came that compiled code does not handle, or no event came for `SLEEP_NS`.
LEFT = 2
#: A connection failed.
FAILED = 3

# Frames.

HEADER_NBYTES = 44
DATA_FRAME, CLEAR_FRAME, CONFIRM_FRAME = 1, 2, 3
#: Space for staged frames, and the largest eager payload that is staged with its header.
STAGE_NBYTES = 1 << 16
SMALL_NBYTES = 2048
#: Maximum number of bytes per system call; and per read of a header while landing places are open.
CALL_NBYTES = 256 << 10
PEEK_NBYTES = 1024
