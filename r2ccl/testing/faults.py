"""Faults as values: an action, its target, and the moment it strikes.

Must not import sockets or processes. Invariant: a fault that exists is well-formed on its own;
`check_fits` adds that it fits a lab.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from r2ccl.errors import InvalidArgument


class Action(enum.StrEnum):
    """What a fault does to its target."""

    #: The node's own NIC goes down: its owner gets a netlink event, the peer sees nothing.
    NIC_DOWN = "nic_down"
    #: The switch's port goes down: the NIC's owner loses its carrier.
    SWITCH_PORT_DOWN = "switch_port_down"
    #: Carrier stays up, nothing arrives in either direction.
    BLACKHOLE = "blackhole"
    #: Just one pair of nodes cannot reach each other on a rail, silently.
    ISOLATE = "isolate"
    #: The NIC is shaped to another rate.
    SLOW = "slow"
    #: The NIC goes down and up at random intervals, and ends up.
    FLAP = "flap"
    #: Undo every NIC fault of a NIC, a node or the whole lab.
    RESTORE = "restore"
    #: SIGSTOP to a rank, SIGCONT after `duration_s`.
    STOP = "stop"
    #: SIGKILL to a rank.
    KILL = "kill"


class _Needs(msgspec.Struct, frozen=True):
    required: frozenset[str]
    optional: frozenset[str] = frozenset()


def _needs(required: str, optional: str = "") -> _Needs:
    return _Needs(frozenset(required.split()), frozenset(optional.split()))


#: The fields an action must have and may have beside its trigger.
_FIELDS = {
    Action.NIC_DOWN: _needs("node rail", "rank duration_s"),
    Action.SWITCH_PORT_DOWN: _needs("node rail", "rank duration_s"),
    Action.BLACKHOLE: _needs("node rail", "rank duration_s"),
    Action.ISOLATE: _needs("node peer rail", "rank duration_s"),
    Action.SLOW: _needs("node rail rate", "rank duration_s"),
    Action.FLAP: _needs("node rail duration_s", "rank mean_s seed"),
    Action.RESTORE: _needs("", "node rail rank"),
    Action.STOP: _needs("rank duration_s"),
    Action.KILL: _needs("rank"),
}

_TRIGGER = frozenset({"at_s", "at_op", "at_step"})
#: tc's spelling of a rate.
RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[kmg]?bit")


class Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One thing that goes wrong.

    Parameters
    ----------
    action : Action
    node, rail : int, optional
        The NIC; required for NIC faults. Of ``restore``, what is left out means all of them.
    peer : int, optional
        The other node of an ``isolate``.
    rank : int, optional
        Target of ``stop`` and ``kill``. For the others, the rank whose progress triggers an
        `at_op`; left out, it is the first rank of `node`, or rank 0.
    at_s : float, optional
        Seconds after the ranks were started.
    at_op, at_step : int, optional
        The operation, and the slice the triggering rank posts within it, before which the fault
        is applied; both count from 0, `at_step` is 0 unless given.
    duration_s : float, optional
        The fault undoes itself after this many seconds; left out, it stays.
    rate : str
        Of ``slow``, in tc's spelling: ``20mbit``.
    mean_s : float
        Of ``flap``, mean of the exponentially distributed intervals between changes.
    seed : int
        Of ``flap``, seed of the intervals.

    Raises
    ------
    InvalidArgument
        A field is missing, does not belong to the action, or is out of range.
    """

    action: Action
    node: int | None = None
    rail: int | None = None
    peer: int | None = None
    rank: int | None = None
    at_s: float | None = None
    at_op: int | None = None
    at_step: int | None = None
    duration_s: float | None = None
    rate: str | None = None
    mean_s: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        try:
            # A plain string given in Python becomes the member it spells.
            msgspec.structs.force_setattr(self, "action", Action(self.action))
        except ValueError as exc:
            raise InvalidArgument(
                f"unknown fault action {self.action!r}; allowed: {', '.join(Action)}"
            ) from exc
        given = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        needs = _FIELDS[self.action]
        missing = needs.required - given
        if missing:
            raise self._bad(f"needs {', '.join(sorted(missing))}")
        alien = given - needs.required - needs.optional - _TRIGGER - {"action"}
        if alien:
            raise self._bad(f"has no use for {', '.join(sorted(alien))}")
        if self.at_s is not None and self.at_op is not None:
            raise self._bad("is triggered by at_s or by at_op, not by both")
        if self.at_step is not None and self.at_op is None:
            raise self._bad("has at_step without at_op")
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name in ("node", "rail", "peer", "rank", "at_s", "at_op", "at_step", "seed"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise self._bad(f"has {name}={value}; it must be 0 or more")
        for name in ("duration_s", "mean_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e6:
                raise self._bad(f"has {name}={value}; it must be seconds, above 0")
        if self.peer is not None and self.peer == self.node:
            raise self._bad(f"isolates node {self.node} from itself")
        if self.rate is not None and not RATE.fullmatch(self.rate):
            raise self._bad(f"has rate={self.rate!r}; write it like 20mbit")

    @property
    def is_on_nic(self) -> bool:
        """Whether the target is a NIC (or, of ``restore``, NICs) rather than a process."""
        return self.action not in (Action.STOP, Action.KILL)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read the command line's form: ``nic_down:node=1,rail=2,at_op=3,at_step=5``.

        Raises
        ------
        InvalidArgument
            Malformed; says what is allowed.
        """
        action, _, rest = text.partition(":")
        fields: dict[str, Any] = {"action": action.strip()}
        for item in filter(None, (part.strip() for part in rest.split(","))):
            name, equals, value = item.partition("=")
            if not equals or name in fields:
                raise InvalidArgument(
                    f"fault {text!r}: {item!r} is not name=value, or is there twice; "
                    "example: nic_down:node=1,rail=2,at_op=3,at_step=5"
                )
            fields[name] = value
        return _convert(fields, cls, f"fault {text!r}")

    def triggered_by(self, ranks_per_node: int = 1) -> int:
        """Return the rank whose progress triggers an `at_op`."""
        if self.rank is not None:
            return self.rank
        return (self.node or 0) * ranks_per_node

    def __str__(self) -> str:
        fields = (
            f"{name}={getattr(self, name)}"
            for name in self.__struct_fields__[1:]
            if getattr(self, name) is not None
        )
        return f"{self.action}:{','.join(fields)}"

    def _bad(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"fault {self} {what}")


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """That a fault was applied.

    ``time_s`` and ``applied_s`` are CLOCK_MONOTONIC seconds, comparable between the processes of a
    machine: just before the fault was asked of the kernel, and when the kernel had done it. The
    effect begins between the two; latencies counted from ``time_s`` are never flattered.
    """

    index: int
    fault: Fault
    time_s: float
    applied_s: float


def check_fits(fault: Fault, *, nodes: int, rails: int, ranks_per_node: int = 1) -> None:
    """Raise InvalidArgument where `fault` names a node, rail or rank that does not exist."""
    limits = {
        "node": nodes,
        "peer": nodes,
        "rail": rails,
        "rank": nodes * ranks_per_node,
    }
    for name, limit in limits.items():
        value = getattr(fault, name)
        if value is not None and value >= limit:
            raise InvalidArgument(
                f"fault {fault}: {name} {value} does not exist; 0..{limit - 1} do"
            )


def _convert(fields: dict[str, Any], kind: type[Fault], what: str) -> Fault:
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as exc:
        # msgspec wraps the ValueError of __post_init__; that one already speaks for itself.
        if isinstance(exc.__cause__, InvalidArgument):
            raise exc.__cause__ from None
        raise InvalidArgument(
            f"{what}: {exc}; actions: {', '.join(Action)}; "
            f"fields: {', '.join(kind.__struct_fields__[1:])}"
        ) from exc


__all__ = ["RATE", "Action", "Fault", "Firing", "check_fits"]
