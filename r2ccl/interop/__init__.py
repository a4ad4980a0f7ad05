"""Interfaces of other libraries on top of `Communicator`, for programs written for those libraries.

`cupy` has the interface of ``cupyx.distributed``, `mpi` that of ``mpi4py.MPI``, and `torch` is a
backend of ``torch.distributed``. `ray` connects Ray actors, and is a backend of
``ray.util.collective``; `dask` connects Dask workers. The modules translate names, arguments and
defaults, and call a communicator. `rank_exchange` has the base class of the objects through which
ranks exchange their addresses. `mpi` imports mpi4py, which runs some of the functions that r2ccl
lacks; `torch`, `ray` and `dask` import torch, Ray and distributed. `cupy` does not import CuPy.

Invariant: if r2ccl cannot provide a function of the other library, the function is missing here,
raises an error that names it, or is listed in the docs as run by the other library itself.
"""

from __future__ import annotations

__all__: list[str] = []
