"""What the doctor says of GPUs as they were found: what collectives need of them, and the fixes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from r2ccl.cli.cards import Card, CudaFacts
from r2ccl.cli.diagnosis import DoctorFinding
from r2ccl.cli.doctor_report import show
from r2ccl.cli.gpus import examine_gpus
from r2ccl.config import Config
from r2ccl.transport.verbs.dmabuf import DeviceMemoryRoute

DMABUF = DeviceMemoryRoute("dmabuf")
NOT_EXPORTED = "cuMemGetHandleForAddressRange failed: CUDA_ERROR_NOT_SUPPORTED"
PEERMEM = DeviceMemoryRoute("peermem", (f"dmabuf: {NOT_EXPORTED}",))
REFUSED = (
    "dmabuf: mlx5_3 cannot register a dma-buf; peermem: the kernel cannot resolve device pointers"
)

CARD = Card(
    ordinal=0,
    name="NVIDIA H100 80GB HBM3",
    bus_id="0000:1b:00.0",
    capability=(9, 0),
    nsms=132,
    memory_nbytes=85_017_493_504,
    has_dmabuf=True,
    open_error="",
    waits_on_memory=True,
    kernel_error="",
    ipc_error="",
    is_rdma_capable=True,
    dmabuf_error="",
    nics=(("mlx5_0:1", DMABUF), ("mlx5_3:1", DMABUF)),
    route=DMABUF,
)
SECOND = msgspec.structs.replace(CARD, ordinal=1, bus_id="0000:43:00.0")

#: Two GPUs of a DGX H100, where everything works.
H100 = CudaFacts(
    pci=(CARD.bus_id, SECOND.bus_id),
    module="open kernel module 580.65.06",
    bindings="13.0.1",
    driver=13000,
    gpus=(CARD, SECOND),
    kernel_origin="prebuilt",
)

NO_PACKAGE = CudaFacts(error="cuda.bindings cannot be imported", status="NO_CUDA")
NO_DRIVER = CudaFacts(bindings="13.0.1", error="there is no CUDA driver", status="NO_CUDA")
NO_GPU = CudaFacts(
    bindings="13.0.1", driver=13000, error="the CUDA driver sees no GPU", status="NO_CUDA"
)


def with_card(**changes: object) -> CudaFacts:
    """Return the facts with the second GPU changed."""
    changed = msgspec.structs.replace(SECOND, **changes)
    return msgspec.structs.replace(H100, gpus=(CARD, changed))


def with_cards(**changes: object) -> CudaFacts:
    """Return the facts with both GPUs changed."""
    cards = tuple(msgspec.structs.replace(card, **changes) for card in H100.gpus)
    return msgspec.structs.replace(H100, gpus=cards)


def examine(facts: CudaFacts, **settings: object) -> dict[str, DoctorFinding]:
    findings = examine_gpus(facts, Config(**settings))  # type: ignore[arg-type]
    assert all(bool(f.fix) == (f.level in ("warning", "error")) for f in findings)
    found = {finding.check: finding for finding in findings}
    assert len(found) == len(findings)
    return found


def test_a_machine_where_all_works_has_nothing_to_fix() -> None:
    found = examine(H100)
    levels = {check: finding.level for check, finding in found.items()}
    assert levels == {
        "driver": "ok",
        "gpu 0": "ok",
        "gpu 1": "ok",
        "streams": "ok",
        "kernels": "ok",
        "ipc": "ok",
        "dmabuf": "ok",
        "peermem": "skipped",
        "nics": "ok",
        "one host": "ok",
        "hosts": "ok",
    }
    assert found["driver"].says == ("CUDA 13.0, cuda.bindings 13.0.1, open kernel module 580.65.06")
    assert found["gpu 1"].says == (
        "NVIDIA H100 80GB HBM3 at 0000:43:00.0: compute capability 9.0, 132 multiprocessors, "
        "79.2 GiB"
    )
    assert found["kernels"].says == "prebuilt, and loaded"
    assert found["nics"].says == "reach device memory: mlx5_0:1, mlx5_3:1: dmabuf"
    assert found["one host"].says == "2 to 8 ranks access each other's device memory"
    assert found["hosts"].says == "RDMA NICs reach device memory: dmabuf"


def test_the_page_shows_these_lines() -> None:
    page = (Path(__file__).parents[3] / "docs/gpu.md").read_text(encoding="utf-8")
    lines = "\n".join(map(show, examine_gpus(H100, Config())))
    assert f"```\n{lines}\n```" in page


# Without a GPU


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (NO_PACKAGE, "cuda.bindings is not installed"),
        (NO_DRIVER, "there is no CUDA driver"),
        (NO_GPU, "the CUDA driver sees no GPU"),
        (
            msgspec.structs.replace(NO_GPU, visible=""),
            "CUDA sees none with CUDA_VISIBLE_DEVICES=",
        ),
    ],
)
def test_a_machine_without_a_gpu_has_one_line_that_says_why(facts: CudaFacts, why: str) -> None:
    (found,) = examine(facts).values()
    assert (found.level, found.says, found.fix) == ("skipped", f"none: {why}", "")


@pytest.mark.parametrize(
    ("facts", "why", "fix"),
    [
        (NO_PACKAGE, "cuda.bindings is not installed", "pip install 'r2ccl[gpu]'"),
        (NO_DRIVER, "there is no CUDA driver", "install NVIDIA's driver"),
        (NO_GPU, "the CUDA driver sees no GPU", "nvidia-smi"),
        (msgspec.structs.replace(NO_GPU, visible="7"), "CUDA_VISIBLE_DEVICES=7", "unset it"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_warning_with_its_fix(
    facts: CudaFacts, why: str, fix: str
) -> None:
    (found,) = examine(msgspec.structs.replace(facts, pci=(CARD.bus_id,))).values()
    assert found.level == "warning"
    assert found.says.startswith("0000:1b:00.0 cannot be used: ")
    assert why in found.says
    assert fix in found.fix


def test_gpus_that_are_hidden_on_purpose_are_no_matter() -> None:
    hidden = msgspec.structs.replace(H100, gpus=(), status="NO_CUDA", visible="")
    (found,) = examine(hidden).values()
    assert (found.level, found.fix) == ("skipped", "")


@pytest.mark.parametrize(
    "facts",
    [
        msgspec.structs.replace(NO_PACKAGE, driver=13000),
        msgspec.structs.replace(NO_DRIVER, module="open kernel module 580.65.06"),
    ],
    ids=["a driver without the package", "a kernel module without libcuda"],
)
def test_half_an_installation_is_a_warning_where_no_card_is_seen(facts: CudaFacts) -> None:
    (found,) = examine(facts).values()
    assert found.level == "warning"
    assert found.says.startswith("GPUs cannot be used: ")


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        ("CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
        ("CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", "dmesg"),
    ],
)
def test_a_driver_that_does_not_start_is_told_with_its_status(status: str, fix: str) -> None:
    failed = msgspec.structs.replace(NO_GPU, error=f"cuInit failed: {status}", status=status)
    (found,) = examine(failed).values()
    assert found.level == "warning"
    assert status in found.says
    assert fix in found.fix


# A GPU of which something does not work


def test_a_driver_too_old_to_load_kernels_is_an_error() -> None:
    old = "there is no CUDA driver with cuFuncLoad"
    found = examine(msgspec.structs.replace(with_cards(kernel_error=old), driver=12020))
    assert found["driver"].level == found["kernels"].level == "error"
    assert "CUDA 12.2" in found["driver"].says
    assert "install a driver of CUDA 12.4" in found["driver"].fix
    assert "install a driver of CUDA 12.4" in found["kernels"].fix


def test_a_gpu_held_by_another_process_is_an_error_others_go_on() -> None:
    taken = "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_DEVICE_UNAVAILABLE"
    found = examine(with_card(open_error=taken, ipc_error=None, kernel_error=None))
    assert found["gpu 1"].level == "error"
    assert taken in found["gpu 1"].says
    assert "another process" in found["gpu 1"].fix
    assert found["gpu 0"].level == found["ipc"].level == found["kernels"].level == "ok"


def test_gpus_that_cannot_be_opened_are_not_said_to_work() -> None:
    found = examine(with_cards(open_error="CUDA_ERROR_OUT_OF_MEMORY"))
    assert set(found) == {"driver", "gpu 0", "gpu 1"}


def test_a_gpu_whose_streams_cannot_wait_has_no_collectives() -> None:
    found = examine(with_card(waits_on_memory=False))
    assert found["streams"].level == "error"
    assert "GPU 1 cannot wait" in found["streams"].says
    assert found["one host"].level == found["hosts"].level == "skipped"
    assert "GPU 1" in found["one host"].says


def test_a_gpu_older_than_the_kernels_is_for_host_memory() -> None:
    why = (
        "the GPU has compute capability 7.0, but kernels need at least 8.0; keep the data in host "
        "memory"
    )
    found = examine(with_card(capability=(7, 0), kernel_error=why))
    assert found["kernels"].level == "error"
    assert found["kernels"].says == f"GPU 1: {why}"
    assert found["kernels"].fix == "keep the data in host memory"


def test_a_compiler_that_is_missing_is_to_be_installed() -> None:
    found = examine(with_cards(kernel_error="numba-cuda is not installed"))
    assert found["kernels"].says == "numba-cuda is not installed"
    assert found["kernels"].fix == "pip install 'r2ccl[gpu]'"


def test_kernels_that_were_not_prebuilt_are_told() -> None:
    found = examine(msgspec.structs.replace(H100, kernel_origin="compiled"))
    assert (found["kernels"].level, found["kernels"].says) == ("ok", "compiled, and loaded")


def test_memory_no_other_process_can_map_goes_through_the_host() -> None:
    refused = "cuIpcOpenMemHandle failed: CUDA_ERROR_MAP_FAILED"
    found = examine(with_card(ipc_error=refused), staging_nbytes=32 << 20)
    assert found["ipc"].level == "warning"
    assert found["ipc"].says == f"another process cannot map device memory: GPU 1: {refused}"
    assert "--ipc=host" in found["ipc"].fix
    assert found["one host"].says == (
        "through pinned host memory (32 MiB, R2CC_STAGING_NBYTES): no ipc, see above"
    )
    assert examine(with_card(ipc_error=refused), ipc="0")["ipc"].level == "skipped"
    assert examine(with_card(ipc_error=refused), ipc="1")["one host"].level == "skipped"


def test_a_gpu_in_exclusive_mode_is_no_matter_of_containers() -> None:
    """The doctor itself holds the GPU while another of its processes tries to map memory."""
    refused = "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_DEVICE_UNAVAILABLE"
    found = examine(with_card(ipc_error=refused))["ipc"]
    assert found.level == "warning"
    assert "nvidia-smi -c 0" in found.fix
    assert "container" not in found.fix


def test_a_setting_that_rules_ipc_out_is_named() -> None:
    assert examine(H100, ipc="0")["one host"].says.endswith("R2CC_IPC=0")


# NICs


def test_a_failed_export_shows_its_status_and_peermem_stands_in() -> None:
    facts = msgspec.structs.replace(
        with_cards(
            has_dmabuf=False,
            dmabuf_error=NOT_EXPORTED,
            nics=(("mlx5_0:1", PEERMEM),),
            route=PEERMEM,
        ),
        has_peermem=True,
        module="closed kernel module 535.104.05",
    )
    found = examine(facts)
    assert found["dmabuf"].says == (f"no export: {NOT_EXPORTED} (DMA_BUF_SUPPORTED is 0)")
    assert found["dmabuf"].level == "skipped"
    assert (found["peermem"].level, found["peermem"].says) == ("ok", "nvidia_peermem is loaded")
    assert found["nics"].level == "ok"
    assert found["hosts"].says == (
        f"RDMA NICs reach device memory: peermem (dmabuf: {NOT_EXPORTED})"
    )


def test_without_a_nic_an_export_that_fails_costs_nothing() -> None:
    found = examine(with_cards(dmabuf_error=NOT_EXPORTED, nics=(), route=None))
    assert {found[check].level for check in ("dmabuf", "nics")} == {"skipped"}
    assert "no RDMA port" in found["nics"].says
    assert found["hosts"].says == (
        "through pinned host memory (64 MiB, R2CC_STAGING_NBYTES): no RDMA port is a rail"
    )


def test_memory_one_nic_does_not_reach_is_a_warning_naming_it() -> None:
    staging = DeviceMemoryRoute("staging", (REFUSED,))
    nics = (("mlx5_0:1", DMABUF), ("mlx5_3:1", staging))
    found = examine(with_card(nics=nics, route=staging))
    assert found["nics"].level == "warning"
    assert found["nics"].says == (
        "do not all reach device memory: mlx5_0:1: dmabuf; "
        f"mlx5_3:1: GPU 0: dmabuf; GPU 1: staging ({REFUSED})"
    )
    assert "nvidia_peermem" in found["nics"].fix
    assert "through pinned host memory" in found["hosts"].says


@pytest.mark.parametrize(
    ("reason", "is_rdma_capable", "level", "fix"),
    [
        ("RDMA NIC mlx5_3 cannot be opened", True, "warning", "verbs"),
        ("the allocation is not GPUDirect RDMA capable", False, "skipped", ""),
    ],
)
def test_a_nic_is_only_blamed_for_what_can_be_put_right(
    reason: str, is_rdma_capable: bool, level: str, fix: str
) -> None:
    staging = DeviceMemoryRoute("staging", (reason,))
    nics = (("mlx5_3:1", staging),)
    found = examine(with_cards(nics=nics, route=staging, is_rdma_capable=is_rdma_capable))
    assert found["nics"].level == level
    assert found["nics"].says == f"do not all reach device memory: mlx5_3:1: {staging}"
    assert fix in found["nics"].fix


def test_memory_kept_from_nics_is_not_called_exported_for_them() -> None:
    found = examine(with_card(is_rdma_capable=False))
    assert found["dmabuf"].level == "skipped"
    assert "GPU 1: DMA_BUF_SUPPORTED is 1, IS_GPU_DIRECT_RDMA_CAPABLE 0" in found["dmabuf"].says


# A process that did not come to its end


def test_a_crash_is_an_error_that_says_while_doing_what() -> None:
    untried = with_cards(ipc_error=None, dmabuf_error=None, nics=(), route=None)
    facts = msgspec.structs.replace(
        untried, doing="exporting a dma-buf of GPU 0", died="signal SIGSEGV"
    )
    found = examine(facts)
    assert found["probe"].level == "error"
    assert "while exporting a dma-buf of GPU 0: signal SIGSEGV" in found["probe"].says
    assert found["kernels"].level == "ok"
    assert {found[check].says for check in ("ipc", "dmabuf")} == {"was not tried"}
    assert found["one host"].level == "skipped"
    assert found["one host"].says == "ipc was not tried, see above"
    assert found["hosts"].says.endswith("no RDMA port is a rail")


def test_rails_that_a_crash_left_untried_are_not_denied() -> None:
    untried = with_cards(nics=(), route=None)
    found = examine(msgspec.structs.replace(untried, rails=("mlx5_0:1",), died="signal SIGSEGV"))
    assert found["hosts"].level == "skipped"
    assert found["hosts"].says == "registration with RDMA NICs was not tried"


def test_a_crash_before_any_gpu_was_seen_is_the_only_line() -> None:
    facts = CudaFacts(doing="initialising the CUDA driver", died="no answer within 120 s")
    (found,) = examine(facts).values()
    assert found.level == "error"
    assert "no answer within 120 s" in found.says


def test_what_was_not_tried_is_not_called_good() -> None:
    facts = with_cards(open_error="", kernel_error=None, ipc_error=None, dmabuf_error=None)
    found = examine(facts)
    assert {found[check].level for check in ("kernels", "ipc", "dmabuf")} == {"skipped"}
    unopened = examine(with_cards(open_error=None))
    assert {unopened[check].level for check in ("gpu 0", "gpu 1")} == {"skipped"}
