"""Programs that reduce with operations of the user, and with converted inputs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os

import numpy as np
from support.values import data_of, dtype_of, same

import r2ccl
from r2ccl.testing import fail_at


def converted(comm: r2ccl.Communicator, counts: tuple[int, ...]) -> list[str]:
    """Scale and widen inputs in every reduction; return the wrong cases."""
    wrong = []
    n, rank = comm.nranks, comm.rank
    for count, name in itertools.product(counts, ("int32", "float64", "bfloat16", "float16")):
        dtype, size = dtype_of(name), count * n
        scaled = [data_of(each, size, name) * (each - 1) for each in range(n)]
        want, mine = sum(scaled).astype(dtype), data_of(rank, size, name)
        ops = [r2ccl.premul_sum(rank - 1)]
        if dtype.itemsize == 2:
            ops.append(r2ccl.accumulate_float32(ops[0]))
        for op in ops:
            x, out = mine.copy(), np.empty_like(mine)
            comm.allreduce(x, out, op)
            part = comm.reduce_scatter(x, op=op)
            at_root = comm.reduce(x, out.copy(), op, n - 1)
            is_right = same(x, mine) and same(out, want)
            is_right &= same(part, want[rank * count : (rank + 1) * count])
            is_right &= at_root is None if rank < n - 1 else same(at_root, want)
            comm.allreduce(x, op=op, async_op=True).wait(30)
            if not (is_right and same(x, want)):
                wrong.append(f"{name} {count} {op}")
    return wrong


def rounded_once(count: int) -> bool:
    """Return whether a mean in float32 is better than one in bfloat16: it is rounded once."""
    with r2ccl.init() as comm:
        xs = [np.random.default_rng(each).standard_normal(count) for each in range(comm.nranks)]
        xs = [x.astype(dtype_of("bfloat16")) for x in xs]
        mine = xs[comm.rank]
        out = comm.allreduce(mine, np.empty_like(mine), r2ccl.accumulate_float32(r2ccl.AVG))
        stepwise = comm.allreduce(mine, np.empty_like(mine), r2ccl.AVG)
        exact = np.mean([x.astype(np.float64) for x in xs], axis=0).astype(mine.dtype)
        return same(out, exact) and not same(stepwise, exact)


def special_bits(count: int, *, is_user_op: bool, is_lossy: bool) -> tuple[bytes, int]:
    """Return a sum of scaled inputs or of an operation of the user, and the number of repairs.

    Rank 1 may lose a rail in the call.
    """
    op = r2ccl.user_op(lambda a, b: a * np.float32(0.5) + b, name="decay", is_commutative=False)
    fault = fail_at(rank=1, rail=0, op=0, step=2) if is_lossy else contextlib.nullcontext()
    with (
        fault as plan,
        r2ccl.init(faults=plan, slice_nbytes=1 << 14) as comm,
    ):
        x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
        comm.allreduce(x, op=op if is_user_op else r2ccl.premul_sum(1 / (3 + comm.rank)))
        return x.tobytes(), len(comm.repairs())


def operations_of_prefixes(comm: r2ccl.Communicator, count: int) -> list[str]:
    """Run scans and parts of unequal size with the user's and converted operations."""
    wrong = []
    n, rank = comm.nranks, comm.rank
    last = r2ccl.user_op(lambda a, b: b + 0 * a, name="last", is_commutative=False)
    x, out = np.full(count, float(rank)), np.full(count, -1.0)
    if not (comm.scan(x, out, last) == rank).all():
        wrong.append("scan")
    out[:] = -1
    if not (comm.exscan(x, out, last) == rank - 1).all():
        wrong.append("exscan")
    sizes = [count + 3 * each for each in range(n)]
    y = np.full(sum(sizes), float(rank))
    for op, whole in ((last, n - 1), (r2ccl.premul_sum(2.0), 2 * sum(range(n)))):
        part = comm.reduce_scatterv(y, counts=sizes, op=op)
        if part.size != sizes[rank] or not (part == whole).all():
            wrong.append(f"reduce_scatterv {op}")
    small = np.full(count, rank, np.float16)
    wide = r2ccl.accumulate_float32(r2ccl.SUM)
    for scan, nranks in ((comm.scan, rank + 1), (comm.exscan, rank)):
        found = scan(small, np.full_like(small, 9), wide)
        # The exscan of rank 0 leaves its output as it is.
        if not (found == (sum(range(nranks)) if nranks else 9)).all():
            wrong.append(f"{scan.__name__} in float32")
    return wrong


def user_operations(comm: r2ccl.Communicator, count: int) -> list[str]:
    """Run operations of the user in every reduction; return the wrong cases."""
    wrong = []
    # An affine map is a pair of numbers; maps are composed in rank order.
    compose = r2ccl.user_op(_compose, is_commutative=False)
    n, rank = comm.nranks, comm.rank
    maps = [_maps_of(each, count * n) for each in range(n)]
    for op, function in (
        (compose, _compose),
        (r2ccl.user_op(_largest), np.fmax),
        (r2ccl.user_op(np.fmax), np.fmax),
    ):
        want = functools.reduce(function, maps)
        x, out = maps[rank].copy(), np.empty_like(want)
        comm.allreduce(x, out, op)
        part = comm.reduce_scatter(x, op=op)
        results = [comm.reduce(x, out.copy(), op, root) for root in range(n)]
        is_right = same(x, maps[rank]) and same(out, want) and same(results[rank], want)
        is_right &= same(part, want[rank * count : (rank + 1) * count])
        comm.allreduce(x, op=op, async_op=True).wait(30)
        if not (is_right and same(x, want)):
            wrong.append(f"{op} {count}")
    return wrong


def _maps_of(rank: int, count: int) -> np.ndarray:
    rng = np.random.default_rng((rank, count))
    return rng.integers(1, 4, count) + 1j * rng.integers(0, 9, count)


def _compose(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Apply ``x -> a x + b`` of `left` after that of `right`; exact in small integers."""
    return left.real * right.real + 1j * (left.real * right.imag + left.imag)


def _largest(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    out[:] = np.where(left.real >= right.real, left, right)
    np.copyto(out, right, where=(left.real == right.real) & (right.imag > left.imag))


def other_operation() -> str:
    """Return the error of ranks that pass different operations of the user."""
    with r2ccl.init() as comm:
        op = r2ccl.user_op(_compose if comm.rank else np.add, name="mine")
        try:
            comm.allreduce(np.ones(9, np.complex128), op=op)
            comm.barrier()
        except r2ccl.R2cclError as exc:
            return f"{type(exc).__name__}: {exc}"
        return "no error"


def failing_operation() -> str:
    """Return the error of ranks whose operation fails on rank 1 in mid-call."""

    def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if left.size and os.environ["RANK"] == "1":
            raise ZeroDivisionError("on purpose")
        return left + right

    with r2ccl.init() as comm:
        try:
            comm.allreduce(np.ones(100_000), op=r2ccl.user_op(add))
            comm.barrier()
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return "no error"
