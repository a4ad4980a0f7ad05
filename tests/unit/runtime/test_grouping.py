"""Which calls of a group are joined into one."""

from __future__ import annotations

import numpy as np

from r2ccl.runtime import arguments
from r2ccl.runtime.arguments import Request
from r2ccl.runtime.grouping import batches, joined
from r2ccl.types import ReduceOp


def sums(*counts: int, dtype: str = "float32", op: ReduceOp = ReduceOp.SUM) -> list[Request]:
    return [arguments.allreduce(np.ones(count, dtype), None, op) for count in counts]


def test_small_allreduces_of_one_kind_are_joined() -> None:
    a, b, c = sums(3, 5), sums(4, dtype="int8"), sums(7, 1)
    assert batches([*a, *b, *c]) == [[*a, *c], b]
    assert joined([*a, *c]).count == 16


def test_operations_and_other_collectives_are_not_mixed() -> None:
    a, b = sums(3), sums(3, op=ReduceOp.MAX)
    moved = arguments.broadcast(np.ones(3, np.float32), None, 0, 1)
    assert batches([*a, moved, *b, *a]) == [[*a, *a], [moved], b]


def test_large_arrays_are_not_copied_and_calls_are_bounded() -> None:
    large, small = sums(100_000), sums(*[60_000] * 40)
    found = batches([*small, *large])
    assert found[-1] == large
    assert [len(batch) for batch in found[:-1]] == [17, 17, 6]


def test_joined_calls_of_other_counts_have_other_signatures() -> None:
    assert joined(sums(3, 5)).pack() != joined(sums(4, 4)).pack()
    assert joined(sums(3, 5)).pack() == joined(sums(3, 5)).pack()
