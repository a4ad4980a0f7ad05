"""Deadlocks of sliced chunks are found exactly, judged by following every slice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow

from r2ccl.errors import ScheduleError
from r2ccl.schedule.arrays import as_arrays
from r2ccl.schedule.events import BEGIN, END, LAND, build_events, check_slices, match
from r2ccl.schedule.graph import find_cycle, strong_components, topological_levels
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space

#: Shared cores stall for longer than any one example needs.
relaxed = settings(deadline=None)

IN, OUT = Space.INPUT, Space.OUTPUT


def op(kind, peer, chunk, after=()):
    src = -1 if kind == OpKind.RECV else chunk
    dst = -1 if kind == OpKind.SEND else chunk
    return Op(kind, peer, IN, src, OUT, dst, tuple(after))


def arrays_of(programs, nchunks):
    return as_arrays(
        Schedule(
            name="random",
            collective="allreduce",
            nranks=len(programs),
            nchunks=(nchunks,),
            cost=Cost(0, 0, 0, 0),
            generate=lambda rank: (tuple(programs[rank]),),
        )
    )


def verdict(programs, nchunks):
    """Whether the checker finds a deadlock."""
    arrays = arrays_of(programs, nchunks)
    try:
        check_slices(arrays, build_events(arrays, match(arrays)))
    except ScheduleError:
        return True
    return False


def is_stuck(programs, nchunks, nslices):
    """Whether ``nslices`` slices a chunk deadlock, by writing out what every slice waits for."""
    arrays = arrays_of(programs, nchunks)
    other = match(arrays).tolist()
    rows = [(int(row["kind"]), int(row["rank"]), int(row["peer"])) for row in arrays.ops]
    chunks = arrays.chunks().tolist()
    edges = []

    def wait(later, earlier):
        edges.append((earlier, later))

    last = nslices - 1
    for waiting, waited in zip(*(side.tolist() for side in arrays.waits()), strict=True):
        if chunks[waiting] == chunks[waited]:
            for k in range(nslices):
                wait((waiting, BEGIN, k), (waited, END, k))
        else:
            wait((waiting, BEGIN, 0), (waited, END, last))
    queue = {}
    for i, (kind, rank, peer) in enumerate(rows):
        for k in range(nslices):
            wait((i, END, k), (i, BEGIN, k))
            if k:
                for event in (BEGIN, LAND, END):
                    wait((i, event, k), (i, event, k - 1))
            if kind == OpKind.RECV:
                wait((i, LAND, k), (i, BEGIN, k))
            if kind in (OpKind.RECV, OpKind.RECV_REDUCE):
                wait((i, END, k), (i, LAND, k))
                wait((i, LAND, k), (other[i], BEGIN, k))
                wait((other[i], END, k), (i, LAND, k))
                if k:
                    wait((i, LAND, k), (i, END, k - 1))
        if kind in (OpKind.RECV, OpKind.RECV_REDUCE):
            if (rank, peer) in queue:
                wait((i, LAND, 0), (queue[rank, peer], END, last))
            queue[rank, peer] = i
    return has_circle(edges)


def has_circle(edges):
    waits_for: dict[object, int] = {}
    wakes: dict[object, list[object]] = {}
    for earlier, later in edges:
        waits_for[later] = waits_for.get(later, 0) + 1
        waits_for.setdefault(earlier, 0)
        wakes.setdefault(earlier, []).append(later)
    ready = [event for event, count in waits_for.items() if count == 0]
    done = 0
    while ready:
        done += 1
        for later in wakes.get(ready.pop(), ()):
            waits_for[later] -= 1
            if waits_for[later] == 0:
                ready.append(later)
    return done < len(waits_for)


@st.composite
def random_programs(draw):
    """Programs whose sends and receives meet, with waits drawn at random."""
    nranks, nchunks = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    ends = st.tuples(st.integers(0, nranks - 1), st.integers(1, nranks - 1))
    links = [(a, (a + d) % nranks) for a, d in draw(st.lists(ends, min_size=1, max_size=6))]
    programs = [[] for _ in range(nranks)]
    sides = [
        draw(
            st.permutations(
                [(True, b) for a, b in links if a == rank]
                + [(False, a) for a, b in links if b == rank]
            )
        )
        for rank in range(nranks)
    ]
    cargo: dict[tuple[int, int], list[tuple[int, OpKind]]] = {}
    for link in links:
        kind = draw(st.sampled_from([OpKind.RECV, OpKind.RECV_REDUCE]))
        cargo.setdefault(link, []).append((draw(st.integers(0, nchunks - 1)), kind))
    for rank, side in enumerate(sides):
        queues = {
            (is_send, peer): iter(cargo[(rank, peer) if is_send else (peer, rank)])
            for is_send, peer in side
        }
        for i, (is_send, peer) in enumerate(side):
            chunk, kind = next(queues[is_send, peer])
            after = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else ()
            programs[rank].append(op(OpKind.SEND if is_send else kind, peer, chunk, sorted(after)))
    return programs, nchunks


@slow.given(80, 400, random_programs())
def test_deadlocks_are_found_exactly(drawn):
    programs, nchunks = drawn
    # A circle climbs at most once at each receive, so this many slices show any there is.
    enough = 2 + sum(len(program) for program in programs) // 2
    assert verdict(programs, nchunks) == any(
        is_stuck(programs, nchunks, nslices) for nslices in range(1, enough + 1)
    )


#: Rank 0 reduces chunk 0 only after it sent it, which waits for chunk 1, which rank 1 gives away
#: only when all of its chunk 0 has landed at rank 0: but it cannot, with scratch for one slice.
SLICE_DEADLOCK = [
    [
        op(OpKind.RECV, 2, 1),
        op(OpKind.SEND, 1, 0, (0,)),
        op(OpKind.RECV_REDUCE, 1, 0, (1,)),
    ],
    [
        op(OpKind.SEND, 0, 0),
        op(OpKind.SEND, 2, 1, (0,)),
        op(OpKind.RECV_REDUCE, 0, 0, (0,)),
    ],
    [op(OpKind.RECV, 1, 1), op(OpKind.SEND, 0, 1, (0,))],
]


def test_a_deadlock_that_needs_two_slices_is_found():
    assert [is_stuck(SLICE_DEADLOCK, 2, nslices) for nslices in (1, 2)] == [False, True]
    arrays = arrays_of(SLICE_DEADLOCK, 2)
    events = build_events(arrays, match(arrays))
    with pytest.raises(ScheduleError, match="deadlock when chunks are cut into slices"):
        check_slices(arrays, events)


@st.composite
def graphs(draw):
    nnodes = draw(st.integers(1, 12))
    node = st.integers(0, nnodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=30))
    return nnodes, np.array(edges, np.int64).reshape(-1, 2)


def reach(nnodes, edges):
    """Transitive closure of the graph, without the empty path."""
    closure = np.zeros((nnodes, nnodes), bool)
    closure[edges[:, 0], edges[:, 1]] = True
    for middle in range(nnodes):
        closure |= closure[:, [middle]] & closure[[middle], :]
    return closure


@relaxed
@given(graphs())
def test_levels_order_all_that_no_cycle_reaches(graph):
    nnodes, edges = graph
    weight = np.ones(len(edges), np.int64)
    level, distance = topological_levels(nnodes, edges[:, 0], edges[:, 1], weight)
    closure = reach(nnodes, edges)
    on_cycle = closure.diagonal()
    behind = on_cycle | closure[on_cycle].any(axis=0)
    assert ((level < 0) == behind).all()
    for tail, head in edges.tolist():
        if level[head] >= 0:
            assert level[tail] < level[head]
    assert (distance[level >= 0] == level[level >= 0]).all()


@relaxed
@given(graphs())
def test_components_are_mutual_reachability(graph):
    nnodes, edges = graph
    label = strong_components(nnodes, edges[:, 0], edges[:, 1])
    closure = reach(nnodes, edges)
    mutual = (closure & closure.T) | np.eye(nnodes, dtype=bool)
    assert ((label[:, None] == label[None, :]) == mutual).all()


@relaxed
@given(graphs())
def test_a_cycle_that_is_found_is_one(graph):
    nnodes, edges = graph
    has_predecessor = np.isin(np.arange(nnodes), edges[:, 1])
    if not has_predecessor.all():
        ring = [(i, (i + 1) % nnodes) for i in range(nnodes)]
        edges = np.concatenate([edges, np.array(ring, np.int64)])
    cycle = find_cycle(nnodes, edges[:, 0], edges[:, 1])
    known = set(map(tuple, edges.tolist()))
    assert all(
        (tail, head) in known for tail, head in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    )
