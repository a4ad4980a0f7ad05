"""How the doctor learns of GPUs: from another process, which may die, and by trying things."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from r2ccl.cli import gpuprobe
from r2ccl.cli.apart import Ended, run
from r2ccl.cli.cards import Card, CudaFacts
from r2ccl.cli.gpufacts import last_told, read_cuda
from r2ccl.cli.gpunics import export_error, is_rdma_capable, open_nics, way_of
from r2ccl.cli.gpuprobe import (
    Journal,
    describe,
    open_gpus,
    try_exports,
    try_kernels,
    try_mapping,
    try_registering,
    why_not_mapped,
)
from r2ccl.device.base import Device
from r2ccl.errors import TransportError
from r2ccl.kernels.cuda.ptx import Ptx
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, FakeKernel
from r2ccl.transport.verbs.dmabuf import DeviceMemoryRoute

PAGE = os.sysconf("SC_PAGE_SIZE")
NBYTES = 2 << 20
TIMEOUT_S = 60.0


def card(ordinal: int = 0) -> Card:
    return Card(
        ordinal=ordinal, name="GPU", bus_id=f"0000:0{ordinal}:00.0", capability=(9, 0), nsms=1,
        memory_nbytes=1 << 30,
    )  # fmt: skip


# Another process


def test_a_process_imports_what_this_one_would_and_tells() -> None:
    said, error = run("import r2ccl.cli.cards; print('here')", timeout_s=TIMEOUT_S)
    assert (said, error) == ("here\n", "")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_what_a_process_said_before_it_failed_is_kept(code: str, error: str) -> None:
    ended = run(f"print('here', flush=True)\n{code}", timeout_s=TIMEOUT_S)
    assert ended == Ended("here\n", error)


def test_an_unresponsive_process_is_killed_with_its_children(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    script = f"exec 3> {tmp_path / 'pipe'}; echo x >&3; exec sleep 1000"
    code = (
        "import signal, subprocess\nprint('here', flush=True)\n"
        f"subprocess.Popen(['sh', '-c', {script!r}])\nsignal.pause()"
    )
    assert run(code, timeout_s=3.0) == Ended("here\n", "no answer within 3 s")
    # The end of the pipe: whoever had it open for writing is gone.
    os.set_blocking(reader, True)
    assert b"".join(iter(lambda: os.read(reader, 100), b"")) == b"x\n"
    os.close(reader)


def test_an_inner_process_is_killed_with_the_one_that_started_it() -> None:
    tell = "import os; print(os.getpgrp())"
    assert int(run(tell, timeout_s=TIMEOUT_S, is_inner=True).said) == os.getpgrp()
    assert int(run(tell, timeout_s=TIMEOUT_S).said) != os.getpgrp()
    hangs = "import signal; signal.pause()"
    assert run(hangs, timeout_s=0.1, is_inner=True).error == "no answer within 0.1 s"


def told(*facts: CudaFacts) -> str:
    return "".join(f"{msgspec.json.encode(each).decode()}\n" for each in facts)


def test_the_last_whole_line_counts() -> None:
    first, last = (
        CudaFacts(doing="this"),
        CudaFacts(bindings="13.0.1", doing="that", gpus=(card(),)),
    )
    cut = told(last)[:-20]
    facts = last_told(Ended(f"{told(first, last)}a library's own line\n{cut}", "signal SIGSEGV"))
    assert facts == msgspec.structs.replace(last, died="signal SIGSEGV")


@pytest.mark.parametrize(("said", "doing"), [("", "starting"), (told(CudaFacts(doing="x")), "x")])
def test_a_process_that_leaves_before_the_end_has_not_told_all(said: str, doing: str) -> None:
    facts = last_told(Ended(said, ""))
    assert facts.doing == doing
    assert facts.died


def test_this_machine_can_be_asked(capfd: pytest.CaptureFixture[str]) -> None:
    facts = read_cuda(["mlx5_0:1"], is_tried=False)
    assert (facts.doing, facts.died, facts.rails) == ("", "", ("mlx5_0:1",))
    assert bool(facts.error) == (not facts.gpus)
    assert len(facts.gpus) == len(facts.topology.gpus)
    assert capfd.readouterr() == ("", "")


# Files


def test_nvidias_controllers_and_modules_are_found_in_files(tmp_path: Path) -> None:
    sysfs, proc = tmp_path / "sys", tmp_path / "proc"
    functions = {
        "0000:1b:00.0": ("0x10de", "0x030200"),  # a GPU
        "0000:07:00.0": ("0x10de", "0x068000"),  # an NVSwitch
        "0000:18:00.0": ("0x15b3", "0x020700"),  # a NIC
        "0000:01:00.0": ("0x1002", "0x030000"),  # another's GPU
    }
    for name, (vendor, kind) in functions.items():
        place = sysfs / "bus/pci/devices" / name
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "class").write_text(f"{kind}\n")
    (sysfs / "module/nvidia_peermem").mkdir(parents=True)
    (proc / "driver/nvidia").mkdir(parents=True)
    version = proc / "driver/nvidia/version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    facts = read_cuda(is_tried=False, sysfs=sysfs, proc=proc)
    assert facts.pci == ("0000:1b:00.0",)
    assert facts.has_peermem
    assert facts.module == "open kernel module 580.65.06"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    facts = read_cuda(is_tried=False, sysfs=sysfs, proc=proc)
    assert facts.module == "closed kernel module 535.104.05"


# Trying


class Source:
    """A driver that was recorded."""

    def bus_id(self, ordinal: int) -> str:
        return f"0000:0{ordinal}:00.0"

    def attribute(self, name: str, ordinal: int) -> int:
        return {
            "COMPUTE_CAPABILITY_MAJOR": 8,
            "COMPUTE_CAPABILITY_MINOR": 6,
            "MULTIPROCESSOR_COUNT": 84,
            "DMA_BUF_SUPPORTED": 1,
        }[name]


def test_a_gpu_is_described_by_the_driver() -> None:
    answers = {
        "cuDeviceGet": "device",
        "cuDeviceGetName": b"NVIDIA RTX A6000".ljust(256, b"\0"),
        "cuDeviceTotalMem": 50_925_535_232,
    }
    cuda: Any = SimpleNamespace(call=lambda name, *arguments: answers[name])
    source: Any = Source()
    assert describe(cuda, source, 1) == Card(
        ordinal=1, name="NVIDIA RTX A6000", bus_id="0000:01:00.0", capability=(8, 6), nsms=84,
        memory_nbytes=50_925_535_232, has_dmabuf=True,
    )  # fmt: skip


class Bench:
    """Two GPUs, the second of which may refuse things."""

    def __init__(self) -> None:
        self.cards = [FakeGpu(seed=1), FakeGpu(seed=2)]
        self.devices: list[FakeDevice] = []
        self.refusals: dict[str, str] = {}
        self.journal = Journal(CudaFacts(gpus=(card(0), card(1))))
        self.stack = ExitStack()

    def make(self, ordinal: int) -> Device:
        if ordinal == 1 and "open" in self.refusals:
            raise TransportError("no context", status=self.refusals["open"])
        device = FakeDevice(self.cards[ordinal], ordinal=ordinal)
        if ordinal == 1:
            device.refusals.update(self.refusals)
        self.devices.append(device)
        return device

    def open(self, **refusals: str) -> Any:
        self.refusals = refusals
        return open_gpus(self.journal, self.stack, self.make)

    def of(self, name: str) -> list[Any]:
        return [getattr(each, name) for each in self.journal.facts.gpus]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    for gpu in made.cards:
        gpu.kernels["r2ccl_sum_float32_2_1"] = FakeKernel(lambda grid, *arguments: None)
    with made.stack:
        yield made


def test_known_facts_are_printed_before_each_call_that_may_hang(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.open()
    lines = [
        msgspec.json.decode(line, type=CudaFacts) for line in capsys.readouterr().out.splitlines()
    ]
    assert [each.doing for each in lines] == ["opening GPU 0", "opening GPU 1"]
    assert [each.gpus[0].open_error for each in lines] == [None, ""]


def test_a_gpu_that_cannot_be_opened_leaves_the_others(bench: Bench) -> None:
    opened = bench.open(open="CUDA_ERROR_DEVICE_UNAVAILABLE")
    assert [each.place for each in opened] == [0]
    assert bench.of("open_error") == ["", "no context"]
    assert bench.of("waits_on_memory") == [True, False]


def test_a_gpu_without_memory_is_closed_all_the_same(bench: Bench) -> None:
    assert len(bench.open(allocate="CUDA_ERROR_OUT_OF_MEMORY")) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in bench.of("open_error")[1]
    bench.stack.close()
    # Closed: another process may have its name.
    for device in bench.devices:
        FakeDevice(bench.cards[device.ordinal]).close()


def test_a_kernel_is_loaded_on_each_gpu_and_its_origin_told(bench: Bench) -> None:
    try_kernels(bench.journal, bench.open(load="CUDA_ERROR_UNSUPPORTED_PTX_VERSION"))
    assert bench.of("kernel_error")[0] == ""
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in bench.of("kernel_error")[1]
    assert bench.journal.facts.kernel_origin == "prebuilt"


def test_a_kernel_that_cannot_be_had_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Ptx:
        raise TransportError("the archive is damaged, for a test")

    monkeypatch.setattr(gpuprobe, "ptx_of", refuse)
    try_kernels(bench.journal, bench.open())
    assert bench.of("kernel_error") == ["the archive is damaged, for a test"] * 2
    assert bench.journal.facts.kernel_origin == ""


def test_a_gpu_older_than_the_kernels_is_told_what_they_need(bench: Bench) -> None:
    bench.cards[1].capability = (7, 0)
    try_kernels(bench.journal, bench.open())
    assert "kernels need at least 8.0" in bench.of("kernel_error")[1]


def test_another_process_maps_what_was_exported(bench: Bench) -> None:
    asked: list[int] = []

    def map_all(handles: Any) -> list[str]:
        asked.extend(ordinal for ordinal, _ in handles)
        others = [FakeDevice(gpu, "other") for gpu in bench.cards]
        return [why_not_mapped(*each, lambda ordinal: others[ordinal]) for each in handles]

    try_mapping(bench.journal, bench.open(), map_all)
    assert asked == [0, 1]
    assert bench.of("ipc_error") == ["", ""]


def test_what_cannot_be_exported_is_not_mapped(bench: Bench) -> None:
    try_mapping(
        bench.journal, bench.open(export="NO_IPC"), lambda handles: ["refused"] * len(handles)
    )
    assert bench.of("ipc_error")[0] == "refused"
    assert "NO_IPC" in bench.of("ipc_error")[1]


def test_a_mapping_that_fails_says_why(bench: Bench) -> None:
    other = FakeDevice(bench.cards[0], "other")
    assert "CUDA_ERROR_INVALID_HANDLE" in why_not_mapped(0, bytes(64), lambda ordinal: other)


def test_a_process_that_dies_while_it_maps_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended("", f"signal {signal.Signals.SIGBUS.name}")
    monkeypatch.setattr(gpuprobe, "run", lambda code, **more: ended)
    assert (
        gpuprobe.map_apart([(0, bytes(64)), (1, bytes(64))])
        == ["the process that mapped the memory failed: signal SIGBUS"] * 2
    )


@pytest.mark.parametrize(
    ("said", "errors"),
    [
        ('cuda: a warning\n["","no"]\n[1]\n', ["", "no"]),
        ("cuda: a warning\n", ["the process that mapped the memory failed: no result"] * 2),
    ],
)
def test_lines_of_a_library_are_no_result_of_the_mapping(
    monkeypatch: pytest.MonkeyPatch, said: str, errors: list[str]
) -> None:
    monkeypatch.setattr(gpuprobe, "run", lambda code, **more: Ended(said, ""))
    assert gpuprobe.map_apart([(0, bytes(64)), (1, bytes(64))]) == errors


# dma-buf and NICs


class Driver:
    """A GPU of one allocation, at 0: around whatever is asked for, and how it answers."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.failures: dict[str, str] = {}
        self.denied: set[str] = set()
        self.fds: list[int] = []
        self.ranges: list[tuple[int, int]] = []

    @contextmanager
    def current(self, address: int) -> Iterator[None]:
        yield

    def _answer(self, name: str) -> bool:
        if name in self.failures:
            status = self.failures[name]
            raise TransportError(f"{name} failed: {status}", status=status)
        return name not in self.denied

    def is_pooled(self, address: int) -> bool:
        return False

    def is_managed(self, address: int) -> bool:
        return False

    def is_rdma_capable(self, address: int) -> bool:
        return self._answer("is_rdma_capable")

    def is_dmabuf_supported(self, address: int) -> bool:
        return self._answer("is_dmabuf_supported")

    def address_range(self, address: int) -> tuple[int, int]:
        return self.base or address, NBYTES

    def buffer_id(self, address: int) -> int:
        return 41

    def set_sync_memops(self, address: int) -> None:
        self._answer("set_sync_memops")

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        self._answer("cuMemGetHandleForAddressRange")
        self.ranges.append((address, nbytes))
        self.fds.append(os.open(os.devnull, os.O_RDONLY))
        return self.fds[-1]

    def allocate_pinned(self, nbytes: int) -> int:
        raise AssertionError("nothing is staged")

    def free_pinned(self, address: int) -> None:
        raise AssertionError("nothing is staged")


