"""A kernel that stays on the GPU and takes jobs from host memory: no launch for each.

Theory of operation
-------------------
The host and the kernel share a *mailbox* in pinned memory, the kernel's blocks a *board* in device
memory. ::

    host                      block 0, its first thread           other blocks, their first threads
                              arrived += 1                         arrived += 1
                              waits until all have arrived
    job into the ring
    posted = n       ------>  sees posted >= n
                              job onto the board, published = n -> sees published >= n
                              all threads work on their share  |   all threads work on their share
                              arrived += 1                         arrived += 1
                              waits until all have arrived
    sees done >= n   <------  done = n

Only block 0 looks at host memory, so that the bus is not full of polling. Jobs are done one after
the other, as on a stream: each begins when all blocks have finished the one before.

*The roll is called first.* Work on slices is in place: what a part of the blocks has done cannot be
done again. So no job is begun before every block was seen to run; a block that runs keeps its place
on the GPU until it ends. Where other work keeps some of them off for ``stall_ns``, the kernel ends
as ``ABSENT``, and whoever posted the jobs may have them done otherwise. Blocks that come too late
find nothing to do.

It cannot hang a GPU. Block 0 ends it, by publishing a number that no job has, when the host says
stop, when nothing came for ``idle_ns``, when it has run for ``life_ns`` since the roll (allocating
and loading wait for all kernels: they get their turn), and when the other blocks do not arrive
within ``stall_ns``: at the roll, or, which is an error, after a job. The host is told in ``ended``
and starts it again if jobs are left.

Order: what a job reads was written before ``posted``, with system scope where a device wrote it;
the acquire of a block's first thread and the barrier behind it pass that on to all its threads, as
``arrived`` and ``done`` do with what they wrote (PTX ISA, "Memory Consistency Model": causality
order; an acquire also empties the multiprocessor's cache of what was there before).

This module has the layout and the source of the device's part; values only. Must not import Numba.
Invariant: block 0 writes the board's job only when every block runs, and has taken the one before.
"""

from __future__ import annotations

#: Jobs that may be posted and not done.
NSLOTS = 64
#: Offsets in the mailbox, in bytes. The host writes the first line, the device the second; jobs
#: follow, `SLOT_NBYTES` each, job n in slot n modulo `NSLOTS`.
POSTED, STOP = 0, 8
DONE, ENDED = 64, 72
RING, SLOT_NBYTES = 128, 256
MAILBOX_NBYTES = RING + NSLOTS * SLOT_NBYTES

#: Offsets on the board: the number of the published job, how often blocks arrived, the job.
PUBLISHED, ARRIVED, JOB = 0, 64, 128
BOARD_NBYTES = JOB + SLOT_NBYTES
#: Published when there are no more jobs.
END = 1 << 62

#: What the kernel does next; what is in ``ended`` is one of the last five. Only one that is
#: ``STALLED`` may leave a job that was begun.
WAITING, WORKING, STOPPED, IDLE, OLD, STALLED, ABSENT = range(7)

#: Between two looks at the mailbox, which take about 1 us each, and two at the board; in ns.
_MAILBOX_PAUSE_NS, _BOARD_PAUSE_NS = 200, 50

#: The kernel's arguments: addresses; the last job that was done; and for how long it may go on.
PARAMETERS = ("mailbox", "board", "first", "life_ns", "idle_ns", "stall_ns")


def jobs(words: list[str], work: list[str]) -> list[str]:
    """Write the kernel's loop over jobs.

    Parameters
    ----------
    words : list of str
        Names of what a job consists of, in the order of the ring.
    work : list of str
        Lines of a function's body that do one.
    """
    count = len(words)
    lines = [
        "is_first = cuda.threadIdx.x == 0",
        "is_leader = is_first and cuda.blockIdx.x == 0",
        f"job_of_block = cuda.shared.array({count + 1}, int64)",
        f"state = {WAITING}",
        "job = first",
        "if is_first:",
        f"    add_release_gpu(board, {ARRIVED}, 1)",
        "if is_leader:",
        *_indented(_await_blocks("int64(cuda.gridDim.x)", ABSENT), 1),
        "started = clock()",
        "is_going = True",
        "while is_going:",
        "    job = advance(job, 1)",
        "    if is_leader:",
        *_indented(_take_from_mailbox(count), 2),
        "    elif is_first:",
        *_indented(_take_from_board(count), 2),
        "    cuda.syncthreads()",
        f"    is_going = job_of_block[{count}] == {WORKING}",
        "    if is_going:",
        *(f"        {name} = job_of_block[{i}]" for i, name in enumerate(words)),
        *_indented(work, 1),
        "        cuda.syncthreads()",
        "        if is_first:",
        f"            add_release_gpu(board, {ARRIVED}, 1)",
        "        if is_leader:",
        *_indented(_report(), 3),
    ]
    return _indented(lines, 1)


