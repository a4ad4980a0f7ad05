"""Validation of the arguments of a collective.

Each collective has a function; scan and exscan share a function. The function makes views of the
arrays in host or device memory and returns a `Request` with the call signature that must be equal
on all ranks. If the caller passed no output, but the call needs one and its size is known, the
function allocates it. The function does not communicate, and reads array data only to copy it. Its
arguments ``x``, ``out``, ``op``, ``root`` and ``schedule``, and its errors, are those of the method
of `Communicator` with the same name.

Invariant: the arrays of every `Request` are valid and fit together, and its operation exists. Other
arrays and operations raise `InvalidArgument`, before any data moves. These functions leave three
checks to others: the caller checks the root (`rank_of`), `check_op` or planning checks that the
dtype supports a `ReduceOp`, and `PlanCache` checks the ops of the schedule.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any, SupportsIndex, TypeAlias

import msgspec
import numpy as np

from r2ccl import kernels
from r2ccl.dtypes import CODES, dtype_name, names, raw_dtype
from r2ccl.errors import InvalidArgument
from r2ccl.runtime.advice import misplaced, refused_op, refused_output, type_name
from r2ccl.runtime.arrays.buffers import (
    Buffer,
    Extent,
    JaxBuffer,
    host_array,
    is_in_place,
    like,
    like_flat,
    like_part,
    part_of,
    refusal,
    require_possible,
)
from r2ccl.runtime.arrays.cuda import (
    ANY_GPU,
    DeviceBuffer,
    as_device_buffer,
    is_device_array,
)
from r2ccl.runtime.arrays.libraries import is_jax
from r2ccl.runtime.messages.matching import ANY
from r2ccl.schedule.chunks import Parts, Range, consecutive
from r2ccl.schedule.ir import Schedule
from r2ccl.types import REDUCTIONS, CallSignature, Collective, ReduceOp

Memory: TypeAlias = Buffer | DeviceBuffer
#: Number of elements of each part, and index of each part's first element; None instead of the
#: indices: each part begins where the previous one ends.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | None]
#: Argument ``op`` of a reduction.
Operation: TypeAlias = ReduceOp | kernels.ConvertedOp | kernels.UserOp


class Request(msgspec.Struct, frozen=True, eq=False):
    """Validated arguments of one collective call.

    Parameters
    ----------
    signature : CallSignature
        Parameters of the call that must be equal on all ranks.
    source, output : Buffer or DeviceBuffer
        Views of the input and the output, both in host memory or both on one device. On ranks other
        than the root, ``output`` is None for a reduce or gather, and ``source`` is empty for a
        scatter. For a barrier, ``output`` is None and ``source`` is empty on all ranks.
    result : object
        Return value of the method of `Communicator`. If the method returns a new JAX array: the
        NumPy array from which the JAX array is made.
    schedule : Schedule or None
        User-defined allreduce schedule, if the caller passed one.
    parts : Parts or None
        Ranges of the parts in the input and the output; None: they follow from the signature.
    is_in_place : bool
        For an allgather: True if `source` is already this rank's part of `output`. For an alltoall,
        alltoallv or exscan: True if `source` and `output` are the same memory. Always False for the
        other collectives.
    conversion : ConvertedOp or None
        Conversion of the input before the collective. If there is one, `is_staged` is True.
    is_staged : bool
        True if the collective may need more than `source`, `output` and the signature: copies of
        data before or after it, separate memory for partial sums, or `parts`.
    """

    signature: CallSignature
    source: Memory
    output: Memory | None
    result: Any
    schedule: Schedule | None = None
    parts: Parts | None = None
    is_in_place: bool = False
    is_staged: bool = False
    conversion: kernels.ConvertedOp | None = None


def allreduce(x: Any, out: Any, op: Operation, schedule: Schedule | None = None) -> Request:
    """Validate the arguments of `Communicator.allreduce`; return the call as a `Request`."""
    source, output = _both(x, out)
    number = op if type(op) is ReduceOp else ReduceOp.SUM
    call = CallSignature(Collective.ALLREDUCE, source.dtype_code, number, source.count)
    request = Request(call, source, output, output.owner, schedule)
    # `_with_operation` is called only if needed: a function call takes 1 % of a small call's time.
    return request if number is op else _with_operation(request, op)


def run_schedule(x: Any, out: Any, op: Operation, schedule: Schedule, nranks: int) -> Request:
    """Validate the arguments of `Communicator.run_schedule`; return the call as a `Request`."""
    if not isinstance(schedule, Schedule):
        raise InvalidArgument(
            f"{type_name(schedule)} was given as the schedule, the first argument: pass a "
            "schedule made by r2ccl.algos or r2ccl.schedule.build, and the array after it"
        )
    if (schedule.collective, schedule.nranks) != ("allreduce", nranks):
        raise InvalidArgument(
            f"the schedule is for {schedule.collective} over {schedule.nranks} ranks: pass a "
            f"schedule for allreduce over {nranks} ranks"
        )
    return allreduce(x, out, op, schedule)


def barrier(x: Any, out: Any, rank: int) -> Request:
    """Return a barrier as a `Request`; the arguments are ignored."""
    return Request(_BARRIER, _NO_DATA, None, None, is_staged=True)


def broadcast(x: Any, out: Any, root: int, rank: int) -> Request:
    """Validate the arguments of `Communicator.broadcast`; return the call as a `Request`.

    On the root, `x` may be read-only: without `out`, it is also the output, but is not written to.
    """
    if rank == root and (out is None or out is x) and not is_jax(x):
        source = output = view(x, writable=False)
    else:
        source, output = _both(x, out)
    call = CallSignature(Collective.BROADCAST, source.dtype_code, ReduceOp.SUM, source.count, root)
    return Request(call, source, output, output.owner)


def reduce(x: Any, out: Any, op: Operation, root: int, rank: int) -> Request:
    """Validate the arguments of `Communicator.reduce`; return the call as a `Request`."""
    output: Memory | None = None
    if rank == root:
        source, output = _both(x, out)
    else:
        source = view(x, writable=False)
        _refuse_unused(out)
    number = op if type(op) is ReduceOp else ReduceOp.SUM
    call = CallSignature(Collective.REDUCE, source.dtype_code, number, source.count, root)
    result = None if output is None else output.owner
    request = Request(call, source, output, result, is_staged=output is None)
    return request if number is op else _with_operation(request, op)


def allgather(x: Any, out: Any, rank: int, nranks: int) -> Request:
    """Validate the arguments of `Communicator.allgather`; return the call as a `Request`."""
    source = view(x, writable=False)
    result = like(x, nranks) if out is None else out
    output = _output(source, result)
    is_there = is_in_place(source, part_of(output, rank, nranks), whole_output=output)
    call = CallSignature(Collective.ALLGATHER, output.dtype_code, ReduceOp.SUM, output.count)
    return Request(call, source, output, result, is_in_place=is_there, is_staged=True)


def reduce_scatter(x: Any, out: Any, op: Operation, rank: int, nranks: int) -> Request:
    """Validate the arguments of `Communicator.reduce_scatter`; return the call as a `Request`."""
    source = view(x, writable=False)
    own = part_of(source, rank, nranks)
    result = like_part(x, nranks) if out is None else out
    output = _output(source, result)
    is_in_place(own, output, whole_source=source)
    number = op if type(op) is ReduceOp else ReduceOp.SUM
    call = CallSignature(Collective.REDUCE_SCATTER, source.dtype_code, number, source.count)
    request = Request(call, source, output, result, is_staged=True)
    return request if number is op else _with_operation(request, op)


def allgatherv(x: Any, out: Any, counts: Any, displs: Any, rank: int, nranks: int) -> Request:
    """Validate the arguments of `Communicator.allgatherv`; return the call as a `Request`."""
    layout = layout_of(counts, displs, nranks)
    sizes, places = layout[0], _places(layout)
    source = view(x, writable=False)
    result = like_flat(x, _end(places)) if out is None else out
    output = _output(source, result)
    is_equal = len(set(sizes)) == 1 and places == consecutive(sizes)
    # On GPUs, other ranks must know whether the request has parts, but they do not know the places.
    is_on_gpu = isinstance(source, DeviceBuffer)
    if is_equal and output.count == sum(sizes) and not is_on_gpu:
        return allgather(x, result, rank, nranks)
    _require_room("out", output, places, is_disjoint=True)
    is_there = is_in_place(source, _part(output, places[rank]), whole_output=output)
    call = CallSignature(Collective.ALLGATHER, output.dtype_code, ReduceOp.SUM, sum(sizes))
    parts = Parts(places, places)
    return Request(
        _with_digest(call, sizes) if is_on_gpu else _with_counts(call, sizes),
        source,
        output,
        result,
        parts=parts,
        is_in_place=is_there,
        is_staged=True,
    )


def reduce_scatterv(
    x: Any, out: Any, op: Operation, counts: Any, rank: int, nranks: int
) -> Request:
    """Validate the arguments of `Communicator.reduce_scatterv`; return the call as a `Request`."""
    sizes, _ = layout_of(counts, None, nranks)
    result = like_flat(x, sizes[rank]) if out is None else out
    source = view(x, writable=False)
    if source.count != sum(sizes):
        raise InvalidArgument(
            f"x has {source.count} elements, counts={sizes} add up to {sum(sizes)}: both must be "
            "equal"
        )
    if len(set(sizes)) == 1:
        return reduce_scatter(x, result, op, rank, nranks)
    output, places = _output(source, result), consecutive(sizes)
    is_in_place(_part(source, places[rank]), output, whole_source=source)
    number = op if type(op) is ReduceOp else ReduceOp.SUM
    call = CallSignature(Collective.REDUCE_SCATTER, source.dtype_code, number, source.count)
    call, parts = _with_counts(call, sizes), Parts(places, places)
    request = Request(call, source, output, result, parts=parts, is_staged=True)
    return request if number is op else _with_operation(request, op)


def gather(x: Any, out: Any, root: int, rank: int, nranks: int) -> Request:
    """Validate the arguments of `Communicator.gather`; return the call as a `Request`."""
    source = view(x, writable=False)
    sizes = (source.count,) * nranks
    if rank == root and out is None:
        out = like(x, nranks)
    return _gather(Collective.GATHER, source, out, root, rank, consecutive(sizes))


def gatherv(
    x: Any, out: Any, root: int, counts: Any, displs: Any, rank: int, nranks: int
) -> Request:
    """Validate the arguments of `Communicator.gatherv`; return the call as a `Request`.

    Only the root uses `counts` and `displs`.
    """
    source = view(x, writable=False)
    places: tuple[Range, ...] = ((0, 0),) * nranks
    if rank == root:
        places = _places(layout_of(counts, displs, nranks))
        out = like_flat(x, _end(places)) if out is None else out
    return _gather(Collective.GATHERV, source, out, root, rank, places)


def scatter(x: Any, out: Any, root: int, rank: int, nranks: int) -> Request:
    """Validate the arguments of `Communicator.scatter`; return the call as a `Request`."""
    if rank != root:
        return _scatter(Collective.SCATTER, None, out, root, rank, ((0, 0),) * nranks)
    source = view(x, writable=False)
    count = part_of(source, rank, nranks).count
    result = like_part(x, nranks) if out is None else out
    places = consecutive((count,) * nranks)
    return _scatter(Collective.SCATTER, source, result, root, rank, places)


def scatterv(
    x: Any, out: Any, root: int, counts: Any, displs: Any, rank: int, nranks: int
) -> Request:
    """Validate the arguments of `Communicator.scatterv`; return the call as a `Request`.

    Only the root uses `counts` and `displs`.
    """
    if rank != root:
        return _scatter(Collective.SCATTERV, None, out, root, rank, ((0, 0),) * nranks)
    layout = layout_of(counts, displs, nranks)
    source = view(x, writable=False)
    places = _places(layout)
    _require_room("x", source, places, is_disjoint=False)
    result = like_flat(x, layout[0][rank]) if out is None else out
    return _scatter(Collective.SCATTERV, source, result, root, rank, places)


def alltoall(x: Any, out: Any, rank: int, nranks: int) -> Request:
    """Validate the arguments of `Communicator.alltoall`; return the call as a `Request`."""
    source = view(x, writable=False)
    count = part_of(source, rank, nranks).count
    result = like(x) if out is None else out
    output = _output(source, result)
    is_same = is_in_place(source, output)
    places = consecutive((count,) * nranks)
    call = CallSignature(Collective.ALLTOALL, source.dtype_code, ReduceOp.SUM, source.count)
    parts = _turned(places, places, rank)
    return Request(call, source, output, result, parts=parts, is_in_place=is_same, is_staged=True)


def alltoallv(
    x: Any,
    out: Any,
    sendcounts: Any,
    senddispls: Any,
    recvcounts: Any,
    recvdispls: Any,
    rank: int,
    nranks: int,
) -> Request:
    """Validate the arguments of `Communicator.alltoallv`; return the call as a `Request`."""
    sent_layout = layout_of(sendcounts, senddispls, nranks, "send")
    received_layout = layout_of(recvcounts, recvdispls, nranks, "recv")
    source = view(x, writable=False)
    sent, received = sent_layout[0], received_layout[0]
    if sent[rank] != received[rank]:
        raise InvalidArgument(
            f"sendcounts[{rank}]={sent[rank]} and recvcounts[{rank}]={received[rank]} are both the "
            "size of the part that this rank sends to itself: they must be equal"
        )
    sources, targets = _places(sent_layout), _places(received_layout)
    result = like_flat(x, _end(targets)) if out is None else out
    output = _output(source, result)
    _require_room("x", source, sources, is_disjoint=False)
    _require_room("out", output, targets, is_disjoint=True)
    given: Extent = source
    is_same = given.overlaps(output) and is_in_place(source, output)
    _require_dtype(source, output)
    call = CallSignature(Collective.ALLTOALLV, source.dtype_code, ReduceOp.SUM, 0)
    parts = _turned(sources, targets, rank)
    return Request(call, source, output, result, parts=parts, is_in_place=is_same, is_staged=True)


def scan(x: Any, out: Any, op: Operation, is_exclusive: bool) -> Request:
    """Validate the arguments of `Communicator.scan`; return the call as a `Request`.

    If `is_exclusive`, the call is `Communicator.exscan`.
    """
    collective = Collective.EXSCAN if is_exclusive else Collective.SCAN
    name = collective.name.lower()
    source, output = _both(x, out)
    if is_exclusive and isinstance(source, JaxBuffer) and out is None:
        assert isinstance(output, Buffer)
        output.array[:] = source.array  # the result on rank 0
    if op is ReduceOp.AVG or getattr(op, "op", None) is ReduceOp.AVG:
        divisor = "rank, but not on rank 0, which gets no result" if is_exclusive else "rank + 1"
        raise InvalidArgument(
            f"{name} does not support op=AVG, because the number of inputs differs between ranks: "
            f"pass op=SUM and divide by {divisor}"
        )
    number = op if type(op) is ReduceOp else ReduceOp.SUM
    call = CallSignature(collective, source.dtype_code, number, source.count)
    is_copied = is_exclusive and is_in_place(source, output)
    request = Request(
        call, source, output, output.owner, is_in_place=is_copied, is_staged=is_copied
    )
    return request if number is op else _with_operation(request, op)


def _gather(
    collective: Collective,
    source: Memory,
    out: Any,
    root: int,
    rank: int,
    places: tuple[Range, ...],
) -> Request:
    """Return the request of a gather; on the root, part i goes to ``places[i]`` of `out`."""
    nothing: list[Range] = [(0, 0)] * len(places)
    nothing[rank] = (0, source.count)
    output, targets = None, ((0, 0),) * len(places)
    if rank == root:
        output, targets = _output(source, out), places
        if collective == Collective.GATHER and output.count != _end(places):
            raise InvalidArgument(
                f"x has {source.count} elements, out has {output.count}: pass an out of "
                f"{_end(places)} elements"
            )
        _require_room("out", output, places, is_disjoint=True)
        is_in_place(source, _part(output, places[rank]), whole_output=output)
    else:
        _refuse_unused(out)
    count = source.count * len(places) if collective == Collective.GATHER else 0
    call = CallSignature(collective, source.dtype_code, ReduceOp.SUM, count, root)
    result = out if rank == root else None
    parts = Parts(tuple(nothing), targets)
    return Request(call, source, output, result, parts=parts, is_staged=True)


def _scatter(
    collective: Collective,
    source: Memory | None,
    out: Any,
    root: int,
    rank: int,
    places: tuple[Range, ...],
) -> Request:
    """Return the request of a scatter; on the root, part i is ``places[i]`` of `source`.

    On all other ranks, `source` is None.
    """
    name = collective.name.lower()
    if out is None:
        raise InvalidArgument(
            f"{name} on rank {rank} without out: only the root, rank {root}, may omit out; "
            "pass the array that receives this rank's part"
        )
    output = _output(source, out)
    if source is None:
        source = output.part(0, 0)
    else:
        is_in_place(_part(source, places[rank]), output, whole_source=source)
    targets: list[Range] = [(0, 0)] * len(places)
    targets[rank] = (0, output.count)
    count = output.count * len(places) if collective == Collective.SCATTER else 0
    call = CallSignature(collective, output.dtype_code, ReduceOp.SUM, count, root)
    parts = Parts(places, tuple(targets))
    return Request(call, source, output, out, parts=parts, is_staged=True)


def _places(given: Layout) -> tuple[Range, ...]:
    counts, firsts = given
    if firsts is None:
        return consecutive(counts)
    return tuple((at, at + count) for at, count in zip(firsts, counts, strict=True))


def _end(places: Sequence[Range]) -> int:
    return max(end for _, end in places)


def _part(whole: Memory, place: Range) -> Memory:
    return whole.part(place[0], place[1] - place[0])


def _require_room(name: str, buffer: Memory, places: Sequence[Range], *, is_disjoint: bool) -> None:
    """Check that `buffer` contains all `places` and, if `is_disjoint`, that none overlap.

    `name` is the name of the argument in the error, an `InvalidArgument`.
    """
    for rank, (lo, hi) in enumerate(places):
        if hi > buffer.count:
            raise InvalidArgument(
                f"the part of rank {rank} is {hi - lo} elements of {name} from element {lo} on, "
                f"but {name} has {buffer.count} elements: pass a larger array, or other counts or "
                "displacements"
            )
    used = sorted((place, rank) for rank, place in enumerate(places) if place[0] < place[1])
    for (before, one), (after, other) in pairwise(used) if is_disjoint else ():
        if after[0] < before[1]:
            raise InvalidArgument(
                f"the parts of ranks {one} and {other} overlap in {name} from element {after[0]} "
                "on: pass displacements at least as far apart as the counts"
            )


def _require_dtype(source: Memory, output: Memory) -> None:
    if source.dtype_code != output.dtype_code:
        raise InvalidArgument(
            f"the input has dtype {dtype_name(source.dtype_code)}, the output "
            f"{dtype_name(output.dtype_code)}: both must be equal"
        )


def _turned(sources: Sequence[Range], targets: Sequence[Range], rank: int) -> Parts:
    """Return the parts of an alltoall, numbered by the distance from `rank`.

    Input part i goes to rank ``rank + i``, and output part i comes from ``rank - i``, both modulo
    the number of ranks. `sources` and `targets` are indexed by rank.
    """
    n = len(sources)
    return Parts(
        tuple(sources[(rank + part) % n] for part in range(n)),
        tuple(targets[(rank - part) % n] for part in range(n)),
    )


def _with_counts(call: CallSignature, counts: tuple[int, ...]) -> CallSignature:
    """Return the signature with a digest of `counts`, unless all counts are equal."""
    return call if len(set(counts)) == 1 else _with_digest(call, counts)


def _with_digest(call: CallSignature, counts: tuple[int, ...]) -> CallSignature:
    return call.with_digest(zlib.crc32(repr(counts).encode()))


def view(x: Any, *, writable: bool) -> Memory:
    """Return a view of an array in host or device memory.

    The view of a JAX array in host memory is a `JaxBuffer`. The parameters are those of
    `as_buffer` and `as_device_buffer`.

    Raises
    ------
    InvalidArgument
        If `is_device_array`, `as_buffer` or `as_device_buffer` refuses the array.
    TransportError
        If `as_device_buffer` cannot query an array in device memory.
    """
    if type(x) is not np.ndarray:
        if is_device_array(x):
            return as_device_buffer(x, writable=writable)
        if is_jax(x):
            return JaxBuffer(*msgspec.structs.astuple(as_buffer(x, writable=writable)))
    return as_buffer(x, writable=writable)


def integer_of(value: Any) -> int | None:
    """Return `value` as an int if it is an integer, such as a NumPy integer; otherwise None."""
    try:
        return index(value)
    except TypeError:  # 1.5, or a string
        return None


def rank_of(value: SupportsIndex, nranks: int, name: str = "root", *, is_any: bool = False) -> int:
    """Return the rank `value` as an int; if `is_any`, `ANY` is allowed, too.

    `name` is the name of the argument in the error.

    Raises
    ------
    InvalidArgument
        If `value` is neither an integer from 0 to ``nranks - 1`` nor an allowed `ANY`.
    """
    if type(value) is int and 0 <= value < nranks:
        return value
    rank = integer_of(value)
    if rank is None or not (0 <= rank < nranks or (is_any and rank == ANY)):
        more = " or r2ccl.ANY_SOURCE" * is_any
        raise InvalidArgument(f"{name}={value!r}; allowed is 0 to {nranks - 1}{more}")
    return rank


def layout_of(counts: Any, displs: Any, nranks: int, prefix: str = "") -> Layout:
    """Return the arguments ``counts`` and ``displs`` as a `Layout`.

    `prefix` precedes the names of the arguments in errors, as in ``sendcounts``.

    Raises
    ------
    InvalidArgument
        If `counts` or `displs` is not `nranks` integers of 0 or more; `displs` may also be None.
    """
    sizes = _numbers(prefix + "counts", counts, nranks)
    return sizes, None if displs is None else _numbers(prefix + "displs", displs, nranks)


def _numbers(name: str, values: Any, nranks: int) -> tuple[int, ...]:
    try:
        found = tuple(map(index, values))
    except TypeError:
        found = ()
    if len(found) != nranks or min(found) < 0:
        raise InvalidArgument(
            f"{name}={values!r}; give {nranks} integers of 0 or more, one per rank, in elements"
        )
    return found


def form_of(shape: Any, dtype: Any, like: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype of an array for `Communicator.empty`.

    If `dtype` is None, the dtype is that of `like`, or float64 without `like`.

    Raises
    ------
    InvalidArgument
        If both or neither of `shape` and `like` are given, the shape or the dtype is invalid, or
        `host_array` refuses `like`.
    """
    if (shape is None) == (like is None):
        raise InvalidArgument("empty() needs either a shape or like=, and not both")
    if like is not None:
        array = host_array(like)
        shape, dtype = array.shape, array.dtype if dtype is None else dtype
    try:
        sizes = tuple(map(index, shape)) if np.iterable(shape) else (index(shape),)
        kind = np.dtype(np.float64 if dtype is None else dtype)
    except (TypeError, ValueError, SyntaxError) as exc:  # NumPy parses texts such as "(2,)f4"
        raise InvalidArgument(f"shape={shape!r}, dtype={dtype!r}: {exc}") from exc
    if min(sizes, default=0) < 0:
        raise InvalidArgument(f"shape={shape!r}; allowed are integers of 0 or more")
    if kind not in CODES:
        raise InvalidArgument(f"dtype={kind}; allowed are {names()}")
    require_possible(math.prod(sizes))
    return sizes, kind


