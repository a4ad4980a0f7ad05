"""Flow-level simulation of one collective, slice by slice.

The simulation is deterministic: equal arguments give bit-identical outcomes.
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

#: Model of how slices share a port's bandwidth; see `r2ccl.flowsim.loops.max_min` and
#: `r2ccl.flowsim.loops.fair_queue`.
Sharing = Literal["max_min", "fair_queue"]

_LOOPS = {"max_min": max_min.run, "fair_queue": fair_queue.run}

#: Default `tolerance` of `simulate`: changes the time by less than 0.01 % (measured, see
#: `r2ccl.flowsim.loops.max_min`), and lets slices whose ends differ only by rounding end together.
DEFAULT_TOLERANCE = 1e-3


def simulate(
    schedule: Schedule | Program,
    nbytes: int,
    network: Network,
    *,
    itemsize: int = 1,
    slice_nbytes: int = 0,
    nslices: int = 0,
    counts: Sequence[int] = (),
    weights: Sequence[int] | None = None,
    rails: Rails | None = None,
    node_ports: bool = False,
    sharing: Sharing = "max_min",
    tolerance: float = DEFAULT_TOLERANCE,
) -> Outcome:
    """Predict the time of one collective on a network.

    Parameters
    ----------
    schedule : Schedule or Program
        To simulate one schedule several times, pass its compact form (`compile_schedule`): the ops
        are then generated once.
    nbytes : int
        Size of the buffer in bytes, a multiple of `itemsize`.
    network : Network
        Network with as many ranks as the schedule.
    itemsize : int
        Bytes of an element; chunks and slices consist of whole elements.
    slice_nbytes, nslices : int
        Maximum bytes of a slice (a slice has at least one element), or maximum number of slices per
        chunk. Give exactly one of the two.
    counts : sequence of int, optional
        Elements of each part of the buffer. Default: the parts of the schedule have equal sizes.
    weights : sequence of int, optional
        Share of each channel in the buffer. Default: the weights of the schedule.
    rails : callable, optional
        Function that returns the home rails of links: see `r2ccl.flowsim.routes.Rails`. Default:
        channel c uses rail c modulo the number of rails. A link whose home rail is dead uses
        another rail.
    node_ports : bool
        If True, each node has one port per direction with the summed bandwidth of its rails. This
        models schedules that spread the channels between two nodes over the rails in proportion
        to the bandwidths of the rails. The result of `rails` is then checked, but not used.
    sharing : {"max_min", "fair_queue"}
        Model of port sharing. Max-min is exact except for `tolerance`. The times of fair queues
        differ by up to 3 % from max-min on rings and trees with 16 slices per chunk, and by more
        with one or two slices. Fair queues are faster if thousands of links share ports and slices
        end at different times.
    tolerance : float
        Max-min only, 0 or more and below 1: a slice may end at an earlier event if at most this
        share of its bytes is left at that event. The bytes left are sent with the link's next
        slice. 0: exact.

    Returns
    -------
    Outcome

    Raises
    ------
    InvalidArgument
        If an argument is out of range, if the network and the schedule have different numbers of
        ranks, if `rails` does not return one existing rail per end of each link, or if a link that
        has data to send is left without a rail that is alive at both ends.
    ScheduleError
        If `compile_schedule` raises it, or the ops deadlock.

    Notes
    -----
    A slice is sent when the link has sent all its earlier slices, the dependencies of its SEND are
    done, and, if the peer's op is a RECV, the dependencies of that RECV are done. A link sends one
    slice at a time. A slice lands `Network.alpha_s` (within a node, `Network.inside_alpha_s`) after
    its last byte is sent; then the sender's memory is released. The number of landing places and
    the latency of a clear-to-send are not modeled.

    *Cost*: memory is 8 bytes per op, plus 0.1 kB per op of a shape (`r2ccl.flowsim.program`) while
    the schedule is compiled. Time on one EPYC core is 0.07 µs for a slice that follows its
    predecessor without a pause, as in a ring of equal nodes. Any other slice takes about 1 µs with
    fair queues; max-min recomputes the rates of all affected links once per batch. Examples for an
    allreduce over 1,024 nodes with 8 rails: a ring with 8 channels and 4 slices per chunk, 67
    million slices in all, takes 19 s (15 s of it to generate the ops) and 0.8 GB; 28 packed trees
    with 16 slices per chunk take 5 s with fair queues, and 28 s with max-min at a tolerance of
    0.01. The first call on a machine compiles for up to 30 s.

    Examples
    --------
    >>> from r2ccl.algos import ring
    >>> outcome = simulate(ring.allreduce(4), 8_000_000, Network.uniform(4, 1, 1e9), nslices=4)
    >>> round(outcome.time_s, 9)  # 2 (n - 1) / n of the data at 1 GB/s
    0.012
    """
    program = schedule if isinstance(schedule, Program) else compile_schedule(schedule)
    _check_sizes(program, nbytes, itemsize, slice_nbytes, nslices, counts)
    _check(program, network, sharing, tolerance)
    sizes = Sizes(nbytes // itemsize, itemsize, slice_nbytes, nslices, counts)
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
    """Run the event loop until all ops are done or the remaining ops can never run."""
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


def _check_sizes(
    program: Program,
    nbytes: int,
    itemsize: int,
    slice_nbytes: int,
    nslices: int,
    counts: Sequence[int],
) -> None:
    if itemsize < 1:
        raise _wrong("itemsize", itemsize, "1 or more")
    if nbytes < 0 or nbytes % itemsize:
        raise _wrong("nbytes", nbytes, f"a multiple of itemsize={itemsize}, 0 or more")
    if min(slice_nbytes, nslices) != 0 or max(slice_nbytes, nslices) < 1:
        raise _wrong("(slice_nbytes, nslices)", (slice_nbytes, nslices), "one above 0, one 0")
    nparts, nelements = program.nparts, nbytes // itemsize
    if counts and (len(counts) != nparts or sum(counts) != nelements):
        allowed = f"one number for each of the {nparts} parts, {nelements} elements in all"
        raise _wrong("counts", counts, allowed)


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
    """Return the error for a simulation whose remaining ops can never run."""
    parked = np.flatnonzero(state.links["state"] == PARKED)
    if parked.size:
        src, dst = int(routes.src[parked[0]]), int(routes.dst[parked[0]])
        return InvalidArgument(
            f"simulate: no rail is alive at both rank {src} and rank {dst}; keep one alive, or use "
            "a schedule in which these ranks do not exchange data"
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
                f"{kind.name} of chunk {chunk[undone[0]]}: slice {done[undone[0]]} waits forever; "
                "r2ccl.schedule.check reports the cause",
                rank=rank,
                channel=channel,
                op=index,
            )
    raise AssertionError("the simulation is not over, yet all ops are done")


__all__ = ["DEFAULT_TOLERANCE", "Sharing", "simulate"]
