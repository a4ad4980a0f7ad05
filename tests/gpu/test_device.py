"""What `Device` promises, on a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.device_cases import NBYTES, PTX, TIMEOUT_S, Bench, DeviceCases, random_bytes

from r2ccl.device.bindings import Cuda
from r2ccl.device.driver import CudaDevice
from r2ccl.device.numbering import ordinal_of
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

    def test_its_bus_id_has_its_number(self, device: CudaDevice) -> None:
        assert re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", device.bus_id)
        assert ordinal_of(device.bus_id) == ORDINAL
        assert ordinal_of("ffff:ff:1f.7") is None

    def test_what_nics_write_is_flushed_or_it_says_that_it_cannot_be(
        self, device: CudaDevice
    ) -> None:
        options = Cuda().device_attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", ORDINAL)
        if device.reorders_remote_writes and not options & 1:
            with pytest.raises(TransportError, match="supports no flush") as caught:
                device.flush_remote_writes()
            assert caught.value.status == "NO_FLUSH"
        else:
            device.flush_remote_writes()

    def test_the_drivers_flush_can_be_called_as_it_is(self, device: CudaDevice) -> None:
        """Also where the GPU needs none: then it does nothing."""
        cuda = Cuda()
        if not cuda.device_attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", ORDINAL) & 1:
            pytest.skip("a GPU whose host can flush what NICs write")
        target = cuda.api.CUflushGPUDirectRDMAWritesTarget
        scope = cuda.api.CUflushGPUDirectRDMAWritesScope
        with device.current():
            for each in scope:
                cuda.call(
                    "cuFlushGPUDirectRDMAWrites",
                    target.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                    each,
                )

    def test_it_reaches_itself(self, device: CudaDevice) -> None:
        again = CudaDevice(ORDINAL, close_timeout_s=TIMEOUT_S)
        device.reach(again)
        again.close()

    def test_kernels_read_and_write_the_memory_of_a_peer(self, device: CudaDevice) -> None:
        if int(Cuda().call("cuDeviceGetCount")) < 2:
            pytest.skip("a second GPU")
        peer = CudaDevice(ORDINAL + 1, close_timeout_s=TIMEOUT_S)
        try:
            if not Cuda().call("cuDeviceCanAccessPeer", ORDINAL, ORDINAL + 1):
                with pytest.raises(TransportError, match="cannot reach the memory") as caught:
                    device.reach(peer)
                assert caught.value.status == "NO_PEER_ACCESS"
                pytest.skip("a second GPU that the first reaches")
            bench, theirs, data = Bench(device), Bench(peer), random_bytes(9)
            before = theirs.upload(data)
            device.reach(peer)
            device.reach(peer)  # as if another library had done it
            after = peer.allocate(NBYTES)
            count = NBYTES // 4
            for target, source in ((after, before), (before, after)):
                device.launch(
                    device.load(PTX, "add"), -(-count // 256), 256, bench.stream,
                    [(target, ctypes.c_uint64), (source, ctypes.c_uint64),
                     (count, ctypes.c_uint64), (1, ctypes.c_uint32)],
                )  # fmt: skip
            bench.finish()
            assert (theirs.download(before).view(np.uint32) == data.view(np.uint32) + 2).all()
        finally:
            peer.close()

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

    def test_closing_is_bounded_and_can_be_tried_again(self) -> None:
        device = CudaDevice(ORDINAL, close_timeout_s=0.05)
        words = device.allocate_pinned(4096).view(np.uint32)
        device.wait_word(device.make_stream(), words.ctypes.data, 1)
        try:
            with pytest.raises(TransportTimeout, match="did not end"):
                device.close()
        finally:
            words[0] = 1
        device.close()
