"""The GPU bench without a GPU: it finds wrong results, evaluates readings, and refuses to run.

Kernels run on a fake GPU; ranks are real processes with a fake GPU each, joined by real sockets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cuda_script import Script
from support.cuda_script import api as api  # the fixture
from support.fake_gpu_rank import BENCH, BLOCK_NBYTES, fake_card

from r2ccl.errors import TransportError
from r2ccl.kernels.cuda import Form, canonical
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, FakeKernel
from r2ccl.testing.fakedevice.forms import FakeLauncher, combine

ROOT = BENCH.parent
RANK = str(ROOT / "tests/support/fake_gpu_rank.py")
NBYTES = 3 * BLOCK_NBYTES + 64


@pytest.fixture
def card(bench: Any) -> Any:
    made = fake_card(bench("gpu_card"), seed=7)
    yield made
    made.close()
    made.device.close()


# Without a GPU


def test_without_a_gpu_it_says_why_in_one_line_and_exits_with_69() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py")],
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 69
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith("gpu: skipped: ")


# Inputs, and counts of wrong elements


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
def test_what_is_placed_is_what_blocks_say(bench: Any, card: Any, name: str) -> None:
    gpu_inputs = bench("gpu_inputs")
    dtype = gpu_inputs.named(name)
    count = NBYTES // dtype.itemsize - 3
    inputs = gpu_inputs.Inputs(dtype, 2, count, (1,), BLOCK_NBYTES)
    again = gpu_inputs.Inputs(dtype, 2, count, (1,), BLOCK_NBYTES)
    address = card.device.allocate(inputs.nbytes)
    inputs.place(card, 1, address)
    nblocks = -(-inputs.nbytes // BLOCK_NBYTES)
    whole = np.concatenate([again.block(1, number) for number in range(nblocks)])
    assert whole.size == count
    assert card.device.read(address, inputs.nbytes).tobytes() == whole.tobytes()
    assert inputs.count_wrong(card, address, lambda operands: operands[1]) == 0
    # Elements of the other operand differ, except by chance.
    assert inputs.count_wrong(card, address, lambda operands: operands[0]) > 0.9 * count


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("nranks", [2, 4])
def test_exact_inputs_have_one_sum(bench: Any, name: str, nranks: int) -> None:
    gpu_inputs = bench("gpu_inputs")
    dtype = gpu_inputs.named(name)
    inputs = gpu_inputs.Inputs(dtype, nranks, 4000, (3,), 1 << 20, is_exact=True)
    blocks = inputs.blocks(0)
    wide = sum(each.astype(np.float64) for each in blocks)
    for order in (blocks, blocks[::-1]):
        total = order[0]
        for each in order[1:]:
            total = (total + each).astype(dtype)
        assert (total.astype(np.float64) == wide).all()
    assert len(np.unique(blocks[0])) > 50


def summed(bench: Any, card: Any, *, is_exact: bool) -> tuple[Any, int, Any]:
    """Four operands, and their sum on the card, added from the last on."""
    gpu_inputs = bench("gpu_inputs")
    inputs = gpu_inputs.Inputs(
        np.dtype(np.float32), 4, NBYTES // 4, (5,), BLOCK_NBYTES, is_exact=is_exact
    )
    nblocks = -(-NBYTES // BLOCK_NBYTES)
    blocks = [inputs.blocks(number) for number in range(nblocks)]
    total = np.concatenate([d + (c + (b + a)) for a, b, c, d in blocks])
    address = card.device.allocate(NBYTES)
    card.device.write(address, total)
    return inputs, address, total


@pytest.mark.parametrize("is_exact", [True, False])
def test_sums_in_any_order_are_right_and_others_are_counted(
    bench: Any, card: Any, is_exact: bool
) -> None:
    inputs, address, total = summed(bench, card, is_exact=is_exact)
    assert inputs.count_wrong_sums(card, address, is_exact=is_exact) == 0
    for at, value in ((0, total[0] + 1), (1500, np.nan), (total.size - 1, np.inf)):
        total[at] = value
    card.device.write(address, total)
    assert inputs.count_wrong_sums(card, address, is_exact=is_exact) == 3


def test_an_exact_sum_may_not_be_off_by_the_last_bit(bench: Any, card: Any) -> None:
    inputs, address, total = summed(bench, card, is_exact=True)
    total[77] = np.nextafter(total[77], np.float32(np.inf))
    card.device.write(address, total)
    assert inputs.count_wrong_sums(card, address, is_exact=True) == 1


def test_bits_are_compared_not_values(bench: Any) -> None:
    differing = bench("gpu_inputs").differing
    left = np.array([0.0, np.nan, 1.0], np.float32)
    assert differing(left, left.copy()) == 0
    assert differing(left, np.array([-0.0, np.nan, 1.0], np.float32)) == 1


# Kernels


def test_references_are_what_the_host_gives(bench: Any) -> None:
    gpu_inputs = bench("gpu_inputs")
    ncases = 0
    for name, group in bench("gpu_forms").cases().items():
        inputs = gpu_inputs.Inputs(gpu_inputs.named(name), 4, 5000, (11,), 1 << 20)
        for case in group:
            operands = inputs.blocks(0)[: case.form.ninputs]
            shared = canonical(case.form)
            views = [each.view(gpu_inputs.named(dtype_of(shared))).copy() for each in operands]
            meant = combine(shared, views, case.factor, case.nranks)
            assert case.reference(inputs.blocks(0)).tobytes() == meant.tobytes(), case.name
            ncases += 1
    assert ncases >= 15


def dtype_of(form: Form) -> str:
    from r2ccl.dtypes import dtype_name

    return dtype_name(form.dtype_code)


def kernels_on(bench: Any, card: Any, launcher: Any = None, **options: Any) -> Any:
    made = launcher or FakeLauncher(card.device)
    arguments = {"peers": (), "sizes": (NBYTES,), "seed": 1, "loop_s": 0.0, **options}
    peers, sizes = arguments.pop("peers"), arguments.pop("sizes")
    return bench("gpu_kernels").Kernels(card, made, peers, sizes, **arguments)


def measured(bench: Any, kernels: Any, nrounds: int = 2) -> Any:
    budget = bench("gpu_outcome").Budget(1000.0)
    for nbytes in kernels.sizes:
        assert kernels.measure(nbytes, nrounds, budget) == nrounds
    return kernels.found


def test_right_kernels_have_no_wrong_element_and_a_time_a_round(bench: Any, card: Any) -> None:
    kernels = kernels_on(bench, card)
    assert kernels.compile() == sum(len(group) for group in bench("gpu_forms").cases().values())
    found = measured(bench, kernels)
    names = {(dtype, name) for dtype, _, name in found}
    assert ("float32", "sum 2->1 from a table") in names
    assert ("bfloat16", "cuMemcpyDtoDAsync") in names
    assert len(found) == kernels.compile() + len(bench("gpu_forms").cases())
    assert all(series.nwrong == 0 and len(series.seconds) == 2 for series in found.values())
    assert found["float32", NBYTES, "sum 4->1"].narrays == 5


class Spoiling(FakeLauncher):
    """Spoils one output of every launch: all of it but the last 16 bytes is right."""

    def launch(
        self, form: Form, sources: Any, targets: Any, count: int, *rest: Any, **how: Any
    ) -> None:
        super().launch(form, sources, targets, count, *rest, **how)
        if form.op.name == "MIN":
            stream, at = rest[0], targets[0] + count * form.itemsize - 16
            self._fake.copy(at, sources[1], 16, stream)


class Lazy(FakeLauncher):
    """Leaves the last elements of every sum of two outputs as they were."""

    def launch(
        self, form: Form, sources: Any, targets: Any, count: int, *rest: Any, **how: Any
    ) -> None:
        count -= 2 * (form.noutputs == 2)
        super().launch(form, sources, targets, count, *rest, **how)


@pytest.mark.parametrize(
    ("launcher", "name", "least"), [(Spoiling, "min 2->1", 2), (Lazy, "sum 2->2", 8)]
)
def test_wrong_elements_are_found_where_they_are(
    bench: Any, card: Any, launcher: Any, name: str, least: int
) -> None:
    found = measured(bench, kernels_on(bench, card, launcher(card.device)))
    for (_, _, each), series in found.items():
        if each == name:
            # The sum of two rounds; a spoiled element may be right by chance.
            assert least <= series.nwrong <= 8
        else:
            assert series.nwrong == 0, each


def peer_of(bench: Any, card: Any, name: str, *, refused: str = "") -> Any:
    """A library that adds with the kernels of r2ccl, except for one type."""
    launcher = FakeLauncher(card.device)

    def adder(x: Any, y: Any) -> Callable[[], object]:
        if x.dtype.name == refused:
            raise TypeError(f"no {refused}")
        form = Form(dtype_code=bench("gpu_forms").CODES[x.dtype], op=0)
        pair = x.address, y.address
        return lambda: launcher.launch(form, pair, pair[:1], x.count, card.stream)

    return bench("gpu_peers").Peer(name, "1.0", nullcontext, adder)


def test_peers_are_verified_and_one_that_lacks_a_type_says_so(bench: Any, card: Any) -> None:
    peers = [peer_of(bench, card, "cupy", refused="bfloat16"), peer_of(bench, card, "torch")]
    kernels = kernels_on(bench, card, peers=peers)
    found = measured(bench, kernels)
    compared = {(dtype, name) for dtype, _, name in found if name in ("cupy", "torch")}
    assert compared == {
        ("float32", "cupy"), ("float32", "torch"), ("float16", "cupy"), ("float16", "torch"),
        ("bfloat16", "torch"),
    }  # fmt: skip
    assert all(series.nwrong == 0 for series in found.values())
    [said] = kernels.left_out
    assert "cupy 1.0 cannot add bfloat16" in said
    rows = {
        (row["dtype"], row["name"]): row for row in bench("gpu_report").kernel_rows(kernels.found)
    }
    assert rows["float32", "sum 2->1 in place"]["ratio_cupy"] > 0
    assert "ratio_cupy" not in rows["bfloat16", "sum 2->1 in place"]
    assert "ratio_cupy" not in rows["float32", "sum 2->1"]


def test_sizes_that_do_not_fit_are_named(bench: Any) -> None:
    card = fake_card(bench("gpu_card"), free_nbytes=10 * NBYTES)
    kernels = kernels_on(bench, card, sizes=(NBYTES, 2 * NBYTES))
    assert kernels.sizes == [NBYTES]
    [said] = kernels.left_out
    assert said.startswith("kernels on 24.12 KiB: 6 arrays of it do not fit")
    card.close()
    card.device.close()


def test_a_round_begins_only_if_it_can_end_in_time(bench: Any, card: Any) -> None:
    Budget = bench("gpu_outcome").Budget
    late = Budget(10.0, iter([0.0, 4.0, 8.0]).__next__)
    assert not late.is_late(1)
    assert late.is_late(2)
    half = Budget(10.0, iter([0.0, 2.0, 2.0, 5.0]).__next__).part(1, of=2)
    assert half.left_s == 1.0
    # The first round is measured in any case.
    assert kernels_on(bench, card).measure(NBYTES, 5, Budget(0.0)) == 1


# Calls of CUDA, and their order


class Scripted:
    """A driver and a device that record the calls made to them."""

    ordinal, capability, nsms = 0, (9, 0), 132

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers = {
            "cuEventElapsedTime": 2.5,
            "cuMemGetInfo": (3 << 30, 8 << 30),
            "cuDeviceGetName": b"NVIDIA Something" + bytes(84),
            "cuDriverGetVersion": 13000,
        }

    def call(self, name: str, *arguments: Any) -> Any:
        self.asked.append((name, *arguments))
        if name == "cuEventCreate":
            return len(self.asked)
        return self.answers.get(name)

    def device_attribute(self, name: str, device: Any) -> int:
        return 50 << 20

    def record(self, event: int, stream: int) -> None:
        self.asked.append(("record", event, stream))

    def synchronize(self, event: int, timeout_s: float) -> bool:
        self.asked.append(("synchronize", event))
        return True

    def current(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        self.asked.append(("close",))
        raise TransportError("nothing can be freed any more")


@pytest.fixture
def script(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    made = Scripted()
    monkeypatch.setattr(bench("gpu_card"), "Cuda", lambda: made)
    monkeypatch.setattr(bench("gpu_card"), "CudaDevice", lambda ordinal: made)
    return made


def test_a_time_is_that_between_two_events_around_the_work(bench: Any, script: Scripted) -> None:
    driver = bench("gpu_card").CudaDriver(script)
    assert driver.time(9, lambda: script.asked.append(("work",))) == 2.5e-3  # CUDA says ms
    assert script.asked[2:] == [
        ("record", 1, 9), ("work",), ("record", 2, 9), ("synchronize", 2),
        ("cuEventElapsedTime", 1, 2),
    ]  # fmt: skip


def test_what_is_said_of_the_gpu(bench: Any, script: Scripted) -> None:
    driver = bench("gpu_card").CudaDriver(script)
    about = driver.about()
    assert about["gpu"] == "NVIDIA Something"
    assert (about["memory_mib"], about["free_mib"], about["l2_mib"]) == (8192, 3072, 50)
    assert (about["capability"], about["cuda"]) == ("9.0", 13000)
    assert driver.free_nbytes() == 3 << 30


def test_what_went_wrong_first_is_told_though_closing_fails_too(
    bench: Any, script: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(bench("gpu_card"), "Card", lambda device, driver: card)
    with pytest.raises(ValueError, match="an illegal address"), bench("gpu_card").open_card(0):
        raise ValueError("an illegal address")
    assert script.asked[-1] == ("close",)


# Evaluation of readings


def kernel_found(bench: Any, **seconds: list[float]) -> Any:
    """A copy, an addition in place, two peers: of 1 GiB of float32."""
    Series = bench("gpu_kernels").Series
    names = {"copy": "cuMemcpyDtoDAsync", "ours": "sum 2->1 in place"}
    return {
        ("float32", 1 << 30, names.get(each, each)): Series(2 if each == "copy" else 3, taken)
        for each, taken in seconds.items()
    }


def test_bandwidth_counts_what_is_read_and_written(bench: Any) -> None:
    found = kernel_found(bench, copy=[2e-3, 2e-3, 4e-3], ours=[3e-3, 3e-3, 3e-3])
    copy, ours = bench("gpu_report").kernel_rows(found)
    assert copy["gb_per_s"] == pytest.approx((2 << 30) / 2e-3 / 1e9)
    assert ours["gb_per_s"] == pytest.approx((3 << 30) / 3e-3 / 1e9)
    # Round by round: 1, 1 and 2; not the median by the median.
    assert ours["ratio_copy"] == pytest.approx(1.0)
    assert ours["ratio_copy_high"] == pytest.approx(1.5)
    assert (copy["measure"], ours["measure"]) == ("copy", "kernel")


@pytest.mark.parametrize(
    ("ours", "peer", "missed"),
    [
        (3.0e-3, 3.0e-3, []),
        (3.0e-3, 2.9e-3, ["0.967 of torch, needed 0.995"]),
        (3.4e-3, 3.5e-3, ["0.882 of copy, needed 0.9"]),
    ],
)
def test_thresholds_are_held_from_256_mib_on(
    bench: Any, ours: float, peer: float, missed: list[str]
) -> None:
    report, outcome = bench("gpu_report"), bench("gpu_outcome").Outcome()
    rows = report.kernel_rows(kernel_found(bench, copy=[2e-3], ours=[ours], torch=[peer]))
    report.judge(outcome, rows)
    assert [each.partition(": ")[2] for each in outcome.missed] == missed
    assert outcome.failures == []
    text = "\n".join(report.kernel_lines(rows))
    assert ("FAIL" in text) == bool(missed)


def test_small_arrays_are_held_to_nothing(bench: Any) -> None:
    found = kernel_found(bench, copy=[2e-3], ours=[9e-3], torch=[3e-3])
    small = {(dtype, 16 << 20, name): series for (dtype, _, name), series in found.items()}
    rows = bench("gpu_report").kernel_rows(small)
    assert not any(name.startswith("meets") for row in rows for name in row)


def allreduce_found(bench: Any, **seconds: float) -> Any:
    ways = bench("gpu_collectives")
    cell = ways.Cell("bfloat16", 64 << 20)
    return {
        (getattr(ways, name).name, cell): ways.Series([taken, taken])
        for name, taken in seconds.items()
    }


def test_allreduces_are_compared_with_nccl(bench: Any) -> None:
    report, outcome = bench("gpu_report"), bench("gpu_outcome").Outcome()
    found = allreduce_found(bench, IPC=0.01, TCP=0.05, CUT=0.05, NCCL=0.04)
    rows = {row["name"]: row for row in report.allreduce_rows(4, found)}
    ipc = rows["r2ccl, CUDA IPC"]
    assert ipc["ratio_nccl"] == pytest.approx(4.0)
    assert ipc["meets_nccl"]
    assert ipc["algbw_gb_per_s"] == pytest.approx((64 << 20) / 0.01 / 1e9)
    assert ipc["busbw_gb_per_s"] == pytest.approx(1.5 * ipc["algbw_gb_per_s"])
    assert "needs_nccl" not in rows["r2ccl, TCP rails"]
    report.judge(outcome, list(rows.values()))
    [missed] = outcome.missed
    assert missed.startswith("r2ccl, a rail cut of bfloat16, 64 MiB, 4 ranks: 0.800 of nccl")
    assert not any("needs_nccl" in row for row in report.allreduce_rows(2, found))
    assert "-" in report.allreduce_lines(report.allreduce_rows(4, allreduce_found(bench, IPC=1)))[1]


def test_wrong_elements_of_ours_fail_and_those_of_others_do_not(bench: Any) -> None:
    report, outcome = bench("gpu_report"), bench("gpu_outcome").Outcome()
    found = allreduce_found(bench, CUT=0.1, NCCL=0.1)
    for series in found.values():
        series.nwrong = 3
    found["r2ccl, a rail cut", bench("gpu_collectives").Cell("bfloat16", 64 << 20)].ndiffering = 2
    report.judge(outcome, report.allreduce_rows(2, found))
    assert outcome.failures == ["r2ccl, a rail cut of bfloat16, 64 MiB, 2 ranks: 5 wrong elements"]
    assert outcome.left_out == ["NCCL, sockets of bfloat16, 64 MiB, 2 ranks: 3 wrong elements"]


def test_cuts_strike_in_the_middle_of_every_second_call(bench: Any) -> None:
    ways = bench("gpu_collectives")
    cells = {ways.Cell("float32", 16 << 20): 1, ways.Cell("float32", 256 << 20): 8}
    faults = ways.cuts(cells, 2, 4, first_op=2).faults
    # A barrier, one call, a barrier, the call with the cut; then the same with 8 collectives per
    # call.
    assert [fault.at_op - 2 for fault in faults] == [3, 4 + 10 + 3, 22 + 3, 26 + 10 + 3]
    # A call has 24 slices of 1 MiB, or 8 collectives of 48 slices.
    assert [fault.at_step for fault in faults] == [12, 24, 12, 24]
    assert [fault.rank for fault in faults] == [0, 1, 2, 3]
    assert {fault.rail for fault in faults} == {0, 1}


def test_sizes_fit_when_all_ranks_of_all_ways_have_them(bench: Any) -> None:
    fitting = bench("gpu_collectives").fitting
    assert fitting([10, 20, 30], 2, 3, free_nbytes=6 * 25, context_nbytes=5) == [10, 20]


# Ranks


def ways_on_fakes(bench: Any, *names: str, **env: str) -> list[Any]:
    ways = [getattr(bench("gpu_collectives"), name) for name in names]
    return [way._replace(program=RANK, env={**way.env, **env}) for way in ways]


def test_a_spoiled_element_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    ways, module = ways_on_fakes(bench, "TCP", BENCH_SPOILED="1"), bench("gpu_collectives")
    cells = module.cells_of([2 * BLOCK_NBYTES], ["float32"])
    made = module.Collectives(2, cells, seed=3, loop_s=0.001, nrounds=1)
    assert made.measure(ways, bench("gpu_outcome").Budget(1000.0)) == 1
    [series] = made.found.values()
    # Rank 1 alone spoils one element in each of two blocks, in two readings: the measured one, and
    # the one that determines the length of the loop.
    assert series.nwrong == 4
    assert len(series.seconds) == 1


def test_ranks_that_die_are_named_with_their_last_words(bench: Any, tmp_path: Path) -> None:
    program = tmp_path / "dies.py"
    program.write_text("raise SystemExit('no such luck')\n")
    job = bench("gpu_job")
    way = job.Way("doomed", "nccl", {}, str(program))
    with pytest.raises(bench("jobs").Unavailable, match=r"a rank ended .*no such luck"):
        job.Job(way, 2)


# The tests and the doctor


def test_a_process_that_does_not_end_is_killed(bench: Any) -> None:
    check = bench("gpu_check")
    code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    ended = check.run(("-c", code), 3.0)
    assert ended.status is None
    assert check.closing_line(ended) == "did not end within 3 s: killed"
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.lines[0]), 0)


def test_the_closing_line_of_the_tests_is_shown(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, outcome = bench("gpu_check"), bench("gpu_outcome").Outcome()
    said = {"pytest": (1, ["E   no", "=== 1 failed, 2 passed in 3 s ==="]), "r2ccl": (1, ["rails"])}
    monkeypatch.setattr(check, "run", lambda arguments, timeout_s: check.Ended(*said[arguments[1]]))
    check.check(bench("gpu_outcome").Budget(9.0), outcome)
    assert outcome.lines[0] == "pytest tests/gpu: 1 failed, 2 passed in 3 s"
    assert outcome.failures == ["tests/gpu: 1 failed, 2 passed in 3 s"]
    assert "rails" in outcome.lines


# Behind a stream that waits


def parked_on(bench: Any, **options: Any) -> tuple[Any, Any]:
    """Run the experiments on a fake GPU; return their module and outcome."""
    module, outcome = bench("gpu_parked"), bench("gpu_outcome").Outcome()
    gpu_of_both = FakeGpu(0, **options)
    device, other = FakeDevice(gpu_of_both, "rank 0"), FakeDevice(gpu_of_both, "rank 1")
    device.kernels["r2ccl_sum_float32_2_1"] = FakeKernel(lambda grid, *arguments: None)
    module.experiments(device, other.export(other.allocate(8))[0], outcome)
    return module, outcome


@pytest.mark.parametrize("is_serial", [True, False])
def test_calls_that_wait_for_the_device_are_found(
    bench: Any, monkeypatch: pytest.MonkeyPatch, is_serial: bool
) -> None:
    monkeypatch.setattr(bench("gpu_parked"), "_DEADLINE_S", 0.05)
    monkeypatch.setattr(bench("gpu_parked"), "_MOST_ENQUEUED", 9)
    _, outcome = parked_on(bench, is_serial=is_serial)
    rows = {row["name"]: row for row in outcome.rows if row["measure"] == "parked"}
    assert [row["error"] for row in rows.values()] == [""] * 11
    waiting = {name for name, row in rows.items() if row["is_waiting"]}
    assert ({"cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadDataEx", "cuIpcOpenMemHandle"} <= waiting
            if is_serial else not waiting)  # fmt: skip
    assert not waiting & {"cuEventCreate", "cuStreamCreateWithPriority"}


@pytest.mark.parametrize(("limit", "depth"), [(16, 15), (None, 40)])
def test_the_room_behind_a_stream_that_waits_is_counted(
    bench: Any, limit: int | None, depth: int
) -> None:
    module = bench("gpu_parked")
    options = {} if limit is None else {"queue_limit": limit}
    device = FakeDevice(FakeGpu(0, **options))
    assert module.queue_depth(module.ParkedStream(device), 0.05, 40) == depth


def test_a_call_that_fails_behind_a_waiting_stream_is_told(bench: Any) -> None:
    module = bench("gpu_parked")

    def fail() -> None:
        raise TransportError("no memory, for a test")

    stream = module.ParkedStream(FakeDevice(FakeGpu()))
    measured = module.measure("cuMemAlloc", fail, stream, 0.05)
    assert str(measured) == "cuMemAlloc: TransportError: no memory, for a test"


# The whole command


@pytest.fixture
def gpu(bench: Any, card: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, on a fake GPU."""
    module = bench("gpu")

    @contextmanager
    def open_card(ordinal: int) -> Any:
        yield card

    monkeypatch.setattr(module, "open_card", open_card)
    monkeypatch.setattr(module, "find_peers", lambda card: ([], ["torch: not here"]))
    monkeypatch.setattr(module, "Launcher", FakeLauncher)
    return module


