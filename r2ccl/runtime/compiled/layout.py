"""Layout of the tables of a compiled call: arrays of 64-bit words.

The words of the *state* come first. The records of connections, pairs and steps follow, then
further tables. The state and the records contain the addresses of the other records and tables. A
*pair* is the two links of one peer and channel. The *ordinal* of a slice is its number among the
slices of the call on its link, from 0; its *number* counts the slices of all calls on the link.
Times are in nanoseconds of the monotonic clock, sizes in bytes. Each name in the list of a record's
words is the index of a word in the record.
"""

from __future__ import annotations

# State.

(
    NPAIRS, NCONNS, NLOCALS,
    #: Addresses of the records of pairs, connections and steps, and of the numbers of local steps.
    PAIRS, CONNS, STEPS, LOCALS,
    #: Number of the call, and the communicator's context id, as in frames. Difference between the
    #: numbers of two calls in succession: 1, or 0 for messages, which have no numbers.
    OP, CONTEXT, OP_STEP,
    #: Number of slices that are not done, of all steps.
    REMAINING,
    #: Address of the kernel of the reduction (0: none), and size of an element in bytes.
    KERNEL, ITEMSIZE,
    #: Addresses of the memory of each `r2ccl.schedule.ir.Space`.
    SPACES, _OUTPUT, _SCRATCH,
    #: An eager slice is posted only while fewer slices of its link than this number, which is at
    #: least `Config.eager_slots`, are unconfirmed. `Config.confirm_after`, `Config.is_resilient`.
    SLOTS, CONFIRM_AFTER, IS_RESILIENT,
    #: Idle time during which a wait only yields the processor; idle time after which the call
    #: leaves compiled code; and time since `ENTERED` after which the loop returns PAUSED.
    SPIN_NS, SLEEP_NS, BUSY_NS,
    #: Address of the log, its number of rows in use, and the number above which the call leaves
    #: compiled code.
    LOG, NLOGGED, MOST_LOGGED,
    #: Number of events after which the call leaves compiled code (for tests). It becomes -1 if the
    #: kernel of a local step returns another value than 0: the call then leaves compiled code.
    LIMIT,
    #: Addresses of an array of ``struct pollfd``, the last one for the wake-up; of a ``struct
    #: msghdr``; of a ``struct timespec``; and of two words, for the operands of a kernel.
    POLLS, MESSAGE, TIME, OPERANDS,
    #: Number of the connection that failed, and the errno; 0: the peer closed the connection.
    FAILED_CONN, ERRNO,
    #: Time of the first pass of the loop after the last one with an event or with bytes read or
    #: written (0: there was none yet), and time at which Python called the loop.
    IDLE_SINCE, ENTERED,
    #: Address of the memory for copies of eager slices and for landing places.
    ARENA,
    #: Number of confirmations received for links that the call does not use.
    NFOREIGN,
    #: 1 if the log has the times at which cleared slices are posted and released.
    IS_MEASURED,
    #: Time at which the current pass of the loop began, for the log.
    PASS_NS,
    #: Address of the loop, number of steps, and value of `REMAINING` at the start of a call.
    LOOP, NSTEPS, TOTAL,
    #: Number of times that the call was repeated, see `r2ccl.runtime.compiled.repeated`; -1: it has
    #: not run since its program was added to those held. The calls use the slots of the arena in
    #: turn: number of slots, size in bytes, and address of the first.
    NREPEATS, NSLOTS, SLOT_NBYTES, FIRST_SLOT,
    #: Address of a row for each slot: number of the last call that used the slot, and number of the
    #: first slice that each pair has sent in this call.
    SLOT_ROWS,
    #: CPU assigned to this rank and to no other rank of the host, or -1. Number of passes of the
    #: loop that only yielded the processor.
    HOME, NIDLE,
    #: 1 if a frame of another communicator, or a message, waits until the call has ended.
    IS_DELAYING,
) = range(49)  # fmt: skip
STATE_NWORDS = 49

# Connection.

