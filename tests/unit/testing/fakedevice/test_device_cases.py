"""The fake GPU keeps what `Device` promises, as a GPU does in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.device_cases import DeviceCases

from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, FakeKernel, Grid


def add(grid: Grid, out: int, source: int, count: int, step: int) -> None:
    values = grid.read(source, 4 * count).view(np.uint32)
    grid.write(out, 4 * count).view(np.uint32)[:] = values + np.uint32(step)


class TestFakeDevice(DeviceCases):
    @pytest.fixture(params=range(5))
    def device(self, request: pytest.FixtureRequest) -> Iterator[FakeDevice]:
        made = FakeDevice(FakeGpu(request.param))
        made.kernels["add"] = FakeKernel(add)
        yield made
        made.close()
