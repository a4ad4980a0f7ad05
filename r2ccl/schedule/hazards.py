"""Check for data races: conflicting ops on the same memory must be ordered.

Two ops conflict if they use the same memory and at least one of them writes. Their order must
follow from ``after`` and from messages: a receive ends after its SEND begins. The end of a SEND
does not prove that the peer has received the message, because a small SEND ends when its data is
copied to an eager slot. The order that follows from these rules holds in every execution, so the
conflicts are checked in only one possible order of the ops.

Conflicting ops work on the same chunk index, and each rule holds either slice by slice or for all
slices together. The result of the check for whole ops is therefore valid for every slice.

INPUT and OUTPUT count as the same memory, as in an in-place call, unless the collective is in
`r2ccl.schedule.ir.APART`. A schedule that has no races in place has no races out of place.
"""

from __future__ import annotations

import numpy as np

from r2ccl.schedule.arrays import ScheduleArrays
from r2ccl.schedule.events import Events, error_at, replay_order
from r2ccl.schedule.graph import Ints
from r2ccl.schedule.ir import OpKind, Space

#: A memory location: channel, chunk, rank, space.
Place = tuple[int, int, int, int]


def check_hazards(
    arrays: ScheduleArrays, other: Ints, events: Events, *, can_be_in_place: bool = True
) -> None:
    """Verify that every read follows the last write, and every write follows all earlier uses.

    Also verify every `Op.is_proof`. With `can_be_in_place`, INPUT shares the memory of OUTPUT.
    `other` is the result of `match`, and `events` is the result of `build_events`.

    Raises
    ------
    ScheduleError
        If two conflicting ops are not ordered, or an `is_proof` is wrong. The message names the op
        that may run too early and the op it must wait for.
    """
    order, moment = replay_order(arrays, events)
    waits = _Waits(arrays, other, moment)
    written: dict[Place, int] = {}
    readers: dict[Place, list[int]] = {}
    rows = arrays.ops[order]
    columns = ("channel", "rank", "kind", "src_space", "dst_space")
    shared = Space.OUTPUT if can_be_in_place else Space.INPUT
    for op in np.flatnonzero(rows["proof"]).tolist():
        waits.require_proof(int(order[op]))
    fields = zip(arrays.chunks()[order].tolist(), *(rows[c].tolist() for c in columns), strict=True)
    for op, (chunk, channel, rank, kind, src_space, dst_space) in zip(
        order.tolist(), fields, strict=True
    ):
        if kind != OpKind.RECV:
            place = (channel, chunk, rank, src_space or shared)
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
    """Checker of the order of two ops, which dependencies and messages must guarantee."""

    def __init__(self, arrays: ScheduleArrays, other: Ints, moment: Ints) -> None:
        self._arrays = arrays
        # Memory views: reading single items as ints is several times faster than from arrays.
        self._waited = arrays.waits()[1].data
        self._offsets = arrays.offsets.data
        self._other = other.data
        self._moment = moment.data
        is_receive = np.isin(arrays.ops["kind"], (OpKind.RECV, OpKind.RECV_REDUCE))
        self._is_receive = is_receive.view(np.uint8).data

    def require(self, earlier: int, later: int, verb: str) -> None:
        """Raise ScheduleError unless `earlier` always ends before `later` uses the same memory.

        `verb`, such as "overwrites", says in the message what `later` does with the memory.
        """
        if self._is_ordered(earlier, later):
            return
        row = self._arrays.ops[earlier]
        kind = OpKind(int(row["kind"])).name
        raise error_at(
            self._arrays,
            later,
            f"{verb} memory that op {row['index']} ({kind}) uses, in place or out of place, and "
            "does not wait for it; add that op to after",
        )

    def require_proof(self, op: int) -> None:
        """Raise ScheduleError unless `op`, a RECV, satisfies the condition of `Op.is_proof`."""
        for i in range(self._offsets[op], self._offsets[op + 1]):
            send = self._waited[i]
            if self._arrays.ops["kind"][send] != OpKind.SEND:
                continue
            if not self._is_ordered(self._other[send], self._other[op]):
                raise error_at(
                    self._arrays,
                    op,
                    "is_proof is wrong here: the received message may be sent before the peer of "
                    f"op {self._arrays.ops['index'][send]} (SEND) has received that op's message",
                )

    def _is_ordered(self, earlier: int, later: int) -> bool:
        """Return True if ``after`` and messages order `earlier`'s end before `later`'s beginning.

        Also return True if `later` is a receive whose message cannot be sent before `earlier` has
        ended, because a receive uses its memory only when the message arrives.
        """
        horizon = self._moment[earlier]
        seen = {later}
        near, far = [later], list[int]()  # ops of this rank first: they nearly always suffice
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
                # The ops a SEND waited for have ended when its message arrives; the SEND may not
                # have ended.
                sender = self._other[op]
                if sender not in seen and self._moment[sender] > horizon:
                    seen.add(sender)
                    far.append(sender)
        return False


__all__ = ["check_hazards"]
