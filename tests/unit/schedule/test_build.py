"""The builder names what each op must wait for: what the checker would ask for, and no more."""

from __future__ import annotations

import pytest

from r2ccl.errors import ScheduleError
from r2ccl.schedule.build import ProgramBuilder
from r2ccl.schedule.check import check
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space


def test_a_chunk_is_read_where_it_is() -> None:
    program = ProgramBuilder()
    assert program.held(0) == Space.INPUT
    program.send(1, 0)
    program.recv(1, 0)
    program.send(2, 0)
    assert [op.src_space for op in program.ops() if op.kind == OpKind.SEND] == [0, 1]
    assert (program.held(0), program.held(1)) == (Space.OUTPUT, Space.INPUT)


def test_ops_wait_for_what_they_read_and_overwritten_readers() -> None:
    program = ProgramBuilder()
    program.recv_reduce(1, 0)
    program.recv_reduce(2, 0)
    program.send(3, 0)
    program.send(4, 0)
    program.recv(3, 0)
    program.send(4, 0)
    program.send(4, 1)
    assert [op.after for op in program.ops()] == [(), (0,), (1,), (1,), (2, 3), (4,), ()]


def test_scratch_is_memory_of_its_own() -> None:
    program = ProgramBuilder()
    program.recv(1, 0, space=Space.SCRATCH)
    program.send(2, 0)
    program.copy(0, Space.INPUT)
    program.reduce(0, Space.SCRATCH)
    program.recv(1, 0, space=Space.SCRATCH)
    assert [op.after for op in program.ops()] == [(), (), (1,), (0, 2), (3,)]


def test_ops_wait_for_what_they_are_told_to_beside() -> None:
    program = ProgramBuilder()
    first, other = program.send(1, 0), program.send(1, 1)
    program.recv(1, 0, after=(other, first))
    assert program.ops()[2].after == (0, 1)


def test_only_a_receive_that_waits_for_a_send_can_be_a_proof() -> None:
    program = ProgramBuilder()
    program.recv(1, 0, is_proof=True)
    program.send(1, 1)
    program.recv(1, 1, is_proof=True)
    assert [op.is_proof for op in program.ops()] == [False, False, True]


def exchange(program: ProgramBuilder, peer: int) -> tuple[Op, ...]:
    program.send(peer, 0)
    program.recv_reduce(peer, 0, is_final=True)
    return program.ops()


def test_what_it_writes_passes_the_checker_and_less_would_not() -> None:
    def schedule(is_whole: bool) -> Schedule:
        def generate(rank: int) -> tuple[tuple[Op, ...], ...]:
            send, reduce = exchange(ProgramBuilder(), 1 - rank)
            bare = Op(OpKind.RECV_REDUCE, 1 - rank, Space.INPUT, 0, Space.OUTPUT, 0, (), True)
            return ((send, reduce if is_whole else bare),)

        return Schedule(
            name="exchange",
            collective="allreduce",
            nranks=2,
            nchunks=(1,),
            cost=Cost(1, 1, 1, 2),  # type: ignore[arg-type]
            generate=generate,
        )

    check(schedule(True))
    with pytest.raises(ScheduleError, match="does not wait for it"):
        check(schedule(False))