def tag(value: Any, name: str = "tag", *, is_any: bool = False) -> int:
    """Return the message tag `value` as an int; if `is_any`, `ANY` is allowed, too.

    `name` is the name of the argument in the error.

    Raises
    ------
    InvalidArgument
        If `value` is neither an integer from 0 to 2^63 - 1 nor an allowed `ANY`.
    """
    number = integer_of(value)
    if number is None or not (0 <= number < 1 << 63 or (is_any and number == ANY)):
        more = " and r2ccl.ANY_TAG" * is_any
        raise InvalidArgument(f"{name}={value!r}; allowed are 0 to 2^63 - 1{more}")
    return number


def reason_of(why: Any) -> str:
    """Check that `why`, the reason why a communicator ends, is a string; return it.

    Raises
    ------
    InvalidArgument
        If `why` is not of type str.
    """
    if not isinstance(why, str):
        raise InvalidArgument(f"why={why!r}; allowed is a reason of type str")
    return why


def as_buffer(x: Any, *, writable: bool) -> Buffer:
    """View `x` as a `Buffer`, which shares the memory of `x` where possible.

    Parameters
    ----------
    x : array_like in host memory
        NumPy array of any shape (0 dimensions and 0 elements are allowed), object with the buffer
        protocol (``bytearray``, ``array.array``, ctypes arrays), or tensor with DLPack, such as a
        torch tensor. Borrowed for the lifetime of the returned buffer. If it is not C-contiguous,
        the buffer is a copy in C order instead; with `writable`, this is an error.
    writable : bool
        True if a result will be written to `x`.

    Raises
    ------
    InvalidArgument
        If `x` is not such an object, is a masked array, or does not export its memory. If its
        memory is on a device, byte-swapped, of an unsupported dtype, or not aligned (unless `x` is
        copied). With `writable`, also if its memory is read-only or not C-contiguous.

    Notes
    -----
    *Cost*: under 1 µs for a NumPy array that is not copied.
    """
    array = x if type(x) is np.ndarray else host_array(x)
    dtype = array.dtype
    code = CODES.get(dtype)
    flags = array.flags
    if not flags.c_contiguous and not writable and code is not None:
        array = np.ascontiguousarray(array)
        flags = array.flags
    if (
        code is None
        or not flags.c_contiguous
        or not flags.aligned
        or (writable and not flags.writeable)
    ):
        raise refusal(x, array)
    if array.ndim != 1:
        array = array.reshape(-1)
    if dtype.names is not None:
        array = array.view(raw_dtype(dtype))
    return Buffer(array, code, array.size, dtype.itemsize, array.nbytes, x)