(
    FD, PEER,
    #: Receive buffer: address, size, and start and end of the bytes that were not parsed yet.
    BUFFER, BUFFER_NBYTES, PARSED, FILLED,
    #: Fragment of a slice that is being read into a landing place: address and size of the missing
    #: part, and pair and ordinal of the slice.
    TARGET, TARGET_LEFT, TARGET_PAIR, TARGET_ORDINAL,
    #: 1 if the next frame belongs to a later call or message, and `OTHER` if it belongs to another
    #: communicator; then nothing more is read.
    IS_STALLED,
    #: Number of landing places that were announced and whose slices are not complete.
    NPLACES,
    #: Frames that are being written: address, size, and number of bytes written. Then frames that
    #: are staged to be written next: address, size.
    NOW, NOW_NBYTES, NOW_DONE, NEXT, NEXT_NBYTES,
    #: Queues of cleared slices to send, and of eager ones above `SMALL_NBYTES`; an entry is ``pair
    #: << 32 | ordinal``: address, number of entries taken, number of entries added.
    BULK, BULK_TAKEN, BULK_ADDED, EAGER, EAGER_TAKEN, EAGER_ADDED,
    #: Slice being sent: pair (-1: none), ordinal, address and size of the part not in a fragment
    #: yet.
    SENDING_PAIR, SENDING_ORDINAL, REST, REST_NBYTES,
    #: Part of the current fragment that has not been written: address, size. 1 if the fragment's
    #: slice is cleared, 0 if it is eager.
    FRAGMENT, FRAGMENT_NBYTES, IS_CLEARED,
    #: Maximum size of a fragment of a cleared slice; an eager slice is one fragment.
    FRAGMENT_MOST,
    #: 1 if the socket accepted less than it was given.
    IS_FULL,
    #: 1 if the socket may have data.
    IS_READABLE,
    #: 1 if the peer is reached by a loopback address.
    IS_LOOPBACK,
) = range(34)  # fmt: skip
CONN_NWORDS = 40
#: Value of `IS_STALLED` if the next frame belongs to another communicator.
OTHER = 2

# Pair.

(
    #: Number of the connection, link channel, and peer.
    CONN, CHANNEL, PAIR_PEER,
    #: Packed signatures of the slices to and from the peer.
    SENT_SIGNATURE, RECEIVED_SIGNATURE,
    #: Number of slices to send, and address of their table: ``step << 32 | slice of the step``.
    NSENDS, SENDS,
    #: Number of the first slice to send, and number of slices that are posted.
    FIRST_SENT, POSTED,
    #: Number below which the peer has confirmed slices.
    CONFIRMED,
    #: Ordinals below which cleared slices have landing places, and slices are retired and released.
    CLEARED, RETIRED, RELEASED,
    #: Address of the table of offsets in the arena to which eager slices are copied; -1 for a
    #: cleared slice.
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
    #: No landing place is announced while this many slices are expected and not used yet.
    DEPTH,
    #: Address of the table of the number of bytes that arrived of each slice, where a fragment
    #: counts as a whole once its header is parsed; -1: the slice is complete.
    ARRIVED,
    #: Address of the table of offsets in the arena at which slices arrive; -1: the slice arrives
    #: directly at its destination.
    PLACES,
    #: Ordinal + 1 of the slice that was confirmed before it was complete; 0: none.
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
    #: Number of slices that are done; number of slices that are done or, in a send, retired.
    DONE, PASSED,
) = range(12)  # fmt: skip
STEP_NWORDS = 12

# Row of the log: kind of the event, connection, channel, number of the slice, confirmation, size,
# pair (-1: a link that the call does not use), and time (of the last two kinds of events only).

