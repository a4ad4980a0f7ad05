"""The GPU that these tests run on, or the reason why they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from r2ccl.device.base import Stream
from r2ccl.device.driver import CudaDevice
from r2ccl.errors import TransportError


@pytest.fixture(scope="session")
def device() -> Iterator[CudaDevice]:
    """Return the first GPU; only where there is none may a test on it be skipped."""
    try:
        made = CudaDevice(0)
    except TransportError as exc:
        if exc.status != "NO_CUDA":
            raise
        pytest.skip(str(exc))
    yield made
    made.close()


@pytest.fixture(scope="session")
def stream(device: CudaDevice) -> Stream:
    """Return a stream of that GPU."""
    return device.make_stream()
