"""Verdict: what broke, told from who still answers whom.

Theory of operation
-------------------
A path (peer, rail) joins two *ports*, this rank's and the peer's; a port stands for the NIC, its
cable and the switch's socket it is plugged into. When the port itself says that it is down, that
settles it. Else ports are asked for signs of life (`r2ccl.transport.base.Transport.probe`), which
the NIC or the kernel answers and never the process. From three points one can tell which part is
at fault::

    local -> remote   aux -> remote   local -> aux   verdict
    ------------------------------------------------------------------------------------
    works             -               -              the peer is slow: do not migrate
    fails             fails           works          the remote NIC
    fails             works           fails          the local NIC
    fails             works           works          the link between them
    fails             fails           fails          the rail (its switch), or, if two ports beside
                                                     them reach each other, both NICs: this rank
                                                     names its own, as the peer names its
    fails             not known       not known      the path: not told apart

An answer is a fact: both ports, and what is between them, work. Silence is one only if the end
that noticed it, or was not reached, is known to work from another answer: else an auxiliary that
is itself broken would accuse others. On a dead rail nobody can vouch for anybody, so there a third
rank that is silent both ways counts.

So LINK and PEER_SLOW rest on answers and hold whatever else is broken. LOCAL_NIC and REMOTE_NIC
explain the silence by one broken part instead of several cut pairs. RAIL says that no two of the
ports that were asked reach each other on it.

Pure values and functions: no I/O, no clock. Invariant: a verdict names a part only on evidence it
carries; PATH is the answer when there is too little.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.types import PathKey, ProbeKey


class VerdictKind(enum.Enum):
    """What is at fault, seen from the rank that judges."""

    LOCAL_NIC = "local_nic"
    REMOTE_NIC = "remote_nic"
    LINK = "link"
    RAIL = "rail"
    #: The peer's process: every port that was asked works. Nothing should move.
    PEER_SLOW = "peer_slow"
    #: One connection: its ports work, it does not. It should move.
    FLOW = "flow"
    #: Not told apart.
    PATH = "path"
    #: Every rail to the peer and its session are silent.
    PEER = "peer"


class Port(NamedTuple):
    """One rank's end of one rail."""

    rank: int
    rail: int


class Reading(msgspec.Struct, frozen=True):
    """What came of one question; ``is_answered`` as in `r2ccl.transport.base.Probed`."""

    asker: Port
    target: Port
    is_answered: bool | None
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """What broke and how that is known; its ``str`` is what a user reads.

    Attributes
    ----------
    kind : VerdictKind
    path : PathKey
    where : str
        The part, by name.
    evidence : tuple of str
    readings : tuple of Reading
        Answers of the probes, in the order they came.
    when_s : float
        Reading of the clock.
    is_down : bool
        Whether the path is of no use; False means that nothing should move.
    sequel : str
        What was done about it, if its owner has added that.
    """

    kind: VerdictKind
    path: PathKey
    where: str
    evidence: tuple[str, ...]
    readings: tuple[Reading, ...]
    when_s: float
    is_down: bool
    sequel: str = ""

    def __str__(self) -> str:
        parts = (f"{self.where}: {WORDS[self.kind]}", *self.evidence, self.sequel)
        return "; ".join(part for part in parts if part)


class ProbeRequest(msgspec.Struct, frozen=True, tag="probe_request"):
    """Control message: probe `key` from your own port ``key.via`` and answer with `ProbeReply`."""

    number: int
    key: ProbeKey


class ProbeReply(msgspec.Struct, frozen=True, tag="probe_reply"):
    """Control message: what became of the `ProbeRequest` of this number."""

    number: int
    key: ProbeKey
    is_answered: bool | None
    detail: str


class Finding(msgspec.Struct, frozen=True, tag="finding"):
    """Control message to the other end of the path: what this end found, as this end sees it."""

    rail: int
    epoch: int
    kind: VerdictKind
    text: str


class Columns(NamedTuple):
    """The table's columns; None: not known. ``beside``: two other ports of the rail reach."""

    direct: bool | None
    to_remote: bool | None
    from_local: bool | None
    beside: bool | None


#: Rows are tried in order; None matches anything. Without a match: PATH.
TABLE: tuple[tuple[Columns, VerdictKind], ...] = (
    (Columns(True, None, None, None), VerdictKind.PEER_SLOW),
    (Columns(False, False, True, None), VerdictKind.REMOTE_NIC),
    (Columns(False, True, False, None), VerdictKind.LOCAL_NIC),
    (Columns(False, True, True, None), VerdictKind.LINK),
    (Columns(False, False, False, True), VerdictKind.LOCAL_NIC),
    (Columns(False, False, False, None), VerdictKind.RAIL),
)

#: Statuses by which a port speaks of itself.
PORT_STATUSES = frozenset({"CARRIER_DOWN", "PORT_ERR"})

#: (own port says it is down, the peer's does) -> kind. Both at once: what is between them, for a
#: switch without power takes the carrier of every port that is plugged into it.
HARD: dict[tuple[bool, bool], VerdictKind] = {
    (True, False): VerdictKind.LOCAL_NIC,
    (False, True): VerdictKind.REMOTE_NIC,
    (True, True): VerdictKind.RAIL,
}

