"""Forms, their arguments and grids, chains of kernels, and what a device is asked to do."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_cases import FACTOR, NRANKS, others, pairs

from r2ccl.dtypes import BFLOAT16_CODE, CODES
from r2ccl.errors import InvalidArgument
from r2ccl.kernels import ON_GPU
from r2ccl.kernels.cuda import (
    MOST,
    NTHREADS,
    Form,
    Launcher,
    Ptx,
    arguments,
    canonical,
    chain,
    check_capability,
    nblocks_of,
    ptx_of,
)
from r2ccl.types import CallSignature, ReduceOp

FLOAT16, FLOAT32 = CODES[np.dtype(np.float16)], CODES[np.dtype(np.float32)]
INT8, COMPLEX64 = CODES[np.dtype(np.int8)], CODES[np.dtype(np.complex64)]
SUM, PROD, MIN, AVG = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.AVG


class Recorder:
    """A device that notes what it loads and launches."""

    capability = (9, 0)
    nsms = 132

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launched: list[tuple[int, int, int, int, tuple[Any, ...]]] = []

    def load(self, ptx: bytes, entry: str) -> int:
        self.loaded.append(entry)
        return len(self.loaded)

    def launch(self, kernel: int, nblocks: int, nthreads: int, stream: int, given: Any) -> None:
        self.launched.append((kernel, nblocks, nthreads, stream, given))


@pytest.fixture
def device() -> Recorder:
    return Recorder()


@pytest.fixture
def launcher(device: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    def made(form: Form, capability: tuple[int, int], directory: Path) -> Ptx:
        assert (capability, directory) == ((9, 0), tmp_path)
        return Ptx(b"", canonical(form).name, "prebuilt")

    monkeypatch.setattr("r2ccl.kernels.cuda.launch.ptx_of", made)
    return Launcher(device, directory=tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype_code": COMPLEX64, "op": MIN}, "op=MIN for dtype complex64"),
        ({"dtype_code": INT8, "op": ReduceOp.LAND}, "op=LAND for dtype int8: there is no kernel"),
        ({"dtype_code": 10, "op": SUM}, "op=SUM for dtype float8_e4m3fn: there is no kernel"),
        ({"dtype_code": 63, "op": SUM}, "dtype number 63"),
        ({"dtype_code": FLOAT32, "op": SUM, "ninputs": 0}, "ninputs=0.*1 to 8"),
        ({"dtype_code": FLOAT32, "op": SUM, "noutputs": 9}, "noutputs=9.*1 to 8"),
        ({"dtype_code": INT8, "op": SUM, "is_scaled": True}, "is_scaled for dtype int8"),
        ({"dtype_code": FLOAT32, "op": SUM, "is_resumed": True}, "is_resumed without is_scaled"),
        ({"dtype_code": FLOAT32, "op": PROD, "is_divided": True}, "is_divided for op=PROD"),
        ({"dtype_code": FLOAT32, "op": SUM, "is_wide": True}, "is_wide for dtype float32"),
    ],
)
def test_forms_without_a_meaning_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Form(**given)


def test_names_are_different_and_made_of_what_an_entry_may_be() -> None:
    names = [form.name for form in (*pairs(), *others())]

    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize(
    ("form", "shared"),
    [
        (Form(dtype_code=COMPLEX64, op=SUM), Form(dtype_code=FLOAT32, op=SUM)),
        (Form(dtype_code=FLOAT32, op=AVG), Form(dtype_code=FLOAT32, op=SUM)),
        (Form(dtype_code=INT8, op=PROD), Form(dtype_code=1, op=PROD)),
        (Form(dtype_code=FLOAT16, op=SUM, is_wide=True), Form(dtype_code=FLOAT16, op=SUM)),
        (Form(dtype_code=FLOAT16, op=MIN, ninputs=1), Form(dtype_code=17, op=SUM, ninputs=1)),
        (Form(dtype_code=COMPLEX64, op=SUM, ninputs=1), Form(dtype_code=3, op=SUM, ninputs=1)),
        (Form(dtype_code=20, op=SUM, ninputs=1), Form(dtype_code=1, op=SUM, ninputs=1)),
    ],
)
def test_forms_with_the_same_results_share_a_kernel(form: Form, shared: Form) -> None:
    assert canonical(form) == canonical(shared) == shared


@pytest.mark.parametrize(
    "form",
    [
        Form(dtype_code=INT8, op=MIN),
        Form(dtype_code=INT8, op=SUM, is_divided=True),
        Form(dtype_code=COMPLEX64, op=PROD),
        Form(dtype_code=BFLOAT16_CODE, op=SUM, ninputs=3, is_wide=True),
        Form(dtype_code=BFLOAT16_CODE, op=SUM, is_divided=True, is_wide=True),
        Form(dtype_code=FLOAT32, op=SUM, is_scaled=True, is_resumed=True),
        Form(dtype_code=FLOAT32, op=SUM, has_table=True),
    ],
)
def test_forms_with_other_results_have_their_own(form: Form) -> None:
    assert canonical(form) == form


@pytest.mark.parametrize("form", [*pairs(), *others()])
def test_a_shared_form_shares_with_itself_and_has_the_same_bytes(form: Form) -> None:
    shared = canonical(form)

    assert canonical(shared) == shared
    assert form.itemsize % shared.itemsize == 0
    assert (shared.ninputs, shared.noutputs) == (form.ninputs, form.noutputs)


def test_arguments_are_addresses_bytes_factor_and_divisor() -> None:
    given = arguments(Form(dtype_code=FLOAT32, op=SUM), (16, 32, 48), 5, factor=0.5, nranks=3)

    assert given == (
        (16, ctypes.c_int64),
        (32, ctypes.c_int64),
        (48, ctypes.c_int64),
        (20, ctypes.c_int64),
        (0.5, ctypes.c_float),
        (3, ctypes.c_float),
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("int8", (ctypes.c_float, ctypes.c_int32)),
        ("uint16", (ctypes.c_float, ctypes.c_uint32)),
        ("int64", (ctypes.c_float, ctypes.c_int64)),
        ("uint64", (ctypes.c_float, ctypes.c_uint64)),
        ("float16", (ctypes.c_float, ctypes.c_float)),
        ("float64", (ctypes.c_double, ctypes.c_double)),
        ("complex64", (ctypes.c_float, ctypes.c_float)),
        ("complex128", (ctypes.c_double, ctypes.c_double)),
    ],
)
def test_numbers_have_the_type_the_kernel_calculates_in(name: str, kinds: tuple[Any, Any]) -> None:
    form = Form(dtype_code=CODES[np.dtype(name)], op=SUM, is_divided=True)

    *_, factor, divisor = arguments(form, (0, 0, 0), 1, factor=FACTOR, nranks=NRANKS)

    assert (factor, divisor) == ((FACTOR, kinds[0]), (NRANKS, kinds[1]))


@pytest.mark.parametrize("nranks", [0, -1, 1 << 31])
def test_a_divisor_out_of_range_is_refused(nranks: int) -> None:
    with pytest.raises(InvalidArgument, match=f"nranks={nranks}"):
        arguments(Form(dtype_code=INT8, op=SUM, is_divided=True), (0, 0, 0), 1, nranks=nranks)


@pytest.mark.parametrize(
    ("count", "nblocks"),
    [(0, 1), (1, 1), (1024, 1), (1025, 2), (1 << 20, 1024), (1 << 28, 132 * 16)],
)
def test_a_grid_has_a_thread_for_each_vector_up_to_a_bound(count: int, nblocks: int) -> None:
    assert NTHREADS == 256
    assert nblocks_of(Form(dtype_code=FLOAT32, op=SUM), count, 132) == nblocks


def test_a_grid_that_reads_a_table_runs_at_once() -> None:
    assert nblocks_of(Form(dtype_code=FLOAT32, op=SUM, has_table=True), 1 << 28, 132) == 132 * 4


def test_a_kernel_is_loaded_once_for_all_forms_that_share_it(
    launcher: Launcher, device: Recorder
) -> None:
    for form in (
        Form(dtype_code=FLOAT32, op=SUM),
        Form(dtype_code=FLOAT32, op=AVG),
        Form(dtype_code=COMPLEX64, op=SUM),
        Form(dtype_code=FLOAT32, op=SUM),
    ):
        launcher.launch(form, (0, 16), (32,), 1, 7)  # type: ignore[arg-type]

    assert device.loaded == ["r2ccl_sum_float32_2_1"]
    assert [(kernel, stream) for kernel, _, _, stream, _ in device.launched] == [(1, 7)] * 4


def test_no_elements_are_no_launch(launcher: Launcher, device: Recorder) -> None:
    launcher.launch(Form(dtype_code=FLOAT32, op=SUM), (0, 16), (32,), 0, 7)  # type: ignore[arg-type]

    assert (device.loaded, device.launched) == ([], [])


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ((0,), (16,), "1 inputs and 1 outputs were given for r2ccl_sum_float32_2_1; pass 2"),
        ((0, 16), (32, 48), "2 inputs and 2 outputs"),
        ((0, 18), (32,), "address 0x12 is not aligned to 4 bytes"),
    ],
)
def test_addresses_that_do_not_fit_are_refused(
    sources: Sequence[int], targets: Sequence[int], words: str, launcher: Launcher
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        launcher.launch(Form(dtype_code=FLOAT32, op=SUM), sources, targets, 4, 7)  # type: ignore[arg-type]


def test_kernels_that_find_addresses_in_memory_are_not_given_any(launcher: Launcher) -> None:
    form = Form(dtype_code=FLOAT32, op=SUM, has_table=True)
    with pytest.raises(InvalidArgument, match="use launch_from_table"):
        launcher.launch(form, (0, 16), (32,), 4, 7)  # type: ignore[arg-type]


def test_complex_numbers_are_aligned_as_their_parts_are(
    launcher: Launcher, device: Recorder
) -> None:
    launcher.launch(Form(dtype_code=COMPLEX64, op=PROD), (4, 20), (36,), 1, 7)  # type: ignore[arg-type]

    assert len(device.launched) == 1


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_collective_is_launched_from_its_table(
    is_wide: bool, device: Recorder, launcher: Launcher, tmp_path: Path
) -> None:
    launcher = Launcher(device, is_wide=is_wide, directory=tmp_path)  # type: ignore[arg-type]
    call = CallSignature(0, BFLOAT16_CODE, AVG, 4096)

    launcher.launch_from_table(call, 8, 8, 0x1000, 512, 8, 7)  # type: ignore[arg-type]

    said = "_wide" if is_wide else ""
    assert device.loaded == [f"r2ccl_sum_bfloat16_8_8_divided{said}_table"]
    assert device.launched == [
        (1, 1, NTHREADS, 7, (
            (0x1000, ctypes.c_int64), (1024, ctypes.c_int64),
            (1.0, ctypes.c_float), (8, ctypes.c_float),
        ))
    ]  # fmt: skip


def test_a_table_that_is_not_aligned_is_refused(launcher: Launcher) -> None:
    with pytest.raises(InvalidArgument, match="table at 0x1004"):
        launcher.launch_from_table(CallSignature(0, FLOAT32, SUM, 8), 2, 2, 0x1004, 8, 2, 7)  # type: ignore[arg-type]


def test_a_form_prepared_is_the_one_that_is_launched(launcher: Launcher, device: Recorder) -> None:
    call = CallSignature(0, FLOAT32, SUM, 4096)

    launcher.prepare_from_table(call, 4, 4)
    prepared = list(device.loaded)
    launcher.launch_from_table(call, 4, 4, 0x1000, 512, 4, 7)  # type: ignore[arg-type]

    assert device.loaded == prepared == ["r2ccl_sum_float32_4_4_table"]


# Chains


def run(form: Form, steps: Any, memory: dict[int, np.ndarray[Any, Any]]) -> None:
    """Do what the kernels of a chain do, with arrays in place of addresses."""
    for step in steps:
        values = [memory[each].copy() for each in step.sources]
        scaled = [
            value * FACTOR if step.form.is_scaled and (i or not step.form.is_resumed) else value
            for i, value in enumerate(values)
        ]
        result = scaled[0]
        for value in scaled[1:]:
            result = result * value if form.op is PROD else result + value
        if step.form.is_divided:
            result = result / NRANKS
        for target in step.targets:
            memory[target] = result


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("ninputs", [1, 2, 8, 9, 15, 16, 40])
def test_a_chain_combines_all_inputs_from_the_left(ninputs: int, is_scaled: bool) -> None:
    rng = np.random.default_rng(ninputs)
    inputs = [rng.standard_normal(5) for _ in range(ninputs)]
    memory = dict(enumerate(inputs))
    form = Form(dtype_code=8, op=SUM, is_scaled=is_scaled, is_divided=True)

    steps = chain(form, range(ninputs), (100, 101))
    run(form, steps, memory)

    wanted = inputs[0] * (FACTOR if is_scaled else 1)
    for each in inputs[1:]:
        wanted = wanted + each * (FACTOR if is_scaled else 1)
    assert memory[100].tobytes() == memory[101].tobytes() == (wanted / NRANKS).tobytes()
    assert [step.form.ninputs <= MOST for step in steps] == [True] * len(steps)


@pytest.mark.parametrize("place", range(20))
def test_a_chain_works_in_place_whichever_input_is_the_output(place: int) -> None:
    inputs = [np.array([float(i + 1)]) for i in range(20)]
    memory = dict(enumerate(inputs))
    form = Form(dtype_code=8, op=SUM)

    run(form, chain(form, range(20), (place,), scratch=100), memory)

    assert memory[place].tolist() == [210.0]
    assert all(memory[i].tolist() == [i + 1.0] for i in range(20) if i != place)


def test_a_chain_needs_scratch_where_every_output_is_read_late() -> None:
    with pytest.raises(InvalidArgument, match=r"the 2 inputs of later kernels.*scratch"):
        chain(Form(dtype_code=8, op=SUM), range(10), (9, 8))


# Compute capabilities


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 1)])
def test_gpus_from_the_target_on_run_the_kernels(capability: tuple[int, int]) -> None:
    check_capability(capability)


def test_a_gpu_older_than_the_target_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"capability 7\.5, but kernels need at least 8\.0"):
        ptx_of(Form(dtype_code=FLOAT32, op=SUM), (7, 5), None)


def test_every_type_has_forms() -> None:
    assert {form.dtype_code for form in pairs()} == set(ON_GPU)
