"""The library's kernels on the fake GPU: launched as on a real one, with the results promised."""

from __future__ import annotations

import numpy as np
import pytest
from support.cuda_cases import FACTOR, NRANKS, differences, expected, others, pairs, title, values

from r2ccl.device.base import Stream
from r2ccl.dtypes import CODES, dtype_of
from r2ccl.kernels.cuda import NTHREADS, Form, arguments
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, Race
from r2ccl.testing.fakedevice.forms import FakeLauncher
from r2ccl.types import CallSignature, Collective, ReduceOp

COUNT = 37
SUM = Form(dtype_code=CODES[np.dtype(np.float32)], op=ReduceOp.SUM)


class Bench:
    def __init__(self, seed: int = 0, *, is_wide: bool = False) -> None:
        self.gpu = FakeGpu(seed)
        self.device = FakeDevice(self.gpu)
        self.launcher = FakeLauncher(self.device, is_wide=is_wide)
        self.stream = self.device.make_stream()

    def place(self, data: np.ndarray) -> int:
        address = self.device.allocate(data.nbytes)
        self.device.write(address, data)
        return address

    def finish(self, stream: Stream) -> None:
        event = self.device.make_event()
        self.device.record(event, stream)
        assert self.device.synchronize(event, 10.0)


@pytest.mark.parametrize("form", [*pairs(), *others()], ids=title)
def test_every_form_gives_what_the_host_does(form: Form) -> None:
    bench, dtype, rng = Bench(), dtype_of(form.dtype_code), np.random.default_rng(5)
    inputs = [values(dtype, COUNT, rng) for _ in range(form.ninputs)]
    nbytes = COUNT * dtype.itemsize
    sources = [bench.place(each) for each in inputs]
    targets = [bench.device.allocate(nbytes) for _ in range(form.noutputs)]

    if form.has_table:
        table = bench.device.allocate_pinned(8 * (form.ninputs + form.noutputs))
        table.view(np.int64)[:] = [*sources, *targets]
        given = arguments(form, [table.ctypes.data], COUNT, factor=FACTOR, nranks=NRANKS)
        kernel = bench.launcher.prepare(form)
        bench.device.launch(kernel, 1, NTHREADS, bench.stream, given)
    else:
        bench.launcher.launch(
            form, sources, targets, COUNT, bench.stream, factor=FACTOR, nranks=NRANKS
        )
    bench.finish(bench.stream)

    wanted = expected(form, inputs)
    for target in targets:
        given = bench.device.read(target, nbytes).view(dtype)
        assert differences(form, given, wanted).size == 0


def test_a_table_is_read_when_the_kernel_runs() -> None:
    """The host fills it after the launch, and lets the stream go on with a word."""
    for seed in range(50):
        bench = Bench(seed)
        left, right = (np.full(COUNT, each, np.float32) for each in (1, 2))
        operands = [bench.place(left), bench.place(right), bench.device.allocate(left.nbytes)]
        table = bench.device.allocate_pinned(24)
        gate = bench.device.allocate_pinned(4).view(np.uint32)
        call = CallSignature(Collective.ALLREDUCE, SUM.dtype_code, ReduceOp.SUM, COUNT, 0)
        bench.device.wait_word(bench.stream, gate.ctypes.data, 1)
        bench.launcher.launch_from_table(
            call, 2, 1, table.ctypes.data, COUNT, NRANKS, bench.stream
        )  # fmt: skip
        bench.gpu.run()
        bench.device.host_writes(table)
        table.view(np.int64)[:] = operands
        gate[0] = 1
        bench.finish(bench.stream)
        assert (bench.device.read(operands[2], left.nbytes).view(np.float32) == 3).all()


def test_a_kernel_in_place_is_no_race_but_on_two_streams_it_is() -> None:
    bench = Bench()
    data = np.ones(COUNT, np.float32)
    left, right = bench.place(data), bench.place(data)
    bench.launcher.launch(SUM, [left, right], [left], COUNT, bench.stream)
    bench.finish(bench.stream)
    assert (bench.device.read(left, data.nbytes).view(np.float32) == 2).all()

    bench.launcher.launch(SUM, [left, right], [left], COUNT, bench.stream)
    bench.launcher.launch(SUM, [left, right], [right], COUNT, bench.device.make_stream())
    with pytest.raises(Race, match="kernel r2ccl_sum_float32_2_1"):
        bench.gpu.run()
