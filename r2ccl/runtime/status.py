"""Status of a rank: its collective in progress, paths and links, and the peers it waits for.

The status can be read in any thread and in a signal handler. It is read without waiting for a lock,
so that it is available even while the data loop hangs. Each table is copied in one step, but
counters that belong together may differ by one slice. Times are readings of CLOCK_MONOTONIC in
seconds, as in `Repair`. Ranks are numbered as in the job, except in `AgreedHealth`.

Invariant: the functions of this module change nothing. (`Reports` first settles a held call.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.health.driver import Known
from r2ccl.failover.migration.calls import context_of
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.failover.migration.repairs import Repair
from r2ccl.planning.plan_cache import Planning
from r2ccl.runtime.executor import LaneRun
from r2ccl.types import Nic, PathKey, rail_name


class Wait(msgspec.Struct, frozen=True):
    """Object that a rank waits for, and the peer that must provide it.

    Attributes
    ----------
    peer : int
        Rank that must provide the object.
    what : str
        One of ``slice``, ``message``, ``matching receive``, ``confirmation``, ``path``, ``agreement
        on the health``, ``data in shared memory`` or, if a slice is ready to be sent, ``landing
        place`` (cleared) or ``free slot`` (eager).
    channel, seq : int or None
        Channel of the link, and number of the first slice that is awaited, not confirmed or not
        sent; None if no link is concerned.
    rail : int or None
        Rail on which the object should arrive; None: any rail, or not known.
    why : str
        Last known reason why the object is missing; empty: not known.
    """

    peer: int
    what: str
    channel: int | None = None
    seq: int | None = None
    rail: int | None = None
    why: str = ""

    def __str__(self) -> str:
        link = "" if self.channel is None else f" {self.seq} of channel {self.channel}"
        rail = "" if self.rail is None else f" over {rail_name(self.rail)}"
        way = "to" if self.what == "path" else "from"
        why = f" ({self.why})" if self.why else ""
        return f"{self.what}{link} {way} rank {self.peer}{rail}{why}"


class Pending(msgspec.Struct, frozen=True):
    """Description of the call that blocks a rank; ``str()`` is a sentence for people.

    Attributes
    ----------
    rank : int
    doing : str
        Text that names the blocked call, and its number and arguments if it has them. Empty: no
        call is blocked.
    now_s, since_s : float
        Time of this reading, and time at which the present wait of the call began.
    absent : dict of int to int
        Maps each rank that has not made the blocked call, as far as this rank knows, to the number
        of the last collective in which the rank was seen; 0: none.
    waits : tuple of Wait
    slow : tuple of int
        Ranks found slow since `since_s`: their ports answer probes, but no data arrives from them.
    """

    rank: int
    doing: str
    now_s: float
    since_s: float
    absent: dict[int, int] = {}
    waits: tuple[Wait, ...] = ()
    slow: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.doing:
            return f"rank {self.rank} waits for nothing"
        parts = []
        if self.absent:
            seen = [
                f"rank {peer} was last seen in call {op}" if op else f"rank {peer} in no call yet"
                for peer, op in self.absent.items()
            ]
            parts.append(f"ranks {sorted(self.absent)} have not called it ({_listed(seen)})")
        if self.waits:
            parts.append(f"it waits for {_listed([str(wait) for wait in self.waits])}")
        if self.slow:
            ranks = _listed([str(rank) for rank in self.slow])
            who, whose = ("ranks", "their") if len(self.slow) > 1 else ("rank", "its")
            parts.append(
                f"no data arrives from {who} {ranks}, although {whose} ports answer probes"
            )
        age_s = self.now_s - self.since_s
        said = "; ".join(parts) or "it waits for no particular rank"
        return f"rank {self.rank}: {self.doing}, begun {age_s:.3g} s ago: {said}"


class PathEntry(msgspec.Struct, frozen=True):
    """State and counters of the path to one peer over one rail.

    Attributes
    ----------
    peer, rail, epoch : int
        The epoch is the number of times that the path was taken out of use: because it was lost,
        excluded or idle.
    state : str
        ``up``; ``fencing`` or ``fenced``: going down; ``down``: not connected yet, not connected
        again yet, or excluded; ``closed``: the paths to the peer are idle and are connected when
        they are needed.
    cause : str
        Reason why the path is, or last was, out of use, such as the evidence of a failure or ``not
        connected yet``. Empty if the path is closed, or is up and was neither lost nor excluded
        since it was first connected or last closed.
    since_s : float
        Time at which the path was last taken into or out of use or, before its first use, at which
        its connection was begun.
    nslices_sent, nslices_received, nbytes_sent, nbytes_received : int
        Counts of slices and of payload bytes, without headers. A slice that is sent again counts
        again.
    """

    peer: int
    rail: int
    state: str
    epoch: int
    cause: str
    since_s: float
    nslices_sent: int
    nslices_received: int
    nbytes_sent: int
    nbytes_received: int


class LinkEntry(msgspec.Struct, frozen=True):
    """Slice counts of the two links between this rank and a peer on one channel.

    Attributes
    ----------
    peer, channel : int
    rail : int or None
        Rail that the link to the peer uses; None: no path is up, or the link moves to another path.
    posted : int
        Number of slices to the peer that were posted.
    confirmed : int
        Number of slices to the peer that the peer has confirmed. Over TCP, the last slice of a link
        in a call may be confirmed before the peer has consumed it.
    wanted : int
        Number of slices from the peer for which a receive was posted.
    received : int
        Number of slices from the peer that have arrived, up to the first one that is missing.
    delivered : int
        Number of slices from the peer that were passed, in order, to the collective or message.
    consumed : int
        Number of slices from the peer that were consumed.
    duplicates : int
        Number of slices from the peer that arrived a second time and were dropped.
    """

    peer: int
    channel: int
    rail: int | None
    posted: int
    confirmed: int
    wanted: int
    received: int
    delivered: int
    consumed: int
    duplicates: int


class PeerEntry(msgspec.Struct, frozen=True):
    """Another rank: its host and process, time of its last sign of life, and last collective.

    ``heard_s`` is None if this rank has no session with that rank. ``last_op`` is the number of the
    last collective in which that rank was seen; 0: none.
    """

    rank: int
    host: str
    pid: int
    heard_s: float | None
    last_op: int


class Operation(msgspec.Struct, frozen=True):
    """Collective in progress.

    Attributes
    ----------
    op : int
        Number of the collective, from 1.
    call : str
        Collective and its arguments.
    nslices_left : tuple of int
        Number of slices that are still to be sent, received, copied or reduced: per channel, or a
        single number for all channels if compiled code runs the call.
    """

    op: int
    call: str
    nslices_left: tuple[int, ...]


class RailHealth(msgspec.Struct, frozen=True):
    """State of one rail of this rank.

    Attributes
    ----------
    rail : int
    name, address : str
        Name and address of the local interface. For an RDMA rail, the name is the port
        (``mlx5_0:1``) and the address is empty.
    speed_mbps : int
        Nominal speed in Mbit/s; 0: unknown.
    state : str
        ``excluded`` if the local NIC is excluded. Otherwise ``up`` if all paths are up, ``down`` if
        none is, else ``degraded``. Closed paths do not count; a rail with only closed paths, or
        without paths, is ``up``.
    paths : tuple of PathEntry
        One path to each rank to which this rank connects, or has connected, data paths.
    nrepairs : int
        Number of repairs in the log that were caused by this rail.
    """

    rail: int
    name: str
    address: str
    speed_mbps: int
    state: str
    paths: tuple[PathEntry, ...]
    nrepairs: int


class MemoryReport(msgspec.Struct, frozen=True):
    """Memory of one rank in bytes, without shared memory and Python itself.

    Arrays of the caller count only in ``registered_nbytes``, if they are registered. The first
    three attributes grow with the number of paths and links that are in use, not with the number of
    ranks: docs/scale.md has the bounds.

    Attributes
    ----------
    landing_nbytes : int
        Landing places of slices that are reduced, and the memory of calls in compiled code.
    eager_nbytes : int
        Copies of eager slices that their receivers have not confirmed.
    ring_nbytes, staging_nbytes, registered_nbytes : int
        Memory of the transport: see `r2ccl.transport.base.MemoryUse`. 0 over TCP.
    """

    landing_nbytes: int
    eager_nbytes: int
    ring_nbytes: int
    staging_nbytes: int
    registered_nbytes: int

    def __str__(self) -> str:
        sizes = msgspec.structs.asdict(self).items()
        shown = (f"{name.removesuffix('_nbytes')} {nbytes}" for name, nbytes in sizes)
        return f"memory in bytes: {', '.join(shown)}"


class HealthReport(msgspec.Struct, frozen=True):
    """State of all rails and memory use of one rank at time ``now_s``; ``str()`` is for people."""

    rank: int
    now_s: float
    rails: tuple[RailHealth, ...]
    memory: MemoryReport

    def __str__(self) -> str:
        lines = [f"rank {self.rank}"]
        for rail in self.rails:
            nrepairs = f", {rail.nrepairs} repairs" if rail.nrepairs else ""
            lines.append(f"  rail {rail.rail} ({rail.name}): {rail.state}{nrepairs}")
            for path in rail.paths:
                if path.cause:
                    before = "last out of use: " if path.state == PathState.UP.value else ""
                    age_s = self.now_s - path.since_s
                    lines.append(
                        f"    to rank {path.peer}: {path.state} for {age_s:.1f} s "
                        f"({before}{path.cause})"
                    )
        return "\n".join([*lines, f"  {self.memory}"])


class AgreedHealth(msgspec.Struct, frozen=True):
    """Newest health of all ranks' rails that this rank has received.

    Attributes
    ----------
    version : int
    since_s : float
        Time at which this rank received the health.
    shares : tuple of tuple of int
        Remaining bandwidth by rank (of the communicator) and rail, in sixteenths of the whole; 0:
        the rail is down.
    excluded : tuple of (int, int)
        Rank (of the communicator) and rail of each excluded NIC.
    """

    version: int
    since_s: float
    shares: tuple[tuple[int, ...], ...]
    excluded: tuple[tuple[int, int], ...] = ()


class HeldPath(msgspec.Struct, frozen=True):
    """Path out of use that must answer probes before it is used again.

    The path has failed, or its exclusion has ended. It must answer ``R2CC_FAILBACK_PROBES`` probes
    in a row, and all probes for ``hold_s`` seconds; if ``hold_s`` is 0, there is no such period. If
    no other path to the peer is up, the path is used earlier.
    """

    peer: int
    rail: int
    hold_s: float


class RankStatus(msgspec.Struct, frozen=True):
    """Full status of one rank.

    ``now_s`` is the time of this reading. ``error`` is the error that ended the communicator, or
    empty. ``nconnects`` is the number of calls and messages that connected data paths before their
    first slice. ``operations`` has the collective in the data loop, if any. ``health`` is None with
    ``R2CC_MODE=failstop``. ``held`` has the paths to higher ranks that must answer probes before
    they are used again; the lower of two ranks restores a path, so paths to lower ranks are absent.
    ``planning`` has the number and the times of the plans made with the same health as the last
    plan.
    """

    rank: int
    nranks: int
    now_s: float
    error: str
    nconnects: int
    planning: Planning
    memory: MemoryReport
    pending: Pending
    operations: tuple[Operation, ...]
    paths: tuple[PathEntry, ...]
    links: tuple[LinkEntry, ...]
    peers: tuple[PeerEntry, ...]
    repairs: tuple[Repair, ...]
    health: AgreedHealth | None
    verdicts: tuple[str, ...]
    held: tuple[HeldPath, ...]


def waits_of_call(links: Links, context_id: int, runs: Iterable[LaneRun]) -> tuple[Wait, ...]:
    """Return the slices, landing places, slots and confirmations that a collective waits for.

    `context_id` is the id of the collective's communicator; `runs` has the collective's lanes.
    """
    found = []
    for (peer, channel), receiver in links.receivers.copy().items():
        seq = receiver.delivered
        landing = receiver.landings.get(seq)
        if landing is not None and context_of(channel) == context_id:
            # The sender of an eager slice chooses the path, so `landing.path` is None.
            found.append(Wait(peer, "slice", channel, seq, _rail(landing.path)))
    for run in runs:
        for sender, is_eager in run.stalled():
            what = "free slot" if is_eager else "landing place"
            found.append(Wait(sender.peer, what, sender.channel, sender.posted))
    return (
        *found,
        *waits_for_confirmation(links, is_eager_too=False, context_id=context_id),
    )


def waits_for_confirmation(
    links: Links, *, is_eager_too: bool, context_id: int | None = None
) -> tuple[Wait, ...]:
    """Return one `Wait` per link whose peer has not confirmed all slices.

    Eager slices count only if `is_eager_too`; a call does not wait for their confirmation. The
    links are those of the communicator with `context_id`, or of all communicators if it is None.
    """
    return tuple(
        Wait(peer, "confirmation", channel, link.confirmed)
        for (peer, channel), link in links.senders.copy().items()
        if context_id in (None, context_of(channel))
        and any(is_eager_too or not item.is_eager for item in link.outstanding.copy())
    )


def path_entries(links: Links) -> tuple[PathEntry, ...]:
    """Return the entries of all paths on rails, and of the bypasses that were ever in use."""
    return tuple(_path(path, links) for path in links.paths.copy().values() if _is_shown(path))


def peer_entries(
    peers: Iterable[PeerInfo], last_heard: Callable[[int], float | None], ops: Mapping[int, int]
) -> tuple[PeerEntry, ...]:
    """Return the entries of `peers`.

    ``ops[peer]`` is the number of the last collective in which `peer` was seen; absent: none.
    """
    return tuple(_peer(each, last_heard(each.rank), ops.get(each.rank, 0)) for each in peers)


def agreed(known: Known | None) -> AgreedHealth | None:
    """Convert the agreed health `known` to a status entry; return None if `known` is None."""
    if known is None:
        return None
    health, since_s = known
    rails = range(health.nrails)
    shares = (tuple(health.share(rank, rail) for rail in rails) for rank in range(health.nranks))
    return AgreedHealth(health.version, since_s, tuple(shares), health.excluded)


def spelled(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Return the text of each verdict, preceded by the path that it describes."""
    return tuple(f"rail {each.path.rail} to rank {each.path.peer}: {each}" for each in verdicts)


