"""Compact programs say what the schedule says, and hold no op twice."""

from __future__ import annotations

import msgspec
import pytest

from r2ccl.algos import ring, tree
from r2ccl.errors import ScheduleError
from r2ccl.flowsim import compile_schedule
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space

IN, OUT = Space.INPUT, Space.OUTPUT


def schedule_of(*programs, nchunks=(1,)):
    return Schedule(
        name="made",
        collective="allreduce",
        nranks=len(programs),
        nchunks=nchunks,
        cost=Cost(0, 0, 0, 0),
        generate=lambda rank: programs[rank],
    )


def said(program, channel, rank):
    """Kind, chunk and ``after`` of the ops of one rank's channel."""
    starts = program.starts[program.shapes[channel]]
    found = []
    for row in range(starts[rank], starts[rank + 1]):
        waits = program.after[program.rows["after"][row] : program.rows["after"][row + 1]]
        found.append(
            (
                program.rows["kind"][row],
                program.rows["chunk"][row],
                tuple(int(other - starts[rank]) for other in waits),
            )
        )
    return found


ORDERS = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [0, 2, 1, 3]]


@pytest.mark.parametrize(
    "schedule",
    [
        ring.allreduce(4, 5, ORDERS),
        ring.allreduce(1, 2),
        tree.allreduce(tree.double_binary(7)),
        tree.broadcast([tree.chain(range(4)), tree.chain([0, 3, 2, 1])]),
    ],
    ids=["rings", "alone", "trees", "chains"],
)
def test_a_program_says_what_its_schedule_says(schedule) -> None:
    program = compile_schedule(schedule)
    for rank in range(schedule.nranks):
        for channel, ops in enumerate(schedule.generate(rank)):
            wanted = [(op.kind, op.chunk, op.after) for op in ops]
            assert said(program, channel, rank) == wanted


def test_channels_that_run_the_same_ops_share_them() -> None:
    assert compile_schedule(ring.allreduce(4, 8)).shapes.tolist() == [0] * 8
    assert compile_schedule(ring.allreduce(4, 8)).rows.size == 4 * 12 + 1


def test_channels_that_differ_on_a_later_rank_alone_do_not_share() -> None:
    """On rank 0 the rings 0 1 2 3 4 and 0 1 3 2 4 look alike."""
    orders = [[0, 1, 2, 3, 4], [0, 1, 3, 2, 4], [0, 1, 2, 3, 4]]
    program = compile_schedule(ring.allreduce(5, 3, orders))
    assert program.shapes.tolist() == [0, 1, 0]


def test_links_list_their_messages_in_program_order() -> None:
    program = compile_schedule(ring.allreduce(3))
    for shape, src, dst, first, end in program.links.tolist():
        assert (shape, dst) == (0, (src + 1) % 3)
        sends = program.messages["send"][first:end] - program.starts[0, src]
        receives = program.messages["recv"][first:end] - program.starts[0, dst]
        assert sends.tolist() == [0, 2, 4, 6]
        assert receives.tolist() == [1, 3, 5, 7]


def send(peer, chunk=0, after=()):
    return Op(OpKind.SEND, peer, IN, chunk, OUT, -1, after)


def recv(peer, chunk=0, after=()):
    return Op(OpKind.RECV, peer, OUT, -1, OUT, chunk, after)


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (schedule_of(((send(1),),), ((),)), "rank 1 has no matching receive"),
        (schedule_of(((send(1),),), ((recv(0, 1),),), nchunks=(2,)), "receives chunk 1"),
        (schedule_of(((send(7),),), ((),)), "peer must be a rank below 2"),
        (schedule_of(((send(1, 3),),), ((recv(0, 3),),)), "src must be a chunk of the channel"),
        (schedule_of(((send(1, 0, (0,)),),), ((recv(0),),)), "after must name earlier ops"),
        (schedule_of(((send(1),), ()), ((recv(0),), ())), "2 channels instead of 1"),
        (schedule_of(((send(1),),), ((recv(0),), ())), "2 channels instead of 1"),
        (schedule_of(((send(1),),), ((recv(0),),), nchunks=(1, 1)), "1 channels instead of 2"),
    ],
)
def test_what_could_not_be_run_is_refused(schedule, why) -> None:
    with pytest.raises(ScheduleError, match=why):
        compile_schedule(schedule)


def test_an_error_names_the_schedules_own_channel() -> None:
    good, bad = (send(1),), (send(1, 0, (0,)),)
    with pytest.raises(ScheduleError) as caught:
        compile_schedule(schedule_of((good, good, bad), ((recv(0),),) * 3, nchunks=(1, 1, 1)))
    assert (caught.value.rank, caught.value.channel, caught.value.op) == (0, 2, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_generator_that_returns_no_channels_is_refused(rank) -> None:
    good = ring.allreduce(2)
    bad = msgspec.structs.replace(good, generate=lambda r: None if r == rank else good.generate(r))
    with pytest.raises(ScheduleError, match=rf"generate\({rank}\) did not return a tuple"):
        compile_schedule(bad)
