"""Sum an array over all ranks. Run: r2ccl launch -n 4 -- python examples/01_allreduce.py."""

import numpy as np

import r2ccl


def main() -> None:
    with r2ccl.init() as comm:
        x = np.full(1_000_000, comm.rank + 1, np.float32)
        comm.allreduce(x)  # in place; pass `out=` for another array, `op=` for another reduction
        largest = comm.allreduce(np.array([comm.rank]), op=r2ccl.MAX)
        if comm.rank == 0:
            print(f"{comm.nranks} ranks: every element is {x[0]:g}, the last rank is {largest[0]}")


if __name__ == "__main__":
    main()
