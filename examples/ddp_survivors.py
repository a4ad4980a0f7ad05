"""Train with DistributedDataParallel over r2ccl; a rank dies on the way, and the others go on.

Run: ``r2ccl launch --keep-going -n 3 -- python examples/ddp_survivors.py``

Rank 2 dies before step 10. The others form a new process group and continue from the last step that
all of them completed, with their weights and the state of their optimizers. Rank 0 prints the time
from that step to the next one. The store of torch is on rank 0, which must survive.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch

NSTEPS, DIES_AT = 20, 10


def form_group_of_survivors(store: dist.Store, completed: int) -> int:
    """Replace the process group; return the number of the last step that all ranks completed."""
    group = dist.group.WORLD
    assert isinstance(group, r2ccl.torch.R2cclProcessGroup)
    with group.communicator.shrink() as survivors:
        members, rank = survivors.members, survivors.rank
    dist.destroy_process_group()
    dist.init_process_group(
        "r2ccl",
        store=dist.PrefixStore(f"survivors {members}", store),
        rank=rank,
        world_size=len(members),
    )
    last = torch.tensor(completed)
    dist.all_reduce(last, op=dist.ReduceOp.MIN)
    return int(last)


def main() -> None:
    store, rank, nranks = next(dist.rendezvous("env://"))
    dist.init_process_group("r2ccl", store=store, rank=rank, world_size=nranks)
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parallel = DistributedDataParallel(model)
    #: States of the model and the optimizer after the last two steps: when a rank dies, some of the
    #: others may have completed a step that others have not.
    states: dict[int, tuple[Any, Any]] = {}
    step, failed_after_s = 0, None
    ended_s = time.monotonic()
    while step < NSTEPS:
        if rank == nranks - 1 and step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step * 1000 + rank))
        try:
            loss = (parallel(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
        except RuntimeError:  # backward() wraps the DistBackendError of a call into one
            last = form_group_of_survivors(store, step - 1)
            weights, slopes = states[last]
            model.load_state_dict(weights)
            optimizer.load_state_dict(slopes)
            parallel = DistributedDataParallel(model)
            step, failed_after_s = last + 1, ended_s
            continue
        optimizer.step()
        if failed_after_s is not None and dist.get_rank() == 0:
            took_s = time.monotonic() - failed_after_s
            print(
                f"{dist.get_world_size()} ranks: step {step} ended {took_s:.1f} s after {step - 1}"
            )
        failed_after_s = None
        states = {number: states[number] for number in states if number == step - 1}
        states[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step, ended_s = step + 1, time.monotonic()
    total = loss.detach()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"{NSTEPS} steps: the loss of the last one is {total:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
