"""Status of a rank: the calls under way and the peers it waits for, as values and in words.

Read in any thread, also by a signal handler, and without a lock, so that a loop that hangs does
not keep it from being read: each table is copied in one step, and numbers that belong together may
be a slice apart. Times are readings of the clock (CLOCK_MONOTONIC), as in `Repair`.

No I/O. Invariant: reading changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.health.driver import Known
from r2ccl.failover.migration.links import Links
from r2ccl.failover.migration.path import Path, PathState
from r2ccl.failover.migration.repairs import Repair
from r2ccl.runtime.desync_check import DesyncCheck
from r2ccl.runtime.executor import LaneRun
from r2ccl.types import Nic, PathKey, rail_name


class Wait(msgspec.Struct, frozen=True):
    """One thing a rank waits for.

    Attributes
    ----------
    peer : int
        From whom.
    what : str
        ``slice``; ``landing place`` or ``free slot``, for a slice that is ready to be sent;
        ``confirmation``; ``path``; or ``agreement on the health``.
    channel, seq : int or None
        Of the link, where it is one: number `seq` and what follows it.
    rail : int or None
        That it should come over; None: any.
    why : str
        What was in the way last; empty: not known.
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
    """What a rank waits for; ``str()`` says it in words.

    Attributes
    ----------
    rank : int
    doing : str
        The call, with its number and arguments; empty: no call is blocked.
    now_s, since_s : float
        When this was read, and since when the call waits.
    absent : dict of int to int
        Ranks that have not called it as far as this rank knows, and the last collective they were
        seen in (0: none).
    waits : tuple of Wait
    slow : tuple of int
        Ranks found slow since the call waits: their ports answer, and nothing comes.
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
                f"rank {peer} was last seen in call {op}" if op else f"rank {peer} never called"
                for peer, op in self.absent.items()
            ]
            parts.append(f"ranks {sorted(self.absent)} have not called it ({_listed(seen)})")
        if self.waits:
            parts.append(f"it waits for {_listed([str(wait) for wait in self.waits])}")
        if self.slow:
            ranks = _listed([str(rank) for rank in self.slow])
            parts.append(f"the network is not at fault: the ports of ranks {ranks} answer")
        age_s = self.now_s - self.since_s
        said = "; ".join(parts) or "it waits for its own part"
        return f"rank {self.rank}: {self.doing}, begun {age_s:.3g} s ago: {said}"


class PathEntry(msgspec.Struct, frozen=True):
    """One rail to one peer.

    Attributes
    ----------
    peer, rail, epoch : int
    state : str
        ``up``; ``fencing``, ``fenced``: on its way down; ``down``: being dialed.
    cause : str
        Evidence of its last failure; empty: it has not failed.
    since_s : float
        Since when it is in use, or out of use.
    nslices_sent, nslices_received, nbytes_sent, nbytes_received : int
        Payload only; what was sent again counts again.
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
    """Both directions of one channel between this rank and a peer; counts of slices.

    Attributes
    ----------
    peer, channel : int
    rail : int or None
        The route; None: no path is up.
    posted, confirmed : int
        To the peer: given to the link; consumed there, as far as this rank knows.
    wanted, received, delivered, consumed : int
        From the peer: asked for; here without a gap; handed on in order; used up.
    duplicates : int
        From the peer: came twice and were dropped.
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
    """Another rank: where it is, when it was last heard of, the last collective it was seen in."""

    rank: int
    host: str
    pid: int
    heard_s: float
    last_op: int


class Operation(msgspec.Struct, frozen=True):
    """A collective under way; ``nslices_left`` counts slices to send or receive, per channel."""

    op: int
    call: str
    nslices_left: tuple[int, ...]


class RailHealth(msgspec.Struct, frozen=True):
    """One rail of this rank.

    Attributes
    ----------
    rail : int
    name, address : str
        Of the local interface; of an RDMA rail the port (``mlx5_0:1``) and nothing.
    speed_mbps : int
        Nominal; 0: unknown.
    state : str
        ``up`` to all peers, ``down`` to all, or ``degraded``.
    paths : tuple of PathEntry
        By peer.
    nrepairs : int
        How many of the repairs that are remembered began on it.
    """

    rail: int
    name: str
    address: str
    speed_mbps: int
    state: str
    paths: tuple[PathEntry, ...]
    nrepairs: int


class HealthReport(msgspec.Struct, frozen=True):
    """What one rank knows of its own rails now."""

    rank: int
    now_s: float
    rails: tuple[RailHealth, ...]

    def __str__(self) -> str:
        lines = [f"rank {self.rank}"]
        for rail in self.rails:
            nrepairs = f", {rail.nrepairs} repairs" if rail.nrepairs else ""
            lines.append(f"  rail {rail.rail} ({rail.name}): {rail.state}{nrepairs}")
            for path in rail.paths:
                if path.cause:
                    before = "was out of use before, " if path.state == PathState.UP.value else ""
                    age_s = self.now_s - path.since_s
                    lines.append(
                        f"    to rank {path.peer}: {path.state} for {age_s:.1f} s "
                        f"({before}{path.cause})"
                    )
        return "\n".join(lines)


class AgreedHealth(msgspec.Struct, frozen=True):
    """The newest health of all ranks' rails this one has heard of, and since when.

    ``shares[rank]`` has what each rail of a rank carries, in sixteenths; 0: it is down.
    """

    version: int
    since_s: float
    shares: tuple[tuple[int, ...], ...]


class HeldPath(msgspec.Struct, frozen=True):
    """A path that failed and is not used yet: how long it has to be good without a break."""

    peer: int
    rail: int
    hold_s: float


class RankStatus(msgspec.Struct, frozen=True):
    """Everything one rank has under way.

    ``error`` is what ended the communicator, if anything. ``nconnects`` counts the calls that
    connected data paths before their first slice.
    """

    rank: int
    nranks: int
    now_s: float
    error: str
    nconnects: int
    pending: Pending
    operations: tuple[Operation, ...]
    paths: tuple[PathEntry, ...]
    links: tuple[LinkEntry, ...]
    peers: tuple[PeerEntry, ...]
    repairs: tuple[Repair, ...]
    health: AgreedHealth | None
    verdicts: tuple[str, ...]
    held: tuple[HeldPath, ...]


def waits_of_call(links: Links, runs: Iterable[LaneRun]) -> tuple[Wait, ...]:
    """What a collective waits for, link by link."""
    found = []
    for (peer, channel), receiver in links.receivers.copy().items():
        seq = receiver.delivered
        landing = receiver.landings.get(seq)
        if landing is not None:
            # An eager slice comes the way its sender chooses.
            found.append(Wait(peer, "slice", channel, seq, _rail(landing.path)))
    for run in runs:
        for sender, is_eager in run.stalled():
            what = "free slot" if is_eager else "landing place"
            found.append(Wait(sender.peer, what, sender.channel, sender.posted))
    return (*found, *waits_for_confirmation(links, is_eager_too=False))


def waits_for_confirmation(links: Links, *, is_eager_too: bool) -> tuple[Wait, ...]:
    """Links with slices the peer has not confirmed; of eager ones a call does not wait for it."""
    return tuple(
        Wait(peer, "confirmation", channel, link.confirmed)
        for (peer, channel), link in links.senders.copy().items()
        if any(is_eager_too or not item.is_eager for item in link.outstanding.copy())
    )


def last_ops(paths: Mapping[PathKey, Path], desync: DesyncCheck) -> dict[int, int]:
    """Peer to the last collective it was seen in, by its slices or its own word; 0: none."""
    found = dict(desync.said)
    for key, path in dict(paths).items():
        found[key.peer] = max(found[key.peer], path.op)
    return found


def absent(paths: Mapping[PathKey, Path], desync: DesyncCheck, op: int) -> dict[int, int]:
    """Peers not seen in collective `op`, or later, and where they were seen last."""
    return {peer: seen for peer, seen in last_ops(paths, desync).items() if seen < op}


def path_entries(links: Links) -> tuple[PathEntry, ...]:
    """List the paths: all on rails, and the bypasses that were ever in use."""
    return tuple(_path(path) for path in links.paths.copy().values() if _is_shown(path))


def peer_entries(
    peers: Iterable[PeerInfo], last_heard: Callable[[int], float], ops: Mapping[int, int]
) -> tuple[PeerEntry, ...]:
    """List the peers; `ops` are the last collectives they were seen in."""
    return tuple(_peer(each, last_heard(each.rank), ops[each.rank]) for each in peers)


def agreed(known: Known | None) -> AgreedHealth | None:
    """Spell the health that all ranks plan with, or will."""
    if known is None:
        return None
    health, since_s = known
    rails = range(health.nrails)
    shares = (tuple(health.share(rank, rail) for rail in rails) for rank in range(health.nranks))
    return AgreedHealth(health.version, since_s, tuple(shares))


def spelled(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Spell verdicts, each with the path it is about."""
    return tuple(f"rail {each.path.rail} to rank {each.path.peer}: {each}" for each in verdicts)


