"""Interfaces of other libraries on top of `Communicator`, for programs written for those libraries.

`cupy` has the interface of ``cupyx.distributed``, `mpi` that of ``mpi4py.MPI``, and `torch` is a
backend of ``torch.distributed``. They translate names, arguments and defaults, and call a
communicator. They use only the public interface of r2ccl. `mpi` imports mpi4py, which runs what
r2ccl does not, and `torch` imports torch; `cupy` does not import CuPy.

Invariant: a function that r2ccl cannot provide is missing, is refused by its name, or is in a list
of those that run on the other library.
"""

from __future__ import annotations

__all__: list[str] = []
