"""Preflight of the GPU bench: lists in seconds what a machine has and lacks, and how to get it.

``python bench/gpu.py --preflight`` prints one line per check: ``ok``, ``missing`` or ``failed``,
the name of the check, and what was found or what to do. The exit status is 1 if something is not
``ok`` that r2ccl cannot do without, and 0 otherwise. Only the standard library is imported at
first, because common CUDA images lack some packages that r2ccl needs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_ORDINAL = 0
#: Packages that r2ccl needs on a GPU, and packages that only comparisons and tests need.
_NEEDED = ("numpy", "ml_dtypes", "msgspec", "psutil", "cuda-core", "cuda-bindings")
_COMPARED = ("numba", "cupy-cuda13x", "cupy-cuda12x", "torch", "pytest")
#: Attributes of the device that decide which backends work.
_ATTRIBUTES = (
    "CAN_USE_64_BIT_STREAM_MEM_OPS",
    "GPU_DIRECT_RDMA_SUPPORTED",
    "DMA_BUF_SUPPORTED",
    "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    "UNIFIED_ADDRESSING",
    "COMPUTE_MODE",
    "MULTIPROCESSOR_COUNT",
)
#: CU_COMPUTEMODE_EXCLUSIVE_PROCESS, a value of COMPUTE_MODE: one process at a time.
_EXCLUSIVE = 3
_LIBNVVM = "nvvm/lib64/libnvvm.so"
#: Folders in which installers put the CUDA toolkit.
_TOOLKIT = "/usr/local/cuda"
#: Packages that contain libnvvm, for CUDA 13 and 12.
_NVVM_PACKAGES = ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12")


class Finding(NamedTuple):
    """Result of a check; ``is_needed`` is True if r2ccl cannot do without."""

    state: str
    name: str
    text: str
    is_needed: bool = True

    def __str__(self) -> str:
        return f"{self.state:8}{self.name:12}{' '.join(self.text.split())}"


def packages() -> Iterator[Finding]:
    """List the versions of packages, and those that are missing."""
    for name in (*_NEEDED, *_COMPARED):
        is_needed = name in _NEEDED
        try:
            yield Finding("ok", "package", f"{name} {importlib.metadata.version(name)}", is_needed)
        except importlib.metadata.PackageNotFoundError:
            how = f"pip install {name}; offline, bring its wheel"
            yield Finding("missing", "package", f"{name}: {how}", is_needed)


def torch() -> Iterator[Finding]:
    """Report the CUDA version that torch was built for; nothing if torch is missing."""
    try:
        import torch
    except ImportError:
        return
    built = torch.version.cuda
    if built is None:
        yield Finding("failed", "torch", "was built without CUDA: install a CUDA wheel", False)
    else:
        yield Finding("ok", "torch", f"was built for CUDA {built}", False)


def compiler() -> Iterator[Finding]:
    """Look for numba-cuda and libnvvm, which compile the kernels that only the bench launches."""
    try:
        version = importlib.metadata.version("numba-cuda")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("missing", "compiler", "numba-cuda: pip install 'numba-cuda[cu13]'", False)
        return
    places = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [each for each in (*places, _TOOLKIT) if each and Path(each, _LIBNVVM).exists()]
    found += [name for name in _NVVM_PACKAGES if _is_installed(name)]
    if not found:
        how = "pip install 'numba-cuda[cu13]' or [cu12], or set CUDA_HOME to a CUDA toolkit"
        text = f"libnvvm, which numba-cuda {version} needs: {how}"
        yield Finding("missing", "compiler", text, False)
        return
    text = f"numba-cuda {version}; libnvvm in {found[0]}"
    if found == [_TOOLKIT] and _TOOLKIT not in places:
        text += f": export CUDA_HOME={_TOOLKIT} if no kernel compiles"
    yield Finding("ok", "compiler", text, False)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def has_mps() -> bool:
    """Return whether the multi-process service of NVIDIA runs."""
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(directory, "control").exists()


def mps() -> Iterator[Finding]:
    """Tell whether the multi-process service of NVIDIA runs."""
    text = "runs" if has_mps() else "is off: ranks on one GPU take turns"
    yield Finding("ok", "MPS", text, False)


def device() -> Iterator[Finding]:
    """Open the GPU, list its attributes, and load one kernel."""
    from r2ccl.device.bindings import Cuda
    from r2ccl.device.driver import CudaDevice
    from r2ccl.dtypes import CODES, dtype_of
    from r2ccl.kernels.cuda import Form
    from r2ccl.kernels.cuda.ptx import ptx_of
    from r2ccl.types import ReduceOp

    cuda = Cuda()
    version = cuda.call("cuDriverGetVersion")
    yield Finding("ok", "driver", f"CUDA {version // 1000}.{version % 1000 // 10}")
    handle = cuda.call("cuDeviceGet", _ORDINAL)
    told = ", ".join(f"{name} {cuda.device_attribute(name, handle)}" for name in _ATTRIBUTES)
    gpu = CudaDevice(_ORDINAL)
    try:
        capability = ".".join(map(str, gpu.capability))
        yield Finding("ok", "device", f"{gpu.bus_id}, compute capability {capability}, {told}")
        mode = cuda.device_attribute("COMPUTE_MODE", handle)
        if mode == _EXCLUSIVE and not has_mps():
            yield Finding(
                "failed",
                "mode",
                "the GPU is in exclusive mode, so ranks cannot share it: run nvidia-smi -c 0, or "
                "start nvidia-cuda-mps-control -d",
                False,
            )
        if not gpu.waits_on_memory:
            yield Finding(
                "failed", "streams", "cannot wait on memory: calls with GPU arrays are refused"
            )
        begun_s = time.monotonic()
        float32 = next(code for code in CODES.values() if dtype_of(code).name == "float32")
        ptx = ptx_of(Form(dtype_code=float32, op=ReduceOp.SUM), gpu.capability, None)
        gpu.load(ptx.text, ptx.entry)
        took_s = time.monotonic() - begun_s
        yield Finding("ok", "kernel", f"{ptx.origin}, and loaded in {took_s:.1f} s")
    finally:
        gpu.close()


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (packages, compiler, torch, mps, device)


def findings(checks: tuple[Callable[[], Iterator[Finding]], ...] = CHECKS) -> Iterator[Finding]:
    """Yield the results of all checks; a check that raises is one that failed."""
    for check in checks:
        try:
            yield from check()
        except Exception as exc:  # of any library
            yield Finding("failed", check.__name__, f"{type(exc).__name__}: {exc}")


def main(print_line: Callable[[Any], None] = print) -> int:
    """Print all findings; return the exit status."""
    status = 0
    for finding in findings():
        print_line(finding)
        sys.stdout.flush()
        if finding.is_needed and finding.state != "ok":
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
