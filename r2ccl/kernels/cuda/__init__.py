"""Reductions and copies in GPU memory, compiled to PTX by Numba.

A `form` specifies the computation of a kernel. `template` generates the kernel's source, using the
functions of `arithmetic` and `integers` on the instruction set that `machine` defines. `primitives`
implements this set for a GPU, `twins` for Numba's simulator. `compiling` compiles the source.
`prebuilt` has the compiled kernels of all collectives; `ptx` takes a kernel from `prebuilt` or from
a disk cache, or else compiles it. `operands` packs the arguments, `launch` chooses the grid and
launches on a `Device`, and `chain` plans kernels for any number of inputs. Numba is imported only
to compile.

Invariant: the result of a form has the same bits as the result of `r2ccl.kernels.host`, unless the
form scales or has `is_wide`. With more than two inputs, the host combines them from the left. There
are two exceptions: the bits of a NaN may differ; and complex products equal those of the host only
if the processor of the host has FMA.
"""

from __future__ import annotations

from r2ccl.kernels.cuda.chain import ChainStep, chain
from r2ccl.kernels.cuda.form import MOST, Form, canonical, has_kernels
from r2ccl.kernels.cuda.launch import Launcher, nblocks_of
from r2ccl.kernels.cuda.operands import arguments
from r2ccl.kernels.cuda.ptx import Ptx, cache_directory, check_capability, ptx_of
from r2ccl.kernels.cuda.template import NTHREADS

__all__ = [
    "MOST",
    "NTHREADS",
    "ChainStep",
    "Form",
    "Launcher",
    "Ptx",
    "arguments",
    "cache_directory",
    "canonical",
    "chain",
    "check_capability",
    "has_kernels",
    "nblocks_of",
    "ptx_of",
]
