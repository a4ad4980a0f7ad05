"""Layout of the memory for messages, and of the table that a rank keeps for compiled code.

The memory for messages of a rank follows the memory for collectives in its segment. It has, in this
order:

- the *bell*, a word that peers increment to wake the owner;
- a word that the owner sets when it drops its messages;
- for each peer, the owner's positions in the two rings between the owner and that peer, and counts
  for the messages from that peer;
- for each peer, the ring of frames to that peer.

Only the owner writes this memory, apart from the bell. The pages of a ring are allocated when the
ring is first used.

A frame consists of a header of eight words, and data. Frames begin at multiples of 64 bytes; the
positions in a ring count bytes and never restart. The table is private to a process: `FIRST_PEER`
words, then `PEER_NWORDS` words per rank.
"""

from __future__ import annotations

from r2ccl.shm.layout import LINE_NBYTES, MAX_NRANKS, MOST_PAGE_NBYTES
from r2ccl.types import EnvelopeKind

# Offsets in the memory, in bytes. `WAITERS` bytes after the bell is the number of sleeping threads
# of the owner.

#: Word that a peer increments to wake the owner.
BELL = 0
#: Not 0 after the owner has dropped its messages: it may change the arrays that it was sending.
#: FAILED: the communicator has ended with an error, which the peers are told. CLOSED: the owner has
#: closed the communicator; it takes and puts no further frames.
DROPPED = LINE_NBYTES
FAILED, CLOSED = 1, 2
#: Positions for each peer: `PEER_NBYTES` each.
PEERS = 2 * LINE_NBYTES
PEER_NBYTES = 2 * LINE_NBYTES
#: Bytes that the owner has put into the ring to the peer.
RING_HEAD = 0
#: Bytes that the owner has taken from the ring of the peer; bytes of short messages from the peer
#: that the owner's receives have taken; number of messages of the peer that the owner's receives
#: have taken and that the owner reads, or will read, from the peer's process. A message counts
#: until its READ or GRANT is in the ring.
RING_TAIL = LINE_NBYTES
RING_TAKEN, RING_READS = LINE_NBYTES + 8, LINE_NBYTES + 16

#: Maximum size of all rings of a rank together, and of one ring, in bytes. Measured with 4 ranks
#: on 2 cores, sendrecv of 16 MiB, for rings of 512 KiB and of 1 MiB: 7.6 and 5.8 ms.
_RINGS_NBYTES, _RING_NBYTES = 32 << 20, 1 << 20
FRAME_NBYTES = 64


