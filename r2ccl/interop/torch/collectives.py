"""Collectives of torch.distributed as calls of a `Communicator`.

Each collective takes the communicator, and the arguments and options of the ``ProcessGroup`` method
of the same name. With tensors in host memory, it blocks until they hold the result. With tensors on
a GPU, it does not wait for the GPU; work that the calling thread later enqueues on its current
stream sees the result. Some callers in torch pass a tensor where others pass a list of one tensor;
the functions accept both.

The functions raise the errors of the communicator's call. They also raise `InvalidArgument` if the
sizes or dtypes of the tensors do not match, or if a tensor cannot be viewed as an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r2ccl import Communicator, InvalidArgument, ReduceOp, premul_sum
from r2ccl.interop.torch.tensors import (
    Tensor,
    apart,
    array_of,
    copy_back,
    divide,
    in_order,
    is_in_order,
    joined,
    one,
    tensors_of,
)

_KINDS = dist.ReduceOp.RedOpType
_OPERATIONS = {
    _KINDS.SUM: ReduceOp.SUM,
    _KINDS.AVG: ReduceOp.AVG,
    _KINDS.PRODUCT: ReduceOp.PROD,
    _KINDS.MIN: ReduceOp.MIN,
    _KINDS.MAX: ReduceOp.MAX,
    _KINDS.BAND: ReduceOp.BAND,
    _KINDS.BOR: ReduceOp.BOR,
    _KINDS.BXOR: ReduceOp.BXOR,
}  # all but PREMUL_SUM
#: Largest number of dimensions of a tensor in torch.
_MOST_DIMENSIONS = 64
#: A sum of bools is true if any of them is, as with NCCL; a product, if all of them are.
_ON_BOOL = {_KINDS.SUM: ReduceOp.LOR, _KINDS.PRODUCT: ReduceOp.LAND}


def operation(op: Any, tensor: Tensor) -> Any:
    """Return the operation of r2ccl for torch's `op` on `tensor`."""
    kind = op.op
    if tensor.dtype is torch.bool and kind in _ON_BOOL:
        return _ON_BOOL[kind]
    found = _OPERATIONS.get(kind)
    return premul_sum(float(op.factor)) if found is None else found


def allreduce(comm: Communicator, tensors: Any, opts: Any) -> None:
    """Reduce each of `tensors` over all ranks, in place; several tensors are reduced as a group."""
    tensors = tensors_of(tensors)
    if len(tensors) == 1:
        if tensors[0].is_sparse:
            _allreduce_sparse(comm, tensors[0], opts)
            return
        copy = in_order(tensors[0])
        comm.allreduce(array_of(copy), op=operation(opts.reduceOp, copy))
        copy_back(tensors[0], copy)
        return
    copies = [in_order(each) for each in tensors]
    with comm.group():
        for copy in copies:
            comm.allreduce(array_of(copy), op=operation(opts.reduceOp, copy))
    for tensor, copy in zip(tensors, copies, strict=True):
        copy_back(tensor, copy)


