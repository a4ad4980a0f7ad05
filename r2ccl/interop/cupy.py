"""Interface of ``cupyx.distributed`` on top of a `Communicator`.

A program for CuPy changes one import::

    from r2ccl.interop.cupy import init_process_group

    comm = init_process_group(2, rank)
    comm.all_reduce(x, out)

The `Backend` returned has CuPy's collectives, ``barrier`` and ``stop``. It has no ``send``,
``recv`` or ``send_recv``, because `Communicator` sends messages from host memory only. Arrays may
be CuPy's or NumPy's, of any dtype that r2ccl supports. An array that is not C-contiguous is refused
with `InvalidArgument`, unless it is a NumPy array that the call reads completely and does not
write.

This module does not import CuPy.

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

#: Default host and port of CuPy, and the environment variables that override them.
_HOST, _HOST_VARIABLE = "127.0.0.1", "CUPYX_DISTRIBUTED_HOST"
_PORT, _PORT_VARIABLE = 13333, "CUPYX_DISTRIBUTED_PORT"

#: Variables that launchers set; `_LISTENER` would override `host` and `port`.
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
    """Connect the ranks, as ``cupyx.distributed.init_process_group`` does; return the backend.

    Parameters
    ----------
    n_devices : int
        Number of ranks.
    rank : int
        Rank of this process, from 0.
    backend : {"r2ccl"}
        Other names raise `InvalidArgument`.
    host : str, optional
        Address of rank 0's machine, at which the other ranks reach it. Default: see Notes.
    port : int, optional
        TCP port at which rank 0 listens. Default: see Notes.
    use_mpi : bool
        Exchange the address of rank 0 over MPI; the processes are those of ``MPI.COMM_WORLD``.
        `rank` may differ from the rank in MPI; `host` and `port` are ignored. Unlike CuPy, this
        raises an error if mpi4py is not installed.

    Returns
    -------
    Backend

    Raises
    ------
    InvalidArgument
        If `rank` is not in 0 to ``n_devices - 1``, `backend` is unknown, `rank` and `n_devices` do
        not agree with the launcher or MPI, mpi4py cannot be imported, or
        ``CUPYX_DISTRIBUTED_PORT`` is not a number; and for the reasons given in `r2ccl.init`.
    TransportTimeout
        If a rank does not connect within ``R2CC_INIT_TIMEOUT_S``.
    PeerLost
        If a rank exits during `init_process_group`.
    CommunicatorRevoked, NoHealthyRail, TransportError
        For the reasons given in `r2ccl.init`.

    Notes
    -----
    *Collective*: all ranks. Defaults of `host` and `port` are ``CUPYX_DISTRIBUTED_HOST`` and
    ``CUPYX_DISTRIBUTED_PORT``. If none of these arguments and variables is set, the addresses of
    the launcher that started the process (torchrun, ``r2ccl launch``) are used. If any of them is
    set, or there is no launcher, a missing host is 127.0.0.1 and a missing port is 13333. All other
    settings come from the ``R2CC_*`` variables.

    Every connection is authenticated with the secret of the job. With a loopback address as `host`,
    with MPI, and with ``r2ccl launch``, the ranks share a secret automatically. With another
    `host`, or with torchrun on several hosts, every rank needs the same ``R2CC_SECRET``, or a
    ``R2CC_SECRET_FILE`` made with ``(umask 077; openssl rand -hex 32 > FILE)``, because this
    function, like CuPy's, has no argument for the secret.

    Unless it uses MPI or the addresses of a launcher, this function temporarily changes environment
    variables of the process: it sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and, with a loopback
    address as `host`, ``LOCAL_WORLD_SIZE``, and removes ``R2CC_LISTEN_FD``. Until it returns, no
    other thread may start a process or create a communicator.
    """
    if not 0 <= rank < n_devices:
        raise InvalidArgument(
            f"rank={rank} of n_devices={n_devices}; allowed is 0 to n_devices - 1"
        )
    if backend != "r2ccl":
        raise InvalidArgument(
            f"backend={backend!r}; allowed is 'r2ccl': use cupyx.distributed for other backends"
        )
    if use_mpi:
        return Backend(_meet_over_mpi(n_devices, rank))
    host = host or os.environ.get(_HOST_VARIABLE) or None
    port = _port_in_environment() if port is None else port
    if host is None and port is None and all(name in os.environ for name in _LAUNCHED):
        return Backend(_meet_as_launched(n_devices, rank))
    host = _HOST if host is None else host
    with _environment(_identity(n_devices, rank, host)):
        return Backend(init(port=_PORT if port is None else port))


class Backend:
    """Communicator with the methods of CuPy's ``NCCLBackend``; made by `init_process_group`.

    Attributes
    ----------
    rank : int
    communicator : Communicator
        Communicator that runs the collectives; its ``repairs()`` lists the repaired failures.

    Notes
    -----
    Each method raises the errors of the `Communicator` method that it calls, and `InvalidArgument`
    for an unknown `op`, or a `count` that does not fit the array. A `stream` is a
    ``cupy.cuda.Stream``, or another stream that `Communicator.allreduce` accepts. With CuPy arrays,
    the work is ordered on that stream, by default on CuPy's current stream, and the method does not
    wait for the result. With NumPy arrays, `stream` must be None, and the method returns when the
    result is complete.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank

    def all_reduce(
        self, in_array: Any, out_array: Any, op: str = "sum", stream: Any = None
    ) -> None:
        """Reduce `in_array` over all ranks into `out_array` on every rank.

        Parameters
        ----------
        in_array, out_array : array
            Arrays of equal dtype and size. They may be the same array, for an in-place reduction.
        op : str
            Name of a `ReduceOp` in lower case, such as "sum".
        stream : optional
        """
        self.communicator.allreduce(in_array, out_array, _op(op), stream=stream)

    def reduce(
        self, in_array: Any, out_array: Any, root: int = 0, op: str = "sum", stream: Any = None
    ) -> None:
        """Reduce `in_array` over all ranks into `out_array` on rank `root`.

        Parameters
        ----------
        in_array, out_array : array
            As for `all_reduce`. On ranks other than `root`, `out_array` is ignored.
        root : int
        op, stream
            As for `all_reduce`.
        """
        self.communicator.reduce(in_array, out_array, _op(op), root, stream=stream)

    def broadcast(self, in_out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Copy `in_out_array` of rank `root` to `in_out_array` of every rank.

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
        """Reduce `in_array` over all ranks; rank r gets part r, which has `count` elements.

        Parameters
        ----------
        in_array : array
            Its first ``n_devices * count`` elements are used.
        out_array : array
            The result is written to its first `count` elements.
        count : int
            Number of elements that each rank gets.
        op, stream
            As for `all_reduce`.
        """
        source = _first("in_array", in_array, count * self.communicator.nranks)
        output = _first("out_array", out_array, count)
        self.communicator.reduce_scatter(source, output, _op(op), stream=stream)

    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        """Gather `count` elements from every rank on every rank.

        Parameters
        ----------
        in_array : array
            Its first `count` elements are sent.
        out_array : array
            The elements of all ranks are written to its first ``n_devices * count`` elements, in
            rank order.
        count : int
            Number of elements that each rank sends.
        stream : optional
        """
        source = _first("in_array", in_array, count)
        output = _first("out_array", out_array, count * self.communicator.nranks)
        self.communicator.allgather(source, output, stream=stream)

    def scatter(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Send part r of `in_array` of rank `root` to `out_array` of rank r.

        Parameters
        ----------
        in_array : array
            Has as many elements as the ``n_devices`` output arrays together. Ignored on ranks other
            than `root`.
        out_array : array
        root : int
        stream : optional
        """
        self.communicator.scatter(in_array, out_array, root, stream=stream)

    def gather(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Write `in_array` of every rank, in rank order, to `out_array` of rank `root`.

        Parameters
        ----------
        in_array : array
        out_array : array
            Has as many elements as the ``n_devices`` input arrays together. Ignored on ranks other
            than `root`.
        root : int
        stream : optional
        """
        self.communicator.gather(in_array, out_array, root, stream=stream)

    def all_to_all(self, in_array: Any, out_array: Any, stream: Any = None) -> None:
        """Send part r of `in_array` to rank r; part s of `out_array` comes from rank s.

        Parameters
        ----------
        in_array, out_array : array
            Arrays of equal dtype and size, of ``n_devices`` equal parts.
        stream : optional
        """
        self.communicator.alltoall(in_array, out_array, stream=stream)

    def barrier(self) -> None:
        """Block the calling thread until all ranks have called `barrier`, as in CuPy."""
        self.communicator.barrier()

    def stop(self) -> None:
        """Wait until all ranks have their data, then close; a second call does nothing."""
        self.communicator.close()


def _meet_over_mpi(n_devices: int, rank: int) -> Communicator:
    try:
        from mpi4py import MPI
    except ImportError as exc:
        raise InvalidArgument(
            f"use_mpi=True, but mpi4py cannot be imported ({exc}): install mpi4py (the extra "
            "r2ccl[mpi]), built for the MPI that started the process"
        ) from exc
    world = MPI.COMM_WORLD
    ranks = world.allgather((rank, n_devices))
    size = world.Get_size()
    if sorted(ranks) != [(each, size) for each in range(size)]:
        raise InvalidArgument(
            f"MPI's {size} ranks gave (rank, n_devices) = {ranks}; each must give a different "
            "rank, and n_devices must be the number of MPI's ranks: start n_devices processes "
            "with mpiexec"
        )
    ordered = world.Split(0, rank)
    made = init(ordered)
    ordered.Free()  # collective: not after a failed init(), when other ranks may not call it
    return made


def _meet_as_launched(n_devices: int, rank: int) -> Communicator:
    launched = os.environ["WORLD_SIZE"], os.environ["RANK"]
    if launched != (str(n_devices), str(rank)):
        raise InvalidArgument(
            f"n_devices={n_devices} and rank={rank}, but the launcher set WORLD_SIZE={launched[0]} "
            f"and RANK={launched[1]}: pass these values, or a host and a port"
        )
    return init()


def _port_in_environment() -> int | None:
    text = os.environ.get(_PORT_VARIABLE)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise InvalidArgument(f"{_PORT_VARIABLE}={text!r}: a whole number is needed") from None


def _identity(n_devices: int, rank: int, host: str) -> dict[str, str | None]:
    """Return the environment variables for `init`; None marks a variable to be removed."""
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
    """Set environment variables, or remove those whose value is None; restore all on exit."""
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
    """Return `array` if it has `count` elements, else a flat view of its first `count` elements."""
    if array.size == count:
        return array
    if not 0 <= count <= array.size:
        raise InvalidArgument(
            f"{name} has {array.size} elements, but count requires {count}: pass a count of 0 "
            "or more, and an array that is large enough"
        )
    if not array.flags.c_contiguous:  # reshape would copy it
        raise InvalidArgument(
            f"{name} of shape {array.shape} and strides {array.strides} is not C-contiguous: pass "
            "a contiguous copy"
        )
    return array.reshape(-1)[:count]


__all__ = ["Backend", "init_process_group"]
