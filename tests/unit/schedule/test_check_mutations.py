"""A checked schedule has no spare part: change anything in any op and the checker refuses.

Every family below is applied at every op of small schedules; a mutant that is accepted fails the
test by name. The two changes that are harmless by the IR's own meaning (listing independent ops
in another order, sending a finished chunk twice) are asserted to be accepted, so that the line
between wrong and wasteful stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace
from support.slow import slow_but

from r2ccl.algos import recursive_doubling, ring
from r2ccl.errors import ScheduleError
from r2ccl.schedule.arrays import as_arrays
from r2ccl.schedule.check import check
from r2ccl.schedule.cost import measure
from r2ccl.schedule.events import match
from r2ccl.schedule.ir import Op, OpKind, Schedule, Space

Programs = list[list[Op]]
Mutant = tuple[str, Programs]

SCHEDULES = {
    f"{algorithm.__name__.rpartition('.')[2]}-{n}": algorithm.allreduce(n)
    for algorithm, sizes in ((ring, (1, 2, 3, 4)), (recursive_doubling, (1, 2, 3, 4, 5)))
    for n in sizes
}
#: Each algorithm with one rank, with two, and with more messages than one a link or a rank.
QUICK = [name for name in SCHEDULES if name[-1] in "123"]
LOCAL = (OpKind.COPY, OpKind.REDUCE)


def programs_of(schedule: Schedule) -> Programs:
    return [list(schedule.program(rank).channels[0]) for rank in range(schedule.nranks)]


def with_programs(schedule: Schedule, programs: Programs) -> Schedule:
    return replace(schedule, generate=lambda rank: (tuple(programs[rank]),))


def sites(schedule: Schedule) -> Iterator[tuple[int, int, Op]]:
    for rank, program in enumerate(programs_of(schedule)):
        for i, op in enumerate(program):
            yield rank, i, op


def changed(schedule: Schedule, rank: int, i: int, **fields: object) -> Mutant:
    programs = programs_of(schedule)
    programs[rank][i] = replace(programs[rank][i], **fields)
    return f"rank {rank} op {i}: {fields}", programs


def messages(schedule: Schedule) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Both ends, (rank, index) each, of every message."""
    arrays = as_arrays(schedule)
    where = [(int(row["rank"]), int(row["index"])) for row in arrays.ops]
    for i, other in enumerate(match(arrays).tolist()):
        if other >= 0 and arrays.ops["kind"][i] == OpKind.SEND:
            yield where[i], where[other]


def without(program: list[Op], i: int) -> list[Op]:
    """Drop op `i`; whoever waited for it waits for what it waited for."""
    kept = []
    for j, op in enumerate(program):
        after = set(op.after)
        if i in after:
            after = (after - {i}) | set(program[i].after)
        if j != i:
            kept.append(replace(op, after=tuple(sorted(k - (k > i) for k in after))))
    return kept


def doubled(program: list[Op], i: int, *, is_ordered: bool = False) -> list[Op]:
    """Repeat op `i` right behind itself, waiting for the first if `is_ordered`."""
    grown = [replace(op, after=tuple(k + (k > i) for k in op.after)) for op in program]
    again = replace(program[i], after=(*program[i].after, i)) if is_ordered else program[i]
    return [*grown[: i + 1], again, *grown[i + 1 :]]


