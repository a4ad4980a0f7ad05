"""Run a schedule on a network of numbers, slice by slice.

Imports the rest of this package. Invariant: equal arguments, equal outcomes, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.flowsim.build import Channels, build_state, channels_of, with_room
from r2ccl.flowsim.loops import fair_queue, max_min
from r2ccl.flowsim.loops.changes import reroute
from r2ccl.flowsim.loops.state import BATCHES, PARKED, REDUCING, SLICES, FlowState, Records
from r2ccl.flowsim.network import Network
from r2ccl.flowsim.outcome import Outcome, Use
from r2ccl.flowsim.program import Program, compile_schedule
from r2ccl.flowsim.routes import Floats, PortRoutes, Rails, home_rails, timeline
from r2ccl.flowsim.slices import Sizes, cut_chunks
from r2ccl.schedule.ir import OpKind, Schedule

#: How slices share ports; see `r2ccl.flowsim.loops.max_min` and `r2ccl.flowsim.loops.fair_queue`.
Sharing = Literal["max_min", "fair_queue"]

_LOOPS = {"max_min": max_min.run, "fair_queue": fair_queue.run}

#: Too little to be seen in any figure (`r2ccl.flowsim.loops.max_min` says how little), and enough
#: for slices that only rounding has set apart to end in one batch.
DEFAULT_TOLERANCE = 1e-3


def simulate(
    schedule: Schedule | Program,
    nbytes: int,
    network: Network,
    *,
    itemsize: int = 1,
    slice_nbytes: int = 0,
    nslices: int = 0,
    weights: Sequence[int] | None = None,
    rails: Rails | None = None,
    node_ports: bool = False,
    sharing: Sharing = "max_min",
    tolerance: float = DEFAULT_TOLERANCE,
) -> Outcome:
    """Simulate one collective.

    Parameters
    ----------
    schedule : Schedule or Program
        A program (`compile_schedule`) saves the generation of the ops where one schedule is
        simulated more than once.
    nbytes : int
        Size of the buffer.
    network : Network
        Of as many ranks.
    itemsize : int
        Bytes of an element, which nothing cuts.
    slice_nbytes, nslices : int
        Bytes of a slice, or slices of a chunk. Give one of them.
    weights : sequence of int, optional
        Share of each channel; by default the schedule's.
    rails : callable, optional
        Rails that links leave and enter by: see `r2ccl.flowsim.routes.Rails`. By default channel c
        uses rail c, counted round and round. A link whose rail is dead makes a detour.
    node_ports : bool
        Whether a node is one port each way, with the bandwidth of all its rails: what schedules
        can reach when the channels of every link are spread over the rails as they are fast.
    sharing : {"max_min", "fair_queue"}
        How slices share a port. Max-min is exact but for `tolerance`. Fair queues came within 3 %
        of it on rings and trees of 16 slices, are further off with one or two, and are the faster
        ones where thousands of links share ports and every slice ends at a time of its own.
    tolerance : float
        Max-min: share of its size that a slice may lack to be counted as sent, with another that
        ends now; the rest goes with the link's next slice. 0: exact.

    Returns
    -------
    Outcome

    Raises
    ------
    InvalidArgument
        A value that is not allowed, a network of another number of ranks, or ranks that no rail
        joins any more.
    ScheduleError
        A field contradicts its op's kind, a send meets no receive, or ops wait for ever.

    Notes
    -----
    A slice is sent when its op's turn on the link has come, what the op waits for is done, and a
    RECV may be landed in; slices of one link go one at a time. It lands `Network.alpha_s` after its
    end, which releases the send. Nothing else is a limit: neither the number of slices a receiver
    asks for ahead, nor the time it takes to ask.

    *Cost*: memory, 8 bytes for every op of every channel, and while the schedule is made compact
    0.1 kB for every op of a shape. Time on one core of an EPYC: 0.07 µs for a slice that follows
    the one before it without a pause, as in a ring of equal nodes. Any other takes about 1 µs with
    fair queues; max-min looks at all links whose rates may change, once a batch. An allreduce over
    1,024 nodes of 8 rails: a ring of 8 channels and 4 slices, 67 million in all, 19 s, of them 15
    to make its ops, and 0.8 GB; 28 packed trees of 16 slices 5 s, max-min with a tolerance of
    0.01 28 s. The first call on a machine compiles for up to half a minute.

    Examples
    --------
    >>> from r2ccl.algos import ring
    >>> outcome = simulate(ring.allreduce(4), 8_000_000, Network.uniform(4, 1, 1e9), nslices=4)
    >>> round(outcome.time_s, 9)  # 2 (n - 1) / n of the data at 1 GB/s
    0.012
    """
    program = schedule if isinstance(schedule, Program) else compile_schedule(schedule)
    _check_sizes(nbytes, itemsize, slice_nbytes, nslices)
    _check(program, network, sharing, tolerance)
    sizes = Sizes(nbytes // itemsize, itemsize, slice_nbytes, nslices)
    chunks = cut_chunks(program, sizes, weights or program.weights)
    channels = channels_of(program)
    routes = _routes(program, channels, network, rails, node_ports)
    moments = timeline(network)
    state = build_state(program, channels, chunks, routes, moments[0][1], tolerance=tolerance)
    state = _run(state, routes, moments, sharing)
    if not _is_over(state):
        raise _waits_for_ever(program, channels, chunks, routes, state)
    return _outcome(state, routes, moments)


def _run(
    state: FlowState, routes: PortRoutes, moments: list[tuple[float, Floats]], sharing: Sharing
) -> FlowState:
    """Go from one change of the network to the next, until all is done or nothing happens."""
    ends = [*(time_s for time_s, _ in moments[1:]), math.inf]
    for (time_s, table), until in zip(moments, ends, strict=True):
        if time_s > 0:
            is_fair = sharing == "fair_queue"
            reroute(state, time_s, routes.bandwidths(table), routes.ports(table), is_fair)
        while not _LOOPS[sharing](state, until):
            state = with_room(state)
        if _is_over(state):
            break
    return state


def _is_over(state: FlowState) -> bool:
    return bool(
        np.all(state.links["delivery"] == state.links["end"])
        and np.all(state.locals["slice"] == state.locals["nslices"])
        and state.counts[REDUCING] == 0
    )


def _outcome(state: FlowState, routes: PortRoutes, moments: list[tuple[float, Floats]]) -> Outcome:
    time_s = float(state.clock[0])
    shape = (2, routes.network.nnodes, routes.ports_per_node)
    times = [min(moment, time_s) for moment, _ in moments] + [time_s]
    capacity = np.zeros(shape)
    for (_, table), (since, until) in zip(moments, pairwise(times), strict=True):
        ports = routes.bandwidths(table)[: capacity.size]
        capacity += ports.reshape(shape) * (until - since)
    nbytes = state.ports["nbytes"][: capacity.size].reshape(shape)
    busy_s = state.ports["busy_s"][: capacity.size].reshape(shape)
    egress, ingress = (Use(nbytes[way], busy_s[way], capacity[way]) for way in range(2))
    counts = state.counts
    return Outcome(time_s, egress, ingress, int(counts[SLICES]), int(counts[BATCHES]))


def _routes(
    program: Program, channels: Channels, network: Network, rails: Rails | None, node_ports: bool
) -> PortRoutes:
    src, dst = program.links[channels.rows, 1], program.links[channels.rows, 2]
    homes = home_rails(network, rails, src, dst, channels.links)
    return PortRoutes(network, src, dst, *homes, node_ports)


def _check_sizes(nbytes: int, itemsize: int, slice_nbytes: int, nslices: int) -> None:
    if itemsize < 1:
        raise _wrong("itemsize", itemsize, "1 or more")
    if nbytes < 0 or nbytes % itemsize:
        raise _wrong("nbytes", nbytes, f"a multiple of itemsize={itemsize}, 0 or more")
    if min(slice_nbytes, nslices) != 0 or max(slice_nbytes, nslices) < 1:
        raise _wrong("(slice_nbytes, nslices)", (slice_nbytes, nslices), "one above 0, one 0")


def _check(program: Program, network: Network, sharing: Sharing, tolerance: float) -> None:
    if network.nranks != program.nranks:
        raise _wrong("network.nranks", network.nranks, f"{program.nranks}, as the schedule has")
    if sharing not in _LOOPS:
        raise _wrong("sharing", repr(sharing), " or ".join(get_args(Sharing)))
    if not 0 <= tolerance < 1:
        raise _wrong("tolerance", tolerance, "0 or more, below 1")


def _wrong(name: str, value: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"simulate: {name}={value}; allowed is {allowed}")


def _waits_for_ever(
    program: Program, channels: Channels, chunks: Records, routes: PortRoutes, state: FlowState
) -> InvalidArgument | ScheduleError:
    """Say what the simulation cannot go on for."""
    parked = np.flatnonzero(state.links["state"] == PARKED)
    if parked.size:
        src, dst = int(routes.src[parked[0]]), int(routes.dst[parked[0]])
        return InvalidArgument(
            f"simulate: no rail is left that is alive at both rank {src} and rank {dst}; keep one, "
            "or send by way of other ranks"
        )
    for channel, shape in enumerate(program.shapes.tolist()):
        starts = program.starts[shape]
        rows = np.arange(starts[0], starts[-1])
        done = state.done["slices"][channels.op_bases[channel] + rows]
        chunk = program.rows["chunk"][rows]
        undone = np.flatnonzero(done < chunks["nslices"][channels.chunk_bases[channel] + chunk])
        if undone.size:
            row = int(rows[undone[0]])
            rank = int(np.searchsorted(starts, row, side="right")) - 1
            index = row - int(starts[rank])
            kind = OpKind(int(program.rows["kind"][row]))
            return ScheduleError(
                f"{kind.name} of chunk {chunk[undone[0]]}: slice {done[undone[0]]} waits for ever; "
                "r2ccl.schedule.check says for what",
                rank=rank,
                channel=channel,
                op=index,
            )
    raise AssertionError("a simulation that is not over has an op that is not done")


__all__ = ["DEFAULT_TOLERANCE", "Sharing", "simulate"]
