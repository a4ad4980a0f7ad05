"""Every kernel on a real GPU: the host's bits, at every place, and nothing beside the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_cases import FACTOR, NRANKS, Arena, Layout, host_fuses, others, pairs, title

from r2ccl.device.base import Event, Stream
from r2ccl.device.driver import CudaDevice
from r2ccl.dtypes import BFLOAT16_CODE, CODES, DTYPES, dtype_name
from r2ccl.gpu.device_reduction import ReductionStream
from r2ccl.kernels.cuda import Form, Launcher, canonical, chain
from r2ccl.types import CallSignature, Collective, ReduceOp

TIMEOUT_S = 30
ALL = [pytest.param(form, id=title(form)) for form in (*pairs(), *others())]
FLOAT32 = CODES[np.dtype(np.float32)]
#: Where rounding differs between ways to add eight numbers of normal size: relative to their
#: magnitudes' sum, 7 roundings of half a unit in the last place, or 1 and those of float32.
TOLERANCES = {
    ("float32", False): 7 * 2.0**-24,
    ("float64", False): 7 * 2.0**-53,
    ("float16", False): 7 * 2.0**-11,
    ("float16", True): 2.0**-11 + 7 * 2.0**-24,
    ("bfloat16", False): 7 * 2.0**-8,
    ("bfloat16", True): 2.0**-8 + 7 * 2.0**-24,
}


class Gpu:
    """What a test does on the GPU."""

    def __init__(self, device: CudaDevice, stream: Stream, directory: Path) -> None:
        self.device, self.stream = device, stream
        self.launcher = Launcher(device, directory=directory)
        self._event: Event = device.make_event()

    def finish(self) -> None:
        """Wait for all that was given to the stream."""
        self.device.record(self._event, self.stream)
        assert self.device.synchronize(self._event, TIMEOUT_S)

    def run(self, arena: Arena) -> np.ndarray[Any, Any]:
        """Run the arena's form on a copy of it in device memory; return that afterwards."""
        form, nbytes, table_nbytes = arena.form, arena.bytes.size, 8 * len(arena.places)
        pinned = self.device.allocate_pinned(table_nbytes + nbytes)
        table, copied = pinned[:table_nbytes], pinned[table_nbytes:]
        base = self.device.allocate(nbytes)
        try:
            copied[:] = arena.bytes
            self.device.copy(base, copied.ctypes.data, nbytes, self.stream)
            sources = [base + place for place in arena.sources]
            targets = [base + place for place in arena.targets]
            self._launch(form, sources, targets, arena.layout.count, table)
            self.device.copy(copied.ctypes.data, base, nbytes, self.stream)
            self.finish()
            return copied.copy()
        finally:
            self.device.free(base)
            self.device.free_pinned(pinned)

    def _launch(
        self, form: Form, sources: Sequence[int], targets: Sequence[int], count: int, table: Any
    ) -> None:
        if not form.has_table:
            self.launcher.launch(
                form, sources, targets, count, self.stream, factor=FACTOR, nranks=NRANKS
            )
            return
        table[:] = np.array([*sources, *targets], np.int64).view(np.uint8)
        op = ReduceOp.AVG if form.is_divided else form.op
        call = CallSignature(Collective.ALLREDUCE, form.dtype_code, op, count)
        self.launcher.launch_from_table(
            call, form.ninputs, form.noutputs, table.ctypes.data, count, NRANKS, self.stream
        )