def _take_from_mailbox(count: int) -> list[str]:
    """Write how block 0 waits for a job, or for a reason to end, and tells the others.

    It may have such a reason already.
    """
    slot = f"mailbox + {RING} + (job & {NSLOTS - 1}) * {SLOT_NBYTES}"
    return [
        "since = clock()",
        f"while state == {WAITING}:",
        "    now = clock()",
        # Before the jobs: all that were posted before the host said stop are still done.
        f"    stop = load_acquire_sys(mailbox, {STOP})",
        "    if now - started > life_ns:",
        f"        state = {OLD}",
        f"    elif load_acquire_sys(mailbox, {POSTED}) >= job:",
        f"        state = {WORKING}",
        "    elif stop != 0:",
        f"        state = {STOPPED}",
        "    elif now - since > idle_ns:",
        f"        state = {IDLE}",
        "    else:",
        f"        sleep({_MAILBOX_PAUSE_NS})",
        f"job_of_block[{count}] = state",
        f"if state == {WORKING}:",
        f"    slot = {slot}",
        f"    for i in range({count}):",
        "        job_of_block[i] = load_volatile(slot, 8 * i)",
        f"        store_volatile(board, {JOB} + 8 * i, job_of_block[i])",
        f"    store_release_gpu(board, {PUBLISHED}, job)",
        "else:",
        f"    store_release_gpu(board, {PUBLISHED}, {END})",
        f"    store_release_sys(mailbox, {ENDED}, state)",
    ]


def _take_from_board(count: int) -> list[str]:
    """Write how another block waits for what block 0 publishes."""
    return [
        f"published = load_acquire_gpu(board, {PUBLISHED})",
        "while published < job:",
        f"    sleep({_BOARD_PAUSE_NS})",
        f"    published = load_acquire_gpu(board, {PUBLISHED})",
        f"job_of_block[{count}] = {WORKING} if published == job else {STOPPED}",
        f"for i in range({count}):",
        f"    job_of_block[i] = load_volatile(board, {JOB} + 8 * i)",
    ]


def _report() -> list[str]:
    """Write how block 0 waits for the others and tells the host."""
    return [
        f"state = {WAITING}",
        # Once for the roll, once for each job.
        *_await_blocks("(job - first + 1) * cuda.gridDim.x", STALLED),
        f"if state == {WAITING}:",
        f"    store_release_sys(mailbox, {DONE}, job)",
    ]


def _await_blocks(wanted: str, otherwise: int) -> list[str]:
    """Write how block 0 waits until there were so many arrivals, or `otherwise` is its state."""
    return [
        "since = clock()",
        f"wanted = {wanted}",
        f"while state == {WAITING} and load_acquire_gpu(board, {ARRIVED}) < wanted:",
        "    if clock() - since > stall_ns:",
        f"        state = {otherwise}",
        f"    sleep({_BOARD_PAUSE_NS})",
    ]


def _indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


__all__ = [
    "ABSENT",
    "ARRIVED",
    "BOARD_NBYTES",
    "DONE",
    "END",
    "ENDED",
    "IDLE",
    "JOB",
    "MAILBOX_NBYTES",
    "NSLOTS",
    "OLD",
    "PARAMETERS",
    "POSTED",
    "PUBLISHED",
    "RING",
    "SLOT_NBYTES",
    "STALLED",
    "STOP",
    "STOPPED",
    "WAITING",
    "WORKING",
    "jobs",
]
