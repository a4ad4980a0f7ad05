"""What is derived from a schedule: arrays, cost, text, and the reference run."""

from __future__ import annotations

import doctest
from fractions import Fraction

import numpy as np
import pytest
from msgspec.structs import replace

from r2ccl.algos import recursive_doubling, ring
from r2ccl.errors import InvalidArgument, ScheduleError
from r2ccl.schedule import show
from r2ccl.schedule.arrays import as_arrays
from r2ccl.schedule.cost import measure, wire_nbytes
from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Cost, Op, OpKind, Schedule, Space
from r2ccl.schedule.show import summary, table


def local_only(*ops, nranks=1):
    return Schedule(
        name="by hand",
        collective="allreduce",
        nranks=nranks,
        nchunks=(1,),
        cost=Cost(0, Fraction(0), Fraction(0), len(ops)),
        generate=lambda rank: (ops,),
    )


@pytest.mark.parametrize("nchannels", [1, 3])
def test_arrays_hold_every_field_of_every_op(nchannels):
    schedule = ring.allreduce(5, nchannels)
    arrays = as_arrays(schedule)
    rows = iter(range(arrays.ops.size))
    for rank in range(5):
        for channel, ops in enumerate(schedule.program(rank).channels):
            for index, op in enumerate(ops):
                i = next(rows)
                fields = arrays.ops[i].tolist()
                assert fields[:3] == (rank, channel, index)
                assert fields[3:] == (
                    op.kind, op.peer, op.src_space, op.src, op.dst_space, op.dst, op.is_final,
                    op.is_proof,
                )  # fmt: skip
                assert tuple(arrays.after[arrays.offsets[i] : arrays.offsets[i + 1]]) == op.after
                assert arrays.chunks()[i] == op.chunk
    assert next(rows, None) is None


def test_arrays_say_who_waits_for_whom_across_programs():
    arrays = as_arrays(ring.allreduce(3, 2))
    waiting, waited = arrays.waits()
    assert (arrays.ops["rank"][waiting] == arrays.ops["rank"][waited]).all()
    assert (arrays.ops["channel"][waiting] == arrays.ops["channel"][waited]).all()
    assert (arrays.ops["index"][waited] == arrays.after).all()


@pytest.mark.parametrize("n", [*range(1, 18), 32])
@pytest.mark.parametrize("algorithm", [ring, recursive_doubling])
def test_declared_cost_is_what_the_ops_cost(algorithm, n):
    schedule = algorithm.allreduce(n, 2)
    assert measure(schedule) == schedule.cost


@pytest.mark.parametrize("count", [0, 1, 999, 100_000])
@pytest.mark.parametrize("weights", [None, (3, 1)])
def test_bytes_on_the_wire_balance_and_match_the_declared_share(count, weights):
    schedule = ring.allreduce(5, 2)
    sent, received = wire_nbytes(schedule, count, 4, weights)
    assert sent.sum() == received.sum() == 5 * Fraction(8, 5) * count * 4
    # Every chunk may be one element off on every one of the 16 messages.
    assert abs(sent - float(schedule.cost.sent) * count * 4).max() <= 16 * 4
    assert abs(received - float(schedule.cost.received) * count * 4).max() <= 16 * 4


def test_the_summary_is_one_line_of_facts():
    assert summary(ring.allreduce(4)) == (
        "allreduce ring: 4 ranks, 1 channel of 4 chunks, 6 steps, each rank sends at most 3/2 "
        "and receives at most 3/2 of the data, at most 12 ops per rank and channel"
    )


def test_the_table_shows_every_op_of_the_ranks_asked_for():
    lines = table(ring.allreduce(4), ranks=[1, 3]).splitlines()
    assert lines[1].split() == ["op", "rank", "1", "rank", "3"]
    assert len(lines) == 2 + 12
    assert "out[2] = from 0 + in[2] !" in lines[7]
    assert "to 0: out[3] @7" in lines[10]


def test_the_table_shows_local_ops_and_nonsense_alike():
    text = table(
        local_only(
            Op(OpKind.COPY, -1, Space.INPUT, 0, Space.SCRATCH, 0),
            Op(OpKind.REDUCE, -1, Space.SCRATCH, 0, Space.OUTPUT, 0, (0,)),
            Op(9, -1, 7, 0, Space.OUTPUT, 0),
        )
    )
    assert "scratch[0] = in[0]" in text
    assert "out[0] = out[0] + scratch[0] @0" in text
    assert "kind=9" in text


def test_the_table_shows_ranks_that_lack_the_channel():
    ring4 = ring.allreduce(4, 2)
    short = replace(ring4, generate=lambda rank: ring4.generate(rank)[: 2 - rank % 2])
    lines = table(short, ranks=[0, 1], channel=1).splitlines()
    assert lines[2].split("in[0]")[1].strip() == "has only 1 channel"
    assert len(lines) == 2 + 12


@pytest.mark.parametrize("wrong", [{"peer": None}, {"peer": "1"}, {"after": 3}, {"kind": []}])
def test_the_table_shows_fields_of_a_wrong_type(wrong):
    op = replace(Op(OpKind.RECV_REDUCE, 1, Space.INPUT, 0, Space.OUTPUT, 0), **wrong)
    assert repr(op) in table(local_only(op))


