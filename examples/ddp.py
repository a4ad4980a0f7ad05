"""Train a small model with DistributedDataParallel over r2ccl; a NIC is taken out on the way.

Run: ``torchrun --nproc-per-node 2 examples/ddp.py``
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch

NSTEPS, LOSES_AT = 20, 10


def main() -> None:
    dist.init_process_group("r2ccl")
    group = dist.group.WORLD
    assert isinstance(group, r2ccl.torch.R2cclProcessGroup)
    rank, comm = dist.get_rank(), group.communicator

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    for step in range(NSTEPS):
        if rank == 0 and step == LOSES_AT:
            # As before its cable is pulled: DDP's next buckets take the other rails.
            comm.exclude(rank=0, nic=0)
        x = torch.randn(32, 256, generator=generator)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    total = loss.detach()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {NSTEPS} steps: the loss is {total:.3f}")
        print(comm.health())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
