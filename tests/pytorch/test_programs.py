"""The examples and the bench for torch run, and print what their docstrings promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pytorch.jobs import ROOT, run
from support.pages import command_of_the_readme
from support.pages import run as run_command

from r2ccl.testing.netlab import unavailable_reason

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")


def test_the_example_trains_on_without_a_nic() -> None:
    written = run([ROOT / "examples/ddp.py"], 2)[0]
    assert "2 ranks, 20 steps: the loss is " in written
    assert "rail 0 (lo): excluded, 1 repairs" in written


def test_torchrun_starts_the_example_of_the_readme() -> None:
    command = command_of_the_readme("torchrun")
    written = run_command(["bash", "-c", command], ROOT, timeout_s=100)
    assert written.strip() == "4 ranks: every element is 10, the last rank is 3"


@pytest.mark.timeout(250)
def test_torchrun_restarts_a_training_whose_rank_died(tmp_path: Path) -> None:
    def last_lines(step: str) -> list[str]:
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", "2", "--max-restarts", "1",
                ROOT / "examples/ddp_restart.py", tmp_path / f"{step}.pt", step,
            ],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    restarted, continued = last_lines("10"), last_lines("20")
    assert re.fullmatch(r"step 10 ended \d+\.\d s after step 9", restarted[-2])
    assert continued == restarted[-1:]


@pytest.mark.timeout(250)
def test_survivors_train_on_without_a_rank_that_died() -> None:
    lines = [
        subprocess.run(
            [
                sys.executable, "-m", "r2ccl", "launch", "--keep-going", "-n", "3", "--",
                sys.executable, ROOT / "examples/ddp_survivors.py",
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=100, check=False,
        ).stdout.splitlines()
        for _ in range(2)
    ]  # fmt: skip
    for step, loss in lines:
        assert re.fullmatch(r"2 ranks: step 10 ended \d+\.\d s after 9", step)
        assert loss.startswith("20 steps: the loss of the last one is ")
    assert lines[0][1] == lines[1][1], "the weights are those of step 9, whoever was ahead"


@pytest.mark.timeout(400)
def test_the_gpt_loses_two_nics_and_no_bit(tmp_path: Path) -> None:
    small = ("--steps", "12", "--layers", "2", "--width", "128", "--context", "64")
    done = subprocess.run(
        [sys.executable, ROOT / "examples/train_gpt.py", *small],
        cwd=tmp_path, capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ms after the failure, at rank" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("OK: two NICs died")
    assert (tmp_path / "out/gpt.png").read_bytes().startswith(b"\x89PNG")


def test_the_bench_compares_both_backends(tmp_path: Path) -> None:
    file = tmp_path / "torch.json"
    run([ROOT / "bench/torch_train.py", "--sizes", "256", "--rounds", "1", "--json", file], 2)
    results = json.loads(file.read_text())["results"]
    assert [each["call"] for each in results] == [
        "all_reduce, 256 B",
        "all_reduce async, 256 B",
        "all_gather_single, 256 B",
        "reduce_scatter_single, 256 B",
        "broadcast, 256 B",
        "all_reduce async, 16 MiB, beside Python code",
        "new_group, its first call, its end",
        "DDP step, width 64",
        "DDP step, width 512",
        "FSDP2 step, width 64",
        "FSDP2 step, width 512",
    ]
    assert all(each["r2ccl"] > 0 and each["gloo"] > 0 for each in results)


@pytest.mark.skipif(unavailable_reason() is not None, reason="no netlab here")
def test_the_bench_of_a_netlab_compares_both_backends(tmp_path: Path) -> None:
    file = tmp_path / "lab.json"
    argv = [ROOT / "bench/torch_lab.py", "--what", "backends", "--json", file]
    subprocess.run([sys.executable, *map(str, argv)], check=True, timeout=180)
    (row,) = json.loads(file.read_text())["results"]
    assert row["ratio"] == row["r2ccl"] / row["gloo"]
    assert row["ratio"] > 0
