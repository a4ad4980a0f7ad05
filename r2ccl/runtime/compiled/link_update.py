"""Update of links, paths and bandwidth measurement after calls that ended in compiled code.

`update_links` brings the links to the state that the tables of a program have, and `keep_copies`
keeps the slices that may have to be sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import itemgetter

import numpy as np

from r2ccl.failover.migration.calls import Calls
from r2ccl.failover.migration.link import SendLink, Slice, SliceState
from r2ccl.failover.migration.links import Consumer, Links
from r2ccl.failover.migration.path import Path
from r2ccl.runtime.compiled import layout as at
from r2ccl.runtime.compiled.program import CompiledProgram, LinkPair


class _Ended:
    """`Consumer` of eager slices whose call has ended; has no methods, because none is called."""

    is_bandwidth_sample = False


_ENDED = _Ended()


def update_links(
    links: Links, program: CompiledProgram, calls: Calls[Consumer], *, is_running: bool = False
) -> None:
    """Update the counts of links after calls that ended in compiled code.

    If `is_running`, a further call has begun; it is not counted.
    """
    words, last_op = program.view, program.last_op(is_running=is_running)
    for end in program.ends:
        sender, receiver, row = end.sender, end.receiver, end.row
        posted = words[row + at.FIRST_SENT] + (0 if is_running else end.nsends)
        sender.confirmed = min(words[row + at.CONFIRMED], posted)
        queue = sender.outstanding
        while queue and queue[0].seq < sender.confirmed:
            queue.popleft()
        if end.nsends:
            sender.posted = sender.retired_below = posted
            sender.last_used = links.ncalls
            if sender.clears:
                for seq in [seq for seq in sender.clears if seq < sender.posted]:
                    del sender.clears[seq]
        posted = words[row + at.FIRST_RECEIVED] + (0 if is_running else end.nreceives)
        receiver.acked = min(words[row + at.ACKED], posted)
        if end.nreceives:
            receiver.posted = receiver.delivered = receiver.consumed = posted
            receiver.received = max(receiver.received, posted)
            receiver.last_used = links.ncalls
            if receiver.arrivals:
                for seq in [seq for seq in receiver.arrivals if seq < posted]:
                    del receiver.arrivals[seq]
                while receiver.received in receiver.arrivals:
                    receiver.received += 1
        if end.nreceives or words[row + at.CLEARED]:
            calls.seen[sender.peer] = max(calls.seen.get(sender.peer, 0), last_op)
        if words[row + at.IS_UNCONFIRMED] and not is_running:
            links.unconfirmed[receiver] = None


def keep_copies(
    programs: Collection[CompiledProgram], running: CompiledProgram | None = None
) -> None:
    """Keep copies of the eager slices of ended calls that the peer has not confirmed yet.

    Without `Config.is_resilient`, no copies are kept. The newest call of `running`, if it is not
    None, has not ended: its slices are not kept.
    """
    found: dict[SendLink, list[tuple[int, CompiledProgram, LinkPair, int, int]]] = {}
    for program in programs:
        for end in program.ends:
            sender = end.sender
            if not end.nsends or not sender.is_confirmed or sender.confirmed >= sender.posted:
                continue
            least = sender.confirmed
            if sender.outstanding:  # not again, if Ctrl-C interrupted an earlier `settle`
                least = max(least, sender.outstanding[-1].seq + 1)
            firsts = program.slots[:, 1 + end.number]
            for slot in np.flatnonzero(firsts + end.nsends > least).tolist():
                if program is running and slot == program.slot:
                    continue
                first = int(firsts[slot])
                found.setdefault(sender, []).extend(
                    (first + ordinal, program, end, ordinal, slot)
                    for ordinal in range(max(0, least - first), end.nsends)
                )
    for sender, slices in found.items():
        slices.sort(key=itemgetter(0))
        for seq, program, end, ordinal, slot in slices:
            view = program.copy_of(end.number, ordinal, slot)
            signature = program.signature(end.number, is_sent=True)
            index = program.pairs[end.number].sends[ordinal][0]
            op = int(program.slots[slot, 0])
            item = Slice(seq, view, True, op, signature, _ENDED, index)
            item.path, item.state = end.route, SliceState.RETIRED
            sender.outstanding.append(item)


def totals_after(links: Links, counts: Mapping[CompiledProgram, int]) -> dict[Path, list[int]]:
    """Return the counters of the paths after further calls; see ``Totals.paths``.

    `counts` has the number of calls per program.
    """
    paths: dict[Path, list[int]] = {}
    for program, ncalls in counts.items():
        for key, traffic in program.traffic.items():
            path = links.paths[key]
            if path not in paths:
                paths[path] = [
                    path.nslices_sent, path.nbytes_sent,
                    path.nslices_received, path.nbytes_received,
                ]  # fmt: skip
            totals = paths[path]
            for number, count in enumerate(traffic):
                totals[number] += ncalls * count
            # `Progress` has counted the slices that arrived before their call.
            early = [nbytes for route, nbytes in program.imported if route == key]
            totals[2] -= len(early)
            totals[3] -= sum(early)
    return paths


def count(programs: Collection[CompiledProgram], totals: Mapping[Path, list[int]]) -> None:
    """Set the counters of the paths to `totals`, and clear ``imported`` of `programs`.

    `totals` is the result of `totals_after`, which needs ``imported``.
    """
    for path, counts in totals.items():
        path.activity += 1
        path.nslices_sent, path.nbytes_sent = counts[:2]
        path.nslices_received, path.nbytes_received = counts[2:]
    for program in programs:
        program.imported.clear()


def measure(links: Links, program: CompiledProgram) -> None:
    """Report to the bandwidth measurement when cleared slices were posted and released.

    The times are in the log of `program`.
    """
    balance = links.balance
    assert balance is not None
    rows = program.log[: program.view[at.NLOGGED]]
    for kind, conn, _, _, _, nbytes, _, time_ns in rows[rows[:, 0] >= at.POSTED_EVENT].tolist():
        path = program.paths[conn]
        if kind == at.POSTED_EVENT:
            balance.posted(path.rail, path.peer, time_ns * 1e-9)
        else:
            balance.confirmed(path.rail, time_ns * 1e-9, nbytes)


__all__ = ["count", "keep_copies", "measure", "totals_after", "update_links"]
