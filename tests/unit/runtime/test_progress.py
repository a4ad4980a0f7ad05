"""Tests of the description of a call in errors about calls that differ."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from r2ccl import dtypes
from r2ccl.runtime.progress import describe
from r2ccl.types import ORDERED_OP, USER_OP, CallSignature, Collective, ReduceOp


def test_a_dtype_that_only_the_peer_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(dtypes.DTYPES, dtypes.BFLOAT16_CODE, raising=False)
    call = CallSignature(Collective.ALLREDUCE, dtypes.BFLOAT16_CODE, ReduceOp.SUM, 8)
    assert describe(call.pack()) == "allreduce(count=8, dtype=bfloat16, op=SUM)"


def test_an_operation_of_the_user_is_named_by_its_digest() -> None:
    call = CallSignature(Collective.REDUCE, 7, USER_OP, 1 << 25, 3, 0xABCDE123)
    text = "reduce(count=33554432, dtype=float32, op=user_op 123, root=3)"
    assert describe(call.pack()) == text
    others = [
        replace(call, **change)
        for change in (
            {"op": ORDERED_OP}, {"user": 0xABCDE125}, {"count": 9}, {"root": 2},
            {"count": call.count + (1 << 26)}, {"count": call.count + (1 << 37)},
        )
    ]  # fmt: skip
    assert len({each.pack() for each in (call, *others)}) == 7
    assert all(each.pack() < 1 << 64 for each in (call, *others))
