"""A rank that runs every public collective of torch.distributed, on gloo and on r2ccl.

Each case is a function of the backend's group that returns tensors or values; `main` writes the
outcomes of both backends as JSON on rank 0.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import r2ccl.torch  # noqa: F401  # registers the backend

warnings.simplefilter("ignore")
CASES: dict[str, Callable[[], Any]] = {}
#: dtypes that gloo reduces.
REDUCED = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool")
#: dtypes that gloo moves.
MOVED = (*REDUCED, "complex64", "complex128")
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def cases(**variants: Any) -> Any:
    (values,) = variants.values()

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for value in values:
            CASES[f"{function.__name__}[{value}]"] = lambda value=value: function(value)
        return function

    return add


def data(*shape: int, dtype: str = "float32", rank: int | None = None) -> torch.Tensor:
    """Values that differ between ranks and elements."""
    rank = dist.get_rank() if rank is None else rank
    count = torch.Size(shape).numel()
    x = torch.arange(count).mul(7).add(3 * rank).remainder(5).reshape(shape)
    if dtype == "bool":
        return x > 2
    kind = getattr(torch, dtype)
    return x.to(kind) * (1 + 2j) if kind.is_complex else x.to(kind)


def like(count: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(x) for _ in range(count)]


# -- reductions


@cases(dtype=REDUCED)
def all_reduce_dtype(dtype: str) -> Any:
    x = data(3, 5, dtype=dtype)
    dist.all_reduce(x)
    return x


@cases(op=OPS)
def all_reduce_op(op: str) -> Any:
    x = data(11, dtype="int32" if op.startswith("B") else "float64")
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    return x


@cases(op=("SUM", "PRODUCT", "MIN", "MAX"))
def all_reduce_bool(op: str) -> Any:
    x = data(11, dtype="bool")
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    return x


@case
def all_reduce_complex() -> Any:
    x = data(4, 3, dtype="complex64")
    dist.all_reduce(x)
    return x


@case
def all_reduce_large() -> Any:
    x = data(300_000)
    dist.all_reduce(x)
    return x.sum(), x[:10]


@case
def all_reduce_scalar_and_empty() -> Any:
    x, nothing = data(), data(0)
    dist.all_reduce(x)
    dist.all_reduce(nothing)
    return x, nothing


@case
def all_reduce_transposed() -> Any:
    x = data(4, 3).t()
    dist.all_reduce(x)
    return x


@case
def all_reduce_that_requires_grad() -> Any:
    x = data(4).requires_grad_()
    dist.all_reduce(x)
    return x.detach(), x.requires_grad


@case
def all_reduce_async() -> Any:
    tensors = [data(100 + i) for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    waited = [work.wait() for work in works]
    return tensors, waited, [work.is_completed() for work in works]


@case
def all_reduce_future() -> Any:
    x = data(6)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    return x, doubled, future.done()


@case
def all_reduce_coalesced() -> Any:
    tensors = [data(3), data(2, 2), data(1)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@case
def all_reduce_sparse() -> Any:
    rank = dist.get_rank()
    indices = torch.tensor([[rank, 2, 2], [0, 1, 1]])
    x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0 + rank]), (4, 2))
    dist.all_reduce(x)
    return x.to_dense()


@cases(op=("SUM", "PRODUCT", "MIN", "MAX"))
def reduce(op: str) -> Any:
    x = data(9)
    dist.reduce(x, dst=1, op=getattr(dist.ReduceOp, op))
    return x if dist.get_rank() == 1 else None


@case
def reduce_async() -> Any:
    x = data(9)
    dist.reduce(x, dst=0, async_op=True).wait()
    return x if dist.get_rank() == 0 else None


@case
def reduce_scatter() -> Any:
    x, out = [data(4, rank=i) for i in range(dist.get_world_size())], torch.zeros(4)
    dist.reduce_scatter(out, x)
    return out, x


@case
def reduce_scatter_tensor() -> Any:
    n = dist.get_world_size()
    out = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, data(2 * n, 3))
    return out


@case
def reduce_scatter_tensor_coalesced() -> Any:
    n = dist.get_world_size()
    outs = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, data(n * out.numel()))
    return outs


@case
def all_reduce_in_a_coalescing_manager() -> Any:
    tensors = [data(3), data(5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x)
    manager.wait()
    return tensors


# -- data that is moved


@cases(dtype=MOVED)
def broadcast(dtype: str) -> Any:
    x = data(3, 5, dtype=dtype)
    dist.broadcast(x, src=1)
    return x


@case
def broadcast_transposed() -> Any:
    x = data(4, 3).t()
    dist.broadcast(x, src=0)
    return x


@cases(dtype=MOVED)
def all_gather(dtype: str) -> Any:
    x = data(2, 2, dtype=dtype)
    parts = like(dist.get_world_size(), x)
    dist.all_gather(parts, x)
    return parts


@case
def all_gather_views() -> Any:
    out = torch.zeros(dist.get_world_size(), 3)
    dist.all_gather(list(out.unbind()), data(3))
    return out


@case
def all_gather_transposed() -> Any:
    parts = [torch.zeros(3, 2).t() for _ in range(dist.get_world_size())]
    dist.all_gather(parts, data(3, 2).t().contiguous())
    return parts


@case
def all_gather_into_tensor() -> Any:
    n = dist.get_world_size()
    flat, again = torch.zeros(n * 2, 3), torch.zeros(n * 2, 3)
    dist.all_gather_into_tensor(flat, data(2, 3))
    dist.all_gather_into_tensor(again, data(2, 3), async_op=True).wait()
    return flat, again


@case
def all_gather_into_tensor_coalesced() -> Any:
    n = dist.get_world_size()
    outs = [torch.zeros(n * 2), torch.zeros(n * 3)]
    with dist._coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, data(out.numel() // n))
    return outs


@case
def all_gather_coalesced() -> Any:
    outs = [[torch.zeros(2), torch.zeros(3)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outs, [data(2), data(3)])
    return outs


@cases(dtype=REDUCED)
def gather(dtype: str) -> Any:
    x = data(2, 2, dtype=dtype)
    parts = like(dist.get_world_size(), x) if dist.get_rank() == 1 else None
    dist.gather(x, parts, dst=1)
    return parts


@cases(dtype=MOVED)
def scatter(dtype: str) -> Any:
    x = data(2, 2, dtype=dtype)
    parts = [data(2, 2, dtype=dtype, rank=i) for i in range(dist.get_world_size())]
    dist.scatter(x, parts if dist.get_rank() == 2 else None, src=2)
    return x


@case
def all_to_all_single() -> Any:
    n = dist.get_world_size()
    out = torch.zeros(2 * n, 3)
    dist.all_to_all_single(out, data(2 * n, 3))
    return out


@case
def all_to_all_single_with_splits() -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    sends = [i + 1 for i in range(n)]
    out = torch.zeros((rank + 1) * n, 2)
    dist.all_to_all_single(out, data(sum(sends), 2), [rank + 1] * n, sends)
    return out


@case
def all_to_all() -> Any:
    n = dist.get_world_size()
    out = like(n, data(2, 2))
    dist.all_to_all(out, [data(2, 2) + i for i in range(n)])
    return out


# -- messages


@cases(dtype=MOVED)
def send_and_recv(dtype: str) -> Any:
    rank, x = dist.get_rank(), data(5, dtype=dtype)
    if rank == 0:
        dist.send(x, 1)
    if rank == 1:
        return dist.recv(x, 0), x
    return None


@case
def recv_of_any_rank() -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(data(3), 0)
        return None
    found = []
    for _ in range(n - 1):
        x = torch.zeros(3)
        found.append((dist.recv(x), x))
    return sorted((source, x.tolist()) for source, x in found)


@case
def isend_and_irecv_with_tags() -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    a, b = torch.zeros(4), torch.zeros(50_000)
    works = [
        dist.irecv(b, left, tag=2),
        dist.irecv(a, left, tag=1),
        dist.isend(data(4), right, tag=1),
        dist.isend(data(50_000), right, tag=2),
    ]
    done = [work.wait() for work in works]
    return a, b.sum(), done, works[1].is_completed()


@case
def recv_into_a_column() -> Any:
    rank, x = dist.get_rank(), torch.zeros(4, 2)
    if rank == 0:
        dist.send(data(4), 1)
    if rank == 1:
        dist.recv(column := torch.zeros(4), 0)
        x[:, 1] = column
    return x


@case
def batch_isend_irecv() -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(3)
    ops = [
        dist.P2POp(dist.isend, data(3), (rank + 1) % n),
        dist.P2POp(dist.irecv, got, (rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


# -- objects, groups, barriers


@case
def objects() -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * rank}
    everyone = [None] * n
    dist.all_gather_object(everyone, mine)
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(mine, gathered)
    shared = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    part = [None]
    dist.scatter_object_list(part, [[i, "y"] for i in range(n)] if rank == 0 else None)
    return everyone, gathered, shared, part


@case
def object_messages() -> Any:
    rank, found = dist.get_rank(), [None]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    if rank == 1:
        dist.recv_object_list(found, 0)
    return found


@case
def new_groups() -> Any:
    rank = dist.get_rank()
    found = []
    for ranks in ([0, 1], [1, 2], [2]):
        group = dist.new_group(ranks)
        x = data(4)
        dist.all_reduce(x, group=group)
        if rank in ranks:
            dist.broadcast(x, src=ranks[-1], group=group)
            found.append((dist.get_rank(group), dist.get_world_size(group), x))
            dist.destroy_process_group(group)
    return found


@case
def new_group_of_its_members_alone() -> Any:
    x = data(2)
    if dist.get_rank() != 1:
        group = dist.new_group([0, 2], use_local_synchronization=True)
        dist.all_reduce(x, group=group)
    return x


@case
def barriers() -> Any:
    dist.barrier()
    return dist.barrier(async_op=True).wait(), dist.is_initialized()


@case
def functional_collectives() -> Any:
    from torch.distributed import _functional_collectives as functional

    n, world = dist.get_world_size(), dist.group.WORLD
    x = data(n * 2, 2)
    return (
        functional.all_reduce(x, "sum", world) + 0,
        functional.all_gather_tensor(x, 0, world) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, world) + 0,
        functional.all_to_all_single(x, None, None, world) + 0,
        functional.broadcast(x, 1, world) + 0,
        [each + 0 for each in functional.all_reduce_coalesced([x, x[0]], "sum", world)],
    )


@case
def all_gather_of_a_part_of_the_output() -> Any:
    out = torch.zeros(dist.get_world_size(), 3)
    out[0] = dist.get_rank() + 1
    dist.all_gather(list(out.unbind()), out[0])
    return out


# -- what gloo refuses; each returns whether the result is right


def beyond_stacked_all_gather_into_tensor() -> bool:
    n = dist.get_world_size()
    out = torch.zeros(n, 2, 3)
    dist.all_gather_into_tensor(out, data(2, 3))
    return torch.equal(out, torch.stack([data(2, 3, rank=i) for i in range(n)]))


def beyond_results_in_the_memory_of_inputs() -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = torch.full((n, 2), float(rank))
    dist.all_gather_into_tensor(whole, whole[rank])
    summed = torch.arange(2.0 * n).view(n, 2)
    dist.reduce_scatter_tensor(summed[rank], summed)
    turned = torch.arange(2.0 * n).view(n, 2)
    dist.all_to_all_single(turned, turned)
    at = torch.arange(2.0) + 2 * rank
    return (
        torch.equal(whole, torch.arange(float(n)).repeat_interleave(2).view(n, 2))
        and torch.equal(summed[rank], n * at)
        and torch.equal(turned, at.expand(n, 2))
    )


def beyond_all_to_all_from_one_address_to_the_same() -> bool:
    """The parts, and on some ranks the totals, that are sent and received have other sizes."""
    rank, n, right = dist.get_rank(), dist.get_world_size(), True
    for sizes in (
        [[i + 1 for i in range(n)] for _ in range(n)],
        [[(i + j) % n + 1 for i in range(n)] for j in range(n)],
    ):
        sends, receives = sizes[rank], [each[rank] for each in sizes]
        rows = [data(sum(each), rank=i).split(each) for i, each in enumerate(sizes)]
        wanted = torch.cat([each[rank] for each in rows])
        one, several = torch.zeros(n * n), torch.zeros(n * n)
        one[: sum(sends)] = several[: sum(sends)] = torch.cat(rows[rank])
        source, target = one[: sum(sends)], one[: sum(receives)]
        dist.all_to_all_single(target, source, receives, sends)
        traded = list(several[: sum(receives)].split(receives))
        dist.all_to_all(traded, list(several[: sum(sends)].split(sends)))
        right &= torch.equal(target, wanted) and torch.equal(torch.cat(traded), wanted)
    return right


def beyond_tensors_without_elements() -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    for kind in (torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.float8_e5m2):
        x, rows = torch.zeros(0).to(kind), torch.zeros(0, 4).to(kind)
        parts = [x] * n if rank == 0 else None
        dist.all_reduce(rows)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([x] * n, x)
        dist.all_gather_into_tensor(x, x)
        dist.reduce_scatter(x, [x] * n)
        dist.reduce_scatter_tensor(rows, rows)
        dist.all_to_all([x] * n, [x] * n)
        dist.all_to_all_single(rows, rows)
        dist.gather(x, parts)
        dist.scatter(x, parts)
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
    return True


def beyond_transposed_tensors() -> bool:
    """Everything takes tensors that are not contiguous, and fills them."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def empty(rows: int) -> torch.Tensor:
        return torch.zeros(3, rows).t()

    def full(value: float, rows: int = 2) -> torch.Tensor:
        return torch.full((3, rows), float(value)).t()

    gathered, scattered, turned, part = empty(2 * n), empty(2), empty(n), empty(2)
    dist.all_gather_into_tensor(gathered, full(rank))
    dist.reduce_scatter_tensor(scattered, full(rank, 2 * n))
    rows = torch.arange(3.0 * n).view(3, n).t()
    dist.all_to_all_single(turned, rows)
    dist.scatter(part, [full(i) for i in range(n)] if rank == 0 else None)
    parts, traded, total = [empty(2) for _ in range(n)], [empty(2) for _ in range(n)], full(rank)
    dist.gather(full(rank), parts if rank == 0 else None)
    dist.all_to_all(traded, [full(rank) for _ in range(n)])
    dist.reduce(total, 0)
    pieces = [full(i) for i in range(n)]
    return (
        torch.equal(gathered, torch.cat(pieces))
        and torch.equal(scattered, full(sum(range(n))))
        and torch.equal(turned, rows[rank].expand(n, 3))
        and torch.equal(part, pieces[rank])
        and (rank > 0 or all(map(torch.equal, parts, pieces)))
        and all(map(torch.equal, traded, pieces))
        and torch.equal(total, full(rank if rank else sum(range(n))))
    )


