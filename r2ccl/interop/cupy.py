"""The shape of ``cupyx.distributed`` over a communicator.

A program for CuPy changes one import::

    from r2ccl.interop.cupy import init_process_group

    comm = init_process_group(2, rank)
    comm.all_reduce(x, out)

There are all_reduce, reduce, broadcast, reduce_scatter, all_gather, barrier and stop. There are no
send, recv, send_recv, scatter, gather and all_to_all, because a communicator has none. Arrays may
be CuPy's or NumPy's, of any dtype r2ccl knows; not sparse, and in C order only: of two, one in C
and one in Fortran order, elements would change places without a word.

Must not import CuPy. Invariant: nothing is kept but the communicator.

References
----------
CuPy, API reference, Distributed: ``cupyx.distributed.init_process_group`` and ``NCCLBackend``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from r2ccl.communicator import Communicator
from r2ccl.errors import InvalidArgument
from r2ccl.factory import init
from r2ccl.types import ReduceOp

#: CuPy's defaults, and the variables it reads them from.
_HOST, _HOST_VARIABLE = "127.0.0.1", "CUPYX_DISTRIBUTED_HOST"
_PORT, _PORT_VARIABLE = 13333, "CUPYX_DISTRIBUTED_PORT"

#: What launchers set, and what of it would lead past `host` and `port`.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_LISTENER = "R2CC_LISTEN_FD"

_OPS = {op.name.lower(): op for op in ReduceOp}


def init_process_group(
    n_devices: int,
    rank: int,
    *,
    backend: str = "r2ccl",
    host: str | None = None,
    port: int | None = None,
    use_mpi: bool = False,
) -> Backend:
    """Meet the other ranks, as ``cupyx.distributed.init_process_group`` does.

    Parameters
    ----------
    n_devices : int
        Number of ranks.
    rank : int
        This one's, from 0.
    backend : {"r2ccl"}
    host : str, optional
        Where rank 0 is met: an address of the machine it runs on.
    port : int, optional
        And the port it listens at.
    use_mpi : bool
        The ranks of ``MPI.COMM_WORLD`` meet over MPI, whichever of them has which `rank`; `host`
        and `port` are not needed then. Unlike CuPy's, it raises if there is no mpi4py.

    Returns
    -------
    Backend

    Raises
    ------
    InvalidArgument
        Wrong arguments; or the launcher or MPI has other ranks; or as `r2ccl.init`.
    TransportTimeout
        As `r2ccl.init`.

    Notes
    -----
    *Collective*: all ranks. What is not given comes from ``CUPYX_DISTRIBUTED_HOST`` and
    ``CUPYX_DISTRIBUTED_PORT``; if neither is given, from the launcher that started the process
    (torchrun, ``r2ccl launch``); else it is 127.0.0.1 and 13333. All other settings are the
    ``R2CC_*`` variables'.

    Every connection proves that it belongs to the job. On 127.0.0.1 and over MPI the ranks share a
    secret by themselves. With another `host` every rank needs the same ``R2CC_SECRET``, or a
    ``R2CC_SECRET_FILE`` made with ``openssl rand -hex 32 > FILE; chmod 600 FILE``: CuPy's
    arguments cannot express it.

    While ranks meet at a `host`, ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``LOCAL_WORLD_SIZE`` of the process say what is given here: no other thread may start a process
    or a communicator meanwhile.
    """
    if not 0 <= rank < n_devices:
        raise InvalidArgument(
            f"rank={rank} of n_devices={n_devices}; allowed is 0 to n_devices - 1"
        )
    if backend != "r2ccl":
        raise InvalidArgument(
            f"backend={backend!r}; allowed is 'r2ccl': cupyx.distributed has the others"
        )
    if use_mpi:
        return Backend(_meet_over_mpi(n_devices, rank))
    host = host or os.environ.get(_HOST_VARIABLE)
    port = _port_in_environment() if port is None else port
    if host is None and port is None and all(name in os.environ for name in _LAUNCHED):
        return Backend(_meet_as_launched(n_devices, rank))
    host = _HOST if host is None else host
    with _environment(_identity(n_devices, rank, host)):
        return Backend(init(port=_PORT if port is None else port))


class Backend:
    """A communicator with the methods of CuPy's ``NCCLBackend``; made by `init_process_group`.

    Attributes
    ----------
    rank : int
    communicator : Communicator
        What does the work, and tells what was repaired.

    Notes
    -----
    A method raises what the method of `Communicator` raises that it calls. A `stream` is a
    ``cupy.cuda.Stream``, or another that `Communicator.allreduce` takes: the work is ordered on it,
    by default on CuPy's current one, and the method returns at once. With NumPy arrays it is None,
    and the result is there on return.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank

    def all_reduce(
        self, in_array: Any, out_array: Any, op: str = "sum", stream: Any = None
    ) -> None:
        """Reduce `in_array` over all ranks into every rank's `out_array`.

        Parameters
        ----------
        in_array, out_array : array
            Of one dtype and size; the same array works in place.
        op : {"sum", "prod", "min", "max", "avg"}
        stream : optional
        """
        self.communicator.allreduce(in_array, out_array, _op(op), stream=stream)

    def reduce(
        self, in_array: Any, out_array: Any, root: int = 0, op: str = "sum", stream: Any = None
    ) -> None:
        """Reduce `in_array` over all ranks into the `out_array` of rank `root`.

        Parameters
        ----------
        in_array, out_array : array
            As for `all_reduce`; elsewhere than on `root`, `out_array` is not looked at.
        root : int
        op, stream
            As for `all_reduce`.
        """
        self.communicator.reduce(in_array, out_array, _op(op), root, stream=stream)

    def broadcast(self, in_out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Give every rank's `in_out_array` the elements of that of rank `root`.

        Parameters
        ----------
        in_out_array : array
        root : int
        stream : optional
        """
        self.communicator.broadcast(in_out_array, root=root, stream=stream)

    def reduce_scatter(
        self, in_array: Any, out_array: Any, count: int, op: str = "sum", stream: Any = None
    ) -> None:
        """Reduce over all ranks; each gets the `count` elements of its number.

        Parameters
        ----------
        in_array : array
            Its first ``n_devices * count`` elements are used.
        out_array : array
            Its first `count` elements get the result.
        count : int
            Elements each rank gets.
        op, stream
            As for `all_reduce`.
        """
        source = _first("in_array", in_array, count * self.communicator.nranks)
        output = _first("out_array", out_array, count)
        self.communicator.reduce_scatter(source, output, _op(op), stream=stream)

    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        """Collect `count` elements of every rank on every rank.

        Parameters
        ----------
        in_array : array
            Its first `count` elements are sent.
        out_array : array
            Its first ``n_devices * count`` elements get all ranks', in the order of their numbers.
        count : int
            Elements each rank sends.
        stream : optional
        """
        source = _first("in_array", in_array, count)
        output = _first("out_array", out_array, count * self.communicator.nranks)
        self.communicator.allgather(source, output, stream=stream)

    def barrier(self) -> None:
        """Return when all ranks have called it; as CuPy's, it concerns the host."""
        self.communicator.barrier()

    def stop(self) -> None:
        """Leave, once all ranks have all their data; `Communicator.close`. Idempotent."""
        self.communicator.close()


def _meet_over_mpi(n_devices: int, rank: int) -> Communicator:
    try:
        from mpi4py import MPI
    except ImportError as exc:
        raise InvalidArgument(
            f"use_mpi=True, but mpi4py cannot be imported ({exc}): install r2ccl[mpi] for the MPI "
            "that started the process"
        ) from exc
    world = MPI.COMM_WORLD
    ranks = world.allgather((rank, n_devices))
    size = world.Get_size()
    if sorted(ranks) != [(each, size) for each in range(size)]:
        raise InvalidArgument(
            f"MPI's {size} ranks gave (rank, n_devices) = {ranks}; each needs a rank "
            "of its own, and all of them the number of MPI's ranks: start as many with mpiexec"
        )
    ordered = world.Split(0, rank)
    made = init(ordered)
    ordered.Free()  # collective, so not where init() failed: other ranks may not come
    return made


def _meet_as_launched(n_devices: int, rank: int) -> Communicator:
    launched = os.environ["WORLD_SIZE"], os.environ["RANK"]
    if launched != (str(n_devices), str(rank)):
        raise InvalidArgument(
            f"n_devices={n_devices} and rank={rank}, but the launcher set WORLD_SIZE={launched[0]} "
            f"and RANK={launched[1]}: give those, or a host and a port"
        )
    return init()


def _port_in_environment() -> int | None:
    text = os.environ.get(_PORT_VARIABLE)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise InvalidArgument(f"{_PORT_VARIABLE}={text!r}: a whole number is needed") from None


def _identity(n_devices: int, rank: int, host: str) -> dict[str, str | None]:
    """Return the variables that say who this process is; None: not set."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(n_devices),
        "MASTER_ADDR": host,
        _LISTENER: None,
    }
    if host.startswith("127.") or host in ("localhost", "::1"):  # all ranks are on this machine
        variables["LOCAL_WORLD_SIZE"] = str(n_devices)
    return variables


@contextmanager
def _environment(variables: dict[str, str | None]) -> Iterator[None]:
    """Set variables of the process, and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _op(name: str) -> ReduceOp:
    if name not in _OPS:
        raise InvalidArgument(f"op={name!r}; allowed are {', '.join(_OPS)}")
    return _OPS[name]


def _first(name: str, array: Any, count: int) -> Any:
    """View the first `count` elements of an array that may be longer."""
    if array.size == count:
        return array
    if not 0 <= count <= array.size:
        raise InvalidArgument(
            f"{name} has {array.size} elements, and count asks for {count}: give a longer array, "
            "or a smaller count"
        )
    if not array.flags.c_contiguous:  # reshape would copy it
        raise InvalidArgument(
            f"{name} of shape {array.shape} and strides {array.strides} is not C-contiguous: pass "
            "a contiguous copy"
        )
    return array.reshape(-1)[:count]


__all__ = ["Backend", "init_process_group"]
