"""The checker on schedules written by hand: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import re

import numpy as np
import pytest
from msgspec.structs import replace

from r2ccl.algos import recursive_doubling, ring, tree
from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.schedule import conditions
from r2ccl.schedule.check import check, check_order
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space

IN, OUT, SCRATCH = Space.INPUT, Space.OUTPUT, Space.SCRATCH
FREE = Cost(0, 0, 0, 0)


def send(peer, chunk=0, space=IN, after=()):
    return Op(OpKind.SEND, peer, space, chunk, OUT, -1, after)


def recv(peer, chunk=0, space=OUT, after=()):
    return Op(OpKind.RECV, peer, IN, -1, space, chunk, after)


def reduce(peer, chunk=0, source=IN, target=OUT, after=(), is_final=False):
    return Op(OpKind.RECV_REDUCE, peer, source, chunk, target, chunk, after, is_final)


def local(kind, source, target, chunk=0, after=(), is_final=False):
    return Op(kind, -1, source, chunk, target, chunk, after, is_final)


def by_hand(*programs, collective="allreduce", nchunks=1):
    return Schedule(
        name="by hand",
        collective=collective,
        nranks=len(programs),
        nchunks=(nchunks,),
        cost=FREE,
        generate=lambda rank: (tuple(programs[rank]),),
    )


def exchange(rank_0, rank_1):
    """Two ranks that send everything to each other and reduce."""
    return by_hand(
        [send(1), reduce(1, after=(0,), is_final=True)] if rank_0 is None else rank_0,
        [send(0), reduce(0, after=(0,), is_final=True)] if rank_1 is None else rank_1,
    )


@pytest.mark.parametrize("n", [*range(1, 18), 32, 64])
def test_ring_is_accepted(n):
    check(ring.allreduce(n))


@pytest.mark.parametrize("n", range(1, 34))
def test_recursive_doubling_is_accepted(n):
    check(recursive_doubling.allreduce(n, 2))


def test_two_ranks_may_exchange_and_reduce():
    check(exchange(None, None))


def test_an_error_says_where_and_what():
    wrong = exchange([send(1), reduce(1, is_final=True)], None)
    with pytest.raises(ScheduleError, match="rank 0, channel 0, op 1: RECV_REDUCE of chunk 0") as e:
        check(wrong)
    assert (e.value.rank, e.value.channel, e.value.op) == (0, 0, 1)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ([], "rank 0.*rank 1 has no matching receive"),
        ([send(0)], "rank 1 has no matching receive"),
        ([send(0), reduce(0, is_final=True)], "does not wait for it"),
        ([send(0), recv(0, after=(0,))], "rank 1's data is missing"),
        ([send(0), reduce(0, after=(0,))], "completes the reduction without is_final"),
        ([send(0), reduce(0, source=OUT, after=(0,), is_final=True)], "reads OUTPUT, which"),
        ([send(0, space=SCRATCH), reduce(0, after=(0,), is_final=True)], "reads SCRATCH, which"),
        ([send(0), reduce(0, target=IN, after=(0,), is_final=True)], "INPUT is read-only"),
        ([send(0), reduce(0, target=SCRATCH, after=(0,), is_final=True)], "no op has written it"),
        ([send(0), reduce(0, after=(1,), is_final=True)], "after must name earlier ops"),
        ([send(0), reduce(0, after=(0, 0), is_final=True)], "after must be strictly ascending"),
        ([send(1), reduce(0, after=(0,), is_final=True)], "peer must be another rank"),
        ([send(2), reduce(0, after=(0,), is_final=True)], "peer must be a rank below 2"),
        (
            [send(0, 1), reduce(0, after=(0,), is_final=True)],
            "src must be a chunk of the channel",
        ),
    ],
)
def test_what_is_wrong_is_named(program, says):
    with pytest.raises(ScheduleError, match=says):
        check(exchange(None, program))


def test_data_added_twice_is_refused():
    program = [
        send(0),
        reduce(0, after=(0,), is_final=True),
        local(OpKind.REDUCE, IN, OUT, after=(1,), is_final=True),
    ]
    with pytest.raises(ScheduleError, match="already complete"):
        check(exchange(None, program))
    program[1:] = [
        reduce(0, target=SCRATCH, after=(0,), is_final=True),
        local(OpKind.COPY, IN, OUT, after=(1,)),
        local(OpKind.REDUCE, IN, OUT, after=(2,)),
    ]
    with pytest.raises(ScheduleError, match="adds rank 1's data twice"):
        check(exchange(None, program))


def test_a_copy_onto_itself_is_harmless_but_waits_its_turn():
    final = [send(0), reduce(0, after=(0,), is_final=True)]
    check(exchange(None, [*final, local(OpKind.COPY, OUT, OUT, after=(1,))]))
    with pytest.raises(ScheduleError, match="does not wait"):
        check(exchange(None, [*final, local(OpKind.COPY, OUT, OUT)]))


def test_scratch_detours_are_followed():
    """Rank 1 reduces beside its output, then copies."""
    program = [
        send(0),
        local(OpKind.COPY, IN, SCRATCH),
        reduce(0, source=SCRATCH, target=SCRATCH, after=(1,), is_final=True),
        local(OpKind.COPY, SCRATCH, OUT, after=(0, 2)),
    ]
    check(exchange(None, program))


def test_receiving_before_sending_on_both_sides_is_a_deadlock():
    program = [reduce(1, is_final=True), send(1, space=OUT, after=(0,))]
    other = [reduce(0, is_final=True), send(0, space=OUT, after=(0,))]
    with pytest.raises(ScheduleError, match="deadlock"):
        check(exchange(program, other))


def test_landing_in_what_is_being_sent_deadlocks_without_spares():
    """Each names its landing place only when its own send is released: fine only with slots."""
    program = [send(1), recv(1, after=(0,))]
    other = [send(0), recv(0, after=(0,))]
    with pytest.raises(ScheduleError, match=r"deadlock.*SEND \(rank"):
        check(exchange(program, other))


def test_a_confirmation_orders_nothing():
    """Rank 0 overwrites its input once rank 1 holds it: proven by an answer, not by a release."""
    answered = by_hand(
        [send(1), recv(1, after=())],
        [reduce(0, is_final=True), send(0, space=OUT, after=(0,))],
    )
    with pytest.raises(ScheduleError, match=r"rank 0, channel 0, op 1.*does not wait for it"):
        check(answered)


def test_messages_order_what_they_carry_across_ranks():
    """A round trip orders two ops of one rank that do not name each other."""
    round_trip = by_hand(
        [
            send(1),
            local(OpKind.COPY, IN, SCRATCH, after=(0,)),
            send(1, space=SCRATCH, after=(1,)),
            # Arrives only after rank 1 got the copy, so the copy's read of INPUT is over.
            recv(1, after=(0,)),
        ],
        [
            reduce(0, is_final=True),
            recv(0, space=SCRATCH),
            send(0, space=OUT, after=(0, 1)),
        ],
    )
    check(round_trip)


def test_ranks_that_reduce_in_different_orders_are_refused():
    """All sums are complete, but rank 2 adds 1 + (0 + 2) where the others add (0 + 1) + 2."""

    def program(rank):
        first, second = (peer for peer in range(3) if peer != rank)
        return [
            send(first),
            send(second),
            reduce(first, after=(0, 1)),
            reduce(second, source=OUT, after=(2,), is_final=True),
        ]

    with pytest.raises(ScheduleError, match=r"rank 2.*another order"):
        check(by_hand(*map(program, range(3))))


def test_chunks_on_a_link_arrive_in_the_order_sent():
    with pytest.raises(ScheduleError, match="receives chunk 1 where rank 0 op 0 sends chunk 0"):
        check(by_hand([send(1, 0), send(1, 1)], [recv(0, 1), recv(0, 0)], nchunks=2))


BROADCAST = (
    [send(1), local(OpKind.COPY, IN, OUT, after=(0,))],
    [recv(0), send(2, space=OUT, after=(0,))],
    [recv(1)],
)
REDUCE = (
    [reduce(1, is_final=True)],
    [reduce(2), send(0, space=OUT, after=(0,))],
    [send(1)],
)
ALLGATHER = (
    [send(1, 0), local(OpKind.COPY, IN, OUT, 0, after=(0,)), recv(1, 1)],
    [send(0, 1), local(OpKind.COPY, IN, OUT, 1, after=(0,)), recv(0, 0)],
)
REDUCE_SCATTER = (
    [send(1, 1), reduce(1, 0, is_final=True)],
    [send(0, 0), reduce(0, 1, is_final=True)],
)
GATHER = (
    [local(OpKind.COPY, IN, OUT, 0), recv(1, 1)],
    [send(0, 1)],
)
SCATTER = (
    [local(OpKind.COPY, IN, OUT, 0), send(1, 1)],
    [recv(0, 1)],
)
ALLTOALL = (
    [local(OpKind.COPY, IN, OUT, 0), send(1, 1), recv(1, 1)],
    [local(OpKind.COPY, IN, OUT, 0), send(0, 1), recv(0, 1)],
)
SCAN = (
    [send(1), local(OpKind.COPY, IN, OUT, after=(0,))],
    [reduce(0), send(2, space=OUT, after=(0,))],
    [reduce(1)],
)
EXSCAN = (
    [send(1)],
    [
        recv(0),
        local(OpKind.COPY, OUT, SCRATCH, after=(0,)),
        local(OpKind.REDUCE, IN, SCRATCH, after=(1,)),
        send(2, space=SCRATCH, after=(2,)),
    ],
    [recv(1)],
)
#: Collectives whose every schedule is also a schedule of another one.
IMPLIED = {"allgather": {"gather"}}


@pytest.mark.parametrize(
    ("collective", "programs", "nchunks"),
    [
        ("broadcast", BROADCAST, 1),
        ("reduce", REDUCE, 1),
        ("allgather", ALLGATHER, 2),
        ("reduce_scatter", REDUCE_SCATTER, 2),
        ("gather", GATHER, 2),
        ("scatter", SCATTER, 2),
        ("alltoall", ALLTOALL, 2),
        ("scan", SCAN, 1),
        ("exscan", EXSCAN, 1),
    ],
)
def test_other_collectives_are_told_apart_by_their_conditions(collective, programs, nchunks):
    schedule = by_hand(*programs, collective=collective, nchunks=nchunks)
    check(schedule)
    for other in (*conditions.CONDITIONS, *conditions.ROOTED):
        if other != collective and other not in IMPLIED.get(collective, ()):
            with pytest.raises((ScheduleError, InvalidArgument)):
                check(replace(schedule, collective=other))


def test_a_root_is_part_of_the_conditions():
    schedule = by_hand(*REDUCE, collective="reduce")
    check(schedule)
    with pytest.raises(ScheduleError, match="rank 1"):
        check(replace(schedule, root=1))
    with pytest.raises(ScheduleError):
        check(replace(by_hand(*BROADCAST, collective="broadcast"), root=2))
    with pytest.raises(InvalidArgument, match="root=3; allowed is 0 to 2"):
        replace(schedule, root=3)


@pytest.mark.parametrize("make", [conditions.reduce, conditions.broadcast])
def test_a_root_that_is_no_rank_is_refused(make):
    with pytest.raises(InvalidArgument, match="root=3"):
        make(3, 1, root=3)


@pytest.mark.parametrize("make", [conditions.allgather, conditions.reduce_scatter])
def test_owned_chunks_must_be_shared_evenly(make):
    with pytest.raises(InvalidArgument, match="4 chunks for 3 ranks"):
        make(3, 4)


def test_an_unknown_collective_is_refused():
    with pytest.raises(ScheduleError, match="'allsum' is unknown"):
        check(by_hand([], collective="allsum"))


def test_a_prefix_is_reduced_in_rank_order():
    """Rank 2 must not add rank 0's data before rank 1's, though the sum would be the same."""
    wrong = (
        [send(1), send(2), local(OpKind.COPY, IN, OUT, after=(0, 1))],
        [send(2), reduce(0, after=(0,))],
        [reduce(0), reduce(1, source=OUT, after=(0,))],
    )
    with pytest.raises(ScheduleError, match="must be in rank order"):
        check(by_hand(*wrong, collective="scan"))


@pytest.mark.parametrize(("collective", "programs"), [("alltoall", ALLTOALL), ("exscan", EXSCAN)])
def test_some_collectives_are_never_in_place(collective, programs):
    nchunks = 2 if collective == "alltoall" else 1
    schedule = by_hand(*programs, collective=collective, nchunks=nchunks)
    inputs = [np.arange(2) for _ in programs]
    with pytest.raises(InvalidArgument, match=f"{collective} cannot be in place"):
        interpret(schedule, inputs, np.add, in_place=True)


def test_an_empty_program_leaves_the_output_unwritten():
    with pytest.raises(ScheduleError, match="no op has written it"):
        check(by_hand([], []))


@pytest.mark.parametrize("value", [1 << 40, 0.0, None])
def test_fields_that_do_not_fit_their_type_are_refused(value):
    with pytest.raises(ScheduleError, match=r"op 1: .*pass integers that fit into 32 bits"):
        check(exchange(None, [send(0), recv(value)]))


def test_a_wrong_number_of_channels_is_refused():
    with pytest.raises(ScheduleError, match="1 channels instead of 2"):
        check(replace(exchange(None, None), nchunks=(1, 1), weights=(1, 1)))


@pytest.mark.parametrize("sizes", [{"nranks": 0}, {"nchunks": ()}, {"nchunks": (0,)}])
def test_sizes_below_one_are_refused(sizes):
    ((field, value),) = sizes.items()
    with pytest.raises(InvalidArgument, match=re.escape(f"{field}={value}")):
        replace(exchange(None, None), **sizes)


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (0, 0), (-1, 3)])
def test_a_schedule_wants_one_weight_a_channel(weights):
    with pytest.raises(InvalidArgument, match="one per channel, each 0 or more and not all 0"):
        replace(ring.allreduce(2, 2), weights=weights)
    assert replace(ring.allreduce(2, 2), weights=(0, 1)).weights == (0, 1)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_schedule_is_refused(rank):
    with pytest.raises(InvalidArgument, match=f"rank={rank}"):
        exchange(None, None).program(rank)


def test_channels_are_checked_one_by_one():
    good = exchange(None, None)
    bad = replace(
        good,
        nchunks=(1, 1),
        weights=(1, 1),
        generate=lambda rank: (
            good.program(rank).channels[0],
            tuple(replace(op, is_final=False) for op in good.program(rank).channels[0]),
        ),
    )
    with pytest.raises(ScheduleError) as e:
        check(bad)
    assert e.value.channel == 1


def test_each_channel_has_its_own_number_of_chunks():
    both = [ring.allreduce(3), recursive_doubling.allreduce(3)]
    mixed = replace(
        both[0],
        nchunks=(3, 1),
        weights=(2, 1),
        generate=lambda rank: tuple(each.program(rank).channels[0] for each in both),
    )
    check(mixed)
    with pytest.raises(ScheduleError, match="src must be a chunk of the channel"):
        check(replace(mixed, nchunks=(1, 3)))
    with pytest.raises(ScheduleError, match="no op has written it"):
        check(replace(mixed, nchunks=(3, 2)))


def test_a_proof_that_proves_nothing_is_refused():
    """Rank 1 may send its data before it has received rank 0's: no landing place may rely on it."""
    receive = Op(OpKind.RECV, 1, OUT, -1, OUT, 0, (0,), False, True)
    wrong = exchange([send(1), receive], [send(0), reduce(0, after=(0,), is_final=True)])
    with pytest.raises(ScheduleError, match="is_proof is wrong here"):
        check(wrong)


