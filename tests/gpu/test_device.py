"""What `Device` promises, on a GPU."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_cases import NBYTES, PTX, TIMEOUT_S, Bench, DeviceCases, random_bytes

from r2ccl.device.bindings import Cuda
from r2ccl.device.driver import CudaDevice
from r2ccl.errors import InternalError, TransportError, TransportTimeout

ORDINAL = 0
ROOT = Path(__file__).parents[2]

try:
    Cuda()
except TransportError as exc:
    pytest.skip(f"a device that is a GPU: {exc}", allow_module_level=True)


class TestCudaDevice(DeviceCases):
    @pytest.fixture
    def device(self) -> Iterator[CudaDevice]:
        made = CudaDevice(ORDINAL, close_timeout_s=TIMEOUT_S)
        yield made
        made.close()

    def test_what_was_made_is_freed_once(self, device: CudaDevice) -> None:
        address = device.allocate(NBYTES)
        device.free(address)
        with pytest.raises(InternalError):
            device.free(address)

    def test_a_thread_without_a_context_has_none_afterwards(self, device: CudaDevice) -> None:
        found: list[int] = []

        def work() -> None:
            cuda = Cuda()
            device.free(device.allocate(NBYTES))
            found.append(int(cuda.call("cuCtxGetCurrent")))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(TIMEOUT_S)
        assert found == [0]

    def test_what_the_drivers_compiler_refuses_is_told(self, device: CudaDevice) -> None:
        with pytest.raises(TransportError, match=r"kernel add .*(line \d+|ptxas)"):
            device.load(PTX.replace(b"add.u32", b"add.nonsense"), "add")

    def test_another_process_maps_an_allocation_and_writes_to_it(self, device: CudaDevice) -> None:
        bench, data = Bench(device), random_bytes(8)
        address = bench.upload(data)
        handle, offset = device.export(address + 256)
        assert len(handle) == 64
        command = [sys.executable, str(Path(__file__).with_name("device_peer.py")), str(ORDINAL),
                   handle.hex(), str(offset), str(NBYTES - 256)]  # fmt: skip
        peer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=100.0,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert peer.returncode == 0, peer.stderr
        assert peer.stdout.strip() == hashlib.sha256(data[256:]).hexdigest()

        found = bench.download(address)
        assert (found[:256] == data[:256]).all()
        assert (found[256:] == 255 - data[256:]).all()

    def test_memory_of_the_stream_ordered_pool_has_no_handle(self, device: CudaDevice) -> None:
        cuda = Cuda()
        with device.current():
            address = int(cuda.call("cuMemAllocAsync", NBYTES, 0))
            try:
                with pytest.raises(TransportError, match="stream-ordered pool") as caught:
                    device.export(address)
            finally:
                cuda.call("cuMemFreeAsync", address, 0)
        assert caught.value.status == "NO_IPC"

    def test_closing_waits_no_longer_than_it_may_and_can_be_tried_again(self) -> None:
        device = CudaDevice(ORDINAL, close_timeout_s=0.05)
        words = device.allocate_pinned(4096).view(np.uint32)
        device.wait_word(device.make_stream(), words.ctypes.data, 1)
        try:
            with pytest.raises(TransportTimeout, match="has not ended"):
                device.close()
        finally:
            words[0] = 1
        device.close()