class Nic:
    """A NIC that refuses some ways with an error number, and what is registered with it."""

    def __init__(self, name: str, **refusals: int) -> None:
        self.name = name
        self.refusals = refusals
        self.count = 0

    def _take(self, way: str) -> Any:
        if way in self.refusals:
            raise OSError(self.refusals[way], os.strerror(self.refusals[way]))
        self.count += 1
        return SimpleNamespace(lkey=1, rkey=2, iova_base=0, close=self._end)

    def _end(self) -> None:
        self.count -= 1

    def register(self, address: int, nbytes: int) -> Any:
        return self._take("pointer")

    def register_dmabuf(self, fd: int, offset: int, nbytes: int) -> Any:
        os.fstat(fd)
        return self._take("dmabuf")


BASE = 64 * NBYTES


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_an_export_is_of_whole_pages_and_closes_its_descriptor() -> None:
    driver = Driver(BASE + 512)
    assert export_error(driver, driver.base) == ""
    assert driver.ranges == [(BASE, NBYTES + PAGE)]
    assert [is_open(fd) for fd in driver.fds] == [False]


@pytest.mark.parametrize("denied", [set(), {"is_dmabuf_supported"}, {"is_rdma_capable"}])
def test_an_export_is_attempted_whatever_the_attributes_say(denied: set[str]) -> None:
    driver = Driver(BASE)
    driver.denied = denied
    assert export_error(driver, BASE) == ""
    assert len(driver.fds) == 1
    driver.failures["cuMemGetHandleForAddressRange"] = "CUDA_ERROR_NOT_SUPPORTED"
    assert export_error(driver, BASE) == (
        "cuMemGetHandleForAddressRange failed: CUDA_ERROR_NOT_SUPPORTED"
    )
    assert is_rdma_capable(driver, BASE) == ("is_rdma_capable" not in denied)