def beyond_outputs_with_a_lazy_negation() -> bool:
    """Their memory has the negative of their elements."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def lazy(count: int) -> torch.Tensor:
        return torch._neg_view(torch.zeros(count))

    def full(value: float) -> torch.Tensor:
        return torch.full((2,), float(value))

    gathered, part, traded = lazy(2 * n), lazy(2), list(lazy(2 * n).chunk(n))
    dist.all_gather_into_tensor(gathered, full(rank))
    dist.scatter(part, [full(i) for i in range(n)] if rank == 0 else None)
    dist.all_to_all(traded, [full(rank) for _ in range(n)])
    pieces = [full(i) for i in range(n)]
    return (
        torch.equal(gathered.resolve_neg(), torch.cat(pieces))
        and torch.equal(part.resolve_neg(), pieces[rank])
        and all(torch.equal(a.resolve_neg(), b) for a, b in zip(traded, pieces, strict=True))
    )


def beyond_all_gather_of_parts_of_any_size() -> bool:
    n = dist.get_world_size()
    out = [torch.zeros(i + 1) for i in range(n)]
    dist.all_gather(out, data(dist.get_rank() + 1))
    return all(torch.equal(part, data(i + 1, rank=i)) for i, part in enumerate(out))


def beyond_all_to_all_of_parts_of_any_size() -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    out = [torch.zeros(rank + 1) for _ in range(n)]
    dist.all_to_all(out, [data(i + 1) for i in range(n)])
    return all(torch.equal(part, data(rank + 1, rank=i)) for i, part in enumerate(out))


def beyond_reduce_scatter_of_parts_of_any_size() -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, [torch.ones(i + 1) * rank for i in range(n)])
    return torch.equal(out, torch.full((rank + 1,), float(sum(range(n)))))


def beyond_gather_of_complex_numbers() -> bool:
    n, x = dist.get_world_size(), data(2, 2, dtype="complex64")
    parts = like(n, x) if dist.get_rank() == 1 else []
    dist.gather(x, parts or None, dst=1)
    wanted = [data(2, 2, dtype="complex64", rank=i) for i in range(n)]
    return all(torch.equal(a, b) for a, b in zip(parts, wanted, strict=False))


def beyond_eight_bit_floats() -> bool:
    n, right = dist.get_world_size(), True
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.full((5,), 2.0).to(kind)
        dist.all_reduce(x)
        moved = torch.full((5,), float(dist.get_rank() + 1)).to(kind)
        dist.broadcast(moved, src=1)
        right &= torch.equal(x.float(), torch.full((5,), 2.0 * n))
        right &= torch.equal(moved.float(), torch.full((5,), 2.0))
    return right


def beyond_unsigned_integers() -> bool:
    n = dist.get_world_size()
    x = torch.full((5,), 3, dtype=torch.uint16)
    dist.all_reduce(x)
    return x.tolist() == [3 * n] * 5


def beyond_pre_multiplied_sum() -> bool:
    x = torch.ones(4, dtype=torch.float64)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    return x.tolist() == [0.5 * dist.get_world_size()] * 4


def beyond_overlapping_async_calls_keep_their_order() -> bool:
    x, n = torch.ones(3), dist.get_world_size()
    works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
    dist.all_reduce(x)
    return all(work.is_success() for work in works) and x.tolist() == [float(n**6)] * 3


# -- errors before any data moves; their kinds must be the same


def error_lists_too_short() -> Any:
    dist.all_gather([torch.zeros(2)], torch.zeros(2))


def error_part_of_another_shape() -> Any:
    dist.all_gather([torch.zeros(3)] * dist.get_world_size(), torch.zeros(2))


def error_part_of_another_dtype() -> Any:
    parts = [torch.zeros(2, dtype=torch.int32)] * dist.get_world_size()
    dist.all_gather(parts, torch.zeros(2))


def error_output_of_another_size() -> Any:
    dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(2))


def error_unknown_root() -> Any:
    dist.broadcast(torch.zeros(2), src=17)


def error_splits_that_do_not_add_up() -> Any:
    n = dist.get_world_size()
    dist.all_to_all_single(torch.zeros(n), torch.zeros(n), [2] * n, [2] * n)


def error_rows_that_do_not_divide() -> Any:
    dist.all_to_all_single(torch.zeros(4), torch.zeros(4))


def error_scalars_have_no_rows() -> Any:
    dist.all_to_all_single(torch.zeros(()), torch.zeros(()))


def error_no_tensor() -> Any:
    dist.all_reduce("tensor")


def error_send_to_oneself() -> Any:
    dist.send(torch.zeros(1), dist.get_rank())


def error_negative_tag() -> Any:
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=-1)


def error_sparse_broadcast() -> Any:
    dist.broadcast(torch.zeros(3).to_sparse(), 0)


def error_complex_maximum() -> Any:
    dist.all_reduce(data(2, dtype="complex64"), op=dist.ReduceOp.MAX)


for _name, _function in [*globals().items()]:
    if _name.startswith(("error_", "beyond_")):
        CASES[_name] = _function


def plain(value: Any) -> Any:
    """Return the value as JSON can express it, with dtypes and shapes of tensors."""
    if isinstance(value, torch.Tensor):
        flat = torch.view_as_real(value) if value.is_complex() else value
        return [str(value.dtype), list(value.shape), flat.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return {"value": plain(function())}
    except Exception as exc:
        kinds = [kind.__name__ for kind in type(exc).__mro__]
        found = next(kind for kind in ("ValueError", "TypeError", "RuntimeError", "Exception")
                     if kind in kinds)  # fmt: skip
        return {"error": found, "text": f"{type(exc).__name__}: {exc}"}


def main() -> None:
    outcomes: dict[str, dict[str, Any]] = {name: {} for name in CASES}
    for backend in ("gloo", "r2ccl"):
        dist.init_process_group(backend)
        for name, function in CASES.items():
            outcomes[name][backend] = outcome(function)
        if backend == "r2ccl":
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, outcomes)
            if dist.get_rank() == 0:
                print(json.dumps(gathered))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