@pytest.fixture(scope="module")
def gpu(device: CudaDevice, stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    return Gpu(device, stream, tmp_path_factory.mktemp("ptx"))


def layouts(form: Form) -> list[Layout]:
    """List sizes and places, up to enough for every thread of a grid to go round several times."""
    per_vector = max(1, 16 // DTYPES[form.dtype_code].itemsize)
    return [
        Layout(0),
        Layout(1),
        Layout(3 * per_vector + 1, offsets=(per_vector - 1,)),
        Layout(1000 * per_vector + 3, offsets=(1,), in_place=form.ninputs - 1),
        Layout(100_003, offsets=(0, 1), in_place=0),
        Layout(300_000 * per_vector + 5),
    ]


@pytest.mark.parametrize("form", ALL)
def test_results_are_those_of_the_host_at_every_place(form: Form, gpu: Gpu) -> None:
    if dtype_name(canonical(form).dtype_code).startswith("complex") and not host_fuses():
        pytest.skip("NumPy on this processor rounds complex products at other places")
    for seed, layout in enumerate(layouts(form)):
        arena = Arena(form, layout, seed)
        assert arena.complaints(gpu.run(arena)) == [], layout


@pytest.mark.parametrize(("name", "is_wide"), list(TOLERANCES))
def test_sums_of_eight_are_near_those_in_float64(name: str, is_wide: bool, gpu: Gpu) -> None:
    code = BFLOAT16_CODE if name == "bfloat16" else CODES[np.dtype(name)]
    form = Form(dtype_code=code, op=ReduceOp.SUM, ninputs=8, is_wide=is_wide)
    arena = Arena(form, Layout(1_000_003), seed=0)
    rng = np.random.default_rng()
    arena.inputs = [rng.standard_normal(1_000_003).astype(DTYPES[code]) for _ in range(8)]
    arena.write()

    given = arena.output(gpu.run(arena), 0).astype(np.float64)

    wide = [each.astype(np.float64) for each in arena.inputs]
    error = np.abs(given - sum(wide)) / sum(np.abs(each) for each in wide)
    assert error.max() <= TOLERANCES[name, is_wide]


def test_a_chain_of_twenty_inputs_has_the_bits_of_one_sum(gpu: Gpu) -> None:
    count = 50_001
    rng = np.random.default_rng(5)
    inputs = rng.standard_normal((20, count)).astype(np.float32)
    base = gpu.device.allocate(inputs.nbytes)
    pinned = gpu.device.allocate_pinned(inputs.nbytes)
    try:
        pinned[:] = inputs.reshape(-1).view(np.uint8)
        gpu.device.copy(base, pinned.ctypes.data, inputs.nbytes, gpu.stream)
        row = count * 4
        sources = [base + i * row for i in range(20)]
        for step in chain(Form(dtype_code=FLOAT32, op=ReduceOp.SUM), sources, sources[:2]):
            gpu.launcher.launch(step.form, step.sources, step.targets, count, gpu.stream)
        gpu.device.copy(pinned.ctypes.data, base, inputs.nbytes, gpu.stream)
        gpu.finish()
        after = pinned.copy().view(np.float32).reshape(inputs.shape)
    finally:
        gpu.device.free(base)
        gpu.device.free_pinned(pinned)

    wanted = inputs[0].copy()
    for each in inputs[1:]:
        wanted += each
    assert after[0].tobytes() == after[1].tobytes() == wanted.tobytes()
    assert after[2:].tobytes() == inputs[2:].tobytes()


def test_work_beside_the_data_loop_keeps_its_order(gpu: Gpu) -> None:
    """Kernels of two forms change one array in turn; nothing is waited for between them."""
    device, count = gpu.device, 100_003
    code = CODES[np.dtype(np.int64)]
    add, multiply = (Form(dtype_code=code, op=op) for op in (ReduceOp.SUM, ReduceOp.PROD))
    reductions = ReductionStream(device, gpu.launcher)
    places = [device.allocate(count * 8) for _ in range(2)]
    pinned = device.allocate_pinned(count * 8)
    value = pinned.view(np.int64)
    value[:] = np.arange(count)
    for place in places:
        reductions.copy(place, int(pinned.ctypes.data), count * 8)
    meant = np.arange(count)
    for turn in range(50):
        form = multiply if turn % 5 == 4 else add
        reductions.run(form, (places[0], places[1]), places[0], count, 2)
        meant = meant * np.arange(count) if form is multiply else meant + np.arange(count)
        if turn % 3 == 0:
            reductions.commit()
            reductions.poll()
    reductions.copy(int(pinned.ctypes.data), places[0], count * 8)
    assert reductions.drain(TIMEOUT_S)
    assert np.array_equal(value, meant)
    reductions.close()
    for place in places:
        device.free(place)
    device.free_pinned(pinned)
