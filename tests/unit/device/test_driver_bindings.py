"""The names and numbers that the CUDA driver is called with are those of NVIDIA's package."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cuda_script import Result, Script, real_bindings
from support.cuda_script import api as api  # the fixture

from r2ccl.device.base import Device
from r2ccl.device.bindings import Cuda
from r2ccl.device.driver import CudaDevice
from r2ccl.errors import TransportError
from r2ccl.testing.fakedevice import FakeDevice
from r2ccl.topology.gpus import BindingsSource

SOURCES = [
    Path(__file__).parents[3] / "r2ccl" / each
    for each in (
        "device/bindings.py",
        "device/context.py",
        "device/driver.py",
        "device/numbering.py",
        "device/remote.py",
        "transport/verbs/cuda.py",
    )
]


def test_the_calls_are_shown_to_nvidias_package() -> None:
    """Here, not where there is a driver, or no package: of all the tests with a `Script`."""
    real, why_not = real_bindings()
    if real is None:
        pytest.skip(why_not)
    device = Script(real)
    with pytest.raises(TypeError):
        device.cuMemcpyAsync("no address", 2, 3, 4)


def test_the_identifier_is_of_the_mig_instance_with_cuda_12_too(api: Script) -> None:
    instance: Any = SimpleNamespace(bytes=bytes(range(16, 32)))
    whole: Any = SimpleNamespace(bytes=bytes(range(16)))
    for name, found in (("cuDeviceGetUuid_v2", instance), ("cuDeviceGetUuid", whole)):
        setattr(api, name, lambda device, found=found: (Result.CUDA_SUCCESS, found))
    assert CudaDevice(1).uuid == instance.bytes
    assert BindingsSource().uuid(1) == f"GPU-{uuid.UUID(bytes=instance.bytes)}"


def test_every_function_and_constant_exists_in_nvidias_package() -> None:
    try:
        real = importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        pytest.skip(f"cuda.bindings cannot be imported: {exc}")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    functions = {text for text in texts if re.fullmatch(r"cu[A-Z]\w+", text)}
    assert len(functions) > 30
    assert {name for name in functions if not hasattr(real, name)} == set()
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    enums = {name for name in names if re.fullmatch(r"CU[a-z]\w+|CUDA_MEMCPY2D", name)}
    assert {name for name in enums if not hasattr(real, name)} == set()
    members = {name for name in names if re.fullmatch(r"CU_\w+|CUDA_(ERROR|SUCCESS)\w*", name)}
    known = {name for each in enums for name in dir(getattr(real, each))}
    assert members - known == set()
    for path, tree in zip(SOURCES, trees, strict=True):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                check_attribute(real, node, path)


def check_attribute(real: Any, call: ast.Call, path: Path) -> None:
    """Hold the names of attributes, which are put together, against the package."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id  # type: ignore[union-attr]
    kinds = {
        "_attribute": ("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_"),
        "device_attribute": ("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_"),
        "attribute": ("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_"),
        "pointer_attribute": ("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_"),
        "_pointer": ("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_"),
    }
    if called in kinds and call.args and isinstance(call.args[0], ast.Constant):
        enum_name, prefix = kinds[called]
        assert hasattr(getattr(real, enum_name), prefix + call.args[0].value), path


def test_the_numbers_in_the_source_are_those_of_nvidias_package() -> None:
    try:
        real = importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        pytest.skip(f"cuda.bindings cannot be imported: {exc}")
    driver = importlib.import_module("r2ccl.device.driver")
    assert driver._NON_BLOCKING == real.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert driver._NO_TIMING == real.CUevent_flags.CU_EVENT_DISABLE_TIMING
    assert real.CU_MEMHOSTALLOC_PORTABLE | real.CU_MEMHOSTALLOC_DEVICEMAP == 3
    assert real.CU_MEMHOSTREGISTER_PORTABLE | real.CU_MEMHOSTREGISTER_DEVICEMAP == 3
    assert driver._PORTABLE_AND_MAPPED == 3
    assert driver._PEER_ACCESS == real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    words = real.CUstreamWriteValue_flags, real.CUstreamWaitValue_flags
    assert driver._AFTER_A_FENCE == words[0].CU_STREAM_WRITE_VALUE_DEFAULT
    assert driver._GREATER_OR_EQUAL == words[1].CU_STREAM_WAIT_VALUE_GEQ
    remote = importlib.import_module("r2ccl.device.remote")
    ordering, scopes = real.CUGPUDirectRDMAWritesOrdering, real.CUflushGPUDirectRDMAWritesScope
    assert ordering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE < remote._OWNER
    assert remote._OWNER == ordering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    assert remote._OWNER == scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    assert remote._ALL_DEVICES == ordering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES
    assert remote._ALL_DEVICES == scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
    options = real.CUflushGPUDirectRDMAWritesOptions
    assert remote._BY_HOST == options.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
    for each in Result:
        assert getattr(real.CUresult, each.name) == each


@pytest.mark.parametrize("implementation", [CudaDevice, FakeDevice])
def test_it_has_the_methods_of_a_device(implementation: type) -> None:
    for name, wanted in vars(Device).items():
        if not name.startswith("_"):
            given = getattr(implementation, name)
            assert isinstance(given, property) == isinstance(wanted, property), name
            if not isinstance(wanted, property):
                assert list(inspect.signature(given).parameters) == list(
                    inspect.signature(wanted).parameters
                ), name


def test_a_function_that_an_older_driver_lacks_is_named(api: Script) -> None:
    cuda = Cuda()

    def missing(*arguments: Any) -> Any:
        raise RuntimeError('Function "cuFuncLoad" not found')

    api.__dict__["cuFuncLoad"] = missing
    with pytest.raises(TransportError, match="no CUDA driver with cuFuncLoad") as caught:
        cuda.call("cuFuncLoad", 1)
    assert caught.value.status == "NO_CUDA"
