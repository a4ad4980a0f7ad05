"""Run an allreduce over MPI ranks. Run: mpiexec -n 2 python examples/03_mpi.py (needs mpi4py)."""

import numpy as np
from mpi4py import MPI

import r2ccl


def main() -> None:
    with r2ccl.init(MPI.COMM_WORLD) as comm:
        x = np.arange(1_000_000, dtype=np.float64) * (comm.rank + 1)
        expected = MPI.COMM_WORLD.allreduce(x)
        comm.allreduce(x)
        assert (x == expected).all()
        if comm.rank == 0:
            print(f"{comm.nranks} ranks of MPI: the same sum as that of MPI, bit for bit")


if __name__ == "__main__":
    main()
