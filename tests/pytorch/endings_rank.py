"""Programs whose ranks end, fail or are killed; usage: ``endings_rank.py NAME``."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
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


def options_of_one_store() -> dict[str, Any]:
    """Arguments of `init` for several groups: with ``env://``, torch makes a store for each.

    A rank may then connect to the last store of rank 0, which is about to end.
    """
    store, rank, nranks = next(dist.rendezvous("env://"))
    return {"store": store, "rank": rank, "world_size": nranks}


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
    text = str(error)
    assert "PeerLost: " in text, error
    assert "lost rank 1" in text, error
    print("PeerLost")


def killed_while_gradients_travel() -> None:
    init()
    layers = [torch.nn.Linear(200, 200) for _ in range(8)]
    net = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2)

    def kill(gradient: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return gradient

    for _ in range(2):
        net(torch.ones(2, 200)).sum().backward()
    if dist.get_rank() == 1:
        layers[3].weight.register_hook(kill)  # after the buckets of the last layers
    error = raised(net(torch.ones(2, 200)).sum().backward)
    assert "lost rank 1" in str(error), error
    dist.destroy_process_group()
    print("PeerLost")


def leave_a_barrier_together() -> None:
    """Return once no rank is in the barrier any more, where a failure would reach it."""
    dist.barrier()
    store = group().get_group_store()
    store.set(f"left the barrier/{dist.get_rank()}", "")
    store.wait([f"left the barrier/{each}" for each in range(dist.get_world_size())])


def destroyed_while_others_call() -> None:
    init()
    leave_a_barrier_together()
    if dist.get_rank():
        error = raised(lambda: dist.all_reduce(torch.ones(3)))
        assert "rank 0 called close() after call 1, but" in str(error), error
    dist.destroy_process_group()


def initialized_again_after_a_failure() -> None:
    """A rank that learns of the failure in ``destroy_process_group`` can make a new group."""
    options = options_of_one_store()
    init(timeout=timedelta(seconds=30), **options)
    leave_a_barrier_together()
    if dist.get_rank() == 0:
        group().communicator.revoke("a reason")
    dist.destroy_process_group()
    init(timeout=timedelta(seconds=30), **options)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [float(dist.get_world_size())] * 3
    dist.destroy_process_group()


def a_missing_rank_is_named() -> None:
    if os.environ["RANK"] == "1":
        store, _, _ = next(dist.rendezvous("env://"))
        store.wait(["over"], timedelta(seconds=60))
        return
    error = raised(lambda: init(timeout=timedelta(seconds=1)))
    assert "rank 0 waited 1 s for these ranks to make the same process group: 1" in str(error), (
        error
    )
    assert isinstance(error, dist.DistBackendError)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set("over", "")


def waits_in_another_order() -> None:
    init()
    rank, n = dist.get_rank(), dist.get_world_size()
    tensors = [torch.ones(50 + 1000 * i) for i in range(10)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    assert all((x == n).all() for x in tensors)
    got = [torch.zeros(5) for _ in range(6)]
    receives = [dist.irecv(x, (rank - 1) % n, tag=tag) for tag, x in enumerate(got)]
    right = (rank + 1) % n
    sends = [dist.isend(torch.full((5,), float(i)), right, tag=i) for i in reversed(range(6))]
    for work in [*reversed(receives), *sends]:
        work.wait()
    assert [x[0].item() for x in got] == list(range(6))
    dist.destroy_process_group()


def messages_into_a_transposed_tensor() -> None:
    """Its values are there as soon as the handle says that it has finished."""
    init()
    rank, x = dist.get_rank(), torch.zeros(3, 2).t()
    if rank == 0:
        dist.send(torch.arange(6.0).view(2, 3), 1)
    if rank == 1:
        work = group().recv([x], 0)
        while not work.is_completed():
            time.sleep(0.001)
        assert torch.equal(x, torch.arange(6.0).view(2, 3)), x
    dist.destroy_process_group()


def groups_in_threads() -> None:
    """Groups that share ranks run at the same time, beside the group of all ranks."""
    init()
    rank, n = dist.get_rank(), dist.get_world_size()
    failed: list[BaseException] = []

    def use(ranks: list[int], made: Any) -> None:
        try:
            for i in range(20):
                x, y = torch.full((1000,), float(i)), torch.ones(9)
                dist.all_reduce(x, group=made)
                dist.all_reduce(y, group=made, async_op=True).wait()
                assert (x[0], y[0]) == (i * len(ranks), len(ranks))
        except BaseException as exc:
            failed.append(exc)

    subsets = [[0, 1], [0, n - 1], list(range(1, n)), list(range(n))]
    groups = [(ranks, dist.new_group(ranks)) for ranks in subsets]
    threads = [threading.Thread(target=use, args=each) for each in groups if rank in each[0]]
    for thread in threads:
        thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(10))
    for thread in threads:
        thread.join()
    assert not failed, failed
    dist.destroy_process_group()


def groups_made_beside_calls() -> None:
    init()
    failed: list[BaseException] = []

    def make() -> None:
        try:
            for _ in range(5):
                made, x = dist.new_group(), torch.ones(5)
                dist.all_reduce(x, group=made)
                assert x[0] == dist.get_world_size()
                dist.destroy_process_group(made)
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=make)
    thread.start()
    for _ in range(50):
        dist.all_reduce(torch.zeros(1 << 16))
    thread.join()
    assert not failed, failed
    dist.destroy_process_group()


def what_is_refused_leaves_the_group_usable() -> None:
    init()
    rank, n, world = dist.get_rank(), dist.get_world_size(), group()
    mixed = [torch.zeros(1)] * (n - 1) + [torch.zeros(1, dtype=torch.int32)]
    x, sparse = torch.zeros(3), torch.zeros(3).to_sparse()
    last_is_sparse = [x] * (n - 1) + [sparse]
    for call, text in (
        (lambda: dist.new_group(pg_options=object()), "pg_options=<object"),
        (lambda: world.set_timeout(timedelta(days=1)), "timeout=1 day, 0:00:00; allowed are"),
        (lambda: dist.new_group(timeout=timedelta(0)), "timeout_s=0.0"),
        (lambda: world.set_timeout(timedelta(0)), "timeout=0:00:00; allowed are"),
        (lambda: world.alltoall(mixed, mixed).wait(), "a list has tensors of torch.float32"),
        (lambda: world.broadcast([torch.zeros(1)] * 2).wait(), "2 tensors were given"),
        (lambda: world.send([sparse], 0), "layout torch.sparse_coo"),
        (lambda: world.alltoall([sparse] * n, [x] * n).wait(), "layout torch.sparse_coo"),
        (lambda: world.alltoall([x] * n, last_is_sparse).wait(), "layout torch.sparse_coo"),
        (lambda: world.allgather([last_is_sparse], [x]).wait(), "layout torch.sparse_coo"),
        (lambda: world.reduce_scatter([x], [last_is_sparse]).wait(), "layout torch.sparse_coo"),
        (lambda: world.reduce_scatter([sparse], [[x] * n]).wait(), "layout torch.sparse_coo"),
        (lambda: world.all_to_all_single(sparse, x[:n], [], []).wait(), "layout torch.sparse_coo"),
        (
            lambda: dist.all_reduce(torch.ones(2 + rank).to_sparse()),
            "(2,) with 1 sparse dimensions",
        ),
        (lambda: dist.all_reduce(torch.ones(2, 2).to_sparse(2 - rank % 2)), "with 2 sparse"),
        (lambda: dist.all_reduce(torch.ones([2] * (1 + rank)).to_sparse()), "of shape (2, 2)"),
        (lambda: world.recv([torch.zeros(3)], 0, -1), "tag=-1: allowed are"),
        (lambda: dist.all_reduce(torch.zeros(1, device="meta")), "on meta"),
        (lambda: world._get_backend(torch.device("cuda")), "does not support tensors on cuda"),
    ):
        error = raised(call)
        assert isinstance(error, (RuntimeError, TypeError)), error
        assert text in str(error), error
    dist.barrier()
    dist.destroy_process_group()


def used_memory() -> tuple[int, int]:
    """Return the bytes in use that malloc has given out, and the number of memory mappings.

    The resident memory also counts what malloc keeps for later, in whole huge pages.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, nbytes = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(nbytes)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    assert text.value is not None
    last = text.value.decode().rpartition("</heap>")[2]
    libc.free(text)
    sizes = dict(re.findall(r'type="(\w+)".* size="(\d+)"', last))
    in_arenas = int(sizes["current"]) - int(sizes["fast"]) - int(sizes["rest"])
    nmappings = len(Path("/proc/self/maps").read_text().splitlines())
    return in_arenas + int(sizes["mmap"]), nmappings


