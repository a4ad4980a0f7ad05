"""The recipes in deploy/ do what they say, as far as that is possible without their systems."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.slow import slow_but

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
WAIT_S = 110.0
INSTALL_S = 600.0

#: Stands for srun: runs the command as two tasks of a step on one host.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=node1
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait
"""
PROGRAMS = {
    "environment": (
        "import os; file = os.environ['R2CC_SECRET_FILE']\n"
        "mode, text = oct(os.stat(file).st_mode), open(file).read()\n"
        "os.write(1, f\"{os.environ['SLURM_PROCID']} {mode} {len(text)}\\n\".encode())",
        ["0 0o100600 65", "1 0o100600 65"],
    ),
    "allreduce": (
        "import os, numpy as np, r2ccl\n"
        "with r2ccl.init() as comm: x = comm.allreduce(np.full(2, comm.rank + 1.0))\n"
        "os.write(1, f'{x[0]}\\n'.encode())",
        ["3.0", "3.0"],
    ),
}


@pytest.mark.parametrize("what", slow_but(["environment"], PROGRAMS))
def test_the_script_for_slurm_starts_a_step_with_a_secret(tmp_path: Path, what: str) -> None:
    program, expected = PROGRAMS[what]
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o700)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(os.getpid()), "HOME": str(tmp_path), "SLURM_PROCID": "0"}
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm.sbatch"), str(tmp_path / "program.py")],
        env={**os.environ, **job, "PATH": path}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert sorted(done.stdout.splitlines()) == expected
    assert not list(tmp_path.glob(".r2ccl-secret*"))


def instructions(name: str) -> list[str]:
    """Return the arguments of an instruction of the Containerfile."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def copy_into(root: Path) -> None:
    for line in instructions("COPY"):
        *sources, target = line.split()
        place = root / target.lstrip("/")
        if target.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)


@pytest.mark.timeout(2 * INSTALL_S)
@pytest.mark.parametrize("runs", slow_but([False], [False, True]))
def test_the_steps_of_the_container_run_on_a_clean_copy(tmp_path: Path, runs: bool) -> None:
    """The container's directories are below a temporary one here."""
    copy_into(tmp_path)
    assert (tmp_path / "src/pyproject.toml").exists()
    steps = [re.sub(r"(?<!\w)/(opt|src|job)\b", rf"{tmp_path}/\1", step)
             for step in instructions("RUN")]  # fmt: skip
    assert len(steps) == 3
    for step in steps:
        subprocess.run(["sh", "-nc", step], check=True, timeout=WAIT_S)
    if not runs:
        return
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for step in steps:
        done = subprocess.run(
            ["sh", "-ec", step], env=env, cwd=tmp_path, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_S,
            check=False,
        )  # fmt: skip
        if done.returncode and "Could not find a version that satisfies" in done.stdout:
            pytest.skip("a package index is needed")
        assert done.returncode == 0, done.stdout
    assert "2 ranks: every element is 3" in done.stdout


def value_of(key: str, text: str) -> str:
    (value,) = re.findall(rf"^ +(?:- )?{key}: \"?([^\"\n]+)\"?$", text, re.MULTILINE)
    return str(value)


def test_the_parts_of_the_kubernetes_job_fit_together() -> None:
    text = (DEPLOY / "kubernetes-job.yaml").read_text(encoding="utf-8")
    service, job = text.split("\n---\n")
    env = dict(re.findall(r"- name: (\w+)\n +value: \"?([\w.-]+)\"?\n", job))
    name, nranks = (
        re.findall(r"^  name: (\S+)$", job, re.MULTILINE)[0],
        value_of("completions", job),
    )
    assert value_of("completionMode", job) == "Indexed"
    assert nranks == value_of("parallelism", job) == env["WORLD_SIZE"]
    headless = value_of("name", service)
    assert value_of("clusterIP", service) == "None"
    assert value_of("publishNotReadyAddresses", service) == "true"
    assert value_of("job-name", service) == name
    assert value_of("subdomain", job) == headless
    assert env["MASTER_ADDR"] == f"{name}-0.{headless}"
    secret = job.split("secretKeyRef:\n")[1]
    assert f"create secret generic {value_of('name', secret)} " in service
    assert f"--from-file={value_of('key', secret)}=" in service
    assert (ROOT / job.split('command: ["python", "')[1].partition('"')[0]).exists()