@pytest.mark.parametrize("wrong", [None, ((1, 2), (3,)), (None,), 5, "ab"])
def test_a_program_of_another_type_is_refused(wrong):
    schedule = replace(ring.allreduce(4, 2), generate=lambda rank: wrong)
    with pytest.raises(ScheduleError):
        as_arrays(schedule)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ["ring"]),
        ("collective", ["allreduce"]),
        ("nranks", 4.0),
        ("nranks", np.int64(4)),
        ("nchunks", [4, 4]),
        ("nchunks", (np.int64(4), np.int64(4))),
        ("nchunks", 4),
        ("cost", None),
        ("cost", Cost(-1, Fraction(1), Fraction(1), 1)),
        ("cost", Cost(1, None, Fraction(1), 1)),
        ("generate", None),
        ("weights", [1, 1]),
        ("weights", (1.5, 1.0)),
        ("weights", np.array([1, 1])),
        ("root", "0"),
    ],
)
def test_a_schedule_refuses_fields_of_another_type(field, value):
    with pytest.raises(InvalidArgument, match=f"{field} is "):
        replace(ring.allreduce(4, 2), **{field: value})


def test_the_example_in_the_documentation_is_true():
    result = doctest.testmod(show)
    assert (result.attempted > 0, result.failed) == (True, 0)


@pytest.mark.parametrize("where", [{"ranks": [4]}, {"channel": 1}])
def test_the_table_refuses_what_is_not_there(where):
    with pytest.raises(InvalidArgument):
        table(ring.allreduce(4), **where)


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        ([], "0 inputs were given"),
        ([np.ones(3), np.ones(3)], r"2 inputs were given \(float64 of shape \(3,\)\)"),
        (
            [np.ones((3, 1)), np.ones((3, 1)), np.ones(3, "f4")],
            r"3 inputs were given \(float32 of shape \(3,\), float64 of shape \(3, 1\)\)",
        ),
    ],
)
def test_the_reference_run_tells_what_inputs_it_got(inputs, given):
    wanted = f"the schedule has 3 ranks; {given}: give one flat array per rank"
    with pytest.raises(InvalidArgument, match=wanted):
        interpret(ring.allreduce(3), inputs, np.add)


def test_the_reference_run_leaves_its_inputs_alone():
    inputs = [np.arange(7.0) + rank for rank in range(3)]
    kept = [array.copy() for array in inputs]
    interpret(ring.allreduce(3), inputs, np.add, in_place=True)
    assert all((a == b).all() for a, b in zip(inputs, kept, strict=True))


def test_the_reference_run_reduces_with_the_target_on_the_left():
    schedule = local_only(
        Op(OpKind.COPY, -1, Space.INPUT, 0, Space.OUTPUT, 0),
        Op(OpKind.COPY, -1, Space.INPUT, 0, Space.SCRATCH, 0),
        Op(OpKind.REDUCE, -1, Space.SCRATCH, 0, Space.OUTPUT, 0, (0, 1)),
    )
    [result] = interpret(schedule, [np.array([5.0])], lambda left, right: 10 * left + right)
    assert result == 55.0


def test_the_reference_run_names_who_waits_for_ever():
    schedule = ring.allreduce(3)
    silent = replace(schedule, generate=lambda rank: schedule.generate(rank) if rank else ((),))
    with pytest.raises(ScheduleError, match="rank 1, channel 0, op 1"):
        interpret(silent, [np.zeros(3)] * 3, np.add)


@pytest.mark.parametrize(
    ("nops", "others"), [(1, ""), (2, ", as does 1 other op"), (3, ", as do 2 other ops")]
)
def test_the_reference_run_counts_who_waits_for_ever(nops, others):
    deaf = local_only(*[Op(OpKind.RECV, 1, Space.INPUT, 0, Space.OUTPUT, 0)] * nops)
    with pytest.raises(ScheduleError, match=rf"\) waits forever{others}; run check"):
        interpret(deaf, [np.zeros(3)], np.add)


@pytest.mark.parametrize(
    "inputs",
    [
        [np.zeros(3)] * 2,
        [np.zeros(3)] * 4,
        [np.zeros(3), np.zeros(3), np.zeros(4)],
        [np.zeros((3, 1))] * 3,
        [np.zeros(3), np.zeros(3), np.zeros(3, np.float32)],
    ],
)
def test_the_reference_run_refuses_unlike_inputs(inputs):
    with pytest.raises(InvalidArgument):
        interpret(ring.allreduce(3), inputs, np.add)


@pytest.mark.parametrize(("algorithm", "nops"), [(ring, 4 * 1023), (recursive_doubling, 2 * 10)])
def test_a_thousand_ranks_are_generated_one_at_a_time(algorithm, nops):
    schedule = algorithm.allreduce(1024, 4)
    for rank in (0, 511, 1023):
        channels = schedule.program(rank).channels
        assert [len(ops) for ops in channels] == [nops] * 4
        assert len({id(ops) for ops in channels}) == 1, "channels alike share their ops"


def test_the_global_form_stays_small():
    arrays = as_arrays(ring.allreduce(64))
    assert arrays.ops.size == 64 * 4 * 63
    assert sum(array.nbytes for array in arrays) <= 48 * arrays.ops.size