def initialized_a_hundred_times() -> None:
    def usage() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    found, nused, options = [], [], options_of_one_store()
    for _ in range(100):
        init(**options)
        x = torch.ones(100)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).get_future().wait()
        dist.destroy_process_group()
        found.append(usage())
        nused.append(used_memory())
    assert max(found[10:]) <= max(found[:5]), found
    nbytes, nmappings = (last - first for first, last in zip(nused[20], nused[-1], strict=True))
    assert nbytes < 1 << 20, nused
    assert nmappings < 20, nused


def ends_without_destroy() -> None:
    init()
    x = torch.ones(10)
    dist.all_reduce(x, async_op=True)
    print("last line")


def forks_during_a_call() -> None:
    """A child that ends as a program does must not wait for the calls of its parent."""
    init()
    x = torch.ones(10)
    work = dist.all_reduce(x, async_op=True) if dist.get_rank() else None
    child = os.fork()
    if child == 0:
        sys.exit(7)
    deadline_s = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
    if work is None:
        dist.all_reduce(x)
    else:
        work.wait()
    print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", x[0].item())


def ends_with_an_error() -> None:
    if os.environ["RANK"] == "1":
        init()
        raise ValueError("a defect in the program")
    # Rank 1 may end before this rank's `init` has ended, because torch ends it without a barrier.
    error = raised(lambda: (init(), dist.all_reduce(torch.ones(10))))
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
        future = late.get_future()  # its thread waits for the message from now on
        began_s = time.monotonic()
        error = raised(lambda: late.wait(timedelta(milliseconds=50)))
        assert "wait again" in str(error), error
        assert time.monotonic() - began_s < 10
        dist.send(torch.ones(1), 1)
        assert work.wait()
        assert late.wait()
        assert [x.tolist() for x in future.wait()] == [[1.0] * 3]
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


