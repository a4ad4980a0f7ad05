"""Communicators of one job at one rank: their context ids, and the control messages of each.

As in MPI, a *context id* identifies an open communicator of a job. The channel numbers of links and
the control messages contain it. The ranks of a new communicator choose the lowest id that is free
on all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple, Protocol

import msgspec

from r2ccl.bootstrap.base import Post
from r2ccl.bootstrap.overlay import neighbors
from r2ccl.errors import InvalidArgument
from r2ccl.failover.health.rounds import Commit, Prepare, Promise, Report
from r2ccl.failover.health.table import Health
from r2ccl.runtime.desync_check import Calling


class Closing(msgspec.Struct, frozen=True, tag="closing"):
    """Control message that reports a call of close().

    From rank 0, it reports that all ranks have called close(); from any other rank, that the sender
    has. Until all ranks have closed the communicator, each rank takes part in the communicator's
    health agreement, because a slower rank may wait for the agreement.
    """


#: Control message of one communicator.
ContextMessage = Report | Prepare | Promise | Commit | Calling | Closing


class InContext(msgspec.Struct, frozen=True, tag="in_context"):
    """Wrapper of a control message of a communicator other than the job's first one.

    ``context_id`` and ``first_op``, the number of the communicator's first call, identify the
    communicator. The id alone does not: a later communicator may reuse the id of a closed one, but
    its calls have higher numbers.
    """

    context_id: int
    first_op: int
    message: ContextMessage


class Context(NamedTuple):
    """Identity of a communicator; equal on all its ranks.

    Attributes
    ----------
    context_id : int
        0 for the job's first communicator.
    first_op : int
        Number of the communicator's first call.
    members : tuple of int
        Rank in the job of each rank of the communicator.
    """

    context_id: int
    first_op: int
    members: tuple[int, ...]

    def told(self) -> str:
        """Return a text for messages that names this communicator by its members' ranks in the job.

        The text is empty for the job's first communicator, whose ranks are the same as in the job.
        """
        if not self.context_id:
            return ""
        first, nmore = list(self.members[:_MOST_TOLD]), len(self.members) - _MOST_TOLD
        more = f" and {nmore} more" if nmore > 0 else ""
        return f"on the communicator of ranks {first}{more} of the job"


class ContextPost:
    """Sender of the control messages of one communicator; numbers ranks as in the communicator.

    Parameters
    ----------
    control : Post
        Sends messages to ranks of the job.
    rank : int
        This rank, in the communicator.
    context : Context
    """

    def __init__(self, control: Post, rank: int, context: Context) -> None:
        self.neighbors = neighbors(rank, len(context.members))
        self._control = control
        self._rank = rank
        self._context = context

    def send(self, peer: int, message: object) -> None:
        """Send `message` to rank `peer` of the communicator; see `Post.send`."""
        assert isinstance(message, ContextMessage)
        context_id, first_op, members = self._context
        self._control.send(members[peer], InContext(context_id, first_op, message))

    def broadcast(self, message: object) -> None:
        """Send `message` to all other ranks of the communicator."""
        for peer in range(len(self._context.members)):
            if peer != self._rank:
                self.send(peer, message)

    def gossip(self, message: object, source: int = -1) -> None:
        """Send `message` to all neighbors in the communicator's overlay network except `source`."""
        for peer in sorted(self.neighbors - {source}):
            self.send(peer, message)


class ContextEngine(Protocol):
    """Interface of a communicator's engine that `Contexts` uses.

    Attributes
    ----------
    context : Context
    """

    context: Context

    def on_message(self, peer: int, message: object) -> None:
        """Handle a control message from `peer`, a rank of the job."""
        ...

    def adopt(self, health: Health) -> None:
        """Make the ranks agree on `health`, a new health of the job."""
        ...