def _allreduce_sparse(comm: Communicator, tensor: Tensor, opts: Any) -> None:
    """Sum a sparse tensor over all ranks: gather all indices and values, and coalesce them."""
    if opts.reduceOp.op != _KINDS.SUM:
        raise InvalidArgument(f"{opts.reduceOp.op} on a sparse tensor: allowed is SUM")
    mine = tensor.detach().coalesce()
    # The shapes must be equal, because an index that is out of bounds corrupts memory.
    form = np.full(2 + _MOST_DIMENSIONS, -1)
    form[: 2 + mine.dim()] = mine._nnz(), mine.sparse_dim(), *mine.shape
    forms = comm.allgather(form).reshape(comm.nranks, -1).tolist()
    for rank, (_, *other) in enumerate(forms):
        if other != forms[0][1:]:
            raise InvalidArgument(
                f"rank 0 passed {_sparse_form(forms[0])}, rank {rank} {_sparse_form(forms[rank])}: "
                "all ranks must pass sparse tensors of the same shape"
            )
    counts = [each[0] for each in forms]
    # One row per element, so that the parts of the ranks follow one another.
    indices, values = in_order(mine.indices().t()), in_order(mine.values())
    gathered = []
    for rows in (indices, values):
        whole = rows.new_empty((sum(counts), *rows.shape[1:]))
        width = rows[0].numel() if len(rows) else int(np.prod(rows.shape[1:]))
        comm.allgatherv(array_of(rows), array_of(whole), counts=[count * width for count in counts])
        gathered.append(whole)
    # The explicit False keeps torch from warning that the check is off; shapes and indices fit.
    total = torch.sparse_coo_tensor(
        gathered[0].t(), gathered[1], tensor.shape, check_invariants=False
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _sparse_form(form: Sequence[int]) -> str:
    _, sparse_dim, *sizes = form
    shape = tuple(size for size in sizes if size >= 0)
    return f"a sparse tensor of shape {shape} with {sparse_dim} sparse dimensions"


def broadcast(comm: Communicator, tensors: Any, opts: Any) -> None:
    """Send the tensor of the root to the tensor of every rank."""
    tensor = one(tensors)
    copy = in_order(tensor)
    comm.broadcast(array_of(copy), root=opts.rootRank)
    if comm.rank != opts.rootRank:
        copy_back(tensor, copy)


def reduce(comm: Communicator, tensors: Any, opts: Any) -> None:
    """Reduce the tensors of all ranks into the tensor of the root."""
    tensor = one(tensors)
    copy = in_order(tensor)
    comm.reduce(array_of(copy), op=operation(opts.reduceOp, copy), root=opts.rootRank)
    if comm.rank == opts.rootRank:
        copy_back(tensor, copy)


def allgather(comm: Communicator, outputs: Any, inputs: Any, opts: Any) -> None:
    """Gather the tensor of rank r into ``outputs[r]`` on every rank; sizes may differ."""
    tensor, parts = one(inputs), _list(outputs)
    _require_parts("output", parts, comm.nranks)
    _require_alike("output", parts[comm.rank], tensor)
    flat, counts = joined(parts, is_read=False), _counts(parts)
    source = apart(in_order(tensor), flat, sum(counts[: comm.rank]))
    if len(set(counts)) == 1:
        comm.allgather(array_of(source), array_of(flat))  # on GPUs, faster than allgatherv
    else:
        comm.allgatherv(array_of(source), array_of(flat), counts=counts)
    divide(flat, parts)


def all_gather_single(comm: Communicator, output: Tensor, tensor: Tensor, opts: Any) -> None:
    """Gather the tensor of every rank, in rank order, into `output` on every rank."""
    all_gather_single_coalesced(comm, [output], [tensor], opts)


def all_gather_single_coalesced(
    comm: Communicator, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any
) -> None:
    """Gather ``tensors[i]`` of every rank, in rank order, into ``outputs[i]``."""
    with _outputs_in_order(comm, outputs) as copies:
        for output, copy, tensor in zip(outputs, copies, tensors, strict=True):
            _require_times("output", output, comm.nranks, tensor)
            source = apart(in_order(tensor), copy, comm.rank * tensor.numel())
            comm.allgather(array_of(source), array_of(copy))


def allgather_coalesced(
    comm: Communicator, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any
) -> None:
    """Gather the tensors of every rank; the tensors of rank r are written to ``outputs[r]``."""
    _require_parts("output", outputs, comm.nranks)
    for i, tensor in enumerate(tensors):
        allgather(comm, [[each[i] for each in outputs]], [tensor], opts)


def reduce_scatter(comm: Communicator, outputs: Any, inputs: Any, opts: Any) -> None:
    """Reduce ``inputs[r]`` of all ranks into the output tensor of rank r, for every rank r."""
    output, parts = one(outputs), _list(inputs)
    _require_parts("input", parts, comm.nranks)
    _require_alike("input", parts[comm.rank], output)
    flat, copy, counts = joined(parts, is_read=True), _ordered_output(output), _counts(parts)
    op, source = operation(opts.reduceOp, flat), apart(flat, copy, -sum(counts[: comm.rank]))
    comm.reduce_scatterv(array_of(source), array_of(copy), op, counts=counts)
    copy_back(output, copy)


def reduce_scatter_single(comm: Communicator, output: Tensor, tensor: Tensor, opts: Any) -> None:
    """Reduce `tensor` over all ranks; rank r receives part r of the result in `output`."""
    reduce_scatter_single_coalesced(comm, [output], [tensor], opts)


def reduce_scatter_single_coalesced(
    comm: Communicator, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any
) -> None:
    """Reduce each ``tensors[i]`` over all ranks; rank r receives part r in ``outputs[i]``."""
    with _outputs_in_order(comm, outputs) as copies:
        for output, copy, tensor in zip(outputs, copies, tensors, strict=True):
            _require_times("input", tensor, comm.nranks, output)
            source = apart(in_order(tensor), copy, -comm.rank * copy.numel())
            comm.reduce_scatter(array_of(source), array_of(copy), operation(opts.reduceOp, source))


def gather(comm: Communicator, outputs: Any, inputs: Any, opts: Any) -> None:
    """Gather the tensor of rank r into ``outputs[r]`` of the root.

    All tensors must have the same shape.
    """
    tensor, parts = one(inputs), _list(outputs)
    source = in_order(tensor)
    if comm.rank != opts.rootRank:
        comm.gather(array_of(source), root=opts.rootRank)
        return
    _require_parts("output", parts, comm.nranks)
    for part in parts:
        _require_alike("output", part, tensor)
    flat = joined(parts, is_read=False)
    source = apart(source, flat, comm.rank * tensor.numel())
    comm.gather(array_of(source), array_of(flat), root=opts.rootRank)
    divide(flat, parts)


def scatter(comm: Communicator, outputs: Any, inputs: Any, opts: Any) -> None:
    """Send ``inputs[r]`` of the root to the output tensor of rank r.

    All tensors must have the same shape.
    """
    output, parts = one(outputs), _list(inputs)
    copy, source = _ordered_output(output), None
    if comm.rank == opts.rootRank:
        _require_parts("input", parts, comm.nranks)
        for part in parts:
            _require_alike("input", part, output)
        source = array_of(apart(joined(parts, is_read=True), copy, -comm.rank * copy.numel()))
    comm.scatter(source, array_of(copy), root=opts.rootRank)
    copy_back(output, copy)


def alltoall(
    comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
) -> None:
    """Send ``inputs[r]`` to rank r, and receive ``outputs[r]`` from rank r."""
    _require_parts("input", inputs, comm.nranks)
    _require_parts("output", outputs, comm.nranks)
    source, target = joined(inputs, is_read=True), joined(outputs, is_read=False)
    _alltoallv(comm, target, source, _counts(outputs), _counts(inputs))
    divide(target, outputs)


def all_to_all_single(
    comm: Communicator,
    output: Tensor,
    tensor: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any,
) -> None:
    """Send rows of `tensor` to every rank, and receive rows from every rank into `output`.

    The splits are the numbers of rows per rank, in rank order. An empty list divides the rows
    equally among the ranks.
    """
    source, target = in_order(tensor), _ordered_output(output)
    sendcounts = _split("input", tensor, input_splits, comm.nranks)
    recvcounts = _split("output", output, output_splits, comm.nranks)
    _alltoallv(comm, target, source, recvcounts, sendcounts)
    copy_back(output, target)


def _alltoallv(
    comm: Communicator,
    target: Tensor,
    source: Tensor,
    recvcounts: Sequence[int],
    sendcounts: Sequence[int],
) -> None:
    """Call `alltoallv` on tensors that are in order (see `tensors`) and may overlap."""
    # `alltoallv` is in place only if both have the same memory; the same address is not enough.
    first = 0 if source.nbytes == target.nbytes else None
    comm.alltoallv(
        array_of(apart(source, target, first)),
        array_of(target),
        sendcounts=sendcounts,
        recvcounts=recvcounts,
    )


def barrier(comm: Communicator, opts: Any) -> None:
    """Wait until all ranks have called `barrier`."""
    comm.barrier()


def _list(lists: Any) -> list[Tensor]:
    """Return the tensors of a list of tensors, or of a list that contains one such list."""
    if len(lists) == 1 and not isinstance(lists[0], torch.Tensor):
        return list(lists[0])
    return list(lists)


@contextmanager
def _outputs_in_order(comm: Communicator, outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the outputs as a list, in which a new tensor replaces each output that is not in order.

    See `tensors` for the order. At the end of the block, each new tensor is copied to its output.
    If there are several outputs, the calls in the block run as a group.
    """
    copies = [_ordered_output(output) for output in outputs]
    with comm.group() if len(copies) > 1 else nullcontext():
        yield copies
    for output, copy in zip(outputs, copies, strict=True):
        copy_back(output, copy)


def _ordered_output(output: Tensor) -> Tensor:
    """Return `output` if it is in order (see `tensors`), else an uninitialized tensor in order."""
    if is_in_order(output):
        return output
    return torch.empty_like(output, memory_format=torch.contiguous_format)


def _counts(tensors: Sequence[Tensor]) -> list[int]:
    return [each.numel() for each in tensors]


def _split(name: str, tensor: Tensor, splits: Sequence[int], nranks: int) -> list[int]:
    """Return the number of elements of each rank's rows; without `splits`, divide rows equally."""
    nrows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if nrows % nranks:
            raise InvalidArgument(
                f"{name} of {nrows} rows without {name}_split_sizes: the number of rows must be a "
                f"multiple of {nranks}, the number of ranks"
            )
        splits = [nrows // nranks] * nranks
    if len(splits) != nranks or sum(splits) != nrows:
        raise InvalidArgument(
            f"{name}_split_sizes={list(splits)} for {nrows} rows: give {nranks} sizes that add up "
            "to the number of rows"
        )
    width = tensor.numel() // nrows if nrows else 0
    return [split * width for split in splits]


def _require_parts(name: str, parts: Sequence[Any], nranks: int) -> None:
    if len(parts) != nranks:
        raise InvalidArgument(
            f"the {name} list has {len(parts)} entries: give {nranks}, one for each rank"
        )


def _require_alike(name: str, part: Tensor, tensor: Tensor) -> None:
    if part.shape != tensor.shape or part.dtype != tensor.dtype:
        raise InvalidArgument(
            f"the {name} list has a tensor of dtype {part.dtype} and shape {tuple(part.shape)}: "
            f"dtype {tensor.dtype} and shape {tuple(tensor.shape)} are needed"
        )


def _require_times(name: str, whole: Tensor, nranks: int, part: Tensor) -> None:
    if whole.numel() != nranks * part.numel() or whole.dtype != part.dtype:
        raise InvalidArgument(
            f"the {name} has {whole.numel()} elements of {whole.dtype}: pass "
            f"{nranks * part.numel()} elements of {part.dtype}, {part.numel()} for each of the "
            f"{nranks} ranks"
        )


__all__ = [
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "operation",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
]
