"""Collectives of several ranks that share a GPU, each a process: by one kernel, and by rails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from r2ccl.device.bindings import Cuda
from r2ccl.errors import TransportError

try:
    Cuda()
except TransportError as exc:
    pytest.skip(f"collectives on a GPU: {exc}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RANK = str(Path(__file__).with_name("collectives_rank.py"))
TIMEOUT_S = 100.0
#: GPUs reach each other's memory, or all goes through the host.
both_ways = pytest.mark.parametrize("ipc", ["1", "0"])


def launch(nranks: int, *arguments: str, keeps_going: bool = False, **env: str) -> tuple[int, str]:
    """Run ranks to their end; return the status and all they wrote."""
    paths = [str(ROOT), str(ROOT / "tests")]
    options = ["-n", str(nranks), *(["--keep-going"] if keeps_going else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "r2ccl", "launch", *options, "--", sys.executable, RANK, *arguments],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, said


@both_ways
@pytest.mark.parametrize("nranks", [2, 4])
def test_every_collective_is_exact(nranks: int, ipc: str) -> None:
    # Through the host in windows of half of that.
    status, said = launch(nranks, "every_collective", R2CC_IPC=ipc, R2CC_STAGING_NBYTES="262144")
    assert status == 0, said


@both_ways
def test_a_call_is_in_order_with_its_stream_and_the_host_goes_on(ipc: str) -> None:
    status, said = launch(2, "in_order_with_a_stream", R2CC_IPC=ipc)
    assert status == 0, said


@pytest.mark.parametrize("nranks", [2, 4])
def test_a_rail_cut_in_the_middle_changes_no_bit(nranks: int) -> None:
    status, said = launch(nranks, "with_a_rail_cut")
    assert status == 0, said


@both_ways
def test_no_stream_hangs_when_a_rank_dies(ipc: str, tmp_path: Path) -> None:
    status, said = launch(3, "one_dies", str(tmp_path), keeps_going=True, R2CC_IPC=ipc)
    assert status == 128 + signal.SIGKILL, said
    assert said.count("told: ") == 2, said


@both_ways
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_arrays_of_libraries_on_their_own_streams(name: str, ipc: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
    status, said = launch(2, "of_a_library", name, R2CC_IPC=ipc)
    assert status == 0, said
