"""The steps of two levels compute each collective, whatever parts the ranks of a node have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
from hypothesis import given

from r2ccl.planning.two_level import COLLECTIVES, Chunk, NodePlace, Piece
from r2ccl.runtime.two_level_steps import CallMemory, LocalStep, StepMaker, Steps
from r2ccl.schedule.chunks import Range, consecutive, cut
from r2ccl.types import PARTED, Collective

Array = npt.NDArray[np.int64]
#: Value of memory that no step has written, and of memory that a step leaves undefined.
UNDEFINED = -1


class Case(NamedTuple):
    """A call; ``sizes`` has the number of elements of each rank's part."""

    collective: Collective
    nnodes: int
    nlocal: int
    sizes: list[int]
    shares: list[int]
    nchunks: int
    root: int
    is_in_place: bool
    is_one_by_one: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nnodes, nlocal = draw(st.integers(2, 3)), draw(st.integers(2, 3))
    nranks = nnodes * nlocal
    return Case(
        draw(st.sampled_from(sorted(COLLECTIVES))),
        nnodes,
        nlocal,
        draw(st.lists(st.integers(0, 9), min_size=nranks, max_size=nranks)),
        draw(st.lists(st.integers(1, 3), min_size=nlocal, max_size=nlocal)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, nranks - 1)),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def chunks_of(blocks: Sequence[Range], nchunks: int, shares: Sequence[int]) -> list[Chunk]:
    def pieces(block: Range) -> list[Piece]:
        edges = cut(block[1] - block[0], [1] * nchunks)
        return [
            Piece(block[0] + lo, block[0] + hi, tuple(pairwise(cut(hi - lo, shares))))
            for lo, hi in pairwise(edges)
        ]

    return list(zip(*map(pieces, blocks), strict=True))


def run_local(steps: Sequence[LocalStep]) -> None:
    """Run one step on all ranks of a node."""
    (collective,) = {each.collective for each in steps}
    inputs = [each.source.copy() for each in steps]
    for rank, step in enumerate(steps):
        if step.parts is None:
            assert collective == Collective.BROADCAST
            step.output[:] = inputs[step.root]
        elif collective == Collective.REDUCE_SCATTER:
            lo, hi = step.parts[0][rank]
            step.output[:] = sum(each[lo:hi] for each in inputs)
        else:
            for source, each in enumerate(steps):
                assert each.parts is not None
                lo, hi = each.parts[0][source if collective == Collective.ALLGATHER else rank]
                first, end = step.parts[1][source]
                assert end - first == hi - lo, "the receiver expects another size"
                step.output[first:end] = inputs[source][lo:hi]


def run_in_nodes(nodes: Sequence[Sequence[Sequence[LocalStep]]]) -> None:
    """Run the steps of the ranks of each node."""
    for ranks in nodes:
        for steps in zip(*ranks, strict=True):
            run_local(steps)


def run_network(collective: Collective, steps: Sequence[Steps], root: int) -> None:
    """Run the step between the nodes on the members of a group."""
    arrays = [each.between.array for each in steps]
    copies = [each.copy() for each in arrays]
    for node, each in enumerate(steps):
        if collective == Collective.BROADCAST:
            arrays[node][:] = copies[root]
        elif collective not in PARTED:
            has_result = collective == Collective.ALLREDUCE or node == root
            arrays[node][:] = sum(copies) if has_result else UNDEFINED
        else:
            assert each.between.parts is not None
            ranges = each.between.parts.outputs
            assert each.between.count == sum(end - first for first, end in ranges)
            for source, (first, end) in enumerate(ranges):
                part = copies[source][first:end]
                if collective == Collective.REDUCE_SCATTER:
                    whole = sum(copy[first:end] for copy in copies)
                    part = whole if source == node else np.full_like(part, UNDEFINED)
                arrays[node][first:end] = part


def memory_of(case: Case, rank: int, ranges: Sequence[Range]) -> tuple[CallMemory, Array]:
    """Return the memory of a rank, and the array of its result."""
    first, end = ranges[rank]
    is_short = case.collective == Collective.ALLGATHER
    source = np.arange(first, end) if is_short else np.arange(ranges[-1][1])
    source = source * 100 + rank
    work = np.full(ranges[-1][1], UNDEFINED)
    if case.collective == Collective.REDUCE_SCATTER:
        output = source[first:end] if case.is_in_place else np.full(end - first, UNDEFINED)
        return CallMemory(source, work, output), output
    if case.is_in_place:
        work[first:end] = source if is_short else 0
        source, work = (work[first:end], work) if is_short else (source, source)
    return CallMemory(source, work, work), work


def expected(case: Case, rank: int, ranges: Sequence[Range]) -> Array | None:
    every = np.arange(ranges[-1][1]) * 100
    nranks = len(ranges)
    total = nranks * every + sum(range(nranks))
    if case.collective == Collective.REDUCE:
        return total if rank == case.root else None
    if case.collective == Collective.BROADCAST:
        return every + case.root
    if case.collective == Collective.ALLGATHER:
        return np.concatenate([every[lo:hi] + at for at, (lo, hi) in enumerate(ranges)])
    return total[slice(*ranges[rank])] if case.collective == Collective.REDUCE_SCATTER else total


@given(cases())
def test_the_steps_compute_the_collective(case: Case) -> None:
    ranges, nlocal = consecutive(case.sizes), case.nlocal
    teams = [range(node * nlocal, (node + 1) * nlocal) for node in range(case.nnodes)]
    blocks: list[Range] = [(0, ranges[-1][1])]
    if case.collective in PARTED:
        blocks = [(ranges[team[0]][0], ranges[team[-1]][1]) for team in teams]
    root = NodePlace(case.root // nlocal, case.root % nlocal, nlocal)
    makers, results = [], []
    for rank in range(len(ranges)):
        memory, result = memory_of(case, rank, ranges)
        place = NodePlace(rank // nlocal, rank % nlocal, nlocal)
        team = teams[place.node]
        bounds = [*(ranges[each][0] for each in team), ranges[team[-1]][1]]
        makers.append(StepMaker(place, memory, root, bounds))
        results.append(result)
    every = [
        [maker.steps(case.collective, chunk) for maker in makers]
        for chunk in chunks_of(blocks, case.nchunks, case.shares)
    ]
    # The steps of several chunks may run at the same time, so any order must give the result.
    for chunks in [[each] for each in every] if case.is_one_by_one else [every]:
        for steps in chunks:
            run_in_nodes([[steps[rank].before for rank in team] for team in teams])
        for steps in reversed(chunks):
            for index in range(nlocal):
                run_network(case.collective, steps[index::nlocal], root.node)
        for steps in chunks:
            run_in_nodes([[steps[rank].after for rank in team] for team in teams])
    for rank, result in enumerate(results):
        wanted = expected(case, rank, ranges)
        assert wanted is None or result.tolist() == wanted.tolist()
