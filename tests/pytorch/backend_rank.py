"""Programs that use what torch 2.14 and newer add to backends in Python.

Usage: ``backend_rank.py NAME``. No program imports r2ccl.torch: torch does, by the entry point.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


def the_backend_is_found_by_its_name() -> None:
    assert "r2ccl" not in sys.modules
    dist.init_process_group("r2ccl")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    assert dist.get_backend() == "r2ccl"


def calls_of_the_backend_are_calls_of_the_group() -> None:
    dist.init_process_group("r2ccl", timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, c10d.Backend)
    assert (backend.rank(), backend.size(), backend.name()) == (dist.get_rank(), 2, "r2ccl")
    x, n = torch.ones(3), group._get_sequence_number_for_group()
    backend.allreduce([x], c10d.AllreduceOptions()).wait()
    assert x.tolist() == [2.0] * 3
    assert group._get_sequence_number_for_group() == n + 1
    group.set_timeout(timedelta(seconds=20))
    assert backend.options._timeout == timedelta(seconds=20)
    # A property that is missing in the class calls itself without end.
    flags = [name for name in dir(c10d.Backend) if "supports" in name]
    values = {name: getattr(backend, name) for name in flags if name != "supports_tensor_alloc"}
    assert [name for name, value in values.items() if value] == ["supports_splitting"]


def the_dispatcher_reaches_the_group() -> None:
    dist.init_process_group("r2ccl")
    x, total = torch.ones(3), c10d.ReduceOp(c10d.ReduceOp.SUM).boxed()
    _, work = torch.ops.c10d.allreduce_([x], dist.group.WORLD.boxed(), total, None, False, -1)
    work.wait()
    assert x.tolist() == [2.0] * 3


def split_group_and_monitored_barrier_work() -> None:
    dist.init_process_group("r2ccl")
    mine = dist.split_group(split_ranks=[[0], [1]])
    assert (dist.get_world_size(mine), dist.get_rank(mine)) == (1, 0)
    dist.monitored_barrier()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1 did not pass monitored_barrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
    dist.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