def _peer(info: PeerInfo, heard_s: float, last_op: int) -> PeerEntry:
    return PeerEntry(info.rank, info.hostname, info.pid, heard_s, last_op)


def link_entries(links: Links) -> tuple[LinkEntry, ...]:
    """List the links, both ways in one entry."""
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
    on_rails: Mapping[PathKey, Path], repairs: Iterable[Repair], nics: Sequence[Nic]
) -> tuple[RailHealth, ...]:
    """Every rail of this rank, by its paths; ``nics[i]`` is the local end of rail i."""
    found, repaired = [], Counter(repair.rail for repair in repairs)
    for rail, nic in enumerate(nics):
        entries = tuple(_path(path) for key, path in dict(on_rails).items() if key.rail == rail)
        up = sum(entry.state == PathState.UP.value for entry in entries)
        state = "up" if up == len(entries) else "degraded" if up else "down"
        found.append(
            RailHealth(rail, nic.name, nic.address, nic.speed_mbps, state, entries, repaired[rail])
        )
    return tuple(found)


def _is_shown(path: Path) -> bool:
    """Whether to list a path: all on rails, and the bypasses that were ever in use."""
    return not path.key.is_bypass or path.state is not PathState.DOWN or path.epoch > 0


def _path(path: Path) -> PathEntry:
    is_spotless = path.state is PathState.UP and path.epoch == 0
    return PathEntry(
        path.key.peer,
        path.key.rail,
        path.state.value,
        path.epoch,
        "" if is_spotless else path.cause,
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


#: Entries of a list that a message spells out; the values have all of them.
_SHOWN = 8

__all__ = [
    "AgreedHealth",
    "HealthReport",
    "HeldPath",
    "LinkEntry",
    "Operation",
    "PathEntry",
    "PeerEntry",
    "Pending",
    "RailHealth",
    "RankStatus",
    "Wait",
    "absent",
    "agreed",
    "last_ops",
    "link_entries",
    "path_entries",
    "peer_entries",
    "rails",
    "spelled",
    "waits_for_confirmation",
    "waits_of_call",
]