def a_group_may_have_a_longer_timeout() -> None:
    """Than the group of all ranks."""
    init(timeout=timedelta(seconds=5))
    longer = dist.new_group(timeout=timedelta(seconds=40))
    split = group().split_group([*range(dist.get_world_size())], timedelta(seconds=60))
    assert split.communicator.config.timeout_s == 60
    assert dist.new_group().communicator.config.timeout_s == 5
    if dist.get_rank():
        time.sleep(7)
    x = torch.ones(3)
    dist.all_reduce(x, group=longer)
    assert x[0] == dist.get_world_size()
    dist.destroy_process_group()


def calls_end_in_time_without_a_wait() -> None:
    """The timeout of a group holds also if the program waits for the future, or polls."""
    init(timeout=timedelta(seconds=30))
    part = dist.new_group(timeout=timedelta(seconds=0.5))
    late = "gave up after 0.5 s"
    x = torch.ones(3)
    if dist.get_rank() == 0:
        began_s = time.monotonic()
        first = dist.all_reduce(x, group=part, async_op=True)
        error = raised(first.get_future().wait)
        assert late in str(error), error
        assert first.is_completed()
        assert time.monotonic() - began_s < 10
    else:
        time.sleep(1)
        work = dist.all_reduce(x, group=part, async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        assert late in str(work.exception()), work.exception()
    assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    dist.destroy_process_group()


def messages_have_a_timeout() -> None:
    init(timeout=timedelta(seconds=30))
    group().set_timeout(timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        error = raised(dist.irecv(torch.ones(3), 1).wait)
        assert "of 0.2 s and was withdrawn" in str(error), error
        sent = dist.isend(torch.ones(1 << 24), 1)  # not buffered, and no rank receives it
        error = raised(sent.wait)
        assert "a message has reached its timeout of 0.2 s" in str(error), error
        assert isinstance(error.__cause__, r2ccl.CommunicatorRevoked), error
    else:
        time.sleep(1)
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
        for rank in range(1, dist.get_world_size()):
            dist.recv(torch.ones(1), rank)  # this rank has left the barrier
        group().abort()
        assert isinstance(raised(dist.barrier), dist.DistBackendError)
    else:
        sent = dist.isend(torch.ones(1), 0)
        assert "abort() of the process group" in str(raised(dist.barrier))
        del sent
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