def test_only_a_receive_can_be_a_proof():
    claims = Op(OpKind.RECV_REDUCE, 1, IN, 0, OUT, 0, (0,), True, True)
    with pytest.raises(ScheduleError, match=r"only a RECV can have is_proof;.*is_proof=True"):
        check(exchange([send(1), claims], None))


@pytest.mark.parametrize("n", [*range(1, 18), 32])
def test_schedules_in_rank_order(n):
    for schedule in (
        recursive_doubling.allreduce(n, 2),
        tree.allreduce([tree.line(n, n - 1)] * 2),
        tree.allreduce([tree.double_binary(n)[0]]),
        *(tree.reduce([tree.line(n, root)]) for root in {0, n // 3, n - 1}),
    ):
        check(schedule)
        check_order(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        ring.allreduce(3),
        ring.reduce_scatter(4),
        tree.allreduce([tree.line(4, 3), tree.chain([0, 2, 1, 3])]),
        tree.reduce([tree.chain([1, 2, 3, 0])]),
    ],
    ids=lambda schedule: schedule.collective,
)
def test_schedules_in_another_order_are_refused(schedule):
    check(schedule)
    with pytest.raises(ScheduleError, match=r"rank \d: .* of ranks \(.*needs rank order"):
        check_order(schedule)


def test_a_reduce_scatter_in_rank_order():
    """Rank 0 keeps chunk 0 and rank 1 chunk 1: the peer's data is on the side of its rank."""
    check_order(
        by_hand(
            [send(1, 1), reduce(1, 0, is_final=True)],
            [send(0, 0), reduce(0, 1, is_final=True)],
            collective="reduce_scatter",
            nchunks=2,
        )
    )
