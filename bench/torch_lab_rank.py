"""Rank of `torch_lab.py`: trains with DistributedDataParallel, and times the steps.

The argument is a JSON object: ``backends``, the backends to measure one after another, and
``computations``, the seconds of computation in a step of each measurement. Prints a JSON object as
its last line: by backend, for each measurement the median time of a step and that of its
computation in seconds, each on the slowest rank. A computation takes longer than was asked for if
the cores of the machine are busy.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch  # noqa: F401  # registers the backend

#: 24 MiB of gradients in buckets of 0.5 MiB, so that little communication is left when the last
#: gradient is ready.
_NLAYERS, _WIDTH, _BUCKET_MB = 96, 256, 0.5
#: Steps before the measured ones: DDP forms its buckets anew after the first.
_NWARM, _NSTEPS = 3, 5


class Computation:
    """Hook of the layers' backward passes that takes `seconds` each time.

    ``took_s`` is the time that all of them together took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.took_s = 0.0

    def __call__(self, *_: Any) -> None:
        """Sleep; the arguments, a layer and its gradients, do not matter."""
        if self.seconds:
            begun_s = time.perf_counter()
            time.sleep(self.seconds)
            self.took_s += time.perf_counter() - begun_s


def steps_of(
    net: DistributedDataParallel, computation: Computation, group: Any
) -> Iterator[list[float]]:
    """Make steps without end; yield the seconds of each and of its computation, at most."""
    x = torch.randn(1, _WIDTH)
    while True:
        dist.barrier(group=group)
        computation.took_s, begun_s = 0.0, time.perf_counter()
        net.zero_grad()
        net(x).square().mean().backward()
        ended_s = time.perf_counter()
        took = torch.tensor([ended_s - begun_s, computation.took_s], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
        yield took.tolist()


def measure(group: Any, computations: list[float]) -> list[list[float]]:
    """Return the median times of steps with these seconds of computation, and of the latter."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NLAYERS)]
    computation = Computation()
    for layer in layers:
        layer.register_full_backward_pre_hook(computation)
    net = DistributedDataParallel(
        torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=_BUCKET_MB
    )
    steps = steps_of(net, computation, group)
    for _ in range(_NWARM):
        next(steps)
    found = []
    for seconds in computations:
        computation.seconds = seconds / _NLAYERS
        times = [next(steps) for _ in range(_NSTEPS)]
        found.append([statistics.median(each) for each in zip(*times, strict=True)])
    return found


def main() -> None:
    task = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "rail0"
    torch.set_num_threads(1)
    dist.init_process_group("r2ccl")
    found = {
        backend: measure(dist.new_group(backend=backend), task["computations"])
        for backend in task["backends"]
    }
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
