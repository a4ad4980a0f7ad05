"""Lose a rail during an allreduce and get the right sum. Run: python examples/02_lose_a_rail.py."""

import numpy as np

import r2ccl
from r2ccl.testing import fail_at


def rank_program() -> None:
    # Rank 1 loses its first rail before it sends slice 5 of the first allreduce.
    with fail_at(rank=1, rail=0, op=0, step=5) as plan, r2ccl.init(faults=plan) as comm:
        x = np.full(4_000_000, comm.rank + 1.0, np.float32)
        comm.allreduce(x)
        assert (x == 1 + 2 + 3).all()
        if comm.rank == 1:
            print(f"every element is {x[0]:g}")
            for repair in comm.repairs():
                print(f"rail {repair.rail} to rank {repair.peer}: {repair.cause}; moved", end=" ")
                print(", ".join(f"channel {c} to rail {r}" for c, r in repair.moved.items()))


if __name__ == "__main__":
    r2ccl.launch(rank_program, 3)
