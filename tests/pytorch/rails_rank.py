"""Trains with DDP and with FSDP2 by turns, and tells the bits of the weights of each training.

Usage: ``rails_rank.py NRUNS FOLDER``. All trainings of a way begin with the same weights. Between
them, the rank waits until every path that it lost is up again. Prints a JSON object as its last
line: for each training its name, the numbers of the first collective of its third step and of the
first one after its last step, and a hash of its final weights; and for each repair of this rank the
rail that was lost. In these steps, every rank sends slices in every collective; before them, DDP
broadcasts its buckets. ``RANK.pt`` in FOLDER then has the final weights of each training, a list of
lists of tensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from netlab.campaign_rank import wait_until_whole
from pytorch.training_rank import mine, sgd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch

NSTEPS, NROWS, NINPUTS, NOUTPUTS = 5, 16, 256, 64
#: Several buckets of gradients, each of many slices, for the 1.6 MiB of the weights.
BUCKET_MB = 0.5


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    middle = [torch.nn.Linear(NINPUTS, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)]
    return torch.nn.Sequential(*middle, torch.nn.ReLU(), torch.nn.Linear(512, NOUTPUTS))


def train(net: torch.nn.Module, ncalls: Callable[[], int]) -> tuple[int, int]:
    """Train; return the number of collectives at the ends of the second and of the last step."""
    optimizer, made = sgd(net), torch.Generator().manual_seed(1)
    ends = []
    for _ in range(NSTEPS):
        x = torch.randn(NROWS, NINPUTS, generator=made)
        y = torch.randn(NROWS, NOUTPUTS, generator=made)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(mine(x)), mine(y)).backward()
        optimizer.step()
        ends.append(ncalls())
    return ends[1], ends[-1]


def ddp(net: torch.nn.Sequential, ncalls: Callable[[], int]) -> tuple[int, int]:
    return train(DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB), ncalls)


def fsdp2(net: torch.nn.Sequential, ncalls: Callable[[], int]) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net, ncalls)


def final(net: torch.nn.Module) -> list[torch.Tensor]:
    return [
        (weights.full_tensor() if isinstance(weights, DTensor) else weights).detach()
        for weights in net.parameters()
    ]


def digest(weights: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for each in weights:
        found.update(each.numpy())
    return found.hexdigest()


def main() -> None:
    dist.init_process_group("r2ccl")
    group = dist.group.WORLD
    assert isinstance(group, r2ccl.torch.R2cclProcessGroup)
    comm, trainings, weights = group.communicator, [], []
    ninit = comm.ncalls
    for _ in range(int(sys.argv[1])):
        for way in (ddp, fsdp2):
            net = model()
            ends = way(net, lambda: comm.ncalls - ninit)
            weights.append(final(net))
            trainings.append((way.__name__, *ends, digest(weights[-1])))
            wait_until_whole(comm)
            dist.barrier()
    torch.save(weights, Path(sys.argv[2], f"{comm.rank}.pt"))
    left = [repair.rail for repair in comm.repairs()]
    print(json.dumps({"trainings": trainings, "rails left": left}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