def drop(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, _ in sites(schedule):
        programs = programs_of(schedule)
        programs[rank] = without(programs[rank], i)
        yield f"rank {rank} op {i} dropped", programs


def drop_message(schedule: Schedule) -> Iterator[Mutant]:
    for ends in messages(schedule):
        programs = programs_of(schedule)
        for rank, i in ends:
            programs[rank] = without(programs[rank], i)
        yield f"message {ends} dropped", programs


def duplicate(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, _ in sites(schedule):
        programs = programs_of(schedule)
        programs[rank] = doubled(programs[rank], i)
        yield f"rank {rank} op {i} doubled", programs


def duplicate_message(schedule: Schedule) -> Iterator[Mutant]:
    for ends in messages(schedule):
        programs = programs_of(schedule)
        for rank, i in ends:
            programs[rank] = doubled(programs[rank], i)
        yield f"message {ends} doubled", programs


def misroute(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, op in sites(schedule):
        for peer in range(-2, schedule.nranks + 1):
            if peer != op.peer:
                yield changed(schedule, rank, i, peer=peer)


def wrong_chunk(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, op in sites(schedule):
        for chunk in range(-2, schedule.nchunks[0] + 1):
            if op.src not in (-1, chunk):
                yield changed(schedule, rank, i, src=chunk)
            if op.dst not in (-1, chunk):
                yield changed(schedule, rank, i, dst=chunk)
            if op.src != chunk and op.src == op.dst:
                yield changed(schedule, rank, i, src=chunk, dst=chunk)


def wrong_chunk_at_both_ends(schedule: Schedule) -> Iterator[Mutant]:
    for ends in messages(schedule):
        for chunk in range(schedule.nchunks[0]):
            programs = programs_of(schedule)
            for rank, i in ends:
                op = programs[rank][i]
                fields = {name: chunk for name in ("src", "dst") if getattr(op, name) >= 0}
                programs[rank][i] = replace(op, **fields)
            if programs != programs_of(schedule):
                yield f"message {ends} carries chunk {chunk}", programs


def wrong_space(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, op in sites(schedule):
        for space in (*Space, 3, -1):
            if op.src >= 0 and space != op.src_space:
                yield changed(schedule, rank, i, src_space=space)
            if op.dst >= 0 and space != op.dst_space:
                yield changed(schedule, rank, i, dst_space=space)


def wrong_kind(schedule: Schedule) -> Iterator[Mutant]:
    """The bare kind, and the kind with every field made to fit it."""
    for rank, i, op in sites(schedule):
        for kind in (*OpKind, 5, -1):
            if kind == op.kind:
                continue
            yield changed(schedule, rank, i, kind=kind)
            for space in (Space.INPUT, Space.OUTPUT):
                peer = (rank + 1) % schedule.nranks if op.peer < 0 else op.peer
                yield changed(
                    schedule,
                    rank,
                    i,
                    kind=kind,
                    peer=-1 if kind in LOCAL else peer,
                    src_space=space,
                    src=-1 if kind == OpKind.RECV else op.chunk,
                    dst_space=Space.OUTPUT,
                    dst=-1 if kind == OpKind.SEND else op.chunk,
                )


def wrong_final(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, op in sites(schedule):
        yield changed(schedule, rank, i, is_final=not op.is_final)


def dropped_wait(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, op in sites(schedule):
        for waited in op.after:
            left = tuple(k for k in op.after if k != waited)
            yield changed(schedule, rank, i, after=left)


def retargeted_wait(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, op in sites(schedule):
        for position in range(len(op.after)):
            for waited in range(-1, len(programs_of(schedule)[rank]) + 1):
                after = (*op.after[:position], waited, *op.after[position + 1 :])
                if after != op.after:
                    yield changed(schedule, rank, i, after=after)


def malformed_wait(schedule: Schedule) -> Iterator[Mutant]:
    for rank, i, op in sites(schedule):
        yield changed(schedule, rank, i, after=(*op.after, i))
        yield changed(schedule, rank, i, after=(*op.after, i + 1))
        yield changed(schedule, rank, i, after=(-1, *op.after))
        if op.after:
            yield changed(schedule, rank, i, after=(op.after[0], *op.after))


def link_pairs(program: list[Op]) -> Iterator[tuple[int, int]]:
    """Neighbouring ops of one directed link."""
    last: dict[tuple[bool, int], int] = {}
    for i, op in enumerate(program):
        link = (op.kind == OpKind.SEND, op.peer)
        if op.peer >= 0 and link in last:
            yield last[link], i
        last[link] = i


def swapped(program: list[Op], i: int, j: int) -> list[Op]:
    """Exchange what two ops do, leaving each place what it waits for."""
    a, b = program[i], program[j]
    result = list(program)
    result[i] = replace(b, after=a.after)
    result[j] = replace(a, after=b.after)
    return result


def swap_on_link(schedule: Schedule) -> Iterator[Mutant]:
    for rank, program in enumerate(programs_of(schedule)):
        for i, j in link_pairs(program):
            programs = programs_of(schedule)
            programs[rank] = swapped(program, i, j)
            yield f"rank {rank} ops {i} and {j} swapped", programs


def swap_on_both_ends(schedule: Schedule) -> Iterator[Mutant]:
    ends = dict(messages(schedule))
    for rank, program in enumerate(programs_of(schedule)):
        for i, j in link_pairs(program):
            if (rank, i) not in ends:
                continue
            peer, k = ends[rank, i]
            programs = programs_of(schedule)
            programs[rank] = swapped(program, i, j)
            programs[peer] = swapped(programs[peer], k, ends[rank, j][1])
            yield f"rank {rank} ops {i} and {j} swapped, and rank {peer}'s", programs


FAMILIES: list[Callable[[Schedule], Iterator[Mutant]]] = [
    drop,
    drop_message,
    duplicate,
    duplicate_message,
    misroute,
    wrong_chunk,
    wrong_chunk_at_both_ends,
    wrong_space,
    wrong_kind,
    wrong_final,
    dropped_wait,
    retargeted_wait,
    malformed_wait,
    swap_on_link,
    swap_on_both_ends,
]

#: Families that have nothing to change in some schedules: one rank sends no message, one chunk
#: leaves no other index inside the range at both ends, recursive doubling uses a link once.
MAY_BE_EMPTY = {
    drop_message,
    duplicate_message,
    wrong_chunk_at_both_ends,
    dropped_wait,
    retargeted_wait,
    swap_on_link,
    swap_on_both_ends,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("name", slow_but(QUICK, SCHEDULES))
def test_every_mutant_is_refused(name, family):
    schedule = SCHEDULES[name]
    check(schedule)
    mutants = list(family(schedule))
    assert mutants or family in MAY_BE_EMPTY
    survivors = []
    for what, programs in mutants:
        try:
            check(with_programs(schedule, programs))
        except ScheduleError:
            continue
        survivors.append(what)
    assert survivors == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_every_family_has_mutants_somewhere(family):
    assert any(True for schedule in SCHEDULES.values() for _ in family(schedule))


def test_the_order_of_independent_ops_means_nothing():
    schedule = ring.allreduce(4)
    programs = programs_of(schedule)
    # Ops 2s and 2s + 1 ride different links and do not wait for each other.
    renamed = {i: i ^ 1 for i in range(len(programs[0]))}
    for rank, program in enumerate(programs):
        listed = [program[renamed[i]] for i in range(len(program))]
        programs[rank] = [
            replace(op, after=tuple(sorted(renamed[k] for k in op.after))) for op in listed
        ]
    check(with_programs(schedule, programs))


def test_sending_a_finished_chunk_twice_is_waste_and_no_error():
    schedule = ring.allreduce(3)
    programs = programs_of(schedule)
    last = len(programs[0]) - 1
    programs[0] = doubled(programs[0], last - 1, is_ordered=True)
    programs[1] = doubled(programs[1], last, is_ordered=True)
    wasteful = with_programs(schedule, programs)
    check(wasteful)
    assert measure(wasteful).sent > schedule.cost.sent
