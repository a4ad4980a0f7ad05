"""Which GPU is which, whose memory it reaches, and when what NICs wrote to it is flushed."""

from __future__ import annotations

import types
from typing import Any

import pytest
from support.cuda_script import OURS, THEIRS, Result, Script
from support.cuda_script import api as api  # the fixtures
from support.cuda_script import clock as clock
from support.cuda_script import device as device

from r2ccl.device.driver import CudaDevice
from r2ccl.device.numbering import ordinal_of
from r2ccl.errors import InternalError, TransportError
from r2ccl.topology.machine import parse_bus_id

#: Handle of the context of another GPU.
PEERS = 0x99


def peer_of(api: Script) -> CudaDevice:
    """Another GPU, in the same process."""
    api.results["cuDeviceGet"] = "device 2" if api.real is None else api.real.CUdevice(2)
    api.results["cuDeviceGetUuid"] = types.SimpleNamespace(bytes=bytes(range(16, 32)))
    api.results["cuDevicePrimaryCtxRetain"] = PEERS
    made = CudaDevice(2)
    api.calls.clear()
    return made


# Memory that NICs write


def test_what_nics_wrote_is_flushed_for_its_own_gpu(api: Script) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = 0
    device = CudaDevice(1)
    api.calls.clear()

    device.flush_remote_writes()

    ((name, *given),) = api.work()
    assert (api.calls[0], api.calls[-1]) == (("cuCtxPushCurrent", OURS), ("cuCtxPopCurrent",))
    assert name == "cuFlushGPUDirectRDMAWrites"
    assert [str(getattr(each, "name", each)) for each in given] == [
        "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX",
        "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER",
    ]
    api.failures[name] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(TransportError, match=f"{name} failed"):
        device.flush_remote_writes()


def test_a_gpu_that_orders_what_nics_write_is_not_asked(api: Script, device: CudaDevice) -> None:
    api.attributes["GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"] = 0

    device.flush_remote_writes()

    assert api.calls == []


@pytest.mark.parametrize("options", [0, 2])
def test_a_gpu_that_its_host_cannot_flush_says_so(api: Script, options: int) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = 0
    api.attributes["GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"] = options
    device = CudaDevice(1)
    api.calls.clear()

    with pytest.raises(TransportError, match=r"GPU 1 reorders .* R2CC_HCA=none") as caught:
        device.flush_remote_writes()
    assert caught.value.status == "NO_FLUSH"
    assert api.calls == []


@pytest.mark.parametrize("ordering", [0, 100])
def test_a_gpu_whose_writes_others_would_miss_is_not_reached(api: Script, ordering: int) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = ordering
    api.attributes["GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"] = 0
    device, peer = CudaDevice(1), peer_of(api)

    with pytest.raises(TransportError, match=r"other GPUs may miss NIC writes") as caught:
        device.reach(peer)
    assert caught.value.status == "NO_FLUSH"
    assert peer.reorders_remote_writes == (ordering == 0)


# Which GPU is which, and whose memory it reaches


@pytest.mark.parametrize(
    ("told", "spelt"),
    [
        (b"0000:1B:00.0\0", "0000:1b:00.0"),
        (b"00000000:1b:00.0\0", "0000:1b:00.0"),
        (b"10000:E1:00.0\0     ", "10000:e1:00.0"),
        (b"0002:0a:1f.1", "0002:0a:1f.1"),
    ],
)
def test_a_bus_id_is_spelt_as_the_topology_does(api: Script, told: bytes, spelt: str) -> None:
    api.results["cuDeviceGetPCIBusId"] = told

    assert CudaDevice(1).bus_id == parse_bus_id(spelt) == spelt


