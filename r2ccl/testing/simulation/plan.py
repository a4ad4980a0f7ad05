"""Workloads and failure plans of the simulator, as values for property tests.

A `Workload`, a `FailurePlan` and a seed determine every event of a run. A fault with an attribute
``at`` happens once ``at`` events of the timeline have happened; if all ranks are done before, it
does not happen. All numbers are integers, so that a property test can shrink them; times are in
milliseconds (``ms`` in the name) or microseconds (``us``).
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
        Number of elements. If `sizes` is empty and the collective is allgather, alltoall or gather,
        it must be a multiple of the number of ranks.
    algorithm : str
        Name of the schedule in `r2ccl.testing.simulation.SCHEDULES`, which determines the
        collective. With `is_planned`, a name in `r2ccl.config.ALGOS`.
    channels : int
        Number of channels; some algorithms use more or fewer. Ignored with `is_planned`.
    is_in_place : bool
        True if input and output are the same array, provided that the schedule allows this.
    dtype : str
        Name of the element type, as `r2ccl.dtypes.dtype_name` returns it.
    op : ReduceOp
        Reduction; ignored by collectives that do not reduce.
    is_planned : bool
        True if the call is an allreduce whose schedule the planner makes, for the health on which
        the ranks agree. False if `algorithm` names a fixed schedule.
    sizes : tuple of int
        Numbers of elements of the parts of the buffer, together `count`. Default: equal parts.
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
        Time for which each rank computes before each of its calls and after the last one. If there
        are fewer times than ranks, the times repeat. Empty: no rank computes.
    no_rail_timeout_ms : int
        Setting `no_rail_timeout_s`, in milliseconds.
    is_loud : bool
        True if closing one end of a connection notifies the other end, as with TCP; False if it
        does not, as with queue pairs.
    fabric : str
        ``full``: ports of different rails reach each other. ``rail``: they do not reach each other.
        ``none``: they do not reach each other, and no bypass is used.
    is_lazy : bool
        True if no data path is connected before a call needs it.
    max_connections : int
        Setting `max_connections`: a rank that would be connected to more ranks closes idle paths;
        0: no limit.
    slow : tuple of RailShare
        Rails that were measured as slow before the first call; plans take them into account.
    excluded : tuple of (int, int)
        (rank, rail) of the NICs that are excluded from the start.
    nodes : tuple of int
        Number of the node of every rank; empty if there is one node, or one rank per node.
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
    nodes: tuple[int, ...] = ()


class CutPath(msgspec.Struct, frozen=True):
    """Fault: the path between two ranks on one rail breaks.

    Attributes
    ----------
    at : int
        Number of events before the path breaks.
    a, b, rail : int
        The two ranks and the rail.
    told : tuple of int
        Ranks that are notified of the cut, after one network latency. All other ranks must detect
        the cut.
    keep : int
        Number of pieces in flight in each direction that still land. A piece is half of a cleared
        slice, or another message.
    late_us : int
        Least time from the cut until the pieces that `keep` counts land.
    is_stall : bool
        True if the messages in flight wait and continue after the repair; False if the connection
        is lost. See `r2ccl.testing.simulation.wire.Cut`.
    restore_us : int
        Time from the cut until the path is repaired; 0 means never. A path that several faults
        have broken works again after the last repair.
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
    """Fault: a rank's NIC breaks, with all its paths; if `is_seen`, the rank is notified.

    `rank` and `rail` identify the NIC. All other attributes are as in `CutPath`.
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
    """Order, not a fault: rank `by` excludes `rail` of `rank`.

    If `is_excluded` is False, rank `by` includes the rail again.
    """

    at: int
    rank: int
    rail: int
    by: int = 0
    is_excluded: bool = True


class Stop(msgspec.Struct, frozen=True):
    """Fault: the process of `rank` is stopped (SIGSTOP) for `ms`; kernel and NICs continue."""

    at: int
    rank: int
    ms: int


class Kill(msgspec.Struct, frozen=True):
    """Fault: the process of `rank` dies, and its connections are closed."""

    at: int
    rank: int


class Lose(msgspec.Struct, frozen=True):
    """Fault: message `number` is lost; its connection breaks, unless it is a control frame.

    The messages of a run, including control frames, are numbered from 0 in the order in which they
    are sent.
    """

    number: int


class Hold(msgspec.Struct, frozen=True):
    """Fault: message `number`, numbered as in `Lose`, is delayed by `ms`.

    Later messages of the same sender on the same path do not overtake the delayed message. Later
    messages may overtake a delayed control frame, because it travels on no path.
    """

    number: int
    ms: int


class Noise(msgspec.Struct, frozen=True):
    """Percentages of the control frames that are lost, repeated or delayed at random.

    A delayed frame, or the second copy of a repeated frame, arrives up to `late_ms` later.
    """

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
