"""The PTX of every kernel: what is in it, and, run by an interpreter, what it calculates."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_cases import (
    FACTOR,
    FLOAT16_CODE,
    NRANKS,
    Arena,
    Layout,
    host_fuses,
    others,
    pairs,
    representative,
    shifted,
    title,
)
from support.ptx_machine import Kernel

from r2ccl.dtypes import BFLOAT16_CODE, CODES, DTYPES, dtype_name
from r2ccl.kernels.cuda import Form, arguments, canonical, ptx_of
from r2ccl.kernels.cuda.machine import PTX_VERSION, TARGET, VECTORS
from r2ccl.kernels.cuda.prebuilt import forms
from r2ccl.kernels.cuda.template import units_at_once
from r2ccl.types import ReduceOp

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None,
    reason="numba-cuda is not installed: `pip install numba-cuda[cu13]`, which needs no GPU",
)
needs_ptxas = pytest.mark.skipif(
    shutil.which("ptxas") is None, reason="no ptxas in PATH; it comes with the CUDA toolkit"
)

ALL = (*pairs(), *others())
#: Every ninth form that collectives launch: of all types, and of most numbers of operands.
PREBUILT = tuple(forms())[::9]


def cases(given: Iterable[Form]) -> list[Any]:
    quick = set(map(canonical, representative()))
    return [
        pytest.param(
            form, id=title(form), marks=() if canonical(form) in quick else pytest.mark.slow
        )
        for form in given
    ]


FORMS = cases(dict.fromkeys((*ALL, *PREBUILT)))
#: Those that have a kernel of their own.
KERNELS = cases(dict.fromkeys(map(canonical, ALL)))
#: What combines two packed halves.
PACKED = {
    (FLOAT16_CODE, ReduceOp.SUM): r"add\.rn\.f16x2",
    (FLOAT16_CODE, ReduceOp.PROD): r"mul\.rn\.f16x2",
    (FLOAT16_CODE, ReduceOp.MIN): r"min\.NaN\.f16x2",
    (FLOAT16_CODE, ReduceOp.MAX): r"max\.NaN\.f16x2",
    (BFLOAT16_CODE, ReduceOp.SUM): r"0x3F803F80; fma\.rn\.bf16x2",
    (BFLOAT16_CODE, ReduceOp.PROD): r"0x80008000; fma\.rn\.bf16x2",
    (BFLOAT16_CODE, ReduceOp.MIN): r"min\.NaN\.bf16x2",
    (BFLOAT16_CODE, ReduceOp.MAX): r"max\.NaN\.bf16x2",
}
NBLOCKS = NTHREADS = 2


@pytest.fixture(scope="module")
def cache(run_folder: Path) -> Path:
    return run_folder / "ptx"


@pytest.mark.parametrize("form", KERNELS)
def test_text_is_that_of_a_kernel_at_the_speed_of_memory(form: Form, cache: Path) -> None:
    made = ptx_of(form, TARGET, cache)
    text, shared = made.text.decode(), canonical(form)
    at_once = units_at_once(shared)
    units = at_once + (at_once > 1)  # those of a round, and what is left over, one by one

    assert f".version {PTX_VERSION}\n.target sm_{TARGET[0]}{TARGET[1]}\n" in text
    assert re.findall(r"\.entry (\w+)", text) == [made.entry] == [shared.name]
    assert re.findall(r"\.maxntid 256\b.*\n\.minnctapersm 4\n", text)
    # An element as large as a vector has its own loads and stores.
    for nbytes in (each for each in VECTORS if each == 16 or each > shared.itemsize):
        vectors = {16: r"(v4\.[uf]32|v2\.[uf]64)", 8: r"v2\.[uf]32", 4: "u32"}[nbytes]
        assert len(re.findall(rf"ld\.global\.{vectors}\b", text)) == units * form.ninputs
        assert len(re.findall(rf"st\.global\.{vectors}\b", text)) == units * form.noutputs
    assert not re.findall(r"\.local|\bcall\b|\.nc\b|\.ftz|\.approx|\.full|\.common", text)


@pytest.mark.parametrize("form", KERNELS)
def test_floating_point_instructions_say_how_they_round(form: Form, cache: Path) -> None:
    text, shared = ptx_of(form, TARGET, cache).text.decode(), canonical(form)
    kind = dtype_name(shared.dtype_code)
    is_product_or_sum = shared.op in (ReduceOp.SUM, ReduceOp.PROD) and form.ninputs > 1

    assert not re.findall(r"\b(?:add|sub|mul|div|fma)\.b?f\d\w*", text)
    # Two steps are one only where that is what is wanted.
    is_fused = kind.startswith("complex") or (kind == "bfloat16" and is_product_or_sum)
    assert bool(re.findall(r"\bfma\.", text)) == (is_fused and not shared.is_wide)


@pytest.mark.parametrize("form", KERNELS)
def test_halves_are_combined_in_pairs_unless_in_float32(form: Form, cache: Path) -> None:
    text = ptx_of(form, TARGET, cache).text.decode()
    shared = canonical(form)
    packed = PACKED.get((shared.dtype_code, shared.op))
    if packed is None or form.ninputs == 1:
        assert "16x2" not in text or form.is_scaled or form.is_divided
    elif shared.is_wide:
        assert re.findall(r"cvt\.rn\.b?f16x2\.f32", text)
        assert not re.findall(packed, text)
    else:
        assert re.findall(packed, text)


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_those_of_a_launch(form: Form, cache: Path) -> None:
    kernel = Kernel(ptx_of(form, TARGET, cache).text.decode())
    addresses = [0] if form.has_table else [0] * (form.ninputs + form.noutputs)

    given = arguments(form, addresses, 1)

    letters = {"i": "u32", "I": "u32", "l": "u64", "L": "u64", "f": "f32", "d": "f64"}
    assert [kind for kind, _ in kernel.parameters] == [letters[kind._type_] for _, kind in given]


@pytest.mark.parametrize("form", FORMS)
def test_interpreted_it_has_the_bits_of_the_host(form: Form, cache: Path) -> None:
    if dtype_name(canonical(form).dtype_code).startswith("complex") and not host_fuses():
        pytest.skip("NumPy on this processor rounds complex products at other places")
    kernel = Kernel(ptx_of(form, TARGET, cache).text.decode())
    per_vector = max(1, 16 // DTYPES[form.dtype_code].itemsize)
    many = 5 * NBLOCKS * NTHREADS * per_vector + 3
    for seed, layout in enumerate(
        (
            Layout(many, offsets=(1,), in_place=0),
            Layout(4 * NBLOCKS * NTHREADS + 7, offsets=(0, 1), in_place=form.ninputs - 1),
            *(Layout(many, offsets=offsets) for offsets in shifted(form)),
            Layout(0),
        )
    ):
        assert interpret(kernel, Arena(form, layout, seed)) == []


@pytest.mark.parametrize("nbytes", [8, 4])
@pytest.mark.parametrize("form", KERNELS)
def test_operands_apart_go_in_the_vectors_that_they_share(
    form: Form, nbytes: int, cache: Path
) -> None:
    dtype = DTYPES[form.dtype_code]
    if nbytes < dtype.itemsize or (nbytes == dtype.itemsize and dtype.kind == "c"):
        pytest.skip("an element is larger than the vector, or has a load for each part")
    kernel = Kernel(ptx_of(form, TARGET, cache).text.decode())
    unit = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    layout = Layout(40 * nbytes // dtype.itemsize + 1, offsets=(0, nbytes // unit))

    assert interpret(kernel, Arena(form, layout, seed=1)) == []

    sizes = kernel.accesses
    narrow = sum(size * count for size, count in sizes.items() if size < nbytes)
    noperands = form.ninputs + form.noutputs
    assert sizes[16] == 0
    assert sizes[nbytes] >= 40 * noperands
    assert narrow < noperands * nbytes  # the elements after the last vector


@needs_ptxas
@pytest.mark.parametrize("form", KERNELS)
def test_no_register_is_spilled(form: Form, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "kernel.ptx"
    path.write_bytes(ptx_of(form, TARGET, cache).text)

    run = subprocess.run(
        ["ptxas", "-v", f"-arch=sm_{TARGET[0]}{TARGET[1]}", path, "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in run.stderr


def test_a_table_that_nobody_filled_is_no_work(cache: Path) -> None:
    form = Form(
        dtype_code=CODES[np.dtype(np.float32)],
        op=ReduceOp.SUM,
        ninputs=4,
        noutputs=2,
        has_table=True,
    )
    kernel = Kernel(ptx_of(form, TARGET, cache).text.decode())
    table = np.zeros(6, np.int64)
    given = arguments(form, [table.ctypes.data], 10_000)
    values = [int.from_bytes(bytes(kind(value)), "little") for value, kind in given]
    # Anything but the table is out of bounds.
    window = range(table.ctypes.data, table.ctypes.data + table.nbytes)
    kernel.run(NBLOCKS, NTHREADS, values, [window])


def interpret(kernel: Kernel, arena: Arena) -> list[str]:
    """Run a kernel on a copy of the arena; say what is wrong afterwards."""
    form = arena.form
    memory = arena.placed()
    base = memory.ctypes.data
    addresses = [base + place for place in (*arena.sources, *arena.targets)]
    table = np.array(addresses, np.int64)
    given = arguments(
        form,
        [table.ctypes.data] if form.has_table else addresses,
        arena.layout.count,
        factor=FACTOR,
        nranks=NRANKS,
    )
    values = [int.from_bytes(bytes(kind(value)), "little") for value, kind in given]
    windows = [range(each.ctypes.data, each.ctypes.data + each.nbytes) for each in (memory, table)]
    kernel.run(NBLOCKS, NTHREADS, values, windows)
    return arena.complaints(memory)
