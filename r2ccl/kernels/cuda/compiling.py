"""Compiles a form to PTX with Numba.

Importing this module imports Numba, so `r2ccl.kernels.cuda.ptx` imports it only when it must
compile. Invariant: the PTX depends only on the form and the target; compiling needs no GPU.
"""

from __future__ import annotations

import re

from numba import cuda, types

from r2ccl.kernels.cuda import primitives
from r2ccl.kernels.cuda.arithmetic import numbers_of
from r2ccl.kernels.cuda.form import Form
from r2ccl.kernels.cuda.template import build, parameters


def compile_kernel(form: Form, target: tuple[int, int], bounds: tuple[int, int]) -> tuple[str, str]:
    """Compile the kernel of a canonical form.

    Parameters
    ----------
    form : Form
    target : tuple of int
        Compute capability to compile for.
    bounds : tuple of int
        Launch bounds: maximum number of threads per block, and minimum number of blocks that are
        resident on a multiprocessor.

    Returns
    -------
    text, entry : str
        The PTX and the name of its entry, as Numba writes them.
    """
    numbers = [primitives.type_of(kind) for kind in numbers_of(form)]
    signature = types.void(*(types.int64 for _ in parameters(form)), *numbers)
    text, _ = cuda.compile_ptx(
        build(form, primitives, cuda),
        signature,
        cc=target,
        debug=False,
        opt=True,
        fastmath=False,
        launch_bounds=bounds,
    )
    entry = re.search(r"\.visible \.entry (\w+)\(", text)
    assert entry, text
    return text, entry[1]


__all__ = ["compile_kernel"]
