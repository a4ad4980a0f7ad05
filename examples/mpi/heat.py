"""Solve the heat equation on a square plate. Run: mpiexec -n 2 python examples/mpi/heat.py."""

import hashlib

import numpy as np
from mpi4py import MPI

N = 240  # points along each side; a multiple of the number of ranks
STEPS = 400
CHECK_EVERY = 10


def main() -> None:
    comm = MPI.COMM_WORLD
    nrows = N // comm.size
    above = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    below = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL

    # Rows of this rank, with a row of each neighbor (or of the edge) above and below.
    plate = np.zeros((nrows + 2, N))
    plate[:, 0] = 1.0  # the left edge is hot
    new = plate.copy()
    change = np.zeros(1)
    for step in range(STEPS):
        comm.Sendrecv(plate[1], dest=above, recvbuf=plate[-1], source=below)
        comm.Sendrecv(plate[-2], dest=below, recvbuf=plate[0], source=above)
        neighbors = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
        new[1:-1, 1:-1] = neighbors / 4
        if step % CHECK_EVERY == 0:
            change[0] = np.abs(new[1:-1] - plate[1:-1]).max()
            comm.Allreduce(MPI.IN_PLACE, change, op=MPI.MAX)
        plate, new = new, plate

    whole = np.empty((N, N))
    comm.Allgather(plate[1:-1], whole)
    if comm.rank == 0:
        digest = hashlib.sha256(whole.tobytes()).hexdigest()[:16]
        print(f"largest change {change[0]:.3e}, mean {whole.mean():.6f}, digest {digest}")


if __name__ == "__main__":
    main()