def test_an_export_that_cannot_be_prepared_says_why() -> None:
    driver = Driver(BASE)
    driver.failures["set_sync_memops"] = "CUDA_ERROR_INVALID_VALUE"
    assert "CUDA_ERROR_INVALID_VALUE" in export_error(driver, BASE)
    assert driver.fds == []


def test_a_gpu_whose_driver_does_not_answer_leaves_the_others(bench: Bench) -> None:
    driver = Driver()
    driver.failures["is_rdma_capable"] = "CUDA_ERROR_INVALID_VALUE"
    try_exports(bench.journal, bench.open(), driver)
    assert bench.of("dmabuf_error") == ["is_rdma_capable failed: CUDA_ERROR_INVALID_VALUE"] * 2


def test_the_way_is_the_librarys_and_nothing_stays_registered() -> None:
    driver, willing = Driver(BASE), Nic("mlx5_0")
    old, deaf = Nic("mlx5_1", dmabuf=errno.EOPNOTSUPP), Nic("mlx5_2", dmabuf=errno.EINVAL,
                                                           pointer=errno.EFAULT)  # fmt: skip
    assert way_of(driver, [willing], BASE) == DeviceMemoryRoute("dmabuf")
    assert way_of(driver, [willing, old], BASE).method == "peermem"
    staged = way_of(driver, [willing, deaf], BASE)
    assert staged.method == "staging"
    assert "modprobe nvidia_peermem" in staged.reasons[0]
    assert [nic.count for nic in (willing, old, deaf)] == [0, 0, 0]


