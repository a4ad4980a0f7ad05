"""Every kernel, run in Numba's CUDA simulator, gives the bits of the host's kernels."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.cuda_cases import FLOAT16_CODE, host_fuses, others, pairs, representative, title
from support.once import once
from support.slow import slow_but

from r2ccl.dtypes import BFLOAT16_CODE, CODES, dtype_name
from r2ccl.kernels.cuda import Form, canonical
from r2ccl.types import ReduceOp

TESTS = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba.cuda") is None,
    reason="this Numba has no CUDA simulator: `pip install numba-cuda`",
)


QUICK = [
    *representative(),
    Form(dtype_code=FLOAT16_CODE, op=ReduceOp.MAX, is_scaled=True, is_wide=True),
    Form(dtype_code=CODES[np.dtype(np.float32)], op=ReduceOp.SUM, ninputs=3, is_scaled=True,
         is_resumed=True),
    Form(dtype_code=BFLOAT16_CODE, op=ReduceOp.SUM, ninputs=8, is_divided=True, has_table=True),
]  # fmt: skip
ALL = list(dict.fromkeys((*QUICK, *pairs(), *others())))

#: Return the errors of each form, of those in `QUICK` or of the others.
Simulated = Callable[[bool], dict[str, list[str]]]


@pytest.fixture(scope="module")
def simulated(run_folder: Path) -> Simulated:
    """Run many forms in one process, which must be told of the simulator before it starts."""

    @functools.cache
    def run(is_quick: bool) -> Any:
        first, last = (0, len(QUICK)) if is_quick else (len(QUICK), len(ALL))
        return once(run_folder, f"simulator{first}", lambda: simulate(ALL[first:last]))

    return run


def simulate(forms: list[Form]) -> Any:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", TESTS / "support/cuda_simulated.py"],
        input=msgspec.json.encode(forms).decode(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={
            **os.environ,
            "NUMBA_ENABLE_CUDASIM": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("form", slow_but(QUICK, ALL), ids=title)
def test_results_are_those_of_the_host_at_every_place(form: Form, simulated: Simulated) -> None:
    if dtype_name(canonical(form).dtype_code).startswith("complex") and not host_fuses():
        pytest.skip("NumPy on this processor rounds complex products at other places")

    assert simulated(form in QUICK)[title(form)] == []