def check_op(request: Request) -> None:
    """Check that the dtype of a request supports its op; planning would check it only later.

    Raises
    ------
    InvalidArgument
        If `r2ccl.kernels.check_op` refuses the op and dtype.
    """
    if request.signature.collective in REDUCTIONS and not request.signature.user:
        kernels.check_op(request.signature.dtype, request.signature.op)


def _with_operation(request: Request, op: Operation) -> Request:
    """Return `request` with the operation `op`, which is not a `ReduceOp`.

    Raise InvalidArgument if `op` is not an operation, or if the dtype or the memory of the request
    does not support `op`.
    """
    code = request.signature.dtype
    if isinstance(op, kernels.UserOp):
        op.reducer(code)
        call = msgspec.structs.replace(request.signature, op=op.number, user=op.digest)
        return msgspec.structs.replace(request, signature=call)
    if not isinstance(op, kernels.ConvertedOp):
        raise refused_op(op)
    op.check(code)
    if isinstance(request.source, DeviceBuffer):
        raise InvalidArgument(
            f"op={op} for an array on GPU {request.source.ordinal}: only inputs in host memory can "
            "be scaled or widened; scale or cast the array on the GPU, then pass a ReduceOp"
        )
    call = msgspec.structs.replace(request.signature, op=op.op)
    return msgspec.structs.replace(request, signature=call, conversion=op, is_staged=True)