def test_every_gpu_is_tried_with_every_nic_and_with_all_of_them(bench: Bench) -> None:
    driver, old = Driver(), Nic("mlx5_1", dmabuf=errno.EOPNOTSUPP)
    opened = bench.open()
    try_exports(bench.journal, opened, driver)
    assert bench.of("dmabuf_error") == ["", ""]
    assert bench.of("is_rdma_capable") == [True, True]
    try_registering(bench.journal, opened, driver, {"mlx5_0:1": Nic("mlx5_0"), "mlx5_1:1": old})
    for nics, route in zip(bench.of("nics"), bench.of("route"), strict=True):
        assert [(label, each.method) for label, each in nics] == [
            ("mlx5_0:1", "dmabuf"),
            ("mlx5_1:1", "peermem"),
        ]
        assert route.method == "peermem"


def test_a_nic_that_cannot_be_opened_is_none_that_reaches_memory(bench: Bench) -> None:
    nics: Any = {"mlx5_0:1": Nic("mlx5_0"), "mlx5_1:1": "cannot be opened"}
    try_registering(bench.journal, bench.open(), Driver(), nics)
    refused = DeviceMemoryRoute("staging", ("cannot be opened",))
    assert dict(bench.of("nics")[0]) == {
        "mlx5_0:1": DeviceMemoryRoute("dmabuf"),
        "mlx5_1:1": refused,
    }
    assert bench.of("route") == [refused, refused]


