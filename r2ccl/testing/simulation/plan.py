"""Workloads and failure plans of the simulator, as values that print and shrink well.

A `Workload`, a `FailurePlan` and a seed determine a run, event for event. A fault happens before
event number ``at`` of the timeline. All numbers are integers, so that a property test can shrink
them; times are in milliseconds (``_ms``) or microseconds (``_us``).
"""

from __future__ import annotations

import msgspec

from r2ccl.failover.health.table import RailShare
from r2ccl.types import ReduceOp


class CallSpec(msgspec.Struct, frozen=True):
    """One collective call of a simulated job.

    Attributes
    ----------
    count : int
        Number of elements.
    algorithm : str
        Name in `r2ccl.testing.simulation.SCHEDULES`, whose schedule does not depend on the health.
        With `is_planned`, a name in `r2ccl.config.ALGOS`.
    channels : int
        Channels of the schedule; ignored with `is_planned`.
    is_in_place : bool
        True if input and output are the same array.
    dtype : str
        Name of the element type, as `r2ccl.dtypes.dtype_name` returns it.
    op : ReduceOp
    is_planned : bool
        True if the planner makes an allreduce for the health agreed on.
    sizes : tuple of int
        Elements of each part of the buffer, together `count`. Default: equal parts.
    """

    count: int
    algorithm: str = "ring"
    channels: int = 3
    is_in_place: bool = True
    dtype: str = "float32"
    op: ReduceOp = ReduceOp.SUM
    is_planned: bool = False
    sizes: tuple[int, ...] = ()


class Workload(msgspec.Struct, frozen=True):
    """Job of a simulation: the number of ranks and rails, the settings, and the calls in order.

    Attributes
    ----------
    nranks, nrails : int
    calls : tuple of CallSpec
        The calls that all ranks make, one after another.
    slice_nbytes, eager_nbytes, eager_slots, landing_depth : int
        Settings of `r2ccl.config.Config` by the same names.
    busy_ms : tuple of int
        How long each rank computes before each of its calls; repeated if shorter than the number of
        ranks.
    no_rail_timeout_ms : int
        Setting `no_rail_timeout_s`, in milliseconds.
    is_loud : bool
        See `r2ccl.testing.simulation.network.SimNetwork`.
    fabric : str
        ``full``: ports of different rails reach each other. ``rail``: they do not. ``none``: they
        do not, and no bypass is used.
    is_lazy : bool
        True if no data path is connected before a call needs it.
    max_connections : int
        Number of ranks above which a rank closes idle paths to others; 0: no limit.
    slow : tuple of RailShare
        Rails that were measured as slow before the first call; plans take them into account.
    excluded : tuple of (int, int)
        Rank and rail of the rails that are excluded from the start.
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
    is_lazy: bool = False
    max_connections: int = 0
    slow: tuple[RailShare, ...] = ()
    excluded: tuple[tuple[int, int], ...] = ()


class CutPath(msgspec.Struct, frozen=True):
    """Fault: the path between two ranks on one rail breaks.

    Attributes
    ----------
    at : int
        Number of the event before which the path breaks.
    a, b, rail : int
        The two ranks and the rail.
    told : tuple of int
        Ranks that are notified after one latency.
    keep : int
        Pieces in flight in each direction that still land, `late_us` after the cut. A piece is half
        of a cleared slice, or another message.
    late_us : int
    is_stall : bool
        True if lost messages continue after the repair; see `r2ccl.testing.simulation.wire.Cut`.
    restore_us : int
        Time until the path is repaired; 0 means never.
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
    """Fault: a rank's NIC breaks, with all its paths; if `is_seen`, its rank is notified.

    The other attributes are as in `CutPath`.
    """

    at: int
    rank: int
    rail: int
    is_seen: bool = True
    keep: int = 0
    late_us: int = 0
    is_stall: bool = False
    restore_us: int = 0


class Exclude(msgspec.Struct, frozen=True):
    """No fault, but an order: rank `by` excludes a rail of `rank`, or includes it again."""

    at: int
    rank: int
    rail: int
    by: int = 0
    is_excluded: bool = True


class Stop(msgspec.Struct, frozen=True):
    """Fault: a process is stopped (SIGSTOP) for `ms`; its kernel and NICs continue to run."""

    at: int
    rank: int
    ms: int


class Kill(msgspec.Struct, frozen=True):
    """Fault: a process dies."""

    at: int
    rank: int


class Lose(msgspec.Struct, frozen=True):
    """Fault: a message is lost; unless it is a control frame, its connection breaks.

    `number` counts all messages of the run in the order in which they are sent, from 0.
    """

    number: int


class Hold(msgspec.Struct, frozen=True):
    """Fault: message `number`, counted as in `Lose`, is delayed by `ms`.

    Unless it is a control frame, all later messages on its path are delayed too.
    """

    number: int
    ms: int


class Noise(msgspec.Struct, frozen=True):
    """Percentages of control frames that are lost, repeated, and delayed by up to `late_ms`."""

    lose: int = 0
    repeat: int = 0
    late: int = 0
    late_ms: int = 5


Fault = CutPath | NicDown | Exclude | Stop | Kill | Lose | Hold


class FailurePlan(msgspec.Struct, frozen=True):
    """All faults of a run, and the random noise on its control frames."""

    faults: tuple[Fault, ...] = ()
    noise: Noise = Noise()


__all__ = [
    "CallSpec",
    "CutPath",
    "Exclude",
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