def _both(x: Any, out: Any) -> tuple[Memory, Memory]:
    """Return views of an input and an output of equal size and dtype.

    If `out` is None, `x` is both input and output. A JAX array is immutable, so it is only the
    input; without `out`, a new output is allocated. Raise InvalidArgument if `view` or `_output`
    refuses an array, or if the arrays differ in size or dtype or overlap in part.
    """
    is_same = out is None or out is x
    if type(x) is np.ndarray:  # as `view`, inlined: most arrays are NumPy arrays
        source: Memory = as_buffer(x, writable=is_same)
    elif out is None and is_jax(x):
        source, is_same, out = view(x, writable=False), False, like(x)
    else:
        source = view(x, writable=is_same)
    if is_same:
        return source, source
    output = _output(source, out)
    is_in_place(source, output)
    return source, output


def _output(source: Memory | None, out: Any) -> Memory:
    """Return a view of `out`.

    Raise InvalidArgument if `view` refuses `out`. If `source` is not None, also raise it unless
    both arrays are in host memory or on the same GPU. An empty device array counts as being on any
    GPU.
    """
    try:
        output = view(out, writable=True)
    except InvalidArgument as exc:
        raise refused_output(out, exc) from exc.__cause__
    if source is None:
        return output
    places = [getattr(each, "ordinal", None) for each in (source, output)]
    is_any = ANY_GPU in places and None not in places
    if places[0] != places[1] and not is_any:
        names = {None: "in host memory", ANY_GPU: "on a GPU"}
        where = [names.get(at, f"on GPU {at}") for at in places]
        raise InvalidArgument(
            f"the input is {where[0]}, the output {where[1]}: both must be in host memory, or both "
            "on the same GPU"
        )
    return output


def _refuse_unused(out: Any) -> None:
    """Raise InvalidArgument if `out`, which this rank does not use, is a root or an operation.

    A program that passes a root or an operation as `out` does so on all ranks. If only the root
    refused the call, the other ranks would wait for the root.
    """
    error = misplaced(out)
    if error is not None:
        raise error


_NO_DATA = view(np.empty(0, np.uint8), writable=False)
_BARRIER = CallSignature(Collective.BARRIER, _NO_DATA.dtype_code, ReduceOp.SUM, 0)

#: Functions that take counts per rank, and perhaps displacements.
WITH_COUNTS = frozenset((allgatherv, reduce_scatterv, gatherv, scatterv, alltoallv))

__all__ = [
    "WITH_COUNTS",
    "Layout",
    "Memory",
    "Operation",
    "Request",
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "as_buffer",
    "barrier",
    "broadcast",
    "check_op",
    "form_of",
    "gather",
    "gatherv",
    "integer_of",
    "layout_of",
    "rank_of",
    "reason_of",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "run_schedule",
    "scan",
    "scatter",
    "scatterv",
    "tag",
    "view",
]