def run(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str
) -> tuple[int, list[dict[str, Any]]]:
    """Run the command, by default on kernels alone; return its status and what it saved."""
    kernels = ["--what", "kernels", "--kernel-sizes", str(NBYTES), "--rounds", "1"]
    given = ["bench/gpu.py", *(arguments or kernels), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", given)
    status = gpu.main()
    return status, json.loads(path.read_text())["results"]


def test_all_right_is_ok(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(gpu, monkeypatch, tmp_path / "gpu.json")
    said = capsys.readouterr().out.splitlines()
    assert status == 0
    assert said[-1] == "ok"
    assert "left out: comparison with torch: not here" in said
    assert rows[0]["gpu"] == "fake"
    assert {row["measure"] for row in rows} == {
        "gpu", "preflight", "kernel", "copy", "verdict"
    }  # fmt: skip


def test_a_wrong_element_is_named_in_the_last_line(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "Launcher", Lazy)
    status, rows = run(gpu, monkeypatch, tmp_path / "gpu.json")
    last = capsys.readouterr().out.splitlines()[-1]
    assert status == 1
    assert last == "failed: sum 2->2 of float32, 12.06 KiB: 4 wrong elements"
    assert rows[-1]["failures"] == [last.removeprefix("failed: ")]


def test_a_part_that_cannot_be_run_fails_and_the_others_go_on(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def launcher(device: Any) -> Any:
        raise TransportError("numba-cuda is not installed: `pip install r2ccl[gpu]`")

    monkeypatch.setattr(gpu, "Launcher", launcher)
    monkeypatch.setattr(gpu, "check", lambda budget, outcome: outcome.lines.append("checked"))
    status, _ = run(gpu, monkeypatch, tmp_path / "gpu.json", "--what", "kernels", "check")
    assert status == 1
    said = capsys.readouterr().out.splitlines()
    assert "checked" in said
    assert said[-1].startswith("failed: kernels: TransportError: numba-cuda is not installed")


@pytest.mark.timeout(240)
def test_a_cut_rail_changes_no_bit_and_who_is_not_there_says_why(
    bench: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each rank has a GPU that no other rank can access; torch has no GPU."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(gpu, "_CONTEXT_NBYTES", 0)
    monkeypatch.setattr(gpu, "_ALLREDUCE_TYPES", ("float32",))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    names = ("IPC", "TCP", "CUT", "NCCL")
    # A window is half the staging memory, so a call of 1 MiB consists of four collectives.
    ways = ways_on_fakes(bench, *names, R2CC_STAGING_NBYTES=str(1 << 19))
    for name, way in zip(names, ways, strict=True):
        monkeypatch.setattr(gpu, name, way)
    status, rows = run(
        gpu, monkeypatch, tmp_path / "gpu.json", "--what", "collectives", "--nranks", "2",
        "--allreduce-sizes", "1008,1M,1G", "--rounds", "2",
    )  # fmt: skip
    assert status == 1
    [failure] = rows[-1]["failures"]
    assert failure.startswith("r2ccl, CUDA IPC, 2 ranks: did not start: ")
    assert "R2CC_IPC=1 allows no other backend" in failure
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: r2ccl, CUDA IPC")
    [small, nccl] = rows[-1]["left_out"]
    assert small.startswith("allreduces of 1 GiB by 2 ranks: they do not fit")
    assert nccl.startswith("NCCL, sockets, 2 ranks: did not start: ")
    assert "torch" in nccl
    found = {(row["name"], row["nbytes"]): row for row in rows if row["measure"] == "allreduce"}
    assert set(found) == {
        ("r2ccl, TCP rails", 1008), ("r2ccl, TCP rails", 1 << 20), ("r2ccl, a rail cut", 1 << 20)
    }  # fmt: skip
    for row in found.values():
        assert (row["wrong"], row["differing"], row["rounds"]) == (0, 0, 2)
        assert "ratio_nccl" not in row
    assert found["r2ccl, a rail cut", 1 << 20]["repairs"] >= 2


def test_a_missed_threshold_is_shown_and_fails_nothing(bench: Any) -> None:
    whole = bench("gpu_outcome").Outcome(missed=["sum: 0.8 of copy, needed 0.9"])
    assert bench("gpu").closing_lines(whole) == [
        "threshold missed: sum: 0.8 of copy, needed 0.9", "ok"
    ]  # fmt: skip


# Preflight


def test_the_preflight_runs_without_what_r2ccl_needs(tmp_path: Path) -> None:
    """It names the missing package before it imports a module that needs it."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('no msgspec, for a test')\n")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), "--preflight"],
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1] == "device"] == ["failed"]
    assert any("no msgspec, for a test" in line for line in lines)
    assert any(line.startswith("ok      package     numpy ") for line in lines)


def test_a_missing_package_is_named_with_how_to_get_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight = bench("gpu_preflight")
    monkeypatch.setattr(preflight, "_NEEDED", ("numpy", "no-such-package"))
    monkeypatch.setattr(preflight, "_COMPARED", ("no-such-peer",))
    found = list(preflight.findings((preflight.packages,)))
    assert [(each.state, each.is_needed) for each in found] == [
        ("ok", True), ("missing", True), ("missing", False)
    ]  # fmt: skip
    assert "pip install no-such-package" in str(found[1])


def test_a_check_that_raises_fails_alone(bench: Any) -> None:
    preflight = bench("gpu_preflight")

    def device() -> Any:
        raise TransportError("no GPU, for a test", status="NO_CUDA")

    found = list(preflight.findings((device, preflight.mps)))
    assert [each.state for each in found] == ["failed", "ok"]
    assert "TransportError: no GPU, for a test" in str(found[0])
    assert "device" in str(found[0])


@pytest.mark.parametrize(("mode", "has_mps", "is_shared"), [
    (0, False, True), (3, False, False), (3, True, True)
])  # fmt: skip
def test_the_preflight_says_if_ranks_cannot_share_the_gpu(
    bench: Any, api: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int,
    has_mps: bool, is_shared: bool,
) -> None:  # fmt: skip
    preflight = bench("gpu_preflight")
    api.attributes |= {name: 1 for name in preflight._ATTRIBUTES if name not in api.attributes}
    api.attributes["COMPUTE_MODE"] = mode
    api.results["cuDriverGetVersion"] = 13000
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if has_mps:
        (tmp_path / "control").touch()
    found = list(preflight.findings((preflight.device,)))
    failed = [each for each in found if each.state != "ok"]
    assert [(each.name, each.is_needed) for each in failed] == [("mode", False)] * (not is_shared)


@pytest.mark.parametrize(
    ("has_toolkit", "package", "state"),
    [
        (True, "", "ok"),
        (False, "nvidia-nvvm", "ok"),
        (False, "nvidia-cuda-nvcc-cu12", "ok"),
        (False, "", "missing"),
    ],
)
def test_the_preflight_says_where_libnvvm_is(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_toolkit: bool, package: str,
    state: str,
) -> None:  # fmt: skip
    preflight = bench("gpu_preflight")

    def version(name: str) -> str:
        if name in ("numba-cuda", package):
            return "1.0"
        raise preflight.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(preflight.importlib.metadata, "version", version)
    monkeypatch.setattr(preflight, "_TOOLKIT", str(tmp_path / "none"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    if has_toolkit:
        library = tmp_path / "nvvm/lib64/libnvvm.so"
        library.parent.mkdir(parents=True)
        library.touch()
    (found,) = preflight.compiler()
    assert found.state == state
    where = f"libnvvm in {package or tmp_path}"
    assert (where in found.text) is (state == "ok")
    assert ("CUDA_HOME" in found.text) is (state == "missing")


@pytest.mark.parametrize("is_on", [True, False])
def test_nccl_is_compared_under_mps_alone(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_on: bool
) -> None:
    """Without MPS, ranks on one GPU take turns, and the comparison measures only that."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if is_on:
        (tmp_path / "control").touch()
    given: list[Any] = []

    class Nothing:
        failures: tuple[str, ...] = ()
        left_out: tuple[str, ...] = ()

        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.found: dict[Any, Any] = {}
            self.versions: dict[str, str] = {}

        def measure(self, ways: Any, budget: Any) -> int:
            given.extend(ways)
            return 0

    monkeypatch.setattr(gpu, "Collectives", Nothing)
    monkeypatch.setattr(gpu, "_CONTEXT_NBYTES", 0)
    run(gpu, monkeypatch, tmp_path / "gpu.json", "--what", "collectives", "--nranks", "2",
        "--allreduce-sizes", "1008")  # fmt: skip
    assert (gpu.NCCL in given) is is_on
    assert gpu.IPC in given