def _peer(info: PeerInfo, heard_s: float | None, last_op: int) -> PeerEntry:
    return PeerEntry(info.rank, info.hostname, info.pid, heard_s, last_op)


def link_entries(links: Links) -> tuple[LinkEntry, ...]:
    """Return one entry per peer and channel, for the links of both directions."""
    receivers = links.receivers.copy()
    return tuple(
        LinkEntry(
            peer,
            channel,
            _rail(sender.route),
            sender.posted,
            sender.confirmed,
            receiver.posted,
            receiver.received,
            receiver.delivered,
            receiver.consumed,
            receiver.duplicates,
        )
        for (peer, channel), sender in links.senders.copy().items()
        if (receiver := receivers.get((peer, channel))) is not None
    )


def rails(
    links: Links, repairs: Iterable[Repair], nics: Sequence[Nic], excluded: Collection[int] = ()
) -> tuple[RailHealth, ...]:
    """Return the state of every rail of this rank.

    ``nics[i]`` is the local NIC of rail i; `excluded` has the rails whose local NIC is excluded.
    """
    found, repaired = [], Counter(repair.rail for repair in repairs)
    for rail, nic in enumerate(nics):
        on_rail = [path for key, path in dict(links.on_rails).items() if key.rail == rail]
        entries = tuple(_path(path, links) for path in on_rail)
        states = [entry.state == PathState.UP.value for entry in entries if entry.state != _CLOSED]
        state = "up" if all(states) else "degraded" if any(states) else "down"
        if rail in excluded:
            state = "excluded"
        found.append(
            RailHealth(rail, nic.name, nic.address, nic.speed_mbps, state, entries, repaired[rail])
        )
    return tuple(found)


