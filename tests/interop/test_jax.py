"""Arrays of JAX are inputs of collectives."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("jax")

from support.jobs import launch
from support.raising import raises

import r2ccl


def sums(dtype: str) -> list[object]:
    import jax.numpy as jnp

    with r2ccl.init() as comm:
        x = jnp.full(1000, comm.rank + 1, dtype)
        out = np.empty(x.shape, x.dtype)
        comm.allreduce(x, out)
        gathered = comm.allgather(x)
        with raises(r2ccl.InvalidArgument, match="is read-only"):
            comm.allreduce(x)
        assert float(x[0]) == comm.rank + 1
        return [float(out[0]), float(gathered[1, 0]), str(jnp.asarray(gathered).dtype)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_arrays_of_jax_are_inputs(dtype: str) -> None:
    assert launch(partial(sums, dtype), 2, timeout_s=200) == [[3.0, 2.0, dtype]] * 2
