"""Read forms as JSON, run them in Numba's CUDA simulator, and print the errors of each, as JSON.

Must be run with NUMBA_ENABLE_CUDASIM=1. Blocks are small, so that arrays are too: the simulator
runs a Python thread for each thread of a block.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import numpy as np
from numba import cuda
from support.cuda_cases import FACTOR, NRANKS, Arena, Layout, shifted, title

from r2ccl.dtypes import DTYPES
from r2ccl.kernels.cuda import Form, arguments, canonical, twins
from r2ccl.kernels.cuda.template import build

NBLOCKS, NTHREADS = 2, 2


def layouts(form: Form) -> list[Layout]:
    """Return sizes and placements that together take every path of a kernel.

    They are: several vectors per thread, with elements before and after; few elements; starts that
    share an alignment of 8, 4 or fewer bytes only; in place.
    """
    per_vector = max(1, 16 // DTYPES[form.dtype_code].itemsize)
    many = 5 * NBLOCKS * NTHREADS * per_vector + 3
    apart = [Layout(many, offsets=offsets) for offsets in shifted(form)]
    return [
        *apart,
        Layout(0),
        Layout(1),
        Layout(many),
        Layout(many, offsets=(1,), in_place=0),
        Layout(per_vector + 2, offsets=(per_vector - 1,)),
        Layout(4 * NBLOCKS * NTHREADS + 7, offsets=(0, 1), in_place=form.ninputs - 1),
    ]


def run(form: Form, layout: Layout, kernel: Any, seed: int) -> list[str]:
    """Run one case; return its errors."""
    arena = Arena(form, layout, seed)
    memory = arena.placed()
    base = memory.ctypes.data
    addresses = [base + place for place in (*arena.sources, *arena.targets)]
    table = np.array(addresses, np.int64)
    given = (table.ctypes.data,) if form.has_table else addresses
    *places, factor, divisor = (
        kind(value).value
        for value, kind in arguments(form, given, layout.count, factor=FACTOR, nranks=NRANKS)
    )
    kernel[NBLOCKS, NTHREADS](*places, factor, divisor)
    return [f"{layout}: {each}" for each in arena.complaints(memory)]


def main() -> None:
    """Run the forms."""
    wrong: dict[str, list[str]] = {}
    for form in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Form]):
        kernel = cuda.jit(build(canonical(form), twins, cuda))
        wrong[title(form)] = [
            said for seed, layout in enumerate(layouts(form))
            for said in run(form, layout, kernel, seed)
        ]  # fmt: skip
    json.dump(wrong, sys.stdout)


if __name__ == "__main__":
    main()
