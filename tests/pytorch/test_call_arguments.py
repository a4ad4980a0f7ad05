"""Methods of a group accept and refuse the same arguments as those of torch's own groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from r2ccl.interop.torch.methods import GroupMethods, GroupState

LIMIT = timedelta(seconds=10)
SUM = c10d.ReduceOp.SUM


class LoneCommunicator:
    """The only rank, whose data is the result."""

    rank, nranks = 0, 1
    config = SimpleNamespace(timeout_s=10.0)

    def allreduce(self, x: Any, op: Any) -> None:
        pass

    def broadcast(self, x: Any, root: int) -> None:
        assert root == 0

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """Groups of gloo and r2ccl."""
    comm: Any = LoneCommunicator()
    made = GroupMethods(GroupState(comm, None, LIMIT, lambda: None))
    yield [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, LIMIT), made]
    made.shutdown()


@pytest.mark.parametrize(
    "call",
    [
        lambda group, x: group.allreduce(x),
        lambda group, x: group.allreduce(x, c10d.AllreduceOptions()),
        lambda group, x: group.allreduce(x, opts=c10d.AllreduceOptions()),
        lambda group, x: group.allreduce(x, SUM),
        lambda group, x: group.allreduce(x, SUM, LIMIT),
        lambda group, x: group.allreduce(x, SUM, timeout=LIMIT),
        lambda group, x: group.allreduce(x, timeout=LIMIT, op=SUM),
        lambda group, x: group.broadcast(x[0], 0, timeout=LIMIT),
        lambda group, x: group.barrier(c10d.BarrierOptions()),
    ],
)
def test_forms_of_torch_are_accepted(groups: list[Any], call: Callable[..., Any]) -> None:
    for group in groups:
        call(group, [torch.ones(3)]).wait()


@pytest.mark.parametrize(
    "call",
    [
        lambda group, x: group.allreduce(x, SUM, LIMIT, 5),
        lambda group, x: group.allreduce(x, c10d.AllreduceOptions(), 5),
        lambda group, x: group.allreduce(x, c10d.AllreduceOptions(), timeout=LIMIT),
        lambda group, x: group.allreduce(x, SUM, opts=c10d.AllreduceOptions()),
        lambda group, x: group.allreduce(x, SUM, op=SUM),
        lambda group, x: group.allreduce(x, c10d.AllreduceOptions(), opts=c10d.AllreduceOptions()),
        lambda group, x: group.allreduce(x, root=0),
        lambda group, x: group.broadcast(x[0], 0, LIMIT, 5),
        lambda group, x: group.barrier(c10d.BarrierOptions(), 5),
    ],
)
def test_surplus_arguments_raise_type_error(groups: list[Any], call: Callable[..., Any]) -> None:
    for group in groups:
        with pytest.raises(TypeError, match=r"incompatible function arguments|allowed are opts"):
            call(group, [torch.ones(3)])
