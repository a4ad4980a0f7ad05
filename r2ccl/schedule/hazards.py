"""Refuse ops that touch the same memory without being ordered.

Imports the IR, its arrays and `events`. Invariant: two ops on the same memory, one of them
writing, are ordered by what the program itself waits for: ``after``, and a message's journey
from its SEND to its receive. Nothing else counts. That a peer has confirmed proves nothing: a
small SEND is released by a copy, with the peer far behind. So one legal order of the ops speaks
for all of them.

Ops in conflict work on the same chunk, and every step of the argument keeps a slice's number or
covers all slices, so what is shown for whole ops holds slice by slice.

INPUT and OUTPUT count as the same memory, as they are in place; what is ordered then is ordered
out of place too.
"""

from __future__ import annotations

import numpy as np

from r2ccl.schedule.arrays import ScheduleArrays
from r2ccl.schedule.events import Events, error_at, replay_order
from r2ccl.schedule.graph import Ints
from r2ccl.schedule.ir import OpKind, Space

#: Channel, chunk, rank, space: one piece of memory.
Place = tuple[int, int, int, int]


def check_hazards(arrays: ScheduleArrays, other: Ints, events: Events) -> None:
    """Require reads after the write before them, and writes after all that came before them.

    Raises
    ------
    ScheduleError
        Names the op that may come too early, and the one it must wait for.
    """
    order, moment = replay_order(arrays, events)
    waits = _Waits(arrays, other, moment)
    written: dict[Place, int] = {}
    readers: dict[Place, list[int]] = {}
    rows = arrays.ops[order]
    columns = ("channel", "rank", "kind", "src_space", "dst_space")
    for op in np.flatnonzero(rows["proof"]).tolist():
        waits.require_proof(int(order[op]))
    fields = zip(arrays.chunks()[order].tolist(), *(rows[c].tolist() for c in columns), strict=True)
    for op, (chunk, channel, rank, kind, src_space, dst_space) in zip(
        order.tolist(), fields, strict=True
    ):
        if kind != OpKind.RECV:
            place = (channel, chunk, rank, src_space or Space.OUTPUT)
            if place in written:
                waits.require(written[place], op, "reads")
            readers.setdefault(place, []).append(op)
        if kind != OpKind.SEND:
            place = (channel, chunk, rank, dst_space)
            for earlier in readers.pop(place, ()):
                if earlier != op:
                    waits.require(earlier, op, "overwrites")
            if place in written:
                waits.require(written[place], op, "overwrites")
            written[place] = op


class _Waits:
    """Answers whether an op ends before another begins."""

    def __init__(self, arrays: ScheduleArrays, other: Ints, moment: Ints) -> None:
        self._arrays = arrays
        # Memory views: single items come out as plain ints, several times faster than by array.
        self._waited = arrays.waits()[1].data
        self._offsets = arrays.offsets.data
        self._other = other.data
        self._moment = moment.data
        is_receive = np.isin(arrays.ops["kind"], (OpKind.RECV, OpKind.RECV_REDUCE))
        self._is_receive = is_receive.view(np.uint8).data

    def require(self, earlier: int, later: int, verb: str) -> None:
        """Raise unless `earlier` ends before `later` begins."""
        if self._is_ordered(earlier, later):
            return
        row = self._arrays.ops[earlier]
        kind = OpKind(int(row["kind"])).name
        raise error_at(
            self._arrays,
            later,
            f"{verb} memory that op {row['index']} ({kind}) uses, in place or out of place, and "
            "does not wait for it; name it in after",
        )

    def require_proof(self, op: int) -> None:
        """Raise unless the message `op` receives proves that the SENDs it waits for arrived."""
        for i in range(self._offsets[op], self._offsets[op + 1]):
            send = self._waited[i]
            if self._arrays.ops["kind"][send] != OpKind.SEND:
                continue
            if not self._is_ordered(self._other[send], self._other[op]):
                raise error_at(
                    self._arrays,
                    op,
                    f"is_proof is wrong here: what it receives may be sent before the peer of op "
                    f"{self._arrays.ops['index'][send]} (SEND) has received that",
                )

    def _is_ordered(self, earlier: int, later: int) -> bool:
        """Whether `earlier` ends before `later` begins, by ``after`` and messages alone."""
        horizon = self._moment[earlier]
        seen = {later}
        near, far = [later], list[int]()  # this rank's own ops first: nearly always that is enough
        while near or far:
            op = near.pop() if near else far.pop()
            for i in range(self._offsets[op], self._offsets[op + 1]):
                waited = self._waited[i]
                if waited == earlier:
                    return True
                if waited not in seen and self._moment[waited] > horizon:
                    seen.add(waited)
                    near.append(waited)
            if self._is_receive[op]:
                # What a SEND waited for is over when its message arrives; its release may not be.
                sender = self._other[op]
                if sender not in seen and self._moment[sender] > horizon:
                    seen.add(sender)
                    far.append(sender)
        return False


__all__ = ["check_hazards"]
