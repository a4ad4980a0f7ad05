"""Diagnosis of a machine's GPUs for collectives on their memory.

Each check is a pure function that makes a finding from `CudaFacts`, which `r2ccl.cli.gpufacts`
collects, and from the settings. Invariants: a machine without a GPU has one finding; a finding has
a fix if and only if it is a warning or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from r2ccl.cli.cards import Card, CudaFacts
from r2ccl.cli.diagnosis import DoctorFinding
from r2ccl.config import Config
from r2ccl.gpu.ipc_board import MOST_RANKS
from r2ccl.kernels.cuda.machine import TARGET

#: First CUDA version that can load a kernel before its launch (cuFuncLoad: cudaTypedefs.h).
_OLDEST_DRIVER = 12040

#: Values of CUDA_VISIBLE_DEVICES that hide all GPUs intentionally.
_HIDING = ("", "-1")

_INSTALL = "pip install 'r2ccl[gpu]'"
_CONTAINER = "in a container, use NVIDIA's container toolkit (--gpus all)"
_CRASH = "look for NVRM and Xid in dmesg; check that nvidia-smi answers; reload the driver"
_DIRECT = (
    "install the open kernel modules of the driver, which export dma-bufs, or modprobe "
    "nvidia_peermem"
)
_NIC = "see the section verbs below, and dmesg"

#: Fix for each error that the driver reports, by its name in CUresult (CUDA Driver API).
_FIXES = {
    "CUDA_ERROR_STUB_LIBRARY": "remove the toolkit's stubs directory from LD_LIBRARY_PATH",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        "another process uses the GPU exclusively: end it, or run nvidia-smi -c 0"
    ),
    "CUDA_ERROR_OUT_OF_MEMORY": "end the processes that use its memory; nvidia-smi lists them",
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "systemctl start nvidia-fabricmanager, in the driver's version: NVSwitches need it"
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "reboot to load the kernel modules of libcuda's version; in a container, use the host's "
        "libcuda"
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "remove CUDA's compat directory from LD_LIBRARY_PATH: this GPU needs the driver's libcuda"
    ),
    "CUDA_ERROR_UNKNOWN": (
        "nvidia-modprobe -u -c 0; in a container, pass in /dev/nvidia-uvm; after a suspend, reload "
        "nvidia_uvm"
    ),
}


def examine_gpus(facts: CudaFacts, config: Config) -> tuple[DoctorFinding, ...]:
    """Return the findings about all GPUs; a single finding if CUDA lists no GPU."""
    died = (_check_end(facts),) if facts.died else ()
    if not facts.gpus:
        return died or (_absence(facts),)
    findings = (check_driver(facts), *map(check_card, facts.gpus))
    opened = [card for card in facts.gpus if card.open_error == ""]
    if not opened:
        return (*died, *findings)
    return (
        *died,
        *findings,
        check_streams(opened),
        check_kernels(facts, opened),
        check_ipc(opened, config),
        check_dmabuf(opened),
        check_peermem(facts),
        check_nics(opened),
        check_one_host(opened, config),
        check_hosts(facts, opened, config),
    )


def _check_end(facts: CudaFacts) -> DoctorFinding:
    says = f"the process that tests GPUs ended while {facts.doing or 'exiting'}: {facts.died}"
    return DoctorFinding("probe", "error", says, _CRASH)


def _absence(facts: CudaFacts) -> DoctorFinding:
    """Return the finding that says why no GPU can be used.

    The level of the finding is ``skipped`` if no GPU seems to exist, or if the only reason is that
    CUDA_VISIBLE_DEVICES hides all GPUs intentionally. Otherwise the finding is a warning.
    """
    is_broken = facts.status.startswith("CUDA_ERROR")
    is_installed = bool(facts.module or (facts.driver and not facts.bindings))
    is_there = bool(facts.pci) or is_installed or is_broken
    if not facts.bindings:
        why, fix = "cuda.bindings is not installed", _INSTALL
    elif not facts.driver:
        why, fix = "there is no CUDA driver", f"install NVIDIA's driver; {_CONTAINER}"
    elif is_broken:
        why, fix = facts.error, _fix_of(facts.error, _CRASH)
    elif facts.visible is not None:
        why = f"CUDA sees none with CUDA_VISIBLE_DEVICES={facts.visible}"
        fix = "correct the variable, or unset it"
        is_there = is_there and facts.visible not in _HIDING
    else:
        why = facts.error or "CUDA sees none"
        fix = f"check nvidia-smi, and that this user may open /dev/nvidia*; {_CONTAINER}"
    if not is_there:
        return DoctorFinding("gpus", "skipped", f"none: {why}")
    who = ", ".join(facts.pci) or "GPUs"
    return DoctorFinding("gpus", "warning", f"{who} cannot be used: {why}", fix)


def check_driver(facts: CudaFacts) -> DoctorFinding:
    """Report the versions of driver and bindings; check that the driver is new enough."""
    says = f"CUDA {_version(facts.driver)}, cuda.bindings {facts.bindings}"
    if facts.module:
        says += f", {facts.module}"
    if facts.driver >= _OLDEST_DRIVER:
        return DoctorFinding("driver", "ok", says)
    needed = _version(_OLDEST_DRIVER)
    says = f"{says}: kernels cannot be loaded"
    return DoctorFinding("driver", "error", says, f"install a driver of CUDA {needed} or later")


def check_card(card: Card) -> DoctorFinding:
    """Report the properties of a GPU; check that a context and an allocation can be made on it."""
    check = f"gpu {card.ordinal}"
    says = (
        f"{card.name} at {card.bus_id}: compute capability {_capability(card.capability)}, "
        f"{card.nsms} multiprocessors, {card.memory_nbytes / (1 << 30):.1f} GiB"
    )
    if card.open_error is None:
        return DoctorFinding(check, "skipped", f"{says}; it was not opened")
    if card.open_error:
        says = f"{says}; cannot be used: {card.open_error}"
        return DoctorFinding(check, "error", says, _fix_of(card.open_error, _CRASH))
    return DoctorFinding(check, "ok", says)


def check_streams(cards: Sequence[Card]) -> DoctorFinding:
    """Check that streams can wait on memory values, which collectives on GPU arrays require."""
    lacking = [card for card in cards if not card.waits_on_memory]
    if not lacking:
        return DoctorFinding("streams", "ok", "can wait on memory values")
    return DoctorFinding(
        "streams",
        "error",
        f"streams of {_named(lacking)} cannot wait on memory values, so collectives "
        "refuse GPU arrays",
        "copy the arrays to the host, or use another GPU",
    )


def check_kernels(facts: CudaFacts, cards: Sequence[Card]) -> DoctorFinding:
    """Check that a kernel was loaded, and report whether it was prebuilt."""
    failed = [card for card in cards if card.kernel_error]
    if failed:
        says = _by_gpu(((card, card.kernel_error) for card in failed), cards)
        return DoctorFinding("kernels", "error", says, _kernel_fix(facts, failed))
    if any(card.kernel_error is None for card in cards):
        return DoctorFinding("kernels", "skipped", "were not tried")
    return DoctorFinding("kernels", "ok", f"{facts.kernel_origin}, and loaded")


def check_ipc(cards: Sequence[Card], config: Config) -> DoctorFinding:
    """Check that another process can map an allocation."""
    failed = [card for card in cards if card.ipc_error]
    if failed:
        why = _by_gpu(((card, card.ipc_error) for card in failed), cards)
        says = f"another process cannot map device memory: {why}"
        if config.ipc == "0":
            return DoctorFinding("ipc", "skipped", says)
        if "CUDA_ERROR_DEVICE_UNAVAILABLE" in why:  # this process itself uses the GPU
            fix = (
                "run nvidia-smi -c 0, or start nvidia-cuda-mps-control -d: in exclusive mode, only "
                "one process may use a GPU, and this test needs two"
            )
        else:
            fix = (
                "let the containers of a host's ranks share IPC and PID namespaces (--ipc=host "
                "--pid=host), or set R2CC_IPC=0"
            )
        return DoctorFinding("ipc", "warning", says, fix)
    if any(card.ipc_error is None for card in cards):
        return DoctorFinding("ipc", "skipped", "was not tried")
    return DoctorFinding("ipc", "ok", "another process can map device memory")


def check_dmabuf(cards: Sequence[Card]) -> DoctorFinding:
    """Report whether an allocation could be exported as a dma-buf.

    A failure is not a warning here: `check_nics` decides whether it matters.
    """
    failed = [card for card in cards if card.dmabuf_error]
    if failed:
        outcomes = (
            (card, f"{card.dmabuf_error} (DMA_BUF_SUPPORTED is {int(card.has_dmabuf)})")
            for card in failed
        )
        return DoctorFinding("dmabuf", "skipped", f"no export: {_by_gpu(outcomes, cards)}")
    if any(card.dmabuf_error is None for card in cards):
        return DoctorFinding("dmabuf", "skipped", "was not tried")
    refused = [card for card in cards if not (card.has_dmabuf and card.is_rdma_capable)]
    if refused:
        why = _by_gpu(((card, _attributes(card)) for card in refused), cards)
        says = "device memory was exported, but the driver reports it as unusable by NICs"
        return DoctorFinding("dmabuf", "skipped", f"{says}: {why}")
    return DoctorFinding("dmabuf", "ok", "device memory was exported")


def check_peermem(facts: CudaFacts) -> DoctorFinding:
    """Report whether nvidia_peermem, which resolves device pointers for NICs, is loaded."""
    if facts.has_peermem:
        return DoctorFinding("peermem", "ok", "nvidia_peermem is loaded")
    return DoctorFinding("peermem", "skipped", "nvidia_peermem is not loaded")


def check_nics(cards: Sequence[Card]) -> DoctorFinding:
    """Report the method by which each RDMA port that is a rail registered device memory."""
    found: dict[str, list[str]] = {}
    for label in dict.fromkeys(label for card in cards for label, _ in card.nics):
        routes = ((card, str(dict(card.nics)[label])) for card in cards if card.nics)
        said = _by_gpu(routes, cards)
        found.setdefault(said, []).append(label)
    if not found:
        return DoctorFinding("nics", "skipped", "no RDMA port that is a rail was tried")
    says = "; ".join(f"{', '.join(labels)}: {said}" for said, labels in found.items())
    staged = [card for card in cards if card.route is not None and card.route.method == "staging"]
    if not staged:
        return DoctorFinding("nics", "ok", f"reach device memory: {says}")
    says = f"do not all reach device memory: {says}"
    if not any(card.is_rdma_capable for card in staged):  # no kernel module would change that
        return DoctorFinding("nics", "skipped", says)
    return DoctorFinding("nics", "warning", says, _DIRECT if "peermem: " in says else _NIC)


def check_one_host(cards: Sequence[Card], config: Config) -> DoctorFinding:
    """Report how data moves between the GPUs of ranks on one host."""
    lacking = [card for card in cards if not card.waits_on_memory]
    if lacking:
        return DoctorFinding(
            "one host", "skipped", f"no collectives on memory of {_named(lacking)}"
        )
    staged = f"through pinned host memory ({_staging_size(config)})"
    if config.ipc == "0":
        return DoctorFinding("one host", "ok", f"{staged}: R2CC_IPC=0")
    if not any(card.ipc_error for card in cards):
        if any(card.ipc_error is None for card in cards):
            return DoctorFinding("one host", "skipped", "ipc was not tried, see above")
        says = f"2 to {MOST_RANKS} ranks access each other's device memory"
        return DoctorFinding("one host", "ok", says)
    if config.ipc == "1":
        return DoctorFinding(
            "one host", "skipped", "no collectives: R2CC_IPC=1 requires ipc, see above"
        )
    return DoctorFinding("one host", "ok", f"{staged}: no ipc, see above")


def check_hosts(facts: CudaFacts, cards: Sequence[Card], config: Config) -> DoctorFinding:
    """Report how data moves between GPUs of different hosts; if through host memory, say why."""
    if not all(card.waits_on_memory for card in cards):
        return DoctorFinding("hosts", "skipped", "see one host")
    staged = f"through pinned host memory ({_staging_size(config)})"
    routes = [(card, card.route) for card in cards if card.route is not None]
    if not routes and facts.rails:
        return DoctorFinding("hosts", "skipped", "registration with RDMA NICs was not tried")
    if not routes:
        return DoctorFinding("hosts", "ok", f"{staged}: no RDMA port is a rail")
    if any(route.method == "staging" for _, route in routes):
        return DoctorFinding(
            "hosts", "ok", f"{staged}: not all NICs reach device memory, see above"
        )
    ways = _by_gpu(((card, str(route)) for card, route in routes), cards)
    return DoctorFinding("hosts", "ok", f"RDMA NICs reach device memory: {ways}")


def _staging_size(config: Config) -> str:
    return f"{config.staging_nbytes / (1 << 20):g} MiB, R2CC_STAGING_NBYTES"


def _kernel_fix(facts: CudaFacts, failed: Sequence[Card]) -> str:
    if all(card.capability < TARGET for card in failed):
        return "keep the data in host memory"
    if facts.driver < _OLDEST_DRIVER:
        return f"install a driver of CUDA {_version(_OLDEST_DRIVER)} or later"
    return _INSTALL


def _fix_of(error: str, default: str) -> str:
    return next((fix for status, fix in _FIXES.items() if status in error), default)


def _attributes(card: Card) -> str:
    return (
        f"DMA_BUF_SUPPORTED is {int(card.has_dmabuf)}, "
        f"IS_GPU_DIRECT_RDMA_CAPABLE {int(card.is_rdma_capable)}"
    )


def _by_gpu(said: Iterable[tuple[Card, str | None]], cards: Sequence[Card]) -> str:
    """Join texts about GPUs into one text.

    Equal texts are merged. A text that is the same for all of `cards` appears without their names.
    """
    found: dict[str | None, list[Card]] = {}
    for card, text in said:
        found.setdefault(text, []).append(card)
    if [*found.values()] == [[*cards]]:
        return str(*found)
    return "; ".join(f"{_named(some)}: {text}" for text, some in found.items())


def _named(cards: Sequence[Card]) -> str:
    return f"GPU {', '.join(str(card.ordinal) for card in cards)}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _capability(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


__all__ = ["examine_gpus"]