#: How each kind reads, after the name of the part.
WORDS: dict[VerdictKind, str] = {
    VerdictKind.LOCAL_NIC: "local NIC, its cable or switch port",
    VerdictKind.REMOTE_NIC: "remote NIC, its cable or switch port",
    VerdictKind.LINK: "link between two NICs that work",
    VerdictKind.RAIL: "rail, its switch",
    VerdictKind.PEER_SLOW: "slow, its ports answer; nothing moves",
    VerdictKind.FLOW: "one connection, the ports answer",
    VerdictKind.PATH: "path, not told apart",
    VerdictKind.PEER: "dead or cut off, every rail and its session are silent",
}

#: What one end's finding is for the other; other kinds are no news for it.
MIRRORED: dict[VerdictKind, VerdictKind] = {
    VerdictKind.LOCAL_NIC: VerdictKind.REMOTE_NIC,
    VerdictKind.REMOTE_NIC: VerdictKind.LOCAL_NIC,
    VerdictKind.LINK: VerdictKind.LINK,
    VerdictKind.RAIL: VerdictKind.RAIL,
}

#: Name of a rank's port of a rail, such as ``node 2 eth3``.
Naming = Callable[[int, int], str]


def is_port_status(cause: str) -> bool:
    """Whether `cause`, ``STATUS: what happened``, is a port's own word."""
    return cause.partition(":")[0] in PORT_STATUSES


def judge(columns: Columns) -> VerdictKind:
    """Look `columns` up in `TABLE`."""
    for row, kind in TABLE:
        cells = zip(row, columns, strict=True)
        if all(cell is None or cell is seen for cell, seen in cells):
            return kind
    return VerdictKind.PATH


def arrange(readings: Iterable[Reading], local: Port, remote: Port) -> Columns:
    """Turn answers into the table's columns, leaving out silence nobody vouches for.

    Parameters
    ----------
    readings : iterable of Reading
    local, remote : Port
        Ends of the path in question.
    """
    found = list(readings)
    alive = working(found)
    ends = {local, remote}
    direct = _between(found, local, remote)
    if direct is None:  # the way back is the same way
        direct = _between(found, remote, local) or None
    silent = [r for r in found if r.is_answered is False and {r.asker, r.target} != ends]
    to_remote = remote in alive or _denied(r.asker in alive for r in silent if r.target == remote)
    from_local = local in alive or _denied(r.target in alive for r in silent if r.asker == local)
    on_rail = {port for port in alive if port.rail == local.rail}
    if not on_rail and _is_silent_both_ways(silent, local, remote):
        to_remote = from_local = False
    beside = True if on_rail - ends else None
    return Columns(direct, to_remote, from_local, beside)


def working(readings: Iterable[Reading]) -> set[Port]:
    """Return the ports known to work: those at both ends of an answer."""
    return {port for r in readings if r.is_answered for port in (r.asker, r.target)}


def place(kind: VerdictKind, me: int, path: PathKey, name: Naming) -> str:
    """Name the part that `kind` puts at fault on `path` of rank `me`."""
    local, remote = name(me, path.rail), name(path.peer, path.rail)
    if kind is VerdictKind.LOCAL_NIC:
        return local
    if kind is VerdictKind.REMOTE_NIC:
        return remote
    if kind is VerdictKind.RAIL:
        return f"rail {path.rail}"
    if kind in (VerdictKind.PEER, VerdictKind.PEER_SLOW):
        return f"rank {path.peer}"
    return f"{local} - {remote}"


def describe(readings: Sequence[Reading], name: Naming) -> tuple[str, ...]:
    """Spell answers, one text each."""
    words = {True: "answered", False: "no answer", None: "could not be asked"}
    return tuple(
        f"{name(*r.asker)} -> {name(*r.target)}: {words[r.is_answered]}"
        + (f" ({r.detail})" if r.detail else "")
        for r in readings
    )


def _between(readings: Iterable[Reading], asker: Port, target: Port) -> bool | None:
    """What became of the question that `asker` put to `target`; None also if it put none."""
    for reading in readings:
        if (reading.asker, reading.target) == (asker, target):
            return reading.is_answered
    return None


def _denied(vouched: Iterable[bool]) -> bool | None:
    """False if any silence is vouched for, else not known."""
    return False if any(vouched) else None


def _is_silent_both_ways(silent: list[Reading], local: Port, remote: Port) -> bool:
    """Whether a third port of the rail neither reached `remote` nor was reached by `local`."""
    unreached = {r.target for r in silent if r.asker == local}
    unreaching = {r.asker for r in silent if r.target == remote}
    return any(port.rail == local.rail for port in unreached & unreaching)


__all__ = [
    "HARD",
    "MIRRORED",
    "PORT_STATUSES",
    "TABLE",
    "WORDS",
    "Columns",
    "Finding",
    "Naming",
    "Port",
    "ProbeReply",
    "ProbeRequest",
    "Reading",
    "Verdict",
    "VerdictKind",
    "arrange",
    "describe",
    "is_port_status",
    "judge",
    "place",
    "working",
]