(EVENT, EVENT_CONN, EVENT_CHANNEL, EVENT_SEQ, EVENT_ACK, EVENT_NBYTES, EVENT_PAIR, EVENT_NS) = (
    range(8)
)
EVENT_NWORDS = 8
#: Kinds of events: an eager slice arrived; a cleared slice arrived in its landing place; a cleared
#: slice that was confirmed early arrived there; the peer announced a landing place; the peer
#: confirmed slices; a cleared slice was sent; a cleared slice was posted; a cleared slice was
#: released. The last two kinds are for `r2ccl.failover.bandwidth`.
ARRIVED_EAGER, ARRIVED_PLACED, ARRIVED_CONFIRMED = 0, 1, 2
CLEARED_EVENT, CONFIRMED_EVENT, SENT_EVENT = 3, 4, 5
POSTED_EVENT, RELEASED_EVENT = 6, 7

# Results.

#: The call is complete.
FINISHED = 0
#: The caller has to handle signals and other events, and may then continue the call.
PAUSED = 1
#: The call goes on in Python: an event occurred that compiled code does not handle, nothing
#: happened for `SLEEP_NS`, or for 1 ms with `IS_DELAYING`, the log is full, `LIMIT` is reached or
#: negative, or all steps are done but a socket is full.
LEFT = 2
#: A connection failed.
FAILED = 3
#: The call is complete, but it has left frames or confirmations to be sent to the data loop. A
#: repeated call may also return `r2ccl.shm.layout.CHANGED`, 4.
UNSETTLED = 5
#: The call is complete, but it has received confirmations for links that it does not use
#: (`NFOREIGN`), or a frame of another communicator waits in a buffer (`IS_DELAYING`).
HAS_OTHERS = 7

# Words of a repeated exchange of messages, see `r2ccl.runtime.compiled.repeated_message`.

(
    #: Address of the form of the arrays, see `r2ccl.shm.arrays.form_of`.
    ARRAYS_FORM,
    #: Address of the envelope to send, and of the one received (0: none), each with the size of its
    #: data.
    OUTGOING, OUTGOING_NBYTES, INCOMING, INCOMING_NBYTES,
    #: First and second word that the received envelope must have.
    INCOMING_KIND, INCOMING_TAG,
    #: Number of the last message of this rank.
    IDENT,
    #: Bytes of short messages that this rank has sent to the receiver, that the receiver has taken,
    #: that this rank has taken from the sender, and that it has reported as taken.
    NBYTES_SENT, NBYTES_TAKEN, NBYTES_TOOK, NBYTES_REPORTED,
    #: 1 if one rank receives the outgoing message and sends the incoming one; otherwise
    #: `NBYTES_TAKEN` does not change.
    IS_ANSWERED,
    #: `ENVELOPE_TAKEN` of the envelope received last: bytes that the sender has taken.
    INCOMING_TAKEN,
    #: 1 if the messages are long: their data is sent from and received into the arrays.
    IS_LONG,
) = range(15)  # fmt: skip
MESSAGE_NWORDS = 15
#: Words of an envelope: kind, dtype, communicator; tag; number; size; bytes taken; then the data.
(
    ENVELOPE_KIND, ENVELOPE_TAG, ENVELOPE_IDENT, ENVELOPE_SIZE, ENVELOPE_TAKEN, ENVELOPE_DATA,
) = range(6)  # fmt: skip
#: Words that the request or the grant of a long message must have: as in the envelope; 1 if any tag
#: is right.
EXPECTED_KIND, EXPECTED_TAG, EXPECTED_SIZE, EXPECTED_IS_ANY = range(4)
EXPECTED_NWORDS = 4
#: Result of a repeated exchange: it is complete, but the received envelope is not the expected one.
UNEXPECTED = 6

# Frames.

HEADER_NBYTES = 64
DATA_FRAME, CLEAR_FRAME, CONFIRM_FRAME = 1, 2, 3
#: Size of the memory for staged frames, and maximum size of an eager slice that is staged with its
#: header.
STAGE_NBYTES = 1 << 16
SMALL_NBYTES = 2048
#: Maximum number of bytes of slices per system call; and of bytes per read of a header while a
#: slice is expected in a landing place.
CALL_NBYTES = 256 << 10
PEEK_NBYTES = 1024
