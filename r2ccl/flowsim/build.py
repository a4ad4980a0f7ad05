"""Initial state of a simulation of one program with one buffer size on one network.

The state is the same for both models of port sharing, `max_min` and `fair_queue`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r2ccl.flowsim.loops.state import (
    AWAY,
    DONE_DTYPE,
    LANDING_DTYPE,
    LINK_DTYPE,
    LOCAL_DTYPE,
    NCOUNTS,
    PORT_DTYPE,
    REDUCER_DTYPE,
    SEAT_DTYPE,
    WAITER_DTYPE,
    FlowState,
    Records,
)
from r2ccl.flowsim.program import Program
from r2ccl.flowsim.routes import Floats, PortRoutes
from r2ccl.schedule.graph import Ints


class Channels(NamedTuple):
    """Numbering of the ops, chunks and links of all channels of a `Program`.

    Parameters
    ----------
    op_bases : ndarray of int64, shape (nchannels,)
        Offset of each channel in the numbering of ops: a channel's op at index ``row`` of
        ``program.rows`` has the number ``op_bases[channel] + row``.
    chunk_bases : ndarray of int64, shape (nchannels,)
        Number of each channel's first chunk.
    links : ndarray of int64, shape (nlinks,)
        Channel of each link.
    rows : ndarray of int64, shape (nlinks,)
        Index of each link in ``program.links``.
    nops : int
        Number of ops in all channels.
    """

    op_bases: Ints
    chunk_bases: Ints
    links: Ints
    rows: Ints
    nops: int


def channels_of(program: Program) -> Channels:
    """Number the ops, chunks and links of `program`, one channel after another."""
    first_rows = program.starts[:, 0]
    nrows = program.starts[program.shapes, -1] - first_rows[program.shapes]
    ends = np.cumsum(nrows)
    members = [np.flatnonzero(program.links[:, 0] == shape) for shape in program.shapes]
    return Channels(
        ends - nrows - first_rows[program.shapes],
        np.cumsum([0, *program.nchunks[:-1]]),
        np.repeat(np.arange(program.shapes.size), [rows.size for rows in members]),
        np.concatenate(members),
        int(ends[-1]),
    )


def build_state(
    program: Program,
    channels: Channels,
    chunks: Records,
    routes: PortRoutes,
    table: Floats,
    *,
    tolerance: float,
) -> FlowState:
    """Build the state of a simulation at time 0.

    Parameters
    ----------
    program : Program
    channels : Channels
        Result of ``channels_of(program)``.
    chunks : Records of CHUNK_DTYPE
        One record per chunk, channel by channel, as `r2ccl.flowsim.slices.cut_chunks` returns them.
    routes : PortRoutes
        Home rails of all links, in the order of ``channels.links``.
    table : ndarray of float64, shape (2, nnodes, nrails)
        Bandwidth of every rail at time 0 in bytes/s: egress, then ingress.
    tolerance : float
        As in `r2ccl.flowsim.simulation.simulate`.

    Returns
    -------
    FlowState
    """
    links = _links(program, channels, routes, table)
    local = _locals(program, channels, chunks)
    ports = _with_nobody(routes.bandwidths(table).size, PORT_DTYPE, "head", "tail")
    ports["bandwidth"] = routes.bandwidths(table)
    nlinks, nports = links.size, ports.size
    nlanes = program.shapes.size * program.nranks
    nwaiters, nheap = 2 * nlinks + local.size, max(nlinks, nports)
    seats = np.zeros(2 * nlinks, SEAT_DTYPE)
    seats["next"] = AWAY
    return FlowState(
        rows=program.rows,
        after=program.after,
        messages=program.messages,
        chunks=chunks,
        done=_with_nobody(channels.nops, DONE_DTYPE, "waiter"),
        waiters=np.zeros(nwaiters, WAITER_DTYPE),
        links=links,
        locals=local,
        reducers=_with_nobody(nlanes, REDUCER_DTYPE, "op", "head", "tail"),
        reducing_key=np.empty(nlanes),
        reducing=_numbers(nlanes),
        ports=ports,
        seats=seats,
        heap_key=np.empty(nheap),
        heap=_numbers(nheap),
        heap_at=np.full(nheap, -1, np.int32),
        landings=np.empty((2, 2 * nlinks), LANDING_DTYPE),
        landing_first=np.zeros(2, np.int64),
        landing_count=np.zeros(2, np.int64),
        starting=_numbers(nlinks),
        rested=_numbers(nlinks),
        instant=_numbers(nlinks),
        woken=_numbers(nwaiters),
        dirty=_numbers(nports),
        part_ports=_numbers(nports),
        part_links=_numbers(nlinks),
        fill_key=np.empty(nports),
        fill=_numbers(nports),
        counts=np.zeros(NCOUNTS, np.int64),
        clock=np.zeros(1),
        alpha_s=np.array([routes.network.alpha_s, routes.network.inside_alpha_s], np.float64),
        reduction_rate=float(routes.network.reduction_rate),
        tolerance=float(tolerance),
    )


def _numbers(count: int) -> npt.NDArray[np.int32]:
    return np.empty(count, np.int32)


def _with_nobody(count: int, dtype: np.dtype[np.void], *fields: str) -> Records:
    """Return `count` records whose `fields` are -1 (nobody) and whose other fields are 0."""
    records = np.zeros(count, dtype)
    for field in fields:
        records[field] = -1
    return records


def with_room(state: FlowState) -> FlowState:
    """Return `state` with twice the capacity of ``landings``.

    The result shares the arrays other than ``landings`` and ``landing_first`` with `state`.
    """
    room = state.landings.shape[1]
    grown = np.empty((2, 2 * room), LANDING_DTYPE)
    for way, first in enumerate(state.landing_first):
        grown[way, :room] = np.roll(state.landings[way], -first)
    return state._replace(landings=grown, landing_first=np.zeros(2, np.int64))


def _links(program: Program, channels: Channels, routes: PortRoutes, table: Floats) -> Records:
    _, _, dst, first, end = program.links[channels.rows].T
    links = np.zeros(channels.links.size, LINK_DTYPE)
    links["op_base"] = channels.op_bases[channels.links]
    links["chunk_base"] = channels.chunk_bases[channels.links]
    links["lane"] = channels.links * program.nranks + dst
    links["message"] = links["landing"] = links["delivery"] = first
    links["end"] = end
    links["egress"], links["ingress"] = routes.ports(table)
    nodes = np.array(routes.network.nodes)
    links["is_inside"] = nodes[routes.src] == nodes[routes.dst]
    return links


def _locals(program: Program, channels: Channels, chunks: Records) -> Records:
    rows = np.flatnonzero(program.rows["is_local"])
    found = []
    for channel, shape in enumerate(program.shapes.tolist()):
        starts = program.starts[shape]
        own = rows[(rows >= starts[0]) & (rows < starts[-1])]
        local = np.zeros(own.size, LOCAL_DTYPE)
        local["op_base"] = channels.op_bases[channel]
        local["row"] = own
        local["chunk_base"] = channels.chunk_bases[channel]
        rank = np.searchsorted(starts, own, side="right") - 1
        local["lane"] = channel * program.nranks + rank
        number = channels.chunk_bases[channel] + program.rows["chunk"][own]
        local["nslices"] = chunks["nslices"][number]
        found.append(local)
    return np.concatenate(found)


__all__ = ["Channels", "build_state", "channels_of", "with_room"]
