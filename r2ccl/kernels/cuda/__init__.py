"""Reductions and copies in GPU memory: a form says what, its PTX does it, a launch says how.

`form` is what a kernel computes, `template` writes it, `arithmetic` and `integers` are its lanes,
`machine` what it asks of the machine: `primitives` for a GPU, `twins` for Numba's simulator. `ptx`
compiles through `compiling` and keeps the result on disk, `operands` is what kernels are passed,
`launch` works out the grid and gives them to a `Device`, `chain` takes any number of inputs.
Numba is imported only to compile.

Invariant: for two inputs the results have the bits of `r2ccl.kernels.host`; for more, those of the
host's kernels applied from the left. Any NaN stays a NaN, but its bits may be others; of zeros with
two signs MIN gives -0 and MAX +0, where the host gives either for float32 and float64.
"""

from __future__ import annotations

from r2ccl.kernels.cuda.chain import Step, chain
from r2ccl.kernels.cuda.form import MOST, Form, canonical
from r2ccl.kernels.cuda.launch import Launcher, nblocks_of
from r2ccl.kernels.cuda.operands import arguments
from r2ccl.kernels.cuda.ptx import NTHREADS, TARGETS, Ptx, cache_directory, ptx_of, target_of

__all__ = [
    "MOST",
    "NTHREADS",
    "TARGETS",
    "Form",
    "Launcher",
    "Ptx",
    "Step",
    "arguments",
    "cache_directory",
    "canonical",
    "chain",
    "nblocks_of",
    "ptx_of",
    "target_of",
]
