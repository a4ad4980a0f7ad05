"""Communicators of Ray actors, and the backend ``r2ccl`` of ``ray.util.collective``.

Each actor of a group calls `join`, which returns a `Communicator`::

    from r2ccl.interop.ray import join

    comm = join(world_size, rank, group_name="training")

A program for ``ray.util.collective`` imports this package in the driver and in the actors, and
changes the name of the backend::

    import r2ccl.interop.ray

    ray.util.collective.init_collective_group(world_size, rank, backend="r2ccl")

The import registers the backend. In both cases the ranks exchange values through an actor of Ray,
among them the address of rank 0 and, unless it is set, the secret of the job.
"""

from __future__ import annotations

from ray.util.collective import is_backend_available, register_collective_backend

from r2ccl.interop.ray.collective_group import R2cclGroup
from r2ccl.interop.ray.rendezvous import join

if not is_backend_available("r2ccl"):
    register_collective_backend("r2ccl", R2cclGroup)

__all__ = ["R2cclGroup", "join"]
