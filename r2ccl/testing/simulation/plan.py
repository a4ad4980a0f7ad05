"""What a simulated job does, and what goes wrong in it: values that shrink and print well.

Values only. Invariant: a `Workload`, a plan and a seed determine a run, event for event.

A fault happens before event number ``at`` of the timeline. All numbers are whole, so that a
property test can shrink them; times are milliseconds (``_ms``) or microseconds (``_us``).
"""

from __future__ import annotations

import msgspec

from r2ccl.failover.health.table import RailShare
from r2ccl.types import ReduceOp


class CallSpec(msgspec.Struct, frozen=True):
    """One collective of ``count`` elements of ``dtype``, by NumPy's name.

    ``algorithm`` names one of `r2ccl.testing.simulation.SCHEDULES`, which stays the same whatever
    the health says. With ``is_planned`` it is one of `r2ccl.config.ALGOS`, and the planner makes
    an allreduce of it for the health agreed on, over as many ``channels`` as it likes.
    """

    count: int
    algorithm: str = "ring"
    channels: int = 3
    is_in_place: bool = True
    dtype: str = "float32"
    op: ReduceOp = ReduceOp.SUM
    is_planned: bool = False


class Workload(msgspec.Struct, frozen=True):
    """What all ranks do, one call after another.

    ``busy_ms[rank]``, if given, is how long that rank computes before each of its calls. ``slow``
    are rails measured to carry less than they should before the first call: plans are made for
    that, and for what breaks. In a ``fabric`` that is ``full`` ports of different rails
    reach each other, in one that is ``rail`` they do not; with ``none`` no rank goes round.
    """

    nranks: int = 3
    nrails: int = 3
    calls: tuple[CallSpec, ...] = (CallSpec(300),)
    slice_nbytes: int = 64
    eager_nbytes: int = 16
    eager_slots: int = 4
    landing_depth: int = 2
    busy_ms: tuple[int, ...] = ()
    no_rail_timeout_ms: int = 5_000
    is_loud: bool = True
    fabric: str = "full"
    slow: tuple[RailShare, ...] = ()


class CutPath(msgspec.Struct, frozen=True):
    """One rail between two ranks breaks; ``told`` of them notice at once.

    ``keep`` halves under way each way still land, ``late_us`` after; ``is_stall``: what is lost
    goes on after the restore. It is restored after ``restore_us``; 0: never.
    """

    at: int
    a: int
    b: int
    rail: int
    told: tuple[int, ...] = ()
    keep: int = 0
    late_us: int = 0
    is_stall: bool = False
    restore_us: int = 0


class NicDown(msgspec.Struct, frozen=True):
    """A rank's NIC breaks, with every path on it; with ``is_seen`` its own rank is told."""

    at: int
    rank: int
    rail: int
    is_seen: bool = True
    keep: int = 0
    late_us: int = 0
    is_stall: bool = False
    restore_us: int = 0


class Stop(msgspec.Struct, frozen=True):
    """A process stands still (SIGSTOP) for ``ms``; its kernel and its NIC go on."""

    at: int
    rank: int
    ms: int


class Kill(msgspec.Struct, frozen=True):
    """A process dies and never comes back."""

    at: int
    rank: int


class Lose(msgspec.Struct, frozen=True):
    """Message ``number`` is lost: a control frame, or with it the path's connection."""

    number: int


class Hold(msgspec.Struct, frozen=True):
    """Message ``number`` is late by ``ms``, with all behind it on its path."""

    number: int
    ms: int


class Noise(msgspec.Struct, frozen=True):
    """Per cent of control frames lost, repeated and late (by up to ``late_ms``)."""

    lose: int = 0
    repeat: int = 0
    late: int = 0
    late_ms: int = 5


Fault = CutPath | NicDown | Stop | Kill | Lose | Hold


class FailurePlan(msgspec.Struct, frozen=True):
    """Everything that goes wrong in a run."""

    faults: tuple[Fault, ...] = ()
    noise: Noise = Noise()


__all__ = [
    "CallSpec",
    "CutPath",
    "FailurePlan",
    "Fault",
    "Hold",
    "Kill",
    "Lose",
    "NicDown",
    "Noise",
    "Stop",
    "Workload",
]
