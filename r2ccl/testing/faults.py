"""Faults as values: an action, a target and, for faults of a plan, a trigger.

`Fault` validates its own fields on construction. `check_fits` checks that the nodes, rail and rank
of a fault exist in a lab.
"""

from __future__ import annotations

import enum
import math
import re
from numbers import Integral, Real
from typing import Any

import msgspec

from r2ccl.errors import InvalidArgument


class Action(enum.StrEnum):
    """Effect of a fault on its target."""

    #: The NIC goes down at its own node: the node gets a netlink event, its peers get none.
    NIC_DOWN = "nic_down"
    #: The switch port of the NIC goes down: the NIC loses its carrier.
    SWITCH_PORT_DOWN = "switch_port_down"
    #: The NIC keeps its carrier, but all packets are dropped in both directions.
    BLACKHOLE = "blackhole"
    #: On one rail, packets between one pair of nodes are dropped; carriers stay up.
    ISOLATE = "isolate"
    #: The NIC is shaped to `rate`.
    SLOW = "slow"
    #: The NIC goes down and up at random intervals; after `duration_s` it stays up.
    FLAP = "flap"
    #: All NIC faults of a NIC, a node, a rail or the whole lab are undone.
    RESTORE = "restore"
    #: A rank gets SIGSTOP, and SIGCONT after `duration_s`.
    STOP = "stop"
    #: A rank gets SIGKILL.
    KILL = "kill"


class _Needs(msgspec.Struct, frozen=True):
    required: frozenset[str]
    optional: frozenset[str] = frozenset()


def _needs(required: str, optional: str = "") -> _Needs:
    return _Needs(frozenset(required.split()), frozenset(optional.split()))


#: Required and optional fields of each action, besides its trigger.
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
#: Rates that faults and labs accept, in tc's syntax.
RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[kmg]?bit")


class Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One fault: its action, its target and, if it belongs to a plan, its trigger.

    Parameters
    ----------
    action : Action
    node, rail : int, optional
        Node and rail of the NIC. Faults of NICs require both, except ``restore``: without `node`
        it applies to all nodes, without `rail` to all rails.
    peer : int, optional
        The other node of an ``isolate``.
    rank : int, optional
        The rank whose progress triggers a fault with `at_op`; for ``stop`` and ``kill`` also the
        target. Default, for other actions: the first rank of `node`, or rank 0 without a `node`.
    at_s : float, optional
        Trigger: seconds after the start of the ranks.
    at_op, at_step : int, optional
        Trigger: the fault is applied before the triggering rank posts slice `at_step` of
        collective `at_op`. `at_op` counts the user's collectives, `at_step` the slices that this
        rank sends in the collective; both count from 0. `at_step` is 0 by default.
    duration_s : float, optional
        The fault is undone after this many seconds; required for ``flap`` and ``stop``. Default:
        the fault stays in force until a ``restore``. Not allowed without a netlab: the library then
        reconnects the paths of a ``nic_down`` as soon as it can.
    rate : str, optional
        Rate of ``slow`` in tc's syntax, such as ``20mbit``.
    mean_s : float, optional
        For ``flap``: mean in seconds of the exponentially distributed intervals between changes;
        0.1 by default.
    seed : int, optional
        For ``flap``: seed of the random intervals; 0 by default.

    Raises
    ------
    InvalidArgument
        If the action is unknown; if a field is missing, malformed, out of range or does not belong
        to the action; if `peer` equals `node`; or if the trigger is both `at_s` and `at_op`, or
        `at_step` without `at_op`.
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
            # Accept a plain string for the action, and store the enum member.
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
            raise self._bad(f"does not take {', '.join(sorted(alien))}")
        if self.at_s is not None and self.at_op is not None:
            raise self._bad("has both at_s and at_op; give only one")
        if self.at_step is not None and self.at_op is None:
            raise self._bad("has at_step without at_op; give at_op too")
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name in ("node", "rail", "peer", "rank", "at_op", "at_step", "seed"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_integer(value, 0):
                raise self._bad(f"has {name}={value!r}; it must be an integer, 0 or more")
            # Convert NumPy integers, which msgspec cannot encode.
            msgspec.structs.force_setattr(self, name, int(value))
        for name in ("at_s", "duration_s", "mean_s"):
            value = getattr(self, name)
            if value is None:
                continue
            may_be_0 = name == "at_s"
            allowed = "0 or more" if may_be_0 else "more than 0"
            # NaN fails each comparison.
            is_time = isinstance(value, Real) and 0 <= float(value) < 1e6
            if not is_time or (value == 0 and not may_be_0):
                raise self._bad(
                    f"has {name}={value!r}; it must be {allowed} and less than 1e6 seconds"
                )
            msgspec.structs.force_setattr(self, name, float(value))
        if self.peer is not None and self.peer == self.node:
            raise self._bad(f"isolates node {self.node} from itself; node and peer must differ")
        if self.rate is not None and not is_text(self.rate, RATE):
            raise self._bad(f"has rate={self.rate!r}; write it like 20mbit")

    @property
    def is_on_nic(self) -> bool:
        """True if the fault acts on NICs, False if it acts on the process of a rank."""
        return self.action not in (Action.STOP, Action.KILL)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse the command-line form, such as ``nic_down:node=1,rail=2,at_op=3,at_step=5``.

        Raises
        ------
        InvalidArgument
            If `text` is malformed, if its action or a field is unknown (the message lists the
            allowed actions and fields), or if the fault is invalid (see `Fault`).
        """
        action, _, rest = text.partition(":")
        fields: dict[str, Any] = {"action": action.strip()}
        for item in filter(None, (part.strip() for part in rest.split(","))):
            name, equals, value = item.partition("=")
            if not equals or name in fields:
                why = f"{name!r} occurs twice" if equals else f"{item!r} is not name=value"
                raise InvalidArgument(
                    f"fault {text!r}: {why}; example: nic_down:node=1,rail=2,at_op=3,at_step=5"
                )
            fields[name] = value
        return _convert(fields, cls, f"fault {text!r}")

    def triggered_by(self, ranks_per_node: int = 1) -> int:
        """Return the rank whose progress triggers the fault if it has `at_op`.

        It is `rank` if given, otherwise the first rank of `node`, or rank 0 if there is no `node`.
        """
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
    """Record of an applied fault.

    Attributes
    ----------
    index : int
        Position of the fault in its plan; -1 if it was applied without a plan.
    fault : Fault
    time_s, applied_s : float
        Times before and after the fault was applied, in CLOCK_MONOTONIC seconds, which are
        comparable between processes of one machine. The fault takes effect between these times, so
        a latency measured from `time_s` is never too short.
    """

    index: int
    fault: Fault
    time_s: float
    applied_s: float


def is_integer(value: Any, least: int, most: float = math.inf) -> bool:
    """Return True if `value` is a Python or NumPy integer from `least` to `most`."""
    return isinstance(value, Integral) and least <= int(value) <= most


def is_text(value: Any, pattern: re.Pattern[str]) -> bool:
    """Return True if `value` is a string and `pattern` matches all of it."""
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def check_fits(fault: Fault, *, nodes: int, rails: int, ranks_per_node: int = 1) -> None:
    """Raise InvalidArgument if a lab of this size lacks a node, rail or rank of `fault`."""
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
                f"fault {fault}: {name} {value} does not exist; allowed is 0 to {limit - 1}"
            )


def _convert(fields: dict[str, Any], kind: type[Fault], what: str) -> Fault:
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as exc:
        # msgspec wraps the InvalidArgument of __post_init__, whose message is already complete.
        if isinstance(exc.__cause__, InvalidArgument):
            raise exc.__cause__ from None
        raise InvalidArgument(
            f"{what}: {exc}; actions: {', '.join(Action)}; "
            f"fields: {', '.join(kind.__struct_fields__[1:])}"
        ) from exc


__all__ = ["RATE", "Action", "Fault", "Firing", "check_fits", "is_integer", "is_text"]
