"""Ray actors that are the ranks in the tests of Ray."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import ray.util.collective as collective

from r2ccl import R2cclError
from r2ccl.interop.ray import join, rendezvous


@ray.remote(num_cpus=0)
class Rank:
    """An actor that joins groups and calls their collectives."""

    def join(self, nranks: int, rank: int, group_name: str = "g", **settings: Any) -> float:
        self._comm = join(nranks, rank, group_name, **settings)
        return self.total()

    def total(self) -> float:
        return float(self._comm.allreduce(np.full(1000, self._comm.rank + 1.0))[0])

    def total_of_survivors(self) -> tuple[str, float, int]:
        """Return the error of an allreduce, and the sum and number of the ranks that are left."""
        try:
            self._comm.allreduce(np.ones(1000))
        except R2cclError as exc:
            self._comm = self._comm.shrink()
            return type(exc).__name__, self.total(), self._comm.nranks
        raise AssertionError("the allreduce did not fail")

    def close(self) -> None:
        self._comm.close()

    def pid(self) -> int:
        return os.getpid()

    def offer_when_joining(self, nranks: int, rank: int) -> tuple[str, int, str]:
        """Join a group; return the address, port and secret that rank 0 sent to all ranks."""
        seen = []
        bcast = rendezvous.RayRanks.bcast

        def remember(ranks: rendezvous.RayRanks, value: Any, root: int) -> Any:
            seen.append(bcast(ranks, value, root))
            return seen[-1]

        rendezvous.RayRanks.bcast = remember  # type: ignore[method-assign]
        try:
            self.join(nranks, rank, "offer")
        finally:
            rendezvous.RayRanks.bcast = bcast  # type: ignore[method-assign]
        address, port, secret = seen[0]
        return address, port, secret

    def use_backend(self, nranks: int, rank: int, *, is_declared: bool) -> dict[str, Any]:
        """Call each function of ray.util.collective; return the results."""
        if not is_declared:
            collective.init_collective_group(nranks, rank, backend="r2ccl", group_name="c")
        results: dict[str, Any] = {}
        for name, op in collective.types.ReduceOp.__members__.items():
            x = np.arange(6.0).reshape(2, 3) + rank + 1
            collective.allreduce(x, "c", op)
            results[f"allreduce {name}"] = x
        x = np.full(5, rank + 1.0)
        collective.reduce(x, 1, "c")
        results["reduce"] = x
        x = np.full(5, rank + 1.0)
        collective.broadcast(x, 2, "c")
        results["broadcast"] = x
        gathered = [np.zeros((2, 2)) for _ in range(nranks)]
        collective.allgather(gathered, np.full((2, 2), float(rank)), "c")
        results["allgather"] = gathered
        x = np.zeros((3, 1))
        parts = [np.full((3, 1), 10.0 * each + rank) for each in range(nranks)]
        collective.reducescatter(x, parts, "c")
        results["reducescatter"] = x
        x = np.zeros(4)
        if rank == 0:
            collective.send(np.full(4, 7.0), nranks - 1, "c")
        elif rank == nranks - 1:
            collective.recv(x, 0, "c")
        results["recv"] = x
        collective.barrier("c")
        collective.destroy_collective_group("c")
        return results
