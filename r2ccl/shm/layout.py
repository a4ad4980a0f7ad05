"""Layout of a segment, of the state that a rank keeps for compiled code, and of prepared calls.

A segment has a part for collectives, described here, and a part for messages, which
`r2ccl.shm.message_layout` describes. The part for collectives has control words, then slots of
`SLOT_NBYTES`, then scratch memory of the owner. Control words that different ranks write are at
least `LINE_NBYTES` apart. Only the owner writes this part, apart from the counts of waiters and the
mutex.

The state and a prepared call are private to a process. Each is an array of 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

#: Bytes between words that different ranks write. Two lines of 64 bytes, because Intel's processors
#: fetch lines in pairs; lines of some arm64 processors have 128 bytes.
LINE_NBYTES = 128
#: Largest page size of the hosts that Linux runs on, in bytes.
MOST_PAGE_NBYTES = 1 << 16

# Rounds are numbered within their call. The number of a round is a word with the number of the call
# in its higher bits and the index in the call in its lower bits. Numbers begin again after 2**64;
# they are compared by their difference.

#: The lower 32 bits of successive values of a word must differ, because a futex compares only these
#: bits; the round number in a header advances by `NHEADERS` calls at a time.
ROUND_BITS = 26
#: `CALL_STEP` is the distance between the first rounds of two successive calls. Each call has fewer
#: rounds: `CALL_STEP` rounds would move 64 GiB to each of 256 ranks. `LAST_ROUND` is the index of
#: the round that a rank announces when it has finished a call.
CALL_STEP = 1 << ROUND_BITS
LAST_ROUND = CALL_STEP - 1

# Offsets in a segment, in bytes.

#: Last round, after the first one of its call, whose data the owner has put into its stage slot.
#: The header of the call announces the first round.
POSTED = 0
#: Last round for which the owner has announced that it has read the stage slots and that its result
#: slot is valid. Not all rounds are announced: a rank may skip those that no rank waits for.
DONE = LINE_NBYTES
#: Offset from POSTED, DONE, a header and a bell to the number of threads that sleep until the word
#: changes; offset to 1 + the number of the CPU of the thread that last woke them, or 0.
WAITERS = LINE_NBYTES // 2
WAKER = WAITERS + 8
#: 1 + the number of the CPU on which the owner was when it last looked, see `r2ccl.shm.waiting`, or
#: 0: not yet.
CPU = 2 * LINE_NBYTES
#: 1 after a call of the owner has raised an error: the owner may change its arrays at any time.
LEFT = 3 * LINE_NBYTES
#: Mutex that the owner holds as long as it uses the segment: a ``pthread_mutex_t``, of 40 or 48
#: bytes, and a flag. See `r2ccl.shm.robust_mutex`.
MUTEX = 4 * LINE_NBYTES
#: Process id of the owner; address of a word in the private memory of the owner's process, and the
#: value of the word; 1 if the owner can read the memory of all other ranks, else 0. See
#: `r2ccl.shm.reading`.
PID = 5 * LINE_NBYTES
PROBE, TOKEN, CAN_READ = PID + 8, PID + 16, PID + 24
#: CPUs on which the owner is allowed to run: a set of `CPU_SET_NBYTES`, or 0: not known. Each set
#: has 1,024 CPUs.
ALLOWED = 6 * LINE_NBYTES
CPU_SET_NBYTES = 128
#: Headers of the owner's latest calls, `LINE_NBYTES` each; call c has header ``c % NHEADERS``. The
#: first word is the number of the first round of the call. It is stored after the other words, and
#: after the data of this round.
HEADERS, NHEADERS = 16 * LINE_NBYTES, 16
#: A rank begins a call only after it has compared the headers of all ranks for the call that is
#: `NAHEAD` calls earlier. A rank that overwrites a header therefore knows that all ranks have
#: compared it.
NAHEAD = NHEADERS // 2
#: Number of calls whose headers a rank compares at a time, if nothing makes it compare them before;
#: and maximum number of calls with one round that a rank has finished but not announced in DONE.
BATCH = 4
#: Further words of a header: packed signature of the call; number of stage slots that the owner's
#: earlier calls have used.
SIGNATURE, FIRST_SLOT = 8, 16
#: Further word of a header, except in scans: duration of the last call of the same kind, and its
#: transfer; 0: not known. See `r2ccl.shm.transfer`.
LAST = 24
#: Further words of a header, except in scans: the places of input and output, see
#: `r2ccl.shm.places`; 0: no place.
INPUT, OUTPUT = 32, 40
#: For each header, two rows with one word per rank, for collectives whose parts differ in size: the
#: number of bytes that the owner sends to the rank, and their offset in the owner's input.
PARTS = 32 * LINE_NBYTES
MAX_NRANKS = 256
ROW_NBYTES = 8 * MAX_NRANKS
#: Slots of data: `NSLOTS` stage slots, then `NRESULTS` result slots, at least 3. The stage slots
#: together exceed the second-level cache of a core: reading a line that another core has just
#: written is slow while both have it in that cache. Measured with caches of 1 MiB and 2 ranks, for
#: 3 stage slots of 128 KiB and for 8 of 256 KiB: broadcast of 4 MiB 550 and 190 us, allreduce 550
#: and 350 us.
SLOTS = PARTS + 2 * NHEADERS * ROW_NBYTES
SLOT_NBYTES = 1 << 18
NSLOTS, NRESULTS = 8, 4
RESULTS = SLOTS + NSLOTS * SLOT_NBYTES
#: Bytes that only the owner uses: a block of a result.
SCRATCH = RESULTS + NRESULTS * SLOT_NBYTES
SCRATCH_NBYTES = 1 << 13
#: A multiple of the page size of any host, because the part for messages is mapped separately.
SEGMENT_NBYTES = (SCRATCH + SCRATCH_NBYTES + MOST_PAGE_NBYTES - 1) & -MOST_PAGE_NBYTES

assert HEADERS + NHEADERS * LINE_NBYTES <= PARTS
assert NHEADERS << ROUND_BITS < 1 << 32

# Indices of the state.

RANK, NRANKS = 0, 1
#: Number of calls begun; number of stage slots that the calls before the current one have used.
NCALLS, NUSED = 2, 3
#: Last round whose stage slot, as far as this rank knows, no peer will read again.
SAFE = 4
#: Position in the call: index of the current round, from -1, and next step in it; see
#: `r2ccl.shm.exchange`.
ROUND, STEP = 5, 6
#: Number of rounds of the call in which this rank sends or receives data, at least 1.
TOTAL = 7
#: Peer that the call waits for, or with which it disagrees.
AWAITED = 8
#: Number of calls of `pause` before a wait yields or sleeps, adapted to earlier waits; its minimum
#: and its maximum.
SPIN, SPIN_MIN, SPIN_MAX = 9, 10, 11
#: Number of calls of `sched_yield` before a wait sleeps.
YIELDS = 12
#: Longest sleep before the caller looks for signals and failures, a ``struct timespec``, which
#: `set_sleep` writes.
SLEEP_S, SLEEP_NS = 13, 14
#: Outputs of at least this many bytes are written without storing them in the caches, with
#: exceptions for calls in place.
STREAM_NBYTES = 15
#: Number of successive waits for which the pauses did not suffice.
MISSES = 16
#: CPU assigned to this rank, or -1; maximum number of ranks of the group that have to share a CPU
#: (`r2ccl.shm.machine.assign_cpu`). Number of further sleeps in which a thread keeps its CPU. Time
#: at which a thread last moved to HOME, and delay until the next move, in nanoseconds
#: (`r2ccl.shm.waiting`).
HOME, SHARERS, KEPT, MOVED_NS, DELAY_NS = 17, 27, 28, 29, 30
#: Segments for arrays that all ranks map: address of the table of this rank's own segments, sorted
#: by address; number of rows of this table; address of a table with one row per segment number: the
#: addresses, in this process, of the segments of all ranks.
OWN_SYMMETRIC, NSYMMETRIC, SYMMETRIC = 18, 19, 20
#: Words of a row of the first table: address of the first byte, end (exclusive), segment number.
ROW_NWORDS = 3
#: Access of peers to this rank's arrays in the call, see the values below; number of calls that
#: began again, which `NCALLS` counts twice.
MODE, NREPEATED = 21, 22
#: Transfer of the call; time at which all ranks had begun the call, in nanoseconds, or 0: do not
#: measure; space for a ``struct timespec``. See `r2ccl.shm.transfer`.
TRANSFER, BEGUN_NS, TIME = 23, 24, 25
#: For each stage slot, the number of the round that used it last.
USES = 31
#: Addresses of the segments of all ranks; then one word per rank for the inputs of a kernel; then
#: for each rank the first round of its latest call whose header has been compared.
BASES = USES + NSLOTS


def state_size(nranks: int) -> int:
    """Return the number of 64-bit words of the state of one of `nranks` ranks."""
    return BASES + 3 * nranks


def set_sleep(state: npt.NDArray[np.int64], duration_ns: int) -> None:
    """Set the longest sleep of the waits that use `state`, in nanoseconds.

    The state has a word for seconds and a word for nanoseconds, because the kernel refuses a
    ``struct timespec`` whose nanoseconds are a second or more.
    """
    state[[SLEEP_S, SLEEP_NS]] = divmod(duration_ns, 1_000_000_000)


# Values of MODE: not known yet; peers do not access the arrays; peers access the arrays.

UNDECIDED, STAGED, DIRECT = 0, 1, 2

#: Compiled loop of a collective: ``loop(state, source_at, target_at, call, is_resumed)``. The
#: arguments are the address of the state, the addresses of pointers to the input and the output,
#: the address of the words of a prepared call, and 1 to continue a call that returned WAITING, with
#: the same arguments, otherwise 0. Returns one of the results below.
Loop: TypeAlias = Callable[[int, int, int, int, int], int]

# Results of a loop.

FINISHED = 0
#: The call waits for AWAITED; run the loop again to continue it.
WAITING = 1
#: AWAITED made another call, or sends a part of another size than this rank expects.
DIFFERS, DIFFERS_IN_SIZE = 2, 3
#: The arrays do not have the form of the call, which has not begun.
CHANGED = 4
#: The process of AWAITED cannot be read, because it ends, or something forbids it now; run the loop
#: again to try again.
UNREADABLE = 5

# Indices of the words of a prepared call, which its loop reads. Only `exchange` uses the steps, the
# tables and the root.

#: Address of the form of input and output, or 0; see `r2ccl.shm.rounds.fits`.
LOOP_FORM = 0
#: Packed signature of the call, which must be equal on all ranks; flags, see below.
LOOP_SIGNATURE, LOOP_FLAGS = 1, 2
#: Address of a kernel of `r2ccl.kernels.fold`, or 0.
LOOP_KERNEL = 3
#: Size of the data in bytes, and maximum size of a chunk or piece; see the loops.
LOOP_NBYTES, LOOP_MOST = 4, 5
LOOP_SOURCE_STEP, LOOP_TARGET_STEP, LOOP_TABLES, LOOP_ROOT = 6, 7, 8, 9
#: Smallest parts, in bytes, that peers read directly from memory that all ranks map; and from other
#: memory (`r2ccl.shm.reading`). An allreduce compares its whole input.
LOOP_LEAST_REACHED, LOOP_LEAST_READ = 10, 11
#: Value of LOOP_LEAST_READ for calls in which peers do not read other memory.
NEVER = 1 << 62
#: Usual duration of the call with each transfer of `r2ccl.shm.transfer`, in nanoseconds; 0: not
#: measured yet.
LOOP_TRANSFERS_NS = 12
#: Number of calls that chose a transfer.
LOOP_NCALLS = 15
#: Duration and transfer of the last call, as in the header; 0: not measured.
LOOP_LAST = 16
#: Transfer of the call before the last.
LOOP_BEFORE = 17
LOOP_NWORDS = 18

# Flags of a prepared call.

#: The call is an exscan, not a scan.
EXCLUSIVE = 1
#: All receivers get the same data.
SHARED = 2
#: Only the root sends; only the root receives.
FROM_ROOT, TO_ROOT = 4, 8

__all__ = [
    "ALLOWED",
    "AWAITED",
    "BASES",
    "BATCH",
    "BEGUN_NS",
    "CALL_STEP",
    "CAN_READ",
    "CHANGED",
    "CPU",
    "CPU_SET_NBYTES",
    "DELAY_NS",
    "DIFFERS",
    "DIFFERS_IN_SIZE",
    "DIRECT",
    "DONE",
    "EXCLUSIVE",
    "FINISHED",
    "FIRST_SLOT",
    "FROM_ROOT",
    "HEADERS",
    "HOME",
    "INPUT",
    "KEPT",
    "LAST",
    "LAST_ROUND",
    "LEFT",
    "LINE_NBYTES",
    "LOOP_BEFORE",
    "LOOP_FLAGS",
    "LOOP_FORM",
    "LOOP_KERNEL",
    "LOOP_LAST",
    "LOOP_LEAST_REACHED",
    "LOOP_LEAST_READ",
    "LOOP_MOST",
    "LOOP_NBYTES",
    "LOOP_NCALLS",
    "LOOP_NWORDS",
    "LOOP_ROOT",
    "LOOP_SIGNATURE",
    "LOOP_SOURCE_STEP",
    "LOOP_TABLES",
    "LOOP_TARGET_STEP",
    "LOOP_TRANSFERS_NS",
    "MAX_NRANKS",
    "MISSES",
    "MODE",
    "MOST_PAGE_NBYTES",
    "MOVED_NS",
    "MUTEX",
    "NAHEAD",
    "NCALLS",
    "NEVER",
    "NHEADERS",
    "NRANKS",
    "NREPEATED",
    "NRESULTS",
    "NSLOTS",
    "NSYMMETRIC",
    "NUSED",
    "OUTPUT",
    "OWN_SYMMETRIC",
    "PARTS",
    "PID",
    "POSTED",
    "PROBE",
    "RANK",
    "RESULTS",
    "ROUND",
    "ROUND_BITS",
    "ROW_NBYTES",
    "ROW_NWORDS",
    "SAFE",
    "SCRATCH",
    "SCRATCH_NBYTES",
    "SEGMENT_NBYTES",
    "SHARED",
    "SHARERS",
    "SIGNATURE",
    "SLEEP_NS",
    "SLEEP_S",
    "SLOTS",
    "SLOT_NBYTES",
    "SPIN",
    "SPIN_MAX",
    "SPIN_MIN",
    "STAGED",
    "STEP",
    "STREAM_NBYTES",
    "SYMMETRIC",
    "TIME",
    "TOKEN",
    "TOTAL",
    "TO_ROOT",
    "TRANSFER",
    "UNDECIDED",
    "UNREADABLE",
    "USES",
    "WAITERS",
    "WAITING",
    "WAKER",
    "YIELDS",
    "Loop",
    "set_sleep",
    "state_size",
]
