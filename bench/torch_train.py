"""Time of the calls of torch.distributed on r2ccl and on gloo, in the same processes.

Run: ``torchrun --nproc-per-node 2 bench/torch_train.py``, or with 4. Rounds alternate the two
backends; each round times a loop of calls back to back, on the slowest rank. The table has medians
over rounds, and the ratio of r2ccl's time to gloo's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import add_json_argument, write_json
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch  # noqa: F401  # registers the backend
from r2ccl.cli.values import format_size, parse_sizes

BACKENDS = ("r2ccl", "gloo")
#: A loop of calls takes about this long.
ROUND_S = 0.2


def slowest(seconds: float, group: Any) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found)


def time_of(step: Callable[[], Any], ncalls: int, group: Any) -> float:
    """Return the time of one call in seconds: of the slowest rank, in a loop of `ncalls`."""
    dist.barrier(group=group)
    begun = time.perf_counter()
    for _ in range(ncalls):
        step()
    return slowest((time.perf_counter() - begun) / ncalls, group)


def compared(
    make: Callable[[Any], Callable[[], Any]], groups: dict[str, Any], nrounds: int
) -> dict[str, float]:
    """Return the median time of the step that `make` makes for a group, by backend."""
    steps = {name: make(group) for name, group in groups.items()}
    ncalls = {}
    for name, step in steps.items():
        time_of(step, 3, groups[name])
        ncalls[name] = max(1, min(1000, int(ROUND_S / time_of(step, 3, groups[name]))))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(nrounds):
        for name, step in steps.items():
            samples[name].append(time_of(step, ncalls[name], groups[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def call(name: str, nbytes: int) -> Callable[[Any], Callable[[], Any]]:
    """Return a function that makes one call of `nbytes` on a group."""

    def make(group: Any) -> Callable[[], Any]:
        n = dist.get_world_size()
        # The values stay finite: the allreduces of a round multiply them.
        x = torch.zeros(max(n, nbytes // 4 // n * n))
        part = torch.zeros(x.numel() // n)
        steps: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(x, group=group),
            "all_reduce async": lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
            "all_gather_single": lambda: dist.all_gather_single(x, part, group=group),
            "reduce_scatter_single": lambda: dist.reduce_scatter_single(part, x, group=group),
            "broadcast": lambda: dist.broadcast(x, 0, group=group),
        }
        return steps[name]

    return make


def beside_python(nbytes: int) -> Callable[[Any], Callable[[], Any]]:
    """Return a function that makes an asynchronous allreduce, and computes in Python meanwhile."""

    def make(group: Any) -> Callable[[], Any]:
        x = torch.zeros(nbytes // 4)

        def step() -> None:
            work = dist.all_reduce(x, group=group, async_op=True)
            sum(each * each for each in range(500_000))
            work.wait()

        return step

    return make


def new_group(group: Any) -> Callable[[], Any]:
    """Return a function that makes a group, calls it once, and ends it."""
    backend, x = dist.get_backend(group), torch.zeros(256)

    def step() -> None:
        made = dist.new_group(backend=backend)
        dist.all_reduce(x, group=made)
        dist.destroy_process_group(made)

    return step


def ddp_step(width: int) -> Callable[[Any], Callable[[], Any]]:
    """Return a function that makes one training step with DistributedDataParallel."""

    def make(group: Any) -> Callable[[], Any]:
        layers = [torch.nn.Linear(width, width) for _ in range(8)]
        net = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
        x = torch.randn(8, width)

        def step() -> None:
            net.zero_grad()
            net(x).square().mean().backward()

        return step

    return make


def fsdp2_step(width: int) -> Callable[[Any], Callable[[], Any]]:
    """Return a function that makes one training step with ``fully_shard``."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def make(group: Any) -> Callable[[], Any]:
        mesh = DeviceMesh.from_group(group, "cpu")
        net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        x = torch.randn(8, width)

        def step() -> None:
            net.zero_grad()
            net(x).square().mean().backward()

        return step

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=parse_sizes, default="256,1K,64K,1M,16M")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_argument(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("r2ccl")
    rank, nranks = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    calls = ("all_reduce", "all_reduce async", "all_gather_single", "reduce_scatter_single")
    cases = [
        (f"{name}, {format_size(nbytes)}", call(name, nbytes))
        for name in (*calls, "broadcast")
        for nbytes in args.sizes
    ]
    cases.append(("all_reduce async, 16 MiB, beside Python code", beside_python(16 << 20)))
    cases.append(("new_group, its first call, its end", new_group))
    cases += [(f"DDP step, width {width}", ddp_step(width)) for width in (64, 512)]
    cases += [(f"FSDP2 step, width {width}", fsdp2_step(width)) for width in (64, 512)]
    results = []
    if rank == 0:
        print(f"{nranks} ranks, µs\n| call | r2ccl | gloo | ratio |\n|---|---|---|---|")
    for title, make in cases:
        found = compared(make, groups, args.rounds)
        ratio = found["r2ccl"] / found["gloo"]
        if rank == 0:
            us = {name: round(found[name] * 1e6) for name in BACKENDS}
            print(f"| {title} | {us['r2ccl']:,} | {us['gloo']:,} | {ratio:.2f} |", flush=True)
        results.append({"call": title, "nranks": nranks, "ratio": ratio, **found})
    if rank == 0 and args.json:
        write_json(args.json, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