def ring_nbytes(nranks: int) -> int:
    """Return the size in bytes of each ring in a group of `nranks` ranks, a power of two."""
    return min(_RING_NBYTES, 1 << ((_RINGS_NBYTES // nranks).bit_length() - 1))


def rings_at(nranks: int) -> int:
    """Return the offset in bytes of the first ring in the memory of a rank."""
    return (PEERS + nranks * PEER_NBYTES + MOST_PAGE_NBYTES - 1) & -MOST_PAGE_NBYTES


def memory_nbytes(nranks: int) -> int:
    """Return the size in bytes of the memory for messages of one of `nranks` ranks."""
    return rings_at(nranks) + nranks * ring_nbytes(nranks)


assert ring_nbytes(MAX_NRANKS) >= 1 << 17

# Words of the header of a frame: kind of the frame in the lowest byte, dtype code above it; tag;
# number of the message, which its sender assigned; size of the message in bytes; bytes of data in
# this frame; in a REQUEST, the address of the message's data in the sender's process, or 0 if the
# receiver may not read it there (`r2ccl.shm.reading`). In a DATA frame, the number is 0, and the
# size is that of the data in this frame.

FRAME_KIND, FRAME_TAG, FRAME_IDENT, FRAME_SIZE, FRAME_DATA, FRAME_ADDRESS = 0, 1, 2, 3, 4, 5
KIND_BITS = 8
KIND_MASK = (1 << KIND_BITS) - 1
# Kinds of frames that compiled code handles, as plain integers.
MESSAGE, REQUEST = int(EnvelopeKind.MESSAGE), int(EnvelopeKind.REQUEST)
GRANT, DATA_FRAME = int(EnvelopeKind.GRANT), int(EnvelopeKind.DATA)
READ_FRAME = int(EnvelopeKind.READ)

# Indices of the table.

#: Number of the last message that this rank sent.
IDENT = 0
#: Peer of the event that `pump` returned; peer with which its next scan begins.
PEER, START = 1, 2
#: Size of a ring in bytes, and number of ranks.
RING, TABLE_NRANKS = 3, 4
#: Address of this rank's bell.
OWN_BELL = 5
#: 1 if another thread of this rank wants the waiting thread to return to Python.
WOKEN = 6
FIRST_PEER = 8

# Words of a peer.

#: Position up to which this rank has put frames, and last position of the peer that it has read.
HEAD, SEEN_TAIL = 0, 1
#: Position up to which this rank has taken frames, and last position that it has published.
TAIL, PUBLISHED_TAIL = 2, 3
#: Bytes of short messages: sent to the peer; from the peer, taken by receives of this rank.
SENT, TAKEN = 4, 5
#: Long message that is being sent: address of the data not sent yet, its size, bytes per frame.
#: Long message that is being received: address for the data not received yet, its size, 1 if it is
#: written without storing it in the caches; address of this data in the peer's process, from which
#: it is read, or 0 if it comes in frames; size of the whole message; time at which this rank began
#: to receive it, in nanoseconds, or 0: do not measure.
OUT_AT, OUT_LEFT, OUT_PIECE = 6, 7, 8
IN_AT, IN_LEFT, IN_STREAMED, IN_ADDRESS, IN_SIZE, IN_BEGUN_NS = 9, 10, 11, 12, 13, 14
#: 1 + bytes of data of the frame that waits for room in the ring; 0: none waits.
WANTED = 15
#: Addresses: the ring to the peer, its head, and the peer's position in it.
OUT_RING, OUT_HEAD, OUT_TAIL = 16, 17, 18
#: Addresses: the ring of the peer, its head, and this rank's position in it.
IN_RING, IN_HEAD, IN_TAIL = 19, 20, 21
#: Address of the peer's bell.
PEER_BELL = 22
#: For each class of sizes, `CLASS_NWORDS` words for the choice between frames and reading, see
#: `r2ccl.shm.message_transfer`: number of messages for which a transfer was chosen; usual time
#: per MiB with each transfer, in nanoseconds, or 0: not known.
CLASSES = 23
CLASS_NMESSAGES, CLASS_NS = 0, 1
NCLASSES, CLASS_NWORDS = 10, 3
PEER_NWORDS = CLASSES + NCLASSES * CLASS_NWORDS


def table_size(nranks: int) -> int:
    """Return the number of 64-bit words of the table of one of `nranks` ranks."""
    return FIRST_PEER + nranks * PEER_NWORDS


# Events that `pump` returns; PEER is the peer that an event is about.

IDLE = 0
#: Data has moved, and more may.
MOVED = 1
#: The next frame of the peer is not data that this rank expects.
FRAME = 2
#: All data of a message was put into the ring, or has arrived.
SENT_ALL, RECEIVED_ALL = 3, 4
#: There is room for the frame that waits.
ROOM = 5
#: A message, or the rest of it, cannot be read from the peer's process; it has to be granted.
UNREADABLE = 6
#: The peer has closed the communicator, so that the rest of a message never arrives.
ABANDONED = 7

# Words of a direct call, see `r2ccl.shm.one_message`. The caller sets the first ten: address of the
# form of the arrays (0: not compared); receiver (-1: no send), dtype code, tag, bytes, 1 if the
# message is short; sender (-1: no receive), dtype code, tag (-1: any), capacity in bytes.

CALL_FORM, CALL_TO, CALL_DTYPE, CALL_TAG, CALL_NBYTES, CALL_IS_SHORT = 0, 1, 2, 3, 4, 5
CALL_SOURCE, CALL_RECV_DTYPE, CALL_RECV_TAG, CALL_CAPACITY = 6, 7, 8, 9
#: Steps of the send and of the receive; number of the message sent.
SEND_STEP, RECV_STEP, CALL_IDENT = 10, 11, 12
#: The message taken: its tag, size and number.
FOUND_TAG, FOUND_NBYTES, FOUND_IDENT = 13, 14, 15
#: Tag and size of the message taken by the last call.
LAST_TAG, LAST_NBYTES = 16, 17
#: Result of the last call that `r2ccl.shm.repeat_message` has passed to its `proceed`.
CALL_RESULT = 18
CALL_NWORDS = 19

#: Steps: all is done; the message or the grant is to be put; the peer is awaited; data moves in
#: frames; data is read from the peer's process; all was read, and the peer is to be told.
DONE, TO_PUT, AWAITS, MOVES, READS, TO_TELL = 0, 1, 2, 3, 4, 5

# Results of a direct call, in addition to FINISHED and CHANGED of `r2ccl.shm.layout`.

#: Finished; the message taken has another tag or size than that of the last call.
FINISHED_OTHER = 11
#: Python has to continue the call from its steps: a peer is late or has sent another frame first,
#: or `MOST_ROUNDS` rounds have moved data (`r2ccl.shm.pump`).
OPEN = 12
