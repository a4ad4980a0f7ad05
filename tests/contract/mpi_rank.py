"""Program of `test_mpi`: runs each case on mpi4py's communicator and on that of r2ccl, in one job.

Only `main` imports mpi4py, because that initializes MPI.

A case takes the module with the names of MPI and a communicator, and returns a result that is equal
on both. It may raise, on all ranks and before it communicates. Rank 0 prints the outcomes of every
rank as JSON.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import numpy as np
from contract import (
    mpi_communicators,
    mpi_errors,
    mpi_exchanges,
    mpi_messages,
    mpi_movements,
    mpi_reductions,
    mpi_requests,
)
from support.mpi_cases import Case

CASES: dict[str, Case] = {}
for each in (
    mpi_reductions, mpi_movements, mpi_requests, mpi_communicators, mpi_errors, mpi_exchanges,
    mpi_messages,
):  # fmt: skip
    assert CASES.keys().isdisjoint(each.CASES)
    CASES |= each.CASES

#: Methods of r2ccl's classes that the cases have called, each with the names of these cases.
CALLED: dict[str, set[str]] = {}


def record_calls(case: list[str], *owners: type) -> None:
    """Note in `CALLED` which methods are called by a case, whose name is the last of `case`."""
    for owner in owners:
        for name, found in list(vars(owner).items()):
            is_bound = isinstance(found, classmethod | staticmethod)
            function = found.__func__ if is_bound else found
            if name.startswith("_") or not callable(function):
                continue
            noting = _noting(f"{owner.__name__}.{name}", function, case)
            setattr(owner, name, type(found)(noting) if is_bound else noting)


def _noting(name: str, function: Any, case: list[str]) -> Any:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        # Calls by the package itself do not count.
        if not sys._getframe(1).f_globals["__name__"].startswith("r2ccl."):
            CALLED.setdefault(name, set()).update(case[-1:])
        return function(*args, **kwargs)

    return method


def outcome(function: Case, MPI: Any, comm: Any) -> Any:
    try:
        return {"value": plain(function(MPI, comm))}
    except MPI.Exception as exc:
        return {"error": "MPI.Exception", "class": exc.Get_error_class(), "text": str(exc)}
    except Exception as exc:
        return {"error": type(exc).__name__, "text": str(exc)}


def plain(value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, complex numbers as text."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, complex) else value


def main() -> None:
    import mpi4py.MPI

    from r2ccl.interop import mpi

    world, running = mpi4py.MPI.COMM_WORLD, [""]
    comm = mpi.COMM_WORLD
    record_calls(
        running,
        *(mpi.Comm, mpi.Request, mpi.Prequest, mpi.Message, mpi.Op),
    )
    found = {}
    for name, function in CASES.items():
        expected = outcome(function, mpi4py.MPI, world)
        running.append(name)
        found[name] = {"mpi4py": expected, "r2ccl": outcome(function, mpi, comm)}
    called = {name: sorted(cases) for name, cases in CALLED.items()}
    ranks = world.gather({"outcomes": found, "called": called})
    if world.rank == 0:
        print(json.dumps(ranks))


if __name__ == "__main__":
    main()
