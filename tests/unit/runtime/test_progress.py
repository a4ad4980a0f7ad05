"""What the data loop writes about calls that differ."""

from __future__ import annotations

import pytest

from r2ccl import dtypes
from r2ccl.runtime.progress import describe
from r2ccl.types import CallSignature, Collective, ReduceOp


def test_a_dtype_that_only_the_peer_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(dtypes.DTYPES, dtypes.BFLOAT16_CODE, raising=False)
    call = CallSignature(Collective.ALLREDUCE, dtypes.BFLOAT16_CODE, ReduceOp.SUM, 8)
    assert describe(call.pack()) == "allreduce(count=8, dtype=bfloat16, op=SUM)"
