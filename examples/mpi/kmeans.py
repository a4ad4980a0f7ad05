"""Cluster points with k-means. Run: mpiexec -n 2 python examples/mpi/kmeans.py."""

import hashlib

import numpy as np
from mpi4py import MPI

POINTS = 5_000  # on each rank
DIMENSIONS = 16
CLUSTERS = 8
ROUNDS = 20


def main() -> None:
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(comm.rank)
    points = rng.standard_normal((POINTS, DIMENSIONS))
    points += 4 * rng.integers(0, 3, (POINTS, 1))

    centers = np.empty((CLUSTERS, DIMENSIONS))
    if comm.rank == 0:
        centers[:] = points[:CLUSTERS]
    comm.Bcast(centers, root=0)
    sums, counts, inertia = np.empty_like(centers), np.empty(CLUSTERS), np.empty(1)
    for _ in range(ROUNDS):
        # |p - c|^2 = |p|^2 - 2 p.c + |c|^2, and |p|^2 is the same for all centers.
        distances = (centers**2).sum(axis=1) - 2 * points @ centers.T
        nearest = distances.argmin(axis=1)
        inertia[0] = ((points - centers[nearest]) ** 2).sum()
        counts[:] = np.bincount(nearest, minlength=CLUSTERS)
        for cluster in range(CLUSTERS):
            sums[cluster] = points[nearest == cluster].sum(axis=0)
        requests = [comm.Iallreduce(MPI.IN_PLACE, each) for each in (sums, counts, inertia)]
        MPI.Request.Waitall(requests)
        centers = sums / np.maximum(counts, 1)[:, None]

    if comm.rank == 0:
        digest = hashlib.sha256(centers.tobytes()).hexdigest()[:16]
        print(f"{comm.size * POINTS} points, inertia {inertia[0]:.6e}, digest {digest}")


if __name__ == "__main__":
    main()
