"""Verdict: the part of a path that failed, inferred from the results of probes.

Theory of operation
-------------------
A path (peer, rail) joins two *ports*, this rank's and the peer's. A port stands for the NIC, its
cable and the switch port that the cable is plugged into. A port that reports itself down is at
fault; if both do, the rail is. Otherwise ports are probed
(`r2ccl.transport.base.Transport.probe`). The NIC or the kernel answers a probe, never the process.
Probes between the local port, the remote port and an auxiliary third port (aux) show which part is
at fault::

    local -> remote   aux -> remote   local -> aux   verdict
    ------------------------------------------------------------------------------------
    works             -               -              this connection, if it failed or only
                                                     retransmits; else the peer, which is slow
                                                     (nothing migrates)
    fails             fails           works          the remote NIC
    fails             works           fails          the local NIC
    fails             works           works          the link between them
    fails             fails           fails          the rail (its switch); or both NICs, if two
                                                     other ports reach each other: then each of
                                                     the two ranks names its own NIC
    fails             one or both are not known      the path: the part is not known

The last five rows apply only if the peer can be reached. If the probe local -> remote fails, no
port of the peer answers another probe, and the peer's process does not reply to a request for a
probe, the verdict is PEER, without the table (`r2ccl.failover.diagnosis.protocol`).

An answer proves that both ports, and the network between them, work. An unanswered probe between an
end of the path and an auxiliary port counts only if an answer to another probe shows that the
auxiliary port works. Otherwise a failed auxiliary would put the blame on other ports. On a failed
rail no port can be shown to work. There, unanswered probes count if a third rank neither reaches
the remote port nor is reached from the local port.

LINK and PEER_SLOW therefore rest on answers. LOCAL_NIC and REMOTE_NIC, unless a port reports itself
down, explain the unanswered probes by one failed part instead of several cut connections. RAIL
means that no two of the probed ports reach each other on the rail, or that both ports of the path
report themselves down.

Invariant: a verdict that names a part contains the evidence; otherwise its kind is PATH.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.types import PathKey, ProbeKey


class VerdictKind(enum.Enum):
    """Part at fault, as seen from the rank that makes the verdict."""

    LOCAL_NIC = "local_nic"
    REMOTE_NIC = "remote_nic"
    LINK = "link"
    RAIL = "rail"
    #: The peer's process: the ports of the path work, so the path stays in use.
    PEER_SLOW = "peer_slow"
    #: One connection: it fails although its ports work, so its slices move.
    FLOW = "flow"
    #: The path; there is not enough evidence to name the part.
    PATH = "path"
    #: The peer: no rail to it answers, nor does its control session.
    PEER = "peer"


class Port(NamedTuple):
    """One rank's end of one rail."""

    rank: int
    rail: int