def test_ports_are_opened_by_label_and_closed_with_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[str, int]] = []

    class NicDevice:
        def __init__(self, name: str, port: int, find_gid: object, *, fastpath: str) -> None:
            if name == "mlx5_1":
                raise TransportError("RDMA NIC mlx5_1 cannot be opened", status="DEVICE")
            self.which = (name, port)
            self.registrar = Nic(name)
            opened.append(self.which)

        def close(self) -> None:
            opened.remove(self.which)

    monkeypatch.setitem(
        sys.modules, "r2ccl.transport.verbs.device", SimpleNamespace(RdmaDevice=NicDevice)
    )
    with ExitStack() as stack:
        found = open_nics(stack, ["mlx5_0:2", "mlx5_1:1"])
        assert opened == [("mlx5_0", 2)]
    assert opened == []
    assert isinstance(found["mlx5_0:2"], Nic)
    assert found["mlx5_1:1"] == "RDMA NIC mlx5_1 cannot be opened"


def test_everything_is_tried_in_turn_and_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpuprobe, "CudaDevice", bench.make)
    monkeypatch.setattr(gpuprobe, "BindingsDriver", Driver)
    monkeypatch.setattr(gpuprobe, "map_apart", lambda handles: [""] * len(handles))
    monkeypatch.setattr(gpuprobe, "open_nics", lambda stack, labels: {"mlx5_0:1": Nic("mlx5_0")})
    gpuprobe.try_all(bench.journal, ["mlx5_0:1"])
    for name in ("open_error", "kernel_error", "ipc_error", "dmabuf_error"):
        assert bench.of(name) == ["", ""]
    assert bench.of("route") == [DeviceMemoryRoute("dmabuf")] * 2
    assert '"doing":"closing the GPUs"' in capsys.readouterr().out.splitlines()[-1]
    for ordinal, gpu in enumerate(bench.cards):  # the name is free again
        FakeDevice(gpu, ordinal=ordinal).close()
