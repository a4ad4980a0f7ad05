"""Programs whose ranks end, fail or are killed; usage: ``endings_rank.py NAME``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import r2ccl
import r2ccl.torch

#: Key of rank 0's address, port and secret in the store of the first process group.
OFFER = "r2ccl/1/2"


def init(**options: Any) -> None:
    dist.init_process_group("r2ccl", **options)


def raised(call: Any) -> BaseException:
    try:
        call()
    except Exception as exc:
        return exc
    raise AssertionError("no error was raised")


def group() -> r2ccl.torch.R2cclProcessGroup:
    found = dist.group.WORLD
    assert isinstance(found, r2ccl.torch.R2cclProcessGroup)
    return found


def killed_in_an_allreduce() -> None:
    init()
    x = torch.ones(1000)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(lambda: [dist.all_reduce(x) for _ in range(3)])
    assert isinstance(error, dist.DistBackendError), error
    assert isinstance(error.__cause__, r2ccl.R2cclError)
    print(type(error.__cause__).__name__)
    dist.destroy_process_group()


def killed_in_a_backward_pass() -> None:
    init()
    net = DistributedDataParallel(torch.nn.Linear(10, 10))
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = net(torch.ones(2, 10)).sum()
        if step < 2:
            loss.backward()
    error = raised(loss.backward)
    assert "lost rank 1" in str(error), error
    print("PeerLost")


def initialized_twenty_times() -> None:
    def usage() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    found = []
    for _ in range(20):
        init()
        x = torch.ones(100)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).get_future().wait()
        dist.destroy_process_group()
        time.sleep(0.05)  # threads that were told to end
        found.append(usage())
    assert max(found[10:]) <= max(found[:5]), found


def ends_without_destroy() -> None:
    init()
    x = torch.ones(10)
    dist.all_reduce(x, async_op=True)
    print("last line")


def ends_with_an_error() -> None:
    init()
    if dist.get_rank() == 1:
        raise ValueError("a defect in the program")
    error = raised(lambda: dist.all_reduce(torch.ones(10)))
    assert "a defect in the program" in str(error), error
    print("CommunicatorRevoked")


def futures_raise() -> None:
    init()
    work = dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fnuz), async_op=True)
    assert "float8_e4m3fnuz" in str(raised(work.get_future().wait))
    assert isinstance(raised(work.wait), dist.DistBackendError)
    assert isinstance(work.exception(), dist.DistBackendError)
    assert work.is_completed()
    assert not work.is_success()
    dist.all_reduce(torch.ones(3))  # the group is usable
    dist.destroy_process_group()


def waits_have_a_timeout() -> None:
    init(timeout=timedelta(seconds=30))
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        late = dist.irecv(torch.ones(3), 1)
        for each in (work, late):
            error = raised(lambda each=each: each.wait(timedelta(milliseconds=50)))
            assert "wait again" in str(error), error
        dist.send(torch.ones(1), 1)
        assert work.wait()
        assert late.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(3))
        dist.send(torch.ones(3), 0)
    dist.destroy_process_group()


def calls_have_a_timeout() -> None:
    init(timeout=timedelta(seconds=30))
    group().set_timeout(timedelta(seconds=0.2))
    error: BaseException | None = None
    if dist.get_rank() == 0:
        error = raised(lambda: dist.all_reduce(torch.ones(3)))
        assert "a collective has reached its timeout of 0.2 s" in str(error), error
    else:
        time.sleep(1)
        error = raised(lambda: dist.all_reduce(torch.ones(3)))
    assert isinstance(error.__cause__, r2ccl.CommunicatorRevoked), error
    dist.destroy_process_group()


def monitored_barrier_names_the_missing() -> None:
    init()
    group().monitored_barrier(timedelta(seconds=20))
    if dist.get_rank() != 1:
        limit = timedelta(seconds=0.2)
        error = raised(lambda: group().monitored_barrier(limit, wait_all_ranks=True))
        assert ("rank 1 did not pass" in str(error)) == (dist.get_rank() == 0), error
    dist.barrier()
    dist.destroy_process_group()


def aborted() -> None:
    init()
    dist.barrier()
    if dist.get_rank() == 0:
        group().abort()
        assert isinstance(raised(dist.barrier), dist.DistBackendError)
    else:
        assert "abort() of the process group" in str(raised(dist.barrier))
    dist.destroy_process_group()


def groups_are_split() -> None:
    init()
    rank, n = dist.get_rank(), dist.get_world_size()
    half = group().split_group([0] if rank == 0 else list(range(1, n)), group_name="half")
    assert half is not None
    x = torch.ones(2)
    half.allreduce(x).wait()
    assert x.tolist() == [1.0 if rank == 0 else n - 1.0] * 2
    assert (half.size(), half.group_name) == (1 if rank == 0 else n - 1, "half")
    half.shutdown()
    dist.destroy_process_group()


def groups_are_cheap() -> None:
    """A group shares the connections: it opens no descriptor."""
    init()
    dist.all_reduce(torch.ones(1))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        made = dist.new_group(list(range(dist.get_world_size())))
        dist.all_reduce(torch.ones(1), group=made)
    assert len(os.listdir("/proc/self/fd")) == before
    dist.destroy_process_group()


def a_given_secret_is_not_in_the_store() -> None:
    init()
    offer = group().get_group_store().get(OFFER)
    assert os.environ["R2CC_SECRET"] not in str(offer)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def a_secret_is_made_where_none_is_given() -> None:
    init()
    assert len(json.loads(group().get_group_store().get(OFFER))[2]) == 64
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
