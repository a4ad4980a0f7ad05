"""Solve A x = b by conjugate gradients.

Run: mpiexec -n 2 python examples/mpi/conjugate_gradient.py.
"""

import hashlib
from typing import Any

import numpy as np
from mpi4py import MPI

N = 600  # unknowns; a multiple of the number of ranks
TOLERANCE = 1e-10


def main() -> None:
    comm = MPI.COMM_WORLD
    nrows = N // comm.size
    first = comm.rank * nrows

    # Rows of this rank of a dense, symmetric, positive definite matrix.
    rows, columns = np.arange(first, first + nrows)[:, None], np.arange(N)
    matrix = 1.0 / (1.0 + np.abs(rows - columns)) ** 2
    matrix[np.arange(nrows), first + np.arange(nrows)] += 0.5
    b = np.sin(np.arange(first, first + nrows))

    def dot(left: Any, right: Any) -> float:
        total = np.array([left @ right])
        comm.Allreduce(MPI.IN_PLACE, total)
        return float(total[0])

    x, residual, whole = np.zeros(nrows), b.copy(), np.empty(N)
    direction = residual.copy()
    norm = start = dot(residual, residual)
    steps = 0
    while norm > TOLERANCE**2 * start:
        comm.Allgather(direction, whole)
        product = matrix @ whole
        length = norm / dot(direction, product)
        x += length * direction
        residual -= length * product
        norm, last = dot(residual, residual), norm
        direction = residual + norm / last * direction
        steps += 1

    comm.Allgather(x, whole)
    if comm.rank == 0:
        digest = hashlib.sha256(whole.tobytes()).hexdigest()[:16]
        print(f"{steps} steps, residual {(norm / start) ** 0.5:.1e}, digest {digest}")


if __name__ == "__main__":
    main()
