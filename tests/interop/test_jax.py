"""Arrays of JAX are inputs of collectives; without `out`, the results are arrays of JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

from support.jobs import launch
from support.raising import raises

import r2ccl

#: Each collective with default output, of `n` ranks and an input of 2n elements.
CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": lambda c, x, n, **kw: c.allreduce(x, op=r2ccl.MAX, **kw),
    "broadcast": lambda c, x, n, **kw: c.broadcast(x, root=1, **kw),
    "reduce": lambda c, x, n, **kw: c.reduce(x, op=r2ccl.MAX, root=1, **kw),
    "scan": lambda c, x, n, **kw: c.scan(x, op=r2ccl.MAX, **kw),
    "exscan": lambda c, x, n, **kw: c.exscan(x, op=r2ccl.MAX, **kw),
    "allgather": lambda c, x, n, **kw: c.allgather(x, **kw),
    "allgatherv": lambda c, x, n, **kw: c.allgatherv(x[: c.rank + 1], counts=range(1, n + 1), **kw),
    "gather": lambda c, x, n, **kw: c.gather(x, root=1, **kw),
    "gatherv": lambda c, x, n, **kw: c.gatherv(
        x[: c.rank + 1], root=1, counts=range(1, n + 1), **kw
    ),
    "reduce_scatter": lambda c, x, n, **kw: c.reduce_scatter(x, op=r2ccl.MAX, **kw),
    "reduce_scatterv": lambda c, x, n, **kw: c.reduce_scatterv(
        x, op=r2ccl.MAX, counts=[2 * n, *[0] * (n - 1)], **kw
    ),
    "alltoall": lambda c, x, n, **kw: c.alltoall(x, **kw),
    "alltoallv": lambda c, x, n, **kw: c.alltoallv(x, sendcounts=[2] * n, recvcounts=[2] * n, **kw),
}
#: Collectives whose operation complex numbers lack.
REDUCTIONS = ("allreduce", "reduce", "scan", "exscan", "reduce_scatter", "reduce_scatterv")


def form(array: Any) -> Any:
    """Return what must be equal to compare two results."""
    if array is None:
        return None
    host = np.asarray(array)
    return str(host.dtype), host.shape, host.tobytes()


def all_calls(dtype: str) -> None:
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True), r2ccl.init() as comm:
        n = comm.nranks
        values = (np.arange(2 * n) + comm.rank) % 3
        for name, call in CALLS.items():
            if dtype.startswith("complex") and name in REDUCTIONS:
                continue
            host = values.astype(jnp.dtype(dtype))
            x = jnp.asarray(host)
            wanted = form(call(comm, host.copy(), n))
            blocking = call(comm, x, n)
            again = [call(comm, x, n) for _ in range(3)]
            work = call(comm, x, n, async_op=True)
            waited = work.wait()
            assert work.wait() is waited
            with comm.group():
                grouped = call(comm, x, n)
                second = call(comm, x + x, n)
            for found in (blocking, *again, waited, grouped):
                assert form(found) == wanted, name
                assert found is None or isinstance(found, jax.Array), name
                assert found is None or found.devices() == x.devices(), name
            if second is not None and dtype != "bool":
                with np.errstate(over="ignore"):
                    assert form(second) == form(np.asarray(grouped + grouped)), name
            assert form(x) == form(host), name


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shm", ["1", "0"])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int8"]
)
def test_results_are_arrays_of_jax(dtype: str, shm: str) -> None:
    launch(partial(all_calls, dtype), 2, timeout_s=200, env={"R2CC_SHM": shm})


def odd_shapes() -> None:
    import jax
    import jax.numpy as jnp

    with r2ccl.init() as comm:
        n = comm.nranks
        for shape in ((), (0,), (3, 0, 2), (4, 2)):
            x = jnp.full(shape, comm.rank + 1.0)
            for result, value, wanted in (
                (comm.allreduce(x), 3.0, shape),
                (comm.allgather(x), None, (n, *shape)),
                (comm.broadcast(x), 1.0, shape),
                (comm.scan(x, async_op=True).wait(), [1.0, 3.0][comm.rank], shape),
            ):
                assert isinstance(result, jax.Array)
                assert result.shape == wanted
                assert value is None or bool((result == value).all())
        assert comm.reduce_scatter(jnp.ones((4, 2))).shape == (2, 2)
        assert comm.reduce_scatter(jnp.ones((1, 6))).shape == (3,)


@pytest.mark.timeout(300)
def test_results_have_the_shapes_of_numpy() -> None:
    launch(odd_shapes, 2, timeout_s=200)


def many_in_a_group() -> list[float]:
    import jax
    import jax.numpy as jnp

    with r2ccl.init() as comm:
        leaves = [jnp.full(size, comm.rank + size, "float32") for size in (1, 7, 100_000, 3)]
        with comm.group():
            sums = [comm.allreduce(leaf) for leaf in leaves]
            mean = comm.allreduce(leaves[0], op=r2ccl.premul_sum(0.5))
        assert all(isinstance(each, jax.Array) for each in sums)
        assert [float(each[-1]) for each in sums] == [3.0, 15.0, 200_001.0, 7.0]
        # Arrays of JAX that share the memory of the results are usable as any other.
        doubled = jax.jit(lambda a: 2 * a, donate_argnums=0)(sums[1])
        return [float(doubled[0]), float(mean[0])]


@pytest.mark.timeout(300)
def test_a_group_returns_arrays_of_jax() -> None:
    assert launch(many_in_a_group, 2, timeout_s=200) == [[30.0, 1.5]] * 2


def roots_and_outputs() -> None:
    import jax
    import jax.numpy as jnp

    with r2ccl.init() as comm:
        x, out = jnp.arange(4.0), np.empty(2, np.float32)
        if comm.rank == 0:
            part = comm.scatter(x)
            assert isinstance(part, jax.Array)
            assert part.tolist() == [0.0, 1.0]
            assert isinstance(comm.scatterv(x, counts=[3, 1]), jax.Array)
        else:
            with raises(r2ccl.InvalidArgument, match="without out"):
                comm.scatter(x)
            assert comm.scatter(None, out) is out
            assert out.tolist() == [2.0, 3.0]
            assert comm.scatterv(None, out[:1]).tolist() == [3.0]
        assert type(comm.empty(like=x)) is np.ndarray
        given = np.empty(4, np.float32)
        assert comm.allreduce(x, given) is given
        assert comm.allreduce(x, given, async_op=True).wait() is given
        with comm.group():
            assert comm.allreduce(x, given) is given
        assert given.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert comm.allreduce(given, op=r2ccl.MAX) is given


@pytest.mark.timeout(300)
def test_roots_and_numpy_outputs_are_as_documented() -> None:
    launch(roots_and_outputs, 2, timeout_s=200)


def refusals() -> None:
    import jax
    import jax.numpy as jnp

    with r2ccl.init() as comm:
        x = jnp.ones(4)
        host = np.ones(4, np.float32)
        immutable = partial(raises, r2ccl.InvalidArgument, match="immutable.*leave out `out`")
        for source, out in ((x, x), (x, jnp.zeros(4)), (host, x)):
            with immutable():
                comm.allreduce(source, out)
            with immutable():
                comm.allreduce(source, out, async_op=True)
            with immutable(), comm.group():
                comm.allreduce(source, out)
        with immutable():
            comm.recv(x)
        with immutable():
            comm.alltoall(x, x)

        deleted = jnp.ones(4)
        deleted.delete()
        donated = jnp.ones(4) + 1
        jax.jit(lambda a: a + 1, donate_argnums=0)(donated)
        mesh = jax.make_mesh((4,), ("i",))
        spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("i")))
        for given, words in (
            (deleted, "deleted, or donated"),
            (donated, "deleted, or donated"),
            (spread, r"sharded over 4 devices; pass one shard .*addressable_shards\[i\]\.data"),
            (jax.random.key(0), r"jax\.random\.key_data"),
        ):
            for call in (comm.allreduce, comm.allgather, partial(comm.send, to=0)):
                with raises(r2ccl.InvalidArgument, match=words):
                    call(given)
            with raises(r2ccl.InvalidArgument, match=words):
                comm.allreduce(given, host)
        for transform in (jax.jit, jax.vmap, jax.grad):
            for call in (comm.allreduce, comm.allgather, lambda a: comm.allreduce(a, host)):
                with raises(r2ccl.InvalidArgument, match="traces .* outside of the function"):
                    transform(call)(x)
        assert comm.allreduce(x).tolist() == [2.0] * 4


@pytest.mark.timeout(300)
def test_what_cannot_be_read_or_written_is_refused() -> None:
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    launch(refusals, 2, timeout_s=200, env=env)


def devices_and_types() -> None:
    import jax
    import jax.numpy as jnp

    with r2ccl.init() as comm:
        there = jax.devices()[2]
        x = jax.device_put(jnp.ones(4), there)
        for found in (comm.allreduce(x), comm.allgather(x, async_op=True).wait()):
            assert (found.device, found.committed) == (there, True)
        free = comm.allreduce(jnp.ones(4))
        assert (free.device, free.committed) == (jax.devices()[0], False)
        with jax.default_device(there):
            y = jnp.ones(4)
        assert comm.allreduce(y).device == there
        with jax.enable_x64(True):
            wide = jnp.ones(4, "float64")
        with comm.group():
            grouped = comm.allreduce(wide)
        for found in (comm.allreduce(wide), comm.allgather(wide, async_op=True).wait(), grouped):
            assert found.dtype == np.float64

        @jax.jit
        def traced(a: Any) -> Any:
            total = comm.allreduce(x)
            assert not isinstance(total, jax.core.Tracer)
            return a + total[0]

        assert float(traced(1.0)) == 3.0


@pytest.mark.timeout(300)
def test_results_keep_device_and_dtype() -> None:
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    launch(devices_and_types, 2, timeout_s=200, env=env)


def copied_by_jax() -> None:
    import jax.numpy as jnp

    from r2ccl.runtime import collectives

    with r2ccl.init() as comm:
        x, host = jnp.ones(4), np.empty(4, np.float32)
        collectives.shares_memory = lambda found, host: False
        with comm.group():
            with raises(r2ccl.InvalidArgument, match="with r2ccl: pass a NumPy array"):
                comm.allreduce(x)
            comm.allreduce(x, host)
        assert host.tolist() == comm.allreduce(x).tolist() == [2.0] * 4


@pytest.mark.timeout(300)
def test_a_group_refuses_memory_that_jax_copies() -> None:
    launch(copied_by_jax, 2, timeout_s=200)


def within_a_callback() -> float:
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback

    with r2ccl.init() as comm:

        @jax.jit
        def step(x: Any) -> Any:
            form = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return 2 * io_callback(comm.allreduce, form, x, ordered=True)

        return float(step(jnp.ones(100_000))[-1])


@pytest.mark.timeout(300)
def test_a_jitted_function_calls_by_a_callback() -> None:
    assert launch(within_a_callback, 2, timeout_s=200) == [4.0] * 2


def test_memory_of_results_is_shared_with_jax() -> None:
    import jax
    import jax.numpy as jnp
    import ml_dtypes

    from r2ccl.runtime.arrays.libraries import jax_converter, jax_memory, shares_memory

    for base in (jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices()[0])):
        for dtype in (np.float32, np.int64, bool, np.complex128, ml_dtypes.bfloat16, np.uint8):
            for shape in ((), (0,), (5, 3), (100_000,)):
                host = jax_memory(shape, np.dtype(dtype))
                found = jax_converter(base)(host)
                host[...] = 1
                assert shares_memory(found, host)
                assert (found.dtype, found.shape) == (host.dtype, host.shape)
                assert np.asarray(found).all()
