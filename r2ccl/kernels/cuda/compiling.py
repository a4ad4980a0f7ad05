"""Compiles a form to PTX with Numba.

Importing this module imports Numba, so other modules import it only when they must compile.
Invariant: the PTX depends only on the form and on the versions of Numba and NVIDIA's compiler;
compiling needs no GPU.
"""

from __future__ import annotations

import re

from numba import cuda, types

from r2ccl.kernels.cuda import primitives
from r2ccl.kernels.cuda.arithmetic import numbers_of
from r2ccl.kernels.cuda.form import Form
from r2ccl.kernels.cuda.machine import PTX_VERSION, TARGET
from r2ccl.kernels.cuda.template import NBLOCKS_AT_ONCE, NTHREADS, build, parameters


def compile_kernel(form: Form) -> bytes:
    """Return the PTX of the kernel of a canonical form; the name of its entry is ``form.name``."""
    numbers = [primitives.type_of(kind) for kind in numbers_of(form)]
    signature = types.void(*(types.int64 for _ in parameters(form)), *numbers)
    text, _ = cuda.compile_ptx(
        build(form, primitives, cuda),
        signature,
        cc=TARGET,
        debug=False,
        opt=True,
        fastmath=False,
        launch_bounds=(NTHREADS, NBLOCKS_AT_ONCE),
    )
    entry = re.search(r"\.visible \.entry (\w+)\(", text)
    assert entry, text
    return _tidy(text, entry[1], form.name)


def _tidy(text: str, entry: str, name: str) -> bytes:
    """Make the PTX `text` independent of the process and usable by older drivers.

    Replace names that Numba numbers, which include `entry`, by fixed ones; `name` is that of the
    entry. Lower the PTX version, and drop unused declarations.
    """
    body = text[text.index(".version") :].replace(entry, name)
    body = re.sub(r"_cudapy_smem_\d+", "table_of_block", body)
    body = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", body, count=1, flags=re.MULTILINE)
    return re.sub(r"^\.common .*NumbaEnv.*\n", "", body, flags=re.MULTILINE).encode()


__all__ = ["compile_kernel"]