def _is_shown(path: Path) -> bool:
    return not path.key.is_bypass or path.state is not PathState.DOWN or path.epoch > 0


def _path(path: Path, links: Links) -> PathEntry:
    is_closed = not path.key.is_bypass and path.key.peer not in links.connected
    is_spotless = path.state is PathState.UP and path.epoch == 0
    return PathEntry(
        path.key.peer,
        path.key.rail,
        _CLOSED if is_closed else path.state.value,
        path.epoch,
        "" if is_closed or is_spotless else path.cause,
        path.since_s,
        path.nslices_sent,
        path.nslices_received,
        path.nbytes_sent,
        path.nbytes_received,
    )


def _rail(path: PathKey | None) -> int | None:
    return None if path is None else path.rail


def _listed(items: list[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


#: Maximum number of items that `_listed` names; the attributes of `Pending` hold all items.
_SHOWN = 8
#: State of a path that this rank or the peer has closed because it was idle.
_CLOSED = "closed"

__all__ = [
    "AgreedHealth",
    "HealthReport",
    "HeldPath",
    "LinkEntry",
    "MemoryReport",
    "Operation",
    "PathEntry",
    "PeerEntry",
    "Pending",
    "RailHealth",
    "RankStatus",
    "Wait",
    "agreed",
    "link_entries",
    "path_entries",
    "peer_entries",
    "rails",
    "spelled",
    "waits_for_confirmation",
    "waits_of_call",
]
