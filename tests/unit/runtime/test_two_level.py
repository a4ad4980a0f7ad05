"""Errors of calls in two levels, with fakes of the network and of the shared memory of a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r2ccl.dtypes import CODES
from r2ccl.errors import InvalidArgument, R2cclError
from r2ccl.planning.two_level import Division, NodePlace, Piece
from r2ccl.runtime.patience import revoked
from r2ccl.runtime.two_level import TwoLevelCalls
from r2ccl.shm.group import CallsDiffer
from r2ccl.types import CallSignature, Collective, ReduceOp


class Node:
    """Shared memory of two ranks, whose calls differ in step number `differing`."""

    rank = 0

    def __init__(self, differing: int) -> None:
        self._differing = differing
        self._nsteps = 0

    def has_kernel(self, dtype: int, op: int) -> bool:
        return True

    def prepare(self, form: CallSignature, parts: Any) -> Any:
        return SimpleNamespace(signed=lambda packed: packed)

    def run(self, packed: int, source: Any, output: Any) -> None:
        self._nsteps += 1
        if self._nsteps == self._differing:
            raise CallsDiffer(1, packed, packed + 1)

    def absent(self) -> list[int]:
        return []

    def wake(self) -> None: ...


CHUNK = (Piece(0, 8, ((0, 4), (4, 8))),)


# With two chunks, the second thread runs steps 2 and 3, or 3 and 2.
@pytest.mark.parametrize(("nchunks", "differing"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (2, 4)])
def test_calls_that_differ_are_named_by_their_number(nchunks: int, differing: int) -> None:
    engine: Any = SimpleNamespace(
        rank=0, op=4, error=None, has_raised=False, attach=lambda calls: None, enter=lambda: None
    )

    def fail(error: BaseException) -> None:
        engine.has_raised |= isinstance(error, R2cclError)
        engine.error = engine.error or error

    def check() -> None:
        if engine.error is not None:
            raise revoked(0, engine.error) if engine.has_raised else engine.error

    def await_local(op: int, call: int, resume: Any, *given: Any, **named: Any) -> None:
        while not resume():
            pass

    def run_engine(plan: Any, make: Any) -> None:
        if engine.op == 4:
            engine.op += 1

    engine.fail_local, engine.check = fail, check
    engine.waits = SimpleNamespace(await_local=await_local)
    engine.note_end_known = lambda: None
    whole = Division((CHUNK,) * nchunks, True, 0)
    plans: Any = SimpleNamespace(
        division=lambda *given: whole,
        is_bandwidth_sample=lambda *given: False,
        place_of=lambda rank: NodePlace(rank // 2, rank % 2, 2),
        bounds=lambda count, sizes: [0, 2, 4, 6, 8],
        plan=lambda *given, **named: None,
    )
    group: Any = Node(differing)
    unused: Any = None
    calls = TwoLevelCalls(
        engine, group, (0, 1), plans=plans, one_level=unused, pool=unused,
        run_engine=run_engine, scratch=np.empty,
    )  # fmt: skip
    x = np.ones(8)
    call = CallSignature(Collective.ALLREDUCE, CODES[x.dtype], ReduceOp.SUM, 8)
    with pytest.raises(InvalidArgument, match="call 5 differs between ranks: rank 0 called"):
        calls.run(call, x, x, lambda plan: None)