def test_a_bus_id_has_the_number_that_it_has_in_this_process(api: Script) -> None:
    buses = [b"0000:1B:00.0\0", b"0000:9A:00.0\0"]
    api.results["cuDeviceGetCount"] = 2
    api.__dict__["cuDeviceGet"] = lambda ordinal: (Result.CUDA_SUCCESS, ordinal)
    api.__dict__["cuDeviceGetPCIBusId"] = lambda _, each: (Result.CUDA_SUCCESS, buses[each])

    assert [ordinal_of(each) for each in ("0000:1b:00.0", "0000:9a:00.0")] == [0, 1]
    assert ordinal_of("0000:9b:00.0") is None
    assert ordinal_of("no bus id") is None


def test_a_gpu_is_let_reach_its_peers_memory(api: Script, device: CudaDevice) -> None:
    ours = api.results["cuDeviceGet"]
    peer = peer_of(api)

    device.reach(peer)

    assert api.work() == [
        ("cuDeviceCanAccessPeer", ours, api.results["cuDeviceGet"]),
        ("cuCtxEnablePeerAccess", PEERS, 0),
    ]
    assert api.named("cuCtxPushCurrent") == [("cuCtxPushCurrent", OURS)]
    assert api.current == [THEIRS]


def test_peer_access_enabled_by_another_library_is_no_failure(
    api: Script, device: CudaDevice
) -> None:
    peer = peer_of(api)
    api.failures["cuCtxEnablePeerAccess"] = Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

    device.reach(peer)
    device.reach(peer)

    assert len(api.named("cuCtxEnablePeerAccess")) == 2
    assert api.current == [THEIRS]


def test_a_driver_that_refuses_peers_says_so(api: Script, device: CudaDevice) -> None:
    peer = peer_of(api)
    api.failures["cuCtxEnablePeerAccess"] = Result.CUDA_ERROR_TOO_MANY_PEERS

    with pytest.raises(TransportError, match="cuCtxEnablePeerAccess failed") as caught:
        device.reach(peer)
    assert caught.value.status == "CUDA_ERROR_TOO_MANY_PEERS"
    assert not peer.reorders_remote_writes


def test_gpus_that_no_way_connects_say_so(api: Script, device: CudaDevice) -> None:
    peer = peer_of(api)
    api.results["cuDeviceCanAccessPeer"] = 0

    with pytest.raises(TransportError, match="GPU 1 cannot reach the memory of GPU 2") as caught:
        device.reach(peer)
    assert caught.value.status == "NO_PEER_ACCESS"
    assert not api.named("cuCtxEnablePeerAccess")


def test_a_gpu_reaches_its_own_memory(api: Script, device: CudaDevice) -> None:
    again = CudaDevice(1)
    api.calls.clear()

    device.reach(again)

    assert api.calls == []


def test_only_an_open_gpu_of_cudas_is_reached(api: Script, device: CudaDevice) -> None:
    peer = peer_of(api)
    peer.close()
    with pytest.raises(InternalError, match="GPU 2 was used after it was closed"):
        device.reach(peer)
    other: Any = types.SimpleNamespace(uuid=bytes(16))
    with pytest.raises(InternalError, match=r"GPU 1 cannot reach .* not a CudaDevice"):
        device.reach(other)


def test_nic_writes_to_memory_others_reach_are_flushed_for_all(
    api: Script, device: CudaDevice
) -> None:
    peer = peer_of(api)
    assert not peer.reorders_remote_writes

    device.reach(peer)

    assert (peer.reorders_remote_writes, device.reorders_remote_writes) == (True, False)
    peer.flush_remote_writes()
    ((_, _, scope),) = api.named("cuFlushGPUDirectRDMAWrites")
    assert str(getattr(scope, "name", scope)) == "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES"


def test_a_gpu_that_keeps_the_order_for_all_is_not_flushed(api: Script, device: CudaDevice) -> None:
    api.attributes["GPU_DIRECT_RDMA_WRITES_ORDERING"] = 200
    peer = peer_of(api)

    device.reach(peer)
    peer.flush_remote_writes()

    assert not peer.reorders_remote_writes
    assert not api.named("cuFlushGPUDirectRDMAWrites")