class Contexts:
    """Context ids in use at this rank, and the communicators that have these ids.

    Any thread may call `offer`, `withdraw`, `choose` and `give_up`; only the thread that owns the
    data loop may call the other methods. Invariant: a message for an unknown communicator is kept
    only if it arrives while this rank makes a communicator, because it may be for the communicator
    that is being made.
    """

    def __init__(self) -> None:
        self._members: dict[int, ContextEngine] = {}
        #: Messages for communicators that this rank has not made yet, with senders, by context id
        #: and number of the first call.
        self._early: dict[tuple[int, int], list[tuple[int, ContextMessage]]] = {}
        #: Results of `choose` for which neither `add` nor `give_up` was called yet.
        self._chosen: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        #: Number of communicators that this rank has closed and some other rank has not.
        self.nclosing = 0
        self._free = (1 << _NIDS) - 2
        #: Lowest number that the first call of the next communicator may have.
        self._next_op = 1
        #: Thread whose offer is not withdrawn yet; None if there is none.
        self._offerer: int | None = None
        #: Context id of the parent communicator, by thread that makes a communicator.
        self._parents: dict[int, int] = {}

    def offer(self, parent: int) -> bytes:
        """Return this rank's offer for a new communicator: free ids, and lowest free call number.

        The ranks exchange their offers and pass them to `choose`. `parent` is the context id of the
        communicator that the new one is made from. The result is `NO_OFFER` in three cases:

        - another thread is making a communicator;
        - another thread waits to make a communicator from a parent with a lower id (lower ids come
          first, so that all ranks make the communicators in the same order);
        - all ids are in use, but this rank has closed a communicator whose id becomes free once all
          its ranks have closed it.

        The caller must call `withdraw` after the exchange.
        """
        with self._lock:
            self._parents[get_ident()] = parent
            is_first = parent == min(self._parents.values())
            if self._offerer is not None or not is_first or (self.nclosing and not self._free):
                return NO_OFFER
            self._offerer = get_ident()
            return self._free.to_bytes(_NIDS // 8, "little") + self._next_op.to_bytes(8, "little")

    def withdraw(self, *, is_last: bool) -> None:
        """Withdraw this thread's offer, if any; if `is_last`, the thread makes no further offer."""
        with self._lock:
            if self._offerer == get_ident():
                self._offerer = None
            if is_last:
                self._parents.pop(get_ident(), None)

    def choose(self, offers: Sequence[bytes]) -> tuple[int, int]:
        """Return the context id and the number of the first call of a new communicator.

        The id counts as in use from now on. The caller must then either make the communicator,
        which calls `add`, or call `give_up`.

        Parameters
        ----------
        offers : sequence of bytes
            Offers of all ranks of the new communicator, none of them `NO_OFFER`.

        Raises
        ------
        InvalidArgument
            If no id is free on all ranks.
        """
        common = (1 << _NIDS) - 1
        for offer in offers:
            common &= int.from_bytes(offer[: _NIDS // 8], "little")
        if not common:
            raise InvalidArgument(
                f"no context id is free on all ranks: at most {_NIDS} communicators may be open on "
                "each rank: close the communicators that are not in use"
            )
        context_id = (common & -common).bit_length() - 1
        first_op = max(int.from_bytes(offer[_NIDS // 8 :], "little") for offer in offers)
        with self._lock:
            self._free &= ~(1 << context_id)
            self._chosen.add((context_id, first_op))
        return context_id, first_op

    def give_up(self, context: Context) -> None:
        """Stop keeping messages for a chosen communicator, because this rank failed to make it.

        The id stays in use: ranks that made the communicator may send data with this id, and a
        later communicator with the same id would accept that data.
        """
        self._chosen.discard((context.context_id, context.first_op))

    # Called by the owner of the data loop

    def add(self, member: ContextEngine) -> None:
        """Add a new communicator, and pass on the messages that arrived for it."""
        context_id, first_op, _ = member.context
        self._members[context_id] = member
        self._chosen.discard((context_id, first_op))
        for peer, message in self._early.pop((context_id, first_op), ()):
            self._pass(member, peer, message)

    def remove(self, member: ContextEngine, last_op: int) -> None:
        """Remove a communicator that all its ranks have closed; its last call was `last_op`."""
        context_id, first_op, _ = member.context
        del self._members[context_id]
        self.nclosing -= 1
        with self._lock:
            self._free |= 1 << context_id
            self._next_op = max(self._next_op, first_op + 1, last_op + 1)

    def on_message(self, peer: int, wrapped: InContext) -> None:
        """Pass a message from `peer`, a rank of the job, to its communicator.

        A message for an unknown communicator is kept if this rank is making a communicator, which
        may be the unknown one. Otherwise the message is dropped, because its communicator is closed
        or this rank failed to make it.
        """
        context_id, first_op, message = wrapped.context_id, wrapped.first_op, wrapped.message
        member = self._members.get(context_id)
        if member is not None and member.context.first_op == first_op:
            self._pass(member, peer, message)
            return
        key = (context_id, first_op)
        # `choose` comes before the last `withdraw`, so `_parents` is read before `_chosen`.
        if not self._parents:
            self._early = {each: kept for each, kept in self._early.items() if each in self._chosen}
        if self._parents or key in self._chosen:
            self._early.setdefault(key, []).append((peer, message))

    def _pass(self, member: ContextEngine, peer: int, message: ContextMessage) -> None:
        # A rank may have made a communicator of the same identity that failed at this rank.
        if peer in member.context.members:
            member.on_message(peer, message)

    def adopt(self, health: Health) -> None:
        """Pass a new health of the job to all communicators except the job's first one."""
        for member in self._members.values():
            member.adopt(health)


def is_offer(data: bytes) -> bool:
    """Return whether `data` has the form of an offer (`Contexts.offer`); True for `NO_OFFER`."""
    if len(data) != len(NO_OFFER):
        return False
    next_op = int.from_bytes(data[_NIDS // 8 :], "little")
    # Id 0, that of the job's first communicator, is never free.
    return data == NO_OFFER or (not data[0] & 1 and next_op in _OPS)


#: Number of context ids, which is the maximum number of open communicators of a rank.
_NIDS = 2048
#: Numbers that a call may have.
_OPS = range(1, 1 << 63)
#: Maximum number of ranks that `Context.told` names.
_MOST_TOLD = 8
#: Offer of a rank that cannot take part yet; see `Contexts.offer`.
NO_OFFER = bytes(_NIDS // 8 + 8)

__all__ = [
    "NO_OFFER",
    "Closing",
    "Context",
    "ContextEngine",
    "ContextMessage",
    "ContextPost",
    "Contexts",
    "InContext",
    "is_offer",
]
