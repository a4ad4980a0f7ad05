"""The recipes in deploy/ do what they say, as far as that is possible without their systems."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.containers import copy_into, instructions
from support.slow import slow_but
from support.stand_ins import StandIns

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
WAIT_S = 110.0
INSTALL_S = 600.0

#: Prints the number of a task, and mode and length of the file with the secret.
PROGRAM = (
    "import os; file = os.environ['R2CC_SECRET_FILE']\n"
    "mode, text = oct(os.stat(file).st_mode), open(file).read()\n"
    "os.write(1, f\"{os.environ['SLURM_PROCID']} {mode} {len(text)}\\n\".encode())"
)


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[StandIns]:
    (tmp_path / "stand-ins").mkdir()
    made = StandIns(tmp_path / "stand-ins")
    yield made
    made.close()


def run(stand_ins: StandIns, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], cwd=stand_ins.folder.parent, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S, check=False,
        env={**os.environ, **stand_ins.variables},
    )  # fmt: skip


def test_the_script_for_slurm_starts_a_step_with_a_secret(
    stand_ins: StandIns, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    stand_ins.slurm(nnodes=1)
    script = shlex.quote(str(DEPLOY / "slurm.sbatch"))
    done = run(stand_ins, f"sbatch --nodes=1 --ntasks-per-node=2 {script} program.py")
    job = done.stdout.removeprefix("Submitted batch job ").strip()
    assert stand_ins.wait(job, WAIT_S) == 0
    written = (tmp_path / f"slurm-{job}.out").read_text()
    assert sorted(written.splitlines()) == ["0 0o100600 65", "1 0o100600 65"]
    assert not list(stand_ins.folder.glob(".r2ccl-secret*"))


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


#: Wrong recipes: the program and its arguments, the file, what is replaced, and the refusal.
WRONG = {
    "option": ("sbatch", "slurm.sbatch", ("--ntasks-per-node", "--task-per-node"),
               "unrecognized arguments: --task-per-node=4"),
    "time": ("sbatch", "slurm.sbatch", ("01:00:00", "1h"), "invalid time limit '1h'"),
    "nodes": ("sbatch", "slurm.sbatch", ("--nodes=2", "--nodes=9"), "not available"),
    "field": ("kubectl apply -f", "kubernetes-job.yaml", ("completions: 4", "completion: 4"),
              "Job.spec: unknown field 'completion'"),
    "type": ("kubectl apply -f", "kubernetes-job.yaml", ('value: "4"', "value: 4"),
             "Job.spec.template.spec.containers[0].env[0].value: 4 is no str"),
    "name": ("kubectl apply -f", "kubernetes-job.yaml", ("name: r2ccl-ranks", "name: r2ccl_ranks"),
             "'r2ccl_ranks' is no name for a service"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_recipe_that_is_wrong_is_refused(what: str, stand_ins: StandIns, tmp_path: Path) -> None:
    command, file, replaced, refusal = WRONG[what]
    if command != "sbatch":
        pytest.importorskip("yaml", reason="pyyaml is not installed: pip install --group test")
    stand_ins.slurm(nnodes=2)
    stand_ins.kubernetes({})
    text = (DEPLOY / file).read_text(encoding="utf-8")
    assert replaced[0] in text
    (tmp_path / file).write_text(text.replace(*replaced))
    done = run(stand_ins, f"{command} {file}")
    assert done.returncode != 0
    assert refusal in done.stdout
    assert not list((stand_ins.folder / "started").iterdir())


def test_pods_without_their_secret_do_not_start(stand_ins: StandIns, tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="pyyaml is not installed: pip install --group test")
    stand_ins.kubernetes({"r2ccl": tmp_path})
    manifest = shlex.quote(str(DEPLOY / "kubernetes-job.yaml"))
    assert run(stand_ins, f"kubectl apply -f {manifest}").returncode == 0
    assert stand_ins.wait("r2ccl", WAIT_S) != 0
    said = (stand_ins.folder / "control.r2ccl").read_text()
    assert said == "error: CreateContainerConfigError: no key secret in secret r2ccl\n"