class Reading(msgspec.Struct, frozen=True):
    """Result of the probe of port `target` from port `asker`.

    ``is_answered`` and ``detail`` mean the same as in `r2ccl.transport.base.Probed`, except that
    ``is_answered`` is also None if no result arrived in time.
    """

    asker: Port
    target: Port
    is_answered: bool | None
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """Result of a diagnosis: the part at fault, and the evidence; ``str`` is the text for users.

    Attributes
    ----------
    kind : VerdictKind
    path : PathKey
    where : str
        Name of the part at fault.
    evidence : tuple of str
        Causes found at either end, then the readings in words.
    readings : tuple of Reading
        Results of the probes, in the order they arrived.
    when_s : float
        Time of the verdict, a clock reading in seconds.
    is_down : bool
        True if the path cannot be used; False if it stays in use, as with PEER_SLOW.
    sequel : str
        Description of the repair; empty if there is none, or it is not done yet.
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
    """Control message: asks the receiver to probe `key` from its port on rail ``key.via``.

    The receiver answers with a `ProbeReply` that has the same ``number``.
    """

    number: int
    key: ProbeKey


class ProbeReply(msgspec.Struct, frozen=True, tag="probe_reply"):
    """Control message: result of the `ProbeRequest` with the same number."""

    number: int
    key: ProbeKey
    is_answered: bool | None
    detail: str


class Finding(msgspec.Struct, frozen=True, tag="finding"):
    """Control message to the other end of the path: the sender's verdict on the path in `epoch`.

    ``kind`` is in the sender's view (see `MIRRORED`), ``text`` the evidence in words.
    """

    rail: int
    epoch: int
    kind: VerdictKind
    text: str


class Columns(NamedTuple):
    """Pattern of a row of `TABLE`, or the results of the probes of a path.

    ``direct``: the local port reaches the remote port. ``to_remote``: a third port reaches the
    remote port. ``from_local``: the local port reaches a third port. ``beside``: a third port on
    the rail works. In a pattern, None matches any value; in results, None means not known.
    """

    direct: bool | None
    to_remote: bool | None
    from_local: bool | None
    beside: bool | None


#: Kind of verdict for each pattern of columns. The first match counts; None matches any value.
#: If no row matches, the kind is PATH.
TABLE: tuple[tuple[Columns, VerdictKind], ...] = (
    (Columns(True, None, None, None), VerdictKind.PEER_SLOW),
    (Columns(False, False, True, None), VerdictKind.REMOTE_NIC),
    (Columns(False, True, False, None), VerdictKind.LOCAL_NIC),
    (Columns(False, True, True, None), VerdictKind.LINK),
    (Columns(False, False, False, True), VerdictKind.LOCAL_NIC),
    (Columns(False, False, False, None), VerdictKind.RAIL),
)

#: Statuses by which a port reports itself down.
PORT_STATUSES = frozenset({"CARRIER_DOWN", "PORT_ERR"})

#: (own port reports itself down, the peer's port does) -> kind. If both do, the rail is at fault: a
#: switch without power takes the carrier from every port that is plugged into it.
HARD: dict[tuple[bool, bool], VerdictKind] = {
    (True, False): VerdictKind.LOCAL_NIC,
    (False, True): VerdictKind.REMOTE_NIC,
    (True, True): VerdictKind.RAIL,
}

#: Text of each kind for users, after the name of the part.
WORDS: dict[VerdictKind, str] = {
    VerdictKind.LOCAL_NIC: "the local NIC, its cable or its switch port failed",
    VerdictKind.REMOTE_NIC: "the remote NIC, its cable or its switch port failed",
    VerdictKind.LINK: "the link failed, but both NICs work",
    VerdictKind.RAIL: "the rail (its switch) failed",
    VerdictKind.PEER_SLOW: "the process is slow, but its port answers; the path stays in use",
    VerdictKind.FLOW: "one connection failed, but its ports answer",
    VerdictKind.PATH: "it is not known which part of this path is at fault",
    VerdictKind.PEER: "dead or cut off: neither a rail nor the control session answers",
}

#: The sender's verdict -> the same verdict in the view of the other end. Other kinds are not sent.
MIRRORED: dict[VerdictKind, VerdictKind] = {
    VerdictKind.LOCAL_NIC: VerdictKind.REMOTE_NIC,
    VerdictKind.REMOTE_NIC: VerdictKind.LOCAL_NIC,
    VerdictKind.LINK: VerdictKind.LINK,
    VerdictKind.RAIL: VerdictKind.RAIL,
}

#: Function of rank and rail: returns the name of the port, such as ``rank 2 rail 1 (n2 eth1)``.
Naming = Callable[[int, int], str]


def is_port_status(cause: str) -> bool:
    """Return whether `cause` (``STATUS: detail``) is a port's report that it is down."""
    return cause.partition(":")[0] in PORT_STATUSES


def judge(columns: Columns) -> VerdictKind:
    """Return the kind of verdict that `TABLE` gives for `columns`; PATH if no row matches."""
    for row, kind in TABLE:
        cells = zip(row, columns, strict=True)
        if all(cell is None or cell is seen for cell, seen in cells):
            return kind
    return VerdictKind.PATH


def arrange(readings: Iterable[Reading], local: Port, remote: Port) -> Columns:
    """Return the columns of `TABLE` that the probe results give.

    An unanswered probe to or from a third port counts only if an answer to another probe shows that
    this third port works. If no port of the rail is known to work, unanswered probes count if a
    third port neither reaches `remote` nor is reached from `local`.

    Parameters
    ----------
    readings : iterable of Reading
    local, remote : Port
        Ends of the path that is diagnosed.
    """
    found = list(readings)
    alive = working(found)
    ends = {local, remote}
    direct = _between(found, local, remote)
    if direct is None:  # an answer in the opposite direction proves the same
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
    """Return the ports known to work: both ports of each answered probe."""
    return {port for r in readings if r.is_answered for port in (r.asker, r.target)}


def place(kind: VerdictKind, me: int, path: PathKey, name: Naming) -> str:
    """Return the name of the part that a verdict of `kind` by rank `me` on `path` blames."""
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
    """Return one text per reading: the two ports, the result and, if given, its detail."""
    words = {True: "answered", False: "no answer", None: "result not known"}
    return tuple(
        f"{name(*r.asker)} -> {name(*r.target)}: {words[r.is_answered]}"
        + (f" ({r.detail})" if r.detail else "")
        for r in readings
    )


def _between(readings: Iterable[Reading], asker: Port, target: Port) -> bool | None:
    """Return the result of the first probe of `target` from `asker`; None if there is no result."""
    for reading in readings:
        if (reading.asker, reading.target) == (asker, target):
            return reading.is_answered
    return None


def _denied(vouched: Iterable[bool]) -> bool | None:
    """Return False if any unanswered probe counts, else None (not known).

    `vouched` has an item per unanswered probe: True if its third port is known to work.
    """
    return False if any(vouched) else None


def _is_silent_both_ways(silent: list[Reading], local: Port, remote: Port) -> bool:
    """Return whether a third port on the rail is silent in both directions.

    That is, `local` probed this port, this port probed `remote`, and neither probe was answered.
    """
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
