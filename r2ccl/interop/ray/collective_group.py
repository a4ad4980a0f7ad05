"""`R2cclGroup`: the methods that ``ray.util.collective`` calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from r2ccl import InvalidArgument, ReduceOp
from r2ccl.interop.ray.rendezvous import join

#: Operations by their names in Ray; only newer versions of Ray have AVERAGE.
_OPS = {
    "SUM": ReduceOp.SUM,
    "PRODUCT": ReduceOp.PROD,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "AVERAGE": ReduceOp.AVG,
}


class R2cclGroup(BaseGroup):  # type: ignore[misc]
    """Group of ``ray.util.collective`` whose calls run on a `Communicator`.

    ``init_collective_group`` and ``create_collective_group`` make such a group if their backend is
    ``"r2ccl"``; ``get_group_handle`` returns the group.

    Parameters
    ----------
    world_size, rank : int
    group_name : str

    Attributes
    ----------
    communicator : Communicator
        Communicator that runs the calls; its ``repairs()`` lists the repaired failures.

    Notes
    -----
    Tensors are NumPy arrays, or torch tensors in host memory; both must be C-contiguous. The
    constructor raises the errors of `join`. The methods raise the errors of the `Communicator`, and
    also `InvalidArgument` for an operation that r2ccl lacks and for several tensors in one call.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.communicator = join(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend in Ray."""
        return "R2CCL"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: the backend needs nothing but r2ccl."""
        return True

    def destroy_group(self) -> None:
        """Close the communicator."""
        self.communicator.close()

    def allreduce(self, tensors: list[Any], options: AllReduceOptions) -> None:
        """Reduce a tensor over all ranks, in place."""
        self.communicator.allreduce(_single(tensors), op=_operation(options))

    def barrier(self, options: BarrierOptions | None = None) -> None:
        """Wait until all ranks have called this method."""
        self.communicator.barrier()

    def reduce(self, tensors: list[Any], options: ReduceOptions) -> None:
        """Reduce a tensor over all ranks; the result replaces the tensor of the root rank."""
        op, root = _operation(options), options.root_rank
        tensor = _single(tensors)
        self.communicator.reduce(tensor, tensor if self.rank == root else None, op, root)

    def broadcast(self, tensors: list[Any], options: BroadcastOptions) -> None:
        """Copy the tensor of the root rank to all ranks."""
        self.communicator.broadcast(_single(tensors), root=options.root_rank)

    def allgather(
        self, lists: list[list[Any]], tensors: list[Any], options: AllGatherOptions | None = None
    ) -> None:
        """Copy the tensor of each rank r to element r of the list of every rank."""
        tensor, outputs = _single(tensors), _single(lists)
        gathered = _empty(self.world_size, tensor)
        self.communicator.allgather(tensor, gathered)
        for output, part in zip(outputs, gathered, strict=True):
            output[...] = part

    def reducescatter(
        self, tensors: list[Any], lists: list[list[Any]], options: ReduceScatterOptions
    ) -> None:
        """Reduce the lists of all ranks; rank r receives element r of the result in its tensor."""
        output, inputs = _single(tensors), _single(lists)
        stacked = _empty(self.world_size, inputs[0])
        for part, each in zip(stacked, inputs, strict=True):
            part[...] = each
        self.communicator.reduce_scatter(stacked, output, _operation(options))

    def send(self, tensors: list[Any], options: SendOptions) -> None:
        """Send a tensor to a rank."""
        self.communicator.send(_single(tensors), options.dst_rank)

    def recv(self, tensors: list[Any], options: RecvOptions) -> None:
        """Receive a tensor from a rank."""
        self.communicator.recv(_single(tensors), options.src_rank)


def _operation(options: Any) -> ReduceOp:
    """Return the `ReduceOp` for the operation that the options of a call contain."""
    name = options.reduceOp.name
    if name not in _OPS:
        raise InvalidArgument(f"op={name} of Ray: allowed are {', '.join(_OPS)}")
    return _OPS[name]


def _single(values: list[Any]) -> Any:
    """Return the only element of `values`, in which Ray passes one element per GPU of a rank.

    Raise InvalidArgument if there is not exactly one element.
    """
    if len(values) != 1:
        raise InvalidArgument(
            f"{len(values)} tensors, one for each GPU: allowed is 1; use the functions of "
            "ray.util.collective without _multigpu"
        )
    return values[0]


def _empty(n: int, like: Any) -> Any:
    """Return an uninitialized array or torch tensor with room for `n` tensors like `like`."""
    shape = (n, *like.shape)
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


__all__ = ["R2cclGroup"]
